"""Stores that carry their own signal: data and the call's number in one.

For small messages the signal costs more than the data: it may leave only after
the data has arrived. NCCL's low-latency protocols do without. Each unit that
the hardware stores at once holds data and a flag, the number of the call; the
receiver polls the data itself, and a unit whose flag is right is whole.

    LL     units of 8 bytes: 4 of data, 4 of flag. Any memory that stores 8 aligned bytes at once.
    LL128  units of 128 bytes: 120 of data, 8 of flag. NVLink, and only where the 8 threads that
           store 16 bytes each of a line are neighbours in one warp.

Stores write through (.wt) and loads are volatile, which PTX treats as relaxed
at system scope: neither is torn below 8 bytes, left out, or served from a
cache. They order nothing else in their own launch. Between launches they do:
the end of a launch and the beginning of the next are fences, so that what a
rank did in the launches before its store comes before what the receiver does
in the launches after its load. On that rests the reuse of slots.

A slot must hold zeros before its first call; flags that are left from two calls
ago are never the present one's.
"""

from __future__ import annotations

import triton
import triton.language as tl

WORDS = tl.constexpr(16)
"""Of 8 bytes in a line of LL128; the last is the flag."""


@triton.jit
def put_ll(to, words, call, mask):
    """Store 4-byte words at a peer, each with its flag.

    As NCCL's LL primitive `storeLL`, or OpenSHMEM's put_signal of 4 bytes whose signal is beside
    them: neither can be seen without the other.

    Args:
        to: int64 pointers, of any shape.
        words: int32, likewise.
        call: int32, the flag; another one than the slot held before.
        mask: which of them.
    """
    flagged = (call.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)
    tl.store(to, flagged, mask=mask, cache_modifier=".wt")


@triton.jit
def get_ll(at, call, mask, fault, rank, index, MAX_POLLS: tl.constexpr):
    """Wait for words of `put_ll`, all of them, and take them.

    As NCCL's `readLL`. What the sender stored elsewhere is not seen by virtue of this.

    Args:
        at: int64 pointers [n], to this rank's own memory.
        call: int32, the flag to wait for.
        mask: which of them; the others are 0.
        fault: int32 [4], of this rank.
        rank, index: this one, and the first word's number; to report when it runs out.
        MAX_POLLS: to give up after.

    Returns:
        int32 [n].
    """
    flagged = tl.load(at, mask=mask, other=0, volatile=True)
    missing = tl.max((((flagged >> 32).to(tl.int32) != call) & mask).to(tl.int32), axis=0)
    polls = 0
    while (missing > 0) & (polls < MAX_POLLS):
        flagged = tl.load(at, mask=mask, other=0, volatile=True)
        missing = tl.max((((flagged >> 32).to(tl.int32) != call) & mask).to(tl.int32), axis=0)
        polls += 1
    if missing > 0:
        seen = tl.min(tl.where(mask, (flagged >> 32).to(tl.int32), call), axis=0)
        _report(fault, rank, index, call, seen)
    return flagged.to(tl.int32)


@triton.jit
def put_ll128(to, words, call, mask):
    """Store lines of 15 words of 8 bytes at a peer, each with its flag.

    As NCCL's LL128 `store128`: a line is stored by one instruction of one warp.

    Args:
        to: int64 pointer; to a multiple of 128 bytes.
        words: int64 [lines, 16]; the last column is not looked at.
        call: int32, the flag; another one than the slot held before.
        mask: bool [lines]; which of them.
    """
    column = tl.arange(0, WORDS)[None, :]
    line = tl.arange(0, words.shape[0])[:, None]
    flagged = tl.where(column == WORDS - 1, call.to(tl.int64), words)
    tl.store(
        to + line * WORDS + column,
        flagged,
        mask=mask[:, None] & (column < WORDS),
        cache_modifier=".wt",
    )


@triton.jit
def get_ll128(at, call, mask, fault, rank, index, MAX_POLLS: tl.constexpr):
    """Wait for lines of `put_ll128`, all of them, and take them.

    Args:
        at: int64 pointer, to this rank's own memory; to a multiple of 128 bytes.
        call: int32, the flag to wait for.
        mask: bool [lines]; which of them.
        fault: int32 [4], of this rank.
        rank, index: this one, and the first line's number; to report when it runs out.
        MAX_POLLS: to give up after.

    Returns:
        int64 [lines, 16], of whose last column nothing is said.
    """
    column = tl.arange(0, WORDS)[None, :]
    places = at + tl.arange(0, mask.shape[0])[:, None] * WORDS + column
    inside = mask[:, None] & (column < WORDS)
    is_flag = inside & (column == WORDS - 1)
    flagged = tl.load(places, mask=inside, other=0, volatile=True)
    missing = tl.max(tl.max((is_flag & (flagged != call)).to(tl.int32), axis=1), axis=0)
    polls = 0
    while (missing > 0) & (polls < MAX_POLLS):
        flagged = tl.load(places, mask=inside, other=0, volatile=True)
        missing = tl.max(tl.max((is_flag & (flagged != call)).to(tl.int32), axis=1), axis=0)
        polls += 1
    if missing > 0:
        flags = tl.where(is_flag, flagged.to(tl.int32), call)
        _report(fault, rank, index, call, tl.min(tl.min(flags, axis=1), axis=0))
    return flagged


@triton.jit
def load_words(x, at, numel, WIDE: tl.constexpr):
    """Words of 4 bytes of an array whose elements have 4 bytes, or 2.

    Args:
        x: int32 [numel] if WIDE, else int16 [numel].
        at: int32 [n]; which words. What lies beyond the array is 0.
        numel: elements.

    Returns:
        int32 [n].
    """
    if WIDE:
        words = tl.load(x + at, mask=at < numel, other=0)
    else:
        halves = 2 * at[:, None] + tl.arange(0, 2)[None, :]
        low, high = tl.split(tl.load(x + halves, mask=halves < numel, other=0))
        words = (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    return words


@triton.jit
def store_words(out, at, words, numel, WIDE: tl.constexpr):
    """What `load_words` loads.

    Args:
        out: int32 [numel] if WIDE, else int16 [numel].
        at: int32 [n]; which words. What lies beyond the array is left out.
        words: int32 [n].
        numel: elements.
    """
    if WIDE:
        tl.store(out + at, words, mask=at < numel)
    else:
        halves = 2 * at[:, None] + tl.arange(0, 2)[None, :]
        parts = tl.join((words & 0xFFFF).to(tl.int16), (words >> 16).to(tl.int16))
        tl.store(out + halves, parts, mask=halves < numel)


@triton.jit
def _report(fault, rank, index, wanted, seen):
    tl.store(fault, rank)
    tl.store(fault + 1, index)
    tl.store(fault + 2, wanted)
    tl.store(fault + 3, seen)
