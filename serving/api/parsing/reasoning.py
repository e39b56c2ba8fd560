"""Separates a model's thought from its answer: `<think>...</think>` at the start of the output.

A chat template may write the opening text at the end of the prompt; the output then begins within
the thought. Whitespace beside the texts belongs to neither. A thought without an end is the whole
output. In some families a call also ends a thought. Later marks are text.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.serving.api.parsing.formats import ReasoningFormat
from weft.serving.api.parsing.pieces import Content, Piece, Reasoning, split_at


class ReasoningParser:
    """Splits an output into thought and content.

    Args:
        form: the format.
        opened: the prompt ends within the thought.
        call: the mark before calls, if it also ends a thought; else empty.

    Attributes:
        begun: the output has a thought.
    """

    def __init__(self, form: ReasoningFormat, *, opened: bool, call: str = "") -> None:
        self.begun = opened
        self._form = form
        self._call = call
        self._wait = ""
        self._push: Callable[[str], list[Piece]] = self._thought if opened else self._start
        self._trim = opened  # drop whitespace until the next text

    @property
    def held(self) -> int:
        """The number of held-back characters."""
        return len(self._wait)

    def push(self, text: str) -> list[Piece]:
        """Take more text; returns the certain pieces."""
        return self._push(text)

    def flush(self) -> list[Piece]:
        """End the output; returns the held-back pieces."""
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
        text = self._trimmed(self._wait + text)
        before, self._wait, after = split_at(text, self._form.close, self._call)
        if after is None:
            return [Reasoning(before)]
        self._wait = ""
        self._push, self._trim = self._content, True
        return [Reasoning(before), *self._content(after)]

    def _content(self, text: str) -> list[Piece]:
        return [Content(self._trimmed(text))]

    def _trimmed(self, text: str) -> str:
        """Remove whitespace at the beginning, if that is still to be dropped."""
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return text
