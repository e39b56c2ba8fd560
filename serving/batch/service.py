"""The batches of a server: one after the other, on the engine that answers everyone.

    validating ──► in_progress ──► finalizing ──► completed
        │               ├──► cancelling ──► cancelled
        └─► failed      └─────────────────► expired, after 24 hours

An input file is read when the batch is made; with a line that is no request for the endpoint, or a
custom_id that comes twice, the batch fails and nothing is run. Rows wait while others need the
engine: they leave some of its places free, and have the lowest priority. What is done is in the
batch's journal (see journal.py), so a server that was killed goes on where it was. One that drains
begins no more rows.

Everything here runs on the server's event loop; what takes time on the disk, in threads.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Coroutine, Iterator
from contextlib import closing, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from weft.errors import EngineError, RequestError, WeftError
from weft.serving.batch.inputs import Inputs
from weft.serving.batch.job import Job, LeftOut
from weft.serving.batch.journal import Journal
from weft.serving.batch.local import LocalApi
from weft.serving.batch.objects import (
    BatchError,
    BatchErrors,
    BatchObject,
    FileObject,
    RequestCounts,
    new_id,
    now,
)
from weft.serving.batch.rows import parse
from weft.serving.batch.store import Store

if TYPE_CHECKING:
    from weft.serving.api.state import ServerState
    from weft.serving.engine import AsyncEngine

WINDOW = 24 * 3600  # seconds that a batch has
PRIORITY = 2**31 - 1  # of rows: all that has another one goes first
MAX_ERRORS = 50  # of an input file that are shown
POLL = 0.02  # seconds between two looks at whether the engine has room
_EXPIRED = ("batch_expired", "the row was not run within the completion window")

End = Literal["completed", "cancelled", "expired"]

logger = logging.getLogger(__name__)


class BatchService:
    """The batches of one server.

    Args:
        server: whose routes answer the rows.
        folder: for the store; None is a temporary one, which ends with the server.
    """

    def __init__(self, server: ServerState, folder: Path | None) -> None:
        self._server = server
        self._folder = folder
        self._changed = asyncio.Event()
        self._changing = asyncio.Lock()  # of a batch's status
        self._tasks: set[asyncio.Task[None]] = set()
        self._busy: set[str] = set()  # batches whose journal is open
        self._runner: asyncio.Task[None] | None = None
        self._current: _Running | None = None
        self._unread: list[BatchObject] = []  # that a server before has left so
        self._ending = False

    @cached_property
    def store(self) -> Store:
        """Made when it is first needed; ConfigError as `Store`."""
        if self._folder is not None:
            return Store(self._folder)
        return Store(Path(tempfile.mkdtemp(prefix="weft-")))

    def open(self) -> None:
        """Take the folder that was asked for, if one was; ConfigError as `Store`."""
        if self._folder is not None:
            unfinished = self.store.unfinished()
            self._unread = [batch for batch in unfinished if batch.status == "validating"]

    def start(self, engine: AsyncEngine) -> None:
        """Run the batches from now on, also those that a server before has left."""
        for batch in self._unread:
            self._spawn(self._validate(batch))
        self._runner = asyncio.create_task(self._run(engine))

    def drain(self) -> None:
        """Begin no more rows."""
        self._ending = True
        self._changed.set()
        if self._current is not None:
            self._current.job.stop()

    async def close(self) -> None:
        """End, with all that is answered written. The engine must have ended what it had."""
        self.drain()
        if self._runner is not None:
            await self._runner
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if "store" in self.__dict__:
            self.store.close()
            if self._folder is None:
                await asyncio.to_thread(shutil.rmtree, self.store.folder)

    # What clients ask.

    async def create(self, batch: BatchObject) -> None:
        """Begin a new batch; WeftError when the disk is full."""
        await asyncio.to_thread(self.store.update, [batch])
        self._spawn(self._validate(batch))

    async def cancel(self, id: str) -> BatchObject:
        """End a batch; what is answered stays.

        Raises:
            RequestError: 404, there is none; 409, it has ended.
        """
        async with self._changing:
            batch = self.store.batch(id)
            if batch.status in ("cancelling", "cancelled"):
                return self.shown(batch)
            if batch.status not in ("validating", "in_progress"):
                raise RequestError(
                    f"batch {id} is {batch.status}; it cannot be cancelled", status=409
                )
            batch = replace(batch, status="cancelling", cancelling_at=now())
            await asyncio.to_thread(self.store.update, [batch])
        if self._current is not None and self._current.id == id:
            self._current.task.cancel()
        elif id not in self._busy:
            self._spawn(self._advance(batch, None))
        return self.shown(batch)

    def shown(self, batch: BatchObject) -> BatchObject:
        """With the rows that are done by now."""
        if self._current is not None and self._current.id == batch.id:
            return replace(batch, request_counts=self._current.counts)
        return batch

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a batch waits: %s", error)  # for the runner, which tries again
        self._changed.set()

    # Validation.

    async def _validate(self, batch: BatchObject) -> None:
        """Read the input, and have the batch run or fail."""
        self._busy.add(batch.id)
        try:
            total, errors = await asyncio.to_thread(self._read, batch)
        except LeftOut:
            return
        except WeftError as error:
            total, errors = 0, [BatchError("cannot_be_read", str(error))]
        finally:
            self._busy.discard(batch.id)
        async with self._changing:
            batch = self.store.batch(batch.id)
            if batch.status == "validating":
                if errors:
                    failed = BatchErrors(errors)
                    batch = replace(batch, status="failed", errors=failed, failed_at=now())
                else:
                    counts = RequestCounts(total)
                    batch = replace(
                        batch, status="in_progress", in_progress_at=now(), request_counts=counts
                    )
                await asyncio.to_thread(self.store.update, [batch])
        if batch.status == "failed":
            await asyncio.to_thread(self.store.clean, batch.id)
        elif batch.status == "cancelling":  # meanwhile
            await self._advance(batch, None)

    def _read(self, batch: BatchObject) -> tuple[int, list[BatchError]]:
        """Begin the journal; the number of rows, and what is wrong with them."""
        errors: list[BatchError] = []
        inputs = self._inputs(batch)

        def rows() -> Iterator[tuple[int, str, str | None]]:
            for line in inputs:
                if self._ending:
                    raise LeftOut
                row = parse(line, self._server.model)
                problem = row.problem
                if row.simple:
                    problem = f"{line.place}: custom_id is missing"
                elif problem is None and row.url != batch.endpoint:
                    problem = f"{line.place}: url is {row.url!r}; the endpoint is {batch.endpoint}"
                if problem is not None:
                    errors.append(BatchError("invalid_request", problem, line.index + 1))
                if len(errors) == MAX_ERRORS:
                    return
                yield line.index, line.place, row.custom_id

        with closing(self._journal(batch)) as journal:
            journal.begin({}, rows())
            twice = journal.duplicates(0, 2**62, most=MAX_ERRORS)
            for index, first in twice.items():
                problem = f"line {index + 1}: its custom_id is that of {first}"
                errors.append(BatchError("duplicate_custom_id", problem, index + 1, "custom_id"))
            if not errors and journal.total == 0:
                errors.append(BatchError("empty_file", "the input file has no requests"))
            return journal.total, sorted(errors, key=lambda error: error.line or 0)[:MAX_ERRORS]

    def _inputs(self, batch: BatchObject) -> Inputs:
        return Inputs([self.store.content(batch.input_file_id)])

    def _journal(self, batch: BatchObject) -> Journal:
        folder = self.store.batch_folder(batch.id)
        folder.mkdir(exist_ok=True)
        return Journal(folder / "state", [folder / "output", folder / "errors"])

    # Running.

    async def _run(self, engine: AsyncEngine) -> None:
        while not self._ending:
            self._changed.clear()
            try:
                batch = self._next()
                if batch is None:
                    await self._changed.wait()
                else:
                    await self._advance(batch, engine)
                continue
            except EngineEnded:
                return  # and so does the server
            except WeftError as error:
                logger.error("batches wait: %s", error)
            except Exception:  # a fault of ours, of which nobody would hear
                logger.exception("batches wait")
            with suppress(TimeoutError):  # until there is room on the disk, or another batch
                await asyncio.wait_for(self._changed.wait(), 10.0)

    def _next(self) -> BatchObject | None:
        """What to do next: end what is cancelled, else the oldest batch."""
        if self._folder is None and "store" not in self.__dict__:
            return None
        batches = [
            batch
            for batch in self.store.unfinished()
            if batch.status != "validating" and batch.id not in self._busy
        ]
        return next((b for b in batches if b.status == "cancelling"), next(iter(batches), None))

    async def _advance(self, batch: BatchObject, engine: AsyncEngine | None) -> None:
        """Bring a batch to its end, or as far as it comes before the server's.

        Args:
            batch: as it stands in the store.
            engine: for its rows, if they are to be run.

        Raises:
            EngineEnded: the engine has ended.
            WeftError: the disk is full.
        """
        self._busy.add(batch.id)
        try:
            with closing(await asyncio.to_thread(self._opened, batch)) as journal:
                end: End = "completed"
                if batch.status == "in_progress" and engine is not None:
                    end = await self._answer(batch, journal, engine)
                async with self._changing:
                    batch = self.store.batch(batch.id)
                    if batch.status == "cancelling":
                        end = "cancelled"
                    elif sum(journal.counts()) < journal.total:
                        return  # the server ends
                    await asyncio.to_thread(self._finalize, batch, journal, end)
        finally:
            self._busy.discard(batch.id)
        await asyncio.to_thread(self.store.clean, batch.id)

    def _opened(self, batch: BatchObject) -> Journal:
        journal = self._journal(batch)
        try:
            journal.recover()
            journal.open()
        except WeftError:
            journal.close()
            raise
        return journal

    async def _answer(self, batch: BatchObject, journal: Journal, engine: AsyncEngine) -> End:
        """Run the rows that are left; how that ended."""
        inputs = self._inputs(batch)
        completed, failed = journal.counts()
        counts = RequestCounts(journal.total, completed, failed)

        def on_done(status: int, tokens: int) -> None:
            counts.completed += status == 200
            counts.failed += status != 200

        def job(refusal: tuple[str, str] | None = None) -> Job:
            return Job(
                inputs,
                journal,
                model=self._server.model,
                seed=engine.config.seed,
                overrides={"priority": PRIORITY},
                refusal=refusal,
                on_done=on_done,
            )

        feeder = _Feeder(self._server, engine)
        running = job()
        task = asyncio.create_task(running.run(feeder.post, feeder.workers))
        self._current = _Running(batch.id, running, task, counts)
        if self.store.batch(batch.id).status == "cancelling":  # before this was set
            task.cancel()
        if self._ending:
            running.stop()
        try:
            async with asyncio.timeout(batch.expires_at - now()):
                await task
        except TimeoutError:
            await job(_EXPIRED).run(feeder.post, feeder.workers)
            return "expired"
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            return "cancelled"
        finally:
            self._current = None
        return "completed"

    def _finalize(
        self,
        batch: BatchObject,
        journal: Journal,
        end: End,
    ) -> None:
        """End a batch: its outputs become files."""
        completed, failed = journal.counts()
        counts = RequestCounts(journal.total, completed, failed)
        if end == "completed":
            batch = replace(batch, status="finalizing", finalizing_at=now(), request_counts=counts)
            self.store.update([batch])
        files = []
        ids: list[str | UnsetType] = []
        for path, rows in zip(journal.paths, (completed, failed), strict=True):
            if rows == 0:
                ids.append(UNSET)
                continue
            name = f"{batch.id}_{path.name}.jsonl"
            file = FileObject(new_id("file-"), path.stat().st_size, name, "batch_output", now())
            files.append((file, path))
            ids.append(file.id)
        output, errors = ids
        batch = replace(
            batch,
            status=end,
            request_counts=counts,
            output_file_id=output,
            error_file_id=errors,
            **{f"{end}_at": now()},
        )
        self.store.update([batch], files)


class EngineEnded(Exception):  # noqa: N818  # the server says what it is
    """There is no engine any more, for this server."""


class _Running:
    """The batch that is run now."""

    def __init__(self, id: str, job: Job, task: asyncio.Task[None], counts: RequestCounts) -> None:
        self.id, self.job, self.task, self.counts = id, job, task, counts


class _Feeder:
    """Gives rows to the engine while it has room beyond what it keeps for others.

    Attributes:
        workers: rows at once: of eight places one stays free.
    """

    def __init__(self, server: ServerState, engine: AsyncEngine) -> None:
        from weft.serving.api.app import local_app

        places = engine.config.dp * engine.info.max_num_seqs
        self.workers = max(1, places - max(1, places // 8))
        self._server = server
        self._engine = engine
        self._api = LocalApi(local_app(server))
        self._turn = asyncio.Lock()
        # What makes the engine fail does so to all that it has; they are told apart one by one.
        self._alone = asyncio.Lock()

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """The answer to a row.

        When the engine fails and is started again, so is the row; one that it fails with once
        more gets the error.

        Raises:
            LeftOut: the server ends.
            EngineEnded: the engine has ended.
        """
        from weft.serving.api.errors import describe

        restarts = self._engine.restarts
        try:
            return await self._post(path, body)
        except EngineError:
            while self._engine.status == "ready" and self._engine.restarts == restarts:
                await asyncio.sleep(POLL)  # until it is known to have failed
        try:
            async with self._alone:
                return await self._post(path, body)
        except EngineError as error:
            status, answer = describe(error)
            return status, msgspec.json.encode(answer)

    async def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """The same; EngineError when the engine has failed, and may serve again."""
        await self._until_there_is_room()
        try:
            return await self._api.post(path, body)
        except EngineError:
            if self._server.draining:
                raise LeftOut from None
            raise

    async def _until_there_is_room(self) -> None:
        async with self._turn:
            while self._engine.status != "ready" or self._engine.live >= self.workers:
                if self._server.draining:
                    raise LeftOut
                if self._engine.status in ("dead", "stalled"):
                    raise EngineEnded
                await asyncio.sleep(POLL)
            await asyncio.sleep(0)  # the row before is now counted
