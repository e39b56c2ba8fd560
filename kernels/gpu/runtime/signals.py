"""Signals between ranks in stock Triton: the vocabulary of all overlapped kernels.

A signal is an int64 in the symmetric memory of the rank that waits. The sending rank first
stores its data, then stores the call's number with release semantics at system scope. The
waiting rank acquires until it sees that number or a larger one. Numbers only grow, so nothing
is ever reset, and no reset can race with the next call. They have 64 bits: a server makes more than
2^31 calls within days.

Calls are counted on the device (`count_calls`). A captured CUDA graph therefore keeps counting
when it is replayed.

Kernels do not specialise the rank. Otherwise Triton would compile three binaries (for 1, for
multiples of 16, and for the rest), and each rank would test only one of them.

Every wait is bounded by `peers.max_polls` polls. The first wait of a rank that times out writes
(rank, signal, wanted, seen) to `peers.fault`. All programs then continue with garbage, and later
waits do not poll at all. One lost signal therefore costs one timeout, however many waits follow.
The host reads `fault` where it synchronises anyway, and raises there (workspace.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX_POLLS = 1 << 28
"""Default limit of polls for one wait: minutes on a GPU."""

WARP = tl.constexpr(32)
"""Signals that one warp's threads set or read at once; more ranks take MANY threads."""
MANY = tl.constexpr(1024)


@triton.jit(do_not_specialize=["number"])
def count_calls(calls, number, ROWS: tl.constexpr):
    """Count an op's calls. Grid: (1,).

    Args:
        calls: int64 [ROWS, 2], this rank's; see Workspace.
        number: how many calls to add.
    """
    row = calls + 2 * tl.arange(0, ROWS)
    tl.store(row, tl.load(row) + number)


@triton.jit
def slot_of(call):
    """Return the slot that a call uses, int32: 0 or 1 (peers.SLOTS)."""
    return (call & 1).to(tl.int32)


@triton.jit
def peer_pointer(addresses, rank, dtype: tl.constexpr):
    """Return the start of a rank's part of a symmetric tensor.

    Args:
        addresses: int64 [W], of the tensor.
        rank: whose part.
        dtype: element type.
    """
    return tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(dtype)), 16)


@triton.jit
def notify(peers, rank, index, value):
    """Set a signal of another rank, after everything this program has stored.

    Like OpenSHMEM's put_signal with SIGNAL_SET, after its data: a rank that acquires the value sees
    the stores. The barrier orders the stores of all warps before the one thread's release; Triton
    3.6 does not insert it by itself.

    Args:
        peers: Peers.
        rank: the rank to notify.
        index: which of its signals.
        value: larger than all values before.
    """
    tl.debug_barrier()
    signal = peer_pointer(peers.signals, rank, tl.int64) + index
    value = tl.cast(value, tl.int64)
    tl.atomic_xchg(signal, value, sem="release", scope="sys")


@triton.jit
def notify_all(peers, index, value, WORLD: tl.constexpr):
    """Set the signal with the same number on every rank, after everything this program has stored.

    Each rank gets what `notify` would send it. But each signal leaves from its own thread, and all
    wait for this program's stores at the same time.

    Args:
        peers: Peers.
        index: the signal's number on each rank.
        value: larger than all values before.
    """
    each = tl.arange(0, WARP if WORLD <= WARP else MANY)
    starts = tl.load(peers.signals + each, mask=each < WORLD, other=0)
    signals = starts.to(tl.pointer_type(tl.int64)) + index
    values = tl.zeros_like(starts) + value
    tl.debug_barrier()
    tl.atomic_xchg(signals, values, mask=each < WORLD, sem="release", scope="sys")


@triton.jit
def polls_left(peers):
    """Return how often a wait may poll: 0 after one of this rank's waits has timed out."""
    # An atomic, because another program may be storing to it.
    first = tl.atomic_add(peers.fault, 0, sem="relaxed", scope="gpu")
    return tl.where(first < 0, peers.max_polls, 0)


@triton.jit
def report(peers, rank, index, wanted, seen):
    """Record that a wait timed out, unless this rank has recorded one before.

    Args:
        peers: Peers.
        rank, index, wanted, seen: the waiting rank, its signal, and the two values, of which the
            low 32 bits are recorded.
    """
    if tl.atomic_cas(peers.fault, -1, rank, sem="relaxed", scope="gpu") == -1:
        tl.store(peers.fault + 1, index)
        tl.store(peers.fault + 2, tl.cast(wanted, tl.int32))
        tl.store(peers.fault + 3, tl.cast(seen, tl.int32))


@triton.jit
def wait(peers, rank, index, value):
    """Wait until one of this rank's own signals reaches a value.

    Like OpenSHMEM's signal_wait_until with CMP_GE: later loads see everything that was stored
    before the signal was set.

    Args:
        peers: Peers.
        rank: this rank.
        index: which of its signals.
        value: the value to wait for.
    """
    signal = peer_pointer(peers.signals, rank, tl.int64) + index
    seen = tl.atomic_add(signal, 0, sem="acquire", scope="sys")
    if seen < value:
        left = polls_left(peers)
        while (seen < value) & (left > 0):
            seen = tl.atomic_add(signal, 0, sem="acquire", scope="sys")
            left -= 1
        if seen < value:
            report(peers, rank, index, value, seen)
    # Only one thread acquires. The others must not load before it has.
    tl.debug_barrier()


@triton.jit
def wait_all(peers, rank, index, value, COUNT: tl.constexpr):
    """Wait until `COUNT` of this rank's own signals reach a value.

    It ends when a `wait` for each signal would end, but reads all at once.

    Args:
        peers: Peers.
        rank: this rank.
        index: the first of the signals.
        value: the value to wait for.
    """
    each = tl.arange(0, WARP if COUNT <= WARP else MANY)
    inside = each < COUNT
    signals = peer_pointer(peers.signals, rank, tl.int64) + index + each
    nothing = tl.zeros_like(each).to(tl.int64)
    seen = tl.atomic_add(signals, nothing, mask=inside, sem="acquire", scope="sys")
    missing = tl.sum((inside & (seen < value)).to(tl.int32), axis=0)
    if missing > 0:
        left = polls_left(peers)
        while (missing > 0) & (left > 0):
            seen = tl.atomic_add(signals, nothing, mask=inside, sem="acquire", scope="sys")
            missing = tl.sum((inside & (seen < value)).to(tl.int32), axis=0)
            left -= 1
        if missing > 0:
            late = inside & (seen < value)
            first = tl.min(tl.where(late, each, COUNT), axis=0)
            least = tl.min(tl.where(late, seen, value), axis=0)
            report(peers, rank, index + first, value, least)
    tl.debug_barrier()  # as in `wait`


@triton.jit
def count_off(counters, rank, index, count):
    """Return whether this program is the last of `count` programs to arrive.

    The last program sees everything the others stored: an atomic with acquire and release semantics
    passes on what each program before it has stored.

    Args:
        counters: int64 [W], addresses of the counters: 0 before the first program and after the
            last.
        rank: whose counter.
        index: which of its counters.
        count: number of programs that arrive.
    """
    tl.debug_barrier()  # after the stores of all warps
    counter = peer_pointer(counters, rank, tl.int32) + index
    before = tl.atomic_add(counter, 1, sem="acq_rel", scope="sys")
    tl.debug_barrier()  # before any warp continues
    if before == count - 1:
        tl.store(counter, 0)
    return before == count - 1


@triton.jit(do_not_specialize=["rank"])
def meet(
    peers,  # signals int64 [first + W]
    rank,
    first,  # the first of W signals
    WORLD: tl.constexpr,
):
    """Tell all ranks that this one is in this call, and wait until they are. Grid: (1,)."""
    call = tl.load(peers.calls)
    notify_all(peers, first + rank, call, WORLD)
    wait_all(peers, rank, first, call, WORLD)


@triton.jit(do_not_specialize=["peer", "index"])
def tell(
    peers,
    peer,
    index,
):
    """Tell one rank that everything queued before this launch is done. Grid: (1,)."""
    notify(peers, peer, index, tl.load(peers.calls))
