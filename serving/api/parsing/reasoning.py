"""Separates a model's thought from its answer: `<think>...</think>` at the start of the output.

A chat template may write the opening mark at the end of the prompt; the output then begins within
the thought. Whitespace beside the marks belongs to neither text. A thought without an end is the
whole output. Later marks are text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from weft.serving.api.parsing.pieces import Content, Piece, Reasoning, split_at

Place = Literal["before", "within", "after"]


@dataclass(frozen=True)
class ReasoningFormat:
    """The marks around a thought."""

    open: str
    close: str

    def opened_by(self, prompt: str) -> bool:
        """Return whether the prompt ends with the opening mark, so within a thought."""
        return prompt.rstrip().endswith(self.open)

    def place(self, prompt: str, continued: str | None = None) -> Place:
        """Return where an answer begins: before a thought, within it, or after it.

        Args:
            prompt: the prompt as the model sees it. It has the whole thought if a template
                switches thinking off by an empty thought.
            continued: the assistant's text that the answer continues, at the prompt's end.
        """
        if continued is not None:
            opened = continued.rfind(self.open) > continued.rfind(self.close)
            return "within" if opened else "after"
        if self.opened_by(prompt):
            return "within"
        return "after" if prompt.rstrip().endswith(self.close) else "before"


REASONING_FORMATS = {
    "think": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}


def within_thought(prompt: str) -> bool:
    """Return whether the prompt ends with the opening mark of any format."""
    return any(form.opened_by(prompt) for form in REASONING_FORMATS.values())


class ReasoningParser:
    """Splits an output into thought and content.

    Args:
        form: the marks.
        opened: the prompt ends within the thought.

    Attributes:
        begun: the output has a thought.
    """

    def __init__(self, form: ReasoningFormat, *, opened: bool) -> None:
        self.begun = opened
        self._form = form
        self._wait = ""
        self._push: Callable[[str], list[Piece]] = self._thought if opened else self._start
        self._trim = opened  # drop whitespace until the next text

    def push(self, text: str) -> list[Piece]:
        """Take more text; returns the pieces that are certain."""
        return self._push(text)

    def flush(self) -> list[Piece]:
        """End the output; returns the pieces that were held back."""
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
        """Remove whitespace at the beginning, if that is still to be dropped."""
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return text
