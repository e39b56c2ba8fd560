"""The numbers of runs whose answer is known."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import ConfigError
from weft.serving.cli.bench.client import Result
from weft.serving.cli.bench.report import Target, summarize

NO_TARGET = Target()


def result(start: float, prefill: float, gap: float, tokens: int, *, per_event: int = 1) -> Result:
    """A request whose tokens come `gap` seconds apart, or several at once."""
    arrivals = [start + prefill + gap * i for i in range(0, tokens, per_event)]
    return Result(
        due=start, start=start, end=arrivals[-1], asked_tokens=tokens, arrivals=arrivals,
        prompt_tokens=7, output_tokens=tokens,
    )  # fmt: skip


def test_rates_percentiles_and_goodput_of_a_known_run() -> None:
    results = [result(float(i), 0.5 + i / 10, 0.1, 11) for i in range(10)]
    results += [Result(due=0, start=0, end=99, error="timed out")] * 2
    results += [Result(due=0, start=0, end=1, error="refused")]
    report = summarize("4/s", results, Target(ttft=0.95, tpot=0.11), steady=False)
    assert (report.requests, report.failed, report.seconds) == (13, 3, 99.0)
    assert (report.output_tokens, report.prompt_tokens) == (110, 70)
    assert report.total_rate == pytest.approx(110 / 99)
    assert report.request_rate == pytest.approx(10 / 99)
    assert report.goodput == pytest.approx(5 / 99)
    assert report.steady_rate is None
    assert report.errors == {"timed out": 2, "refused": 1}
    assert report.first_error == "timed out"
    ttft = [0.5 + i / 10 for i in range(10)]
    for name, values in (("ttft", ttft), ("latency", [t + 1.0 for t in ttft])):
        expected = dict(
            zip(("p50", "p90", "p99"), np.percentile(values, (50, 90, 99)), strict=True)
        )
        assert getattr(report, name) == pytest.approx(expected)
    assert report.itl["p50"] == pytest.approx(0.1)
    assert report.tpot["p99"] == pytest.approx(0.1)


def test_a_late_start_is_the_users_wait() -> None:
    late = result(5.0, 0.5, 0.1, 3)
    late.due = 2.0
    report = summarize("1/s", [late], NO_TARGET)
    assert report.ttft["p50"] == pytest.approx(3.5)
    assert report.latency["p50"] == pytest.approx(3.7)
    assert report.seconds == pytest.approx(0.7)


@given(
    users=st.integers(1, 64),
    rounds=st.integers(1, 5),
    prefill=st.floats(0.01, 20),
    gap=st.floats(0.001, 0.5),
    tokens=st.integers(20, 200),
    per_event=st.integers(1, 4),
)
def test_steady_rate_of_waves_is_that_of_decoding(
    users: int, rounds: int, prefill: float, gap: float, tokens: int, per_event: int
) -> None:
    """All users ask at once, again and again: prompts take long, then all decode together."""
    wave = prefill + gap * tokens
    results = [
        result(r * wave, prefill, gap, tokens, per_event=per_event)
        for r in range(rounds)
        for _ in range(users)
    ]
    report = summarize("", results, NO_TARGET)
    assert report.steady_rate == pytest.approx(users / gap, rel=2 * per_event / tokens)


@given(
    users=st.integers(10, 40),
    gap=st.floats(0.01, 0.2),
    tokens=st.integers(50, 150),
    drain=st.integers(2, 20),
    seed=st.integers(0, 99),
)
def test_steady_rate_leaves_out_the_start_and_the_tail(
    users: int, gap: float, tokens: int, drain: int, seed: int
) -> None:
    """Users ask again when answered, out of step; at the end one decodes on for long."""
    rng = np.random.default_rng(seed)
    results = []
    for user in range(users):
        now = rng.uniform(0, tokens * gap / 20)
        for i in range(4):
            last = user == 0 and i == 3
            results.append(result(now, gap, gap, tokens * drain if last else tokens))
            now = results[-1].end
    report = summarize("", results, NO_TARGET)
    assert report.steady_rate == pytest.approx(users / gap, rel=0.1)
    assert report.total_rate < report.steady_rate


def test_tokens_that_no_event_shows_count_over_the_whole_answer() -> None:
    results = [result(30.0 * i, 1.0, 0.1, 200) for i in range(2)]
    for silent in results:
        silent.arrivals = [*silent.arrivals[:20], silent.arrivals[-1]]
    report = summarize("1 user", results, NO_TARGET)
    assert report.steady_rate == pytest.approx(10, rel=0.02)
    assert report.tpot["p50"] == pytest.approx(0.1)


def test_steady_rate_of_one_user_is_the_rate_of_decoding() -> None:
    report = summarize("1 user", [result(10.0 * i, 3.0, 0.05, 101) for i in range(3)], NO_TARGET)
    assert report.steady_rate == pytest.approx(20, rel=0.01)


@pytest.mark.parametrize(
    "results",
    [
        [],
        [Result(due=0, start=1, end=2, error="refused")],
        [result(0.0, 1.0, 0.1, 1)],
        [result(0.0, 1.0, 0.1, 3, per_event=3)],
    ],
    ids=["none", "all failed", "one token", "all tokens in one event"],
)
def test_what_cannot_be_said_is_none_and_never_nan(results: list[Result]) -> None:
    report = summarize("1 user", results, NO_TARGET)
    assert report.steady_rate is None
    assert report.itl == {"p50": None, "p90": None, "p99": None}
    json.dumps(asdict(report), allow_nan=False)


def test_short_answers_and_cached_tokens_are_counted() -> None:
    short = result(0.0, 1.0, 0.1, 5)
    short.asked_tokens, short.cached_tokens = 8, 6
    report = summarize("1 user", [short, result(0.0, 1.0, 0.1, 5)], NO_TARGET)
    assert (report.short, report.cached_tokens) == (1, 6)


def test_a_target_holds_what_it_names() -> None:
    one = result(0.0, 1.0, 0.1, 11)
    assert Target.parse(" ttft = 1.0 , tpot=.11").met(one)
    assert Target.parse("latency=2.01").met(one)
    assert not Target.parse("latency=1.99").met(one)
    assert not Target.parse("ttft=0.99,tpot=0.11").met(one)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("itl=1", "has 'itl'; it can have ttft, tpot, latency"),
        ("ttft", "ttft of --target is ''"),
        ("ttft=soon", "is 'soon'; it must be a number above 0"),
        ("ttft=0", "is '0'"),
        ("ttft=nan", "is 'nan'"),
        ("ttft=1,ttft=2", "has ttft twice"),
        ("ttft=1,", "has ''"),
    ],
)
def test_a_target_that_is_none(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Target.parse(text)
