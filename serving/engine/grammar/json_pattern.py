"""Patterns of JSON strings, kept to characters that stand for themselves between quotes.

xgrammar puts a pattern between quotes as it is, so one that matches a quote, a backslash or a
control character would write what is no JSON. Here `.`, `[^...]` and `\\s` lose those characters;
where they are asked for by themselves, the pattern is refused.
"""

from __future__ import annotations

_ESCAPED = '"\\'
_NONE_OF = r"\"\\\x00-\x1f"
PLAIN = f"[^{_NONE_OF}]"
"""Any character that stands for itself."""


def plain(pattern: str) -> str:
    """A pattern that matches a part of what the given one does, all of it plain.

    Raises:
        ValueError: it asks for other characters; the message says for which.
    """
    written: list[str] = []
    in_class = False
    place = 0
    while place < len(pattern):
        char = pattern[place]
        place += 1
        if char == "\\" and place < len(pattern):
            written.append(_escape(pattern[place]))
            place += 1
        elif char == '"' or ord(char) < 0x20:
            raise ValueError(repr(char))
        elif in_class:
            if char == "-" and _spans(pattern[place - 2], pattern[place : place + 1]):
                raise ValueError(f"a range with {_ESCAPED[0]!r}, {_ESCAPED[1]!r} or control codes")
            in_class = char != "]"
            written.append(char)
        elif char == "[":
            in_class = True
            negated = pattern.startswith("^", place)
            written.append(f"[^{_NONE_OF}" if negated else "[")
            place += negated
        else:
            written.append(PLAIN if char == "." else char)
    return "".join(written)


def _escape(char: str) -> str:
    if char == "s":
        return " "
    if char in 'SWDnrtfvxuc0"\\':
        raise ValueError(f"\\{char}")
    return f"\\{char}"


def _spans(first: str, last: str) -> bool:
    """Whether a range has a character that JSON would escape."""
    if last in ("", "]"):  # a hyphen
        return False
    return first < " " or any(first <= char <= last for char in _ESCAPED)
