"""Keeping the engine full from a long list: a window of requests moves over it.

As many workers as the engine can use each take the next item when they are
done with one. So the engine never runs dry, its queue stays short, and items
that are read from a file are read only as they are needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from weft.serving.engine import AsyncEngine

T = TypeVar("T")


def width(engine: AsyncEngine) -> int:
    """Requests to have in the engine at once: as many as run, and as many again in its queue."""
    running = engine.config.dp * engine.info.max_num_seqs
    return running + min(running, engine.config.max_queue)


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
