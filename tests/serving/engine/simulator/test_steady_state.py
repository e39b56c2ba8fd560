"""The steady state's formulas, against simulations with the real scheduler.

docs/plan.md has the errors; the bounds here are a little wider.
"""

from __future__ import annotations

from itertools import islice

import pytest

from weft.models.plan.batch import Batch
from weft.models.plan.load import Load, Objective
from weft.models.plan.steady_state import largest_rate, steady_state
from weft.serving.engine.simulator.fleet import EngineLimits, simulate

NORMAL = (256, 2048, 20_000)


def seconds(batch: Batch) -> float:
    """Seconds of a step, as of an 8-billion model on one GPU."""
    attended = batch.decodes * batch.decode_context
    attended += 0.05 * batch.prefill_tokens * batch.prefill_context
    return 2e-4 + max(8e-3, 2.2e-5 * batch.tokens) + 6e-8 * attended


@pytest.mark.parametrize(
    ("text", "count", "limits", "median", "tail", "between"),
    [
        # load, requests, (slots, budget, blocks); errors of the first token's median and 99th
        # percentile, and of the times between tokens
        ("in=1000,out=200,rate=0.1", 300, NORMAL, 0.02, 0.05, 0.02),
        ("in=1000,out=200,rate=4", 1500, NORMAL, 0.05, 0.1, 0.05),
        ("in=1000,out=200,rate=20", 3000, NORMAL, 0.1, 0.25, 0.1),
        ("in=2000,out=100,rate=8,hit=0.5", 2000, NORMAL, 0.05, 0.1, 0.05),
        ("in=500-1500,out=100-300,rate=12", 2000, NORMAL, 0.1, 0.15, 0.15),
        ("in=4000,out=100,rate=4", 1500, NORMAL, 0.2, 0.15, 0.15),
        ("in=~1000,out=~200,rate=8", 3000, NORMAL, 0.2, 0.4, 0.15),
        ("in=1000,out=200,rate=8", 2000, (256, 256, 20_000), 0.05, 0.15, 0.05),
        ("in=1000,out=200,rate=11", 4000, (32, 2048, 20_000), 0.2, 0.6, 0.05),
    ],
    ids=str,
)
def test_the_error_of_the_steady_state(
    text: str,
    count: int,
    limits: tuple[int, int, int],
    median: float,
    tail: float,
    between: float,
) -> None:
    load = Load.parse(text)
    slots, budget, blocks = limits
    predicted = steady_state(
        *(load, seconds),
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        kv_tokens=16 * blocks,
    )
    engine = EngineLimits(slots, budget, 16_384, blocks)
    found = simulate(islice(load.arrivals(16_384), count), engine, seconds)
    assert predicted.latency.ttft_p50 == pytest.approx(found.latency.ttft_p50, rel=median)
    assert predicted.latency.ttft_p99 == pytest.approx(found.latency.ttft_p99, rel=tail)
    assert predicted.latency.itl_p50 == pytest.approx(found.latency.itl_p50, rel=between)
    assert predicted.latency.itl_p99 == pytest.approx(found.latency.itl_p99, rel=between)
    assert predicted.mean_decodes == pytest.approx(found.mean_decodes, rel=0.1)
    assert predicted.utilisation == pytest.approx(found.busy, rel=0.1)


def test_the_largest_rate_is_where_queues_begin_to_grow() -> None:
    load = Load.parse("in=1000,out=200,rate=1")
    limits = (64, 2048, 20_000)
    top = largest_rate(
        *(load, seconds, Objective()),
        max_num_seqs=limits[0],
        max_num_batched_tokens=limits[1],
        kv_tokens=16 * limits[2],
    )

    def growth(rate: float) -> float:
        arrivals = islice(Load.parse(f"in=1000,out=200,rate={rate}").arrivals(4096), 3000)
        engine = EngineLimits(limits[0], limits[1], 4096, limits[2])
        served = simulate(arrivals, engine, seconds).requests
        waits = [each.ttft for each in sorted(served, key=lambda each: each.arrival)]
        return sum(waits[2000:]) / sum(waits[1000:2000])

    assert growth(0.9 * top) < 1.2
    assert growth(1.1 * top) > 1.4
