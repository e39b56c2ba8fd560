"""The batches of a server: one after the other, on the engine that answers everyone.

    validating ──► in_progress ──► finalizing ──► completed
        │               ├──► cancelling ──► cancelled
        │               └─────────────────► expired, after 24 hours
        └──► failed ◄── from everywhere, with what cannot be mended

An input file is read when the batch is made; with a line that is no request for the endpoint, or a
custom_id that comes twice, the batch fails and nothing is run. What is done is in the batch's
journal (see journal.py), so a server that was killed goes on where it was. One that drains begins
no more rows.

Two tasks share the batches by their status: the clerk reads inputs and ends what is cancelled, the
runner has rows answered (see runner.py). Each has one batch at a time, which the other leaves be.
What goes wrong with a batch is that batch's: it is tried again in a while when that may help (the
disk is full), as long as it has time, and else it fails. The others go on.

Everything here runs on the server's event loop; what takes time on the disk, in threads.

A server's batches, one at a time, are answered: to their end, or until cancelled or too late.

The input of a server's batch is read before any of it is run.
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
from weft.serving.batch.job import EngineEnded, Feeder, Job, LeftOut, Server
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
    end,
    inputs_of,
    journal_of,
    opened,
    opened_to_go_on,
)
from weft.serving.engine.admission import width_beside_others

if TYPE_CHECKING:
    from weft.serving.batch.storage import Store
    from weft.serving.engine.engine import AsyncEngine

RETRY = 10.0  # seconds until a batch is tried again that met a full disk

Work = Callable[[BatchObject], Awaitable[None]]

logger = logging.getLogger(__name__)


class BatchService:
    """The batches of one server.

    Args:
        server: whose routes answer the rows.
        folder: for the store; None is a temporary one, which ends with the server.
    """

    def __init__(self, server: Server, folder: Path | None) -> None:
        self._server = server
        self._folder = folder
        self._store: Store | None = None
        self._making = threading.Lock()  # of the store
        self._runner: Runner | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._wakes: list[asyncio.Event] = []
        self._held: set[str] = set()  # batches that the clerk and the runner have
        self._cancelled: set[str] = set()  # batches that who has them, or is about to, gives up
        self._again: dict[str, float] = {}  # time.monotonic() before which a batch is not tried
        self._ending = False

    @property
    def store(self) -> Store:
        """Made when it is first needed; raises as `Store`. Not for the event loop."""
        with self._making:
            if self._store is None:
                self._store = Store(self._folder or Path(tempfile.mkdtemp(prefix="weft-")))
            return self._store

    def open(self) -> None:
        """Take the folder that was asked for, if one was; raises as `Store`."""
        if self._folder is not None:
            _ = self.store

    def start(self, engine: AsyncEngine) -> None:
        """Run the batches from now on, also those that a server before has left."""
        runner = self._runner = Runner(self._server, engine, self._cancelled)

        async def run(batch: BatchObject) -> None:
            await runner.run(self.store, batch)

        self._begin(("cancelling", "validating"), self._settle)
        self._begin(("finalizing", "in_progress"), run)

    def drain(self) -> None:
        """Begin no more rows."""
        self._ending = True
        self._wake()
        if self._runner is not None:
            self._runner.stop()

    async def close(self) -> None:
        """End, with all that is answered written. The engine must have ended what it had."""
        self.drain()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._store is not None:
            await asyncio.to_thread(self._store.close)
            if self._folder is None:
                await asyncio.to_thread(shutil.rmtree, self._store.folder)

    # What clients ask.

    async def create(self, batch: BatchObject, owner: str) -> None:
        """Begin a new batch.

        Raises:
            RequestError: the owner has no such file for its input.
            DiskError: the disk is full.
        """
        await asyncio.to_thread(lambda: self.store.add_batch(batch, owner))
        self._wake()

    async def cancel(self, id: str, owner: str) -> BatchObject:
        """End a batch; what is answered stays.

        Raises:
            RequestError: 404, the owner has none of this id; 409, it has ended.
            DiskError: the disk is full.
        """
        batch = await asyncio.to_thread(lambda: self.store.change(id, _cancelling, owner))
        if batch.status == "cancelling":
            self._cancelled.add(id)
        if self._runner is not None:
            self._runner.cancel(id)
        self._wake()
        return self.shown(batch)

    def shown(self, batch: BatchObject) -> BatchObject:
        """With the rows that are done by now."""
        counts = None if self._runner is None else self._runner.counts(batch.id)
        return batch if counts is None else replace(batch, request_counts=counts)

    # Batches are taken one after the other.

    def _begin(self, statuses: tuple[BatchStatus, ...], work: Work) -> None:
        wake = asyncio.Event()
        self._wakes.append(wake)
        self._tasks.append(asyncio.create_task(self._take(statuses, work, wake)))

    def _wake(self) -> None:
        for wake in self._wakes:
            wake.set()

    async def _take(
        self, statuses: tuple[BatchStatus, ...], work: Work, wake: asyncio.Event
    ) -> None:
        """Do some work for every batch that has one of these statuses, the first status first."""
        while not (self._ending or self._server.draining):
            wake.clear()
            try:
                if await self._take_one(statuses, work):
                    continue
            except EngineEnded:
                return  # and so does the server
            except Exception:  # the store cannot be read; or a fault of ours
                logger.exception("batches wait")
            with suppress(TimeoutError):
                await asyncio.wait_for(wake.wait(), RETRY)

    async def _take_one(self, statuses: tuple[BatchStatus, ...], work: Work) -> bool:
        """Returns whether there was one to take."""
        if self._folder is None and self._store is None:
            return False
        waiting = {id for id, until in self._again.items() if until > time.monotonic()}
        others = self._held | waiting
        batch = await asyncio.to_thread(lambda: self.store.next(statuses, others))
        if batch is None:
            return False
        if batch.id in self._held:  # meanwhile
            return True
        self._held.add(batch.id)
        try:
            await self._try(batch, work)
        finally:
            self._held.discard(batch.id)
            self._cancelled.discard(batch.id)
            self._wake()  # it may be the other's now
        return True

    async def _try(self, batch: BatchObject, work: Work) -> None:
        """Raises EngineEnded."""
        self._again.pop(batch.id, None)
        try:
            failure = await self._failure(batch, work)
            if failure is not None:
                await asyncio.to_thread(self._fail, batch, failure)
        except EngineEnded:
            raise
        except DiskError as error:
            logger.error("batch %s waits: %s", batch.id, error)
            self._again[batch.id] = time.monotonic() + RETRY
        except Exception:  # not even its end can be noted
            logger.exception("batch %s waits", batch.id)
            self._again[batch.id] = time.monotonic() + RETRY

    async def _failure(self, batch: BatchObject, work: Work) -> BatchError | None:
        """Do some work, and say why it can never be done; raises DiskError, EngineEnded."""
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
        except Exception:  # a fault of ours, of which nobody would hear
            logger.exception("batch %s", batch.id)
            failure = BatchError("internal_error", "internal error; the server's log says more")
        logger.error("batch %s fails: %s", batch.id, failure.message)
        return failure

    def _fail(self, batch: BatchObject, failure: BatchError) -> None:
        """End a batch; what is answered stays if it can be read, and else in the batch's folder."""
        store = self.store
        if store.batch(batch.id, ANYONE).status not in LIVE:  # it failed after its end
            return
        folder = f"{store.folder}/"  # nothing that clients need to know
        failure = replace(failure, message=failure.message.replace(folder, ""))
        try:
            with closing(opened(store, batch)) as journal:
                end(store, batch.id, journal, Ending("failed", failure))
        except ConfigError:
            end(store, batch.id, None, Ending("failed", failure))
        else:
            store.clean(batch.id)

    # The clerk.

    async def _settle(self, batch: BatchObject) -> None:
        """Read the input of a new batch, or end one that is cancelled."""
        if batch.status == "cancelling":
            await asyncio.to_thread(self._end_cancelled, batch)
        else:
            with suppress(LeftOut):
                await asyncio.to_thread(self._validate, batch)

    def _end_cancelled(self, batch: BatchObject) -> None:
        with closing(opened(self.store, batch)) as journal:
            end(self.store, batch.id, journal, Ending("cancelled"))
        self.store.clean(batch.id)

    def _validate(self, batch: BatchObject) -> None:
        with closing(journal_of(self.store, batch)) as journal:
            total, errors = validate(
                batch,
                inputs_of(self.store, batch),
                journal,
                model=self._server.model,
                stopped=lambda: self._ending or batch.id in self._cancelled,
            )

        def validated(batch: BatchObject) -> BatchObject:
            if batch.status != "validating":  # it was cancelled
                return batch
            if errors:
                failed = BatchErrors(errors)
                return replace(batch, status="failed", errors=failed, failed_at=now())
            counts = RequestCounts(total)
            return replace(batch, status="in_progress", in_progress_at=now(), request_counts=counts)

        if self.store.change(batch.id, validated, ANYONE).status == "failed":
            self.store.clean(batch.id)


def _cancelling(batch: BatchObject) -> BatchObject:
    if batch.status in ("cancelling", "cancelled"):
        return batch
    if batch.status not in ("validating", "in_progress"):
        raise RequestError(
            f"batch {batch.id} is {batch.status}; it cannot be cancelled", status=409
        )
    return replace(batch, status="cancelling", cancelling_at=now())


PRIORITY = 2**31 - 1  # of rows: all that has another one goes first
_EXPIRED = ("batch_expired", "the row was not run within the completion window")


class Runner:
    """See the module's text.

    Args:
        server: whose routes answer the rows.
        engine: of the server.
        cancelled: batches that are to be given up.
    """

    def __init__(self, server: Server, engine: AsyncEngine, cancelled: Container[str]) -> None:
        self._server = server
        self._engine = engine
        self._cancelled = cancelled
        self._current: _Current | None = None
        self._stopped = False

    def stop(self) -> None:
        """Begin no more rows."""
        self._stopped = True
        if self._current is not None:
            self._current.job.stop()

    def cancel(self, id: str) -> None:
        """Give up a batch, if it is the one that is run; what is answered is written."""
        if self._current is not None and self._current.batch == id:
            self._current.cancel()

    def counts(self, id: str) -> RequestCounts | None:
        """Rows that are done by now, of the batch that is run."""
        current = self._current
        return current.counts if current is not None and current.batch == id else None

    async def run(self, store: Store, batch: BatchObject) -> None:
        """Bring a batch to its end, or as far as it comes before the server's.

        Raises:
            EngineEnded: the engine has ended.
            ConfigError: it can never be run.
            DiskError: it cannot be run now.
        """
        journal = await asyncio.to_thread(opened_to_go_on, store, batch)
        try:
            ending = Ending("completed")
            if batch.status == "in_progress":
                ending = await self._answer(store, batch, journal)
            whole = await asyncio.to_thread(_is_whole, journal)
            if not whole and ending.status != "cancelled":
                if self._stopped or self._server.draining:
                    return
                raise ConfigError(f"rows are no longer in input file {batch.input_file_id}")
            await asyncio.to_thread(end, store, batch.id, journal, ending)
        finally:
            await asyncio.to_thread(journal.close)
        await asyncio.to_thread(store.clean, batch.id)

    async def _answer(self, store: Store, batch: BatchObject, journal: Journal) -> Ending:
        """Run the rows that are left; how that ended."""
        inputs = await asyncio.to_thread(inputs_of, store, batch)
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

        most = width_beside_others(self._engine)
        feeder = Feeder(self._server, self._engine, most)
        first = job()
        task = asyncio.create_task(first.run(feeder.post, most))
        self._current = current = _Current(batch.id, first, task, counts)
        try:
            if batch.id in self._cancelled:  # before this was set
                current.cancel()
            if self._stopped:
                first.stop()
            async with asyncio.timeout(batch.expires_at - now()):
                await task
        except TimeoutError:
            current.job = job(_EXPIRED)
            await current.job.run(feeder.post, most)
            return Ending("expired")
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            return Ending("cancelled")
        finally:
            self._current = None
        return Ending("completed")


class _Current:
    """The batch that is run now."""

    def __init__(
        self, batch: str, job: Job, task: asyncio.Task[None], counts: RequestCounts
    ) -> None:
        self.batch, self.job, self.counts = batch, job, counts
        self._task = task

    def cancel(self) -> None:
        """Once: what is answered is written while the task ends."""
        if not self._task.cancelling():
            self._task.cancel()


def _is_whole(journal: Journal) -> bool:
    """Whether all rows are done."""
    return sum(journal.counts()) == journal.total


MAX_ERRORS = 50  # of an input file that are shown


def validate(
    batch: BatchObject,
    inputs: Inputs,
    journal: Journal,
    *,
    model: str,
    stopped: Callable[[], bool],
) -> tuple[int, list[BatchError]]:
    """Begin the journal of a batch.

    Args:
        batch: says the endpoint.
        inputs: its file.
        journal: to begin.
        model: that rows are for which name none.
        stopped: asked before each row.

    Returns:
        How many rows there are, and the first of what is wrong with them.

    Raises:
        LeftOut: it was stopped.
        ConfigError, DiskError: the file cannot be read, or the journal not be written.
    """
    errors: list[BatchError] = []

    def rows() -> Iterator[tuple[int, str, str | None]]:
        for line in inputs:
            if stopped():
                raise LeftOut
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
