"""Dense layers for the CPU with quantised weights: rounded when loading, or a checkpoint's own.

FORMATS lists how weights are rounded. With compiled kernels, a bfloat16 layer is a NativeLinear;
elsewhere it is the format's layer of torch operators.

A checkpoint's PackedMatrix becomes a NativeLinear without rounding, if kernels have its numbers:

    int4    one scale, and perhaps a zero point, for a multiple of 32 columns or whole rows: each
            group of 32 columns repeats them. A scale is a float16 times a power of two of its row.
    int8    one scale for each row, and no zero points

Sums are float32. Numbers and scales are not rounded; a dequantised weight, in contrast, is rounded
to bfloat16. Activations stay bfloat16. With AVX2 but not AVX-512 BF16, products with int4 round
each 32 of them to int8 with a scale, as llama.cpp's Q8_0 does: this doubles the speed, and adds
0.6% of a product's norm for normal numbers.

Not handled: float4 and float8 numbers, and int8 numbers in groups; callers dequantise them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft.kernels.cpu import int4, int8, native
from weft.kernels.cpu.linear import (
    Linear,
    NativeLinear,
    TorchLinear,
    Weight,
    check_linear,
    split_scales,
    whole,
)
from weft.kernels.packed import PackedForm, PackedMatrix


class Rounding(NamedTuple):
    """How a weight is rounded.

    Attributes:
        quantize: rounds a weight [N, K] to integers or codes, and scales.
        layer: multiplies with torch operators.
    """

    quantize: Callable[[Tensor], tuple[Tensor, Tensor]]
    layer: Callable[..., TorchLinear]


FORMATS = {
    "int8": Rounding(int8.quantize, int8.Int8Linear),
    "int4": Rounding(int4.quantize, int4.Int4Linear),
}


def make_rounded_linear(
    rounding: str, weight: Weight, bias: Tensor | None = None, *, gated: bool = False
) -> Linear:
    """Make the fastest layer available here with a rounded weight.

    Args:
        rounding: a key of FORMATS.
        weight: bfloat16 or float32 [N, K], [2 N, K] if gated; or parts of it, stacked by row.
        bias: [N] or [2 N], the weight's dtype.
        gated: see linear.Linear.

    Raises:
        ValueError: the shapes or dtypes do not match.
    """
    check_linear(weight, bias, gated=gated)
    weight, way = whole(weight), FORMATS[rounding]
    if not native.supports(weight.dtype):
        return way.layer(weight, bias, gated=gated)
    integers, scale = way.quantize(weight.detach())
    return NativeLinear(integers, bias, scale=scale, gated=gated)


def takes(form: PackedForm) -> bool:
    """Tell whether `make_packed_linear` knows a matrix's form."""
    kind, (_, columns), has_zeros = form
    if kind == "int8":
        return not columns and not has_zeros
    return kind == "int4" and columns % native.GROUP == 0


def make_packed_linear(
    parts: Sequence[PackedMatrix], bias: Tensor | None = None, *, gated: bool = False
) -> NativeLinear | None:
    """Make a layer with a checkpoint's numbers; None if a scale cannot be held exactly.

    Args:
        parts: [N_i, K], stacked by row.
        bias: bfloat16 [N], or [2 N] if gated.
        gated: see linear.Linear.
    """
    kinds = {part.kind for part in parts}
    if len(kinds) > 1 or not all(takes(part.form) for part in parts):
        return None
    if kinds == {"int8"}:
        scale = torch.cat([part.with_rows(1).scales.flatten() for part in parts])
        integers = [part.codes.view(torch.int8) for part in parts]
        return NativeLinear(integers, bias, scale=scale, gated=gated)
    scale = torch.cat([_by_group(part, part.scales) for part in parts])
    halves, powers = split_scales(scale)
    if not torch.equal(halves.float() * powers[:, None], scale):
        return None
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = torch.cat([_by_group(part, part.zeros) for part in parts])
    codes = [torch.stack((part.codes & 15, part.codes >> 4), dim=-1).flatten(1) for part in parts]
    return NativeLinear(codes, bias, scale=scale, zeros=zeros, gated=gated)


def _by_group(part: PackedMatrix, grid: Tensor | None) -> Tensor:
    """Repeat a grid's numbers for each row and group: [N, groups]. No grid stands for zeros."""
    rows, columns = part.shape
    height, width = (size or whole for size, whole in zip(part.block, part.shape, strict=True))
    if grid is None:
        return torch.zeros(rows, -(-columns // native.GROUP), dtype=torch.int8)
    grid = grid.repeat_interleave(height, 0)[:rows]
    groups = -(-columns // native.GROUP)
    return grid.repeat_interleave(-(-width // native.GROUP), 1)[:, :groups]
