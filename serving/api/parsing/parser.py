"""A streaming parser that splits an answer into content, reasoning and calls.

The model's chat template shows its formats, because it writes the calls and thoughts of earlier
turns in the same form. You can also set them (`--tool-parser`, `--reasoning-parser`).

The result does not depend on where the text is cut: the pieces always join to the same answer.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from weft.serving.api.parsing.call_readers import Tools
from weft.serving.api.parsing.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    ReasoningFormat,
    ToolFormat,
    reasoning_format_in,
    tool_format_in,
)
from weft.serving.api.parsing.harmony import HarmonyParser
from weft.serving.api.parsing.pieces import Content, Piece, merged
from weft.serving.api.parsing.reasoning import ReasoningParser
from weft.serving.api.parsing.tool_calls import ToolCallParser
from weft.serving.api.parsing.tool_grammar import after_thought, final_answer
from weft.serving.engine.sampling_params import Grammar
from weft.serving.engine.tokenizer import Tokenizer


@dataclass(frozen=True)
class AnswerFormat:
    """A model's formats for calls and thoughts; None if it has none, or if the format is unknown.

    Attributes:
        tokenizer: the model's tokenizer.
        tools: name of the format for calls, in TOOL_FORMATS.
        reasoning: name of the format for thoughts, in REASONING_FORMATS.
    """

    tokenizer: Tokenizer
    tools: str | None
    reasoning: str | None

    @classmethod
    def of(cls, tokenizer: Tokenizer, tools: str = "auto", reasoning: str = "auto") -> AnswerFormat:
        """Find a model's formats.

        Args:
            tokenizer: the model's tokenizer; its chat templates decide about "auto".
            tools: "auto", "none", or a name in TOOL_FORMATS.
            reasoning: "auto", "none", or a name in REASONING_FORMATS.
        """
        templates = tokenizer.chat_templates.text
        if tools == "auto":
            tools = tool_format_in(templates)
        if reasoning == "auto":
            reasoning = reasoning_format_in(templates)
        return cls(
            tokenizer,
            None if tools == "none" else tools,
            None if reasoning == "none" else reasoning,
        )

    @cached_property
    def end_of_reasoning(self) -> int | None:
        """The only thought's end token, if the mark is a token."""
        form = self._reasoning_format
        if form is None or form.channels:
            return None
        token: int | None = self.tokenizer.backend.token_to_id(form.close)
        return token

    @cached_property
    def visible(self) -> frozenset[int]:
        """The special tokens among the formats' marks; the parser needs their text."""
        formats = (self._tool_format, self._reasoning_format)
        marks = {mark for form in formats if form is not None for mark in form.marks}
        return frozenset(
            token for text, token in self.tokenizer.mark_tokens.items() if text in marks
        )

    def in_answer(self, grammar: Grammar) -> Grammar:
        """Extend a request's grammar by the format's required text before an answer."""
        return final_answer(grammar, self.tokenizer.mark_tokens) if self._channels else grammar

    def after_thought(self, grammar: Grammar, prompt: str, continued: str | None = None) -> Grammar:
        """Extend a grammar for an answer with an optional thought before it; args as `parser`."""
        form = self._reasoning_format
        place = "after" if form is None else form.place(prompt, continued)
        if form is None or place == "after":
            return grammar
        return after_thought(grammar, form, self.tokenizer.mark_tokens, opened=place == "within")

    def count_tokens(self, text: str) -> int:
        """Count the tokens of a text."""
        return len(self.tokenizer.encode(text, add_special_tokens=False)) if text else 0

    def new_call_id(self) -> str:
        """Make an id for a call. Mistral's templates require nine letters and digits."""
        digits = secrets.token_hex(12)
        return digits[:9] if self.tools == "mistral" else f"call_{digits}"

    def parser(
        self,
        prompt: str,
        tools: Tools | None = None,
        *,
        parallel: bool = True,
        continued: str | None = None,
    ) -> AnswerParser:
        """Return a parser for one answer.

        Args:
            prompt: the prompt as the model sees it; it may end within or after a thought.
            tools: functions for the model, with their arguments' schemas; without functions,
                calls are content.
            parallel: accept several calls; else only the first call is kept.
            continued: the assistant's text for the answer to continue.
        """
        thoughts, calls = self._reasoning_format, self._tool_format if tools else None
        stages: list[Stage] = []
        if self._channels:
            offered = tools if calls is not None and calls.syntax == "harmony" else None
            channels = thoughts is not None and thoughts.channels
            stages.append(
                HarmonyParser(prompt, offered or {}, thoughts=channels, parallel=parallel)
            )
        place = "after" if thoughts is None else thoughts.place(prompt, continued)
        if thoughts is not None and not thoughts.channels:
            call = calls.mark if calls is not None and calls.ends_thought else ""
            if place != "after" or thoughts.answer[0]:
                stages.append(ReasoningParser(thoughts, place=place, call=call))
        if calls is not None and tools and calls.syntax != "harmony":
            stages.append(ToolCallParser(calls, tools, parallel=parallel))
        return AnswerParser(stages)

    @property
    def _tool_format(self) -> ToolFormat | None:
        return None if self.tools is None else TOOL_FORMATS[self.tools]

    @property
    def _reasoning_format(self) -> ReasoningFormat | None:
        return None if self.reasoning is None else REASONING_FORMATS[self.reasoning]

    @property
    def _channels(self) -> bool:
        """True if a format is harmony's: answers then are messages in channels."""
        tools, thoughts = self._tool_format, self._reasoning_format
        in_calls = tools is not None and tools.syntax == "harmony"
        return in_calls or (thoughts is not None and thoughts.channels)


class Stage(Protocol):
    """Splits a text into pieces; the next stage takes the content.

    Attributes:
        begun: the text has a thought.
    """

    begun: bool

    @property
    def held(self) -> int:
        """The number of held-back characters."""

    def push(self, text: str) -> list[Piece]:
        """Take more text; returns the certain pieces."""

    def flush(self) -> list[Piece]:
        """End the text; returns the held-back pieces."""


class AnswerParser:
    """Splits one answer: each stage splits the previous stage's content."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages

    @property
    def has_reasoning(self) -> bool:
        """True if the answer, so far, begins with a thought."""
        return any(stage.begun for stage in self._stages)

    @property
    def held(self) -> int:
        """The number of held-back characters."""
        return sum(stage.held for stage in self._stages)

    def push(self, text: str) -> list[Piece]:
        """Take more text; returns the certain pieces."""
        return merged(self._through([Content(text)], self._stages))

    def flush(self) -> list[Piece]:
        """End the answer, once, after the last push; returns the held-back pieces."""
        pieces: list[Piece] = []
        for stage in self._stages:
            pieces = [*self._through(pieces, [stage]), *stage.flush()]
        return merged(pieces)

    def _through(self, pieces: list[Piece], stages: Sequence[Stage]) -> list[Piece]:
        for stage in stages:
            found: list[Piece] = []
            for piece in pieces:
                found += stage.push(piece.text) if isinstance(piece, Content) else [piece]
            pieces = found
        return pieces
