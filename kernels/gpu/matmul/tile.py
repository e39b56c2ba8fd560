"""The tile of a product that all products share, overlapped or not.

Tiles are ordered in groups with GROUP rows of tiles, column by column. Programs that run at the
same time then read few rows of x and few columns of w, which stay in L2 (Triton's tutorials 3 and
9). Triton pipelines the loop over K: the next blocks are copied to shared memory while the tensor
cores multiply (cp.async, or the tensor memory accelerator from sm_90 on).

Weights may be stored as [K, N], or as the transpose of [N, K], the layout in checkpoints. In 16
bits tensor cores take both layouts; on sm_90 they need fp8 weights as [N, K].

A weight may also be a PackedMatrix (packed.py): quantised, [N, K]. Its tile is dequantised in
registers, in float32, and rounded to x's dtype. So the product is that of the dequantised weight,
but reads a half or a quarter of its bytes.

float32 operands are multiplied in float32, not TF32: accurate but slow. fp8 products are summed
by the tensor core, on sm_90 with fewer bits than float32.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from weft.kernels.gpu.matmul.epilogue import (
    add_bias,
    finish,
    scale,
    silu_multiply,
    store_tile,
)
from weft.kernels.gpu.matmul.packed_tile import load_packed

GROUP = 8
"""Number of rows of tiles in a group."""


class Form(NamedTuple):
    """Compile-time constants of a product: the kernel argument FORM (gpu/runtime/peers.py).

    Attributes:
        block_m, block_n, block_k: sides of a tile.
        group: number of rows of tiles in a group.
        weights: number of weights, from 1 to 3.
        silu: the result is silu(gate) * up; see Epilogue.
        transposed: weights are stored as [N, K].
        scale_rows, scale_columns: each row of x, each column of w has its own scale.
        even_m, even_n, even_k: the block's side divides the matrix's side, so loads need no mask.
        tma: x and the weights are TMA descriptors.
        scale_group: number of columns of x that share a scale, a multiple of block_k; 0 if a scale
            is for a whole row.
        packed: the kind of a quantised weight's codes; "" for plain weights.
        packed_rows, packed_columns: rows and columns of the stored [N, K] that share a scale; 0
            for all.
    """

    block_m: int
    block_n: int
    block_k: int
    group: int
    weights: int
    silu: bool
    transposed: bool
    scale_rows: bool
    scale_columns: bool
    even_m: bool
    even_n: bool
    even_k: bool
    tma: bool = False
    scale_group: int = 0
    packed: str = ""
    packed_rows: int = 0
    packed_columns: int = 0


@triton.jit
def tile_at(index, rows, columns, group):
    """Return (row, column) of tile `index` in rows x columns: `group` down, then one right."""
    first = index // (group * columns) * group
    height = tl.minimum(rows - first, group)
    within = index % (group * columns)
    return first + within % height, within // height


@triton.jit
def load_left(
    x,  # pointer to [rows, K], TMA descriptor, or pointers to rows: multiply_and_finish
    row,
    rows,
    start,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA: tl.constexpr,
):
    """Load x[row : row + BLOCK_M, start : start + BLOCK_K], zeros outside."""
    if TMA:
        block = x.load([row, start])
    else:
        m, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
        if len(x.shape):
            at = x[:, None] + (start + k)[None, :]
        else:
            at = x + (tl.cast(row, tl.int64) * K + start) + (m[:, None] * K + k[None, :])
        if EVEN_M and EVEN_K:
            block = tl.load(at)
        elif EVEN_K:
            block = tl.load(at, mask=(m < rows - row)[:, None], other=0.0)
        elif EVEN_M:
            block = tl.load(at, mask=(k < K - start)[None, :], other=0.0)
        else:
            inside = (m < rows - row)[:, None] & (k < K - start)[None, :]
            block = tl.load(at, mask=inside, other=0.0)
    return block


@triton.jit
def load_right(
    w,  # pointer to [K, N], or to [N, K] if FORM.transposed; or TMA descriptor
    scales,  # float32 [blocks of rows, blocks of columns] of a packed weight, or None
    zeros,  # int8 zero points, likewise, or None
    column,
    N,
    start,
    K,
    dtype: tl.constexpr,  # of the result, if the weight is packed
    FORM: tl.constexpr,
):
    """Load w[start : start + BLOCK_K, column : column + BLOCK_N], zeros outside."""
    BLOCK_N: tl.constexpr = FORM.block_n
    BLOCK_K: tl.constexpr = FORM.block_k
    EVEN_N: tl.constexpr = FORM.even_n
    EVEN_K: tl.constexpr = FORM.even_k
    TMA: tl.constexpr = FORM.tma
    PACKED: tl.constexpr = FORM.packed
    PACKED_ROWS: tl.constexpr = FORM.packed_rows
    PACKED_COLUMNS: tl.constexpr = FORM.packed_columns
    if PACKED != "":
        block = load_packed(
            w, scales, zeros, column, N, start, K, BLOCK_N, BLOCK_K, PACKED, PACKED_ROWS,
            PACKED_COLUMNS,
        ).to(dtype).T  # fmt: skip
    elif FORM.transposed:
        block = load_left(w, column, N, start, K, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K, TMA).T
    else:
        block = load_left(w, start, K, column, N, BLOCK_K, BLOCK_N, EVEN_K, EVEN_N, TMA)
    return block


@triton.jit
def add_product(
    total,  # float32 [BLOCK_M, BLOCK_N]
    left,
    right,
    x_scale,  # float32 [BLOCK_M], or None
):
    """Return total + left @ right; with scales, each product row is multiplied by its scale."""
    if x_scale is None:
        total = tl.dot(left, right, total, input_precision="ieee")
    else:
        total += tl.dot(left, right, input_precision="ieee") * x_scale[:, None]
    return total


@triton.jit
def load_scales(
    x_scale,  # float32 [rows, ceil(K / SCALE_GROUP)]; ignored if SCALE_GROUP is 0
    row,
    rows,
    start,
    K,
    BLOCK_M: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
):
    """Load scales for x[row : row + BLOCK_M] at column `start`: float32 [BLOCK_M]; or None."""
    if SCALE_GROUP > 0:
        m = row + tl.arange(0, BLOCK_M)
        at = tl.cast(m, tl.int64) * tl.cdiv(K, SCALE_GROUP) + start // SCALE_GROUP
        scales = tl.load(x_scale + at, mask=m < rows, other=0.0)
    else:
        scales = None
    return scales


@triton.jit
def multiply_tile(
    x,  # [rows, K]
    row,  # first row in x
    rows,
    w,  # [K, N], or [N, K] if FORM.transposed
    column,  # first column in w
    N,
    K,
    x_scale,  # float32 [rows, ceil(K / SCALE_GROUP)]; ignored if SCALE_GROUP is 0
    FORM: tl.constexpr,
    scales=None,  # of w: load_right
    zeros=None,
):
    """Compute x[row : row + BLOCK_M] @ w[:, column : column + BLOCK_N], float32; zeros outside."""
    BLOCK_M: tl.constexpr = FORM.block_m
    BLOCK_N: tl.constexpr = FORM.block_n
    BLOCK_K: tl.constexpr = FORM.block_k
    EVEN_M: tl.constexpr = FORM.even_m
    EVEN_K: tl.constexpr = FORM.even_k
    TMA: tl.constexpr = FORM.tma
    SCALE_GROUP: tl.constexpr = FORM.scale_group
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        left = load_left(x, row, rows, start, K, BLOCK_M, BLOCK_K, EVEN_M, EVEN_K, TMA)
        right = load_right(w, scales, zeros, column, N, start, K, left.dtype, FORM)
        of_x = load_scales(x_scale, row, rows, start, K, BLOCK_M, SCALE_GROUP)
        total = add_product(total, left, right, of_x)
    return total


@triton.jit
def multiply_two_tiles(
    x,
    row,
    rows,
    gate,
    up,
    column,
    N,
    K,
    x_scale,
    FORM: tl.constexpr,
    gate_scales=None,  # see load_right
    gate_zeros=None,
    up_scales=None,
    up_zeros=None,
):
    """Compute `multiply_tile` for two weights with the same shape, and read x only once."""
    BLOCK_M: tl.constexpr = FORM.block_m
    BLOCK_N: tl.constexpr = FORM.block_n
    BLOCK_K: tl.constexpr = FORM.block_k
    EVEN_M: tl.constexpr = FORM.even_m
    EVEN_K: tl.constexpr = FORM.even_k
    TMA: tl.constexpr = FORM.tma
    SCALE_GROUP: tl.constexpr = FORM.scale_group
    first = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    second = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        left = load_left(x, row, rows, start, K, BLOCK_M, BLOCK_K, EVEN_M, EVEN_K, TMA)
        right = load_right(gate, gate_scales, gate_zeros, column, N, start, K, left.dtype, FORM)
        of_x = load_scales(x_scale, row, rows, start, K, BLOCK_M, SCALE_GROUP)
        first = add_product(first, left, right, of_x)
        right = load_right(up, up_scales, up_zeros, column, N, start, K, left.dtype, FORM)
        second = add_product(second, left, right, of_x)
    return first, second


@triton.jit
def count_columns(
    widths,  # columns in each of the three weights
    FORM: tl.constexpr,
):
    """Count the columns of tiles in the result for all weights."""
    BLOCK_N: tl.constexpr = FORM.block_n
    WEIGHTS: tl.constexpr = FORM.weights
    PAIR: tl.constexpr = FORM.silu and FORM.weights == 2
    count = tl.cdiv(widths[0], BLOCK_N)
    if WEIGHTS > 1 and not PAIR:
        count += tl.cdiv(widths[1], BLOCK_N)
    if WEIGHTS > 2:
        count += tl.cdiv(widths[2], BLOCK_N)
    return count


@triton.jit
def multiply_and_finish(
    x,  # [rows, K]
    row,
    rows,
    index,  # column of tiles
    w0,  # [K, n0], or [n0, K] if FORM.transposed
    w1,  # like w0, or None; so is w2
    w2,
    widths,  # n0, n1, n2
    # float32 [rows] or [1]; [rows, ceil(K / FORM.scale_group)] if scale_group is not 0; or None
    x_scale,
    w_scale,  # float32 [n0 + n1 + n2] or [1], or None
    bias,  # [n0 + n1 + n2], or None
    residual,  # [rows, N'], or None
    out,  # [rows, N']
    K,
    FORM: tl.constexpr,
    scales0=None,  # of packed weights: load_right
    zeros0=None,
    scales1=None,
    zeros1=None,
):
    """Compute one tile of the result, and store it.

    If the rows are not contiguous, x, x_scale, residual and out are blocks of pointers [BLOCK_M],
    one for each row. Only the first `rows` pointers count then, and `row` is 0.
    """
    BLOCK_N: tl.constexpr = FORM.block_n
    WEIGHTS: tl.constexpr = FORM.weights
    SILU: tl.constexpr = FORM.silu
    SCALE_ROWS: tl.constexpr = FORM.scale_rows
    SCALE_COLUMNS: tl.constexpr = FORM.scale_columns
    EVEN: tl.constexpr = FORM.even_m and FORM.even_n
    n0 = widths[0]
    row_scale = None if FORM.scale_group > 0 else x_scale
    if SILU and WEIGHTS == 2:
        at = index * BLOCK_N
        gate, up = multiply_two_tiles(
            x, row, rows, w0, w1, at, n0, K, x_scale, FORM, scales0, zeros0, scales1, zeros1
        )
        up_scale = w_scale + n0 if SCALE_COLUMNS else w_scale
        gate = scale(gate, row_scale, w_scale, row, rows, at, n0, SCALE_ROWS, SCALE_COLUMNS)
        up = scale(up, row_scale, up_scale, row, rows, at, n0, SCALE_ROWS, SCALE_COLUMNS)
        gate = add_bias(gate, bias, at, n0)
        up = add_bias(up, None if bias is None else bias + n0, at, n0)
        total = silu_multiply(gate, up)
        store_tile(total, residual, out, row, rows, at, n0, n0, EVEN)
    else:
        w, N, first, stride = w0, n0, 0, n0
        if WEIGHTS > 1:
            n1 = widths[1]
            later = index >= tl.cdiv(n0, BLOCK_N)
            w, N, first = tl.where(later, w1, w0), tl.where(later, n1, n0), tl.where(later, n0, 0)
            index -= tl.where(later, tl.cdiv(n0, BLOCK_N), 0)
            stride = n0 + n1
        if WEIGHTS > 2:
            n2 = widths[2]
            last = later & (index >= tl.cdiv(n1, BLOCK_N))
            w, N, first = (
                tl.where(last, w2, w),
                tl.where(last, n2, N),
                tl.where(last, n0 + n1, first),
            )
            index -= tl.where(last, tl.cdiv(n1, BLOCK_N), 0)
            stride = n0 + n1 + n2
        at = index * BLOCK_N
        total = multiply_tile(x, row, rows, w, at, N, K, x_scale, FORM, scales0, zeros0)
        scales = w_scale + first if SCALE_COLUMNS else w_scale
        total = scale(total, row_scale, scales, row, rows, at, N, SCALE_ROWS, SCALE_COLUMNS)
        finish(
            total,
            None if bias is None else bias + first,
            None if residual is None else residual + first,
            out + first,
            row,
            rows,
            at,
            N,
            stride,
            SILU,
            EVEN,
        )
