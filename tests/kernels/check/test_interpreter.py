"""What stock Triton's interpreter has wrong, and ours has not."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from weft.kernels.check import interpreter


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


@triton.jit
def combine(x, y, out, OPERATION: tl.constexpr):
    left, right = tl.load(x), tl.load(y)
    if OPERATION == "add":
        result = left + right
    elif OPERATION == "sub":
        result = left - right
    else:
        result = left * right
    tl.store(out, result)


@pytest.mark.parametrize(
    ("operation", "left", "right", "result"),
    [
        ("add", 2**30, 2**30 - 1, 2**31 - 1),
        ("add", 2**30, 2**30, None),
        ("sub", -(2**30), 2**30, -(2**31)),
        ("sub", -(2**30), 2**30 + 1, None),
        ("mul", 2**16, 2**15 - 1, 2**31 - 2**16),
        ("mul", 2**16, 2**15, None),
    ],
)
def test_an_overflow_is_found(operation: str, left: int, right: int, result: int | None) -> None:
    x, y, out = torch.tensor([[left], [right], [0]], dtype=torch.int32)
    with interpreter.installed():
        if result is None:
            with pytest.raises(InterpreterError, match=f"int32 overflow .* {operation}"):
                combine[(1,)](x, y, out, OPERATION=operation)
        else:
            combine[(1,)](x, y, out, OPERATION=operation)
            assert out.item() == result
