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
from collections.abc import Iterator

from weft.serving.cli.bench.client import Client, Record
from weft.serving.cli.bench.workload import Turn


async def closed_loop(
    client: Client,
    conversations: Iterator[list[Turn]],
    *,
    users: int,
    count: int,
    record: Record,
) -> None:
    """`users` at once hold `count` conversations in all."""
    left = iter(range(count))

    async def user() -> None:
        for _ in left:
            await client.ask(next(conversations), time.perf_counter(), record)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(users, count)):
            group.create_task(user())


async def open_loop(
    client: Client,
    conversations: Iterator[list[Turn]],
    *,
    rate: float,
    count: int,
    seed: int,
    record: Record,
) -> None:
    """`count` conversations that arrive independently, `rate` a second on average."""
    rng = random.Random(seed)
    due = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            conversation = next(conversations)
            due += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(client.ask(conversation, due, record))
