"""Shared parts of the row-wise kernels: row blocks, fp8 scales and argument checks.

A program holds its whole row in registers, and a norm or a scale therefore reads memory only once.
This limits a row to MAX_BYTES.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.matmul.epilogue import FP8, RESULTS
from weft.kernels.gpu.runtime.arguments import Require, require_tensor
from weft.kernels.gpu.runtime.target import target

MAX_BYTES = 1 << 16
"""Maximum bytes in a program's row: 64 numbers of 16 bits per thread, 16 warps."""

FP8_MAX = tl.constexpr(448.0)
"""Largest float8_e4m3fn number; the format has no infinity."""


def row_blocks(columns: int) -> tuple[int, int]:
    """Return BLOCK and num_warps for programs with one row each: at least 16 numbers a thread."""
    block = triton.next_power_of_2(max(1, columns))
    return block, min(16, max(1, block // 512))


def require_rows(check: Require, name: str, x: Tensor, most: int = 0) -> None:
    """Refuse x unless it is a float matrix with 1 to `most` columns; 0 means MAX_BYTES' worth."""
    check(f"{name}'s shape", list(x.shape), x.dim() == 2, "be a matrix")
    require_tensor(check, name, x, None, x.device, *RESULTS)
    most = most or MAX_BYTES // x.itemsize
    fits = 1 <= x.shape[1] <= most
    check(f"{name}'s columns", x.shape[1], fits, f"be from 1 to {most}")


def require_fp8(check: Require) -> None:
    """Refuse fp8 on GPUs without conversion to it."""
    backend, capability = target()
    able = backend != "cuda" or capability >= 89
    check("fp8", "requested", able, f"not be: sm_{capability} has no {FP8}")


@triton.jit
def fp8_scale(y, axis: tl.constexpr):
    """Return divisors for rows [..., n] that map each row's largest magnitude to FP8_MAX.

    The divisor is 1 for zeros, and infinite if a number is infinite. Division then turns infinities
    into NaN and finite numbers into 0. NaN stays NaN.
    """
    largest = tl.max(tl.abs(y), axis=axis)
    return tl.where(largest == 0, 1.0, largest / FP8_MAX)


@triton.jit
def cast(y, dtype: tl.constexpr):
    """Convert float32 to any dtype; fp8 saturates at FP8_MAX on all targets, and NaN stays NaN."""
    if dtype == tl.float8e4nv:
        y = tl.where(y > FP8_MAX, FP8_MAX, tl.where(y < -FP8_MAX, -FP8_MAX, y))
    return y.to(dtype)
