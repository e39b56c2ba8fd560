"""Calls, parts of calls, and how long they take, in turns."""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import triton

from weft.kernels.gpu.runtime.launches import Action, decided, is_refusal, loaded
from weft.kernels.gpu.tuning.clock import Call, gpu_clock, host_clock
from weft.kernels.symmetric.memory import Home

THREADS = 8
AT_LEAST = 0.01
"""Seconds between two looks at a GPU's clock."""


@dataclass(frozen=True, slots=True)
class Times:
    """Of one call, in seconds, in each repetition."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __add__(self, other: Times) -> Times:
        """One after the other."""
        return Times(tuple(a + b for a, b in zip(self.values, other.values, strict=True)))


class Ratio(NamedTuple):
    """The median over the repetitions, as a Figure begins."""

    value: float
    unit: str
    low: float
    high: float


def ratio(over: Times, under: Times, factor: float = 1.0) -> Ratio:
    """Of times that were taken in the same repetition; times a factor."""
    values = [factor * a / b for a, b in zip(over.values, under.values, strict=True)]
    return Ratio(statistics.median(values), "", min(values), max(values))


def interleaved(
    calls: dict[str, Call], repetitions: int, *, tiny: bool, graphs: bool = False
) -> dict[str, Times]:
    """Every call so often, in turns: a device that slows down touches all alike.

    Args:
        graphs: the calls are captured, so that what the host takes for each does not count.
    """
    clock = host_clock if tiny else gpu_clock
    calls = that_load(calls, tiny=tiny)
    if graphs and not tiny:
        calls = {name: captured(call) for name, call in calls.items()}
    counts = {}
    for name, call in calls.items():
        call()
        counts[name] = 1 if tiny else max(1, round(AT_LEAST / clock(call, 3)))
    values: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repetitions):
        for name, call in calls.items():
            values[name].append(clock(call, counts[name]))
    return {name: Times(tuple(times)) for name, times in values.items()}


def captured(call: Call) -> Call:
    """A CUDA graph of the call."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def in_step(
    home: Home, calls: dict[str, Call], repetitions: int, count: int, *, tiny: bool
) -> dict[str, Times]:
    """Calls of all ranks together, captured, in turns: of each, the slowest rank's times.

    Collective; every rank calls each so often.
    """
    clock = host_clock if tiny else gpu_clock
    if not tiny:
        calls = {name: captured(call) for name, call in calls.items()}
    values: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repetitions):
        for name, call in calls.items():
            home.barrier()
            call()  # lines the ranks up
            values[name].append(clock(call, count))
    by_rank = [json.loads(text) for text in home.exchange(json.dumps(values))]
    return {
        name: Times(tuple(map(max, zip(*(times[name] for times in by_rank), strict=True))))
        for name in calls
    }


def copying(nbytes: int, device: str) -> Call:
    """A copy that reads and writes so many bytes in all."""
    source = torch.randint(256, (nbytes // 2,), dtype=torch.uint8, device=device)
    return partial(torch.empty_like(source).copy_, source)


def that_load(calls: dict[str, Call], *, tiny: bool) -> dict[str, Call]:
    """Those of the calls that fit the device; their kernels are compiled at the same time."""
    device = -1 if tiny else torch.cuda.current_device()  # -1: none

    def load(call: Call) -> bool:
        with torch.cuda.device(device), loaded():
            try:
                call()
            except Exception as error:
                if not is_refusal(error):
                    raise
                return False
        return True

    with ThreadPoolExecutor(1 if tiny else THREADS) as pool:
        able = list(pool.map(load, calls.values()))
    return {name: call for (name, call), fits in zip(calls.items(), able, strict=True) if fits}


def only_product(call: Call) -> Call:
    """The call without its other kernels. A product's kernel is called multiply_..."""

    def decide(kernel: str) -> Action:
        return "run" if kernel.startswith("multiply_") else "skip"

    def product() -> object:
        with decided(decide):
            return call()

    return product


@triton.jit
def no_wait(peers, rank, index, value):  # type: ignore[no-untyped-def]
    """In the place of signals.wait."""


def without_waits(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of a copy of its module, in which no kernel waits."""
    module = sys.modules[function.__module__]
    name = f"{module.__name__}_without_waits"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, module.__file__)
        assert spec is not None
        assert spec.loader is not None
        copy = importlib.util.module_from_spec(spec)
        sys.modules[name] = copy
        spec.loader.exec_module(copy)
        assert copy.wait is module.wait
        copy.wait = no_wait  # type: ignore[attr-defined]
    result: Callable[..., Any] = getattr(sys.modules[name], function.__name__)
    return result
