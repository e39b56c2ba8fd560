"""What the device does at best: bytes, operations and launches a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from harness.report import Case, Figure
from harness.timing import copying

from model.model import Scale
from weft.kernels.gpu.tuning.clock import Call, gpu_clock, host_clock


def machine(scale: Scale, repetitions: int) -> Iterator[Case]:
    """Rates of torch's own kernels."""
    m, n, k = scale.product
    yield Case("copy", partial(_rate, scale, _copy, scale.copied, "GB/s", repetitions))
    name = f"torch.matmul {m} x {n} x {k}"
    yield Case(name, partial(_rate, scale, _product, 2 * m * n * k, "GFLOP/s", repetitions))
    yield Case("a launch", partial(_launch, scale, repetitions))


def _copy(scale: Scale) -> Call:
    return copying(scale.copied, scale.device)


def _product(scale: Scale) -> Call:
    dtype: torch.dtype = getattr(torch, scale.dtype)
    m, n, k = scale.product
    x, w = (torch.randn(s, dtype=dtype, device=scale.device) for s in ((m, k), (k, n)))
    return partial(torch.matmul, x, w)


def _rate(
    scale: Scale, make: Callable[[Scale], Call], amount: int, unit: str, repetitions: int
) -> Figure:
    call = make(scale)
    clock = host_clock if scale.tiny else gpu_clock
    clock(call, 3)
    rates = sorted(1e-9 * amount / clock(call, 5) for _ in range(repetitions))
    return Figure(rates[len(rates) // 2], unit, rates[0], rates[-1])


def _launch(scale: Scale, repetitions: int) -> Figure:
    """The host's time for one small operator of torch."""
    x = torch.zeros(16, device=scale.device)
    call = partial(x.add_, 1.0)
    host_clock(call, 100)
    times = sorted(1e6 * host_clock(call, 200) for _ in range(repetitions))
    return Figure(times[len(times) // 2], "us", times[0], times[-1])
