"""Reads a custom tool's text from its function's arguments."""

from __future__ import annotations

import json
import re

from weft.serving.api.parsing.tool_grammar import INPUT

_OPENING = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
# Whole characters and escapes, so that cuts in the text do not change the result. The halves of
# a surrogate pair stay together. Escapes outside JSON are read, too.
_HEX = "[0-9a-fA-F]"
_TEXT = re.compile(
    r'(?:[^"\\]'
    r"|\\[^u]"
    rf"|\\u(?![dD][89abAB]){_HEX}{{4}}"
    rf"|\\u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}"
    rf"|\\u[dD][89abAB]{_HEX}{{2}}(?=[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F])"
    rf"|\\u(?={_HEX}{{0,3}}[^0-9a-fA-F]))*"
)
_ESCAPE = re.compile(rf"((?:\\u{_HEX}{{4}})+)|\\(.)", re.DOTALL)
_LETTERS = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class ToolInput:
    """Reads `{"input": "..."}` piece by piece. Other arguments count as the text itself."""

    def __init__(self) -> None:
        self._held = ""
        self._open = False
        self._closed = False

    def push(self, arguments: str) -> str:
        """Take more arguments; returns more text."""
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
        """End the arguments; returns the held-back text."""
        if self._open:
            return ""  # the rest is at most an incomplete escape
        return self._held


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(_character, text).encode("utf-8", "replace").decode()


def _character(escape: re.Match[str]) -> str:
    codes, letter = escape.groups()
    return _LETTERS.get(letter, letter) if codes is None else str(json.loads(f'"{codes}"'))
