"""What a benchmark asks (lengths, freshness, shared prefixes), and when: closed and open loops."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from support.tokenizers import write_byte_level

from weft.errors import ConfigError
from weft.models.plan.lengths import Lengths
from weft.serving.cli.bench.client import Record, Result
from weft.serving.cli.bench.workload import (
    Turn,
    Workload,
    closed_loop,
    open_loop,
    plain_token_ids,
)

TEN = Lengths(10, 10)
IDS = range(1000, 9000)


def first(workload: Workload, count: int, run: int = 0) -> list[list[Turn]]:
    return list(islice(workload.conversations(run), count))


def test_prompts_of_token_ids_are_exactly_as_long_and_of_the_given_ids() -> None:
    for (turn,) in first(Workload(Lengths(5, 9), TEN, token_ids=IDS), 50):
        assert isinstance(turn.prompt, list)
        assert 5 <= len(turn.prompt) <= 9
        assert set(turn.prompt) <= set(IDS)
        assert turn.output_tokens == 10


def test_prompts_without_a_tokenizer_are_words() -> None:
    ((turn,),) = first(Workload(TEN, TEN), 1)
    assert isinstance(turn.prompt, str)
    assert len(turn.prompt.split()) == 10


def test_a_seed_and_a_run_say_what_is_asked_and_no_two_share_a_prompt() -> None:
    def prompts(seed: int, run: int) -> set[tuple[int, ...]]:
        asked = first(Workload(TEN, TEN, token_ids=IDS, seed=seed), 20, run)
        return {tuple(turn.prompt) for (turn,) in asked if isinstance(turn.prompt, list)}

    assert prompts(3, 0) == prompts(3, 0)
    places = [(seed, run) for seed in range(3) for run in (-1, 0, 1)]
    assert len(set().union(*(prompts(*place) for place in places))) == 20 * len(places)


@pytest.mark.parametrize("ids", [IDS, ()])
def test_a_group_shares_its_prefix_and_nothing_more(ids: range) -> None:
    workload = Workload(TEN, TEN, shared_prefix=30, prefix_groups=3, token_ids=ids)
    prompts = [turn.prompt for (turn,) in first(workload, 100)]
    tokens = [p.split() if isinstance(p, str) else [str(i) for i in p] for p in prompts]
    assert {len(prompt) for prompt in tokens} == {40}
    assert len({tuple(prompt[:30]) for prompt in tokens}) == 3
    assert len({tuple(prompt[30:]) for prompt in tokens}) == 100


def test_only_the_first_turn_has_the_prefix() -> None:
    workload = Workload(TEN, TEN, turns=3, shared_prefix=30)
    for conversation in first(workload, 5):
        assert [len(str(turn.prompt).split()) for turn in conversation] == [40, 10, 10]


def test_plain_token_ids_are_those_of_ordinary_tokens(tmp_path: Path) -> None:
    path = write_byte_level(tmp_path / "model")
    ids = plain_token_ids(str(path))
    assert ids == plain_token_ids(str(path / "tokenizer.json"))
    from tokenizers import Tokenizer

    added = Tokenizer.from_file(str(path / "tokenizer.json")).get_added_tokens_decoder()
    assert added
    assert added.keys().isdisjoint(ids)
    assert set(range(256)) <= set(ids)
    assert plain_token_ids("weft-demo")


def test_a_tokenizer_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no tokenizer\.json"):
        plain_token_ids(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        plain_token_ids(str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="or a directory with one, not a GGUF file"):
        plain_token_ids(str(tmp_path / "m.gguf"))


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
