"""Right operands of a product: weights, plain or quantised, checked against the left one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from weft.kernels.gpu.matmul.epilogue import FP8
from weft.kernels.gpu.runtime.arguments import Require
from weft.kernels.packed import PackedMatrix

MAX_WEIGHTS = 3

Operand = Tensor | PackedMatrix
"""A weight, plain or quantised."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Right operands of a product: one weight, or several that count as one, side by side.

    Attributes:
        tensors: each [K, N_i], or the transpose of a contiguous [N_i, K] if transposed. With E
            groups of rows: [E, K, N_i], or the transposes of [E, N_i, K].
        widths: the N_i.
        transposed: the weights are stored as [N_i, K].
        packed: the weights if they are quantised; `tensors` are then their codes.
    """

    tensors: tuple[Tensor, ...]
    widths: list[int]
    transposed: bool
    packed: tuple[PackedMatrix, ...] = ()

    @classmethod
    def of(
        cls,
        w: Operand | Sequence[Operand],
        x: Tensor,
        require: Require,
        limit: int = MAX_WEIGHTS,
        groups: int = 0,
    ) -> Weights:
        """Check a caller's weights against x [M, K] and each other.

        If `groups` is not 0, rows are in groups and each group has its own matrix.
        """
        tensors: tuple[Any, ...] = tuple(w) if isinstance(w, (tuple, list)) else (w,)
        if any(isinstance(each, PackedMatrix) for each in tensors):
            return cls._of_packed(tensors, x, require, limit, groups)
        for name, tensor in (("x", x), *(("w", tensor) for tensor in tensors)):
            kind = f"a {type(tensor).__name__}"
            require(name, kind, isinstance(tensor, Tensor), "be a tensor")
        count = len(tensors)
        require("w", f"{count} weights", 1 <= count <= limit, f"be 1 to {limit}")
        require("x's shape", list(x.shape), x.dim() == 2, "be a matrix")
        require("x's stride", x.stride(), x.is_contiguous(), "be contiguous")
        for tensor in tensors:
            shape, k = list(tensor.shape), x.shape[1]
            if groups:
                fits = tensor.dim() == 3 and len(tensor) == groups
                require("w's shape", shape, fits, f"be {groups} matrices, one for each group")
            else:
                require("w's shape", shape, tensor.dim() == 2, "be a matrix")
            require("w's shape", shape, shape[-2] == k, f"have {k} rows, as x has columns")
            require("w's dtype", tensor.dtype, tensor.dtype == x.dtype, f"be {x.dtype}, as x's")
            require(
                "w's device", tensor.device, tensor.device == x.device, f"be {x.device}, as x's"
            )
        transposed = not all(tensor.is_contiguous() for tensor in tensors)
        if transposed:
            require(
                "w's strides",
                [tensor.stride() for tensor in tensors],
                all(tensor.mT.is_contiguous() for tensor in tensors),
                "be contiguous, or the transposes of contiguous matrices, all alike",
            )
        return cls(tensors, [tensor.shape[-1] for tensor in tensors], transposed)

    @classmethod
    def _of_packed(
        cls, matrices: tuple[Operand, ...], x: Tensor, require: Require, limit: int, groups: int
    ) -> Weights:
        """Check quantised weights, as `of` does."""
        count, limit = len(matrices), min(limit, 2)
        require("w", f"{count} quantised weights", count <= limit, f"be at most {limit}")
        packed = []
        for each in matrices:
            alike = isinstance(each, PackedMatrix)
            require("w", f"a {type(each).__name__}", alike, "be quantised, as the first one is")
            assert isinstance(each, PackedMatrix)
            packed.append(each)
        require("x's shape", list(x.shape), x.dim() == 2, "be a matrix")
        require("x's stride", x.stride(), x.is_contiguous(), "be contiguous")
        require("x's dtype", x.dtype, x.dtype != FP8, "have 16 or 32 bits beside quantised weights")
        forms = {each.form for each in packed}
        require("w's forms", sorted(map(str, forms)), len(forms) == 1, "be equal")
        for each in packed:
            shape, leading = list(each.shape), [groups] if groups else []
            fits = len(shape) == len(leading) + 2 and shape[:-2] == leading
            require("w's shape", shape, fits, f"be {[*leading, 'N', 'K']}")
            require("w's shape", shape, shape[-1] == x.shape[1], f"have {x.shape[1]} columns")
            devices = {part.device for part in each.parts}
            require("w's device", devices, devices == {x.device}, f"be {x.device}, as x's")
        codes = tuple(each.codes for each in packed)
        return cls(codes, [each.shape[-2] for each in packed], True, tuple(packed))

    @property
    def scales(self) -> tuple[Tensor | None, ...]:
        """Kernel argument `scales`: those of two quantised weights; None for plain ones."""
        return (*(each.scales for each in self.packed), None, None)[:2]

    @property
    def zeros(self) -> tuple[Tensor | None, ...]:
        """Kernel argument `zeros`: the zero points, likewise."""
        return (*(each.zeros for each in self.packed), None, None)[:2]

    @property
    def three(self) -> tuple[Tensor | None, ...]:
        """Kernel argument `weights`: three weights, None for missing ones."""
        return (*self.tensors, *[None] * (MAX_WEIGHTS - len(self.tensors)))

    @property
    def three_widths(self) -> tuple[int, ...]:
        """Kernel argument `widths`: the widths in `three`, 0 for None."""
        return (*self.widths, *[0] * (MAX_WEIGHTS - len(self.widths)))

    def column_tiles(self, block_n: int, silu_multiply: bool) -> int:
        """Count the columns of tiles in the result, as `count_columns`."""
        paired = silu_multiply and len(self.tensors) == 2
        return sum(-(-width // block_n) for width in self.widths[: 1 if paired else None])
