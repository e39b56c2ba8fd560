"""Matrix products of row groups, each group with its own weight: the experts on a rank.

    grouped_matmul(x [T, K], w [E, K, N], offsets int32 [E + 1]) -> [T, N]
    grouped_matmul(x [tokens, K], ..., order=int32 [T])          -> [T, N]

Rows offsets[e] to offsets[e + 1] are multiplied by w[e]. With an order, row r is token
order[r] // top_k, so tokens need not be copied for each of their experts. Offsets stay on the
device and the host never reads them: each expert's row count is unknown before its kernel runs.
Rows outside all groups are neither read nor written.

Protocol. The kernel runs on one rank: no other rank writes, and there are no signals and no slots
to reuse. Each tile is written by exactly one program.

Work. `multiply_groups` is persistent. Every program loads all offsets and adds up the tile rows in
each group, so all programs see the same tiles. With P programs, program p takes tiles p, p + P and
so on. A tile has rows from one group only: the last tile in a group is cut off, and empty groups
have no tiles. Tiles from the same group are adjacent. Within a group, each band of GROUP tile rows
is taken column by column (tile.py). Programs that run at the same time therefore read few columns
from few weights. With few rows for each expert, weights dominate the reads, and each weight number
is read once.

Offsets that decrease, are negative or exceed T make all groups empty, in every program alike. They
are reported in a status word, and no access is out of bounds. An order outside the tokens reads
the first token.

fp8 rows have one scale per row, or one per 128 columns (the format of moe_dispatch; DeepSeek-V3,
arXiv:2412.19437, section 3.3). With scales per 128 columns, parts in one sum have different
scales. The tensor cores then add up BLOCK_K products at a time; each part is scaled and added in
float32. Such a tile has two sums in registers, and half the columns.

Weights may be quantised (tile.py).

Not handled: descriptors (TMA), fp8 rows with quantised weights.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.matmul.epilogue import NOTHING, Epilogue
from weft.kernels.gpu.matmul.operands import Operand, Weights
from weft.kernels.gpu.matmul.tile import count_columns, multiply_and_finish, tile_at
from weft.kernels.gpu.matmul.tiling import choose_tiling, form_of
from weft.kernels.gpu.rowwise.activation import GROUP as SCALE_GROUP
from weft.kernels.gpu.runtime.arguments import Require, require, require_tensor
from weft.kernels.gpu.tuning.costs import FEW_ACCUMULATORS, count_processors
from weft.kernels.gpu.tuning.search import Choice

LEAST_GROUPS = 128
"""Minimum group count in a compiled kernel: one group for each thread."""


@triton.jit
def group_sizes(
    offsets,  # int32 [groups + 1]
    groups,
    most,  # upper limit for every offset
    GROUPS: tl.constexpr,
):
    """Compute the row count for each group, int32 [GROUPS], and the first group with wrong offsets.

    If a group is wrong, all sizes are 0; if none is wrong, the second result is GROUPS.
    """
    group = tl.arange(0, GROUPS)
    begin = tl.load(offsets + group, mask=group < groups, other=0)
    end = tl.load(offsets + 1 + group, mask=group < groups, other=0)
    wrong = (begin < 0) | (end < begin) | (end > most)
    first = tl.min(tl.where(wrong, group, GROUPS), 0)
    return tl.where(first < GROUPS, 0, end - begin), first


@triton.jit
def group_of(
    row,  # a tile row's index, counted over all groups
    through,  # int32 [GROUPS]; tile rows in all groups up to and with each
):
    """Find a tile row's group, and the number of tile rows before that group."""
    before = through <= row
    return tl.sum(before.to(tl.int32), 0), tl.max(tl.where(before, through, 0), 0)


@triton.jit
def report(status, value):
    """Set a status word, unless it is already set."""
    if status is not None:
        tl.atomic_cas(status, 0, value, sem="relaxed", scope="gpu")


@triton.jit
def blocks_of(N, K, FORM: tl.constexpr):
    """Count the blocks of a packed weight [N, K] that have a scale."""
    ROWS: tl.constexpr = FORM.packed_rows
    COLUMNS: tl.constexpr = FORM.packed_columns
    count = tl.cdiv(N, ROWS) if ROWS > 0 else 1
    if COLUMNS > 0:
        count *= tl.cdiv(K, COLUMNS)
    return count


@triton.jit(do_not_specialize=["T", "tokens"])
def multiply_groups(
    x,  # [T, K], or [tokens, K] with an order
    order,  # int32 [T], or None
    tokens,
    top_k,
    weights,  # three, each [E, K, n], or [E, n, K] if FORM.transposed, or None
    widths,  # n for each weight
    offsets,  # int32 [E + 1]
    T,
    K,
    groups,  # E
    # EpilogueOperands: x_scale float32 [T] or [1], or [T, ceil(K / FORM.scale_group)];
    epilogue,  # w_scale float32 [E, N], [E, 1] or [1]; bias [E, N]; residual [T, N']
    scale_stride,  # stride in w_scale from one group to the next
    out,  # [T, N']
    out_columns,  # N'
    status,  # int32 [1], or None
    scales,  # of packed weights, two, each with all groups' blocks, or None: load_right
    zeros,
    GROUPS: tl.constexpr,  # a power of two, at least E
    FORM: tl.constexpr,
):
    """Compute all tiles in the result. Grid: (programs,), persistent."""
    BLOCK_M: tl.constexpr = FORM.block_m
    GROUP: tl.constexpr = FORM.group
    SCALE_ROWS: tl.constexpr = FORM.scale_rows
    SCALE_GROUP: tl.constexpr = FORM.scale_group
    PACKED: tl.constexpr = FORM.packed
    n0, n1, n2 = widths[0], widths[1], widths[2]
    size, wrong = group_sizes(offsets, groups, T, GROUPS)
    if wrong < GROUPS:
        report(status, 1 + wrong)
    through = tl.cumsum(tl.cdiv(size, BLOCK_M), 0)
    columns = count_columns(widths, FORM)
    tiles = tl.max(through, 0) * columns
    scales_of_row = tl.cdiv(K, SCALE_GROUP) if SCALE_GROUP > 0 else 1 if SCALE_ROWS else 0
    # Flattened: the next tile's first blocks load while this one is stored.
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        group, before = group_of(tile // columns, through)
        begin = tl.load(offsets + group)
        rows = tl.load(offsets + group + 1) - begin
        row, column = tile_at(tile - before * columns, tl.cdiv(rows, BLOCK_M), columns, GROUP)
        first = tl.cast(begin, tl.int64)
        each = tl.cast(group, tl.int64)
        matrix = each * (K // 2 if PACKED == "int4" or PACKED == "fp4" else K)
        if order is None:
            left, top, result = x + first * K, row * BLOCK_M, out + first * out_columns
        else:
            at = row * BLOCK_M + tl.arange(0, BLOCK_M)
            token = tl.load(order + begin + at, mask=at < rows, other=0) // top_k
            token = tl.where((token >= 0) & (token < tokens), token, 0)
            left, top = x + token.to(tl.int64) * K, 0
            result = out + (first + at) * out_columns
            rows -= row * BLOCK_M
        multiply_and_finish(
            left, top, rows, column,
            weights[0] + matrix * n0,
            None if weights[1] is None else weights[1] + matrix * n1,
            None if weights[2] is None else weights[2] + matrix * n2,
            widths,
            None if epilogue.x_scale is None else epilogue.x_scale + first * scales_of_row,
            None if epilogue.w_scale is None else epilogue.w_scale + group * scale_stride,
            None if epilogue.bias is None else epilogue.bias + group * (n0 + n1 + n2),
            None if epilogue.residual is None else epilogue.residual + first * out_columns,
            result, K, FORM,
            None if scales[0] is None else scales[0] + each * blocks_of(n0, K, FORM),
            None if zeros[0] is None else zeros[0] + each * blocks_of(n0, K, FORM),
            None if scales[1] is None else scales[1] + each * blocks_of(n1, K, FORM),
            None if zeros[1] is None else zeros[1] + each * blocks_of(n1, K, FORM),
        )  # fmt: skip


def require_offsets(check: Require, offsets: Tensor, x: Tensor) -> int:
    """Check the offsets for groups in x, and return the number of groups."""
    shape, device = list(offsets.shape), offsets.device
    check("offsets' shape", shape, offsets.dim() == 1 and len(offsets) > 1, "be [E + 1]")
    check("offsets' dtype", offsets.dtype, offsets.dtype == torch.int32, "be torch.int32")
    check("offsets' device", device, device == x.device, f"be {x.device}, as x is")
    check("offsets' stride", offsets.stride(), offsets.is_contiguous(), "be contiguous")
    return len(offsets) - 1


def padded(groups: int) -> int:
    """Compute GROUPS for kernels that call `group_sizes`: a power of two, at least `groups`."""
    return max(LEAST_GROUPS, int(triton.next_power_of_2(groups)))


def grouped_matmul(
    x: Tensor,
    w: Operand | Sequence[Operand],
    offsets: Tensor,
    *,
    order: Tensor | None = None,
    top_k: int = 1,
    epilogue: Epilogue = NOTHING,
    out: Tensor | None = None,
    status: Tensor | None = None,
    expected: int = 0,
    choice: Choice | None = None,
    blocks: tuple[int, int, int] | None = None,
    warps: int = 0,
    stages: int = 0,
    programs: int = 0,
) -> Tensor:
    """Multiply each group of rows by its own weight and apply the epilogue, on one rank.

    Args:
        x: [T, K], contiguous, K at least 1; float32, float16, bfloat16 or float8_e4m3fn.
        w: [E, K, N] with x's dtype, contiguous or the transposes (`mT`) of contiguous [E, N, K]; or
            up to three such weights, whose columns are concatenated (gate and up). Or a
            PackedMatrix [E, N, K], or two of one form with silu_multiply.
        offsets: int32 [E + 1], on x's device: group e is rows offsets[e] to offsets[e + 1].
        order: int32 [T], contiguous, on x's device: row r is x's row order[r] // top_k. The
            epilogue must then have no x_scale and no residual.
        top_k: choices of each token in the order.
        epilogue: applied to the product. Its w_scale and bias have one entry per group; its x_scale
            may have one number for each 128 columns in a row.
        out: the result; rows outside all groups stay unchanged. If None, a new tensor.
        status: int32 [1], on x's device. If it is 0, it is set to 1 + e, where group e is the first
            with offsets that are negative, decrease or exceed T. All groups are empty then.
        expected: approximate row count over all groups, for the choice of tiles; T if 0.
        choice: chooses the tile where blocks is None; if None, only T and E decide.
        blocks: BLOCK_M, BLOCK_N, BLOCK_K for a tile.
        warps, stages: compile options; chosen if 0.
        programs: number of programs; one per processor if 0.

    Returns:
        [T, N], or [T, N / 2] after silu_multiply; for the dtype see Epilogue.dtype.

    Raises:
        KernelError: the operands do not fit together, or one is not supported.
    """
    check = functools.partial(require, "grouped_matmul")
    groups = require_offsets(check, offsets, x)
    weights = Weights.of(w, x, check, groups=groups)
    (most, k), n, silu = x.shape, sum(weights.widths), epilogue.silu_multiply
    check("x's columns", k, k > 0, "be at least 1")
    if order is not None:
        most = order.numel()
        require_tensor(check, "order", order, (most,), x.device, torch.int32)
        check("top_k", top_k, top_k > 0, "be at least 1")
        check("x's rows", len(x), len(x) > 0 or not most, "be at least 1: the order names them")
        bare = epilogue.x_scale is None and epilogue.residual is None
        check("epilogue", "given", bare, "have no x_scale and no residual with an order")
    check("expected", expected, expected >= 0, "be positive, or 0 for all rows")
    rows = expected or most
    scaled = isinstance(epilogue.x_scale, Tensor) and epilogue.x_scale.dim() == 2
    measured = choice if blocks is None and not weights.packed else None
    if measured and (config := measured.of_product(x, weights, rows, silu, groups)):
        blocks = (config.block_m, config.block_n, config.block_k)
        warps, stages = warps or config.warps, stages or config.stages
        if scaled:  # a thread holds both sums in the registers for one
            columns = 32 * config.warps * FEW_ACCUMULATORS // config.block_m
            blocks = (config.block_m, max(16, min(config.block_n, columns)), config.block_k)
    tiling = choose_tiling(
        -(-rows // groups),
        x,
        weights,
        blocks,
        warps,
        stages,
        check,
        silu,
        apart=scaled or order is not None,
    )
    must = f"have a BLOCK_K of at most {SCALE_GROUP}: its products share their scales"
    check("blocks", blocks, not scaled or tiling.block_k <= SCALE_GROUP, must)
    epilogue.check(check, x, weights.widths, most, groups, SCALE_GROUP)
    check("programs", programs, programs >= 0, "be positive, or 0 for all processors")
    shape, dtype = (most, epilogue.columns(n)), epilogue.dtype(x.dtype)
    if out is None:
        out = x.new_empty(shape, dtype=dtype)
    fits = (out.shape, out.dtype, out.device) == (shape, dtype, x.device) and out.is_contiguous()
    must = f"be {list(shape)} {dtype}, contiguous, on {x.device}"
    check("out", f"{list(out.shape)} {out.dtype}", fits, must)
    if status is not None:
        fits = (status.shape, status.dtype, status.device) == ((1,), torch.int32, x.device)
        must = f"be [1] torch.int32, on {x.device}"
        check("status", f"{list(status.shape)} {status.dtype}", fits, must)
    if not out.shape[1]:
        return out
    columns = weights.column_tiles(tiling.block_n, silu)
    tiles = (most // tiling.block_m + groups) * columns  # maximum
    form = form_of(tiling, weights, epilogue, most, k)
    multiply_groups[(min(tiles, programs or count_processors(x.device)),)](
        x=x,
        order=order,
        tokens=len(x),
        top_k=top_k,
        weights=weights.three,
        widths=weights.three_widths,
        offsets=offsets,
        T=most,
        K=k,
        groups=groups,
        epilogue=epilogue.operands,
        scale_stride=epilogue.scale_stride(),
        out=out,
        out_columns=out.shape[1],
        status=status,
        scales=weights.scales,
        zeros=weights.zeros,
        GROUPS=padded(groups),
        FORM=form._replace(even_m=False, scale_group=SCALE_GROUP if scaled else 0),
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return out
