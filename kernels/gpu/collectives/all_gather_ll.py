"""All-gather by stores that carry their own flag: methods ll and ll128 of all_gather.py.

Like push, but data carries its own flag (low_latency.py): one launch, no signals. Item (b, d) is
block b for rank r + d, and block b from rank r - d. A program first sends all its items, then
waits for the same items, which the program with the same number sends on the other ranks. So there
is no cycle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.runtime.low_latency import (
    LL128_LINES,
    LL_BLOCK,
    get_ll,
    get_ll128,
    load_words,
    put_ll,
    put_ll128,
    store_words,
)
from weft.kernels.gpu.runtime.signals import peer_pointer, slot_of

if TYPE_CHECKING:
    from weft.kernels.gpu.collectives.all_gather import AllGatherWorkspace


@triton.jit(do_not_specialize=["rank"])
def gather_ll(
    x,  # int32 or int16 [numel]; this rank's shard
    out,  # the same [W, numel]
    peers,  # buffers int64 [2, W, words]
    rank,
    numel,
    words,  # 4-byte words in a shard
    WORLD: tl.constexpr,
    WIDE: tl.constexpr,  # elements of 4 bytes
    BLOCK: tl.constexpr,
):
    """Send blocks to all ranks, then receive theirs. Grid: (programs,), persistent."""
    call = tl.load(peers.calls)
    slot = slot_of(call) * peers.slot_numel
    items = WORLD * tl.cdiv(words, BLOCK)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        peer = (rank + item) % WORLD
        at = item // WORLD * BLOCK + tl.arange(0, BLOCK)
        to = peer_pointer(peers.buffers, peer, tl.int64) + slot + rank * words
        put_ll(to + at, load_words(x, at, numel, WIDE), call, at < words)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        source = (rank + WORLD - item % WORLD) % WORLD
        first = item // WORLD * BLOCK
        at = first + tl.arange(0, BLOCK)
        come = peer_pointer(peers.buffers, rank, tl.int64) + slot + source * words
        got = get_ll(come + at, call, at < words, peers, rank, source * words + first)
        store_words(out + source * numel, at, got, numel, WIDE)


@triton.jit(do_not_specialize=["rank"])
def gather_ll128(
    x,  # int64 [words]; this rank's shard
    out,  # int64 [W, words]
    peers,  # buffers int64 [2, W, lines, 16]
    rank,
    words,  # 8-byte words in a shard
    lines,  # lines of 15 words in a shard
    WORLD: tl.constexpr,
    LINES: tl.constexpr,
):
    """Send lines to all ranks, then receive theirs. Grid: (programs,), persistent."""
    call = tl.load(peers.calls)
    column = tl.arange(0, 16)[None, :]
    slot = slot_of(call) * (peers.slot_numel // 16)  # in lines
    items = WORLD * tl.cdiv(lines, LINES)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        peer = (rank + item) % WORLD
        first = item // WORLD * LINES
        line = first + tl.arange(0, LINES)
        at = line[:, None] * 15 + column
        inside = (column < 15) & (at < words)
        to = peer_pointer(peers.buffers, peer, tl.int64) + (slot + rank * lines + first) * 16
        put_ll128(to, tl.load(x + at, mask=inside, other=0), call, line < lines)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        source = (rank + WORLD - item % WORLD) % WORLD
        first = item // WORLD * LINES
        line = first + tl.arange(0, LINES)
        at = line[:, None] * 15 + column
        come = peer_pointer(peers.buffers, rank, tl.int64) + (slot + source * lines + first) * 16
        got = get_ll128(come, call, line < lines, peers, rank, source * lines + first)
        tl.store(out + source * words + at, got, mask=(column < 15) & (at < words))


def run_ll(x: Tensor, out: Tensor, workspace: AllGatherWorkspace) -> None:
    """Run one call with method ll."""
    size, bits = workspace.world_size, torch.int32 if x.itemsize == 4 else torch.int16
    words = -(-x.nbytes // 4)
    workspace.begin()
    gather_ll[(workspace.resident(size * -(-words // LL_BLOCK)),)](
        x=x.view(bits),
        out=out.view(bits),
        peers=workspace.peers(workspace.ll),
        rank=workspace.rank,
        numel=x.numel(),
        words=words,
        WORLD=size,
        WIDE=x.itemsize == 4,
        BLOCK=LL_BLOCK,
    )


def run_ll128(x: Tensor, out: Tensor, workspace: AllGatherWorkspace) -> None:
    """Run one call with method ll128."""
    size, words = workspace.world_size, x.nbytes // 8
    lines = -(-words // 15)
    workspace.begin()
    gather_ll128[(workspace.resident(size * -(-lines // LL128_LINES)),)](
        x=x.view(-1).view(torch.int64),
        out=out.view(-1).view(torch.int64),
        peers=workspace.peers(workspace.ll128),
        rank=workspace.rank,
        words=words,
        lines=lines,
        WORLD=size,
        LINES=LL128_LINES,
    )
