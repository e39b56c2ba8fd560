"""Expert products and reduce-scatter in one op (MoE-RS): the end of tensor-parallel experts.

    grouped_matmul_reduce_scatter(x [M top_k, K / W], w [E, K / W, N], plans) -> [M / W, N]

Part r of x has a row for each pair in rank r's plan, in plan order, as
all_gather_grouped_matmul.py returns it. Each row is multiplied by its expert's weight, if this
rank has it (`own`). A token's rows are added with the token's weights. Rank r's tokens are then
added over the ranks, on rank r.

Protocol. `find_pairs` finds each pair's place in its plan. `multiply_pairs` takes the owners of the
rows, one rank per stage, in W stages. It stores the products, row by row, to `products` in this
rank's memory. Its programs count finished tiles (signals.py: `count_off`). The last program in a
stage sets this rank's own signal `ready` for the stage to n, the number of the call. `add_and_send`
runs on a stream beside it and waits for this signal and for those of all earlier stages. All
programs' stores from these stages are then visible. It adds each token's rows, in the order of its
choices. It stores the sums, tile by tile, to row r in slot n mod 2 of the owner's buffer, and then
sets the owner's signal [tile, r] to n. `reduce_partials` (matmul_reduce_scatter.py) waits for these
signals from all ranks and adds in rank order: the sum has the same bits in every run.

Order. Owners come from the last step of all_gather_matmul.py's order to the first, which is this
rank. Sums with a long way to go thus leave early, while later stages are multiplied. An expert's
rows are lined up in that order and cut into tiles there, because each owner has few of them. A
tile belongs to the stage of its first row.

    3 ranks, tiles of 4 rows; rows of expert a by owner: 3 | 3 | 1
    stage 0    aaa a     the last row belongs to the next owner
    stage 1    aa a      the last row belongs to the last owner

The product never waits, so it always finishes; `add_and_send` waits only for the product. Both are
done before `reduce_partials` begins, which waits for other ranks. Two slots are enough, because
every rank waits for every rank's tiles (runtime/workspace.py). `products` is overwritten only after
the reduction in the previous call, and that reduction comes after its `add_and_send`.

Products are kept, and sums are sent, in the workspace's dtype; both are added in float32. Plans are
not trusted, as in all_gather_grouped_matmul.py: the pairs in a wrong plan add nothing, and a status
word reports it.

Not handled: biases and SiLU; ranks that are connected pairwise (topology `mesh`), whose links are
used in turn here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.experts.all_gather_grouped_matmul import (
    PlannedWorkspace,
    Ranks,
    find_rows,
    pick,
    plan_length,
    require_own,
)
from weft.kernels.gpu.experts.grouped_matmul import group_of, group_sizes, padded, report
from weft.kernels.gpu.matmul.all_gather_matmul import ahead_of
from weft.kernels.gpu.matmul.epilogue import NOTHING, Epilogue
from weft.kernels.gpu.matmul.matmul_reduce_scatter import (
    for_sum,
    reduce_partials,
    result_shape,
    tile_offsets,
)
from weft.kernels.gpu.matmul.operands import Weights
from weft.kernels.gpu.matmul.tile import GROUP, multiply_and_finish, tile_at
from weft.kernels.gpu.matmul.tiling import choose_tiling, form_of
from weft.kernels.gpu.runtime.arguments import require_counts, require_tensor
from weft.kernels.gpu.runtime.signals import count_off, notify, peer_pointer, wait
from weft.kernels.gpu.runtime.workspace import agreed, require_dtype, triton_type
from weft.kernels.gpu.tuning.products import expected_choices
from weft.kernels.gpu.tuning.search import Choice
from weft.kernels.symmetric.memory import Home, SymmetricTensor

BLOCK_M, BLOCK_N = 32, 256
"""Default rows and columns of a sent tile."""

SENDERS = 16
"""Number of programs that add and send, if neither the call nor the tuning file sets it."""

BLOCK = 1024
"""Number of pairs for one program in `find_pairs`."""


@triton.jit(do_not_specialize=["first"])
def find_pairs(
    plans,  # int32 [W, length]
    places,  # int32 [W, pairs]; initially -1
    status,  # int32 [1]
    experts,  # E
    first,  # this rank's first expert
    groups,  # number of its experts
    pairs,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find each pair's place in its plan, if its expert is here. Grid: (cdiv(pairs, BLOCK), W)."""
    owner = tl.program_id(1)
    plan = plans + owner * (experts + 1 + 2 * pairs)
    _sizes, wrong = group_sizes(plan + first, groups, pairs, GROUPS)
    begin, end = tl.load(plan + first), tl.load(plan + first + groups)
    if wrong < GROUPS:
        begin = end
        report(status, 1 + owner)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (at >= begin) & (at < end)
    inside = inside & (at < pairs)
    pair = tl.load(plan + experts + 1 + at, mask=inside, other=0)
    bad = (pair < 0) | (pair >= pairs)
    if tl.max(bad.to(tl.int32), 0) > 0:
        report(status, 1 + owner)
    tl.store(places + owner * pairs + pair, at, mask=inside & (pair >= 0) & (pair < pairs))


@triton.jit(do_not_specialize=["rank", "pairs", "first"])
def multiply_pairs(
    x,  # [W * pairs, K]
    w,  # [E, K, N], or [E, N, K] if FORM.transposed
    x_scale,  # float32 [W * pairs] or [1], or None
    w_scale,  # float32 [E, N], [E, 1] or [1], or None
    scale_stride,  # stride in w_scale from one expert to the next
    plans,  # int32 [W, length]
    products,  # [W * pairs, N]
    finished,  # int64 [W]; addresses of int32 [W]
    peers,
    rank,
    ready,  # the first signal; there are W
    N,
    K,
    experts,  # E
    first,  # this rank's first expert
    groups,  # number of its experts
    pairs,  # number of pairs on a rank
    RANKS: tl.constexpr,
    GROUPS: tl.constexpr,  # a power of two, at least `groups`
    FORM: tl.constexpr,
):
    """Compute the products for all pairs, ordered by owner. Grid: (programs,)."""
    WORLD: tl.constexpr = RANKS.world
    NODE: tl.constexpr = RANKS.node
    STEPS: tl.constexpr = RANKS.steps
    BLOCK_M: tl.constexpr = FORM.block_m
    BLOCK_N: tl.constexpr = FORM.block_n
    GROUP: tl.constexpr = FORM.group
    SCALE_ROWS: tl.constexpr = FORM.scale_rows
    call = tl.load(peers.calls)
    length = experts + 1 + 2 * pairs
    columns = tl.cdiv(N, BLOCK_N)
    steps = tl.arange(0, STEPS)
    by_step = plans + ahead_of(rank, tl.maximum(WORLD - 1 - steps, 0), WORLD, NODE) * length
    usable = tl.zeros((STEPS,), tl.int32)
    for stage in range(WORLD):
        owner = ahead_of(rank, WORLD - 1 - stage, WORLD, NODE)
        size, wrong = group_sizes(plans + owner * length + first, groups, pairs, GROUPS)
        usable += tl.where((steps == stage) & (wrong == GROUPS), 1, 0)
    came = tl.zeros((GROUPS,), tl.int32)  # each expert's rows so far
    done = tl.zeros((GROUPS,), tl.int32)  # each expert's tile rows so far
    tile = tl.program_id(0)  # index in the stage
    for stage in range(WORLD):
        owner = ahead_of(rank, WORLD - 1 - stage, WORLD, NODE)
        size, wrong = group_sizes(plans + owner * length + first, groups, pairs, GROUPS)
        came += size
        begun = tl.cdiv(came, BLOCK_M)
        new = begun - done
        through = tl.cumsum(new, 0)
        tiles = tl.max(through, 0) * columns
        if (tiles == 0) & (tl.program_id(0) == 0):
            notify(peers, rank, ready + stage, call)
        while tile < tiles:
            expert, before = group_of(tile // columns, through)
            count = pick(new, expert, GROUPS)
            row, column = tile_at(tile - before * columns, count, columns, GROUP)
            top = (pick(done, expert, GROUPS) + row) * BLOCK_M
            at = top + tl.arange(0, BLOCK_M)
            step, place, rows = find_rows(at, first + expert, by_step, usable, steps)
            source = ahead_of(rank, WORLD - 1 - step, WORLD, NODE)
            pair = tl.where(at < rows, source * pairs + place, 0).to(tl.int64)
            multiply_and_finish(
                x + pair * K, 0, rows - top, column,
                w + tl.cast(expert, tl.int64) * K * N, None, None, (N,),
                x_scale + pair if SCALE_ROWS else x_scale,
                None if w_scale is None else w_scale + expert * scale_stride,
                None, None, products + pair * N, K, FORM,
            )  # fmt: skip
            if count_off(finished, rank, stage, tiles):
                notify(peers, rank, ready + stage, call)
            tile += tl.num_programs(0)
        tile -= tiles
        done = begun


@triton.jit(do_not_specialize=["rank", "m"])
def add_and_send(
    products,  # [W * pairs, N]
    plans,  # int32 [W, length]
    places,  # int32 [W, pairs]
    peers,  # buffers [2, W, m, N]; signals int64 [tiles, W], and `ready` [W]
    rank,
    ready,  # the first signal; there are W
    m,  # tokens on a rank
    N,
    experts,  # E
    top_k,
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    NODE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Add each token's products and send the sums to its owner. Grid: (programs,), persistent."""
    call = tl.load(peers.calls)
    pairs = m * top_k
    tiles = tl.cdiv(m, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    waited = 0
    for work in range(tl.program_id(0), WORLD * tiles, tl.num_programs(0)):
        stage, tile = work // tiles, work % tiles
        owner = ahead_of(rank, WORLD - 1 - stage, WORLD, NODE)
        while waited <= stage:  # earlier stages, too: their tiles may have this stage's rows
            wait(peers, rank, ready + waited, call)
            waited += 1
        row, column = tile_at(tile, tl.cdiv(m, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
        row, column = row * BLOCK_M, column * BLOCK_N
        at_m, at_n = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
        weights = plans + owner * (experts + 1 + 2 * pairs) + experts + 1 + pairs
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for choice in range(top_k):
            pair = at_m * top_k + choice
            place = tl.load(places + owner * pairs + pair, mask=at_m < m, other=-1)
            there = place >= 0
            bits = tl.load(weights + pair, mask=there, other=0)
            rows = products + (owner * pairs + place).to(tl.int64) * N
            inside = there[:, None] & (at_n < N)[None, :]
            product = tl.load(rows[:, None] + at_n[None, :], mask=inside, other=0.0)
            total += bits.to(tl.float32, bitcast=True)[:, None] * product.to(tl.float32)
        place = tile_offsets(call, rank, row, column, m, N, peers.slot_numel, BLOCK_M, BLOCK_N)
        to = peer_pointer(peers.buffers, owner, dtype) + place
        tl.store(to, total.to(dtype), mask=(at_m < m)[:, None] & (at_n < N)[None, :])
        notify(peers, owner, tile * WORLD + rank, call)


class ReduceGroupsWorkspace(PlannedWorkspace):
    """A workspace for grouped_matmul_reduce_scatter.

    Attributes:
        products: [W * max_rows * top_k * n]; symmetric only for checks; peers do
            not use it.
        finished: int32 [W]; finished tiles in each stage. Symmetric for the same reason.
        tile: rows and columns sent at a time.
        ready: number of the first signal for this rank's own stages.
    """

    def __init__(
        self,
        home: Home,
        max_rows: int,
        n: int,
        experts: int,
        top_k: int,
        dtype: torch.dtype,
        block_m: int,
        block_n: int,
    ) -> None:
        size, name = home.world_size, "grouped_matmul_reduce_scatter"
        asked = {"max_rows": max_rows, "n": n, "dtype": dtype, "experts": experts}
        asked |= {"top_k": top_k, "block_m": block_m, "block_n": block_n}
        with agreed(name, asked, home.exchange) as check:
            require_dtype(check, dtype)
            require_counts(check, 0, max_rows=max_rows, n=n)
            require_counts(check, 1, experts=experts, top_k=top_k)
            for side, value in (("block_m", block_m), ("block_n", block_n)):
                whole = isinstance(value, int) and value >= 16 and value & (value - 1) == 0
                check(side, value, whole, "be a power of two of at least 16")
        self.experts, self.top_k, self.tile = experts, top_k, (block_m, block_n)
        rows = size * max_rows
        self.products: SymmetricTensor = home.empty(f"{name}.products", (rows * top_k, n), dtype)
        self.finished: SymmetricTensor = home.zeros(f"{name}.finished", (size,), torch.int32)
        self.ready = size * -(-max_rows // block_m) * -(-n // block_n)
        super().__init__(home, name, rows * n, dtype, self.ready + size)
        self.status = torch.zeros(1, dtype=torch.int32, device=home.device)
        self.choice = Choice(home, name)


def grouped_matmul_reduce_scatter_workspace(
    home: Home,
    max_rows: int,
    n: int,
    experts: int,
    top_k: int,
    dtype: torch.dtype,
    block_m: int = BLOCK_M,
    block_n: int = BLOCK_N,
) -> ReduceGroupsWorkspace:
    """Make a workspace for results of at most `max_rows` (M / W) rows and `n` columns. Collective.

    Args:
        home: this rank's home.
        max_rows: M / W.
        n: N.
        experts: E.
        top_k: number of experts for each token.
        dtype: dtype in which products are kept and sums are sent.
        block_m, block_n: rows and columns sent at a time.

    Raises:
        KernelError: on every rank, if any rank refuses an argument, or if the arguments differ.
    """
    return ReduceGroupsWorkspace(home, max_rows, n, experts, top_k, dtype, block_m, block_n)


def grouped_matmul_reduce_scatter(
    x: Tensor,
    w: Tensor,
    plans: Tensor,
    workspace: ReduceGroupsWorkspace,
    *,
    epilogue: Epilogue = NOTHING,
    own: range | None = None,
    ranks_per_node: int = 0,
    blocks: tuple[int, int, int] | None = None,
    warps: int = 0,
    stages: int = 0,
    programs: int = 0,
    senders: int = 0,
) -> Tensor:
    """Add up each own token's expert products, weighted, over all ranks. Collective.

    Args:
        x: [W * P, K / W], contiguous, with P = M / W * top_k; the same row count on all ranks. Part
            r has rank r's pairs in plan order.
        w: [E, K / W, N] with x's dtype, contiguous or the transpose (`mT`) of a contiguous tensor.
            Only `own` experts have one.
        plans: int32 [W, E + 1 + 2 P]: all ranks' plans, from all_gather_grouped_matmul; the same on
            all ranks.
        workspace: from `grouped_matmul_reduce_scatter_workspace`.
        epilogue: its scales apply to this rank's products, with one w_scale entry per expert; the
            residual has this rank's rows of the sum. If out_dtype is None, the result has the
            workspace's dtype.
        own: numbers of the experts in w, on this rank; all if None. Other rows of x are not read.
        ranks_per_node: number of consecutive ranks with fast links; all if 0.
        blocks: BLOCK_M, BLOCK_N, BLOCK_K of a tile. If None, the tuned values for this device,
            world size, shape and dtype; if there are none, the cost model's choice (tuning/).
        warps, stages: compile options of the product; if 0, chosen like blocks.
        programs: number of programs in the product; if 0, all processors that do not send.
        senders: number of programs that add and send; if 0, chosen like blocks, or SENDERS.

    Returns:
        [M / W, N].

    Raises:
        KernelError: on one rank the operands do not fit together or do not fit the workspace; or
            the ranks differ in the operands' shapes or in an option. Errors in a plan are raised
            later, by `workspace.check`.
    """
    size, require = workspace.world_size, workspace.require
    asked: dict[str, object] = {"blocks": blocks, "warps": warps, "stages": stages}
    asked |= {"ranks_per_node": ranks_per_node, "programs": programs, "senders": senders}
    with workspace.agreed("grouped_matmul_reduce_scatter", asked):
        experts, top_k, device = workspace.experts, workspace.top_k, workspace.device
        own = require_own(require, own, experts)
        weights = Weights.of(w, x, require, limit=1, groups=len(own))
        asked |= result_shape(x, weights)
        require("x's device", x.device, x.device == device, f"be {device}, the workspace's")
        (rows, k), n = x.shape, weights.widths[0]
        whole = rows % (size * top_k) == 0
        require("x's rows", rows, whole, f"be {top_k} for each token of {size} ranks")
        pairs, m = rows // size, rows // size // top_k
        choices = expected_choices(top_k, experts, len(own))
        if blocks is None and (
            config := workspace.choice.of_product(
                x, weights, size * m * choices, False, len(own), choices
            )
        ):
            blocks = (config.block_m, config.block_n, config.block_k)
            warps, stages = warps or config.warps, stages or config.stages
            senders = senders or config.senders
        high = -(-rows // experts)
        tiling = choose_tiling(high, x, weights, blocks, warps, stages, require, apart=True)
        epilogue.check(require, x, weights.widths, m, len(own))
        without = epilogue.bias is None and not epilogue.silu_multiply
        require("epilogue", "one with a bias or SiLU", without, "have scales and a residual only")
        node = ranks_per_node or size
        fits = node > 0 and size % node == 0
        require("ranks_per_node", ranks_per_node, fits, f"divide the {size} ranks")
        require("senders", senders, senders >= 0, f"be positive, or 0 for {SENDERS}")
        senders = senders or SENDERS
        if workspace.concurrent:  # the product needs at least as many processors
            senders = min(senders, max(1, workspace.processors // 2))
        available = max(1, workspace.processors - senders)
        why = "sending programs need processors"
        workspace.require_programs(programs, available, why)
        plans_shape = [size, plan_length(experts, pairs)]
        require_tensor(require, "plans", plans, plans_shape, device, torch.int32)
        workspace.require_room("the result", size * m * n)
        sent_m, sent_n = workspace.tile
        tiles = -(-m // sent_m) * -(-n // sent_n)
        most = workspace.ready // size
        require(
            "tiles of the result",
            tiles,
            tiles <= most,
            f"be at most {most}: make the workspace larger",
        )
    dtype = epilogue.out_dtype or workspace.dtype
    out = x.new_empty(m, n, dtype=dtype)
    if not out.numel():
        return out
    places = x.new_full((size, pairs), -1, dtype=torch.int32)
    form = form_of(tiling, weights, epilogue, m, k)
    workspace.begin()
    peers, rank, wire = workspace.peers(), workspace.rank, triton_type(workspace.dtype)
    find_pairs[(-(-pairs // BLOCK), size)](
        plans=plans,
        places=places,
        status=workspace.status,
        experts=experts,
        first=own.start,
        groups=len(own),
        pairs=pairs,
        GROUPS=padded(len(own)),
        BLOCK=BLOCK,
    )
    with workspace.beside():
        upper = (rows // tiling.block_m + len(own)) * -(-n // tiling.block_n)
        multiply_pairs[(min(upper, programs or available),)](
            x=x,
            w=weights.tensors[0],
            x_scale=epilogue.x_scale,
            w_scale=epilogue.w_scale,
            scale_stride=epilogue.scale_stride(),
            plans=plans,
            products=workspace.products.local,
            finished=workspace.finished.addresses,
            peers=peers,
            rank=rank,
            ready=workspace.ready,
            N=n,
            K=k,
            experts=experts,
            first=own.start,
            groups=len(own),
            pairs=pairs,
            RANKS=Ranks(size, node, triton.next_power_of_2(size)),
            GROUPS=padded(len(own)),
            FORM=form._replace(even_m=False),
            num_warps=tiling.warps,
            num_stages=tiling.stages,
        )
    add_and_send[(min(senders, size * tiles),)](
        products=workspace.products.local,
        plans=plans,
        places=places,
        peers=peers,
        rank=rank,
        ready=workspace.ready,
        m=m,
        N=n,
        experts=experts,
        top_k=top_k,
        dtype=wire,
        WORLD=size,
        NODE=node,
        BLOCK_M=sent_m,
        BLOCK_N=sent_n,
        GROUP=GROUP,
        num_warps=8,
    )
    workspace.rejoin()
    reduce_partials[(workspace.resident(tiles),)](
        bias=epilogue.bias,
        residual=epilogue.residual,
        out=out,
        peers=peers,
        rank=rank,
        m=m,
        N=n,
        dtype=wire,
        WORLD=size,
        FORM=for_sum(form)._replace(
            block_m=sent_m, block_n=sent_n, even_m=m % sent_m == 0, even_n=n % sent_n == 0
        ),
        num_warps=8,
    )
    return out
