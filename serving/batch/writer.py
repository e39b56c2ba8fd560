"""Answers go to the journal in groups, by a thread, in their order or as they come."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import msgspec

from weft.serving.batch.journal import Answer, Journal

GROUP_SECONDS = 1.0  # that an answer waits at most until it is on the disk
GROUP_BYTES = 1 << 20  # of lines that make a group before that
HELD_BYTES = 64 << 20  # of lines that wait for one before them, with `ordered`


class Line(msgspec.Struct):
    """A line of output with the answer's HTTP status and output tokens."""

    answer: Answer
    status: int
    tokens: int


class Writer:
    """Gathers lines, and has the journal write them in groups, in a thread."""

    def __init__(
        self, journal: Journal, *, ordered: bool, on_done: Callable[[int, int], None]
    ) -> None:
        self._journal = journal
        self._ordered = ordered
        self._on_done = on_done
        self._lines: list[Line] = []
        self._bytes = 0
        self._held: dict[int, Line] = {}
        self._held_bytes = 0
        self._turn = 0
        self._wake = asyncio.Event()
        self._closed = False
        self._failure: Exception | None = None
        self._room: deque[asyncio.Future[None]] = deque()

    async def add(self, turn: int, line: Line) -> None:
        """Take a line, once there is room for it.

        Args:
            turn: of the line, counted from 0 without a gap; what is ordered is written by it.

        Raises:
            WeftError: lines cannot be written any more.
        """
        if self._ordered:
            # The line whose turn it is never waits here, so the others do not for ever.
            await self._until(lambda: turn == self._turn or self._held_bytes < HELD_BYTES)
            self._held[turn] = line
            self._held_bytes += len(line.answer.line)
            while (line_now := self._held.pop(self._turn, None)) is not None:
                self._turn += 1
                self._held_bytes -= len(line_now.answer.line)
                self._take(line_now)
            self._let_in()
        else:
            self._take(line)
        await self._until(lambda: self._bytes < GROUP_BYTES)

    def _take(self, line: Line) -> None:
        self._lines.append(line)
        self._bytes += len(line.answer.line)
        if self._bytes >= GROUP_BYTES:
            self._wake.set()

    async def run(self) -> None:
        """Write groups until `close`. Raises WeftError when one cannot be written."""
        try:
            while not self._closed:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), GROUP_SECONDS)
                self._wake.clear()
                await self._commit()
            await self._commit()
        except Exception as error:
            self._failure = error
            raise
        finally:
            self._closed = True
            self._let_in()

    async def _commit(self) -> None:
        if not self._lines:
            return
        lines, self._lines, self._bytes = self._lines, [], 0
        self._let_in()
        await asyncio.to_thread(self._journal.append, [line.answer for line in lines])
        for line in lines:
            self._on_done(line.status, line.tokens)

    def close(self) -> None:
        """Have `run` write what there is, and return."""
        self._closed = True
        self._wake.set()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds() or self._failure is not None:
            if self._failure is not None:
                raise self._failure
            waiter = asyncio.get_running_loop().create_future()
            self._room.append(waiter)
            await waiter

    def _let_in(self) -> None:
        while self._room:
            waiter = self._room.popleft()
            if not waiter.done():
                waiter.set_result(None)
