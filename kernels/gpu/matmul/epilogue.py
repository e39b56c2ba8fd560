"""The epilogue of a matrix product, between its sum and the store: scales, bias, SiLU, residual.

It runs in this order, in float32, on the tile in registers:

    total * x_scale[m] * w_scale[n]         dequantizes fp8 operands; a scale for a part of K is
                                            applied before the parts are added
    + bias[n]
    silu(gate) * up                         halves the columns (SwiGLU: Shazeer 2020)
    + residual[m, n]
    cast to the result's dtype

Protocol. The program with a tile's accumulator also stores the tile. The functions here send no
signal, wait for none and use no slot; the kernels that call them do. If a product is summed over
ranks, each rank scales its own part before it sends the part. The other operations run once, after
the sum.

Gate and up come in one of two layouts. Either they are the even and the odd columns of one weight:
such neighbours in a tensor core's accumulator belong to the same thread. Or they are two weights,
and one program computes both tiles side by side.
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
    """The tensors of an epilogue, as one kernel argument: see gpu/runtime/peers.py.

    Attributes:
        x_scale, w_scale, bias, residual: as in Epilogue, or None.
    """

    x_scale: Tensor | None
    w_scale: Tensor | None
    bias: Tensor | None
    residual: Tensor | None


@dataclass(frozen=True, slots=True)
class Epilogue:
    """Epilogue for a product [M, N] from x [M, K] and w [K, N], or several weights with N columns.

    If rows are in E groups with their own weights (grouped_matmul.py), w_scale and bias have a row
    for each group.

    Attributes:
        x_scale: float32 [M], one for each row, or [1]; only with fp8 operands. In grouped_matmul
            also [M, ceil(K / 128)], one for each 128 columns of a row.
        w_scale: float32 [N], one for each column, or [1]; only with fp8 operands. With groups:
            [E, N], [E, 1] or [1].
        bias: [N]; for several weights, their biases concatenated. With groups: [E, N].
        silu_multiply: the result is silu(gate) * up [M, N / 2]. With two weights the first one is
            the gate. With one weight the even columns are the gate.
        residual: [M, N'], the result's shape; added last.
        out_dtype: dtype of the result. None means the operands' dtype, or bfloat16 for fp8.
    """

    x_scale: Tensor | None = None
    w_scale: Tensor | None = None
    bias: Tensor | None = None
    silu_multiply: bool = False
    residual: Tensor | None = None
    out_dtype: torch.dtype | None = None

    def columns(self, n: int) -> int:
        """Count the result's columns for a product with n columns."""
        return n // 2 if self.silu_multiply else n

    def dtype(self, operands: torch.dtype) -> torch.dtype:
        """Return the result's dtype for operands with this dtype."""
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
        """Refuse operands that do not match a product.

        Args:
            require: raises the error.
            x: [rows, K], this rank's left operand.
            widths: number of columns in each weight.
            out_rows: number of rows in the result.
            groups: number of row groups with their own weights; 0 if all rows share the weights.
            scale_group: number of columns of x that may share a scale within a row; 0 for all.
        """
        n = sum(widths)
        columns: tuple[tuple[int, ...], ...] = ((groups, n),) if groups else ((n,),)
        if self.silu_multiply:
            if len(widths) == 1:
                require("w's columns", n, n % 2 == 0, "be even, because gate and up alternate")
            else:
                even = len(widths) == 2 and widths[0] == widths[1]
                require("w's columns", widths, even, "be one number, or two equal numbers")
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
        """Argument `epilogue` for a product's kernel."""
        return EpilogueOperands(self.x_scale, self.w_scale, self.bias, self.residual)

    @property
    def scales_rows(self) -> bool:
        """True if each row of x has its own scale."""
        x_scale = self.x_scale
        return x_scale is not None and x_scale.dim() == 1 and len(x_scale) > 1

    @property
    def scales_columns(self) -> bool:
        """True if each column of w has its own scale."""
        return self.w_scale is not None and self.w_scale.shape[-1] > 1

    def scale_stride(self) -> int:
        """Return the stride in w_scale from one group to the next, in elements."""
        return self.w_scale.shape[1] if self.w_scale is not None and self.w_scale.dim() > 1 else 0

    def apply(self, total: Tensor, operands: torch.dtype, *, side_by_side: bool) -> Tensor:
        """Apply the epilogue, except the scales, with torch: total [M, N] -> [M, N'].

        Args:
            total: the product with all weights, in any dtype.
            operands: operand dtype.
            side_by_side: gate and up are halves of total's columns; otherwise they alternate.
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
"""An empty epilogue: the result is the product in the operands' dtype."""


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
    x_scale,  # float32 [rows] or [1], or None; or pointers to row scales: multiply_and_finish
    w_scale,  # float32 [N], at the weight's first column; or [1], or None
    row,
    rows,
    column,
    N,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
):
    """Scale a tile of a product with fp8 operands."""
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
    bias,  # [N], at the weight's first column; or None
    column,
    N,
):
    """Add the bias to a tile. `column` is the tile's first column."""
    if bias is not None:
        at_n = column + tl.arange(0, total.shape[1])
        total = total + tl.load(bias + at_n, mask=at_n < N, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def silu_multiply(gate, up):
    """Compute silu(gate) * up, float32."""
    return gate * tl.sigmoid(gate) * up


@triton.jit
def multiply_halves(total):
    """Apply SiLU and multiply: [BLOCK_M, BLOCK_N], even columns the gate -> half the columns."""
    gate, up = tl.split(tl.reshape(total, (total.shape[0], total.shape[1] // 2, 2)))
    return silu_multiply(gate, up)


@triton.jit
def store_tile(
    total,  # float32 [BLOCK_M, BLOCK_N]
    residual,  # [rows, stride], or None
    out,  # [rows, stride]; or pointers to rows, then residual too: multiply_and_finish
    row,
    rows,
    column,  # first column in out
    N,  # end of the columns in out that the tile may store
    stride,
    EVEN: tl.constexpr,  # every tile lies inside completely
):
    """Add the residual, cast and store a tile: the end of every product."""
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
    stride,  # row stride in out before SiLU halves it; N for a single weight
    SILU: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Run the epilogue after the scales for one weight.

    N' is N, or N / 2 if gate and up alternate.
    """
    total = add_bias(total, bias, column, N)
    if SILU:
        total = multiply_halves(total)
        store_tile(total, residual, out, row, rows, column // 2, N // 2, stride // 2, EVEN)
    else:
        store_tile(total, residual, out, row, rows, column, N, stride, EVEN)
