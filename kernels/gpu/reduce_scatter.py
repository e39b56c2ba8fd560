"""Reduce-scatter: each rank's rows of the sum over all ranks.

    reduce_scatter(x [M, ...]) -> [M / W, ...]

Part p of x, of numel numbers, is for rank p. Slot n mod 2 of each rank's buffer
is [W, numel]: a part from every rank. A part is cut into chunks; signal [c, r]
of a rank is set to n when chunk c of its part from rank r is in row r. A signal
must have one rank that sets it, whatever the method (all_gather.py), so two_level
has signals of its own. Numbers travel in the dtype of x, as NCCL's do, are added
in float32, in the order of the ranks, and rounded once: a sum has the same bits
in every run.

Protocols, of call n:

- push. Program (d, c) of rank r copies chunk c of part r + 1 + d to row r of that
  rank's slot, its own part last, and then sets its signal. Program c of
  `reduce_chunks` waits for chunk c from every rank and adds.
- two_level, for several nodes. Each number crosses to each other node once. On
  node a, rank l gathers what its node has for the ranks l of all nodes: rank
  (a, k) stores its part for (b, l) to row b * NODE + k of (a, l)'s slot
  (`scatter_local`), and sets (a, l)'s signal scattered [c, that row].
  `reduce_local` adds the NODE partial sums for node b in the order of the ranks,
  and stores the sum to row a of the second buffer of (b, l), whose second signals
  [c, a] say so. `reduce_nodes` adds those, in the order of the nodes. What
  crosses is rounded to x's dtype.
  To a rank that it has no address of (beyond NVLink), `reduce_local` stores the
  sum to row b of its own `sent`, and puts it from there, followed by signal
  [c, a] of that rank's `across`. `sent` has one slot: a `quiet` stands before the
  `reduce_local` of each call.

  The three steps run at once, node by node, the next one first and the own one
  last: the scatter on a stream of its own, the additions on the caller's, chunk
  by chunk as signals come; and neither waits for what crosses, which is the
  network's to carry. Programs of `reduce_local` wait for the scatter of this rank
  and must leave it room: there is at most one for each processor but one.

Every rank hears from every other one, be it through a third, so two slots are
enough: gpu/workspace.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu import nvshmem
from weft.kernels.gpu.all_gather import BLOCK, CHUNK, copy_chunk
from weft.kernels.gpu.collective import RESIDENT_BLOCK, CollectiveWorkspace, count_chunks, waiting
from weft.kernels.gpu.signals import notify, peer_pointer, wait
from weft.kernels.gpu.workspace import SLOTS, triton_type
from weft.kernels.symmetric.memory import Home, SymmetricTensor


@triton.jit(do_not_specialize=["rank"])
def push_parts(
    x,  # [total]; parts of numel numbers, the last ones shorter or empty if W * numel > total
    buffers,  # int64 [W]; addresses of [2, W, numel]
    signals,  # int64 [W]; addresses of int32 [chunks, W]
    calls,  # int32 [1]
    rank,
    total,
    numel,  # of a part
    slot_numel,  # of a slot of the buffer
    chunk,  # numbers of a chunk
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy one chunk of a part to its rank and tell it. Grid: (chunks * W,)."""
    peer = (rank + 1 + tl.program_id(0)) % WORLD
    index = tl.program_id(0) // WORLD
    call = tl.load(calls)
    to = peer_pointer(buffers, peer, dtype) + (call % 2) * slot_numel + rank * numel
    length = tl.minimum(numel, total - peer * numel)
    copy_chunk(to, x + peer * numel, index, length, chunk, BLOCK)
    notify(signals, peer, index * WORLD + rank, call)


@triton.jit
def sum_rows(
    rows,  # [COUNT, numel]
    at,  # [BLOCK]
    numel,
    end,  # of what is wanted of a row
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of the rows in their order: float32 [BLOCK]."""
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(COUNT):
        total += tl.load(rows + row * numel + at, mask=at < end, other=0.0).to(tl.float32)
    return total


@triton.jit
def add_chunk(
    out,  # [length]
    rows,  # [COUNT, numel]
    index,  # of the chunk
    length,  # of the sum; at most numel
    numel,
    chunk,
    dtype: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add one chunk of the rows, in their order."""
    begin = index * chunk
    end = tl.minimum(begin + chunk, length)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total = sum_rows(rows, at, numel, end, COUNT, BLOCK)
        tl.store(out + at, total.to(dtype), mask=at < end)


@triton.jit(do_not_specialize=["rank"])
def reduce_chunks(
    out,  # [length]
    buffers,  # int64 [W]; addresses of [2, COUNT, numel]
    signals,  # int64 [W]; addresses of int32 [first + chunks * COUNT]
    calls,  # int32 [1]
    fault,  # int32 [4]
    rank,
    length,  # of the sum; at most numel
    numel,
    slot_numel,
    chunk,
    first,  # of the signals
    dtype: tl.constexpr,
    COUNT: tl.constexpr,  # rows
    BLOCK: tl.constexpr,
    max_polls,
):
    """Wait for chunks of all rows and add them. Grid: (programs,), persistent."""
    call = tl.load(calls)
    rows = peer_pointer(buffers, rank, dtype) + (call % 2) * slot_numel
    for index in range(tl.program_id(0), tl.cdiv(length, chunk), tl.num_programs(0)):
        for row in range(COUNT):
            wait(signals, rank, first + index * COUNT + row, call, fault, max_polls)
        add_chunk(out, rows, index, length, numel, chunk, dtype, COUNT, BLOCK)


@triton.jit(do_not_specialize=["rank"])
def scatter_local(
    x,  # [W, numel]
    buffers,  # int64 [W]; addresses of [2, W, numel]
    signals,  # int64 [W]; addresses of int32 [scattered + chunks * W]
    calls,  # int32 [1]
    rank,
    numel,
    slot_numel,
    chunk,
    scattered,  # the first of the signals
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    NODE: tl.constexpr,  # ranks of a node
    BLOCK: tl.constexpr,
):
    """Copy one chunk of a part to the rank of this node that sends it on. Grid: (chunks * W,).

    Chunk by chunk for the next node, then for the one after it, for the own one last.
    """
    chunks = tl.cdiv(numel, chunk)
    node, local = rank // NODE, rank % NODE
    to_node = (node + 1 + tl.program_id(0) // (NODE * chunks)) % (WORLD // NODE)
    to_local = (local + 1 + tl.program_id(0) % NODE) % NODE
    peer = node * NODE + to_local
    row = to_node * NODE + local
    index = tl.program_id(0) // NODE % chunks
    call = tl.load(calls)
    to = peer_pointer(buffers, peer, dtype) + (call % 2) * slot_numel + row * numel
    copy_chunk(to, x + (to_node * NODE + to_local) * numel, index, numel, chunk, BLOCK)
    notify(signals, peer, scattered + index * WORLD + row, call)


@triton.jit(do_not_specialize=["rank"])
def reduce_local(
    buffers,  # int64 [W]; addresses of [2, W, numel]
    sums,  # int64 [W]; addresses of [2, W / NODE, numel], 0 for ranks that NVLink does not reach
    sent,  # [W / NODE, numel]; symmetric, this rank's; what is put
    signals,  # int64 [W]; addresses of int32 [first + chunks * W / NODE]
    across,  # int64 [W]; addresses of int64 [chunks, W / NODE]
    calls,  # int32 [1]
    fault,  # int32 [4]
    rank,
    numel,
    slot_numel,
    sums_slot_numel,
    chunk,
    scattered,  # the first of the signals that are waited for
    first,  # of those that are set
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    NODE: tl.constexpr,
    FAR: tl.constexpr,  # there are ranks without an address
    BLOCK: tl.constexpr,
    max_polls,
):
    """Add chunks, send each to its node and tell. Grid: (programs,), persistent.

    In the order of `scatter_local`.
    """
    chunks = tl.cdiv(numel, chunk)
    nodes: tl.constexpr = WORLD // NODE
    node = rank // NODE
    call = tl.load(calls)
    row_of_sums = (call % 2) * sums_slot_numel + node * numel
    for item in range(tl.program_id(0), nodes * chunks, tl.num_programs(0)):
        to_node = (node + 1 + item // chunks) % nodes
        peer = to_node * NODE + rank % NODE
        index = item % chunks
        for local in range(NODE):
            row = to_node * NODE + local
            wait(signals, rank, scattered + index * WORLD + row, call, fault, max_polls)
        rows = peer_pointer(buffers, rank, dtype) + (call % 2) * slot_numel
        rows += to_node * NODE * numel
        address = tl.load(sums + peer)
        to = peer_pointer(sums, peer, dtype) + row_of_sums
        if FAR:
            staged = sent + to_node * numel
            if address == 0:
                to = staged
        add_chunk(to, rows, index, numel, numel, chunk, dtype, NODE, BLOCK)
        if FAR:
            size: tl.constexpr = dtype.primitive_bitwidth // 8
            begin = index * chunk
            nbytes = (tl.minimum(begin + chunk, numel) - begin).to(tl.int64) * size
            row = tl.load(sums + rank) + (row_of_sums + begin).to(tl.int64) * size
            source = (to + begin).to(tl.int64)
            signal = tl.load(across + rank) + 8 * (index * nodes + node)
            if address == 0:
                nvshmem.put_signal(row, source, nbytes, signal, call.to(tl.int64), peer)
        if address != 0:
            notify(signals, peer, first + index * nodes + node, call)


@triton.jit(do_not_specialize=["rank"])
def reduce_nodes(
    out,  # [numel]
    sums,  # int64 [W]; addresses of [2, W / NODE, numel], 0 for ranks that NVLink does not reach
    signals,  # int64 [W]; addresses of int32 [first + chunks * W / NODE]
    across,  # int64 [W]; addresses of int64 [chunks, W / NODE]
    calls,  # int32 [1]
    fault,  # int32 [4]
    rank,
    numel,
    sums_slot_numel,
    chunk,
    first,  # of the signals
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    NODE: tl.constexpr,
    FAR: tl.constexpr,  # there are ranks without an address
    BLOCK: tl.constexpr,
    max_polls,
):
    """Wait for chunks of all nodes' sums and add them. Grid: (programs,), persistent."""
    nodes: tl.constexpr = WORLD // NODE
    call = tl.load(calls)
    rows = peer_pointer(sums, rank, dtype) + (call % 2) * sums_slot_numel
    for index in range(tl.program_id(0), tl.cdiv(numel, chunk), tl.num_programs(0)):
        for node in range(nodes):
            sender, at = node * NODE + rank % NODE, index * nodes + node
            nvshmem.wait_across(
                sums, sender, signals, first + at, across, at, rank, call, fault, FAR, max_polls
            )
        add_chunk(out, rows, index, numel, numel, chunk, dtype, nodes, BLOCK)


class ReduceScatterWorkspace(CollectiveWorkspace):
    """Of `reduce_scatter`, on one rank; see `reduce_scatter_workspace`."""

    def __init__(
        self,
        home: Home,
        max_numel: int,
        dtype: torch.dtype,
        methods: Sequence[str],
        chunk: int,
        ranks_per_node: int | None,
    ) -> None:
        size, chunks = home.world_size, count_chunks(max_numel, chunk)
        nodes = size // ranks_per_node if ranks_per_node and ranks_per_node > 0 else 1
        of_two_level = (size + nodes) * chunks if "two_level" in methods else 0
        super().__init__(
            *(home, "reduce_scatter", size * max_numel, dtype),
            num_signals=size * chunks + of_two_level,
            max_numel=max_numel,
            methods=methods,
            known=METHODS,
            chunk=chunk,
            ranks_per_node=ranks_per_node,
        )
        self.scattered = size * chunks  # the first of the signals of `scatter_local`
        self.second = 2 * size * chunks  # the first of the second signals
        self.sums_numel = nodes * max_numel if "two_level" in methods else 0
        self.sums: SymmetricTensor = home.empty(
            "reduce_scatter.sums", (SLOTS, self.sums_numel), dtype
        )
        puts = nodes * chunks if self.far else 0
        self.across = home.zeros("reduce_scatter.across", (puts,), torch.int64)
        self.sent = home.empty("reduce_scatter.sent", (self.sums_numel if self.far else 0,), dtype)


def reduce_scatter_workspace(
    home: Home,
    max_numel: int,
    dtype: torch.dtype,
    methods: Sequence[str] = ("push",),
    *,
    chunk: int = CHUNK,
    ranks_per_node: int | None = None,
) -> ReduceScatterWorkspace:
    """A workspace for results of at most `max_numel` numbers a rank. Collective.

    Args:
        home: of this rank.
        max_numel: of a rank's result.
        dtype: float32, float16 or bfloat16.
        methods: that it will be used with, of METHODS.
        chunk: numbers that have a signal of their own; a multiple of 8.
        ranks_per_node: for two_level: ranks 0 to ranks_per_node - 1 are on one node, and so on.
            All ranks are on one node if None. Ranks without an address must be of other nodes,
            and two_level the only method.

    Raises:
        KernelError: on every rank, if on one of them there is no such method, or a node's ranks
            do not divide the world's; or if the ranks' arguments differ.
    """
    return ReduceScatterWorkspace(home, max_numel, dtype, methods, chunk, ranks_per_node)


def reduce_scatter(
    x: Tensor, workspace: ReduceScatterWorkspace, *, method: str | None = None
) -> Tensor:
    """This rank's rows of the sum over all ranks. Collective.

    Args:
        x: [M, ...], contiguous, the workspace's dtype; of the same shape on all ranks; M a
            multiple of W.
        workspace: from `reduce_scatter_workspace`.
        method: of those that the workspace was made for; the same on all ranks. If None, what was
            tuned for this device, world size, shape and dtype, else what the cost model prefers.

    Returns:
        [M / W, ...], added in float32.

    Raises:
        KernelError: the shape does not go with the ranks, the workspace or the method, on one
            rank; or it is not the same on all of them.
    """
    size, shape = workspace.world_size, tuple(x.shape)
    if method is None:
        method = workspace.choose_method(x, len(x) if x.dim() else 1)
    with workspace.agreed({"method": repr(method), "x's shape": shape}):
        workspace.require_method(method)
        workspace.require_tensor("x", x)
        workspace.require("x's shape", shape, x.dim() > 0, "have at least one axis")
        workspace.require("x's rows", len(x), len(x) % size == 0, f"be a multiple of {size} ranks")
        workspace.require_room("x", x.numel())
    out = x.new_empty(len(x) // size, *x.shape[1:])
    if out.numel():
        METHODS[method](x, out, workspace)
    return out


def add_rows(out: Tensor, workspace: CollectiveWorkspace) -> None:
    """Launch the sum of the rows of all ranks, of as many numbers as `out` has."""
    numel, chunk = out.numel(), workspace.chunk
    # Of one rank there is nothing to add, and where so much is copied at once registers spill.
    block = RESIDENT_BLOCK if workspace.world_size > 1 else RESIDENT_BLOCK // 2
    constants = {"dtype": triton_type(out.dtype), "COUNT": workspace.world_size}
    reduce_chunks[(workspace.resident(-(-numel // chunk)),)](
        *(out, workspace.buffer.addresses, workspace.signals.addresses, workspace.calls),
        *(workspace.fault, workspace.rank, numel, numel, workspace.numel, chunk, 0),
        **{**constants, **waiting(workspace), "BLOCK": block},
    )


def _push(x: Tensor, out: Tensor, workspace: ReduceScatterWorkspace) -> None:
    size, numel, chunk = workspace.world_size, out.numel(), workspace.chunk
    chunks = -(-numel // chunk)
    tables = (workspace.buffer.addresses, workspace.signals.addresses, workspace.calls)
    constants = {"dtype": triton_type(x.dtype), "BLOCK": BLOCK}
    workspace.begin()
    push_parts[(size * chunks,)](
        *(x, *tables, workspace.rank, x.numel(), numel, workspace.numel, chunk),
        **{**constants, "WORLD": size},
    )
    add_rows(out, workspace)


def _two_level(x: Tensor, out: Tensor, workspace: ReduceScatterWorkspace) -> None:
    size, numel, chunk = workspace.world_size, out.numel(), workspace.chunk
    node, rank, fault = workspace.ranks_per_node, workspace.rank, workspace.fault
    nodes, chunks = size // node, -(-numel // chunk)
    buffers, sums = workspace.buffer.addresses, workspace.sums.addresses
    signals, calls = workspace.signals.addresses, workspace.calls
    across, far = workspace.across.addresses, workspace.far
    constants = {"dtype": triton_type(x.dtype), "WORLD": size, "NODE": node, "BLOCK": BLOCK}
    waits = {**constants, "FAR": far, **waiting(workspace), **workspace.link}
    waits["BLOCK"] = RESIDENT_BLOCK // 2  # of which several rows are in registers
    workspace.begin()
    with workspace.beside():
        scatter_local[(size * chunks,)](
            *(x, buffers, signals, calls, rank, numel, workspace.numel, chunk),
            workspace.scattered,
            **constants,
        )
    if far:
        nvshmem.quiet[(1,)](num_warps=1, **workspace.link)
    reduce_local[(min(nodes * chunks, max(1, workspace.processors - 1)),)](
        *(buffers, sums, workspace.sent.local, signals, across, calls, fault, rank, numel),
        *(workspace.numel, workspace.sums_numel, chunk, workspace.scattered, workspace.second),
        **waits,
    )
    workspace.rejoin()
    reduce_nodes[(workspace.resident(chunks),)](
        *(out, sums, signals, across, calls, fault, rank, numel),
        *(workspace.sums_numel, chunk, workspace.second),
        **waits,
    )


METHODS: dict[str, Callable[[Tensor, Tensor, ReduceScatterWorkspace], None]] = {
    "push": _push,
    "two_level": _two_level,
}
