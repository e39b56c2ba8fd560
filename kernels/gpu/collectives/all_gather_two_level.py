"""All-gather for several nodes: method two_level of all_gather.py.

A shard crosses to each other node once. Rank l of a node sends its own shard to rank l of every
node (`push_across`) and sets signal [c, r] there. It then passes on its own shard and every shard
it receives to the other ranks of its node (`fan_out`) and sets their signal passed [c, r].

For a rank without an address here (beyond NVLink), it puts chunk c from row r of its own slot.
NVSHMEM then sets signal [c, a] of that rank's `across`, where a is r's node. Row r is overwritten
two calls later, and each call begins with a `quiet`. The receiver of chunk c sets its own signal
[c, r] for `collect_chunks`, in place of rank r. With such ranks two_level is the only method.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.collectives.chunks import BLOCK, copy_chunk
from weft.kernels.gpu.collectives.collective import RESIDENT_BLOCK, RESIDENT_WARPS, count_chunks
from weft.kernels.gpu.runtime import nvshmem
from weft.kernels.gpu.runtime.signals import notify, peer_pointer, slot_of
from weft.kernels.gpu.runtime.workspace import triton_type

if TYPE_CHECKING:
    from weft.kernels.gpu.collectives.all_gather import AllGatherWorkspace


@triton.jit(do_not_specialize=["rank"])
def push_across(
    x,  # [numel]; this rank's shard
    # buffers [2, W, numel], 0 for ranks beyond NVLink
    peers,  # signals int64 [chunks, W]
    across,  # int64 [W]; addresses of int64 [chunks, W / NODE]
    rank,
    numel,
    chunk,
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    NODE: tl.constexpr,  # ranks per node
    FAR: tl.constexpr,  # some ranks have no address
    BLOCK: tl.constexpr,
):
    """Copy one chunk to the same rank of every node and notify it. Grid: (chunks,).

    The chunk is first copied to the own slot, the source of the puts.
    """
    index = tl.program_id(0)
    call = tl.load(peers.calls)
    row = slot_of(call) * peers.slot_numel + rank * numel
    own = peer_pointer(peers.buffers, rank, dtype) + row
    copy_chunk(own, x, index, numel, chunk, BLOCK)
    notify(peers, rank, index * WORLD + rank, call)
    nodes: tl.constexpr = WORLD // NODE
    for distance in range(1, nodes):
        peer = (rank + distance * NODE) % WORLD
        address = tl.load(peers.buffers + peer)
        if FAR:
            begin = index * chunk
            count = (tl.minimum(begin + chunk, numel) - begin).to(tl.int64)
            nbytes = count * (dtype.primitive_bitwidth // 8)
            source = (own + begin).to(tl.int64)
            signal = tl.load(across + rank) + 8 * (index * nodes + rank // NODE)
            if address == 0:
                nvshmem.put_signal(source, source, nbytes, signal, call.to(tl.int64), peer)
        if address != 0:
            to = peer_pointer(peers.buffers, peer, dtype) + row
            copy_chunk(to, x, index, numel, chunk, BLOCK)
            notify(peers, peer, index * WORLD + rank, call)


@triton.jit(do_not_specialize=["rank"])
def fan_out(
    # buffers [2, W, numel], 0 for ranks beyond NVLink
    peers,  # signals int64 [chunks, W], and as many again from `passed` on
    across,  # int64 [W]; addresses of int64 [chunks, W / NODE]
    rank,
    numel,
    chunk,
    passed,  # the first signal for chunks that are passed on
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    NODE: tl.constexpr,  # ranks per node
    FAR: tl.constexpr,  # some ranks have no address
    BLOCK: tl.constexpr,
):
    """Pass chunks on to the other ranks of the node. Grid: (programs,), persistent.

    It also notifies this rank itself about chunks that arrived by a put.
    """
    call = tl.load(peers.calls)
    nodes: tl.constexpr = WORLD // NODE
    first: tl.constexpr = 0 if FAR else 1  # first step from this rank to others of its node
    steps: tl.constexpr = NODE - first
    for item in range(tl.program_id(0), nodes * steps * tl.cdiv(numel, chunk), tl.num_programs(0)):
        distance = item // steps % nodes  # in nodes; chunks arrive in this order
        source = (rank + WORLD - distance * NODE) % WORLD
        peer = rank // NODE * NODE + (rank + first + item % steps) % NODE
        index = item // (nodes * steps)
        if (peer != rank) | (tl.load(peers.buffers + source) == 0):
            at, at_across = index * WORLD + source, index * nodes + source // NODE
            nvshmem.wait_across(
                peers.buffers, source, peers, at, across, at_across, rank, call, FAR
            )
            row = slot_of(call) * peers.slot_numel + source * numel
            shard = peer_pointer(peers.buffers, rank, dtype) + row
            if peer != rank:
                to = peer_pointer(peers.buffers, peer, dtype) + row
                copy_chunk(to, shard, index, numel, chunk, BLOCK)
            notify(peers, peer, at + tl.where(peer == rank, 0, passed), call)


def send_two_level(x: Tensor, workspace: AllGatherWorkspace) -> None:
    """Launch all kernels of a call with method two_level except the copy out of the buffer."""
    numel, chunk, size = x.numel(), workspace.chunk, workspace.world_size
    chunks, peers, across = (
        count_chunks(numel, chunk),
        workspace.peers(),
        workspace.across.addresses,
    )
    node, far = workspace.ranks_per_node, workspace.far
    if far:
        nvshmem.quiet[(1,)](num_warps=1, extern_libs=workspace.extern_libs)
    push_across[(chunks,)](
        x=x,
        peers=peers,
        across=across,
        rank=workspace.rank,
        numel=numel,
        chunk=chunk,
        dtype=triton_type(x.dtype),
        WORLD=size,
        NODE=node,
        FAR=far,
        BLOCK=BLOCK,
        extern_libs=workspace.extern_libs,
    )
    if steps := size if far else size // node * (node - 1):
        fan_out[(workspace.resident(steps * chunks),)](
            peers=peers,
            across=across,
            rank=workspace.rank,
            numel=numel,
            chunk=chunk,
            passed=workspace.passed,
            dtype=triton_type(x.dtype),
            WORLD=size,
            NODE=node,
            FAR=far,
            BLOCK=RESIDENT_BLOCK,
            num_warps=RESIDENT_WARPS,
            extern_libs=workspace.extern_libs,
        )
