"""Matrix product and reduce-scatter in one, and product and all-reduce for few rows.

    matmul_reduce_scatter(x [M, K / W], w [K / W, N]) -> [M / W, N]
    matmul_all_reduce    (x [M, K / W], w [K / W, N]) -> [M, N]

Protocol. Slot n mod 2 in each rank's buffer is [W, rows, N]: a partial result from every rank, for
the rows that this rank reduces. These are its own M / W rows, or all M rows for the all-reduce.
Rank r stores a finished tile to row r in its owner's slot (in every rank's slot for the
all-reduce). It then sets the signal [tile, r] there to n. The rank that reduces a tile waits for
its W signals, then adds the W partial results in rank order. The sum therefore has the same bits
on all ranks and in every run.

No slot is reused too early: every rank waits for tiles from every rank, so two slots are enough
(gpu/runtime/workspace.py).

Order in the reduce-scatter. `multiply_partial` is persistent. It takes the owners in reverse: from
the last step in the order of all_gather_matmul.py to the first, which is this rank. Tiles with a
long way leave early. The own part does not travel, and comes last. So all tiles except the first
ones travel while later ones are computed. `reduce_partials` follows in a second launch.

Order in the all-reduce. There is one launch. Every program first sends its tiles, and then reduces
the same ones. It waits only for the programs with the same number on other ranks. They send before
they wait, so there is no cycle. The grid has no more programs than run at the same time, because
ranks may share one GPU.

Partial results travel in the workspace's dtype: the dtype of x, as in NCCL, or one with more bits.
They are added in float32. Scales for fp8 operands belong to this rank and are applied before the
sum. The other parts of the epilogue follow after the sum.
"""

from __future__ import annotations

from typing import get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.matmul.all_gather_matmul import Topology, ahead_of, step_and_part
from weft.kernels.gpu.matmul.epilogue import NOTHING, Epilogue, finish, scale
from weft.kernels.gpu.matmul.operands import Weights
from weft.kernels.gpu.matmul.tile import Form, multiply_tile, tile_at
from weft.kernels.gpu.matmul.tiling import choose_tiling, form_of
from weft.kernels.gpu.runtime.arguments import require_counts
from weft.kernels.gpu.runtime.signals import notify, notify_all, peer_pointer, slot_of, wait_all
from weft.kernels.gpu.runtime.workspace import Workspace, agreed, require_dtype, triton_type
from weft.kernels.gpu.tuning.search import Choice
from weft.kernels.symmetric.memory import Home

SMALL = tl.constexpr(2048)
"""Numbers in a tile, up to which the parts from all ranks fit the registers."""

BLOCK_M, BLOCK_N = 16, 64
"""Default sides of the smallest tile that a workspace has signals for."""

CHOSEN = "the chosen BLOCK_M and BLOCK_N"
"""They follow from each rank's own rows of w, too; signals count tiles of this size."""


@triton.jit
def multiply_and_send(
    x,  # [m, K]: this rank's operand for the owner's rows
    w,  # [K, N], or [N, K] if FORM.transposed
    x_scale,  # float32 [m] or [1], or None
    w_scale,  # float32 [N] or [1], or None
    peers,
    call,
    rank,
    owner,
    tile,
    m,
    N,
    K,
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    PEERS: tl.constexpr,  # number of ranks that get the tile: the owner, or all
    FORM: tl.constexpr,
):
    """Compute one tile of this rank's partial result, and send it to the ranks that reduce it."""
    BLOCK_M: tl.constexpr = FORM.block_m
    BLOCK_N: tl.constexpr = FORM.block_n
    GROUP: tl.constexpr = FORM.group
    SCALE_ROWS: tl.constexpr = FORM.scale_rows
    SCALE_COLUMNS: tl.constexpr = FORM.scale_columns
    EVEN: tl.constexpr = FORM.even_m and FORM.even_n
    row, column = tile_at(tile, tl.cdiv(m, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    row, column = row * BLOCK_M, column * BLOCK_N
    total = multiply_tile(x, row, m, w, column, N, K, None, FORM)
    total = scale(total, x_scale, w_scale, row, m, column, N, SCALE_ROWS, SCALE_COLUMNS)
    part = total.to(dtype)
    place = tile_offsets(call, rank, row, column, m, N, peers.slot_numel, BLOCK_M, BLOCK_N)
    at_m, at_n = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    for step in range(PEERS):
        peer = (owner + step) % WORLD
        to = peer_pointer(peers.buffers, peer, dtype) + place
        if EVEN:
            tl.store(to, part)
        else:
            tl.store(to, part, mask=(at_m[:, None] < m) & (at_n[None, :] < N))
    if PEERS == 1:
        notify(peers, owner, tile * WORLD + rank, call)
    else:
        notify_all(peers, tile * WORLD + rank, call, WORLD)


@triton.jit
def tile_offsets(
    call, source, row, column, m, N, slot_numel, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return a source rank's tile offsets in a call's slot: int64 [BLOCK_M, BLOCK_N]."""
    first = slot_of(call) * slot_numel + (tl.cast(source * m, tl.int64) + row) * N + column
    return first + (tl.arange(0, BLOCK_M)[:, None] * N + tl.arange(0, BLOCK_N)[None, :])


@triton.jit
def load_part(partials, peers, call, source, row, column, m, N, FORM: tl.constexpr):
    """Load a source rank's partial result for a tile: float32 [BLOCK_M, BLOCK_N]."""
    BLOCK_M: tl.constexpr = FORM.block_m
    BLOCK_N: tl.constexpr = FORM.block_n
    place = tile_offsets(call, source, row, column, m, N, peers.slot_numel, BLOCK_M, BLOCK_N)
    if FORM.even_m and FORM.even_n:
        part = tl.load(partials + place)
    else:
        at_m, at_n = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
        inside = (at_m[:, None] < m) & (at_n[None, :] < N)
        part = tl.load(partials + place, mask=inside, other=0.0)
    return part.to(tl.float32)


@triton.jit
def reduce_tile(
    bias,  # [N], or None
    residual,  # [m, N'], or None
    out,  # [m, N']
    peers,
    call,
    rank,
    tile,
    m,
    N,
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    FORM: tl.constexpr,
):
    """Add the partial results for one tile, and run the epilogue after the sum."""
    BLOCK_M: tl.constexpr = FORM.block_m
    BLOCK_N: tl.constexpr = FORM.block_n
    GROUP: tl.constexpr = FORM.group
    SILU: tl.constexpr = FORM.silu
    EVEN: tl.constexpr = FORM.even_m and FORM.even_n
    row, column = tile_at(tile, tl.cdiv(m, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    row, column = row * BLOCK_M, column * BLOCK_N
    partials = peer_pointer(peers.buffers, rank, dtype)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    wait_all(peers, rank, tile * WORLD, call, WORLD)
    if BLOCK_M * BLOCK_N <= SMALL:  # unrolled: all loads are on their way together
        for source in tl.static_range(WORLD):
            total += load_part(partials, peers, call, source, row, column, m, N, FORM)
    else:
        for source in range(WORLD):
            total += load_part(partials, peers, call, source, row, column, m, N, FORM)
    finish(total, bias, residual, out, row, m, column, N, N, SILU, EVEN)


@triton.jit(do_not_specialize=["rank", "m"])
def multiply_partial(
    x,  # [W * m, K]
    w,  # [K, N], or [N, K] if FORM.transposed
    x_scale,  # float32 [W * m] or [1], or None
    w_scale,  # float32 [N] or [1], or None
    # buffers [2, W, m, N]
    peers,  # signals int64 [cdiv(m, BLOCK_M) * cdiv(N, BLOCK_N), W]
    rank,
    m,  # number of result rows on a rank
    N,
    K,
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    NODE: tl.constexpr,
    MESH: tl.constexpr,
    FORM: tl.constexpr,
):
    """Send this rank's partial tiles to their owners. Grid: (programs,), persistent."""
    BLOCK_M: tl.constexpr = FORM.block_m
    BLOCK_N: tl.constexpr = FORM.block_n
    call = tl.load(peers.calls)
    tiles = tl.cdiv(m, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for work in range(tl.program_id(0), WORLD * tiles, tl.num_programs(0)):
        step, tile = step_and_part(WORLD * tiles - 1 - work, tiles, WORLD, MESH)
        owner = ahead_of(rank, step, WORLD, NODE)
        first = tl.cast(owner * m, tl.int64)
        multiply_and_send(
            x + first * K, w, x_scale + first if FORM.scale_rows else x_scale, w_scale,
            peers, call, rank, owner, tile, m, N, K, dtype, WORLD, 1, FORM,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rank", "m"])
def reduce_partials(
    bias,  # [N], or None
    residual,  # [m, N'], or None
    out,  # [m, N']
    peers,  # buffers [2, W, m, N]; signals int64 [tiles, W]
    rank,
    m,
    N,
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    FORM: tl.constexpr,
):
    """Reduce the tiles of this rank's rows. Grid: (programs,), persistent."""
    BLOCK_M: tl.constexpr = FORM.block_m
    BLOCK_N: tl.constexpr = FORM.block_n
    call = tl.load(peers.calls)
    tiles = tl.cdiv(m, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        reduce_tile(bias, residual, out, peers, call, rank, tile, m, N, dtype, WORLD, FORM)


@triton.jit(do_not_specialize=["rank", "m"])
def multiply_all_reduce(
    x,  # [m, K]
    w,  # [K, N], or [N, K] if FORM.transposed
    epilogue,  # EpilogueOperands; residual [m, N']
    out,  # [m, N']
    # buffers [2, W, m, N]
    peers,  # signals int64 [cdiv(m, BLOCK_M) * cdiv(N, BLOCK_N), W]
    rank,
    m,
    N,
    K,
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    FORM: tl.constexpr,
):
    """Send tiles to all ranks, then reduce the same tiles. Grid: (programs,), persistent."""
    BLOCK_M: tl.constexpr = FORM.block_m
    BLOCK_N: tl.constexpr = FORM.block_n
    call = tl.load(peers.calls)
    tiles = tl.cdiv(m, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        multiply_and_send(
            x, w, epilogue.x_scale, epilogue.w_scale, peers, call, rank, rank, tile, m, N, K,
            dtype, WORLD, WORLD, FORM,
        )  # fmt: skip
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        reduce_tile(
            epilogue.bias, epilogue.residual, out, peers, call, rank, tile, m, N, dtype, WORLD,
            FORM,
        )  # fmt: skip


class ReduceWorkspace(Workspace):
    """A workspace for either op.

    Attributes:
        choice: selects the arguments that callers leave open.
    """

    def __init__(
        self,
        home: Home,
        name: str,
        rows: int,
        n: int,
        dtype: torch.dtype,
        block_m: int,
        block_n: int,
    ) -> None:
        asked = {"max_rows": rows, "n": n, "dtype": dtype, "block_m": block_m, "block_n": block_n}
        with agreed(name, asked, home.exchange) as check:
            require_dtype(check, dtype)
            require_counts(check, 0, max_rows=rows, n=n)
            require_counts(check, 1, block_m=block_m, block_n=block_n)
        tiles = -(-rows // block_m) * -(-n // block_n)
        size = home.world_size
        super().__init__(home, name, size * rows * n, dtype, size * tiles)
        self.choice = Choice(home, name, block_m, block_n)


def matmul_reduce_scatter_workspace(
    home: Home,
    max_rows: int,
    n: int,
    dtype: torch.dtype,
    block_m: int = BLOCK_M,
    block_n: int = BLOCK_N,
) -> ReduceWorkspace:
    """Create a workspace for results with at most `max_rows` (M / W) rows. Collective.

    Args:
        home: this rank's home.
        max_rows: maximum M / W.
        n: N.
        dtype: dtype of partial results in transit.
        block_m, block_n: smallest tile sides in a call. A side may be smaller if it covers the
            whole result.

    Raises:
        KernelError: on every rank, if one rank refuses an argument or the ranks' arguments differ.
    """
    return ReduceWorkspace(home, "matmul_reduce_scatter", max_rows, n, dtype, block_m, block_n)


def matmul_all_reduce_workspace(
    home: Home,
    max_rows: int,
    n: int,
    dtype: torch.dtype,
    block_m: int = BLOCK_M,
    block_n: int = BLOCK_N,
) -> ReduceWorkspace:
    """Create a workspace for results with at most `max_rows` (M) rows on all ranks. Collective."""
    return ReduceWorkspace(home, "matmul_all_reduce", max_rows, n, dtype, block_m, block_n)


def matmul_reduce_scatter(
    x: Tensor,
    w: Tensor,
    workspace: ReduceWorkspace,
    *,
    epilogue: Epilogue = NOTHING,
    topology: Topology = "switch",
    ranks_per_node: int = 0,
    blocks: tuple[int, int, int] | None = None,
    warps: int = 0,
    stages: int = 0,
    programs: int = 0,
) -> Tensor:
    """Compute this rank's rows in the sum over all ranks' products. Collective.

    Args:
        x: [M, K / W], contiguous; the same shape on all ranks; M is a multiple of W.
        w: [K / W, N], x's dtype, contiguous or the transpose of a contiguous matrix.
        workspace: from `matmul_reduce_scatter_workspace`.
        epilogue: its scales apply to this rank's product, its other parts to this rank's rows of
            the sum. If out_dtype is None, the result has the workspace's dtype.
        topology: links between ranks; see all_gather_matmul.py.
        ranks_per_node: number of ranks with fast links between them; all ranks if 0. The ranks of a
            node have consecutive numbers.
        blocks: BLOCK_M, BLOCK_N, BLOCK_K. If None, the tuned configuration for this device, world
            size, shape and dtype, else the best one in the cost model: gpu/tuning/search.py.
        warps, stages: compile options for the product; if 0, chosen in the same way as blocks.
        programs: number of programs in the product; if 0, the number of processors on the device.

    Returns:
        [M / W, N], or [M / W, N / 2] after silu_multiply.

    Raises:
        KernelError: on one rank the operands do not match each other or the workspace, or the
            ranks differ in the operands' shapes or in an option.
    """
    size, require = workspace.world_size, workspace.require
    options = {"blocks": blocks, "warps": warps, "stages": stages, "programs": programs}
    asked: dict[str, object] = {"topology": topology, "ranks_per_node": ranks_per_node, **options}
    with workspace.agreed("matmul_reduce_scatter", asked):
        weights = Weights.of(w, x, require, limit=1)
        asked |= result_shape(x, weights)
        require("x's rows", len(x), len(x) % size == 0, f"be a multiple of {size} ranks")
        node = ranks_per_node or size
        fits = node > 0 and size % node == 0
        require("topology", repr(topology), topology in get_args(Topology), "be switch or mesh")
        require("ranks_per_node", ranks_per_node, fits, f"divide the {size} ranks")
        m = len(x) // size
        call = _Call(x, weights, m, workspace, epilogue, blocks, warps, stages, programs)
        asked[CHOSEN] = call.tile
    if call.out.numel():
        workspace.begin()
        multiply_partial[(call.programs(size * call.tiles),)](
            x=x,
            w=weights.tensors[0],
            x_scale=epilogue.x_scale,
            w_scale=epilogue.w_scale,
            peers=workspace.peers(),
            rank=workspace.rank,
            m=m,
            N=call.n,
            K=call.k,
            dtype=call.dtype,
            WORLD=size,
            NODE=node,
            MESH=topology == "mesh",
            FORM=call.form._replace(silu=False),
            num_warps=call.warps,
            num_stages=call.stages,
        )
        reduce_partials[(workspace.resident(call.tiles),)](
            bias=epilogue.bias,
            residual=epilogue.residual,
            out=call.out,
            peers=workspace.peers(),
            rank=workspace.rank,
            m=m,
            N=call.n,
            dtype=call.dtype,
            WORLD=size,
            FORM=for_sum(call.form),
            num_warps=call.warps,
        )
    return call.out


def matmul_all_reduce(
    x: Tensor,
    w: Tensor,
    workspace: ReduceWorkspace,
    *,
    epilogue: Epilogue = NOTHING,
    blocks: tuple[int, int, int] | None = None,
    warps: int = 0,
    stages: int = 0,
    programs: int = 0,
) -> Tensor:
    """Compute the sum over all ranks' products, on all ranks: for few rows. Collective.

    Args:
        x: [M, K / W], contiguous; the same shape on all ranks.
        w: [K / W, N], x's dtype, contiguous or the transpose of a contiguous matrix.
        workspace: from `matmul_all_reduce_workspace`.
        epilogue: its scales apply to this rank's product, its other parts to the sum. If out_dtype
            is None, the result has the workspace's dtype.
        blocks: BLOCK_M, BLOCK_N, BLOCK_K. If None, the tuned configuration for this device, world
            size, shape and dtype, else the best one in the cost model: gpu/tuning/search.py.
        warps, stages: compile options for the product; if 0, chosen in the same way as blocks.
        programs: number of programs in the product; if 0, the number of processors on the device.

    Returns:
        [M, N], or [M, N / 2] after silu_multiply; the same bits on all ranks.

    Raises:
        KernelError: on one rank the operands do not match each other or the workspace, or the
            ranks differ in the operands' shapes or in an option.
    """
    asked: dict[str, object] = {"blocks": blocks, "warps": warps}
    asked |= {"stages": stages, "programs": programs}
    with workspace.agreed("matmul_all_reduce", asked):
        why = "no more run at once"
        workspace.require_programs(programs, workspace.processors, why)
        weights = Weights.of(w, x, workspace.require, limit=1)
        asked |= result_shape(x, weights)
        call = _Call(x, weights, len(x), workspace, epilogue, blocks, warps, stages, programs)
        asked[CHOSEN] = call.tile
    if call.out.numel():
        workspace.begin()
        multiply_all_reduce[(call.programs(call.tiles),)](
            x=x,
            w=weights.tensors[0],
            epilogue=epilogue.operands,
            out=call.out,
            peers=workspace.peers(),
            rank=workspace.rank,
            m=call.m,
            N=call.n,
            K=call.k,
            dtype=call.dtype,
            WORLD=workspace.world_size,
            FORM=call.form,
            num_warps=call.warps,
            num_stages=call.stages,
        )
    return call.out


def for_sum(form: Form) -> Form:
    """Return the constants for the kernel that sums: the same for any K and any weights."""
    return form._replace(
        block_k=0, transposed=False, scale_rows=False, scale_columns=False, even_k=False
    )


def result_shape(x: Tensor, weights: Weights) -> dict[str, object]:
    """Return the sizes that must be equal on all ranks. K / W may differ between ranks."""
    return {"x's rows": len(x), "w's columns": sum(weights.widths)}


class _Call:
    """Checked kernel arguments for one call.

    Attributes:
        out: the op's result.
        tiles: number of tiles in the result.
        m, n, k: sizes of the product.
        dtype: Triton dtype of partial results in transit.
        form, warps, stages: compile-time constants and options for the product.
    """

    def __init__(
        self,
        x: Tensor,
        weights: Weights,
        m: int,
        workspace: ReduceWorkspace,
        epilogue: Epilogue,
        blocks: tuple[int, int, int] | None,
        warps: int,
        stages: int,
        programs: int,
    ) -> None:
        size, require = workspace.world_size, workspace.require
        device = workspace.device
        require("x's device", x.device, x.device == device, f"be {device}, the workspace's")
        k, n = x.shape[1], weights.widths[0]
        if blocks is None and (config := workspace.choice.of_product(x, weights, len(x))):
            blocks = (config.block_m, config.block_n, config.block_k)
            warps, stages = warps or config.warps, stages or config.stages
        tiling = choose_tiling(m, x, weights, blocks, warps, stages, require)
        epilogue.check(require, x, weights.widths, m)
        require("programs", programs, programs >= 0, "be positive, or 0 for all processors")
        workspace.require_room("the result", size * m * n)
        self.tile = tiling.block_m, tiling.block_n
        self.tiles = -(-m // tiling.block_m) * -(-n // tiling.block_n)
        workspace.require_signals(size * self.tiles)
        dtype = epilogue.out_dtype or workspace.dtype
        self.out = x.new_empty(m, epilogue.columns(n), dtype=dtype)
        self._programs = programs or workspace.processors
        self.m, self.n, self.k = m, n, k
        self.dtype = triton_type(workspace.dtype)
        self.form = form_of(tiling, weights, epilogue, m, k)
        self.warps, self.stages = tiling.warps, tiling.stages

    def programs(self, tiles: int) -> int:
        """Return the grid size for a persistent kernel with this number of tiles."""
        return min(tiles, self._programs)
