"""The virtual engine does what the real core does, and its leaps change nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.virtual_core import run_core

from weft.errors import RequestError
from weft.models.interface import NONE, StepInput
from weft.models.plan.arrivals import Arrival
from weft.models.plan.batch import Batch
from weft.models.plan.load import Load
from weft.serving.engine.simulator.fleet import EngineLimits, simulate
from weft.serving.engine.simulator.virtual_engine import batch_of

LIMITS = EngineLimits(
    max_num_seqs=8, max_num_batched_tokens=64, max_model_len=512, num_blocks=80, block_size=8
)


def seconds(batch: Batch) -> float:
    """Seconds of a step, as of a small model."""
    return 0.01 + 1e-4 * batch.tokens + 1e-7 * (batch.decodes * batch.decode_context)


loads = st.builds(
    Load.parse,
    st.builds(
        "in={},out={},rate={},hit={},groups={}".format,
        st.sampled_from(["1", "40", "1-150", "~60"]),
        st.sampled_from(["1", "30", "1-90", "~40"]),
        st.sampled_from([0.5, 3, 20]),
        st.sampled_from([0, 0.6]),
        st.integers(1, 3),
    ),
)


@given(loads, st.integers(0, 99), st.sampled_from([66, 80, 400]))
def test_times_are_those_of_the_real_core(load: Load, seed: int, num_blocks: int) -> None:
    limits = replace(LIMITS, num_blocks=num_blocks)
    arrivals = list(islice(load.arrivals(limits.max_model_len, seed), 25))
    simulated = simulate(arrivals, limits, seconds)
    found = {served.asked.time: (served.first, served.last) for served in simulated.requests}
    assert found == run_core(arrivals, limits, seconds)


@given(
    loads,
    st.integers(0, 99),
    st.sampled_from([66, 80, 400]),
    st.sampled_from([None, 5]),
    st.sampled_from([(1, "random"), (3, "random"), (3, "least-loaded"), (3, "prefix")]),
)
# A question arrives when a step of another engine ends.
@example(Load.parse("in=1,out=~40,rate=0.5"), 82, 80, 5, (3, "random"))
def test_leaps_change_nothing(
    load: Load, seed: int, num_blocks: int, users: int | None, routing: tuple[int, str]
) -> None:
    limits = replace(LIMITS, num_blocks=num_blocks)
    arrivals = list(islice(load.arrivals(limits.max_model_len, seed), 25))
    leaping, single = (
        simulate(
            *(arrivals, limits, seconds),
            replicas=routing[0],
            routing=routing[1],
            users=users,
            seed=seed,
            leap=leap,
        )
        for leap in (True, False)
    )
    assert leaping.requests == single.requests
    assert leaping.steps == single.steps
    assert leaping.gaps.total == single.gaps.total
    assert leaping.latency == single.latency
    assert leaping.busy == pytest.approx(single.busy)


def test_an_idle_engine_answers_after_the_prompt_alone() -> None:
    """With 64 tokens a step, 150 tokens take three steps; each later token takes one step."""
    (served,) = simulate([Arrival(5.0, 150, 3)], LIMITS, seconds).requests
    chunks = [
        seconds(Batch(prefills=1, prefill_tokens=tokens, prefill_context=context))
        for tokens, context in ((64, 32.5), (64, 96.5), (22, 139.5))
    ]
    assert served.ttft == pytest.approx(sum(chunks))
    decodes = sum(seconds(Batch(1, context)) for context in (152, 152))
    assert served.last - served.first == pytest.approx(decodes)


def test_a_prefix_hit_shortens_the_first_token() -> None:
    first, second, other = simulate(
        [
            Arrival(0.0, 120, 2, prefix=100, group=1),
            Arrival(9.0, 120, 2, prefix=100, group=1),
            Arrival(18.0, 120, 2, prefix=100, group=2),
        ],
        LIMITS,
        seconds,
    ).requests
    assert (first.cached, second.cached, other.cached) == (0, 96, 0)  # whole blocks
    assert second.ttft == pytest.approx(seconds(Batch(prefills=1, prefill_tokens=24)))
    assert second.ttft < first.ttft == pytest.approx(other.ttft)


def test_prompts_that_start_differently_need_no_prefix_cache() -> None:
    arrivals = list(islice(Load.parse("in=~60,out=~40,rate=5").arrivals(512), 200))
    limits = replace(LIMITS, num_blocks=1000)  # so that none is preempted
    without = simulate(arrivals, replace(limits, prefix_caching=False), seconds)
    assert without.requests == simulate(arrivals, limits, seconds).requests


def test_a_request_that_never_fits_is_refused() -> None:
    with pytest.raises(RequestError, match="may take 64 blocks of the KV cache, which has 50"):
        simulate([Arrival(0.0, 500, 12)], replace(LIMITS, num_blocks=50), seconds)


def test_the_batch_of_a_step() -> None:
    step = StepInput(
        step=0,
        token_ids=np.zeros(2 + 3 + 5, np.int32),
        positions=NONE,
        query_start=np.array([0, 1, 2, 5, 10], np.int32),
        context_len=np.array([10, 21, 3, 25], np.int32),
        block_table=NONE,
        slot=NONE,
        sample_index=NONE,
        sample_slot=NONE,
        output_index=NONE,
    )
    context = (1 + 2 + 3 + 21 + 22 + 23 + 24 + 25) / 8
    assert batch_of(step, 8) == Batch(2, 16, 2, 8, context)
    assert batch_of(step, 1) == Batch(2, 16, 2, 8, context)
