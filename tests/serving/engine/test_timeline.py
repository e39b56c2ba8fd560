"""What an engine remembers of when its requests ran."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from itertools import pairwise

from support.engine import PROMPT, SLOW, collect, params, started

from weft.serving.config.settings import EngineConfig
from weft.serving.engine.engine import AsyncEngine
from weft.serving.engine.timeline import MAX_ENDED, MAX_LIVE, Timeline, Timelines


async def test_of_requests_that_follow_each_other(engine: AsyncEngine) -> None:
    before = time.monotonic()
    for _ in range(2):
        await collect(engine, PROMPT, params(ignore_eos=True, stop_token_ids=()))
    first, second = engine.timelines.since(before)
    for timeline in (first, second):
        assert [phase for phase, _ in timeline.phases] == ["queued", "prefill", "decode"]
        assert timeline.prompt_tokens == len(PROMPT)
        assert timeline.output_tokens == 20
    times = [begin for each in (first, second) for _, begin in each.phases]
    assert times == sorted(times)
    assert first.ended is not None
    assert second.ended is not None
    assert before < times[0]
    assert times[2] < first.ended <= times[3]
    assert engine.timelines.since(time.monotonic()) == []


async def test_a_preempted_request_is_queued_again(config: EngineConfig) -> None:
    config = replace(config, kv_cache_memory=24 * 1024, max_model_len=128)  # 24 blocks of 8
    wish = params(max_tokens=100, stop_token_ids=())
    async with started(config, in_process=True, runner_factory=SLOW) as engine:
        await asyncio.gather(*(collect(engine, [i, *PROMPT], wish) for i in range(4)))
        preemptions = engine.stats.preemptions
        timelines = engine.timelines.since(0)
    follows = {("queued", "prefill"), ("prefill", "decode"), ("prefill", "queued")}
    follows.add(("decode", "queued"))
    for timeline in timelines:
        phases = [phase for phase, _ in timeline.phases]
        assert phases[0] == "queued"
        assert set(pairwise(phases)) <= follows
    queued = sum(phase == "queued" for each in timelines for phase, _ in each.phases)
    assert preemptions > 0
    assert queued == len(timelines) + preemptions


async def test_one_that_is_given_up_ends(engine: AsyncEngine) -> None:
    answer = engine.generate(engine.validate(PROMPT, params(max_tokens=400, stop_token_ids=())))
    await anext(answer)
    (timeline,) = engine.timelines.since(time.monotonic())
    assert timeline.ended is None
    await answer.aclose()
    assert timeline.ended is not None


def test_no_more_is_kept_than_can_be_shown() -> None:
    timelines = Timelines()
    for i in range(MAX_ENDED + 5):
        timelines.begin(str(i), 1)
        timelines.close(str(i))
    for i in range(MAX_LIVE + 5):
        timelines.begin(f"live {i}", 1)
    ids = [timeline.id for timeline in timelines.since(0.0)]
    assert ids[0] == "5"
    assert len(ids) == MAX_ENDED + MAX_LIVE
    assert ids[MAX_ENDED] == "live 0"


def test_a_late_token_leaves_a_preempted_request_queued() -> None:
    timeline = Timeline("a", 1, [("queued", 0.0)])
    timeline.moved(True, 1.0)
    timeline.got(1)
    timeline.moved(False, time.monotonic())
    timeline.got(1)
    assert [phase for phase, _ in timeline.phases] == ["queued", "prefill", "decode", "queued"]
    assert timeline.output_tokens == 2
