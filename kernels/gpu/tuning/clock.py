"""Clocks for calls, on a GPU and on the host."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Call = Callable[[], object]
Clock = Callable[[Call, int], float]
"""(call, number of calls) -> mean seconds for one call."""


def gpu_clock(call: Call, calls: int) -> float:
    """Measure the time between two events on this rank's stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / calls


def host_clock(call: Call, calls: int) -> float:
    """Measure the time on the host. A launch must return only after its kernel has finished."""
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls
