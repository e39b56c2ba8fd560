"""A streaming parser that splits an answer into content, reasoning and calls.

The model's chat template shows its formats, because it writes the calls and thoughts of earlier
turns in the same form. You can also set them (`--tool-parser`, `--reasoning-parser`).

The result does not depend on where the text is cut: the pieces always join to the same answer.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from weft.serving.api.parsing.pieces import Content, Piece, merged
from weft.serving.api.parsing.reasoning import (
    REASONING_FORMATS,
    ReasoningFormat,
    ReasoningParser,
)
from weft.serving.api.parsing.tool_calls import TOOL_FORMATS, ToolCallParser, ToolFormat
from weft.serving.api.parsing.tool_grammar import after_thought
from weft.serving.engine.sampling_params import Grammar
from weft.serving.engine.tokenizer import Tokenizer

# A format for calls, a text in the templates that use it, and a text that excludes it.
_TOOL_SIGNS = (
    ("mistral", "[TOOL_CALLS]", None),
    ("hermes", "<tool_call>", "<function="),
    ("pythonic", "[func_name1(", None),
    ("llama3_json", '"parameters": dictionary', None),
)


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
        templates = tokenizer.chat_templates
        if tools == "auto":
            signs = (
                name
                for name, sign, other in _TOOL_SIGNS
                if templates.contain(sign) and (other is None or not templates.contain(other))
            )
            tools = next(signs, "none")
        if reasoning == "auto":
            forms = REASONING_FORMATS.items()
            reasoning = next(
                (name for name, form in forms if templates.contain(form.close)), "none"
            )
        return cls(
            tokenizer,
            None if tools == "none" else tools,
            None if reasoning == "none" else reasoning,
        )

    @cached_property
    def end_of_reasoning(self) -> int | None:
        """The token that ends a thought, if the mark is a token."""
        form = self._reasoning_format
        return None if form is None else self.tokenizer.backend.token_to_id(form.close)

    @cached_property
    def visible(self) -> frozenset[int]:
        """The special tokens among the formats' marks; the parser needs their text."""
        marks = _marks(self._tool_format, self._reasoning_format)
        return frozenset(
            token for text, token in self.tokenizer.mark_tokens.items() if text in marks
        )

    def after_thought(self, grammar: Grammar, prompt: str, continued: str | None = None) -> Grammar:
        """Extend a grammar for an answer that may begin with a thought; args as `parser`."""
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
        tool_names: Collection[str] = (),
        *,
        parallel: bool = True,
        continued: str | None = None,
    ) -> AnswerParser:
        """Return a parser for one answer.

        Args:
            prompt: the prompt as the model sees it; it may end within or after a thought.
            tool_names: functions for the model; without functions, calls are content.
            parallel: accept several calls; else only the first call is kept.
            continued: the assistant's text that the answer continues.
        """
        reasoning, tools = self._reasoning_format, self._tool_format
        place = "after" if reasoning is None else reasoning.place(prompt, continued)
        return AnswerParser(
            None
            if reasoning is None or place == "after"
            else ReasoningParser(reasoning, opened=place == "within"),
            None
            if tools is None or not tool_names
            else ToolCallParser(tools, tool_names, parallel=parallel),
        )

    @property
    def _tool_format(self) -> ToolFormat | None:
        return None if self.tools is None else TOOL_FORMATS[self.tools]

    @property
    def _reasoning_format(self) -> ReasoningFormat | None:
        return None if self.reasoning is None else REASONING_FORMATS[self.reasoning]


def _marks(tools: ToolFormat | None, reasoning: ReasoningFormat | None) -> set[str | None]:
    marks: set[str | None] = set()
    if tools is not None:
        marks |= {tools.open, tools.close, *tools.more_marks}
    if reasoning is not None:
        marks |= {reasoning.open, reasoning.close}
    return marks


class AnswerParser:
    """Splits one answer: first thought and rest, then the rest into content and calls."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolCallParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def has_reasoning(self) -> bool:
        """True if the answer, so far, begins with a thought."""
        return self._reasoning is not None and self._reasoning.begun

    def push(self, text: str) -> list[Piece]:
        """Take more text; returns the pieces that are certain."""
        if self._reasoning is None:
            return merged(self._without_calls([Content(text)]))
        return merged(self._without_calls(self._reasoning.push(text)))

    def flush(self) -> list[Piece]:
        """End the answer, once, after the last push; returns the pieces that were held back."""
        pieces = [] if self._reasoning is None else self._reasoning.flush()
        pieces = self._without_calls(pieces)
        return merged(pieces if self._tools is None else [*pieces, *self._tools.flush()])

    def _without_calls(self, pieces: list[Piece]) -> list[Piece]:
        if self._tools is None:
            return pieces
        found: list[Piece] = []
        for piece in pieces:
            found += self._tools.push(piece.text) if isinstance(piece, Content) else [piece]
        return found
