"""All-gather and matrix product in one: a tile begins when its rows have arrived.

    all_gather_matmul(x_shard [M / W, K], w [K, N / W]) -> [M, N / W]

Protocol. Slot n mod 2 in each rank's buffer is [W, m, K] (m = M / W). There is one signal for each
chunk of BLOCK_M rows from each rank. In call n, `push_rows` on rank r copies this rank's chunks to
row r in the other ranks' slots, with the rows' scales if there are any. It then sets their signals
[chunk, r] to n. (Not [r, chunk]: in this order a signal belongs to one rank for any number of
chunks, so it only grows.) The product is persistent: its programs loop over the result's tiles.
A tile with another rank's rows waits for the one chunk that it reads. The rank's own shard is read
in place, without a wait. So the product computes on rows that are here while the rest are on their
way (FLUX: Chang et al. 2024; Triton-distributed: Zheng et al. 2025).

No slot is reused too early. The programs for a row of tiles read its chunk only after they have
acquired its signal, and every rank waits for every chunk from every other rank. Two slots are
therefore enough (gpu/runtime/workspace.py).

Order. At steps 0, 1, ... W - 1 the product takes the shards of the ranks `ahead_of` it. The first
one is its own. A rank sends first to the rank that needs its shard at step 1, and so on. The shard
that is sent first is thus needed first:

    switch    one shard at a time, each from one rank at full speed; at every step all ranks send
              to different ranks (NVLink switches)
    mesh      the first chunk of all shards, then the second: all links of a rank carry traffic at
              the same time (AMD's fully connected nodes)

    4 ranks, 2 chunks each, tiles of rank 1:
    switch    1.0 1.1 | 2.0 2.1 | 3.0 3.1 | 0.0 0.1
    mesh      1.0 1.1 | 2.0 3.0 0.0 | 2.1 3.1 0.1

With several nodes, the steps first go round the rank's own node, then round the next one. Rows that
travel over the slow links are therefore needed last.

On a GPU the copies and the product run on separate streams. The copies start directly after the
kernel that counts the call, on the stream that goes first, so they are resident when the product
begins. The product could still be faster. It therefore leaves the copies their processors: if the
products on all ranks took all processors, they could wait forever. A call that leaves none is
refused. A few programs fill the links, and more would only keep the product's from starting.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Literal, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.collectives.collective import RESIDENT_BLOCK, RESIDENT_WARPS
from weft.kernels.gpu.matmul.epilogue import NOTHING, Epilogue
from weft.kernels.gpu.matmul.operands import Weights
from weft.kernels.gpu.matmul.tile import count_columns, multiply_and_finish, tile_at
from weft.kernels.gpu.matmul.tiling import choose_tiling, form_of
from weft.kernels.gpu.runtime.arguments import require_counts
from weft.kernels.gpu.runtime.peers import SLOTS, Slots
from weft.kernels.gpu.runtime.signals import notify, peer_pointer, slot_of, wait
from weft.kernels.gpu.runtime.workspace import Workspace, agreed, require_dtype, triton_type
from weft.kernels.gpu.tuning.search import Choice
from weft.kernels.symmetric.memory import Home

BLOCK_M = 16
"""Default number of rows in the smallest chunk that a workspace has signals for."""

BLOCK = 4096
"""Number of elements that a program moves at a time."""

Topology = Literal["switch", "mesh"]


@triton.jit
def ahead_of(rank, step, WORLD: tl.constexpr, NODE: tl.constexpr):
    """Return the rank whose shard `rank` takes at a step.

    Steps go round the rank's own node with NODE ranks, then round the next one.
    """
    node = (rank // NODE + step // NODE) % (WORLD // NODE)
    return node * NODE + (rank + step) % NODE


@triton.jit
def behind(rank, step, WORLD: tl.constexpr, NODE: tl.constexpr):
    """Return the rank that takes this rank's shard at a step: the inverse of `ahead_of`."""
    node = (rank // NODE + WORLD // NODE - step // NODE) % (WORLD // NODE)
    return node * NODE + (rank % NODE + NODE - step % NODE) % NODE


@triton.jit
def step_and_part(index, parts, WORLD: tl.constexpr, MESH: tl.constexpr):
    """Return (step, part) number `index`. Each of WORLD steps has `parts` parts; see Order."""
    step, part = index // parts, index % parts
    if MESH and WORLD > 2:
        later = tl.maximum(index - parts, 0)
        step = tl.where(index < parts, 0, 1 + later % (WORLD - 1))
        part = tl.where(index < parts, index, later // (WORLD - 1))
    return step, part


@triton.jit(do_not_specialize=["rank", "m"])
def push_rows(
    x,  # [m, K]; this rank's shard
    x_scale,  # float32 [m] or [1], or None
    peers,  # buffers [2, W, m, K]; signals int64 [chunks, W]
    scales,  # Slots: float32 [2, W, m]
    rank,
    m,
    K,
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    NODE: tl.constexpr,
    MESH: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Send the shard to the other ranks, chunk by chunk. Grid: (programs,), persistent."""
    call = tl.load(peers.calls)
    chunks = tl.cdiv(m, BLOCK_M)
    for item in range(tl.program_id(0), (WORLD - 1) * chunks, tl.num_programs(0)):
        step, chunk = step_and_part(chunks + item, chunks, WORLD, MESH)
        peer = behind(rank, step, WORLD, NODE)
        row = chunk * BLOCK_M
        count = tl.minimum(m - row, BLOCK_M) * K
        begin = tl.cast(row, tl.int64) * K
        place = slot_of(call) * peers.slot_numel + tl.cast(rank * m, tl.int64) * K + begin
        to = peer_pointer(peers.buffers, peer, dtype) + place
        for start in range(0, count, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(to + at, tl.load(x + begin + at, mask=at < count), mask=at < count)
        if x_scale is not None:
            at_m = row + tl.arange(0, BLOCK_M)
            to_scale = peer_pointer(scales.addresses, peer, tl.float32)
            to_scale += slot_of(call) * scales.numel + rank * m
            scale = tl.load(x_scale + (at_m if SCALE_ROWS else at_m * 0), mask=at_m < m)
            tl.store(to_scale + at_m, scale, mask=at_m < m)
        notify(peers, peer, chunk * WORLD + rank, call)


@triton.jit(do_not_specialize=["rank", "m", "group"])
def multiply_gathered(
    x,  # [m, K]; this rank's shard
    weights,  # three, each [K, n], or [n, K] if FORM.transposed, or None
    widths,  # n for each weight
    epilogue,  # EpilogueOperands; x_scale float32 [m] or [1], residual [W * m, N']
    out,  # [W * m, N']
    peers,  # buffers [2, W, m, K]; signals int64 [cdiv(m, BLOCK_M), W]
    scales,  # Slots: float32 [2, W, m]
    rank,
    m,  # number of rows in a shard
    group,  # rows of tiles in a group; divides those in a shard
    K,
    out_columns,  # N'
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    NODE: tl.constexpr,
    MESH: tl.constexpr,
    FORM: tl.constexpr,
):
    """Compute each tile after its rows have arrived. Grid: (programs,), persistent."""
    BLOCK_M: tl.constexpr = FORM.block_m
    call = tl.load(peers.calls)
    chunks = tl.cdiv(m, BLOCK_M)
    columns = count_columns(widths, FORM)
    gathered = peer_pointer(peers.buffers, rank, dtype) + slot_of(call) * peers.slot_numel
    gathered_scales = peer_pointer(scales.addresses, rank, tl.float32)
    gathered_scales += slot_of(call) * scales.numel
    # Not flattened: a tile's loads must stay behind its wait.
    for tile in range(tl.program_id(0), WORLD * chunks * columns, tl.num_programs(0)):
        index, column = tile_at(tile, WORLD * chunks, columns, group)
        step, chunk = step_and_part(index, chunks, WORLD, MESH)
        shard = ahead_of(rank, step, WORLD, NODE)
        if step > 0:
            wait(peers, rank, chunk * WORLD + shard, call)
        first = tl.cast(shard * m, tl.int64)
        rows = tl.where(step > 0, gathered + first * K, x)
        row_scale = epilogue.x_scale
        if epilogue.x_scale is not None:
            # A scale for a whole shard is repeated for each row, and arrives with each chunk.
            own = 0 if FORM.scale_rows else chunk * BLOCK_M
            row_scale = tl.where(step > 0, gathered_scales + first + own, epilogue.x_scale)
        multiply_and_finish(
            rows, chunk * BLOCK_M, m, column, weights[0], weights[1], weights[2], widths,
            row_scale, epilogue.w_scale, epilogue.bias,
            None if epilogue.residual is None else epilogue.residual + first * out_columns,
            out + first * out_columns, K, FORM,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rank", "m"])
def collect_rows(
    x,  # [m, K]; this rank's shard
    out,  # [W * m, K]
    peers,  # buffers [2, W, m, K]; signals int64 [chunks, W]
    rank,
    m,
    K,
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    NODE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the gathered rows out of the slot, chunk by chunk. Grid: (programs,), persistent."""
    call = tl.load(peers.calls)
    for item in range(tl.program_id(0), WORLD * tl.cdiv(m, BLOCK_M), tl.num_programs(0)):
        step, chunk = item % WORLD, item // WORLD
        shard = ahead_of(rank, step, WORLD, NODE)
        if step > 0:
            wait(peers, rank, chunk * WORLD + shard, call)
        first = tl.cast(shard * m, tl.int64) * K
        gathered = (
            peer_pointer(peers.buffers, rank, dtype) + slot_of(call) * peers.slot_numel + first
        )
        rows = tl.where(step > 0, gathered, x) + tl.cast(chunk * BLOCK_M, tl.int64) * K
        to = out + first + tl.cast(chunk * BLOCK_M, tl.int64) * K
        count = tl.minimum(m - chunk * BLOCK_M, BLOCK_M) * K
        for start in range(0, count, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(to + at, tl.load(rows + at, mask=at < count), mask=at < count)


class GatherWorkspace(Workspace):
    """A workspace that also has room for row scales.

    Attributes:
        scales: float32 [2, W * max_rows].
        choice: selects the arguments that callers leave open.
    """

    def __init__(self, home: Home, max_rows: int, k: int, dtype: torch.dtype, block_m: int) -> None:
        size, name = home.world_size, "all_gather_matmul"
        asked = {"max_rows": max_rows, "k": k, "dtype": dtype, "block_m": block_m}
        with agreed(name, asked, home.exchange) as check:
            require_dtype(check, dtype)
            require_counts(check, 0, max_rows=max_rows, k=k)
            require_counts(check, 1, block_m=block_m)
        self.slot_rows = size * max_rows
        self.scales = home.empty(f"{name}.scales", (SLOTS, self.slot_rows), torch.float32)
        signals = size * -(-max_rows // block_m)
        super().__init__(home, name, size * max_rows * k, dtype, signals)
        self.choice = Choice(home, name, block_m)


def all_gather_matmul_workspace(
    home: Home, max_rows: int, k: int, dtype: torch.dtype, block_m: int = BLOCK_M
) -> GatherWorkspace:
    """Create a workspace for shards with at most `max_rows` rows and `k` columns. Collective.

    Args:
        home: this rank's home.
        max_rows: maximum M / W.
        k: K.
        dtype: dtype of x.
        block_m: smallest BLOCK_M in a call. A smaller shard may have one chunk with all its rows.

    Raises:
        KernelError: on every rank, if one rank refuses an argument or the ranks' arguments differ.
    """
    return GatherWorkspace(home, max_rows, k, dtype, block_m)


def all_gather_matmul(
    x_shard: Tensor,
    w: Tensor | Sequence[Tensor],
    workspace: GatherWorkspace,
    *,
    epilogue: Epilogue = NOTHING,
    gathered: Tensor | None = None,
    topology: Topology = "switch",
    ranks_per_node: int = 0,
    blocks: tuple[int, int, int] | None = None,
    warps: int = 0,
    stages: int = 0,
    programs: int = 0,
    senders: int = 0,
) -> Tensor:
    """Multiply the gathered rows by this rank's columns of one or several weights. Collective.

    Args:
        x_shard: [M / W, K], contiguous, the workspace's dtype; the same shape on all ranks.
        w: [K, N / W], or up to three weights with K rows. Several weights count as one with their
            columns side by side (QKV; gate and up). Contiguous, or transposes of contiguous
            matrices.
        workspace: from `all_gather_matmul_workspace`.
        epilogue: work after the product. Its x_scale is for this rank's rows.
        gathered: [M, K], contiguous, x_shard's dtype. If not None on a rank, it receives the rows
            from all ranks there.
        topology: links between ranks; see Order.
        ranks_per_node: number of ranks with fast links between them; all ranks if 0. The ranks of a
            node have consecutive numbers.
        blocks: BLOCK_M, BLOCK_N, BLOCK_K. If None, the tuned configuration for this device, world
            size, shape and dtype, else the best one in the cost model: gpu/tuning/search.py.
        warps, stages: compile options for the product; if 0, chosen in the same way as blocks.
        programs: number of programs in the product; if 0, all processors without senders.
        senders: number of programs that copy; if 0, chosen in the same way as blocks, or
            devices.SENDERS.

    Returns:
        [M, N / W], or [M, N / (2 W)] after silu_multiply; see Epilogue.dtype.

    Raises:
        KernelError: on one rank the operands do not match each other or the workspace, or the
            ranks differ in the shard's shape or in an option.
    """
    size, require, silu = workspace.world_size, workspace.require, epilogue.silu_multiply
    asked: dict[str, object] = {"topology": topology, "ranks_per_node": ranks_per_node}
    asked |= {"blocks": blocks, "warps": warps, "stages": stages}
    asked |= {"programs": programs, "senders": senders}
    with workspace.agreed("all_gather_matmul", asked):
        workspace.require_tensor("x_shard", x_shard)
        asked["x_shard's shape"] = tuple(x_shard.shape)
        weights = Weights.of(w, x_shard, require)
        (m, k), n = x_shard.shape, sum(weights.widths)
        chosen = None
        if blocks is None:
            chosen = workspace.choice.of_product(x_shard, weights, size * m, silu)
        if chosen:
            blocks = (chosen.block_m, chosen.block_n, chosen.block_k)
            warps, stages = warps or chosen.warps, stages or chosen.stages
            senders = senders or chosen.senders
        tiling = choose_tiling(m, x_shard, weights, blocks, warps, stages, require, silu)
        asked["the chosen BLOCK_M"] = tiling.block_m  # from this rank's columns, too
        epilogue.check(require, x_shard, weights.widths, size * m)
        node = ranks_per_node or size
        fits = node > 0 and size % node == 0
        require("topology", repr(topology), topology in get_args(Topology), "be switch or mesh")
        require("ranks_per_node", ranks_per_node, fits, f"divide the {size} ranks")
        available = max(1, workspace.processors - (size > 1))
        why = "copies to other ranks need a processor"
        workspace.require_programs(programs, available, why)
        require("senders", senders, senders >= 0, "be positive, or 0 for the default")
        if gathered is not None:
            workspace.require_tensor("gathered", gathered)
            shape = list(gathered.shape)
            require("gathered's shape", shape, shape == [size * m, k], f"be {[size * m, k]}")
        chunks = -(-m // tiling.block_m)
        workspace.require_room("x_shard", size * m * k)
        require("x_shard's rows", m, size * m <= workspace.slot_rows, "fit the workspace")
        workspace.require_signals(size * chunks)
    columns = epilogue.columns(n)
    out = x_shard.new_empty(size * m, columns, dtype=epilogue.dtype(x_shard.dtype))
    if not m or not (n or gathered is not None):
        return out
    scales, rank = Slots.of(workspace.scales), workspace.rank
    dtype = triton_type(x_shard.dtype)
    copying, computing = workspace.divide((size - 1) * chunks, senders)
    with workspace.beside():
        workspace.begin()
        peers = workspace.peers()
        begun = workspace.record_event()
        if size > 1:
            push_rows[(copying,)](
                x=x_shard,
                x_scale=epilogue.x_scale,
                peers=peers,
                scales=scales,
                rank=rank,
                m=m,
                K=k,
                dtype=dtype,
                WORLD=size,
                NODE=node,
                MESH=topology == "mesh",
                SCALE_ROWS=epilogue.scales_rows,
                BLOCK_M=tiling.block_m,
                BLOCK=BLOCK,
            )
    workspace.wait_event(begun)
    if tiles := size * chunks * weights.column_tiles(tiling.block_n, silu):
        form = form_of(tiling, weights, epilogue, m, k)
        # No group has rows from two shards: one may arrive first. It is no constant, because each
        # number of rows would compile a kernel.
        group = gcd(form.group, chunks)
        multiply_gathered[(min(tiles, programs or computing),)](
            x=x_shard,
            weights=weights.three,
            widths=weights.three_widths,
            epilogue=epilogue.operands,
            out=out,
            peers=peers,
            scales=scales,
            rank=rank,
            m=m,
            group=group,
            K=k,
            out_columns=columns,
            dtype=dtype,
            WORLD=size,
            NODE=node,
            MESH=topology == "mesh",
            FORM=form,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
        )
    if gathered is not None:
        collect_rows[(workspace.resident(size * chunks),)](
            x=x_shard,
            out=gathered,
            peers=peers,
            rank=rank,
            m=m,
            K=k,
            dtype=dtype,
            WORLD=size,
            NODE=node,
            BLOCK_M=tiling.block_m,
            # With one rank the kernel copies only its own rows, and a full block spills registers.
            BLOCK=RESIDENT_BLOCK if size > 1 else RESIDENT_BLOCK // 2,
            num_warps=RESIDENT_WARPS,
        )
    workspace.rejoin()
    return out
