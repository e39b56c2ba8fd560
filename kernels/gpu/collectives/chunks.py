"""Building blocks of the collectives: rows of numbers, processed one chunk at a time.

A row is cut into chunks, and each chunk has its own signal. A rank that waits for a row can start
with its first chunk while the others are still on their way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.gpu.runtime.signals import notify, peer_pointer, slot_of

CHUNK = 1 << 14
"""Numbers per signal."""

BLOCK = 1024
"""Numbers that a program moves at a time."""


@triton.jit
def copy_chunk(to, x, index, numel, chunk, BLOCK: tl.constexpr):
    """Copy one chunk of x [numel] to `to` [numel]."""
    begin = index * chunk
    end = tl.minimum(begin + chunk, numel)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(to + at, tl.load(x + at, mask=at < end), mask=at < end)


@triton.jit(do_not_specialize=["rank"])
def push_chunks(
    x,  # [total]; rank p gets numel numbers from p * stride on, or fewer where x ends
    peers,  # buffers [2, W, numel]; signals int64 [chunks, W]
    rank,
    numel,
    chunk,  # numbers in a chunk
    stride,  # 0 if all ranks get the same numbers
    total,
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy one chunk to this rank's row on one rank, and notify it. Grid: (chunks * W,).

    This rank itself comes last. At no step do all ranks send to the same one.
    """
    peer = (rank + 1 + tl.program_id(0)) % WORLD
    index = tl.program_id(0) // WORLD
    call = tl.load(peers.calls)
    to = peer_pointer(peers.buffers, peer, dtype) + slot_of(call) * peers.slot_numel + rank * numel
    length = tl.minimum(numel, total - peer * stride)
    copy_chunk(to, x + peer * stride, index, length, chunk, BLOCK)
    notify(peers, peer, index * WORLD + rank, call)


@triton.jit
def sum_rows(
    rows,  # [COUNT, numel]
    at,  # [BLOCK]
    numel,
    end,  # of the numbers wanted in a row
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the rows in their order: float32 [BLOCK]."""
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(COUNT):
        total += tl.load(rows + row * numel + at, mask=at < end, other=0.0).to(tl.float32)
    return total


@triton.jit
def add_chunk(
    out,  # [length]
    rows,  # [COUNT, numel]
    index,  # number of the chunk
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
