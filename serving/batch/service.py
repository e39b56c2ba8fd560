"""The server's batches: one at a time, on the engine that also answers live requests.

    validating ──► in_progress ──► finalizing ──► completed
        │               ├──► cancelling ──► cancelled
        │               └─────────────────► expired, after 24 hours
        └──► failed ◄── from every state, on an error that a retry cannot fix

A new batch's input file is read at once. If a line is no request for the endpoint, or a custom_id
repeats, the batch fails and no row runs. The batch's journal records the rows that are done, so
batches continue after a crash. A draining server starts no more rows.

Two workers share the batches by status: one validates inputs and ends cancelled batches, the other
has rows answered (`Runner`). Each works on one batch at a time, and ignores the other's. An error
affects only its own batch: the batch is tried again later if that may help (a full disk), until it
expires; else it fails.

All code runs on the server's event loop; slow disk work runs in threads.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Container, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from weft.errors import ConfigError, DiskError, RequestError, WeftError
from weft.serving.batch.files import Inputs, parse
from weft.serving.batch.job import EngineEnded, Feeder, Job, RowPostponed, Server
from weft.serving.batch.journal import Journal
from weft.serving.batch.objects import (
    LIVE,
    BatchError,
    BatchErrors,
    BatchObject,
    BatchStatus,
    RequestCounts,
    now,
)
from weft.serving.batch.storage import (
    ANYONE,
    Ending,
    Store,
    end_batch,
    make_journal,
    open_inputs,
    open_journal,
    reopen_journal,
)
from weft.serving.engine.admission import width_beside_others

if TYPE_CHECKING:
    from weft.serving.batch.storage import Store
    from weft.serving.engine.engine import AsyncEngine

RETRY = 10.0  # seconds between two attempts, such as after a full disk

Work = Callable[[BatchObject], Awaitable[None]]

logger = logging.getLogger(__name__)


class BatchService:
    """The batches of one server.

    Args:
        server: server whose routes answer the rows.
        folder: folder for the store; None makes a temporary one, deleted with the server.
    """

    def __init__(self, server: Server, folder: Path | None) -> None:
        self._server = server
        self._folder = folder
        self._store: Store | None = None
        self._store_lock = threading.Lock()
        self._runner: Runner | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._wakes: list[asyncio.Event] = []
        self._taken: set[str] = set()  # batches that a worker has
        self._cancelled: set[str] = set()  # batches to give up
        self._retry_at: dict[str, float] = {}  # batch -> time.monotonic() of the next attempt
        self._draining = False

    @property
    def store(self) -> Store:
        """Store, made at the first use; raises as `Store`. Do not use on the event loop."""
        with self._store_lock:
            if self._store is None:
                self._store = Store(self._folder or Path(tempfile.mkdtemp(prefix="weft-")))
            return self._store

    def open(self) -> None:
        """Open the folder, if one was given; raises as `Store`."""
        if self._folder is not None:
            _ = self.store

    def start(self, engine: AsyncEngine) -> None:
        """Start to work on batches, including those of an earlier server."""
        runner = self._runner = Runner(self._server, engine, self._cancelled)

        async def run(batch: BatchObject) -> None:
            await runner.run(self.store, batch)

        self._start_worker(("cancelling", "validating"), self._validate_or_cancel)
        self._start_worker(("finalizing", "in_progress"), run)

    def drain(self) -> None:
        """Start no more rows."""
        self._draining = True
        self._wake()
        if self._runner is not None:
            self._runner.stop()

    async def close(self) -> None:
        """End, after all answers are written. The engine must have ended its requests before."""
        self.drain()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._store is not None:
            await asyncio.to_thread(self._store.close)
            if self._folder is None:
                await asyncio.to_thread(shutil.rmtree, self._store.folder)

    # Called by routes.

    async def create(self, batch: BatchObject, owner: str) -> None:
        """Add a new batch.

        Raises:
            RequestError: the owner has no such input file.
            DiskError: the disk is full.
        """
        await asyncio.to_thread(lambda: self.store.add_batch(batch, owner))
        self._wake()

    async def cancel(self, id: str, owner: str) -> BatchObject:
        """Cancel a batch; answers so far stay.

        Raises:
            RequestError: 404, the owner has no such batch; 409, it has ended or was cancelled.
            DiskError: the disk is full.
        """
        batch = await asyncio.to_thread(lambda: self.store.change(id, _cancelling, owner))
        if batch.status == "cancelling":
            self._cancelled.add(id)
        if self._runner is not None:
            self._runner.cancel(id)
        self._wake()
        return self.with_progress(batch)

    def with_progress(self, batch: BatchObject) -> BatchObject:
        """Return the batch with the current counts of rows."""
        counts = None if self._runner is None else self._runner.counts(batch.id)
        return batch if counts is None else replace(batch, request_counts=counts)

    # Workers.

    def _start_worker(self, statuses: tuple[BatchStatus, ...], work: Work) -> None:
        wake = asyncio.Event()
        self._wakes.append(wake)
        self._tasks.append(asyncio.create_task(self._run_worker(statuses, work, wake)))

    def _wake(self) -> None:
        for wake in self._wakes:
            wake.set()

    async def _run_worker(
        self, statuses: tuple[BatchStatus, ...], work: Work, wake: asyncio.Event
    ) -> None:
        """Work on one batch after another, in order of status and age."""
        while not (self._draining or self._server.draining):
            wake.clear()
            try:
                if await self._work_once(statuses, work):
                    continue
            except EngineEnded:
                return  # the server ends, too
            except Exception:  # the store cannot be read, or weft has a bug
                logger.exception("batches are paused")
            with suppress(TimeoutError):
                await asyncio.wait_for(wake.wait(), RETRY)

    async def _work_once(self, statuses: tuple[BatchStatus, ...], work: Work) -> bool:
        """Work on the next batch; return whether there was one."""
        if self._folder is None and self._store is None:
            return False
        await asyncio.to_thread(lambda: self.store.remove_expired())
        waiting = {id for id, until in self._retry_at.items() if until > time.monotonic()}
        others = self._taken | waiting
        batch = await asyncio.to_thread(lambda: self.store.next(statuses, others))
        if batch is None:
            return False
        if batch.id in self._taken:  # the other worker took it meanwhile
            return True
        self._taken.add(batch.id)
        try:
            await self._process(batch, work)
        finally:
            self._taken.discard(batch.id)
            self._cancelled.discard(batch.id)
            self._wake()  # its new status may concern the other worker
        return True

    async def _process(self, batch: BatchObject, work: Work) -> None:
        """Work on a batch, and note an error. Raises EngineEnded."""
        self._retry_at.pop(batch.id, None)
        try:
            failure = await self._run_work(batch, work)
            if failure is not None:
                await asyncio.to_thread(self._fail, batch, failure)
        except EngineEnded:
            raise
        except DiskError as error:
            logger.error("batch %s is paused: %s", batch.id, error)
            self._retry_at[batch.id] = time.monotonic() + RETRY
        except Exception:  # the batch cannot even be ended
            logger.exception("batch %s is paused", batch.id)
            self._retry_at[batch.id] = time.monotonic() + RETRY

    async def _run_work(self, batch: BatchObject, work: Work) -> BatchError | None:
        """Do some work; return why it can never succeed. Raises DiskError, EngineEnded."""
        try:
            await work(batch)
            return None
        except DiskError as error:
            if now() < batch.expires_at:
                raise
            failure = BatchError("disk_error", str(error))
        except EngineEnded:
            raise
        except WeftError as error:
            failure = BatchError("cannot_be_run", str(error))
        except Exception:  # a bug in weft, which must reach the log
            logger.exception("batch %s", batch.id)
            failure = BatchError("internal_error", "internal error; the server's log says more")
        logger.error("batch %s failed: %s", batch.id, failure.message)
        return failure

    def _fail(self, batch: BatchObject, failure: BatchError) -> None:
        """End a batch as failed. Answers so far become its output if the journal can be read."""
        store = self.store
        if store.batch(batch.id, ANYONE).status not in LIVE:  # the error came after its end
            return
        folder = f"{store.folder}/"  # clients must not see server paths
        failure = replace(failure, message=failure.message.replace(folder, ""))
        try:
            with closing(open_journal(store, batch)) as journal:
                end_batch(store, batch.id, journal, Ending("failed", failure))
        except ConfigError:
            end_batch(store, batch.id, None, Ending("failed", failure))
        else:
            store.clean(batch.id)

    # The work of the first worker.

    async def _validate_or_cancel(self, batch: BatchObject) -> None:
        """Validate a new batch, or end a cancelled one."""
        if batch.status == "cancelling":
            await asyncio.to_thread(self._end_cancelled, batch)
        else:
            with suppress(RowPostponed):
                await asyncio.to_thread(self._validate, batch)

    def _end_cancelled(self, batch: BatchObject) -> None:
        with closing(open_journal(self.store, batch)) as journal:
            end_batch(self.store, batch.id, journal, Ending("cancelled"))
        self.store.clean(batch.id)

    def _validate(self, batch: BatchObject) -> None:
        with closing(make_journal(self.store, batch)) as journal:
            total, errors = validate(
                batch,
                open_inputs(self.store, batch),
                journal,
                model=self._server.model,
                stopped=lambda: self._draining or batch.id in self._cancelled,
            )

        def validated(batch: BatchObject) -> BatchObject:
            if batch.status != "validating":  # a client has cancelled it
                return batch
            if errors:
                failed = BatchErrors(errors)
                return replace(batch, status="failed", errors=failed, failed_at=now())
            counts = RequestCounts(total)
            return replace(batch, status="in_progress", in_progress_at=now(), request_counts=counts)

        if self.store.change(batch.id, validated, ANYONE).status == "failed":
            self.store.clean(batch.id)


def _cancelling(batch: BatchObject) -> BatchObject:
    if batch.status == "cancelling":
        return batch
    if batch.status not in ("validating", "in_progress"):
        raise RequestError(
            f"batch {batch.id} is {batch.status}; it cannot be cancelled", status=409
        )
    return replace(batch, status="cancelling", cancelling_at=now())


PRIORITY = 2**31 - 1  # of rows; all other requests go first
_EXPIRED = ("batch_expired", "the row was not run within the completion window")


class Runner:
    """The worker that has rows answered, until their batch ends, expires or is cancelled.

    Args:
        server: server whose routes answer the rows.
        engine: the server's engine.
        cancelled: ids of batches to give up.
    """

    def __init__(self, server: Server, engine: AsyncEngine, cancelled: Container[str]) -> None:
        self._server = server
        self._engine = engine
        self._cancelled = cancelled
        self._current: _Current | None = None
        self._stopped = False

    def stop(self) -> None:
        """Start no more rows."""
        self._stopped = True
        if self._current is not None:
            self._current.job.stop()

    def cancel(self, id: str) -> None:
        """Give up a batch if it is running; answers so far are written."""
        if self._current is not None and self._current.batch == id:
            self._current.cancel()

    def counts(self, id: str) -> RequestCounts | None:
        """Return the current counts of rows, if this batch is running."""
        current = self._current
        return current.counts if current is not None and current.batch == id else None

    async def run(self, store: Store, batch: BatchObject) -> None:
        """Run a batch to its end, or until the server drains.

        Raises:
            EngineEnded: the engine has ended.
            ConfigError: the batch can never run.
            DiskError: the batch cannot run now.
        """
        journal = await asyncio.to_thread(reopen_journal, store, batch)
        try:
            ending = Ending("completed")
            if batch.status == "in_progress":
                ending = await self._answer(store, batch, journal)
            whole = await asyncio.to_thread(_all_done, journal)
            if not whole and ending.status != "cancelled":
                if self._stopped or self._server.draining:
                    return
                raise ConfigError(f"input file {batch.input_file_id} has lost rows")
            await asyncio.to_thread(end_batch, store, batch.id, journal, ending)
        finally:
            await asyncio.to_thread(journal.close)
        await asyncio.to_thread(store.clean, batch.id)

    async def _answer(self, store: Store, batch: BatchObject, journal: Journal) -> Ending:
        """Run the rows that are not done; return how the run ended."""
        inputs = await asyncio.to_thread(open_inputs, store, batch)
        completed, failed = await asyncio.to_thread(journal.counts)
        counts = RequestCounts(journal.total, completed, failed)

        def on_done(status: int, tokens: int) -> None:
            counts.completed += status == 200
            counts.failed += status != 200

        def job(refusal: tuple[str, str] | None = None) -> Job:
            return Job(
                inputs,
                journal,
                model=self._server.model,
                seed=self._engine.config.seed,
                overrides={"priority": PRIORITY},
                refusal=refusal,
                retries=True,
                on_done=on_done,
            )

        limit = width_beside_others(self._engine)
        feeder = Feeder(self._server, self._engine, limit)
        first = job()
        task = asyncio.create_task(first.run(feeder.post, limit))
        self._current = current = _Current(batch.id, first, task, counts)
        try:
            if batch.id in self._cancelled:  # since before `_current` was set
                current.cancel()
            if self._stopped:
                first.stop()
            async with asyncio.timeout(batch.expires_at - now()):
                await task
        except TimeoutError:
            current.job = job(_EXPIRED)
            await current.job.run(feeder.post, limit)
            return Ending("expired")
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            return Ending("cancelled")
        finally:
            self._current = None
        return Ending("completed")


class _Current:
    """The running batch."""

    def __init__(
        self, batch: str, job: Job, task: asyncio.Task[None], counts: RequestCounts
    ) -> None:
        self.batch, self.job, self.counts = batch, job, counts
        self._task = task

    def cancel(self) -> None:
        """Cancel the task once; answers so far are written while it ends."""
        if not self._task.cancelling():
            self._task.cancel()


def _all_done(journal: Journal) -> bool:
    """Return whether all rows are done."""
    return sum(journal.counts()) == journal.total


MAX_ERRORS = 50  # maximum number of errors to report for an input file


def validate(
    batch: BatchObject,
    inputs: Inputs,
    journal: Journal,
    *,
    model: str,
    stopped: Callable[[], bool],
) -> tuple[int, list[BatchError]]:
    """Read the input of a batch, and begin its journal.

    Args:
        batch: batch with the endpoint for all rows.
        inputs: input file.
        journal: journal to begin.
        model: model for rows that name none.
        stopped: called before each row; True stops the validation.

    Returns:
        Number of rows, and the first errors in them.

    Raises:
        RowPostponed: `stopped` returned True.
        ConfigError, DiskError: the file cannot be read, or the journal cannot be written.
    """
    errors: list[BatchError] = []

    def rows() -> Iterator[tuple[int, str, str | None]]:
        for line in inputs:
            if stopped():
                raise RowPostponed
            row = parse(line, model)
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

    journal.begin({"inputs": inputs.digests()}, rows())
    for index, first in journal.duplicates(0, 2**62, most=MAX_ERRORS).items():
        problem = f"line {index + 1}: its custom_id is that of {first}"
        errors.append(BatchError("duplicate_custom_id", problem, index + 1, "custom_id"))
    if not errors and journal.total == 0:
        errors.append(BatchError("empty_file", "the input file has no requests"))
    return journal.total, sorted(errors, key=lambda error: error.line or 0)[:MAX_ERRORS]
