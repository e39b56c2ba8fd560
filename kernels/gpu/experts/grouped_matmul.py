"""Matrix products of groups of rows, each with its own weight: the experts of a rank.

    grouped_matmul(x [T, K], w [E, K, N], offsets int32 [E + 1]) -> [T, N]

Rows offsets[e] to offsets[e + 1] are multiplied by w[e]. Offsets stay on the device and no host
reads them, because the rows of each expert are unknown before its kernel runs. Rows outside all
groups are neither read nor written.

Division into programs. `multiply_groups` is persistent. Every program loads all offsets and adds up
the rows of tiles of each group, so all programs see the same list of tiles. Program p of P takes
tiles p, p + P and so on. A tile has rows of one group only: the last tile of each group is cut off,
and empty groups have none. A group's tiles are consecutive, ordered like in matmul.py: GROUP rows
of tiles at a time, column by column. So concurrent programs read few columns of few weights. With
few rows per expert, weights dominate the traffic, and each of their numbers is read once.

If offsets decrease, are negative or exceed T, every program treats all groups as empty and a status
word reports it. No out-of-bounds address is read or written.

fp8 rows come with scales of their own, or of each 128 columns (as moe_dispatch delivers them;
DeepSeek-V3, arXiv:2412.19437, section 3.3). Parts of one sum then have different scales. The tensor
cores therefore add up BLOCK_K products at a time; each part is scaled and added in float32. Such a
tile has two sums in registers, and half the columns.

Not handled: descriptors (TMA), scales for blocks of w.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.matmul.epilogue import NOTHING, Epilogue
from weft.kernels.gpu.matmul.matmul import (
    Weights,
    choose_tiling,
    count_columns,
    count_processors,
    form_of,
    multiply_and_finish,
    tile_at,
)
from weft.kernels.gpu.rowwise.activation import GROUP as SCALE_GROUP
from weft.kernels.gpu.runtime.arguments import KernelError, Require, require
from weft.kernels.gpu.tuning.costs import FEW_ACCUMULATORS
from weft.kernels.gpu.tuning.search import Choice

LEAST_GROUPS = 128
"""Minimum number of groups that a kernel is compiled for: one per thread."""


@triton.jit
def group_sizes(
    offsets,  # int32 [groups + 1]
    groups,
    most,  # maximum of the last offset
    GROUPS: tl.constexpr,
):
    """Return the rows of each group, int32 [GROUPS], and the first group with wrong offsets.

    All groups are empty if there is such a group. Without one, the second result is GROUPS.
    """
    group = tl.arange(0, GROUPS)
    begin = tl.load(offsets + group, mask=group < groups, other=0)
    end = tl.load(offsets + 1 + group, mask=group < groups, other=0)
    wrong = (begin < 0) | (end < begin) | (end > most)
    first = tl.min(tl.where(wrong, group, GROUPS), 0)
    return tl.where(first < GROUPS, 0, end - begin), first


@triton.jit
def group_of(
    row,  # row of tiles, counted over all groups
    through,  # int32 [GROUPS]; rows of tiles up to the end of each group
):
    """Return the group of a row of tiles, and the number of rows of tiles before that group."""
    before = through <= row
    return tl.sum(before.to(tl.int32), 0), tl.max(tl.where(before, through, 0), 0)


@triton.jit
def report(status, value):
    """Set a status word, unless it is already set."""
    if status is not None:
        tl.atomic_cas(status, 0, value, sem="relaxed", scope="gpu")


@triton.jit(do_not_specialize=["T"])
def multiply_groups(
    x,  # [T, K]
    weights,  # three: [E, K, n], or [E, n, K] if FORM.transposed, or None
    widths,  # n of each
    offsets,  # int32 [E + 1]
    T,
    K,
    groups,  # E
    # EpilogueOperands: x_scale float32 [T] or [1], or [T, ceil(K / FORM.scale_group)];
    epilogue,  # w_scale float32 [E, N], [E, 1] or [1]; bias [E, N]; residual [T, N']
    scale_stride,  # distance in w_scale from one group to the next
    out,  # [T, N']
    out_columns,  # N'
    status,  # int32 [1], or None
    GROUPS: tl.constexpr,  # a power of two, at least E
    FORM: tl.constexpr,
):
    """Compute all tiles of the result. Grid: (programs,), persistent."""
    BLOCK_M: tl.constexpr = FORM.block_m
    GROUP: tl.constexpr = FORM.group
    SCALE_ROWS: tl.constexpr = FORM.scale_rows
    SCALE_GROUP: tl.constexpr = FORM.scale_group
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
        matrix = tl.cast(group, tl.int64) * K
        multiply_and_finish(
            x + first * K, row * BLOCK_M, rows, column,
            weights[0] + matrix * n0,
            None if weights[1] is None else weights[1] + matrix * n1,
            None if weights[2] is None else weights[2] + matrix * n2,
            widths,
            None if epilogue.x_scale is None else epilogue.x_scale + first * scales_of_row,
            None if epilogue.w_scale is None else epilogue.w_scale + group * scale_stride,
            None if epilogue.bias is None else epilogue.bias + group * (n0 + n1 + n2),
            None if epilogue.residual is None else epilogue.residual + first * out_columns,
            out + first * out_columns, K, FORM,
        )  # fmt: skip


def require_offsets(check: Require, offsets: Tensor, x: Tensor) -> int:
    """Refuse offsets that cannot describe groups of x's rows; return the number of groups."""
    shape, device = list(offsets.shape), offsets.device
    check("offsets' shape", shape, offsets.dim() == 1 and len(offsets) > 1, "be [E + 1]")
    check("offsets' dtype", offsets.dtype, offsets.dtype == torch.int32, "be torch.int32")
    check("offsets' device", device, device == x.device, f"be {x.device}, as x's")
    check("offsets' stride", offsets.stride(), offsets.is_contiguous(), "be contiguous")
    return len(offsets) - 1


def padded(groups: int) -> int:
    """Return GROUPS for kernels that call `group_sizes`: a power of two, at least `groups`."""
    return max(LEAST_GROUPS, int(triton.next_power_of_2(groups)))


def grouped_matmul(
    x: Tensor,
    w: Tensor | Sequence[Tensor],
    offsets: Tensor,
    *,
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
    """Multiply each group of rows by its own weight on one rank, and apply the epilogue.

    Args:
        x: [T, K], contiguous, K at least 1; float32, float16, bfloat16 or float8_e4m3fn.
        w: [E, K, N] of x's dtype, contiguous or the transposes (`mT`) of contiguous [E, N, K]; or
            up to three such weights, with their columns side by side (gate and up).
        offsets: int32 [E + 1], on x's device: group e is rows offsets[e] to offsets[e + 1].
        epilogue: of the product; w_scale and bias are per group, x_scale may be per 128 columns of
            a row.
        out: the result, whose rows outside all groups stay unchanged; new if None.
        status: int32 [1], on x's device. If it is 0, it is set to 1 + e when group e is the first
            whose offsets are negative, decrease or exceed T. All groups are then empty.
        expected: estimated total rows of the groups; T if 0. It decides the tile.
        choice: chooses the tile if blocks is None; if None, T and E decide.
        blocks: BLOCK_M, BLOCK_N, BLOCK_K of a tile.
        warps, stages: for compiling the kernel; chosen if 0.
        programs: one per processor of the device if 0.

    Returns:
        [T, N], or [T, N / 2] after silu_multiply; see Epilogue.dtype.

    Raises:
        KernelError: the operands do not fit each other, or one is refused.
    """
    check = functools.partial(require, "grouped_matmul")
    groups = require_offsets(check, offsets, x)
    weights = Weights.of(w, x, check, groups=groups)
    (most, k), n, silu = x.shape, sum(weights.widths), epilogue.silu_multiply
    check("x's columns", k, k > 0, "be at least 1")
    check("expected", expected, expected >= 0, "be positive, or 0 for all rows")
    rows = expected or most
    scaled = isinstance(epilogue.x_scale, Tensor) and epilogue.x_scale.dim() == 2
    if blocks is None and choice and (config := choice.of_product(x, weights, rows, silu, groups)):
        blocks = (config.block_m, config.block_n, config.block_k)
        warps, stages = warps or config.warps, stages or config.stages
        if scaled:  # a thread holds as many numbers of both sums as otherwise of one
            columns = 32 * config.warps * FEW_ACCUMULATORS // config.block_m
            blocks = (config.block_m, max(16, min(config.block_n, columns)), config.block_k)
    tiling = choose_tiling(
        -(-rows // groups), x, weights, blocks, warps, stages, check, silu, apart=scaled
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
        GROUPS=padded(groups),
        FORM=form._replace(even_m=False, scale_group=SCALE_GROUP if scaled else 0),
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return out


def raise_for(status: Tensor, op: str = "grouped_matmul") -> None:
    """Synchronise with the device, and raise if offsets were wrong since the last call.

    Raises:
        KernelError: names the first group with wrong offsets.
    """
    if group := int(status):
        status.zero_()
        raise KernelError(
            f"{op}: offsets {group - 1} and {group} decrease, are negative or pass x's rows"
        )
