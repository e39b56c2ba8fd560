"""Counts what a JSON text contains, before anything is built from it.

Reading a body takes about as long, and as much memory, as it has values. A body of a few megabytes
may have millions of them. The count needs neither much time nor memory.
"""

from __future__ import annotations

from typing import NamedTuple

from weft.errors import RequestError

_CHUNK = 1 << 16  # bytes; other threads run between two chunks


class Counts(NamedTuple):
    """Numbers of values in a JSON text.

    Attributes:
        containers: objects and lists.
        texts: strings, with the names of fields.
        values: all values; names of fields do not count.
    """

    containers: int = 0
    texts: int = 0
    values: int = 0


LIMITS = Counts(containers=1 << 15, texts=1 << 17, values=1 << 21)
"""Maximum numbers in a body. A prompt of two million token ids is within the limits."""
_NAMES = Counts("objects and lists", "texts", "values")  # type: ignore[arg-type]


def count(data: bytes) -> Counts:
    """Count the values in a JSON text. Of an invalid text, it counts what is before the fault.

    Raises:
        RequestError: the text has more than `LIMITS` allows.
    """
    found = Counts(values=1)
    inside = start = 0  # inside is 1 in a string
    while start < len(data):
        chunk = data[start : start + _CHUNK]
        backslashes = len(chunk) - len(chunk.rstrip(b"\\"))
        if backslashes % 2 and start + len(chunk) < len(data):
            chunk = chunk[:-1]  # the next chunk begins with the whole escape
        start += len(chunk)
        if b"\\" in chunk:
            chunk = chunk.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = chunk.split(b'"')
        outside = b"".join(parts[inside::2])
        quotes = len(parts) - 1
        opened = outside.count(b"[") + outside.count(b"{")
        found = Counts(
            found.containers + opened,
            found.texts + (quotes + 1 - inside) // 2,  # strings that begin here
            found.values + opened + outside.count(b","),
        )
        inside ^= quotes & 1
        for number, most, name in zip(found, LIMITS, _NAMES, strict=True):
            if number > most:
                raise RequestError(
                    f"the body has more than {most:,} {name}; send less in one request",
                    code="body_too_complex",
                )
    return found
