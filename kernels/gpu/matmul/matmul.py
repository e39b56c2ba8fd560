"""Matrix product: the tile that all overlapped products share, and the product on one rank.

    matmul(x [M, K], w [K, N]) -> [M, N]

Protocol. `multiply` is persistent: the grid has as many programs as the device runs at the same
time, and each program loops over tiles of the result. Each tile is computed and stored by exactly
one program. Ranks do not communicate, so there are no signals and no slots.

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

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.driver import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.kernels.gpu.matmul.epilogue import (
    FP8,
    NOTHING,
    OPERANDS,
    Epilogue,
    add_bias,
    finish,
    scale,
    silu_multiply,
    store_tile,
)
from weft.kernels.gpu.matmul.packed_tile import load_packed
from weft.kernels.gpu.runtime.arguments import Require, require
from weft.kernels.gpu.tuning.costs import count_processors
from weft.kernels.packed import PackedMatrix

GROUP = 8
"""Number of rows of tiles in a group."""

MAX_WEIGHTS = 3

Operand = Tensor | PackedMatrix
"""A weight, plain or quantised."""


class Tiling(NamedTuple):
    """Tile sides and compile options for a product."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


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


@triton.jit(do_not_specialize=["M"])
def multiply(
    x,  # [M, K]; or TMA descriptor
    w0,  # [K, n0], or [n0, K] if FORM.transposed; or TMA descriptor
    w1,
    w2,
    widths,  # n0, n1, n2
    M,
    K,
    epilogue,  # EpilogueOperands
    out,  # [M, N']
    scales,  # of packed weights, w0's and w1's, or None: load_right
    zeros,
    FORM: tl.constexpr,
):
    """Compute all tiles of the result. Grid: (programs,), persistent."""
    BLOCK_M: tl.constexpr = FORM.block_m
    GROUP: tl.constexpr = FORM.group
    rows = tl.cdiv(M, BLOCK_M)
    columns = count_columns(widths, FORM)
    # Flattened: the next tile's first blocks are loaded while this tile is stored.
    for tile in tl.range(tl.program_id(0), rows * columns, tl.num_programs(0), flatten=True):
        row, column = tile_at(tile, rows, columns, GROUP)
        multiply_and_finish(
            x, row * BLOCK_M, M, column, w0, w1, w2, widths, epilogue.x_scale, epilogue.w_scale,
            epilogue.bias, epilogue.residual, out, K, FORM, scales[0], zeros[0], scales[1],
            zeros[1],
        )  # fmt: skip


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


def target() -> tuple[str, int]:
    """Return Triton's target: ("cuda", 90) for sm_90, ("hip", 0), ("", 0) in the interpreter."""
    if triton.knobs.runtime.interpret:
        return ("", 0)
    found = driver.active.get_current_target()
    return (found.backend, int(found.arch) if found.backend == "cuda" else 0)


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


def takes_tma(x: Tensor, weights: Weights, silu_multiply: bool) -> bool:
    """Tell if the tensor memory accelerator can load the operands.

    A TMA descriptor needs a tensor with elements, whose address and row stride are multiples of 16
    bytes. Kernels take descriptors for one weight, or for gate and up.
    """
    stored = [x, *(tensor.T if weights.transposed else tensor for tensor in weights.tensors)]
    return (
        not weights.packed
        and len(weights.tensors) <= (2 if silu_multiply else 1)
        and all(
            tensor.numel() > 0
            and tensor.data_ptr() % 16 == 0
            and tensor.shape[1] * tensor.element_size() % 16 == 0
            for tensor in stored
        )
    )


def matmul(
    x: Tensor,
    w: Operand | Sequence[Operand],
    *,
    epilogue: Epilogue = NOTHING,
    blocks: tuple[int, int, int] | None = None,
    warps: int = 0,
    stages: int = 0,
    programs: int = 0,
    tma: bool | None = None,
) -> Tensor:
    """Compute the product and its epilogue on one rank.

    Args:
        x: [M, K], contiguous; float32, float16, bfloat16 or float8_e4m3fn.
        w: [K, N], x's dtype, contiguous or the transpose of a contiguous matrix; or up to three
            such weights, which count as one with their columns side by side. Or a PackedMatrix
            [N, K], or two of one form with silu_multiply.
        epilogue: work after the product.
        blocks: BLOCK_M, BLOCK_N, BLOCK_K; chosen by M if None.
        warps, stages: compile options for the kernel; chosen if 0.
        programs: number of programs; if 0, the number of processors on the device.
        tma: load through TMA descriptors; if None, do so if the device and the operands allow it.

    Returns:
        [M, N], or [M, N / 2] after silu_multiply; see Epilogue.dtype.

    Raises:
        KernelError: the operands do not match, or one is not supported.
    """
    check = functools.partial(require, "matmul")
    weights = Weights.of(w, x, check)
    (m, k), n, silu = x.shape, sum(weights.widths), epilogue.silu_multiply
    tiling = choose_tiling(m, x, weights, blocks, warps, stages, check, silu)
    epilogue.check(check, x, weights.widths, m)
    check("programs", programs, programs >= 0, "be positive, or 0 for all processors")
    able = takes_tma(x, weights, silu)
    check("tma", tma, able or not tma, "be false for these operands")
    if tma is None:  # smaller tiles have too few rows for sm_90's tensor cores
        tma = able and target()[1] >= 90 and tiling.block_m >= 64
    if not k:  # the flattened loops need at least one iteration
        zeros = torch.zeros(m, n, device=x.device)
        return epilogue.apply(zeros, x.dtype, side_by_side=len(weights.tensors) == 2)
    out = x.new_empty(m, epilogue.columns(n), dtype=epilogue.dtype(x.dtype))
    if not out.numel():
        return out
    operands: tuple[Tensor | TensorDescriptor | None, ...] = (x, *weights.three)
    if tma:
        operands = _descriptors(x, weights, tiling)
    tiles = -(-m // tiling.block_m) * weights.column_tiles(tiling.block_n, silu)
    multiply[(min(tiles, programs or count_processors(x.device)),)](
        x=operands[0],
        w0=operands[1],
        w1=operands[2],
        w2=operands[3],
        widths=weights.three_widths,
        M=m,
        K=k,
        epilogue=epilogue.operands,
        out=out,
        scales=weights.scales,
        zeros=weights.zeros,
        FORM=form_of(tiling, weights, epilogue, m, k)._replace(tma=tma),
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return out


def _descriptors(
    x: Tensor, weights: Weights, tiling: Tiling
) -> tuple[TensorDescriptor | None, ...]:
    """Make TMA descriptors for x and three weights; None for missing weights."""
    rows, columns, depth = tiling.block_m, tiling.block_n, tiling.block_k
    block = [columns, depth] if weights.transposed else [depth, columns]
    stored = [
        None if w is None else TensorDescriptor.from_tensor(w.T if weights.transposed else w, block)
        for w in weights.three
    ]
    return (TensorDescriptor.from_tensor(x, [rows, depth]), *stored)
