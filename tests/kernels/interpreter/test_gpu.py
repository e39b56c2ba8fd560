"""Faults of stock Triton's interpreter that ours does not have."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import torch
import triton
import triton.language as tl
from hypothesis import example, given
from hypothesis import strategies as st

from weft.kernels.interpreter import gpu as interpreter
from weft.kernels.interpreter.gpu import fused_multiply_add


@triton.jit
def store_sums(x, out, COUNT: tl.constexpr):
    numbers = tl.load(x + tl.arange(0, COUNT))
    tl.store(out, tl.sum(numbers, 0))
    tl.atomic_add(out + 2, tl.max(tl.cumsum(numbers, 0), 0))


def test_a_sum_of_int32_is_stored_as_one() -> None:
    x, out = torch.arange(8, dtype=torch.int32), torch.tensor([-1, 5, 0, 5], dtype=torch.int32)
    with interpreter.installed():
        store_sums[(1,)](x, out, COUNT=8)
    assert out.tolist() == [28, 5, 28, 5]


@triton.jit
def wrap_around(x, out, COUNT: tl.constexpr):
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, COUNT)), 0).to(tl.int64))


def test_a_sum_of_int32_wraps_around_as_on_a_gpu() -> None:
    x, out = torch.full((2,), 2**31 - 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    with interpreter.installed():
        wrap_around[(1,)](x, out, COUNT=2)
    assert out.item() == -2


@given(st.lists(st.tuples(*[st.floats(-1e6, 1e6, width=32)] * 3), min_size=1))
@example([(1 + 2**-12, 1 + 2**-12, -1.0), (1 + 2**-23, 1 - 2**-24, 2.0**-80)])
def test_a_fused_multiply_add_rounds_once(numbers: list[tuple[float, float, float]]) -> None:
    got = fused_multiply_add(*np.array(numbers, np.float32).T)
    for (x, y, z), each in zip(numbers, got, strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        near = {float(np.nextafter(each, np.float32(way))) for way in (-np.inf, np.inf)}
        distance = abs(Fraction(float(each)) - exact)
        assert all(distance <= abs(Fraction(other) - exact) for other in near)


def test_a_fused_multiply_add_of_infinities() -> None:
    x = np.array([np.inf, 1.0, np.nan, 3e38], np.float32)
    z = np.array([1.0, -np.inf, 1.0, 3e38], np.float32)
    with np.errstate(all="ignore"):
        got = fused_multiply_add(x, np.full(4, 2.0, np.float32), z)
    np.testing.assert_array_equal(got, np.array([np.inf, -np.inf, np.nan, np.inf], np.float32))
