"""Greedy sampling against Python, and token weights against float64, wherever they are."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import compiled_kernels

from weft.kernels.cpu.sampling import ONE, argmax, weigh


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(0, 5),
    n=st.integers(1, 90),
    levels=st.sampled_from([1, 3, 10_000]),
    scale=st.sampled_from([-1.0, 1.0, math.inf]),
    nan=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    compiled=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_argmax_is_the_first_of_the_largest(
    rows: int,
    n: int,
    levels: int,
    scale: float,
    nan: bool,
    dtype: torch.dtype,
    compiled: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    x = ((torch.randint(levels, (rows, n)) - levels // 2) * scale).nan_to_num(0.5).to(dtype)
    x = x + 0 if scale == math.inf else x - 7  # all below zero, too
    if nan and rows:
        x[0, seed % n] = torch.nan
    with compiled_kernels(compiled):
        largest, index = argmax(x)
    for row, value, at in zip(x.tolist(), largest.tolist(), index.tolist(), strict=True):
        if any(map(math.isnan, row)):
            assert math.isnan(value)
            assert math.isnan(row[at])
        else:
            assert value == max(row) == row[at]
            assert not compiled or at == row.index(value)


@pytest.mark.parametrize("compiled", [True, False])
def test_argmax_takes_views(compiled: bool) -> None:
    x = torch.randn(6, 40).bfloat16()
    with compiled_kernels(compiled):
        largest, index = argmax(x[::2, 5:33])
    assert torch.equal(largest, x[::2, 5:33].float().amax(dim=-1))
    assert torch.equal(x[::2, 5:33].gather(1, index[:, None])[:, 0].float(), largest)


@pytest.mark.parametrize("compiled", [True, False])
def test_weights_are_the_power(compiled: bool) -> None:
    x = torch.cat([torch.linspace(-45, 0, 100_003), torch.tensor([0.0, -41.1, -300, -torch.inf])])
    with compiled_kernels(compiled):
        weights = weigh(x)
    torch.testing.assert_close(weights.double(), x.double().exp2() * ONE, rtol=4e-6, atol=1.0)
    assert weights[-4:].tolist() == [ONE, 0, 0, 0]
    assert weights.max() == ONE
    assert not weights[x < -41].any()


@settings(max_examples=80, deadline=None)
@given(
    start=st.integers(0, 100),
    count=st.one_of(st.integers(0, 100), st.integers(65_000, 70_000)),
    compiled=st.booleans(),
)
def test_weights_do_not_depend_on_the_place(start: int, count: int, compiled: bool) -> None:
    x = torch.rand(70_200, generator=torch.Generator().manual_seed(0)) * -40
    with compiled_kernels(compiled):
        assert torch.equal(weigh(x)[start : start + count], weigh(x[start : start + count].clone()))
        rows = x[: count // 3 * 3].view(3, -1)
        assert torch.equal(weigh(rows).flatten(), weigh(x)[: count // 3 * 3])
