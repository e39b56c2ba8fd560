"""A server's batches, one at a time, are answered: to their end, or until cancelled or too late."""

from __future__ import annotations

import asyncio
from collections.abc import Container
from typing import TYPE_CHECKING

from weft.errors import ConfigError
from weft.serving.batch.feeder import Feeder, Server
from weft.serving.batch.job import Job
from weft.serving.batch.journal import Journal
from weft.serving.batch.objects import BatchObject, RequestCounts, now
from weft.serving.batch.records import Ending, end, inputs_of, opened_to_go_on
from weft.serving.engine.admission import width_beside_others

if TYPE_CHECKING:
    from weft.serving.batch.store import Store
    from weft.serving.engine.engine import AsyncEngine

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
