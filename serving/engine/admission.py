"""Keeps the engine busy with a long list of requests, without filling its queue.

A fixed number of workers each take the next item when they have finished one. So the engine never
runs out of work, its queue stays short, and items from a file are read only when needed.

`Admission` limits items that make several requests each, and items that must leave room for other
requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from weft.serving.engine.engine import AsyncEngine

T = TypeVar("T")

POLL = 0.02  # seconds between checks for room in the engine


def width(engine: AsyncEngine) -> int:
    """Return how many requests to keep in the engine: all that can run, and as many queued."""
    running = engine.config.dp * engine.info.max_num_seqs
    return running + min(running, engine.config.max_queue)


def width_beside_others(engine: AsyncEngine) -> int:
    """Return how many requests to keep in a shared engine: an eighth of its capacity stays free."""
    running = engine.config.dp * engine.info.max_num_seqs
    return max(1, running - max(1, running // 8))


class Admission:
    """Lets requests wait in order until the engine has fewer than `maximum` requests."""

    def __init__(self, engine: AsyncEngine, maximum: int) -> None:
        self._engine = engine
        self._maximum = maximum
        self._turn = asyncio.Lock()

    @property
    def open(self) -> bool:
        """True if a request may be queued now."""
        return self._engine.status == "ready" and self._engine.live < self._maximum

    async def wait(self) -> None:
        """Return when a request may be queued; the caller then queues it at once.

        This is for `AsyncEngine.generate`. If the engine restarts, wait for it.

        Raises:
            EngineError: the engine has ended.
        """
        async with self._turn:
            while not self.open:
                if self._engine.status != "restarting":
                    self._engine.check_serving()
                await asyncio.sleep(POLL)


async def for_each(
    items: Iterable[T] | AsyncIterable[T],
    work: Callable[[T], Coroutine[Any, Any, None]],
    *,
    workers: int,
) -> None:
    """Do `work` for every item, `workers` at a time; items start in order.

    The first error cancels the other workers and is raised. Several workers may wait for an
    asynchronous item at once.
    """
    source = aiter(items) if isinstance(items, AsyncIterable) else iter(items)

    async def worker() -> None:
        if isinstance(source, AsyncIterable):
            async for item in source:
                await work(item)
        else:
            for item in source:
                await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(worker())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
