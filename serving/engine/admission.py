"""Keeping the engine full from a long list: a window of requests moves over it.

As many workers as the engine can use each take the next item when they are
done with one. So the engine never runs dry, its queue stays short, and items
that are read from a file are read only as they are needed.

Items that are several requests each, or that leave room to others, wait for it: see `Admission`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from weft.serving.engine.engine import AsyncEngine

T = TypeVar("T")

POLL = 0.02  # seconds between two looks at whether the engine has room


def width(engine: AsyncEngine) -> int:
    """Requests to have in the engine at once: as many as run, and as many again in its queue."""
    running = engine.config.dp * engine.info.max_num_seqs
    return running + min(running, engine.config.max_queue)


def width_beside_others(engine: AsyncEngine) -> int:
    """Requests to have in an engine that others use: of eight places to run one stays free."""
    running = engine.config.dp * engine.info.max_num_seqs
    return max(1, running - max(1, running // 8))


class Admission:
    """Requests that wait, in their order, until the engine has fewer than `most`."""

    def __init__(self, engine: AsyncEngine, most: int) -> None:
        self._engine = engine
        self._most = most
        self._turn = asyncio.Lock()

    @property
    def open(self) -> bool:
        """Whether one may be queued now."""
        return self._engine.status == "ready" and self._engine.live < self._most

    async def wait(self) -> None:
        """For `AsyncEngine.generate`: returns when a request may be queued, as it then is at once.

        An engine that is started again is waited for; EngineError when it has ended.
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
    """Do `work` for every item, `workers` at a time, in the items' order of starting.

    The first error ends it, and cancels the others. Items that come asynchronously may be asked
    for by several workers at once.
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
