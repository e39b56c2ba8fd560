"""Sets of characters, and their texts in xgrammar's EBNF: plain, or escaped as in JSON.

A grammar for a JSON string's text is the plain text's grammar, with an escape for each character.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from weft.errors import RequestError

Writing = Literal["plain", "json"]
"""How a text is written: as it is, or inside the quotes of a JSON string."""

LAST = 0x10FFFF
BACKSLASH = "\\"
_ESCAPES = {
    **{ord(char): f"\\{char}" for char in '"\\'},
    **{ord(char): f"\\{name}" for char, name in zip("\b\f\n\r\t", "bfnrt", strict=True)},
}
"""Characters that JSON escapes, with their escapes."""
_SURROGATES = (0xD800, 0xDFFF)


class Characters:
    """A character set.

    Args:
        ranges: each range's first and last code point.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._ranges: list[tuple[int, int]] = []
        for low, high in sorted(ranges):
            if self._ranges and low <= self._ranges[-1][1] + 1:
                self._ranges[-1] = (self._ranges[-1][0], max(high, self._ranges[-1][1]))
            else:
                self._ranges.append((low, high))

    @classmethod
    def of(cls, text: str) -> Characters:
        """Return the characters in a text."""
        return cls((ord(char), ord(char)) for char in text)

    def __or__(self, other: Characters) -> Characters:
        return Characters([*self._ranges, *other._ranges])

    def __invert__(self) -> Characters:
        ends = [-1, *(end for low, high in self._ranges for end in (low - 1, high)), LAST]
        pairs = zip(ends[::2], ends[1::2], strict=True)
        return Characters((low + 1, high) for low, high in pairs if low < high)

    def __sub__(self, other: Characters) -> Characters:
        return ~(~self | other)

    def __contains__(self, code: int) -> bool:
        return any(low <= code <= high for low, high in self._ranges)

    def both_cases(self) -> Characters:
        """Return the set with both cases for its ASCII letters."""
        swapped = (chr(code).swapcase() for code in range(128) if code in self)
        return self | Characters.of("".join(swapped))

    def options(self, writing: Writing) -> list[str]:
        """Return alternative expressions for one character from the set.

        Raises:
            RequestError: the set is empty, without surrogates.
        """
        if writing == "plain":
            options = self._class()
        else:
            options = (self - _ESCAPED - _CONTROL)._class()
            if letters := "".join(text[1] for code, text in _ESCAPES.items() if code in self):
                options.append(f"{quoted(BACKSLASH)} {Characters.of(letters)._class()[0]}")
            codes = [code for code in range(0x20) if code in self and _is_rare(code)]
            if codes:
                digits = " | ".join(quoted(f"{code:02x}") for code in codes)
                options.append(f"{quoted(BACKSLASH + 'u00')} ({digits})")
        if not options:
            raise RequestError("it has an empty set of characters")
        return options

    def _class(self) -> list[str]:
        """Return the character class in a list, or an empty list for an empty set."""
        kept = self - Characters([_SURROGATES])
        if not kept._ranges:
            return []
        negated = LAST in kept
        shown = ~kept - Characters([_SURROGATES]) if negated else kept
        text = "".join(
            _code(low) if low == high else f"{_code(low)}-{_code(high)}"
            for low, high in shown._ranges
        )
        if negated and not text:
            return [f"[{_code(0)}-{_code(LAST)}]"]
        return [f"[{'^' if negated else ''}{text}]"]


_ESCAPED = Characters((code, code) for code in _ESCAPES)
_CONTROL = Characters([(0, 0x1F)])


def _code(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\U{code:08x}"


def quoted(text: str) -> str:
    """Return a text in xgrammar's EBNF quotes."""
    return '"' + "".join(char if _is_plain(char) else _code(ord(char)) for char in text) + '"'


def _is_plain(char: str) -> bool:
    return char.isascii() and char.isprintable() and char not in '"\\'


def literal(text: str, writing: Writing) -> str:
    """Return the expression for a text."""
    if writing == "json":
        text = "".join(map(_escaped, text))
    return quoted(text)


def _escaped(char: str) -> str:
    return f"{BACKSLASH}u{ord(char):04x}" if _is_rare(ord(char)) else _ESCAPES.get(ord(char), char)


def _is_rare(code: int) -> bool:
    """Return whether JSON escapes a character by its code only."""
    return code in _CONTROL and code not in _ESCAPED
