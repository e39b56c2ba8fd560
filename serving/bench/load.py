"""When a benchmark asks: a fixed number of users, or arrivals at a rate.

Closed loop: each of N users asks again as soon as it has its answer; shows
what a server can do. Open loop: conversations arrive as a Poisson process,
whether or not the server keeps up; shows what users at large would feel, and
where the queue begins to grow.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator

from weft.serving.bench.client import Client, Result
from weft.serving.bench.workload import Turn

Progress = Callable[[Result], None]


async def closed_loop(
    client: Client,
    conversations: Iterator[list[Turn]],
    *,
    users: int,
    count: int,
    progress: Progress,
) -> list[Result]:
    """`users` at once hold `count` conversations in all."""
    results: list[Result] = []
    left = iter(range(count))

    async def user() -> None:
        for _ in left:
            for result in await client.ask(next(conversations), due=time.perf_counter()):
                results.append(result)
                progress(result)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(users, count)):
            group.create_task(user())
    return results


async def open_loop(
    client: Client,
    conversations: Iterator[list[Turn]],
    *,
    rate: float,
    count: int,
    seed: int,
    progress: Progress,
) -> list[Result]:
    """`count` conversations that arrive independently, `rate` a second on average."""
    results: list[Result] = []
    rng = random.Random(seed)

    async def arrival(conversation: list[Turn], due: float) -> None:
        for result in await client.ask(conversation, due):
            results.append(result)
            progress(result)

    due = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            due += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(arrival(next(conversations), due))
    return results
