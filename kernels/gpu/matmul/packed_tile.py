"""Tiles of quantised matrices (kernels/packed.py), dequantised in registers.

A code becomes a number in float16 with the same bits as the format's own sign, exponent and
fraction, times a power of two. That is exact, also for subnormal numbers, and works on GPUs without
float8 instructions. Scales and zero points are applied in float32.

    dequantize(matrix [N, K], out [N, K])

Protocol of `write_numbers`. Program (i, j) writes the tile with rows from i * BLOCK_N and columns
from j * BLOCK_K, and nothing else. Ranks do not communicate.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.packed import PackedMatrix

BLOCK_N, BLOCK_K = 32, 256
"""A tile of `dequantize`."""


@triton.jit
def load_packed(
    codes,  # uint8 [N, K], or [N, K / 2] if a byte has two codes
    scales,  # float32 [blocks of rows, blocks of columns]
    zeros,  # int8, likewise, or None
    row,
    N,
    start,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    KIND: tl.constexpr,  # packed.Kind
    ROWS: tl.constexpr,  # rows of a block; 0 for all
    COLUMNS: tl.constexpr,  # columns of a block; 0 for all; divides BLOCK_K or is a multiple of it
):
    """Load numbers [row : row + BLOCK_N, start : start + BLOCK_K] in float32.

    Outside the matrix, the result is 0 or another finite number.
    """
    n = row + tl.arange(0, BLOCK_N)
    if KIND == "int4" or KIND == "fp4":
        pair = start // 2 + tl.arange(0, BLOCK_K // 2)
        inside = (n < N)[:, None] & (pair < K // 2)[None, :]
        at = n.to(tl.int64)[:, None] * (K // 2) + pair[None, :]
        byte = tl.load(codes + at, mask=inside, other=0)
        code = tl.reshape(tl.join(byte & 15, byte >> 4), (BLOCK_N, BLOCK_K))
    else:
        k = start + tl.arange(0, BLOCK_K)
        inside = (n < N)[:, None] & (k < K)[None, :]
        code = tl.load(codes + (n.to(tl.int64)[:, None] * K + k[None, :]), mask=inside, other=0)
    value = value_of(code, KIND)
    width = tl.cdiv(K, COLUMNS) if COLUMNS > 0 else 1
    block = n // ROWS if ROWS > 0 else n * 0
    top = block.to(tl.int64) * width
    if COLUMNS == 0 or COLUMNS >= BLOCK_K:
        at = top + (start // COLUMNS if COLUMNS > 0 else 0)
        scale = tl.load(scales + at, mask=n < N, other=0.0)[:, None]
        if zeros is not None:
            value -= tl.load(zeros + at, mask=n < N, other=0).to(tl.float32)[:, None]
    else:
        column = start // COLUMNS + tl.arange(0, BLOCK_K // COLUMNS)
        inside = (n < N)[:, None] & (column < width)[None, :]
        at = top[:, None] + column[None, :]
        scale = spread(tl.load(scales + at, mask=inside, other=0.0), COLUMNS)
        if zeros is not None:
            zero = tl.load(zeros + at, mask=inside, other=0)
            value -= spread(zero.to(tl.float32), COLUMNS)
    return value * scale


@triton.jit
def spread(grid, COLUMNS: tl.constexpr):
    """Repeat each column COLUMNS times: [N, G] -> [N, G * COLUMNS]."""
    rows: tl.constexpr = grid.shape[0]
    groups: tl.constexpr = grid.shape[1]
    each = tl.broadcast_to(grid[:, :, None], (rows, groups, COLUMNS))
    return tl.reshape(each, (rows, groups * COLUMNS))


@triton.jit
def value_of(
    code,  # uint8
    KIND: tl.constexpr,
):
    """Return the numbers that codes stand for, float32."""
    if KIND == "int4":
        value = code.to(tl.float32) - 8.0
    elif KIND == "int8":
        value = code.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        bits = code.to(tl.uint16)
        if KIND == "fp8":  # 4 bits of exponent with bias 7; float16 has bias 15
            half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
            value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        else:  # e2m1: bias 1
            half = ((bits & 8) << 12) | ((bits & 7) << 9)
            value = half.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    return value


@triton.jit
def write_numbers(
    codes,
    scales,
    zeros,
    out,  # [N, K]
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write a tile of numbers; see load_packed. Grid: (ceil(N / BLOCK_N), ceil(K / BLOCK_K))."""
    row, start = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_K
    tile = load_packed(
        codes, scales, zeros, row, N, start, K, BLOCK_N, BLOCK_K, KIND, ROWS, COLUMNS
    )
    n, k = row + tl.arange(0, BLOCK_N), start + tl.arange(0, BLOCK_K)
    at = n.to(tl.int64)[:, None] * K + k[None, :]
    inside = (n < N)[:, None] & (k < K)[None, :]
    tl.store(out + at, tile.to(out.dtype.element_ty), mask=inside)


def dequantize(matrix: PackedMatrix, out: Tensor) -> Tensor:
    """Write a matrix's numbers, computed in float32.

    Args:
        matrix: [N, K], or [E, N, K].
        out: contiguous, with the matrix's shape; float32, float16 or bfloat16.

    Returns:
        out.
    """
    *_, rows, columns = matrix.shape
    groups = out.numel() // max(1, rows * columns)
    height, width = matrix.block
    if groups > 1:  # rows of all groups count as one matrix's
        height = height or rows
    if groups > 1 and rows % height:
        for each in range(groups):
            zeros = None if matrix.zeros is None else matrix.zeros[each]
            part = PackedMatrix(
                matrix.kind, matrix.codes[each], matrix.scales[each], zeros, matrix.block
            )
            dequantize(part, out[each])
        return out
    rows *= groups
    if not out.numel():
        return out
    block_k = BLOCK_K if not width or width >= BLOCK_K or BLOCK_K % width == 0 else width
    write_numbers[(-(-rows // BLOCK_N), -(-columns // block_k))](
        codes=matrix.codes,
        scales=matrix.scales,
        zeros=matrix.zeros,
        out=out,
        N=rows,
        K=columns,
        BLOCK_N=BLOCK_N,
        BLOCK_K=block_k,
        KIND=matrix.kind,
        ROWS=height,
        COLUMNS=width,
    )
    return out
