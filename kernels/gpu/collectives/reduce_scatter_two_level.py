"""Reduce-scatter for several nodes: method two_level of reduce_scatter.py.

Each number crosses to each other node once. On node a, rank l collects its node's data for rank l
of every node: rank (a, k) stores its part for (b, l) to row b * NODE + k of (a, l)'s slot
(`scatter_local`) and sets (a, l)'s signal scattered [c, row]. `reduce_local` adds the NODE partial
sums for node b in the order of the ranks. It stores the sum to row a of the second buffer of
(b, l) and sets its second signal [c, a]. `reduce_nodes` adds these sums in the order of the nodes.
Numbers that cross are rounded to x's dtype.

For a rank without an address here (beyond NVLink), `reduce_local` stores the sum to row b of its
own `sent` and puts it from there. NVSHMEM then sets signal [c, a] of that rank's `across`. `sent`
has one slot, so a `quiet` precedes the `reduce_local` of each call.

The three steps run at the same time, node by node, the next node first and the own node last. The
scatter has its own stream; the additions follow on the caller's stream, chunk by chunk as signals
arrive. Neither waits for data that crosses, because the network carries it. Programs of
`reduce_local` wait for this rank's scatter and must leave it room: there is at most one for each
processor but one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.collectives.chunks import BLOCK, add_chunk, copy_chunk
from weft.kernels.gpu.collectives.collective import RESIDENT_BLOCK, RESIDENT_WARPS, count_chunks
from weft.kernels.gpu.runtime import nvshmem
from weft.kernels.gpu.runtime.peers import Slots
from weft.kernels.gpu.runtime.signals import notify, peer_pointer, slot_of, wait_all
from weft.kernels.gpu.runtime.workspace import triton_type

if TYPE_CHECKING:
    from weft.kernels.gpu.collectives.reduce_scatter import ReduceScatterWorkspace


@triton.jit(do_not_specialize=["rank"])
def scatter_local(
    x,  # [W, numel]
    peers,  # buffers [2, W, numel]; signals int64 [scattered + chunks * W]
    rank,
    numel,
    chunk,
    scattered,  # the first signal
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    NODE: tl.constexpr,  # ranks per node
    BLOCK: tl.constexpr,
):
    """Copy one chunk of a part to the rank of this node that sends it on. Grid: (chunks * W,).

    All chunks for the next node come first, then those for the node after it, the own node last.
    """
    chunks = tl.cdiv(numel, chunk)
    node, local = rank // NODE, rank % NODE
    to_node = (node + 1 + tl.program_id(0) // (NODE * chunks)) % (WORLD // NODE)
    to_local = (local + 1 + tl.program_id(0) % NODE) % NODE
    peer = node * NODE + to_local
    row = to_node * NODE + local
    index = tl.program_id(0) // NODE % chunks
    call = tl.load(peers.calls)
    to = peer_pointer(peers.buffers, peer, dtype) + slot_of(call) * peers.slot_numel + row * numel
    copy_chunk(to, x + (to_node * NODE + to_local) * numel, index, numel, chunk, BLOCK)
    notify(peers, peer, scattered + index * WORLD + row, call)


@triton.jit(do_not_specialize=["rank"])
def reduce_local(
    peers,  # buffers [2, W, numel]; signals int64 [first + chunks * W / NODE]
    sums,  # Slots [2, W / NODE, numel]; addresses are 0 for ranks beyond NVLink
    sent,  # [W / NODE, numel]; symmetric, this rank's; source of the puts
    across,  # int64 [W]; addresses of int64 [chunks, W / NODE]
    rank,
    numel,
    chunk,
    scattered,  # the first signal to wait for
    first,  # the first signal to set
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    NODE: tl.constexpr,
    FAR: tl.constexpr,  # some ranks have no address
    BLOCK: tl.constexpr,
):
    """Add chunks, send each to its node and notify it. Grid: (programs,), persistent.

    It follows the order of `scatter_local`.
    """
    chunks = tl.cdiv(numel, chunk)
    nodes: tl.constexpr = WORLD // NODE
    node = rank // NODE
    call = tl.load(peers.calls)
    row_of_sums = slot_of(call) * sums.numel + node * numel
    for item in range(tl.program_id(0), nodes * chunks, tl.num_programs(0)):
        to_node = (node + 1 + item // chunks) % nodes
        peer = to_node * NODE + rank % NODE
        index = item % chunks
        wait_all(peers, rank, scattered + index * WORLD + to_node * NODE, call, NODE)
        rows = peer_pointer(peers.buffers, rank, dtype) + slot_of(call) * peers.slot_numel
        rows += to_node * NODE * numel
        address = tl.load(sums.addresses + peer)
        to = peer_pointer(sums.addresses, peer, dtype) + row_of_sums
        if FAR:
            staged = sent + to_node * numel
            if address == 0:
                to = staged
        add_chunk(to, rows, index, numel, numel, chunk, dtype, NODE, BLOCK)
        if FAR:
            size: tl.constexpr = dtype.primitive_bitwidth // 8
            begin = index * chunk
            nbytes = (tl.minimum(begin + chunk, numel) - begin).to(tl.int64) * size
            row = tl.load(sums.addresses + rank) + (row_of_sums + begin).to(tl.int64) * size
            source = (to + begin).to(tl.int64)
            signal = tl.load(across + rank) + 8 * (index * nodes + node)
            if address == 0:
                nvshmem.put_signal(row, source, nbytes, signal, call.to(tl.int64), peer)
        if address != 0:
            notify(peers, peer, first + index * nodes + node, call)


@triton.jit(do_not_specialize=["rank"])
def reduce_nodes(
    out,  # [numel]
    # buffers [2, W / NODE, numel], of sums, 0 for ranks beyond NVLink
    peers,  # signals int64 [first + chunks * W / NODE]
    across,  # int64 [W]; addresses of int64 [chunks, W / NODE]
    rank,
    numel,
    chunk,
    first,  # the first signal
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    NODE: tl.constexpr,
    FAR: tl.constexpr,  # some ranks have no address
    BLOCK: tl.constexpr,
):
    """Wait for chunks of all nodes' sums and add them. Grid: (programs,), persistent."""
    nodes: tl.constexpr = WORLD // NODE
    call = tl.load(peers.calls)
    rows = peer_pointer(peers.buffers, rank, dtype) + slot_of(call) * peers.slot_numel
    for index in range(tl.program_id(0), tl.cdiv(numel, chunk), tl.num_programs(0)):
        for node in range(nodes):
            sender, at = node * NODE + rank % NODE, index * nodes + node
            nvshmem.wait_across(
                peers.buffers, sender, peers, first + at, across, at, rank, call, FAR
            )
        add_chunk(out, rows, index, numel, numel, chunk, dtype, nodes, BLOCK)


def run_two_level(x: Tensor, out: Tensor, workspace: ReduceScatterWorkspace) -> None:
    """Run one call with method two_level."""
    size, node, far = workspace.world_size, workspace.ranks_per_node, workspace.far
    numel, chunk, rank = out.numel(), workspace.chunk, workspace.rank
    chunks, across = count_chunks(numel, chunk), workspace.across.addresses
    block = RESIDENT_BLOCK // 2  # several rows are in registers
    workspace.begin()
    with workspace.beside():
        scatter_local[(size * chunks,)](
            x=x,
            peers=workspace.peers(),
            rank=rank,
            numel=numel,
            chunk=chunk,
            scattered=workspace.scattered,
            dtype=triton_type(x.dtype),
            WORLD=size,
            NODE=node,
            BLOCK=BLOCK,
        )
    if far:
        nvshmem.quiet[(1,)](num_warps=1, extern_libs=workspace.extern_libs)
    reduce_local[(min(size // node * chunks, max(1, workspace.processors - 1)),)](
        peers=workspace.peers(),
        sums=Slots.of(workspace.sums),
        sent=workspace.sent.local,
        across=across,
        rank=rank,
        numel=numel,
        chunk=chunk,
        scattered=workspace.scattered,
        first=workspace.second,
        dtype=triton_type(x.dtype),
        WORLD=size,
        NODE=node,
        FAR=far,
        BLOCK=block,
        num_warps=RESIDENT_WARPS,
        extern_libs=workspace.extern_libs,
    )
    workspace.rejoin()
    reduce_nodes[(workspace.resident(chunks),)](
        out=out,
        peers=workspace.peers(workspace.sums),
        across=across,
        rank=rank,
        numel=numel,
        chunk=chunk,
        first=workspace.second,
        dtype=triton_type(x.dtype),
        WORLD=size,
        NODE=node,
        FAR=far,
        BLOCK=block,
        num_warps=RESIDENT_WARPS,
        extern_libs=workspace.extern_libs,
    )
