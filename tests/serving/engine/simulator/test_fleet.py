"""Laws that simulations keep: Little's, conservation of tokens, growing queues, equal seeds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from statistics import mean

import pytest

from weft.errors import ConfigError
from weft.models.plan.arrivals import Arrival
from weft.models.plan.batch import Batch
from weft.models.plan.load import Load
from weft.serving.engine.scheduler.block_manager import BlockManager
from weft.serving.engine.scheduler.scheduler import Scheduler
from weft.serving.engine.simulator.fleet import EngineLimits, Simulated, simulate
from weft.serving.engine.simulator.virtual_engine import Served, VirtualEngine

LIMITS = EngineLimits(
    max_num_seqs=64, max_num_batched_tokens=512, max_model_len=4096, num_blocks=2000
)


def seconds(batch: Batch) -> float:
    """Seconds of a step: a floor for the weights, and then a part for each token."""
    return 0.001 + max(0.008, 1e-4 * batch.tokens) + 1e-7 * batch.decodes * batch.decode_context


def serve(text: str, count: int, limits: EngineLimits = LIMITS, **how: object) -> Simulated:
    load = Load.parse(text)
    arrivals = islice(load.arrivals(limits.max_model_len), count)
    return simulate(arrivals, limits, seconds, users=load.users, **how)  # type: ignore[arg-type]


def served_alone(arrivals: list[Arrival], step_seconds: Callable[[Batch], float]) -> list[Served]:
    """Serve by one engine, which asks for the seconds of each step."""
    kv = BlockManager(LIMITS.num_blocks, LIMITS.block_size, LIMITS.max_num_seqs, 4096)
    scheduler = Scheduler(kv, max_num_batched_tokens=512, max_model_len=4096)
    engine = VirtualEngine(0, scheduler, step_seconds, True, leap=False)
    ended: list[Served] = []
    for asked in arrivals:
        while engine.next_turn < asked.time:
            ended += engine.turn()
        engine.add(asked, asked.time)
    while engine.next_turn < math.inf:
        ended += engine.turn()
    return ended


def test_littles_law_holds_for_decodes() -> None:
    """The decodes in all steps, times seconds, are the seconds in which requests decode."""
    decoding = []

    def noting(batch: Batch) -> float:
        decoding.append(batch.decodes * seconds(batch))
        return seconds(batch)

    arrivals = list(islice(Load.parse("in=2-400,out=~100,rate=9").arrivals(4096), 500))
    served = served_alone(arrivals, noting)
    assert sum(decoding) == pytest.approx(sum(each.last - each.first for each in served), rel=2e-3)


def test_tokens_are_conserved() -> None:
    computed = []

    def noting(batch: Batch) -> float:
        computed.append(batch.tokens)
        return seconds(batch)

    load = Load.parse("in=100-300,out=1-80,rate=9,hit=0.4,groups=3")
    arrivals = list(islice(load.arrivals(4096), 500))
    served = served_alone(arrivals, noting)
    assert sorted(each.asked for each in served) == arrivals
    assert all(each.tokens == each.asked.answer for each in served)
    cached = sum(each.cached for each in served)
    # The last token of an answer is sampled and not computed.
    assert sum(computed) == sum(each.prompt + each.answer - 1 for each in arrivals) - cached


def test_the_figures_of_a_simulation() -> None:
    result = serve("in=100-300,out=1-80,rate=9,hit=0.4,groups=3", 500)
    answers = [served.asked.answer for served in result.requests]
    assert result.tokens == sum(answers)
    assert result.gaps.total == sum(answers) - 500
    assert result.cached == pytest.approx(0.4, rel=0.1)
    assert result.mean_decodes == (sum(answers) - 500) / result.steps
    residence = mean(served.last - served.arrival for served in result.requests)
    assert result.mean_live == pytest.approx(500 / result.seconds * residence)


def test_overload_grows_the_queue() -> None:
    def growth(text: str) -> float:
        waits = [
            served.ttft
            for served in sorted(serve(text, 1200).requests, key=lambda served: served.arrival)
        ]
        return mean(waits[900:]) / mean(waits[300:600])

    assert growth("in=400,out=100,rate=30") > 2
    assert growth("in=400,out=100,rate=10") < 1.2


def test_equal_seeds_give_equal_results() -> None:
    first, again, other = (
        serve("in=~200,out=~100,rate=30", 300, replicas=3, routing="random", seed=seed)
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first.requests != other.requests


def test_a_user_asks_again_after_each_answer() -> None:
    result = serve("in=~200,out=~100,users=7", 300)
    assert len(result.requests) == 300
    assert result.mean_live == pytest.approx(7, rel=0.05)
    starts = sorted(served.arrival for served in result.requests)
    ends = sorted(served.last for served in result.requests)
    assert starts[:7] == [0.0] * 7
    assert starts[7:] == pytest.approx(ends[:-7])


def test_routing_by_load_has_the_shorter_tail() -> None:
    by_chance, by_load = (
        serve("in=400,out=~100,rate=70", 1500, replicas=5, routing=routing)
        for routing in ("random", "least-loaded")
    )
    assert by_load.latency.ttft_p99 < 0.7 * by_chance.latency.ttft_p99


def test_routing_by_prefix_finds_more_in_the_caches() -> None:
    limits = replace(LIMITS, num_blocks=600)
    by_load, by_prefix = (
        serve("in=400,out=20,rate=40,hit=0.8,groups=60", 1000, limits, replicas=5, routing=routing)
        for routing in ("least-loaded", "prefix")
    )
    assert by_prefix.cached > by_load.cached + 0.1
    assert by_prefix.latency.ttft_p50 < by_load.latency.ttft_p50


def test_routing_by_prefix_bounds_the_load_of_an_engine() -> None:
    """Without a bound, one group's requests would all go to one of the engines."""
    result = serve("in=400,out=20,rate=60,hit=0.5", 1500, replicas=5, routing="prefix")
    shares = [
        sum(served.engine == number for served in result.requests) / 1500 for number in range(5)
    ]
    assert max(shares) < 0.3


def test_requests_without_a_prefix_go_to_the_least_loaded_engine() -> None:
    by_load, by_prefix = (
        serve("in=400,out=20,rate=60", 300, replicas=5, routing=routing)
        for routing in ("least-loaded", "prefix")
    )
    assert by_load == by_prefix


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            {"routing": "round"},
            "routing is 'round'; it must be one of random, least-loaded, prefix",
        ),
        ({"replicas": 0}, "replicas is 0; it must be at least 1"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused(how: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate([Arrival(0.0, 5, 5)], LIMITS, seconds, **how)  # type: ignore[arg-type]
