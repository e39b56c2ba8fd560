"""Reads a checkpoint's next bytes into the page cache while the loader packs the present ones.

A thread asks the system for the chunks that follow the loader's position in the files, up to AHEAD
bytes, with posix_fadvise (POSIX.1-2008; POSIX_FADV_WILLNEED). Several chunks are then under way at
once. Nothing is copied: the loader maps the same pages. The system may drop them, and bounds them.

The thread reads nothing itself, so it has no errors: if a file cannot be read, the loader's own
access reports the file and the tensor.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

AHEAD = 256 * 2**20
"""Bytes under way after the loader's position."""
CHUNK = 8 * 2**20
"""Bytes in one request."""


class Span(NamedTuple):
    """Bytes in a file, from `start` up to `stop`."""

    file: Path
    start: int
    stop: int


class ReadAhead:
    """Asks the system for spans, in the files' order.

    Args:
        spans: what the loader will read; they may overlap.
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        self._chunks = _chunks(sorted(spans))
        self._is_asked = [False] * len(self._chunks)
        self._at = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def at(self, span: Span) -> None:
        """Tell that the loader begins to read a span."""
        with self._changed:
            self._at = max(0, bisect_right(self._chunks, (span.file, span.start + 1)) - 1)
            self._changed.notify()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the thread; it has ended when the context ends."""
        thread = threading.Thread(target=self._run, name="weft-read-ahead", daemon=True)
        thread.start()
        try:
            yield
        finally:
            with self._changed:
                self._is_closed = True
                self._changed.notify()
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._next() is not None)
                if self._is_closed or (index := self._next()) is None:
                    return
                self._is_asked[index] = True
            _ask(self._chunks[index])

    def _next(self) -> int | None:
        """Return the first chunk near the loader's position that was not asked for."""
        left = AHEAD
        for index in range(self._at, len(self._chunks)):
            chunk = self._chunks[index]
            if (left := left - (chunk.stop - chunk.start)) < 0:
                return None
            if not self._is_asked[index]:
                return index
        return None


def _chunks(spans: Sequence[Span]) -> list[Span]:
    """Join neighbouring spans, and cut them into chunks."""
    joined: list[Span] = []
    for span in spans:
        last = joined[-1] if joined else None
        if last is not None and last.file == span.file and span.start <= last.stop:
            joined[-1] = last._replace(stop=max(last.stop, span.stop))
        else:
            joined.append(span)
    return [
        Span(file, at, min(at + CHUNK, stop))
        for file, start, stop in joined
        for at in range(start, stop, CHUNK)
    ]


def _ask(chunk: Span) -> None:
    with suppress(OSError):  # the loader's own read names the file and the tensor
        descriptor = os.open(chunk.file, os.O_RDONLY)
        try:
            os.posix_fadvise(
                descriptor, chunk.start, chunk.stop - chunk.start, os.POSIX_FADV_WILLNEED
            )
        finally:
            os.close(descriptor)
