"""Stores that carry their own signal: data and the call's number in one.

For small messages the signal costs more than the data: it may leave only after
the data has arrived. NCCL's low-latency protocols do without. Each unit that
the hardware stores at once holds data and a flag, the number of the call; the
receiver polls the data itself, and a unit whose flag is right is whole.

    LL     units of 8 bytes: 4 of data, 4 of flag. Any memory that stores 8 aligned bytes at once.
    LL128  units of 128 bytes: 120 of data, 8 of flag. NVLink, and only where the 8 threads that
           store 16 bytes each of a line are neighbours in one warp.

What is relied on, and who promises it (PTX ISA, memory consistency model):

- A volatile load is relaxed at system scope. PTX promises that it is not torn, up
  to its largest scalar, 8 bytes; a vector counts as so many scalars, loaded in no
  given order. So each word of LL, one int64, is whole. That a line of LL128 is
  loaded whole, PTX does not promise.
- A store of Triton can be no more than weak. `.wt` does not change that: cache
  operators are hints, by PTX's own words. A weak store that another GPU polls for
  is a race to PTX, which promises nothing about it: not that it is seen before the
  launch has ended, and not that it is whole. NCCL stores as `st.volatile`, that is
  relaxed at system scope, which Triton cannot say without inline assembly.
- So the rest is what compilers and GPUs do. The compiler leaves a store of aligned
  8 bytes (16, as a vector) one instruction, before the polls that follow it. The
  GPU writes it through its first-level cache, to where another GPU's memory is
  cached, which is that GPU; and in one piece of up to 16 bytes. LL wants 8 of them
  whole: NCCL rests on that, too, for PTX says of its v4.u32, again, that it is four
  stores. LL128 wants the 128 bytes that a warp stores at once to arrive in one
  piece, as NCCL does, which takes it for granted on NVLink alone.

Nothing else is ordered by them in their own launch: a receiver that has the flag
knows nothing of what the sender stored elsewhere. Between launches it is: the end
of a launch and the beginning of the next are fences, so that what a rank did in
the launches before its store comes before what the receiver does in the launches
after its load. On that rests the reuse of slots.

A slot must hold zeros before its first call; flags that are left from two calls
ago are never the present one's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.gpu.runtime.signals import polls_left, report

WORDS = tl.constexpr(16)
"""Of 8 bytes in a line of LL128; the last is the flag."""

LL_BLOCK, LL128_LINES = 512, 32
"""Words of 4 bytes, and lines of 120, that a program of LL and LL128 moves at a time."""


@triton.jit
def put_ll(to, words, call, mask):
    """Store 4-byte words at a peer, each with its flag.

    As NCCL's LL primitive `storeLL`, or OpenSHMEM's put_signal of 4 bytes whose signal is beside
    them: neither is seen without the other, where the top of this file says that it holds.

    Args:
        to: int64 pointers, of any shape.
        words: int32, likewise.
        call: int32, the flag; another one than the slot held before.
        mask: which of them.
    """
    flagged = (call.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)
    tl.store(to, flagged, mask=mask, cache_modifier=".wt")


@triton.jit
def get_ll(at, call, mask, peers, rank, index):
    """Wait for words of `put_ll`, all of them, and take them.

    As NCCL's `readLL`. What the sender stored elsewhere is not seen by virtue of this.

    Args:
        at: int64 pointers [n], to this rank's own memory.
        call: int32, the flag to wait for.
        mask: which of them; the others are 0.
        peers: of this rank.
        rank, index: this one, and the first word's number; to report when it runs out.

    Returns:
        int32 [n].
    """
    flagged = tl.load(at, mask=mask, other=0, volatile=True)
    missing = tl.max((((flagged >> 32).to(tl.int32) != call) & mask).to(tl.int32), axis=0)
    if missing > 0:
        left = polls_left(peers)
        while (missing > 0) & (left > 0):
            flagged = tl.load(at, mask=mask, other=0, volatile=True)
            missing = tl.max((((flagged >> 32).to(tl.int32) != call) & mask).to(tl.int32), axis=0)
            left -= 1
    if missing > 0:
        seen = tl.min(tl.where(mask, (flagged >> 32).to(tl.int32), call), axis=0)
        report(peers, rank, index, call, seen)
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
def get_ll128(at, call, mask, peers, rank, index):
    """Wait for lines of `put_ll128`, all of them, and take them.

    Args:
        at: int64 pointer, to this rank's own memory; to a multiple of 128 bytes.
        call: int32, the flag to wait for.
        mask: bool [lines]; which of them.
        peers: of this rank.
        rank, index: this one, and the first line's number; to report when it runs out.

    Returns:
        int64 [lines, 16], of whose last column nothing is said.
    """
    column = tl.arange(0, WORDS)[None, :]
    places = at + tl.arange(0, mask.shape[0])[:, None] * WORDS + column
    inside = mask[:, None] & (column < WORDS)
    is_flag = inside & (column == WORDS - 1)
    flagged = tl.load(places, mask=inside, other=0, volatile=True)
    missing = tl.max(tl.max((is_flag & (flagged != call)).to(tl.int32), axis=1), axis=0)
    if missing > 0:
        left = polls_left(peers)
        while (missing > 0) & (left > 0):
            flagged = tl.load(places, mask=inside, other=0, volatile=True)
            missing = tl.max(tl.max((is_flag & (flagged != call)).to(tl.int32), axis=1), axis=0)
            left -= 1
    if missing > 0:
        flags = tl.where(is_flag, flagged.to(tl.int32), call)
        report(peers, rank, index, call, tl.min(tl.min(flags, axis=1), axis=0))
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
