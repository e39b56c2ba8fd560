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

from weft.kernels.gpu.collectives.chunks import copy_chunk
from weft.kernels.gpu.collectives.collective import waiting
from weft.kernels.gpu.runtime import nvshmem
from weft.kernels.gpu.runtime.signals import notify, peer_pointer

if TYPE_CHECKING:
    from weft.kernels.gpu.collectives.all_gather import AllGatherWorkspace


@triton.jit(do_not_specialize=["rank"])
def push_across(
    x,  # [numel]; this rank's shard
    buffers,  # int64 [W]; addresses of [2, W, numel], 0 for ranks that NVLink does not reach
    signals,  # int64 [W]; addresses of int32 [chunks, W]
    across,  # int64 [W]; addresses of int64 [chunks, W / NODE]
    calls,  # int32 [1]
    rank,
    numel,
    slot_numel,
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
    call = tl.load(calls)
    row = (call % 2) * slot_numel + rank * numel
    own = peer_pointer(buffers, rank, dtype) + row
    copy_chunk(own, x, index, numel, chunk, BLOCK)
    notify(signals, rank, index * WORLD + rank, call)
    nodes: tl.constexpr = WORLD // NODE
    for distance in range(1, nodes):
        peer = (rank + distance * NODE) % WORLD
        address = tl.load(buffers + peer)
        if FAR:
            begin = index * chunk
            count = (tl.minimum(begin + chunk, numel) - begin).to(tl.int64)
            nbytes = count * (dtype.primitive_bitwidth // 8)
            source = (own + begin).to(tl.int64)
            signal = tl.load(across + rank) + 8 * (index * nodes + rank // NODE)
            if address == 0:
                nvshmem.put_signal(source, source, nbytes, signal, call.to(tl.int64), peer)
        if address != 0:
            copy_chunk(peer_pointer(buffers, peer, dtype) + row, x, index, numel, chunk, BLOCK)
            notify(signals, peer, index * WORLD + rank, call)


@triton.jit(do_not_specialize=["rank"])
def fan_out(
    buffers,  # int64 [W]; addresses of [2, W, numel], 0 for ranks that NVLink does not reach
    signals,  # int64 [W]; addresses of int32 [chunks, W], and from `passed` on of as many again
    across,  # int64 [W]; addresses of int64 [chunks, W / NODE]
    calls,  # int32 [1]
    fault,  # int32 [4]
    rank,
    numel,
    slot_numel,
    chunk,
    passed,  # the first of the signals of what is passed on
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    NODE: tl.constexpr,  # ranks of a node
    FAR: tl.constexpr,  # there are ranks without an address
    BLOCK: tl.constexpr,
    max_polls,
):
    """Pass chunks on to the other ranks of the node. Grid: (programs,), persistent.

    And tell this rank itself of what came by a put.
    """
    call = tl.load(calls)
    nodes: tl.constexpr = WORLD // NODE
    first: tl.constexpr = 0 if FAR else 1  # of the steps from this rank to the others of its node
    steps: tl.constexpr = NODE - first
    for item in range(tl.program_id(0), nodes * steps * tl.cdiv(numel, chunk), tl.num_programs(0)):
        distance = item // steps % nodes  # in nodes; they come in this order
        source = (rank + WORLD - distance * NODE) % WORLD
        peer = rank // NODE * NODE + (rank + first + item % steps) % NODE
        index = item // (nodes * steps)
        if (peer != rank) | (tl.load(buffers + source) == 0):
            at, at_across = index * WORLD + source, index * nodes + source // NODE
            nvshmem.wait_across(
                buffers, source, signals, at, across, at_across, rank, call, fault, FAR, max_polls
            )
            row = (call % 2) * slot_numel + source * numel
            shard = peer_pointer(buffers, rank, dtype) + row
            if peer != rank:
                to = peer_pointer(buffers, peer, dtype) + row
                copy_chunk(to, shard, index, numel, chunk, BLOCK)
            notify(signals, peer, at + tl.where(peer == rank, 0, passed), call)


def send_two_level(x: Tensor, workspace: AllGatherWorkspace) -> None:
    """Launch all of a call of method two_level but what copies out of the buffer."""
    chunks, (buffers, signals, calls), sizes, constants = workspace.chunked(x.numel())
    tables = (buffers, signals, workspace.across.addresses, calls)
    node, far = workspace.ranks_per_node, workspace.far
    constants |= {"NODE": node, "FAR": far, **workspace.link}
    if far:
        nvshmem.quiet[(1,)](num_warps=1, **workspace.link)
    push_across[(chunks,)](x, *tables, *sizes, **constants)
    if steps := workspace.world_size if far else workspace.world_size // node * (node - 1):
        fan_out[(workspace.resident(steps * chunks),)](
            *(*tables, workspace.fault, *sizes, workspace.passed),
            **{**constants, **waiting(workspace)},
        )
