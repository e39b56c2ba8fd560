"""Faults of stock Triton's interpreter that ours does not have."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.kernels.interpreter import gpu as interpreter


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
