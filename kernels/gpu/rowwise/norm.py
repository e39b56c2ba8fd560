"""Root-mean-square norms (Zhang and Sennrich 2019), with an optional residual and fp8 output.

    rms_norm(x [T, N]) -> out [T, N], and on request: total [T, N], scale [T]

Each program takes one row and holds it in registers. It adds the residual, sums the squares, scales
the row and stores it. Programs share no outputs, so they need no signals. All arithmetic is
float32, and numbers are rounded when they are stored. The norm uses the rounded sum x + residual.
The result therefore has the same bits as a separate addition followed by a norm.
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


@triton.jit
def normalize(
    row,  # float32 [BLOCK], 0 from N on
    weight,  # [N]
    eps,
    N,
    BLOCK: tl.constexpr,
):
    """Compute the norm of a row: float32 [BLOCK], 0 from N on."""
    column = tl.arange(0, BLOCK)
    scale = tl.load(weight + column, mask=column < N, other=0.0).to(tl.float32)
    return row * tl.rsqrt(tl.sum(row * row, axis=0) / N + eps) * scale


@triton.jit
def normalize_rows(
    out,  # [T, N]
    total,  # [T, N], or None; receives x + residual
    scale,  # float32 [T], or None
    x,  # [T, N]
    residual,  # [T, N], or None
    weight,  # [N]
    eps,
    N,
    BLOCK: tl.constexpr,
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
    value = normalize(value, weight, eps, N, BLOCK)
    if scale is not None:
        divisor = fp8_scale(value, 0)
        tl.store(scale + row, divisor)
        value = value / divisor
    tl.store(out + at, cast(value, out.dtype.element_ty), mask=inside)


class Normed(NamedTuple):
    """Results from `rms_norm`.

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
    check = functools.partial(require, "rms_norm")
    require_rows(check, "x", x)
    rows, columns = x.shape
    require_tensor(check, "weight", weight, (columns,), x.device, *RESULTS)
    check("eps", eps, eps > 0, "be positive")
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
            eps=float(eps),
            N=columns,
            BLOCK=block,
            num_warps=warps,
        )
    return Normed(out, total, scale)
