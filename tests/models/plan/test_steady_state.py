"""The steady state where it is known exactly, and the refusals; the simulator tests the rest."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import ConfigError
from weft.models.plan.batch import Batch
from weft.models.plan.flow import Flow, distribution
from weft.models.plan.load import Load, Objective
from weft.models.plan.steady_state import Steady, largest_rate, steady_state
from weft.models.plan.step_table import StepTable

LIMITS = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "kv_tokens": 32_000}


def seconds(batch: Batch) -> float:
    """Seconds of a step: a floor for the weights, and then a part for each token."""
    return 0.001 + max(0.008, 1e-4 * batch.tokens) + 1e-7 * batch.decodes * batch.decode_context


def state(text: str, **limits: Any) -> Steady:
    return steady_state(Load.parse(text), seconds, **LIMITS | limits)


def test_a_rare_request_waits_for_nothing() -> None:
    found = state("in=400,out=100,rate=0.0001")
    assert found.latency.ttft_p50 == found.latency.ttft_p99 == pytest.approx(0.041)
    step = seconds(Batch(1, 450))
    assert found.latency.itl_p50 == found.latency.itl_p99 == pytest.approx(step)
    assert found.utilisation == pytest.approx(0.0001 * (0.041 + 99 * step), rel=0.01)
    assert found.tokens_per_second == pytest.approx(0.01)


def test_a_long_prompt_takes_several_steps() -> None:
    found = state("in=1100,out=100,rate=0.0001")
    assert found.latency.ttft_p50 == pytest.approx(2 * 0.0522 + 0.009, rel=0.01)


def test_a_prefix_hit_shortens_the_first_token() -> None:
    hit = state("in=400,out=100,rate=0.0001,hit=0.5").latency.ttft_p50
    assert hit == pytest.approx(0.021)


@given(st.floats(0.5, 11), st.sampled_from(["400", "~300", "200-900"]))
def test_latency_and_decodes_grow_with_the_rate(rate: float, prompt: str) -> None:
    less, more = (state(f"in={prompt},out=60,rate={each}") for each in (rate, rate * 1.1))
    assert less.latency.ttft_p99 <= more.latency.ttft_p99 * 1.02
    assert less.mean_decodes < more.mean_decodes
    assert less.utilisation <= more.utilisation <= 1
    assert less.latency.itl_p50 <= less.latency.itl_p99
    assert less.latency.ttft_p50 <= less.latency.ttft_p99


def test_a_rate_above_capacity_is_refused_with_the_largest_one() -> None:
    load = Load.parse("in=400,out=100,rate=40")
    top = largest_rate(load, seconds, Objective(), **LIMITS)
    with pytest.raises(ConfigError, match=f"rate of --load is 40 .* at most {top:.3g}: lower"):
        state("in=400,out=100,rate=40")
    state(f"in=400,out=100,rate={0.99 * top}")
    # Each request takes 400 prompt tokens and 99 decodes, at 1e-4 s each at least.
    assert top < 1 / (499 * 1e-4)


def test_the_largest_rate_meets_the_objective_and_a_larger_one_does_not() -> None:
    load = Load.parse("in=400,out=100,rate=1")
    objective = Objective.parse("ttft=0.2,itl=0.06")
    top = largest_rate(load, seconds, objective, **LIMITS)
    assert 0 < top < largest_rate(load, seconds, Objective(), **LIMITS)
    assert objective.met(state(f"in=400,out=100,rate={top}").latency)
    assert not objective.met(state(f"in=400,out=100,rate={1.05 * top}").latency)
    assert largest_rate(load, seconds, Objective.parse("ttft=0.01"), **LIMITS) == pytest.approx(
        0, abs=1e-5
    )


def test_each_limit_lowers_the_largest_rate() -> None:
    load = Load.parse("in=400,out=100,rate=1")

    def top(**limits: int) -> float:
        return largest_rate(load, seconds, Objective(), **LIMITS | limits)

    assert top(max_num_seqs=4) < 0.8 * top()
    assert top(kv_tokens=2000) < 0.8 * top()
    assert top(max_num_batched_tokens=32) < 0.8 * top()


def test_users_in_a_closed_loop_are_all_accounted_for() -> None:
    """By Little's law, users are the rate times the time from question to answer."""
    found = state("in=400,out=100,users=12")
    latency = found.latency.ttft_p50 + 99 * (1 / (found.rate * 99 / found.mean_decodes))
    assert found.rate * latency == pytest.approx(12, rel=0.05)
    assert state("in=400,out=100,users=500").latency.ttft_p50 > 10 * found.latency.ttft_p50


def test_requests_without_further_tokens_only_wait_for_prompts() -> None:
    found = state("in=400,out=1,rate=10")
    assert found.mean_decodes == 0
    assert (found.latency.itl_p50, found.latency.itl_p99) == (0.0, 0.0)
    assert found.utilisation == pytest.approx(0.41, rel=0.05)


def test_a_cache_without_room_for_a_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="the KV cache has 400 tokens; --load needs 450 for"):
        state("in=400,out=100,rate=1", kv_tokens=400)


@given(st.floats(0.01, 0.99), st.sampled_from([3, 64]))
def test_requests_end_as_often_as_they_come(part: float, slots: int) -> None:
    """The mean over the distribution of decodes: the balance of a queue in a steady state."""
    limits, load = LIMITS | {"max_num_seqs": slots}, Load.parse("in=400,out=100,rate=1")
    rate = part * largest_rate(load, seconds, Objective(), **limits)
    table = StepTable(load, seconds, **limits)
    flows = [Flow.of(table, index, rate) for index in range(len(table.decodes))]
    weights, taken = distribution(flows)
    assert sum(weights) + taken == pytest.approx(1)
    ends = sum(weight * flow.ends for weight, flow in zip(weights, flows, strict=True))
    assert ends + taken * flows[-1].ends == pytest.approx(rate, rel=0.01)


@given(st.floats(1e-4, 1.0), st.integers(2, 512))
def test_full_steps_do_not_keep_up(scale: float, prompt: int) -> None:
    """Their share is 1 without rounding; a bit less would make any rate possible."""
    load = Load.parse(f"in={prompt},out=20,rate=1")
    table = StepTable(load, lambda batch: scale * seconds(batch), **LIMITS)
    for index in range(len(table.decodes)):
        assert Flow.of(table, index, 1e6 / scale).share == 1.0
