"""Distributions of lengths: their notation, their draws, their moments and quantiles."""

from __future__ import annotations

import random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import ConfigError
from weft.models.plan.lengths import Lengths


@given(st.integers(1, 500), st.integers(0, 500), st.integers())
def test_a_uniform_length_stays_in_its_range_and_reads_back(low: int, more: int, seed: int) -> None:
    lengths = Lengths.parse(f"{low}-{low + more}", "--prompt")
    assert low <= lengths.draw(random.Random(seed)) <= low + more
    assert Lengths.parse(str(lengths), "--prompt") == lengths


def test_each_kind_of_length_has_its_distribution() -> None:
    rng = random.Random(0)
    assert {Lengths.parse("7", "").draw(rng) for _ in range(100)} == {7}
    assert {Lengths.parse("3-5", "").draw(rng) for _ in range(200)} == {3, 4, 5}
    drawn = [Lengths.parse("~200", "").draw(rng) for _ in range(20_000)]
    assert mean(drawn) == pytest.approx(200, rel=0.05)
    assert min(drawn) >= 1
    assert max(drawn) > 1000
    assert str(Lengths.parse("~200", "")) == "~200"


@pytest.mark.parametrize("text", ["", "0", "-3", "9-3", "~1-2", "1.5", "many", "1-2-3", "~", "٣"])
def test_a_bad_distribution_is_refused_by_its_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--prompt is "):
        Lengths.parse(text, "--prompt")


@pytest.mark.parametrize(
    "lengths",
    [Lengths(7, 7), Lengths(3, 50), Lengths(200, 200, exponential=True), Lengths.of([5, 1, 9, 1])],
    ids=str,
)
def test_moments_and_quantiles_are_those_of_the_draws(lengths: Lengths) -> None:
    rng = random.Random(0)
    drawn = sorted(lengths.draw(rng) for _ in range(40_000))
    assert mean(drawn) == pytest.approx(lengths.mean, rel=0.02)
    assert mean(each * each for each in drawn) == pytest.approx(lengths.mean_square, rel=0.04)
    for share in (0.1, 0.6, 0.9):
        found = drawn[int(share * len(drawn))]
        assert found == pytest.approx(lengths.quantile(share), rel=0.06, abs=1)
