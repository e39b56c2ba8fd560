"""What a model thinks, told from what it says: `<think>...</think>` at the start of an answer.

Templates may write the opening mark at the end of the prompt, so that the answer begins with a
thought. Whitespace beside the marks is no part of either text. A thought that has no end is all
of the answer. Marks further on are text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.serving.api.parsing.pieces import Content, Piece, Reasoning, split_at


@dataclass(frozen=True)
class ReasoningFormat:
    """The marks around a thought."""

    open: str
    close: str

    def opened_by(self, prompt: str) -> bool:
        """Whether the prompt ends within a thought: with the opening mark."""
        return prompt.rstrip().endswith(self.open)


REASONING_FORMATS = {
    "think": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}


class ReasoningParser:
    """Splits an answer.

    Args:
        form: the marks.
        opened: the prompt ends within the thought.

    Attributes:
        begun: there is a thought.
    """

    def __init__(self, form: ReasoningFormat, *, opened: bool) -> None:
        self.begun = opened
        self._form = form
        self._wait = ""
        self._push: Callable[[str], list[Piece]] = self._thought if opened else self._start
        self._trim = opened  # whitespace at the beginning of what comes

    def push(self, text: str) -> list[Piece]:
        """The pieces that are certain now."""
        return self._push(text)

    def flush(self) -> list[Piece]:
        """What was held back; the answer ends."""
        wait, self._wait = self._wait, ""
        if self._push == self._thought:
            return [Reasoning(wait.rstrip())]
        return [] if self._trim else [Content(wait)]

    def _start(self, text: str) -> list[Piece]:
        text = self._wait + text
        seen = text.lstrip()
        mark = self._form.open
        if len(seen) < len(mark) and mark.startswith(seen):
            self._wait = text
            return []
        self._wait = ""
        if not seen.startswith(mark):
            self._push = self._content
            return [Content(text)]
        self._push, self._trim, self.begun = self._thought, True, True
        return self._thought(seen[len(mark) :])

    def _thought(self, text: str) -> list[Piece]:
        before, self._wait, after = split_at(self._trimmed(self._wait + text), self._form.close)
        if after is None:
            return [Reasoning(before)]
        self._wait = ""
        self._push, self._trim = self._content, True
        return [Reasoning(before), *self._content(after)]

    def _content(self, text: str) -> list[Piece]:
        return [Content(self._trimmed(text))]

    def _trimmed(self, text: str) -> str:
        """Without whitespace at its beginning, while that is still to be left out."""
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return text
