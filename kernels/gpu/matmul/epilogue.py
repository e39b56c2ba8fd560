"""What happens to a matrix product between its sum and the store: scales, bias, SiLU, residual.

In this order, in float32, on the tile while it is still in registers:

    total * x_scale[m] * w_scale[n]         fp8 operands become what they stand for; scales of
                                            a part of K are applied before its products are added
    + bias[n]
    silu(gate) * up                         halves the columns (SwiGLU: Shazeer 2020)
    + residual[m, n]
    cast to the dtype of the result

Where a product is summed over ranks, each rank scales its own part before it is
sent, and the rest happens once, after the sum. Gate and up are either the even
and the odd columns of one weight, which are neighbours in a tensor core's
accumulator and so never leave their thread, or two weights, whose tiles one
program computes side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from weft.kernels.gpu.runtime.arguments import Require, require_tensor

FP8 = torch.float8_e4m3fn
OPERANDS = (torch.float32, torch.float16, torch.bfloat16, FP8)
RESULTS = (torch.float32, torch.float16, torch.bfloat16)


class EpilogueOperands(NamedTuple):
    """The tensors of an epilogue, as one argument of a kernel: see peers.py.

    Attributes:
        x_scale, w_scale, bias, residual: as in Epilogue, or None.
    """

    x_scale: Tensor | None
    w_scale: Tensor | None
    bias: Tensor | None
    residual: Tensor | None


@dataclass(frozen=True, slots=True)
class Epilogue:
    """Of a product [M, N] of x [M, K] and w [K, N], or of several weights with N columns in all.

    Of weights of E groups of rows (grouped_matmul.py) w_scale and bias have a row for each group.

    Attributes:
        x_scale: float32 [M], one for each row, or [1]; only with fp8 operands. Of grouped_matmul
            also [M, ceil(K / 128)], one for each 128 columns of a row.
        w_scale: float32 [N], one for each column, or [1]; likewise. Of groups: [E, N], [E, 1] or
            [1].
        bias: [N]; those of several weights one after the other. Of groups: [E, N].
        silu_multiply: the result is silu(gate) * up [M, N / 2]. Of two weights the first is the
            gate; of one the even columns are.
        residual: [M, N'], as the result is; added last.
        out_dtype: of the result. None for the operands', or bfloat16 where those are fp8.
    """

    x_scale: Tensor | None = None
    w_scale: Tensor | None = None
    bias: Tensor | None = None
    silu_multiply: bool = False
    residual: Tensor | None = None
    out_dtype: torch.dtype | None = None

    def columns(self, n: int) -> int:
        """Of the result of a product with n columns."""
        return n // 2 if self.silu_multiply else n

    def dtype(self, operands: torch.dtype) -> torch.dtype:
        """Of the result of a product of such operands."""
        return self.out_dtype or (torch.bfloat16 if operands == FP8 else operands)

    def check(
        self,
        require: Require,
        x: Tensor,
        widths: list[int],
        out_rows: int,
        groups: int = 0,
        scale_group: int = 0,
    ) -> None:
        """Refuse what does not go with a product.

        Args:
            require: raises the error.
            x: [rows, K], this rank's left operand.
            widths: columns of each weight.
            out_rows: of the result.
            groups: of rows, that have weights of their own; 0 if all rows have the same.
            scale_group: columns of x that may share a scale of each row; 0 for all.
        """
        n = sum(widths)
        columns: tuple[tuple[int, ...], ...] = ((groups, n),) if groups else ((n,),)
        if self.silu_multiply:
            if len(widths) == 1:
                require("w's columns", n, n % 2 == 0, "be even, for gate and up alternate")
            else:
                even = len(widths) == 2 and widths[0] == widths[1]
                require("w's columns", widths, even, "be those of one weight, or twice the same")
        out = self.dtype(x.dtype)
        require("out_dtype", out, out in RESULTS, f"be one of {', '.join(map(str, RESULTS))}")
        x_scales: list[tuple[int, ...]] = [(len(x),), (1,)]
        if scale_group:
            x_scales.append((len(x), -(-x.shape[1] // scale_group)))
        for name, scale, shapes in (
            ("x_scale", self.x_scale, tuple(x_scales)),
            ("w_scale", self.w_scale, (*columns, *([(groups, 1)] if groups else []), (1,))),
        ):
            if scale is not None:
                require(name, f"given with {x.dtype}", x.dtype == FP8, f"come with {FP8} only")
                _require_operand(require, name, scale, x, shapes, torch.float32)
        if self.bias is not None:
            _require_operand(require, "bias", self.bias, x, columns, *RESULTS)
        if self.residual is not None:
            shape = (out_rows, self.columns(n))
            _require_operand(require, "residual", self.residual, x, (shape,), *RESULTS)

    @property
    def operands(self) -> EpilogueOperands:
        """The argument `epilogue` of a product's kernel."""
        return EpilogueOperands(self.x_scale, self.w_scale, self.bias, self.residual)

    @property
    def scales_rows(self) -> bool:
        """Whether each row of x has a scale of its own."""
        x_scale = self.x_scale
        return x_scale is not None and x_scale.dim() == 1 and len(x_scale) > 1

    @property
    def scales_columns(self) -> bool:
        """Whether each column of w has a scale of its own."""
        return self.w_scale is not None and self.w_scale.shape[-1] > 1

    def scale_stride(self) -> int:
        """Numbers of w_scale from one group's to the next one's."""
        return self.w_scale.shape[1] if self.w_scale is not None and self.w_scale.dim() > 1 else 0

    def apply(self, total: Tensor, operands: torch.dtype, *, side_by_side: bool) -> Tensor:
        """The same with torch, but for the scales: total [M, N] -> [M, N'].

        Args:
            total: the product of all weights, of any dtype.
            operands: their dtype.
            side_by_side: whether gate and up are halves of total's columns, or alternate.
        """
        if self.bias is not None:
            total = total + self.bias
        if self.silu_multiply:
            half = total.shape[1] // 2
            gate, up = total.split(half, dim=1) if side_by_side else (total[:, ::2], total[:, 1::2])
            total = functional.silu(gate) * up
        if self.residual is not None:
            total = total + self.residual
        return total.to(self.dtype(operands))


NOTHING = Epilogue()
"""The product as it is, in the dtype of its operands."""


def _require_operand(
    require: Require,
    name: str,
    tensor: Tensor,
    x: Tensor,
    shapes: tuple[tuple[int, ...], ...],
    *dtypes: torch.dtype,
) -> None:
    require_tensor(require, name, tensor, None, x.device, *dtypes)
    must = f"be {' or '.join(str(list(shape)) for shape in shapes)}"
    require(f"{name}'s shape", list(tensor.shape), tuple(tensor.shape) in shapes, must)


@triton.jit
def scale(
    total,  # float32 [BLOCK_M, BLOCK_N]
    x_scale,  # float32 [rows] or [1], or None; or pointers to each row's: multiply_and_finish
    w_scale,  # float32, from the weight's first column on, or [1], or None
    row,
    rows,
    column,
    N,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
):
    """A tile of a product of fp8 operands, as what they stand for."""
    if x_scale is not None:
        if SCALE_ROWS:
            at_m = row + tl.arange(0, total.shape[0])
            at = x_scale if len(x_scale.shape) else x_scale + at_m
            total = total * tl.load(at, mask=at_m < rows, other=0.0)[:, None]
        else:
            total = total * tl.load(x_scale)
    if w_scale is not None:
        if SCALE_COLUMNS:
            at_n = column + tl.arange(0, total.shape[1])
            total = total * tl.load(w_scale + at_n, mask=at_n < N, other=0.0)[None, :]
        else:
            total = total * tl.load(w_scale)
    return total


@triton.jit
def add_bias(
    total,  # float32 [BLOCK_M, BLOCK_N]
    bias,  # from the weight's first column on, or None
    column,
    N,
):
    """Bias of a tile that begins at a column."""
    if bias is not None:
        at_n = column + tl.arange(0, total.shape[1])
        total = total + tl.load(bias + at_n, mask=at_n < N, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def silu_multiply(gate, up):
    """silu(gate) * up, float32."""
    return gate * tl.sigmoid(gate) * up


@triton.jit
def multiply_halves(total):
    """[BLOCK_M, BLOCK_N], whose even columns are the gate's -> [BLOCK_M, BLOCK_N / 2]."""
    gate, up = tl.split(tl.reshape(total, (total.shape[0], total.shape[1] // 2, 2)))
    return silu_multiply(gate, up)


@triton.jit
def store_tile(
    total,  # float32 [BLOCK_M, BLOCK_N]
    residual,  # [rows, stride], or None
    out,  # [rows, stride]; or pointers to rows, as then of residual: multiply_and_finish
    row,
    rows,
    column,  # of out
    N,  # columns of out that the tile may have, from column 0 on
    stride,
    EVEN: tl.constexpr,  # whether all of the tile lies inside, whichever it is
):
    """Add the residual, cast, and store: the end of every product."""
    at_m, at_n = row + tl.arange(0, total.shape[0]), column + tl.arange(0, total.shape[1])
    if len(out.shape):
        out, place = out[:, None], at_n[None, :]
        residual = None if residual is None else residual[:, None]
    else:
        corner = tl.cast(row, tl.int64) * stride
        place = corner + (at_m - row)[:, None] * stride + at_n[None, :]
    inside = (at_m[:, None] < rows) & (at_n[None, :] < N)
    if residual is not None:
        if EVEN:
            total = total + tl.load(residual + place).to(tl.float32)
        else:
            total = total + tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    if EVEN:
        tl.store(out + place, total.to(out.dtype.element_ty))
    else:
        tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def finish(
    total,  # float32 [BLOCK_M, BLOCK_N]
    bias,  # [N], or None
    residual,  # [rows, N'], or None
    out,  # [rows, N']
    row,
    rows,
    column,
    N,
    stride,  # of a row of out before SiLU halves it; N unless there are other weights beside
    SILU: tl.constexpr,
    EVEN: tl.constexpr,
):
    """All after the scales, of one weight: N' is N, or N / 2 with gate and up in turn."""
    total = add_bias(total, bias, column, N)
    if SILU:
        total = multiply_halves(total)
        store_tile(total, residual, out, row, rows, column // 2, N // 2, stride // 2, EVEN)
    else:
        store_tile(total, residual, out, row, rows, column, N, stride, EVEN)
