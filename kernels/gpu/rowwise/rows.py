"""The common part of row-by-row kernels: holding a row, fp8 with scales, checks.

A program holds its whole row in registers, so a norm or a scale of the row needs no second read
from memory. This limits a row to MAX_BYTES.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.matmul.epilogue import FP8, RESULTS
from weft.kernels.gpu.matmul.matmul import target
from weft.kernels.gpu.runtime.arguments import Require, require_tensor

MAX_BYTES = 1 << 16
"""Maximum size of a row in one program: 64 numbers of 16 bits per thread, with 16 warps."""

FP8_MAX = tl.constexpr(448.0)
"""The largest float8_e4m3fn. The format has no infinity."""


def row_blocks(columns: int) -> tuple[int, int]:
    """Return BLOCK and num_warps for programs with a row each: 16 numbers per thread, or more."""
    block = triton.next_power_of_2(max(1, columns))
    return block, min(16, max(1, block // 512))


def require_rows(check: Require, name: str, x: Tensor, most: int = 0) -> None:
    """Refuse anything but a matrix of floats with 1 to `most` columns (MAX_BYTES per row if 0)."""
    check(f"{name}'s shape", list(x.shape), x.dim() == 2, "be a matrix")
    require_tensor(check, name, x, None, x.device, *RESULTS)
    most = most or MAX_BYTES // x.itemsize
    fits = 1 <= x.shape[1] <= most
    check(f"{name}'s columns", x.shape[1], fits, f"be from 1 to {most}")


def require_fp8(check: Require) -> None:
    """Refuse fp8 on GPUs without conversion to it."""
    backend, capability = target()
    able = backend != "cuda" or capability >= 89
    check("fp8", "asked for", able, f"not be: sm_{capability} has no {FP8}")


@triton.jit
def fp8_scale(y, axis: tl.constexpr):
    """Return the divisor to turn the largest number of rows [..., n] into FP8_MAX; 1 for zeros.

    It is infinite if a number is: that number becomes NaN, and the others 0. NaN stays NaN.
    """
    largest = tl.max(tl.abs(y), axis=axis)
    return tl.where(largest == 0, 1.0, largest / FP8_MAX)


@triton.jit
def cast(y, dtype: tl.constexpr):
    """Cast float32 to any dtype. fp8 is clamped to FP8_MAX on all targets, and NaN is kept."""
    if dtype == tl.float8e4nv:
        y = tl.where(y > FP8_MAX, FP8_MAX, tl.where(y < -FP8_MAX, -FP8_MAX, y))
    return y.to(dtype)
