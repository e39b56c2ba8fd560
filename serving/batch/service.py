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
runner has rows answered (see feeder.py). Each has one batch at a time, which the other leaves be.
What goes wrong with a batch is that batch's: it is tried again in a while when that may help (the
disk is full), as long as it has time, and else it fails. The others go on.

Everything here runs on the server's event loop; what takes time on the disk, in threads.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from weft.errors import ConfigError, DiskError, RequestError, WeftError
from weft.serving.batch.ending import Ending, ended
from weft.serving.batch.feeder import EngineEnded, Feeder
from weft.serving.batch.inputs import Inputs
from weft.serving.batch.job import Job, LeftOut
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
from weft.serving.batch.store import ANYONE, Store
from weft.serving.batch.validation import validate

if TYPE_CHECKING:
    from weft.serving.api.state import ServerState
    from weft.serving.engine import AsyncEngine

PRIORITY = 2**31 - 1  # of rows: all that has another one goes first
RETRY = 10.0  # seconds until a batch is tried again that met a full disk
_EXPIRED = ("batch_expired", "the row was not run within the completion window")

Work = Callable[[BatchObject], Awaitable[None]]

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
        self._store: Store | None = None
        self._making = threading.Lock()  # of the store
        self._tasks: list[asyncio.Task[None]] = []
        self._wakes: list[asyncio.Event] = []
        self._held: set[str] = set()  # batches that the clerk and the runner have
        self._again: dict[str, float] = {}  # time.monotonic() before which a batch is not tried
        self._cancelled: set[str] = set()  # batches that are to be given up by who has them
        self._current: _Running | None = None
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
        run = partial(self._run, engine)
        self._begin(("cancelling", "validating"), self._settle)
        self._begin(("finalizing", "in_progress"), run)

    def drain(self) -> None:
        """Begin no more rows."""
        self._ending = True
        self._wake()
        if self._current is not None:
            self._current.job.stop()

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
        """Begin a new batch; DiskError when the disk is full."""
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
            if self._current is not None and self._current.batch == id:
                self._current.cancel()
            self._wake()
        return self.shown(batch)

    def shown(self, batch: BatchObject) -> BatchObject:
        """With the rows that are done by now."""
        current = self._current
        if current is not None and current.batch == batch.id:
            return replace(batch, request_counts=current.counts)
        return batch

    # Batches are taken one after the other.

    @property
    def _over(self) -> bool:
        return self._ending or self._server.draining

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
        while not self._over:
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
        except WeftError as error:
            failure = BatchError("cannot_be_run", str(error))
        except EngineEnded:
            raise
        except Exception:  # a fault of ours, of which nobody would hear
            logger.exception("batch %s", batch.id)
            failure = BatchError("internal_error", "internal error; the server's log says more")
        logger.error("batch %s fails: %s", batch.id, failure.message)
        return failure

    # The clerk.

    async def _settle(self, batch: BatchObject) -> None:
        """Read the input of a new batch, or end one that is cancelled."""
        if batch.status == "cancelling":
            await asyncio.to_thread(self._end_cancelled, batch)
        else:
            with suppress(LeftOut):
                await asyncio.to_thread(self._validate, batch)

    def _end_cancelled(self, batch: BatchObject) -> None:
        with closing(self._opened(batch)) as journal:
            ended(self.store, batch.id, journal, Ending("cancelled"))
        self.store.clean(batch.id)

    def _validate(self, batch: BatchObject) -> None:
        with closing(self._journal(batch)) as journal:
            total, errors = validate(
                batch,
                self._inputs(batch),
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

    # The runner.

    async def _run(self, engine: AsyncEngine, batch: BatchObject) -> None:
        """Bring a batch to its end, or as far as it comes before the server's.

        Raises:
            EngineEnded: the engine has ended.
            ConfigError: it can never be run.
            DiskError: it cannot be run now.
        """
        journal = await asyncio.to_thread(self._opened_whole, batch)
        try:
            ending = Ending("completed")
            if batch.status == "in_progress":
                ending = await self._answer(batch, journal, engine)
            whole = await asyncio.to_thread(_is_whole, journal)
            if not whole and ending.status != "cancelled":
                if self._over:
                    return
                raise ConfigError(f"rows are no longer in input file {batch.input_file_id}")
            await asyncio.to_thread(ended, self.store, batch.id, journal, ending)
        finally:
            await asyncio.to_thread(journal.close)
        await asyncio.to_thread(self.store.clean, batch.id)

    async def _answer(self, batch: BatchObject, journal: Journal, engine: AsyncEngine) -> Ending:
        """Run the rows that are left; how that ended."""
        inputs = self._inputs(batch)
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
                seed=engine.config.seed,
                overrides={"priority": PRIORITY},
                refusal=refusal,
                retries=True,
                on_done=on_done,
            )

        feeder = Feeder(self._server, engine)
        first = job()
        task = asyncio.create_task(first.run(feeder.post, feeder.workers))
        self._current = running = _Running(batch.id, first, task, counts)
        try:
            if batch.id in self._cancelled:  # before this was set
                running.cancel()
            if self._ending:
                first.stop()
            async with asyncio.timeout(batch.expires_at - now()):
                await task
        except TimeoutError:
            running.job = job(_EXPIRED)
            await running.job.run(feeder.post, feeder.workers)
            return Ending("expired")
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            return Ending("cancelled")
        finally:
            self._current = None
        return Ending("completed")

    # What both do, in threads.

    def _fail(self, batch: BatchObject, failure: BatchError) -> None:
        """End a batch; what is answered stays if it can be read, and else in the batch's folder."""
        if self.store.batch(batch.id, ANYONE).status not in LIVE:  # it failed after its end
            return
        folder = f"{self.store.folder}/"  # nothing that clients need to know
        failure = replace(failure, message=failure.message.replace(folder, ""))
        try:
            with closing(self._opened(batch)) as journal:
                ended(self.store, batch.id, journal, Ending("failed", failure))
        except ConfigError:
            ended(self.store, batch.id, None, Ending("failed", failure))
        else:
            self.store.clean(batch.id)

    def _inputs(self, batch: BatchObject) -> Inputs:
        try:
            path = self.store.content(batch.input_file_id, ANYONE)
        except RequestError:
            path = None
        if path is None or not path.is_file():
            raise ConfigError(f"input file {batch.input_file_id} is gone")
        return Inputs([path])

    def _journal(self, batch: BatchObject) -> Journal:
        folder = self.store.batch_folder(batch.id)
        return Journal(folder / "state", [folder / "output", folder / "errors"])

    def _opened(self, batch: BatchObject) -> Journal:
        journal = self._journal(batch)
        try:
            journal.recover()
            journal.open()
        except WeftError:
            journal.close()
            raise
        return journal

    def _opened_whole(self, batch: BatchObject) -> Journal:
        """The journal of a batch whose input is what was validated."""
        journal = self._opened(batch)
        try:
            if journal.settings is None:
                raise ConfigError("the state of the batch is gone")
            if batch.status == "in_progress":
                self._check_input(batch, journal.settings["inputs"])
        except WeftError:
            journal.close()
            raise
        return journal

    def _check_input(self, batch: BatchObject, digests: list[str]) -> None:
        if self._inputs(batch).digests() != digests:
            raise ConfigError(f"input file {batch.input_file_id} is not what it was at first")


class _Running:
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


def _cancelling(batch: BatchObject) -> BatchObject:
    if batch.status in ("cancelling", "cancelled"):
        return batch
    if batch.status not in ("validating", "in_progress"):
        raise RequestError(
            f"batch {batch.id} is {batch.status}; it cannot be cancelled", status=409
        )
    return replace(batch, status="cancelling", cancelling_at=now())
