"""All-gather and expert products in one op (AG-MoE): tiles begin when their tokens have arrived.

    all_gather_grouped_matmul(x_shard [M / W, K], w [E, K, N / W], plan) -> [M top_k, N / W]

This op is for experts that are split by columns over the ranks. Every rank multiplies all ranks'
tokens, each by the top_k experts that it was routed to. A rank may have columns of some experts
only (`own`); it then multiplies the tokens that were routed to those. For each rank's tokens, one
int32 vector describes the routing: its plan (`make_plan`). With P = M / W * top_k:

    offsets [E + 1]    the first place of each expert among the sorted pairs
    pairs   [P]        (token, choice) as token * top_k + choice, sorted by expert
    weights [P]        for each pair, ordered by pair number; the bits of float32

In part r of the result, row i is pair i in rank r's plan. The parts are thus sorted by expert, and
grouped_matmul_reduce_scatter takes them, together with all ranks' plans.

Protocol. Slot n mod 2 in each rank's buffers has W shards, their scales and their plans. There is
one signal for each rank. In call n the programs of `push_shard` copy this rank's shard, in parts,
to row r in the other ranks' slots. After each part, a program increments the peer's counter in the
memory of rank r. The counter orders all earlier stores before the last program's next two stores:
it sets the counter back to 0, and the peer's signal r to n. A rank's own shard is read in place.

Order. `multiply_gathered_groups` is persistent and takes the ranks `ahead_of` it in W stages,
itself first (all_gather_matmul.py: data is needed in the order in which it is sent). Each expert
has tokens from all ranks, but few from each; tiles with only one rank's tokens would be mostly
empty. So an expert's rows are lined up in order of arrival, and cut into tiles there. Each stage
multiplies, expert by expert, the tiles that it has filled; the last stage also multiplies the
partial tiles. Every program computes this from the plans at the start of each stage. A tile's rows
are gathered and stored by their addresses.

    3 ranks, tiles of 4 rows; rows of experts a and b by rank: 3a 5b | 3a 1b | 1a 2b
    stage 0    bbbb                       left aaa b
    stage 1    aaaa                       left aa bb
    stage 2    aaa, bbbb

On a GPU the copies run on a separate stream, on a processor that the product leaves to them, as in
all_gather_matmul.py. Slots are not reused early, because every rank waits for a signal from every
other rank (runtime/workspace.py).

Plans are not trusted. If a plan's offsets decrease, are negative or exceed P, its rank has no
tokens here. A pair out of range is read as pair 0. Both are reported in a status word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.collectives.chunks import copy_chunk
from weft.kernels.gpu.collectives.collective import RESIDENT_BLOCK, RESIDENT_WARPS
from weft.kernels.gpu.experts.grouped_matmul import group_of, group_sizes, padded, report
from weft.kernels.gpu.matmul.all_gather_matmul import (
    BLOCK,
    Topology,
    ahead_of,
    behind,
    collect_rows,
    step_and_part,
)
from weft.kernels.gpu.matmul.epilogue import NOTHING, Epilogue
from weft.kernels.gpu.matmul.operands import Weights
from weft.kernels.gpu.matmul.tile import count_columns, multiply_and_finish, tile_at
from weft.kernels.gpu.matmul.tiling import choose_tiling, form_of
from weft.kernels.gpu.runtime.arguments import (
    KernelError,
    Require,
    require_counts,
    require_tensor,
)
from weft.kernels.gpu.runtime.peers import SLOTS, Slots
from weft.kernels.gpu.runtime.signals import count_off, notify, peer_pointer, slot_of, wait
from weft.kernels.gpu.runtime.workspace import Workspace, agreed, require_dtype, triton_type
from weft.kernels.gpu.tuning.products import expected_choices
from weft.kernels.gpu.tuning.search import Choice
from weft.kernels.symmetric.memory import Home, SymmetricTensor

CHUNK = 1 << 16
"""How many numbers of a shard one program sends at a time."""


def make_plan(expert_ids: Tensor, weights: Tensor, experts: int) -> Tensor:
    """Make the plan for a rank's tokens on the device; the host does not read it.

    Args:
        expert_ids: int [m, top_k]; for an id outside [0, experts) nothing is computed.
        weights: [m, top_k].
        experts: E.

    Returns:
        int32 [E + 1 + 2 * m * top_k]; the module's docstring has the format.
    """
    ids, order = expert_ids.flatten().sort(stable=True)
    edges = torch.arange(experts + 1, dtype=ids.dtype, device=ids.device)
    offsets = torch.searchsorted(ids, edges)
    bits = weights.float().flatten().view(torch.int32)
    return torch.cat([offsets.int(), order.int(), bits])


def plan_length(experts: int, pairs: int) -> int:
    """Compute how many int32 numbers a plan has."""
    return experts + 1 + 2 * pairs


def require_own(require: Require, own: range | None, experts: int) -> range:
    """Return the numbers of the experts whose weights a rank has; check those given."""
    if own is None:
        return range(experts)
    fits = own.step == 1 and 0 <= own.start < own.stop <= experts
    require("own", own, fits, f"be consecutive numbers in range(0, {experts})")
    return own


class Routed(NamedTuple):
    """Numbers of experts and choices: one kernel argument (peers.py).

    Attributes:
        experts: E.
        own: number of experts on this rank.
        top_k: number of experts for each token.
    """

    experts: int
    own: int
    top_k: int


class Ranks(NamedTuple):
    """The order in which kernels take the ranks: their constant RANKS (peers.py).

    Attributes:
        world: W, number of ranks.
        node: number of ranks on a node.
        steps: a power of two, at least W.
    """

    world: int
    node: int
    steps: int


@triton.jit(do_not_specialize=["rank", "m"])
def push_shard(
    x,  # [m, K]; this rank's shard
    x_scale,  # float32 [scales_count], or None
    plan,  # int32 [length]
    peers,  # buffers [2, W, m, K]; signals int64 [W]
    scales,  # Slots: float32 [2, W, m]
    plans,  # Slots: int32 [2, W, length]
    sent,  # int64 [W]; addresses of int32 [W]
    rank,
    m,
    numel,  # m * K
    length,
    scales_count,
    chunk,
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    NODE: tl.constexpr,
    MESH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Send this rank's data to the other ranks, in parts. Grid: (programs,), persistent."""
    call = tl.load(peers.calls)
    parts = 1 + tl.cdiv(numel, chunk)
    for item in range(tl.program_id(0), (WORLD - 1) * parts, tl.num_programs(0)):
        step, part = step_and_part(parts + item, parts, WORLD, MESH)
        peer = behind(rank, step, WORLD, NODE)
        if part == 0:
            to_plan = peer_pointer(plans.addresses, peer, tl.int32) + slot_of(call) * plans.numel
            copy_chunk(to_plan + rank * length, plan, 0, length, length, BLOCK)
            if x_scale is not None:
                to_scales = peer_pointer(scales.addresses, peer, tl.float32)
                to_scales += slot_of(call) * scales.numel
                copy_chunk(to_scales + rank * m, x_scale, 0, scales_count, scales_count, BLOCK)
        else:
            place = slot_of(call) * peers.slot_numel + tl.cast(rank, tl.int64) * numel
            to = peer_pointer(peers.buffers, peer, dtype) + place
            copy_chunk(to, x, part - 1, numel, chunk, BLOCK)
        if count_off(sent, rank, peer, parts):
            notify(peers, peer, rank, call)


@triton.jit
def find_rows(
    at,  # [BLOCK_M]; indices of an expert's rows, in step order
    expert,
    plans,  # pointers [STEPS]; each step's plan
    usable,  # int32 [STEPS]; 1 if the plan has arrived and is valid
    steps,  # [STEPS]; 0, 1 ..
):
    """Find each row's step, its place in that step's plan, and the number of rows."""
    begin = tl.load(plans + expert, mask=usable > 0, other=0)
    size = tl.load(plans + expert + 1, mask=usable > 0, other=0) - begin
    end = tl.cumsum(size, 0)
    first = end - size
    inside = (at[:, None] >= first[None, :]) & (at[:, None] < end[None, :])
    step = tl.sum(tl.where(inside, steps[None, :], 0), 1)
    place = at + tl.sum(tl.where(inside, (begin - first)[None, :], 0), 1)
    return step, place, tl.sum(size, 0)


@triton.jit
def pick(values, index, GROUPS: tl.constexpr):
    """Take values[index] from a block [GROUPS]."""
    return tl.sum(tl.where(tl.arange(0, GROUPS) == index, values, 0), 0)


@triton.jit(do_not_specialize=["rank", "m", "pairs", "first"])
def multiply_gathered_groups(
    x,  # [m, K]; this rank's shard
    plan,  # int32 [length]; this rank's plan
    weights,  # three, each [E, K, n], or [E, n, K] if FORM.transposed, or None
    widths,  # n for each weight
    # EpilogueOperands: x_scale float32 [m] or [1]; w_scale float32 [E, N], [E, 1] or [1];
    epilogue,  # bias [E, N]; residual [W * pairs, N']
    scale_stride,  # stride in w_scale from one expert to the next
    out,  # [W * pairs, N']
    peers,  # buffers [2, W, m, K]; signals int64 [W]
    scales,  # Slots: float32 [2, W, m]
    plans,  # Slots: int32 [2, W, length]
    status,  # int32 [1]
    rank,
    m,
    K,
    routed,  # Routed
    first,  # this rank's first expert
    pairs,  # m * top_k
    out_columns,  # N'
    dtype: tl.constexpr,
    RANKS: tl.constexpr,
    GROUPS: tl.constexpr,  # a power of two, at least routed.own
    SCALE_ROWS: tl.constexpr,  # each row in x has its own scale
    ALIGNED: tl.constexpr,  # rows in x begin at multiples of 16 bytes
    FORM: tl.constexpr,
):
    """Compute tiles, each after its tokens have arrived. Grid: (programs,), persistent."""
    WORLD: tl.constexpr = RANKS.world
    NODE: tl.constexpr = RANKS.node
    STEPS: tl.constexpr = RANKS.steps
    BLOCK_M: tl.constexpr = FORM.block_m
    GROUP: tl.constexpr = FORM.group
    n0, n1, n2 = widths[0], widths[1], widths[2]
    call = tl.load(peers.calls)
    length = routed.experts + 1 + 2 * pairs
    columns = count_columns(widths, FORM)
    gathered = peer_pointer(peers.buffers, rank, dtype) + slot_of(call) * peers.slot_numel
    gathered_scales = peer_pointer(scales.addresses, rank, tl.float32)
    gathered_scales += slot_of(call) * scales.numel
    gathered_plans = peer_pointer(plans.addresses, rank, tl.int32) + slot_of(call) * plans.numel
    steps = tl.arange(0, STEPS)
    shards = ahead_of(rank, steps, WORLD, NODE)
    by_step = tl.where(steps > 0, gathered_plans + shards * length, plan)
    usable = tl.zeros((STEPS,), tl.int32)
    came = tl.zeros((GROUPS,), tl.int32)  # each expert's rows so far
    done = tl.zeros((GROUPS,), tl.int32)  # each expert's tile rows so far
    tile = tl.program_id(0)  # index in the stage
    for stage in range(WORLD):
        shard = ahead_of(rank, stage, WORLD, NODE)
        if stage > 0:
            wait(peers, rank, shard, call)
        offsets = tl.where(stage > 0, gathered_plans + shard * length, plan)
        size, wrong = group_sizes(offsets + first, routed.own, pairs, GROUPS)
        if wrong < GROUPS:
            report(status, 1 + shard)
        usable += tl.where((steps == stage) & (wrong == GROUPS), 1, 0)
        came += size
        whole = tl.where(stage < WORLD - 1, came // BLOCK_M, tl.cdiv(came, BLOCK_M))
        new = whole - done
        through = tl.cumsum(new, 0)
        tiles = tl.max(through, 0) * columns
        while tile < tiles:
            expert, before = group_of(tile // columns, through)
            count = pick(new, expert, GROUPS)
            row, column = tile_at(tile - before * columns, count, columns, GROUP)
            top = (pick(done, expert, GROUPS) + row) * BLOCK_M
            at = top + tl.arange(0, BLOCK_M)
            step, place, rows = find_rows(at, first + expert, by_step, usable, steps)
            # The plan was checked, but a late peer may overwrite it at any time.
            inside = (at < rows) & (place >= 0) & (place < pairs)
            place = tl.where(inside, place, 0)
            source = ahead_of(rank, step, WORLD, NODE)
            of_rows = tl.where(step > 0, gathered_plans + source * length, plan)
            pair = tl.load(of_rows + routed.experts + 1 + place, mask=inside, other=0)
            bad = (pair < 0) | (pair >= pairs)
            if tl.max(bad.to(tl.int32), 0) > 0:
                report(status, 1 + tl.max(tl.where(bad, source, 0), 0))
            token = tl.where(bad, 0, pair) // routed.top_k
            own = x + token.to(tl.int64) * K
            left = tl.where(step > 0, gathered + (source * m + token).to(tl.int64) * K, own)
            if ALIGNED:  # Triton loses this fact when pointers are selected
                left = tl.multiple_of(left, 16)
            row_scale = epilogue.x_scale
            if epilogue.x_scale is not None:
                # A single scale for a whole shard applies to all its rows.
                at_scale = token if SCALE_ROWS else token * 0
                come = gathered_scales + source * m + at_scale
                row_scale = tl.where(step > 0, come, epilogue.x_scale + at_scale)
            to = (source * pairs + place).to(tl.int64) * out_columns
            matrix = tl.cast(expert, tl.int64) * K
            multiply_and_finish(
                left, 0, rows - top, column,
                weights[0] + matrix * n0,
                None if weights[1] is None else weights[1] + matrix * n1,
                None if weights[2] is None else weights[2] + matrix * n2,
                widths, row_scale,
                None if epilogue.w_scale is None else epilogue.w_scale + expert * scale_stride,
                None if epilogue.bias is None else epilogue.bias + expert * (n0 + n1 + n2),
                None if epilogue.residual is None else epilogue.residual + to,
                out + to, K, FORM,
            )  # fmt: skip
            tile += tl.num_programs(0)
        tile -= tiles
        done = whole


class PlannedWorkspace(Workspace):
    """A workspace for an op with plans, which it does not trust.

    Attributes:
        experts, top_k: the same in every call.
        status: int32 [1]; 0, or 1 + the first rank whose plan was found wrong.
        choice: chooses the options that callers leave open.
    """

    experts: int
    top_k: int
    status: Tensor
    choice: Choice

    def check(self) -> None:
        """Check as a Workspace does; raise, too, if a plan was wrong since the last check."""
        super().check()
        if found := int(self.status):
            self.status.zero_()
            raise KernelError(
                f"{self.name}: the plan of rank {found - 1} has offsets that decrease, are "
                "negative or exceed its pairs, or a pair out of range"
            )


class GatherGroupsWorkspace(PlannedWorkspace):
    """A workspace for all_gather_grouped_matmul.

    Attributes:
        scales: float32 [2, W * max_rows].
        plans: int32 [2, W * the longest plan].
        sent: int32 [W]; for each peer, how many parts have been sent.
    """

    def __init__(
        self, home: Home, max_rows: int, k: int, experts: int, top_k: int, dtype: torch.dtype
    ) -> None:
        size, name = home.world_size, "all_gather_grouped_matmul"
        asked = {"max_rows": max_rows, "k": k, "experts": experts, "top_k": top_k, "dtype": dtype}
        with agreed(name, asked, home.exchange) as check:
            require_dtype(check, dtype)
            require_counts(check, 0, max_rows=max_rows)
            require_counts(check, 1, k=k, experts=experts, top_k=top_k)
        self.experts, self.top_k = experts, top_k
        self.slot_rows = size * max_rows
        self.slot_plans = size * plan_length(experts, max_rows * top_k)
        self.scales: SymmetricTensor = home.empty(
            f"{name}.scales", (SLOTS, self.slot_rows), torch.float32
        )
        self.plans: SymmetricTensor = home.empty(
            f"{name}.plans", (SLOTS, self.slot_plans), torch.int32
        )
        self.sent: SymmetricTensor = home.zeros(f"{name}.sent", (size,), torch.int32)
        super().__init__(home, name, size * max_rows * k, dtype, size)
        self.status = torch.zeros(1, dtype=torch.int32, device=home.device)
        self.choice = Choice(home, name)


def all_gather_grouped_matmul_workspace(
    home: Home, max_rows: int, k: int, experts: int, top_k: int, dtype: torch.dtype
) -> GatherGroupsWorkspace:
    """Make a workspace for shards with at most `max_rows` rows and `k` columns. Collective.

    Args:
        home: this rank's home.
        max_rows: M / W.
        k: K.
        experts: E.
        top_k: number of experts for each token.
        dtype: dtype of x.

    Raises:
        KernelError: on every rank, if any rank refuses an argument, or if the arguments differ.
    """
    return GatherGroupsWorkspace(home, max_rows, k, experts, top_k, dtype)


def all_gather_grouped_matmul(
    x_shard: Tensor,
    w: Tensor | Sequence[Tensor],
    plan: Tensor,
    workspace: GatherGroupsWorkspace,
    *,
    epilogue: Epilogue = NOTHING,
    plans: Tensor | None = None,
    own: range | None = None,
    topology: Topology = "switch",
    ranks_per_node: int = 0,
    blocks: tuple[int, int, int] | None = None,
    warps: int = 0,
    stages: int = 0,
    programs: int = 0,
    senders: int = 0,
) -> Tensor:
    """Multiply all ranks' tokens by this rank's columns of their experts. Collective.

    Args:
        x_shard: [M / W, K], contiguous, with the workspace's dtype; the same shape on all ranks.
        w: [E, K, N / W], or up to three such weights, whose columns are concatenated (gate and up);
            contiguous, or the transposes (`mT`) of contiguous ones. Only `own` experts have some.
        plan: int32 [E + 1 + 2 P], for this rank's tokens: see `make_plan`.
        workspace: from `all_gather_grouped_matmul_workspace`.
        epilogue: applied to the product. Its x_scale has this rank's rows, w_scale and bias have
            one entry per expert, and the residual has the result's rows.
        plans: int32 [W, E + 1 + 2 P], contiguous; receives all ranks' plans. It may be None on
            any rank.
        own: numbers of the experts in w, on this rank; all if None.
        topology: links between ranks: with `mesh` all shards are sent at once.
        ranks_per_node: number of consecutive ranks with fast links; all if 0.
        blocks: BLOCK_M, BLOCK_N, BLOCK_K of a tile. If None, the tuned values for this device,
            world size, shape and dtype; if there are none, the cost model's choice (tuning/).
        warps, stages: compile options of the product; if 0, chosen like blocks.
        programs: number of programs in the product; if 0, all processors of the device but one.
        senders: number of copying programs; if 0, chosen like blocks, or one per part and peer.

    Returns:
        [W * P, N / W], or [W * P, N / (2 W)] after silu_multiply; see Epilogue.dtype. Rows for
        pairs without an own expert are not written.

    Raises:
        KernelError: on one rank the operands do not fit together or do not fit the workspace; or
            the ranks differ in the operands' shapes or in an option. Errors in a plan are raised
            later, by `workspace.check`.
    """
    size, require, silu = workspace.world_size, workspace.require, epilogue.silu_multiply
    asked: dict[str, object] = {"topology": topology, "ranks_per_node": ranks_per_node}
    asked |= {"blocks": blocks, "warps": warps, "stages": stages}
    asked |= {"programs": programs, "senders": senders}
    with workspace.agreed("all_gather_grouped_matmul", asked):
        workspace.require_tensor("x_shard", x_shard)
        asked["x_shard's shape"] = tuple(x_shard.shape)
        experts, top_k = workspace.experts, workspace.top_k
        own = require_own(require, own, experts)
        weights = Weights.of(w, x_shard, require, groups=len(own))
        (m, k), n = x_shard.shape, sum(weights.widths)
        pairs = m * top_k
        length = plan_length(experts, pairs)
        chosen = None
        if blocks is None:
            choices = expected_choices(top_k, experts, len(own))
            chosen = workspace.choice.of_product(
                x_shard, weights, size * m * choices, silu, len(own), choices
            )
        if chosen:
            blocks = (chosen.block_m, chosen.block_n, chosen.block_k)
            warps, stages = warps or chosen.warps, stages or chosen.stages
            senders = senders or chosen.senders
        high = -(-size * pairs // experts)
        tiling = choose_tiling(
            high, x_shard, weights, blocks, warps, stages, require, silu, apart=True
        )
        epilogue.check(require, x_shard, weights.widths, size * pairs, len(own))
        node = ranks_per_node or size
        fits = node > 0 and size % node == 0
        require("topology", repr(topology), topology in get_args(Topology), "be switch or mesh")
        require("ranks_per_node", ranks_per_node, fits, f"divide the {size} ranks")
        available = max(1, workspace.processors - (size > 1))
        why = "copies to other ranks need a processor"
        workspace.require_programs(programs, available, why)
        require("senders", senders, senders >= 0, "be positive, or 0 for one per part")
        workspace.require_room("x_shard", size * m * k)
        require("x_shard's rows", m, size * m <= workspace.slot_rows, "fit the workspace")
        require_tensor(require, "plan", plan, [length], workspace.device, torch.int32)
        if plans is not None:
            require_tensor(require, "plans", plans, [size, length], workspace.device, torch.int32)
    columns = epilogue.columns(n)
    out = x_shard.new_empty(size * pairs, columns, dtype=epilogue.dtype(x_shard.dtype))
    if not m:
        if plans is not None:
            plans.copy_(plan)  # without tokens all plans are the same
        return out
    x_scale, rank, dtype = epilogue.x_scale, workspace.rank, triton_type(x_shard.dtype)
    all_scales, all_plans = Slots.of(workspace.scales), Slots.of(workspace.plans)
    with workspace.beside():
        workspace.begin()
        begun = workspace.record_event()
        if size > 1:
            parts = (size - 1) * (1 + -(-m * k // CHUNK))
            push_shard[(min(parts, senders or parts),)](
                x=x_shard,
                x_scale=x_scale,
                plan=plan,
                peers=workspace.peers(),
                scales=all_scales,
                plans=all_plans,
                sent=workspace.sent.addresses,
                rank=rank,
                m=m,
                numel=m * k,
                length=length,
                scales_count=0 if x_scale is None else x_scale.numel(),
                chunk=CHUNK,
                dtype=dtype,
                WORLD=size,
                NODE=node,
                MESH=topology == "mesh",
                BLOCK=BLOCK,
            )
    workspace.wait_event(begun)
    form = form_of(tiling, weights, epilogue, m, k)
    tiles = (size * pairs // tiling.block_m + len(own)) * weights.column_tiles(tiling.block_n, silu)
    itemsize = x_shard.itemsize
    places = (x_shard.data_ptr(), k * itemsize, workspace.numel * itemsize)
    multiply_gathered_groups[(max(1, min(tiles, programs or available)),)](
        x=x_shard,
        plan=plan,
        weights=weights.three,
        widths=weights.three_widths,
        epilogue=epilogue.operands,
        scale_stride=epilogue.scale_stride(),
        out=out,
        peers=workspace.peers(),
        scales=all_scales,
        plans=all_plans,
        status=workspace.status,
        rank=rank,
        m=m,
        K=k,
        routed=Routed(experts, len(own), top_k),
        first=own.start,
        pairs=pairs,
        out_columns=columns,
        dtype=dtype,
        RANKS=Ranks(size, node, triton.next_power_of_2(size)),
        GROUPS=padded(len(own)),
        SCALE_ROWS=epilogue.scales_rows,
        ALIGNED=all(place % 16 == 0 for place in places),
        FORM=form._replace(scale_rows=True, even_m=False),  # each row's scale has a pointer
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    if plans is not None:  # a plan is a shard with one row
        collect_rows[(workspace.resident(size),)](
            x=plan,
            out=plans,
            peers=workspace.peers(workspace.plans),
            rank=rank,
            m=1,
            K=length,
            dtype=tl.int32,
            WORLD=size,
            NODE=node,
            BLOCK_M=16,
            BLOCK=RESIDENT_BLOCK,
            num_warps=RESIDENT_WARPS,
        )
    workspace.rejoin()
    return out
