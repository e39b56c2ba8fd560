"""Loads and objectives as users write them, and the errors for what they get wrong."""

from __future__ import annotations

import math
from itertools import islice, pairwise
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import ConfigError
from weft.models.plan.arrivals import Arrival
from weft.models.plan.lengths import Lengths
from weft.models.plan.load import Latency, Load, Objective


def test_a_load_reads_as_written() -> None:
    load = Load.parse("in=500-1500, out=~200, rate=8, hit=0.3, groups=20")
    assert load == Load(Lengths(500, 1500), Lengths(200, 200, True), 8.0, None, 0.3, 20)
    assert Load.parse("in=1000,out=200,users=64").users == 64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--load has ''; it can have in, out, rate, users, hit, groups, log"),
        ("in=5,out=5,rate=1,speed=3", "--load has 'speed'; it can have"),
        ("in=5,out=5,rate=1,in=6", "--load has in twice"),
        ("in=5,out=5,rate", "--load has rate without a value"),
        ("in=5,out=5,rate=", "--load has rate without a value"),
        ("out=5,rate=1", "it has no in"),
        ("in=5,rate=1", "it has no out"),
        ("in=5,out=5", "it must have either rate or users"),
        ("in=5,out=5,rate=1,users=2", "it must have either rate or users"),
        ("in=0,out=5,rate=1", "in of --load is '0'"),
        ("in=5,out=-5,rate=1", "out of --load is '-5'"),
        ("in=5,out=5,rate=-1", "rate of --load is '-1'; it must be a number above 0, at most"),
        ("in=5,out=5,rate=0", "rate of --load is '0'"),
        ("in=5,out=5,rate=nan", "rate of --load is 'nan'"),
        ("in=5,out=5,rate=inf", "rate of --load is 'inf'"),
        ("in=5,out=5,rate=1e30", "rate of --load is '1e30'"),
        ("in=5,out=5,rate=fast", "rate of --load is 'fast'"),
        ("in=5,out=5,users=0", "users of --load is '0'; it must be a whole number from 1 to"),
        ("in=5,out=5,users=1.5", "users of --load is '1.5'"),
        ("in=5,out=5,users=99999999999999999999", "users of --load is '9999"),
        ("in=5,out=5,rate=1,hit=1", "hit of --load is '1'; it must be a number from 0 to below 1"),
        ("in=5,out=5,rate=1,hit=-0.1", "hit of --load is '-0.1'"),
        ("in=5,out=5,rate=1,groups=0", "groups of --load is '0'"),
        ("log=a.jsonl,rate=3", "--load has log and rate"),
        ("log=/no/such/file", "log is /no/such/file; it cannot be read"),
    ],
)
def test_a_bad_load_is_refused_by_its_field(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Load.parse(text)
    assert message in str(error.value)


def test_a_log_gives_its_rate_and_lengths(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    log.write_text(
        '{"time":"2026-11-22T07:50:49.5+00:00","level":"info","message":"ready"}\n'
        '{"time":"2026-11-22T07:50:53+00:00","seconds":1.0,"prompt_tokens":7,"output_tokens":2}\n'
        '{"time":"2026-11-22T07:50:51+00:00","seconds":1.0,"prompt_tokens":5,"output_tokens":10}\n'
        '{"time":"2026-11-22T07:50:52+00:00","status":429,"prompt_tokens":0,"output_tokens":0}\n'
    )
    load = Load.parse(f"log={log},hit=0.5")
    assert load.rate == 0.5
    assert (load.prompt, load.answer) == (Lengths.of([5, 7]), Lengths.of([2, 10]))
    assert list(load.arrivals(100)) == [Arrival(0.0, 5, 10, 2), Arrival(2.0, 7, 2, 4)]
    load.check_context(15)
    with pytest.raises(ConfigError, match=r"has requests with 15 tokens .* context has 14"):
        load.check_context(14)


def test_the_context_bounds_lengths() -> None:
    load = Load.parse("in=500-1500,out=200,rate=8")
    load.check_context(1700)
    with pytest.raises(ConfigError, match=r"has requests with 1700 tokens .* context has 1699"):
        load.check_context(1699)


@given(st.integers(2, 300), st.integers(0, 2**31), st.integers(1, 9))
def test_arrivals_follow_the_load(max_model_len: int, seed: int, groups: int) -> None:
    load = Load.parse(f"in=~100,out=~100,rate=4,hit=0.25,groups={groups}")
    arrivals = list(islice(load.arrivals(max_model_len, seed), 50))
    assert arrivals == list(islice(load.arrivals(max_model_len, seed), 50))
    times = [arrival.time for arrival in arrivals]
    assert times == sorted(times)
    for arrival in arrivals:
        assert arrival.prompt >= 1 <= arrival.answer
        assert arrival.prompt + arrival.answer <= max_model_len
        assert arrival.prefix == round(arrival.prompt / 4)
        assert 0 <= arrival.group < groups


def test_arrivals_are_a_poisson_process() -> None:
    times = [each.time for each in islice(Load.parse("in=9,out=9,rate=4").arrivals(99), 20_000)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert mean(gaps) == pytest.approx(1 / 4, rel=0.03)
    assert mean(gap > 1 / 4 for gap in gaps) == pytest.approx(math.exp(-1), rel=0.05)


def test_an_objective_reads_as_written_and_bounds_each_figure() -> None:
    objective = Objective.parse("ttft=1, itl=0.03, ttft.p50=0.5")
    assert objective.limits == (("ttft_p99", 1.0), ("itl_p99", 0.03), ("ttft_p50", 0.5))
    assert objective.met(Latency(ttft_p50=0.5, ttft_p99=1.0, itl_p50=9.0, itl_p99=0.03))
    assert not objective.met(Latency(ttft_p50=0.6, ttft_p99=1.0, itl_p50=0.0, itl_p99=0.03))
    assert not objective.met(Latency(ttft_p50=0.5, ttft_p99=1.1, itl_p50=0.0, itl_p99=0.03))
    assert not objective.met(Latency(ttft_p50=0.5, ttft_p99=1.0, itl_p50=0.0, itl_p99=0.04))
    assert Objective().met(Latency(9.0, 9.0, 9.0, 9.0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttft=0", "ttft of --slo is '0'; it must be a number above 0"),
        ("itl=inf", "itl of --slo is 'inf'"),
        ("ttft.p90=1", "--slo has 'ttft.p90'; it can have ttft, ttft.p50"),
        ("ttft=1,ttft.p99=2", "--slo has ttft and ttft.p99, which are the same"),
        ("", "--slo has ''"),
    ],
)
def test_a_bad_objective_is_refused_by_its_field(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Objective.parse(text)
    assert message in str(error.value)
