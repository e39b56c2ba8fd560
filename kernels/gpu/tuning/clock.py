"""Timing of calls, on a GPU and on the host."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Call = Callable[[], object]
Clock = Callable[[Call, int], float]
"""(call, number of calls) -> seconds per call."""


def gpu_clock(call: Call, calls: int) -> float:
    """Measure between events on this rank's stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / calls


def host_clock(call: Call, calls: int) -> float:
    """Measure on the host, for homes whose launches return when they are done."""
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls
