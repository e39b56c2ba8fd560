"""Separates a model's thought from its answer: `<think>...</think>` at the start of the output.

A chat template may write the opening text at the end of the prompt; the output then begins within
the thought. Whitespace beside the texts belongs to neither. A thought without an end is the whole
output. In some families a call also ends a thought, or the answer stands between texts of its own:
`<answer>...</answer>`. Later marks are text.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.serving.api.parsing.formats import Place, ReasoningFormat
from weft.serving.api.parsing.pieces import Content, Piece, Reasoning, split_at


class ReasoningParser:
    """Splits an output into thought and content.

    Args:
        form: the format.
        place: where the output begins: before a thought, within it, or after it.
        call: the mark before calls, if it also ends a thought; else empty.

    Attributes:
        begun: the output has a thought.
    """

    def __init__(self, form: ReasoningFormat, *, place: Place, call: str = "") -> None:
        self.begun = place == "within"
        self._form = form
        self._call = call
        self._wait = ""
        first = {"before": self._start, "within": self._thought, "after": self._after}
        self._push: Callable[[str], list[Piece]] = first[place]
        self._trim = place == "within"  # drop whitespace until the next text

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
        return self._content(wait)

    def _start(self, text: str) -> list[Piece]:
        """Take text before a thought."""
        text, mark = self._wait + text, self._form.open
        if self._waits(mark, text):
            return []
        if not text.lstrip().startswith(mark):
            self._push = self._after
            return self._after(text)
        self._push, self._trim, self.begun = self._thought, True, True
        return self._thought(text.lstrip()[len(mark) :])

    def _thought(self, text: str) -> list[Piece]:
        text = self._trimmed(self._wait + text)
        before, self._wait, after = split_at(text, self._form.close, self._call)
        if after is None:
            return [Reasoning(before)]
        self._wait = ""
        self._push, self._trim = self._after, True
        return [Reasoning(before), *self._after(after)]

    def _after(self, text: str) -> list[Piece]:
        """Take text after a thought and before the answer."""
        text, (mark, _) = self._wait + text, self._form.answer
        if self._waits(mark, text):
            return []
        if not mark or not text.lstrip().startswith(mark):
            self._push = self._content
            return self._content(text)
        self._push, self._trim = self._answer, True
        return self._answer(text.lstrip()[len(mark) :])

    def _answer(self, text: str) -> list[Piece]:
        """Take text between the texts around an answer."""
        text = self._trimmed(self._wait + text)
        before, self._wait, after = split_at(text, self._form.answer[1])
        if after is None:
            return [Content(before)]
        self._wait = ""
        self._push, self._trim = self._content, True
        return [Content(before), *self._content(after)]

    def _content(self, text: str) -> list[Piece]:
        return [Content(self._trimmed(text))]

    def _waits(self, mark: str, text: str) -> bool:
        """Hold a text back as long as it may become a mark."""
        seen = text.lstrip()
        waits = len(seen) < len(mark) and mark.startswith(seen)
        self._wait = text if waits else ""
        return waits

    def _trimmed(self, text: str) -> str:
        """Remove whitespace at the beginning, if that is still to be dropped."""
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return text
