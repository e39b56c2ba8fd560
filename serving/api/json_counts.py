"""Counts the values in a JSON text, before Python builds anything from it.

The time and the memory to read a body grow with the number of its values. A few megabytes may
contain millions of values. Counting takes little time and memory. Escapes in texts and long numbers
also take much time for their length, and so do texts outside ASCII.

The limits keep the reader below about 30 ms: no other thread runs meanwhile.
"""

from __future__ import annotations

from typing import NamedTuple

from weft.errors import RequestError

_CHUNK = 1 << 16  # bytes; other threads run between two chunks


class Counts(NamedTuple):
    """Counts for a JSON text.

    Attributes:
        containers: objects and lists.
        texts: strings, including field names.
        values: all values; field names do not count.
        escapes: such as \\n and \\u00e9 in texts.
        wide: bytes of characters outside ASCII.
    """

    containers: int = 0
    texts: int = 0
    values: int = 0
    escapes: int = 0
    wide: int = 0


LEAST = Counts(containers=1 << 14, texts=1 << 16, values=1 << 18, escapes=1 << 20, wide=8 << 20)
"""Maximum numbers in a body for a model with a short context."""
MOST = Counts(containers=1 << 15, texts=1 << 17, values=5 << 18, escapes=1 << 20, wide=8 << 20)
"""The same for a model with a long context."""
_NAMES = ("objects and lists", "texts", "values", "escapes", "bytes outside ASCII")
MAX_DIGITS = 400
"""Maximum digits in a number: reading takes the square of their number. No double has more."""
_DIGITS = bytes(ord("0") if chr(byte) in "0123456789" else ord(" ") for byte in range(256))
_ASCII = bytes(range(128))


def limits(context: int) -> Counts:
    """Return the maximum numbers in a body for a model whose context has this many tokens.

    A prompt of 1.3 million token ids is within the limits of a model that can read it.
    """
    enough = Counts(containers=context // 8, texts=context // 2, values=2 * context)
    return Counts(*map(min, MOST, map(max, LEAST, enough)))


def count(data: bytes, most: Counts) -> Counts:
    """Count the values in a JSON text; in an invalid text, only up to the fault.

    Raises:
        RequestError: the text has more than `most` allows, or a number is too long.
    """
    found = Counts(values=1)
    inside = start = 0  # inside is 1 in a string
    while start < len(data):
        chunk = data[start : start + _CHUNK]
        backslashes = len(chunk) - len(chunk.rstrip(b"\\"))
        if backslashes % 2 and start + len(chunk) < len(data):
            chunk = chunk[:-1]  # the next chunk begins with the whole escape
        start += len(chunk)
        escapes = 0
        if b"\\" in chunk:
            size = len(chunk)
            chunk = chunk.replace(b"\\\\", b"")
            escapes = (size - len(chunk)) // 2 + chunk.count(b"\\")
            chunk = chunk.replace(b'\\"', b"")
        parts = chunk.split(b'"')
        outside = b"".join(parts[inside::2])
        quotes = len(parts) - 1
        opened = outside.count(b"[") + outside.count(b"{")
        found = Counts(
            found.containers + opened,
            found.texts + (quotes + 1 - inside) // 2,  # strings that begin here
            found.values + opened + outside.count(b","),
            found.escapes + escapes,
            found.wide + (0 if chunk.isascii() else len(chunk.translate(None, _ASCII))),
        )
        if b"0" * MAX_DIGITS in outside.translate(_DIGITS):
            raise RequestError(
                f"the body has a number with {MAX_DIGITS} or more digits", code="body_too_complex"
            )
        inside ^= quotes & 1
        for number, limit, name in zip(found, most, _NAMES, strict=True):
            if number > limit:
                raise RequestError(
                    f"the body has more than {limit:,} {name}; send less in one request",
                    code="body_too_complex",
                )
    return found
