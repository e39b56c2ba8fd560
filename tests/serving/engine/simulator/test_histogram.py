"""A histogram's quantiles are those of its times, within the width of a bin."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.serving.engine.simulator.histogram import Histogram


@given(
    st.lists(st.tuples(st.floats(1e-6, 1e4), st.integers(1, 5)), min_size=1),
    st.floats(0.01, 1.0),
)
def test_quantiles(times: list[tuple[float, int]], share: float) -> None:
    one, two = Histogram(), Histogram()
    for number, (seconds, count) in enumerate(times):
        (one if number % 2 else two).add(seconds, count)
    one.merge(two)
    flat = sorted(seconds for seconds, count in times for _ in range(count))
    assert one.total == len(flat)
    exact = flat[math.ceil(share * len(flat)) - 1]
    assert one.quantile(share) == pytest.approx(exact, rel=0.0026)


def test_an_empty_histogram_has_no_times() -> None:
    assert (Histogram().total, Histogram().quantile(0.5)) == (0, 0.0)
