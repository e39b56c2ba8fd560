"""The largest of each row against Python's own."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import compiled_kernels

from weft.kernels.cpu.argmax import argmax


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(0, 5),
    n=st.integers(1, 90),
    levels=st.sampled_from([1, 3, 10_000]),
    scale=st.sampled_from([-1.0, 1.0, math.inf]),
    nan=st.booleans(),
    compiled=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_is_the_first_of_the_largest(
    rows: int, n: int, levels: int, scale: float, nan: bool, compiled: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    x = ((torch.randint(levels, (rows, n)) - levels // 2) * scale).nan_to_num(0.5).bfloat16()
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
def test_a_row_may_be_a_view(compiled: bool) -> None:
    x = torch.randn(6, 40).bfloat16()
    with compiled_kernels(compiled):
        largest, index = argmax(x[::2, 5:33])
    assert torch.equal(largest, x[::2, 5:33].float().amax(dim=-1))
    assert torch.equal(x[::2, 5:33].gather(1, index[:, None])[:, 0].float(), largest)
