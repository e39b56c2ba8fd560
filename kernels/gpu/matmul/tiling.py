"""Tile sides and compile-time constants of a product, chosen by its operands."""

from __future__ import annotations

from typing import NamedTuple

import triton
from torch import Tensor

from weft.kernels.gpu.matmul.epilogue import FP8, OPERANDS, Epilogue
from weft.kernels.gpu.matmul.operands import Weights
from weft.kernels.gpu.matmul.tile import GROUP, Form
from weft.kernels.gpu.runtime.arguments import Require
from weft.kernels.gpu.runtime.target import target


class Tiling(NamedTuple):
    """Tile sides and compile options for a product."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


def choose_tiling(
    m: int,
    x: Tensor,
    weights: Weights,
    blocks: tuple[int, int, int] | None,
    warps: int,
    stages: int,
    require: Require,
    silu_multiply: bool = False,
    apart: bool = False,
) -> Tiling:
    """Return the caller's tiling, or a default for a product with m rows on x's device.

    For gate and up a tile has two sums, so its default has fewer columns: otherwise no registers
    would be left. Rows that are not contiguous (`apart`) also get fewer columns, because their
    addresses take registers, too.

    Raises:
        KernelError: a block's side is not a power of two of at least 16, or the device cannot
            multiply x's dtype.
    """
    require("x's dtype", x.dtype, x.dtype in OPERANDS, f"be one of {', '.join(map(str, OPERANDS))}")
    backend, capability = target()
    if backend == "cuda" and capability < 89:
        able = x.dtype != FP8
        require("x's dtype", x.dtype, able, f"be of 16 or 32 bits: sm_{capability} has no e4m3")
    if blocks is None:
        low = min(128, max(16, triton.next_power_of_2(m)))
        aligned = all(size % 16 == 0 for size in (x.shape[1], *weights.widths))
        wide = capability >= 90 and low == 128 and x.element_size() <= 2
        pair = silu_multiply and len(weights.tensors) == 2
        columns = 64 if pair else 256 if wide and not apart else 128
        blocks = (low, columns, 128 // max(2, x.element_size()))
        if weights.packed:  # few rows: many programs read, and numbers need registers
            blocks = (low, 32, 128 if low <= 32 and not pair else 64)
        elif not aligned:  # loads are element by element; each address takes registers
            blocks = (min(low, 64), 32 if pair or apart else 64, 32)
    alone = len(weights.packed) < 2 or silu_multiply
    require("w", "2 quantised weights", alone, "be 1, or 2 with silu_multiply")
    if weights.packed:  # a block of K lies in one block of scales, or has several whole ones
        must = "have a BLOCK_K that divides the columns of a scale, or is a multiple of them"
        width = weights.packed[0].block[1]
        aligned = not width or blocks[2] % width == 0 or width % blocks[2] == 0
        require("blocks", blocks, aligned, must)
    fine = all(side >= 16 and side & (side - 1) == 0 for side in blocks)
    require("blocks", blocks, len(blocks) == 3 and fine, "be three powers of two of at least 16")
    require("warps", warps, warps in (0, 1, 2, 4, 8, 16), "be 1, 2, 4, 8 or 16, or 0 to choose")
    require("stages", stages, 0 <= stages <= 8, "be from 1 to 8, or 0 to choose")
    default_stages = 2 if backend == "hip" else 3  # on AMD, the next block is in registers
    return Tiling(*blocks, warps or (8 if blocks[0] >= 128 else 4), stages or default_stages)


def form_of(tiling: Tiling, weights: Weights, epilogue: Epilogue, m: int, k: int) -> Form:
    """Collect the compile-time constants for a product with x [m, k]."""
    return Form(
        block_m=tiling.block_m,
        block_n=tiling.block_n,
        block_k=tiling.block_k,
        group=GROUP,
        weights=len(weights.tensors),
        silu=epilogue.silu_multiply,
        transposed=weights.transposed,
        scale_rows=epilogue.scales_rows,
        scale_columns=epilogue.scales_columns,
        even_m=m % tiling.block_m == 0,
        even_n=all(width % tiling.block_n == 0 for width in weights.widths),
        even_k=k % tiling.block_k == 0,
        packed=weights.packed[0].kind if weights.packed else "",
        packed_rows=weights.packed[0].block[0] if weights.packed else 0,
        packed_columns=weights.packed[0].block[1] if weights.packed else 0,
    )
