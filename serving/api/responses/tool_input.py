"""Reads the text for a tool from the arguments of the function that stands for the tool."""

from __future__ import annotations

import json
import re

from weft.serving.api.parsing.tool_grammar import INPUT

_OPENING = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
# Whole characters and escapes. The halves of a surrogate pair stay together.
_TEXT = re.compile(
    r'(?:[^"\\]|\\(?!u).|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*",
    re.DOTALL,
)


class ToolInput:
    """Reads `{"input": "..."}` piece by piece. Other arguments count as the text itself."""

    def __init__(self) -> None:
        self._held = ""
        self._open = False
        self._closed = False

    def push(self, arguments: str) -> str:
        """Take more arguments; returns more of the text."""
        if self._closed:
            return ""
        self._held += arguments
        if not self._open:
            if (opening := _OPENING.match(self._held)) is None:
                return ""
            self._open, self._held = True, self._held[opening.end() :]
        found = _TEXT.match(self._held)
        assert found is not None  # it also matches nothing
        self._held = self._held[found.end() :]
        self._closed = self._held.startswith('"')
        return _unescaped(found[0])

    def flush(self) -> str:
        """End the arguments; returns the text that was held back."""
        if self._open:
            return ""  # the rest is at most a part of an escape
        return self._held


def _unescaped(text: str) -> str:
    try:
        found: str = json.loads(f'"{text}"', strict=False)
    except ValueError:  # an escape that JSON does not have
        return text
    return found.encode("utf-8", "replace").decode()
