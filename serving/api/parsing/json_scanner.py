"""A scanner that follows one JSON value character by character (RFC 8259)."""

from __future__ import annotations

import re

SPACE = " \t\n\r"
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBER_CHARS = frozenset("0123456789+-.eE")
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_CLOSING = {"{": "}", "[": "]"}


class JsonScanner:
    """Finds the end of a value, and the first character that makes it invalid.

    It needs constant time per character, and memory only for the nesting.

    Attributes:
        done: the value is complete.
    """

    def __init__(self) -> None:
        self.done = False
        self._open: list[str] = []  # the closing characters of the open containers
        self._expect = "value"  # or first_item, first_key, key, colon, next, or the open scalar
        self._scalar = ""  # a number's characters so far; a literal's or escape's missing ones
        self._is_key = False

    def push(self, char: str) -> bool:
        """Take a character; returns False if the value ended before it.

        Raises:
            ValueError: no JSON value continues with this character.
        """
        if self.done:
            return False
        match self._expect:
            case "string":
                self._string(char)
            case "escape":
                self._escape(char)
            case "unicode":
                _require(char in "0123456789abcdefABCDEF")
                self._scalar = self._scalar[1:]
                self._expect = "unicode" if self._scalar else "string"
            case "literal":
                _require(char == self._scalar[0])
                self._scalar = self._scalar[1:]
                if not self._scalar:
                    self._end_value()
            case "number":
                if char in _NUMBER_CHARS:
                    self._scalar += char
                    return True
                _require(_NUMBER.fullmatch(self._scalar) is not None)
                self._end_value()
                return self.push(char)
            case _:
                if char not in SPACE:
                    self._structure(char)
        return True

    def _structure(self, char: str) -> None:
        """Take a character outside strings, numbers and literals."""
        expect = self._expect
        if expect in ("first_item", "first_key", "next") and char == self._open[-1]:
            self._open.pop()
            self._end_value()
        elif expect == "next":
            _require(char == ",")
            self._expect = "key" if self._open[-1] == "}" else "value"
        elif expect == "colon":
            _require(char == ":")
            self._expect = "value"
        elif expect in ("first_key", "key"):
            _require(char == '"')
            self._expect, self._is_key = "string", True
        else:
            self._begin_value(char)

    def _begin_value(self, char: str) -> None:
        if char in _CLOSING:
            self._open.append(_CLOSING[char])
            self._expect = "first_key" if char == "{" else "first_item"
        elif char == '"':
            self._expect, self._is_key = "string", False
        elif char in _LITERALS:
            self._expect, self._scalar = "literal", _LITERALS[char][1:]
        else:
            _require(char in "-0123456789")
            self._expect, self._scalar = "number", char

    def _end_value(self) -> None:
        self.done = not self._open
        self._expect = "next"

    def _string(self, char: str) -> None:
        if char == '"':
            if self._is_key:
                self._expect = "colon"
            else:
                self._end_value()
        elif char == "\\":
            self._expect = "escape"
        else:
            _require(char >= " ")

    def _escape(self, char: str) -> None:
        if char == "u":
            self._expect, self._scalar = "unicode", "0000"
        else:
            _require(char in '"\\/bfnrt')
            self._expect = "string"


def _require(condition: bool) -> None:
    if not condition:
        raise ValueError("this is not JSON")
