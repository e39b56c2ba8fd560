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

Every wait is bounded. One that runs out writes (rank, signal, wanted, seen)
to the workspace's `fault` and goes on, with garbage: the host reads `fault`
where it synchronises anyway, and raises there (workspace.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX_POLLS = 1 << 28
"""Of one wait: minutes on a GPU."""


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
def notify(signals, rank, index, value):
    """Set a signal of another rank, after everything that this program has stored.

    As OpenSHMEM's put_signal with SIGNAL_SET, whose data went before: whoever acquires the value
    sees the stores. The barrier makes the stores of all warps come before the one thread's
    release; Triton 3.6 does not put it there by itself.

    Args:
        signals: int64 [W], addresses of the signals.
        rank: who is told.
        index: which of its signals.
        value: larger than all before.
    """
    tl.debug_barrier()
    signal = peer_pointer(signals, rank, tl.int32) + index
    tl.atomic_xchg(signal, value, sem="release", scope="sys")


@triton.jit
def wait(signals, rank, index, value, fault, MAX_POLLS: tl.constexpr):
    """Wait until one of this rank's own signals has reached a value.

    As OpenSHMEM's signal_wait_until with CMP_GE: what was stored before the signal was set is
    seen by the loads after this.

    Args:
        signals: int64 [W], addresses of the signals.
        rank: this one.
        index: which of its signals.
        value: to wait for.
        fault: int32 [4], of this rank.
        MAX_POLLS: to give up after.
    """
    signal = peer_pointer(signals, rank, tl.int32) + index
    seen = tl.atomic_add(signal, 0, sem="acquire", scope="sys")
    polls = 0
    while (seen < value) & (polls < MAX_POLLS):
        seen = tl.atomic_add(signal, 0, sem="acquire", scope="sys")
        polls += 1
    if seen < value:
        tl.store(fault, rank)
        tl.store(fault + 1, index)
        tl.store(fault + 2, value)
        tl.store(fault + 3, seen)
    # One thread has acquired; no other may load before it has.
    tl.debug_barrier()
