"""Owners take turns in a lane, and each lane compiles one grammar at a time."""

from __future__ import annotations

import pytest

from weft.serving.engine.grammar.lanes import Job, Lane
from weft.serving.engine.sampling_params import Grammar

pytestmark = pytest.mark.asyncio


def job(owner: str, number: int) -> Job:
    return Job(f"{owner}{number}".encode(), Grammar("regex", "a"), owner)


def taken(lane: Lane) -> list[str]:
    """Take and end all jobs."""
    keys: list[str] = []
    while (job := lane.take()) is not None:
        keys.append(job.key.decode())
        assert lane.take() is None, "one at a time"
        lane.job = None
    return keys


async def test_owners_take_turns() -> None:
    lane = Lane(1.0)
    for each in (job("a", 1), job("a", 2), job("a", 3), job("b", 1), job("c", 1), job("b", 2)):
        lane.put(each)
    assert taken(lane) == ["a1", "b1", "c1", "a2", "b2", "a3"]


async def test_an_owner_that_comes_back_is_the_last() -> None:
    lane = Lane(1.0)
    for each in (job("a", 1), job("a", 2), job("b", 1)):
        lane.put(each)
    assert lane.take() is not None
    lane.job = None
    lane.put(job("c", 1))
    assert taken(lane) == ["b1", "a2", "c1"]


async def test_what_is_discarded_is_not_taken() -> None:
    lane = Lane(1.0)
    jobs = [job("a", 1), job("a", 2), job("b", 1)]
    for each in jobs:
        lane.put(each)
    for each in jobs[1:]:
        lane.discard(each)
    assert taken(lane) == ["a1"]
