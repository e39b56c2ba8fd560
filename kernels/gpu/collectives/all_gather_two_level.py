"""All-gather for several nodes: method two_level of all_gather.py.

A shard crosses to each other node once: rank l of a node sends its own to the
ranks l of all nodes (`push_across`), which sets their signals [c, r], and passes
on what it gets, and its own, to the other ranks of its node (`fan_out`), which
sets their signals passed [c, r].

To a rank that it has no address of (beyond NVLink) it sends chunk c by a put from
row r of its own slot, which NVSHMEM follows with signal [c, a] of that rank's
`across`, where a is r's node. Row r is stored to again two calls later, and each
call begins with a `quiet`. Who gets chunk c sets its own signal [c, r], for
`collect_chunks`, in r's stead: there, two_level is the only method.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.collectives.chunks import BLOCK, copy_chunk
from weft.kernels.gpu.collectives.collective import RESIDENT_BLOCK, RESIDENT_WARPS, count_chunks
from weft.kernels.gpu.runtime import nvshmem
from weft.kernels.gpu.runtime.signals import notify, peer_pointer
from weft.kernels.gpu.runtime.workspace import triton_type

if TYPE_CHECKING:
    from weft.kernels.gpu.collectives.all_gather import AllGatherWorkspace


@triton.jit(do_not_specialize=["rank"])
def push_across(
    x,  # [numel]; this rank's shard
    # buffers [2, W, numel], 0 for ranks that NVLink does not reach
    peers,  # signals int32 [chunks, W]
    across,  # int64 [W]; addresses of int64 [chunks, W / NODE]
    rank,
    numel,
    chunk,
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    NODE: tl.constexpr,  # ranks of a node
    FAR: tl.constexpr,  # there are ranks without an address
    BLOCK: tl.constexpr,
):
    """Copy one chunk to the same rank of all nodes and tell them. Grid: (chunks,).

    To the own slot first: puts send from there.
    """
    index = tl.program_id(0)
    call = tl.load(peers.calls)
    row = (call % 2) * peers.slot_numel + rank * numel
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
    # buffers [2, W, numel], 0 for ranks that NVLink does not reach
    peers,  # signals int32 [chunks, W], and from `passed` on of as many again
    across,  # int64 [W]; addresses of int64 [chunks, W / NODE]
    rank,
    numel,
    chunk,
    passed,  # the first of the signals of what is passed on
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    NODE: tl.constexpr,  # ranks of a node
    FAR: tl.constexpr,  # there are ranks without an address
    BLOCK: tl.constexpr,
):
    """Pass chunks on to the other ranks of the node. Grid: (programs,), persistent.

    And tell this rank itself of what came by a put.
    """
    call = tl.load(peers.calls)
    nodes: tl.constexpr = WORLD // NODE
    first: tl.constexpr = 0 if FAR else 1  # of the steps from this rank to the others of its node
    steps: tl.constexpr = NODE - first
    for item in range(tl.program_id(0), nodes * steps * tl.cdiv(numel, chunk), tl.num_programs(0)):
        distance = item // steps % nodes  # in nodes; they come in this order
        source = (rank + WORLD - distance * NODE) % WORLD
        peer = rank // NODE * NODE + (rank + first + item % steps) % NODE
        index = item // (nodes * steps)
        if (peer != rank) | (tl.load(peers.buffers + source) == 0):
            at, at_across = index * WORLD + source, index * nodes + source // NODE
            nvshmem.wait_across(
                peers.buffers, source, peers, at, across, at_across, rank, call, FAR
            )
            row = (call % 2) * peers.slot_numel + source * numel
            shard = peer_pointer(peers.buffers, rank, dtype) + row
            if peer != rank:
                to = peer_pointer(peers.buffers, peer, dtype) + row
                copy_chunk(to, shard, index, numel, chunk, BLOCK)
            notify(peers, peer, at + tl.where(peer == rank, 0, passed), call)


def send_two_level(x: Tensor, workspace: AllGatherWorkspace) -> None:
    """Launch all of a call of method two_level but what copies out of the buffer."""
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
