"""A part of a quantised matrix, as kernels read it: `PackedMatrix`.

Numbers stay as the checkpoint has them; only their order in the bytes changes. So the part equals
what dequantize.py computes, bit by bit. A part that begins inside a block has smaller blocks: the
largest that divide both the block and the part's beginning.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from weft.kernels.packed import LEAST_BLOCK, Kind, PackedMatrix
from weft.models.checkpoint.dequantize import FP4, numbers_of, words_of
from weft.models.spec.quantization import QuantSpec


def kind_of(spec: QuantSpec) -> Kind:
    """Return how kernels read a format's numbers."""
    if spec.format in FP4:
        return "fp4"
    if spec.format in ("fp8", "fp8_torchao"):
        return "fp8"
    return "int4" if spec.bits == 4 else "int8"


def block_of(
    spec: QuantSpec, grid: tuple[int, int], rows: slice, columns: slice
) -> tuple[int, int] | None:
    """Return the block of a part's PackedMatrix; None if it is empty or kernels cannot read it.

    Args:
        spec: the format.
        grid: how many blocks the whole matrix has in each direction.
        rows, columns: the part.
    """
    if rows.start == rows.stop or columns.start == columns.stop:
        return None
    height, width = (
        0 if count == 1 else math.gcd(size, part.start)
        for size, count, part in zip(spec.block, grid, (rows, columns), strict=True)
    )
    paired = spec.bits == 4 and (columns.start % 2 or columns.stop % 2)
    if paired or (width and (width < LEAST_BLOCK or width & (width - 1))):
        return None
    return height, width


def pack(
    spec: QuantSpec,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    rows: slice,
    columns: slice,
    block: tuple[int, int],
) -> PackedMatrix:
    """Make the part's PackedMatrix; arguments as in `dequantize`, and the block of `block_of`."""
    if spec.format in FP4:
        packed = codes.flatten(1)[rows, words_of(columns, 2)]
    else:
        packed = numbers_of(spec, codes, rows, columns)
        if spec.bits == 4:
            # uint8 arithmetic wraps, so -8 becomes 0.
            offset = 8 if packed.dtype == torch.int8 else 0
            unsigned = packed.view(torch.uint8) + offset
            packed = unsigned[:, ::2] | unsigned[:, 1::2] << 4
        elif packed.dtype == torch.uint8:  # from 0 to 255
            packed = packed ^ 128
    grids = [
        _cut(grid, spec.block, block, rows, columns) for grid in (scales, zeros) if grid is not None
    ]
    points = None
    if zeros is not None:
        points = (grids[1] - _offset(spec)).to(torch.int8)
    packed = packed.contiguous().view(torch.uint8)
    return PackedMatrix(kind_of(spec), packed, grids[0].contiguous(), points, block)


def _offset(spec: QuantSpec) -> int:
    """Return the code that becomes 0: formats with unsigned codes have it in their zero points."""
    return 1 << spec.bits - 1 if spec.format in ("awq", "gptq", "gptq_v2") else 0


def _cut(
    grid: Tensor, old: tuple[int, int], new: tuple[int, int], rows: slice, columns: slice
) -> Tensor:
    """Return the part of a grid, for smaller blocks."""
    for axis, part in enumerate((rows, columns)):
        if grid.shape[axis] > 1:
            starts = torch.arange(part.start, part.stop, new[axis])
            grid = grid.index_select(axis, starts // old[axis])
    return grid
