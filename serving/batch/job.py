"""Run the pending rows of a batch, and keep the engine full.

A row is a request to the HTTP API without a socket: the same routes validate and answer it.
`Feeder` admits rows when the engine has room. The journal writes answers to the disk within a
second. Threads read and write files. Memory does not grow with the batch.

If the engine fails, any current row may be the cause, so the journal counts a failure for each.
Later, also in later runs, each of these rows runs alone in the engine. This finds the guilty row:
after `MAX_TRIES` failures, a row gets an error instead of an answer.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec.structs import replace

from weft.errors import EngineError, WeftError
from weft.serving.batch.files import (
    SAMPLED,
    Inputs,
    Row,
    answer_line,
    count_answers,
    error_line,
    parse,
)
from weft.serving.batch.journal import Answer, Journal, Line, Writer
from weft.serving.engine.admission import POLL, Admission, for_each

if TYPE_CHECKING:
    from weft.serving.engine.engine import AsyncEngine

MAX_TRIES = 2  # engine failures with a row before the row gets an error
ALIKE = 100  # first rows; if all have the same error, the run ends
_LOOKUP = 4096  # rows per query of the journal
_READ_AHEAD = 256, 1 << 20  # maximum rows, and bytes of lines, to read at once


class RowPostponed(Exception):  # noqa: N818  # not an error
    """Raised instead of an answer: the next run answers the row."""


class EngineEnded(EngineError):  # noqa: N818  # the server reports the error
    """Raised when the engine has ended for good and did not have the row."""


class RowsFailAlike(WeftError):  # noqa: N818  # names the event
    """Raised when a batch's first rows all failed with the same error."""


Post = Callable[[str, bytes, int, Callable[[], None]], Coroutine[Any, Any, tuple[int, bytes]]]


class Job:
    """A run over the rows of a batch.

    Args:
        inputs: input files with the rows.
        journal: open journal. Answers go to its first file, errors to its last.
        model: model for rows that name none.
        seed: seed for the first row, if it has none; each further row's is larger by one. So a file
            gets the same answers in each run, also in a resumed one.
        ordered: write answers in the order of the rows.
        overrides: fields to set in every request.
        refusal: code and message for an error that all pending rows get, instead of answers.
        stop_if_alike: end the run if the first `ALIKE` of more rows fail with the same error.
        retries: run a row again after the engine failed with it and has restarted; else the run
            ends.
        on_done: called with the HTTP status and output tokens of each answer on the disk.
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
        stop_if_alike: bool = False,
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
        self._alike = _Alike(stops=journal.total > ALIKE) if stop_if_alike else None
        self._retries = retries
        self._on_done = on_done
        self._stopped = False
        self._failures: dict[int, int] = {}  # row that is not done -> engine failures
        self._in_engine: set[int] = set()
        self._engine_failed = False
        # Rows share the engine, except rows with which it has failed.
        self._gate = asyncio.Lock()
        self._together = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def common_error(self) -> str | None:
        """The error of the first `ALIKE` rows, or of all; None if they differ or one succeeded.

        It is also None without `stop_if_alike`.
        """
        return None if self._alike is None else self._alike.error

    def stop(self) -> None:
        """Start no more rows; `run` returns when the started ones are done."""
        self._stopped = True

    async def run(self, post: Post, workers: int) -> None:
        """Answer every pending row.

        After a cancellation or a failure, answers so far are still written.

        Args:
            post: posts a body to a path, and returns the response's status and body. It gets the
                number of answers, and a function to call when the row enters the engine. It raises
                `RowPostponed` if the row must wait for the next run, EngineError if the engine
                failed.
            workers: maximum number of rows at a time.

        Raises:
            ConfigError, DiskError: a row cannot be read, or an answer cannot be written.
            EngineError: the engine failed.
            RowsFailAlike: see `stop_if_alike`; the errors are written.
        """
        self._failures = await asyncio.to_thread(self._journal.failures)
        writer = Writer(self._journal, ordered=self._ordered, on_done=self._on_done)
        writing = asyncio.create_task(writer.run())

        async def work(item: tuple[int, Row]) -> None:
            order, row = item
            try:
                status, body, line = await self._answer(row, post)
            except RowPostponed:
                return
            outcome = _outcome.decode(body)
            file = 0 if status == 200 else len(self._journal.paths) - 1
            answer = Answer(row.index, file, msgspec.json.encode(line) + b"\n")
            await writer.add(order, Line(answer, status, outcome.usage.tokens))
            if self._alike is not None:
                self._alike.note(order, outcome.error)

        try:
            await for_each(self._rows(), work, workers=workers)
        except EngineError:
            self._count_failures(list(self._in_engine))  # rows whose tasks were cancelled
            raise
        finally:
            await _run_uncancelled(self._close(writer, writing))

    async def _close(self, writer: Writer, writing: asyncio.Task[None]) -> None:
        writer.close()
        await writing
        await asyncio.to_thread(self._journal.note_failures, self._failures)

    async def _answer(self, row: Row, post: Post) -> tuple[int, bytes, dict[str, Any]]:
        if row.problem is not None:
            return _refuse(400, row)
        try:
            seed = {"seed": self._seed + row.index} if row.url in SAMPLED else {}
            data = msgspec.json.encode(seed | row.body | self._overrides)
        except RecursionError:  # the encoder's limit is lower than the decoder's
            return _refuse(400, replace(row, problem="the line is nested too deeply"))
        while (failures := self._failures.get(row.index, 0)) < MAX_TRIES:
            try:
                async with self._share_engine(alone=failures > 0):
                    status, body = await self._post_row(row, data, post)
                return status, body, answer_line(row, status, body)
            except EngineError as error:
                if not self._retries or isinstance(error, EngineEnded):
                    raise
        problem = f"the engine failed {failures} times with this row"
        return _refuse(500, replace(row, code="engine_failed", problem=problem))

    async def _post_row(self, row: Row, data: bytes, post: Post) -> tuple[int, bytes]:
        if self._engine_failed:
            raise RowPostponed
        started = partial(self._in_engine.add, row.index)
        try:
            answer = await post(row.url, data, count_answers(row.body), started)
        except (RowPostponed, EngineEnded):
            self._in_engine.discard(row.index)
            raise
        except EngineError:
            # With retries, count every failure: no row may be repeated without end.
            if self._retries or row.index in self._in_engine:
                self._count_failures([row.index])
            self._engine_failed = not self._retries
            raise
        self._in_engine.discard(row.index)
        return answer

    def _count_failures(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._failures[row] = self._failures.get(row, 0) + 1
        self._in_engine.difference_update(rows)

    @asynccontextmanager
    async def _share_engine(self, *, alone: bool) -> AsyncIterator[None]:
        """Wait until a row may enter the engine: with others, or alone between the others."""
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

    def _rows(self) -> _ReadAhead:
        return _ReadAhead(self._chunks(), lambda: self._stopped)

    def _chunks(self) -> Iterator[list[tuple[int, Row]]]:
        """Yield lists of pending rows, each with its position in the output's order."""
        chunk, size = list[tuple[int, Row]](), 0
        for order, (row, length) in enumerate(self._pending_rows()):
            chunk.append((order, row))
            size += length
            if len(chunk) == _READ_AHEAD[0] or size >= _READ_AHEAD[1]:
                yield chunk
                chunk, size = [], 0
        yield chunk

    def _pending_rows(self) -> Iterator[tuple[Row, int]]:
        """Yield pending rows, with the lengths of their lines.

        A query to the journal covers a chunk of rows, and runs before any of them starts.
        """
        chunk_end, done, duplicates = 0, set[int](), dict[int, str]()
        for line in self._inputs:
            if self._stopped:
                return
            if line.index >= chunk_end:
                chunk = line.index, line.index + _LOOKUP
                done, duplicates = self._journal.done(*chunk), self._journal.duplicates(*chunk)
                chunk_end = line.index + _LOOKUP
            if line.index in done:
                continue
            row = parse(line, self._model)
            if line.index in duplicates:
                problem = f"{line.place}: custom_id {row.id!r} is that of {duplicates[line.index]}"
                row = replace(row, problem=problem, code="duplicate_custom_id")
            if self._refusal is not None:
                row = replace(row, code=self._refusal[0], problem=self._refusal[1])
            yield row, len(line.data or b"")


def _refuse(status: int, row: Row) -> tuple[int, bytes, dict[str, Any]]:
    """Return a faulty row's outcome, as `Job._answer` does."""
    error = _Error(row.problem or "", row.code)
    return status, msgspec.json.encode({"error": error}), error_line(row)


async def _run_uncancelled(work: Coroutine[Any, Any, None]) -> None:
    """Await work to its end, and only then let a cancellation through."""
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


class _ReadAhead:
    """An async iterator over chunks, which a thread reads. Several tasks may use it."""

    def __init__(
        self, chunks: Iterator[list[tuple[int, Row]]], stopped: Callable[[], bool]
    ) -> None:
        self._chunks = chunks
        self._stopped = stopped
        self._rows = deque[tuple[int, Row]]()
        self._reading = asyncio.Lock()

    def __aiter__(self) -> AsyncIterator[tuple[int, Row]]:
        return self

    async def __anext__(self) -> tuple[int, Row]:
        async with self._reading:
            if not self._rows:
                self._rows.extend(await asyncio.to_thread(next, self._chunks, ()))
            if not self._rows or self._stopped():
                raise StopAsyncIteration
            return self._rows.popleft()


class _Usage(msgspec.Struct):
    completion_tokens: int = 0  # OpenAI's name
    output_tokens: int = 0  # Anthropic's

    @property
    def tokens(self) -> int:
        return self.completion_tokens + self.output_tokens


class _Error(msgspec.Struct):
    message: str = ""
    code: str | None = None


class _Outcome(msgspec.Struct):
    """A response's token counts or its error."""

    usage: _Usage = msgspec.field(default_factory=_Usage)
    error: _Error | None = None


_outcome = msgspec.json.Decoder(_Outcome)


class _Alike:
    """Notices when the first rows all fail with the same error, apart from its numbers.

    Args:
        stops: raise an error then.

    Attributes:
        error: the first row's error, while all rows so far are alike.
    """

    def __init__(self, *, stops: bool) -> None:
        self.error: str | None = None
        self._stops = stops
        self._first: tuple[str | None, str] | None = None
        self._left = ALIKE
        self._differs = False

    def note(self, order: int, error: _Error | None) -> None:
        """Note a row's outcome.

        Args:
            order: the row's position in the batch.
            error: its error; None if it was answered.

        Raises:
            RowsFailAlike: the first `ALIKE` rows are all noted, their errors are alike, and this
                stops the run.
        """
        if order >= ALIKE or self._differs:
            return
        kind = None if error is None else (error.code, re.sub(r"\d+", "0", error.message))
        self._first = self._first or kind
        self._differs = kind is None or kind != self._first
        self._left -= 1
        if error is None or self._differs:
            self.error = None
            return
        self.error = self.error or error.message
        if self._stops and self._left == 0:
            raise RowsFailAlike(
                f"the first {ALIKE} rows all failed alike: {error.message}; correct the rows and "
                "start again with --overwrite, or run the others with --resume"
            )


class Server(Protocol):
    """The interface of a server whose routes answer rows.

    Attributes:
        model: the model's name in the API.
        draining: whether the server is shutting down; then no row starts.
    """

    model: str
    draining: bool

    async def answer_row(
        self, path: str, body: bytes, admitted: Callable[[], Awaitable[None]]
    ) -> tuple[int, bytes]:
        """Return the status and body of the API's response; await `admitted` before each answer.

        Raises:
            EngineError: the engine cannot serve, or failed with all its requests.
        """


class Feeder:
    """Admission for rows: a row enters when the engine has room for its answers.

    A row starts when there is room for one answer. Its other answers wait for room one by one. So a
    row with many answers makes progress in a busy engine, and no row waits until all its answers
    fit. Waiting answers take memory: no row starts while waiting answers would fill the engine.

    Args:
        server: server whose routes answer the rows.
        engine: the server's engine.
        limit: maximum number of requests in the engine, with the next answer.
    """

    def __init__(self, server: Server, engine: AsyncEngine, limit: int) -> None:
        self._server = server
        self._engine = engine
        self._limit = limit
        self._admission = Admission(engine, limit)
        self._order = asyncio.Lock()
        self._waiting = 0  # answers of started rows that the engine does not have yet

    async def post(
        self, path: str, body: bytes, answers: int, started: Callable[[], None]
    ) -> tuple[int, bytes]:
        """Return the API's response to a row with `answers` answers; see `Job.run`.

        Raises:
            RowPostponed: the server shuts down.
            EngineEnded: the engine has ended.
            EngineError: the engine failed with this row, and may serve again.
        """
        await self._wait_to_begin()
        self._waiting += answers
        left = answers

        async def admitted() -> None:
            nonlocal left
            await self._admission.wait()
            started()
            if left:
                left -= 1
                self._waiting -= 1

        try:
            return await self._server.answer_row(path, body, admitted)
        except EngineError:
            if self._server.draining:
                raise RowPostponed from None
            raise
        finally:
            self._waiting -= left

    async def _wait_to_begin(self) -> None:
        async with self._order:
            while self._waiting >= self._limit or not self._admission.open:
                if self._server.draining:
                    raise RowPostponed
                if self._engine.status in ("dead", "stalled"):
                    why = self._engine.failure or f"the engine is {self._engine.status}"
                    raise EngineEnded(str(why))
                await asyncio.sleep(POLL)
