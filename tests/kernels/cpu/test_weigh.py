"""Weights of tokens against float64, wherever in a tensor they are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import compiled_kernels

from weft.kernels.cpu.weigh import ONE, weigh


@pytest.mark.parametrize("compiled", [True, False])
def test_is_the_power(compiled: bool) -> None:
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
def test_does_not_depend_on_the_place(start: int, count: int, compiled: bool) -> None:
    x = torch.rand(70_200, generator=torch.Generator().manual_seed(0)) * -40
    with compiled_kernels(compiled):
        assert torch.equal(weigh(x)[start : start + count], weigh(x[start : start + count].clone()))
        rows = x[: count // 3 * 3].view(3, -1)
        assert torch.equal(weigh(rows).flatten(), weigh(x)[: count // 3 * 3])
