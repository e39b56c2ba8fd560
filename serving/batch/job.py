"""One run over the rows of a batch that are left, with the engine full throughout.

A row is a request of the HTTP API without the socket: its body goes to the same
routes, so it is checked, answered and refused in the same words. Lines are read
as the engine has room for them (see window.py), and answers are on the disk
within a second (see journal.py), so memory does not grow with the batch. Both is done in threads.

When the engine fails, the rows that it had are noted in the journal, for one of them may be why.
From then on, in later runs too, each of them is alone in the engine, so that the guilty one is
found: with `MAX_TRIES` failures, a row gets an error instead of an answer.

Rows of a batch go into the engine as that has room for what they ask for.

A row begins, in its turn, when there is room for one answer. Each of its answers then waits for
room of its own, so one that asks for many gets on however busy the engine is, and nobody waits
until there is room for all of them at once. Answers that wait take memory: no row begins while
those of the rows before that wait would fill the engine.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec.structs import replace

from weft.errors import EngineError
from weft.serving.batch.files import SAMPLED, Inputs, Row, answered, answers, parse, refused
from weft.serving.batch.journal import Answer, Journal, Line, Writer
from weft.serving.engine.admission import POLL, Admission, for_each

if TYPE_CHECKING:
    from weft.serving.engine.engine import AsyncEngine

MAX_TRIES = 2  # failures of the engine with a row that are enough
_BLOCK = 4096  # rows whose state is looked up at once
_AHEAD = 256, 1 << 20  # rows, and bytes of lines, that are read at once


class LeftOut(Exception):  # noqa: N818  # it is none
    """Raised in the place of an answer: the row is for the next run."""


class EngineEnded(EngineError):  # noqa: N818  # the server says what it is
    """There is no engine any more; the row was not in it."""


Post = Callable[[str, bytes, int, Callable[[], None]], Coroutine[Any, Any, tuple[int, bytes]]]


class Job:
    """The rows of a batch and where their answers go.

    Args:
        inputs: the rows.
        journal: begun, and open. Of its files the first is for answers; the last for errors.
        model: that answers rows which name none.
        seed: of the first row that brings none; the others' follow, so that a file has the same
            answers in each run, and resumed.
        ordered: write answers in the order of the rows.
        overrides: fields that every request gets, whatever it says.
        refusal: code and message of the error that all rows get that are left, instead of answers.
        retries: whether a row with which the engine fails is run again, as soon as it serves again;
            else the run ends.
        on_done: called when an answer is on the disk, with its HTTP status and its output tokens.
    """

    def __init__(
        self,
        inputs: Inputs,
        journal: Journal,
        *,
        model: str,
        seed: int,
        ordered: bool = False,
        overrides: dict[str, Any] | None = None,
        refusal: tuple[str, str] | None = None,
        retries: bool = False,
        on_done: Callable[[int, int], None] = lambda status, tokens: None,
    ) -> None:
        self._inputs = inputs
        self._journal = journal
        self._model = model
        self._seed = seed
        self._ordered = ordered
        self._overrides = overrides or {}
        self._refusal = refusal
        self._retries = retries
        self._on_done = on_done
        self._stopped = False
        self._failures: dict[int, int] = {}  # of the engine, with each row that is not done
        self._in_engine: set[int] = set()
        self._engine_is_gone = False
        # Rows are in the engine together, but for those with which it has failed.
        self._gate = asyncio.Lock()
        self._together = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def stop(self) -> None:
        """Begin no more rows; `run` returns when those that have begun are done."""
        self._stopped = True

    async def run(self, post: Post, workers: int) -> None:
        """Answer every row that is not done.

        When it is cancelled or fails, what has been answered is still written.

        Args:
            post: the status and the body of the answer to a path and a body, which asks for so many
                answers; calls its last argument when the row goes into the engine. Raises `LeftOut`
                for a row that is not to be answered now, EngineError when the engine has failed
                with it.
            workers: rows at a time.

        Raises:
            ConfigError, DiskError: rows cannot be read, or answers not be written.
            EngineError: the engine has failed.
        """
        self._failures = await asyncio.to_thread(self._journal.failures)
        writer = Writer(self._journal, ordered=self._ordered, on_done=self._on_done)
        writing = asyncio.create_task(writer.run())

        async def work(item: tuple[int, Row]) -> None:
            turn, row = item
            try:
                status, body, line = await self._answer(row, post)
            except LeftOut:
                return
            tokens = msgspec.json.decode(body, type=_Counted).usage.completion_tokens
            file = 0 if status == 200 else len(self._journal.paths) - 1
            data = msgspec.json.encode(line) + b"\n"
            await writer.add(turn, Line(Answer(row.index, file, data), status, tokens))

        try:
            await for_each(self._rows(), work, workers=workers)
        except EngineError:
            self._has_failed(list(self._in_engine))  # and were cancelled before they heard of it
            raise
        finally:
            await _to_its_end(self._close(writer, writing))

    async def _close(self, writer: Writer, writing: asyncio.Task[None]) -> None:
        writer.close()
        await writing
        await asyncio.to_thread(self._journal.note_failures, self._failures)

    async def _answer(self, row: Row, post: Post) -> tuple[int, bytes, dict[str, Any]]:
        if row.problem is not None:
            return 400, b"{}", refused(row)
        try:
            seed = {"seed": self._seed + row.index} if row.url in SAMPLED else {}
            data = msgspec.json.encode(seed | row.body | self._overrides)
        except RecursionError:  # where it was read there was a little more room for that
            return 400, b"{}", refused(replace(row, problem="the line is nested too deeply"))
        while (failures := self._failures.get(row.index, 0)) < MAX_TRIES:
            try:
                async with self._turn(alone=failures > 0):
                    status, body = await self._given(row, data, post)
                return status, body, answered(row, status, body)
            except EngineError as error:
                if not self._retries or isinstance(error, EngineEnded):
                    raise
        problem = f"the engine has failed {failures} times with this row"
        return 500, b"{}", refused(replace(row, code="engine_failed", problem=problem))

    async def _given(self, row: Row, data: bytes, post: Post) -> tuple[int, bytes]:
        if self._engine_is_gone:
            raise LeftOut
        begun = partial(self._in_engine.add, row.index)
        try:
            answer = await post(row.url, data, answers(row.body), begun)
        except (LeftOut, EngineEnded):
            self._in_engine.discard(row.index)
            raise
        except EngineError:
            # To be run again without end is for no row, whatever the engine fails with.
            if self._retries or row.index in self._in_engine:
                self._has_failed([row.index])
            self._engine_is_gone = not self._retries
            raise
        self._in_engine.discard(row.index)
        return answer

    def _has_failed(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._failures[row] = self._failures.get(row, 0) + 1
        self._in_engine.difference_update(rows)

    @asynccontextmanager
    async def _turn(self, *, alone: bool) -> AsyncIterator[None]:
        """A row may be in the engine: with others, or when they are through and before the next."""
        async with self._gate:
            if alone:
                await self._idle.wait()
                yield
                return
            self._together += 1
            self._idle.clear()
        try:
            yield
        finally:
            self._together -= 1
            if self._together == 0:
                self._idle.set()

    def _rows(self) -> _Ahead:
        return _Ahead(self._blocks(), lambda: self._stopped)

    def _blocks(self) -> Iterator[list[tuple[int, Row]]]:
        """Rows that are not done, with their turns, as many at once as are read ahead."""
        block, size = list[tuple[int, Row]](), 0
        for turn, (row, length) in enumerate(self._left()):
            block.append((turn, row))
            size += length
            if len(block) == _AHEAD[0] or size >= _AHEAD[1]:
                yield block
                block, size = [], 0
        yield block

    def _left(self) -> Iterator[tuple[Row, int]]:
        """Rows that are not done, and how long they are. No row of a block has begun when its state
        is looked up.
        """
        block_end, done, duplicates = 0, set[int](), dict[int, str]()
        for line in self._inputs:
            if self._stopped:
                return
            if line.index >= block_end:
                block = line.index, line.index + _BLOCK
                done, duplicates = self._journal.done(*block), self._journal.duplicates(*block)
                block_end = line.index + _BLOCK
            if line.index in done:
                continue
            row = parse(line, self._model)
            if line.index in duplicates:
                problem = f"{line.place}: custom_id {row.id!r} is that of {duplicates[line.index]}"
                row = replace(row, problem=problem, code="duplicate_custom_id")
            if self._refusal is not None:
                row = replace(row, code=self._refusal[0], problem=self._refusal[1])
            yield row, len(line.data or b"")


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Await work that is never cancelled; who waits for it is, when it is done."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled


class _Ahead:
    """The rows of blocks, which are read in a thread. Several may ask at once."""

    def __init__(
        self, blocks: Iterator[list[tuple[int, Row]]], stopped: Callable[[], bool]
    ) -> None:
        self._blocks = blocks
        self._stopped = stopped
        self._rows = deque[tuple[int, Row]]()
        self._reading = asyncio.Lock()

    def __aiter__(self) -> AsyncIterator[tuple[int, Row]]:
        return self

    async def __anext__(self) -> tuple[int, Row]:
        async with self._reading:
            if not self._rows:
                self._rows.extend(await asyncio.to_thread(next, self._blocks, ()))
            if not self._rows or self._stopped():
                raise StopAsyncIteration
            return self._rows.popleft()


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Counted(msgspec.Struct):
    """The part of a response that says how many tokens it took."""

    usage: _Usage = msgspec.field(default_factory=_Usage)


class Server(Protocol):
    """What batches need of the server whose routes answer their rows.

    Attributes:
        model: the model's name in the API.
        draining: the server was told to end: no row begins any more.
    """

    model: str
    draining: bool

    async def answer_row(
        self, path: str, body: bytes, admitted: Callable[[], Awaitable[None]]
    ) -> tuple[int, bytes]:
        """The status and body of the API's response; each answer first awaits `admitted`.

        Raises:
            EngineError: the engine cannot serve, or has failed with all its requests.
        """


class Feeder:
    """See the module's text.

    Args:
        server: whose routes answer the rows.
        engine: of the server.
        most: requests that the engine may have when another answer goes there.
    """

    def __init__(self, server: Server, engine: AsyncEngine, most: int) -> None:
        self._server = server
        self._engine = engine
        self._most = most
        self._admission = Admission(engine, most)
        self._turn = asyncio.Lock()
        self._waiting = 0  # answers, of rows that have begun

    async def post(
        self, path: str, body: bytes, answers: int, begun: Callable[[], None]
    ) -> tuple[int, bytes]:
        """The API's answer to a row, which asks for so many answers; see `Job.run`.

        Raises:
            LeftOut: the server ends.
            EngineEnded: the engine has ended.
            EngineError: it has failed with this row, and may serve again.
        """
        await self._until_it_may_begin()
        self._waiting += answers
        left = answers

        async def admitted() -> None:
            nonlocal left
            await self._admission.wait()
            begun()
            if left:
                left -= 1
                self._waiting -= 1

        try:
            return await self._server.answer_row(path, body, admitted)
        except EngineError:
            if self._server.draining:
                raise LeftOut from None
            raise
        finally:
            self._waiting -= left

    async def _until_it_may_begin(self) -> None:
        async with self._turn:
            while self._waiting >= self._most or not self._admission.open:
                if self._server.draining:
                    raise LeftOut
                if self._engine.status in ("dead", "stalled"):
                    why = self._engine.failure or f"the engine is {self._engine.status}"
                    raise EngineEnded(str(why))
                await asyncio.sleep(POLL)
