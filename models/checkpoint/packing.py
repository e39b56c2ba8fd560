"""A part of a quantised matrix, as kernels read it: `PackedMatrix`.

Numbers stay as the checkpoint has them; only their order in the bytes changes. So the part equals
what dequantize.py computes, bit by bit. A part that begins inside a block has smaller blocks: the
largest that divide both the block and the part's beginning. The number of a block's columns is a
power of two, as kernels need it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from weft.kernels.packed import Kind, PackedForm, PackedMatrix
from weft.models.checkpoint.dequantize import FP4, numbers_of, words_of
from weft.models.spec.quantization import QuantSpec


def kind_of(spec: QuantSpec) -> Kind:
    """Return how kernels read a format's numbers."""
    if spec.format in FP4:
        return "fp4"
    if spec.format in ("fp8", "fp8_torchao"):
        return "fp8"
    return "int4" if spec.bits == 4 else "int8"


def form_of(
    spec: QuantSpec, shape: tuple[int, int], rows: slice, columns: slice
) -> PackedForm | None:
    """Return the form of a part's PackedMatrix; None if the part is empty or halves a byte.

    Args:
        spec: the format.
        shape: the whole matrix's.
        rows, columns: the part.
    """
    if rows.start == rows.stop or columns.start == columns.stop:
        return None
    if spec.bits == 4 and (columns.start % 2 or columns.stop % 2):
        return None
    height, width = (
        math.gcd(size, part.start) if size and size < whole else 0
        for size, whole, part in zip(spec.block, shape, (rows, columns), strict=True)
    )
    return kind_of(spec), (height, width & -width), spec.zero_points


def pack(
    spec: QuantSpec,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    rows: slice,
    columns: slice,
    block: tuple[int, int],
) -> PackedMatrix:
    """Make the part's PackedMatrix; arguments as in `dequantize`, and the block of `form_of`."""
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
    elif spec.zero_points:  # torchao leaves them out if all are 0
        points = torch.zeros(grids[0].shape, dtype=torch.int8)
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
