"""What kernels that work row by row share: how a row is held, fp8 with scales, what is refused.

A program holds all of its row in registers, so that a norm or a scale of the
row needs no second look at memory. That bounds a row: MAX_BYTES.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.matmul.epilogue import FP8, RESULTS
from weft.kernels.gpu.matmul.matmul import target
from weft.kernels.gpu.runtime.arguments import Require, require_tensor

MAX_BYTES = 1 << 16
"""Of a row that one program holds: 64 numbers of 16 bits a thread, of 16 warps."""

FP8_MAX = tl.constexpr(448.0)
"""Of float8_e4m3fn, which has no infinity."""


def row_blocks(columns: int) -> tuple[int, int]:
    """BLOCK and num_warps for programs that hold a row each: 16 numbers a thread, or more."""
    block = triton.next_power_of_2(max(1, columns))
    return block, min(16, max(1, block // 512))


def require_rows(check: Require, name: str, x: Tensor, most: int = 0) -> None:
    """Refuse what is not a matrix of floats, with 1 to `most` columns: those of MAX_BYTES if 0."""
    check(f"{name}'s shape", list(x.shape), x.dim() == 2, "be a matrix")
    require_tensor(check, name, x, None, x.device, *RESULTS)
    most = most or MAX_BYTES // x.itemsize
    fits = 1 <= x.shape[1] <= most
    check(f"{name}'s columns", x.shape[1], fits, f"be from 1 to {most}")


def require_fp8(check: Require) -> None:
    """Refuse fp8 on GPUs that cannot convert to it."""
    backend, capability = target()
    able = backend != "cuda" or capability >= 89
    check("fp8", "asked for", able, f"not be: sm_{capability} has no {FP8}")


@triton.jit
def fp8_scale(y, axis: tl.constexpr):
    """What rows [..., n] are divided by so that the largest number becomes FP8_MAX; 1 for zeros.

    Infinite if a number is: it then becomes NaN, and the others 0. NaN stays NaN.
    """
    largest = tl.max(tl.abs(y), axis=axis)
    return tl.where(largest == 0, 1.0, largest / FP8_MAX)


@triton.jit
def cast(y, dtype: tl.constexpr):
    """float32 to any dtype; fp8 at most FP8_MAX on all targets, and NaN is kept."""
    if dtype == tl.float8e4nv:
        y = tl.where(y > FP8_MAX, FP8_MAX, tl.where(y < -FP8_MAX, -FP8_MAX, y))
    return y.to(dtype)
