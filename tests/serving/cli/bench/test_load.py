"""When requests are made: closed and open loops against a client that only waits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from weft.serving.cli.bench.client import Record, Result
from weft.serving.cli.bench.load import closed_loop, open_loop
from weft.serving.cli.bench.workload import Lengths, Turn, Workload

ONE = Lengths(1, 1)


@dataclass
class Waiting:
    """A client whose requests end when all users, or none, have asked."""

    seconds: float = 0.0
    running: int = 0
    most: int = 0
    due: list[float] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    async def ask(self, conversation: list[Turn], due: float, record: Record) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        self.due.append(due)
        self.asked.append(str(conversation[0].prompt))
        await asyncio.sleep(self.seconds)
        self.running -= 1
        record(Result(due=due, start=due))


def conversations() -> Iterator[list[Turn]]:
    return Workload(Lengths(9, 9), ONE).conversations()


async def closed(users: int, count: int) -> tuple[Waiting, list[Result]]:
    client: Any = Waiting()
    results: list[Result] = []
    await closed_loop(client, conversations(), users=users, count=count, record=results.append)
    return client, results


async def test_closed_loop_has_all_users_busy_and_stops_at_the_count() -> None:
    client, results = await closed(5, 23)
    assert client.most == 5
    assert len(results) == len(set(client.asked)) == 23
    client, results = await closed(9, 4)
    assert client.most == len(results) == 4


async def test_closed_loop_of_nothing() -> None:
    assert (await closed(3, 0))[1] == []


async def test_open_loop_arrives_at_its_rate_however_slow_the_answers() -> None:
    client: Any = Waiting(seconds=0.2)
    results: list[Result] = []
    await open_loop(
        client, conversations(), rate=2000.0, count=300, seed=1, record=results.append
    )  # fmt: skip
    assert len(results) == len(set(client.asked)) == 300
    assert client.most > 30
    gaps = [later - earlier for earlier, later in zip(client.due, client.due[1:], strict=False)]
    assert 0.0004 < mean(gaps) < 0.0006  # the schedule, not the clock
    assert max(gaps) > 3 * mean(gaps) > 30 * min(gaps)  # independent, and not evenly spaced


async def test_open_loop_has_the_same_schedule_for_the_same_seed() -> None:
    async def gaps(seed: int) -> list[float]:
        client: Any = Waiting()
        await open_loop(
            client, conversations(), rate=5000.0, count=20, seed=seed, record=lambda _: None
        )
        return [round(due - client.due[0], 9) for due in client.due]

    assert await gaps(1) == await gaps(1) != await gaps(2)
