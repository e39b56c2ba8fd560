"""RMSNorm (Zhang and Sennrich 2019) and layer norm (Ba et al. 2016), with an optional residual.

    rms_norm(x [T, N])     -> out [T, N], and on request: total [T, N], scale [T]
    layer_norm(x [T, N])   -> out [T, N], and on request: total [T, N]
    mean_squares(x [T, N]) -> float32 [T, 2], for two parts of each row

Each program takes one row and holds it in registers. It adds the residual, subtracts the mean in a
layer norm, sums the squares, scales the row and stores it. Programs share no outputs, so they need
no signals. All arithmetic is float32, and numbers are rounded when they are stored. The norm uses
the rounded sum x + residual. The result therefore has the same bits as a separate addition followed
by a norm.

`mean_squares` is the first half of norms over the heads of several ranks. The ranks add up its
results, and `rotate_into_cache` does the second half.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.matmul.epilogue import FP8, RESULTS
from weft.kernels.gpu.rowwise.rows import cast, fp8_scale, require_fp8, require_rows, row_blocks
from weft.kernels.gpu.runtime.arguments import require, require_tensor

SQUARES_BLOCK = 1024
"""Columns that a program squares at once."""


@triton.jit
def normalize(
    row,  # float32 [BLOCK], 0 from N on
    weight,  # [N]
    eps,
    N,
    BLOCK: tl.constexpr,
    bias=None,  # [N], or None
    CENTERED: tl.constexpr = False,
):
    """Compute the norm of a row: float32 [BLOCK], 0 from N on."""
    column = tl.arange(0, BLOCK)
    inside = column < N
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if CENTERED:
        row = tl.where(inside, row - tl.sum(row, axis=0) / N, 0.0)
    row = row * tl.rsqrt(tl.sum(row * row, axis=0) / N + eps) * scale
    if bias is not None:
        row += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return row


@triton.jit
def normalize_rows(
    out,  # [T, N]
    total,  # [T, N], or None; receives x + residual
    scale,  # float32 [T], or None
    x,  # [T, N]
    residual,  # [T, N], or None
    weight,  # [N]
    bias,  # [N], or None
    eps,
    N,
    BLOCK: tl.constexpr,
    CENTERED: tl.constexpr,
):
    """Normalize one row. Grid: (T,)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < N
    at = row * N + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        stored = value.to(total.dtype.element_ty)
        tl.store(total + at, stored, mask=inside)
        value = stored.to(tl.float32)
    value = normalize(value, weight, eps, N, BLOCK, bias, CENTERED)
    if scale is not None:
        divisor = fp8_scale(value, 0)
        tl.store(scale + row, divisor)
        value = value / divisor
    tl.store(out + at, cast(value, out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["ranks"])
def square_rows(
    out,  # float32 [T, 2]
    x,  # [T, N]
    first,  # the first part's columns
    second,  # the second part's columns
    ranks,
    N,
    BLOCK: tl.constexpr,
):
    """Compute the mean square of one part of a row, over the ranks. Grid: (T, 2)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    width = tl.where(part == 0, first, second)
    begin = x + row * N + part * first
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(begin + column, mask=column < width, other=0.0).to(tl.float32)
        total += value * value
    mean = tl.sum(total, axis=0) / (width * ranks)
    tl.store(out + 2 * row + part, mean)


class Normed(NamedTuple):
    """Results from `rms_norm` and `layer_norm`.

    Attributes:
        out: [T, N], x's dtype; or float8_e4m3fn, to be multiplied by `scale`.
        total: [T, N], x's dtype: x + residual. None without a residual.
        scale: float32 [T]; None unless out is fp8.
    """

    out: Tensor
    total: Tensor | None
    scale: Tensor | None


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    fp8: bool = False,
) -> Normed:
    """Normalize each row of x, or of x + residual.

    Args:
        x: [T, N], contiguous; float32, float16 or bfloat16. A row has at most 64 KiB.
        weight: [N], any of those dtypes.
        eps: added to the mean square; positive.
        residual: [T, N], x's dtype; added first.
        fp8: scale each row so that its largest magnitude becomes the largest float8_e4m3fn number.

    Raises:
        KernelError: the tensors do not match, or the GPU has no fp8.
    """
    return _normalize("rms_norm", x, weight, eps, residual=residual, fp8=fp8)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Normed:
    """Subtract each row's mean, normalize the row and add the bias; the row is x, or x + residual.

    Args:
        x: [T, N], contiguous; float32, float16 or bfloat16. A row has at most 64 KiB.
        weight: [N], any of those dtypes.
        eps: added to the variance; positive.
        bias: [N], any of those dtypes; None for 0.
        residual: [T, N], x's dtype; added first.

    Raises:
        KernelError: the tensors do not match.
    """
    return _normalize("layer_norm", x, weight, eps, bias=bias, residual=residual, centered=True)


def _normalize(
    op: str,
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    fp8: bool = False,
    centered: bool = False,
) -> Normed:
    check = functools.partial(require, op)
    require_rows(check, "x", x)
    rows, columns = x.shape
    require_tensor(check, "weight", weight, (columns,), x.device, *RESULTS)
    check("eps", eps, eps > 0, "be positive")
    if bias is not None:
        require_tensor(check, "bias", bias, (columns,), x.device, *RESULTS)
    if residual is not None:
        require_tensor(check, "residual", residual, (rows, columns), x.device, x.dtype)
    if fp8:
        require_fp8(check)
    out = torch.empty_like(x, dtype=FP8 if fp8 else x.dtype)
    total = None if residual is None else torch.empty_like(x)
    scale = torch.empty(rows, device=x.device) if fp8 else None
    if rows:
        block, warps = row_blocks(columns)
        normalize_rows[(rows,)](
            out=out,
            total=total,
            scale=scale,
            x=x,
            residual=residual,
            weight=weight,
            bias=bias,
            eps=float(eps),
            N=columns,
            BLOCK=block,
            CENTERED=centered,
            num_warps=warps,
        )
    return Normed(out, total, scale)


def mean_squares(x: Tensor, first: int, second: int, *, ranks: int = 1) -> Tensor:
    """Compute this rank's part of the mean squares of two parts of each row.

    The sum of the results over the ranks is the mean over all their columns.

    Args:
        x: [T, N], contiguous; float32, float16 or bfloat16.
        first, second: number of columns in the two parts, from the row's beginning; at least 1.
        ranks: number of ranks, with equally many columns.

    Returns:
        float32 [T, 2].

    Raises:
        KernelError: x is not such a matrix, or the parts do not fit in it.
    """
    check = functools.partial(require, "mean_squares")
    require_rows(check, "x", x, 2**31 - 1)
    rows, columns = x.shape
    fits = first > 0 and second > 0 and first + second <= columns
    check(
        "first + second", f"{first} + {second}", fits, f"be at most {columns}, and at least 1 each"
    )
    check("ranks", ranks, ranks > 0, "be positive")
    out = torch.empty(rows, 2, device=x.device)
    if rows:
        square_rows[(rows, 2)](
            out=out,
            x=x,
            first=first,
            second=second,
            ranks=ranks,
            N=columns,
            BLOCK=SQUARES_BLOCK,
        )
    return out
