"""Signals between ranks, in stock Triton: the words that all overlapped kernels are made of.

A signal is an int32 in symmetric memory of the rank that waits. The rank that
sends stores its data first, then the number of the call with release semantics
at system scope; the other acquires until it sees that number or a later one.
Numbers only grow, so that nothing is ever reset, and no reset can race with the
next call.

The calls are counted on the device (`begin_call`), so that a captured CUDA
graph counts on when it is replayed.

Kernels do not specialise the rank. Triton would compile anew for 1 and for
multiples of 16: three binaries of each, of which a rank tests one.

Every wait is bounded, by a number of polls that is the workspace's `max_polls`,
an argument of the kernel like any other. The first of a rank that runs out
writes (rank, signal, wanted, seen) to the workspace's `fault`, and all go on,
with garbage: those that come later do not poll at all, so that one lost signal
costs one bound and not as many as there are waits. The host reads `fault` where
it synchronises anyway, and raises there (workspace.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX_POLLS = 1 << 28
"""Of one wait, unless a workspace is told otherwise: minutes on a GPU."""


@triton.jit
def begin_call(calls):
    """Count one call of an op. Launched alone, before its kernels.

    Args:
        calls: int32 [1], of this rank.
    """
    tl.store(calls, tl.load(calls) + 1)


@triton.jit
def peer_pointer(addresses, rank, dtype: tl.constexpr):
    """Where a rank's part of a symmetric tensor begins.

    Args:
        addresses: int64 [W], the tensor's.
        rank: whose.
        dtype: of its elements.
    """
    return tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(dtype)), 16)


@triton.jit
def notify(peers, rank, index, value):
    """Set a signal of another rank, after everything that this program has stored.

    As OpenSHMEM's put_signal with SIGNAL_SET, whose data went before: whoever acquires the value
    sees the stores. The barrier makes the stores of all warps come before the one thread's
    release; Triton 3.6 does not put it there by itself.

    Args:
        peers: of this rank.
        rank: who is told.
        index: which of its signals.
        value: larger than all before.
    """
    tl.debug_barrier()
    signal = peer_pointer(peers.signals, rank, tl.int32) + index
    tl.atomic_xchg(signal, value, sem="release", scope="sys")


@triton.jit
def polls_left(peers):
    """How often a wait may poll: not at all once one of this rank has run out."""
    # Another program may store it just now.
    first = tl.atomic_add(peers.fault, 0, sem="relaxed", scope="gpu")
    return tl.where(first < 0, peers.max_polls, 0)


@triton.jit
def report(peers, rank, index, wanted, seen):
    """Say that a wait has run out, unless another one of this rank already has.

    Args:
        peers: of this rank.
        rank, index, wanted, seen: of the signal.
    """
    if tl.atomic_cas(peers.fault, -1, rank, sem="relaxed", scope="gpu") == -1:
        tl.store(peers.fault + 1, index)
        tl.store(peers.fault + 2, wanted)
        tl.store(peers.fault + 3, seen)


@triton.jit
def wait(peers, rank, index, value):
    """Wait until one of this rank's own signals has reached a value.

    As OpenSHMEM's signal_wait_until with CMP_GE: what was stored before the signal was set is
    seen by the loads after this.

    Args:
        peers: of this rank.
        rank: this one.
        index: which of its signals.
        value: to wait for.
    """
    signal = peer_pointer(peers.signals, rank, tl.int32) + index
    seen = tl.atomic_add(signal, 0, sem="acquire", scope="sys")
    if seen < value:
        left = polls_left(peers)
        while (seen < value) & (left > 0):
            seen = tl.atomic_add(signal, 0, sem="acquire", scope="sys")
            left -= 1
        if seen < value:
            report(peers, rank, index, value, seen)
    # One thread has acquired; no other may load before it has.
    tl.debug_barrier()


@triton.jit
def count_off(counters, rank, index, count):
    """Whether this program is the last of `count` that come here; that one knows what they stored.

    As an atomic with acquire and release semantics, each joins what those before it have stored.

    Args:
        counters: int64 [W], addresses of the counters: 0 before the first, and after the last.
        rank: whose.
        index: which of its counters.
        count: of all that come.
    """
    tl.debug_barrier()  # all warps have stored
    counter = peer_pointer(counters, rank, tl.int32) + index
    before = tl.atomic_add(counter, 1, sem="acq_rel", scope="sys")
    tl.debug_barrier()  # no warp goes on before
    if before == count - 1:
        tl.store(counter, 0)
    return before == count - 1


@triton.jit(do_not_specialize=["rank"])
def meet(
    peers,  # signals int32 [first + W]
    rank,
    first,  # of W signals
    WORLD: tl.constexpr,
):
    """Tell all ranks that this one is in this call, and wait until they are. Grid: (1,)."""
    call = tl.load(peers.calls)
    for step in range(WORLD):
        notify(peers, (rank + step) % WORLD, first + rank, call)
    for step in range(WORLD):
        wait(peers, rank, first + (rank + step) % WORLD, call)


@triton.jit(do_not_specialize=["peer", "index"])
def tell(
    peers,
    peer,
    index,
):
    """Tell one rank that what was queued before this is there. Grid: (1,)."""
    notify(peers, peer, index, tl.load(peers.calls))
