"""SiLU with multiplication, and rounding to fp8 with scales: separately or fused.

    silu_multiply(x [T, 2 N])  -> [T, N]
    quantize(x [T, N])         -> fp8 [T, N], scale [T] or [T, ceil(N / 128)]
    silu_multiply_quantize     both in this order, without rounding in between

A program writes one tile of a row: GROUPS x WIDTH consecutive columns, and their scales. Each group
of WIDTH columns has its own scale. If the whole row has one scale, the row is a single group.
Programs share no outputs, so they need no signals.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.matmul.epilogue import FP8
from weft.kernels.gpu.matmul.epilogue import silu_multiply as multiply
from weft.kernels.gpu.rowwise.rows import (
    MAX_BYTES,
    cast,
    fp8_scale,
    require_fp8,
    require_rows,
    row_blocks,
)
from weft.kernels.gpu.runtime.arguments import require

TILE = 1024
"""Columns that a program takes if a scale does not need the whole row."""

GROUP = 128
"""Columns with a common scale, as in DeepSeek-V3's activations (arXiv:2412.19437)."""

Scales = Literal["row", "group"]


@triton.jit
def activate(
    out,  # [T, N]
    scale,  # float32 [T, groups], or None
    x,  # [T, N], or [T, 2 N]: the gate's columns, then up's
    N,
    groups,
    SILU: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Compute one tile of a row. Grid: (T, tiles)."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = column < N
    begin = x + row * N * (2 if SILU else 1)
    y = tl.load(begin + column, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        y = multiply(y, tl.load(begin + N + column, mask=inside, other=0.0).to(tl.float32))
    if scale is not None:
        divisor = fp8_scale(y, 1)
        tl.store(scale + row * groups + group, divisor, mask=group < groups)
        y = y / divisor[:, None]
    tl.store(out + row * N + column, cast(y, out.dtype.element_ty), mask=inside)


def silu_multiply(x: Tensor) -> Tensor:
    """Compute silu(gate) * up (Shazeer 2020).

    Args:
        x: [T, 2 N], contiguous: the gate's columns, then up's; float32, float16 or bfloat16.

    Returns:
        [T, N], x's dtype.

    Raises:
        KernelError: x is invalid.
    """
    return _launch("silu_multiply", x, None, silu=True)[0]


def quantize(x: Tensor, scales: Scales = "row") -> tuple[Tensor, Tensor]:
    """Divide each row or group by its scale, and round it to fp8.

    A scale is the largest magnitude divided by 448, or 1 if all numbers are 0. If a row or group
    contains infinities, all its numbers become 0 or NaN. NaN stays NaN.

    Args:
        x: [T, N], contiguous; float32, float16 or bfloat16. For "row", a row has at most 64 KiB.
        scales: "row" for one scale per row, "group" for one per 128 columns.

    Returns:
        float8_e4m3fn [T, N], and float32 scales: [T] for rows, [T, ceil(N / 128)] for groups.

    Raises:
        KernelError: x is invalid, or the GPU has no fp8.
    """
    return _quantized("quantize", x, scales, silu=False)


def silu_multiply_quantize(x: Tensor, scales: Scales = "row") -> tuple[Tensor, Tensor]:
    """Apply `silu_multiply` to x [T, 2 N], then `quantize`, without rounding in between."""
    return _quantized("silu_multiply_quantize", x, scales, silu=True)


def _quantized(op: str, x: Tensor, scales: Scales, *, silu: bool) -> tuple[Tensor, Tensor]:
    check = functools.partial(require, op)
    check("scales", repr(scales), scales in ("row", "group"), "be 'row' or 'group'")
    require_fp8(check)
    out, scale = _launch(op, x, scales, silu=silu)
    assert scale is not None
    return out, scale.view(-1) if scales == "row" else scale


def _launch(
    op: str, x: Tensor, scales: Scales | None, *, silu: bool
) -> tuple[Tensor, Tensor | None]:
    check = functools.partial(require, op)
    halves = 2 if silu else 1
    most = halves * MAX_BYTES // x.itemsize if scales == "row" else 2**31 - 1
    require_rows(check, "x", x, most)
    rows, columns = x.shape
    check("x's columns", columns, columns % halves == 0, "be even: half for the gate, half for up")
    n = columns // halves
    out = x.new_empty(rows, n, dtype=x.dtype if scales is None else FP8)
    if scales == "row":
        at_once = 1
        width, warps = row_blocks(n)
    else:
        at_once, width, warps = TILE // GROUP, GROUP, 4
    groups = -(-n // width)
    scale = None if scales is None else torch.empty(rows, groups, device=x.device)
    if rows:
        activate[(rows, -(-groups // at_once))](
            out=out,
            scale=scale,
            x=x,
            N=n,
            groups=groups,
            SILU=silu,
            GROUPS=at_once,
            WIDTH=width,
            num_warps=warps,
        )
    return out, scale
