"""Stores that carry their own signal: data and the call's number in one unit.

For small messages a signal costs more than the data, because it may leave only after the data
has arrived. NCCL's low-latency protocols avoid it. Each unit that the hardware stores at once
holds data and a flag, the number of the call. The receiver polls the data itself: a unit with
the right flag is complete.

    LL     units of 8 bytes: 4 of data, 4 of flag. Any memory that stores 8 aligned bytes at once.
    LL128  units of 128 bytes: 120 of data, 8 of flag. NVLink, and only where the 8 threads that
           store 16 bytes each of a line are neighbours in one warp.

Assumptions, and who guarantees them (PTX ISA, memory consistency model):

- A volatile load is relaxed at system scope. PTX guarantees that it is not torn, up to its
  largest scalar of 8 bytes. A vector counts as several scalars, loaded in no particular order.
  So each word of LL, one int64, is complete. PTX does not guarantee this for a line of LL128.
- A store from Triton is only weak. `.wt` does not change that, because PTX defines cache
  operators as hints. For PTX, a weak store that another GPU polls is a race: it need not be seen
  before the launch ends, and it may be torn. NCCL uses `st.volatile` (relaxed at system scope),
  for which Triton would need inline assembly.
- The rest is the observed behaviour of compilers and GPUs. The compiler emits a store of 8
  aligned bytes (16, as a vector) as one instruction, before the polls that follow it. The GPU
  writes it through its first-level cache to the GPU that owns the memory, in one piece of up to
  16 bytes. LL needs 8 bytes in one piece. NCCL relies on this too, since PTX treats its v4.u32 as
  four stores. LL128 needs the 128 bytes that a warp stores at once to arrive in one piece. NCCL
  assumes this on NVLink only.

Flags order nothing else within a launch: a receiver with the flag knows nothing about the
sender's other stores. Between launches there is an order, because the end of a launch and the
start of the next are fences. Everything a rank did in launches before its store comes before
everything the receiver does in launches after its load. The reuse of slots relies on this.

A slot must contain zeros before its first call. Flags left over from two calls ago never equal
the present flag. LL's flag has 32 bits: it is never 0, and a slot sees the same flag again after
2 (2^32 - 1) calls.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.gpu.runtime.signals import polls_left, report

WORDS = tl.constexpr(16)
"""Words of 8 bytes in a line of LL128; the last is the flag."""

LL_BLOCK, LL128_LINES = 512, 32
"""Words of 4 bytes (LL) and lines of 120 bytes (LL128) that a program moves at a time."""


@triton.jit
def flag_of(call):
    """Return a call's flag in LL, int32: never 0."""
    return ((tl.cast(call, tl.int64) - 1) % 4294967295 + 1).to(tl.int32)


@triton.jit
def put_ll(to, words, call, mask):
    """Store 4-byte words at a peer, each with its flag.

    Like NCCL's LL primitive `storeLL`, or OpenSHMEM's put_signal of 4 bytes with an adjacent
    signal: neither is seen without the other, under the assumptions at the top of this file.

    Args:
        to: int64 pointers, of any shape.
        words: int32, of the same shape.
        call: number of the call.
        mask: which words to store.
    """
    flagged = (flag_of(call).to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)
    tl.store(to, flagged, mask=mask, cache_modifier=".wt")


@triton.jit
def get_ll(at, call, mask, peers, rank, index):
    """Wait for all words of a `put_ll`, and return them.

    Like NCCL's `readLL`. It does not make the sender's other stores visible.

    Args:
        at: int64 pointers [n], to this rank's own memory.
        call: number of the call.
        mask: which words to wait for; the others are 0.
        peers: Peers.
        rank, index: this rank, and the first word's number, to report a timeout.

    Returns:
        int32 [n].
    """
    flag = flag_of(call)
    flagged = tl.load(at, mask=mask, other=0, volatile=True)
    missing = tl.max((((flagged >> 32).to(tl.int32) != flag) & mask).to(tl.int32), axis=0)
    if missing > 0:
        left = polls_left(peers)
        while (missing > 0) & (left > 0):
            flagged = tl.load(at, mask=mask, other=0, volatile=True)
            missing = tl.max((((flagged >> 32).to(tl.int32) != flag) & mask).to(tl.int32), axis=0)
            left -= 1
    if missing > 0:
        seen = tl.min(tl.where(mask, (flagged >> 32).to(tl.int32), flag), axis=0)
        report(peers, rank, index, flag, seen)
    return flagged.to(tl.int32)


@triton.jit
def put_ll128(to, words, call, mask):
    """Store lines of 15 words of 8 bytes at a peer, each with its flag.

    Like NCCL's LL128 `store128`: one instruction of one warp stores a line.

    Args:
        to: int64 pointer; to a multiple of 128 bytes.
        words: int64 [lines, 16]; the last column is ignored.
        call: number of the call; the flag.
        mask: bool [lines]; which lines to store.
    """
    column = tl.arange(0, WORDS)[None, :]
    line = tl.arange(0, words.shape[0])[:, None]
    flagged = tl.where(column == WORDS - 1, tl.cast(call, tl.int64), words)
    tl.store(
        to + line * WORDS + column,
        flagged,
        mask=mask[:, None] & (column < WORDS),
        cache_modifier=".wt",
    )


@triton.jit
def get_ll128(at, call, mask, peers, rank, index):
    """Wait for all lines of a `put_ll128`, and return them.

    Args:
        at: int64 pointer, to this rank's own memory; to a multiple of 128 bytes.
        call: number of the call.
        mask: bool [lines]; which lines to wait for.
        peers: Peers.
        rank, index: this rank, and the first line's number, to report a timeout.

    Returns:
        int64 [lines, 16]; the last column is undefined.
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
        flags = tl.where(is_flag, flagged, call)
        report(peers, rank, index, call, tl.min(tl.min(flags, axis=1), axis=0))
    return flagged


@triton.jit
def load_words(x, at, numel, WIDE: tl.constexpr):
    """Load words of 4 bytes from an array with elements of 4 or 2 bytes.

    Args:
        x: int32 [numel] if WIDE, else int16 [numel].
        at: int32 [n]; numbers of the words. Words beyond the array are 0.
        numel: elements in the array.

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
    """Store what `load_words` loads.

    Args:
        out: int32 [numel] if WIDE, else int16 [numel].
        at: int32 [n]; numbers of the words. Words beyond the array are skipped.
        words: int32 [n].
        numel: elements in the array.
    """
    if WIDE:
        tl.store(out + at, words, mask=at < numel)
    else:
        halves = 2 * at[:, None] + tl.arange(0, 2)[None, :]
        parts = tl.join((words & 0xFFFF).to(tl.int16), (words >> 16).to(tl.int16))
        tl.store(out + halves, parts, mask=halves < numel)
