"""Quantised matrices as kernels read them: codes, and a grid of scales.

A number is (value(code) - zero point) * scale. Its row and column choose the block with its scale
and zero point. Checkpoint formats differ in how they pack codes; all become one of these kinds:

    fp8     one byte: float8 e4m3
    int8    one byte: -128 to 127
    int4    two codes in a byte, the even column in the lower bits: a code c stands for c - 8
    fp4     two codes in a byte, likewise: float4 e2m1 (OCP Microscaling Formats 1.0)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["fp8", "int8", "int4", "fp4"]
KINDS: tuple[Kind, ...] = ("fp8", "int8", "int4", "fp4")
PAIRED: tuple[Kind, ...] = ("int4", "fp4")
"""Kinds with two codes in a byte."""

PackedForm = tuple[Kind, tuple[int, int], bool]
"""A matrix's kind and block, and whether it has zero points."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A quantised matrix [N, K], or E of them [E, N, K], one for each group of rows.

    Attributes:
        kind: how a code is a number.
        codes: uint8 [..., N, K], or [..., N, K / 2] if a byte has two codes; contiguous.
        scales: float32 [..., blocks of rows, blocks of columns], contiguous.
        zeros: int8 zero points, shaped like the scales; None if all are 0.
        block: rows and columns of a block; 0 stands for all. The number of columns is a power of
            two. The last block may be smaller.
    """

    kind: Kind
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K] or [E, N, K]."""
        *leading, columns = self.codes.shape
        return (*leading, columns * (2 if self.kind in PAIRED else 1))

    @property
    def form(self) -> PackedForm:
        """The kind, the block, and whether it has zero points: equal in joined matrices."""
        return self.kind, self.block, self.zeros is not None

    @property
    def parts(self) -> list[Tensor]:
        """The tensors, each with the groups first if there are some."""
        return [part for part in (self.codes, self.scales, self.zeros) if part is not None]

    @property
    def bytes(self) -> int:
        """Size in memory."""
        return sum(part.numel() * part.element_size() for part in self.parts)

    def map(self, copy: Callable[[Tensor], Tensor]) -> PackedMatrix:
        """Return the matrix with a copy of each part."""
        codes, scales, *zeros = map(copy, self.parts)
        return replace(self, codes=codes, scales=scales, zeros=zeros[0] if zeros else None)

    def scaled(self, factor: float) -> PackedMatrix:
        """Return the matrix times a factor."""
        return self if factor == 1.0 else replace(self, scales=self.scales * factor)

    def with_rows(self, size: int) -> PackedMatrix:
        """Return the same matrix with blocks of `size` rows, a divisor of the present size."""
        rows = self.shape[-2]
        if size == self.block[0]:
            return self
        starts = torch.arange(0, rows, size, device=self.scales.device)
        at = starts // (self.block[0] or rows)
        scales = self.scales.index_select(-2, at)
        zeros = None if self.zeros is None else self.zeros.index_select(-2, at)
        return replace(self, scales=scales, zeros=zeros, block=(size, self.block[1]))

    def permuted(self, order: Tensor) -> PackedMatrix:
        """Return the matrix with rows in another order; `order` has each row's present index."""
        each = self.with_rows(1)
        zeros = None if each.zeros is None else each.zeros.index_select(-2, order)
        codes, scales = (part.index_select(-2, order) for part in (each.codes, each.scales))
        return replace(each, codes=codes, scales=scales, zeros=zeros)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Compute the numbers in float32 and round them: [N, K], or [E, N, K]."""
        numbers = self._values()
        if self.zeros is not None:
            numbers = numbers - self._spread(self.zeros.float())
        return (numbers * self._spread(self.scales)).to(dtype)

    def _values(self) -> Tensor:
        """Return each code's value, float32."""
        if self.kind == "fp8":
            return self.codes.view(torch.float8_e4m3fn).float()
        if self.kind == "int8":
            return self.codes.view(torch.int8).float()
        pairs = torch.stack((self.codes & 15, self.codes >> 4), dim=-1).flatten(-2)
        if self.kind == "int4":
            return pairs.float() - 8
        table = torch.tensor([*E2M1, *(-each for each in E2M1)], device=pairs.device)
        return table[pairs.long()]

    def _spread(self, grid: Tensor) -> Tensor:
        """Repeat a grid's numbers for each row and column of their block."""
        for axis, (size, whole) in enumerate(
            zip(self.block, self.shape[-2:], strict=True), start=grid.dim() - 2
        ):
            grid = grid.repeat_interleave(size or whole, axis).narrow(axis, 0, whole)
        return grid


def side_by_side(matrices: Sequence[PackedMatrix]) -> PackedMatrix | None:
    """Join matrices [N_i, K] to one [N, K]; None if they differ in kind or blocks of columns."""
    if len({(each.kind, each.block[1], each.zeros is None) for each in matrices}) != 1:
        return None
    if len(matrices) == 1:
        return matrices[0]
    heights = [each.shape[0] for each in matrices]
    sizes = [each.block[0] or height for each, height in zip(matrices, heights, strict=True)]
    rows = math.gcd(*sizes, *heights[:-1])
    return _joined([each.with_rows(rows) for each in matrices], torch.cat)


def stacked(matrices: Sequence[PackedMatrix]) -> PackedMatrix:
    """Join matrices [N, K] of one form to [E, N, K]."""
    return _joined(matrices, torch.stack)


def _joined(
    matrices: Sequence[PackedMatrix], join: Callable[[list[Tensor]], Tensor]
) -> PackedMatrix:
    parts = zip(*(each.parts for each in matrices), strict=True)
    codes, scales, *zeros = (join(list(each)) for each in parts)
    return replace(matrices[0], codes=codes, scales=scales, zeros=zeros[0] if zeros else None)
