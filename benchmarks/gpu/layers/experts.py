"""The products of a rank's experts, against torch._grouped_mm."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from harness.report import Case, Figure
from harness.timing import interleaved, ratio
from torch import Tensor

from layers.scale import Experts, Scale
from weft.kernels.gpu.experts.grouped_matmul import grouped_matmul
from weft.kernels.gpu.tuning.clock import Call

OURS, TORCH = "as chosen", "torch"


def experts(scale: Scale, repetitions: int) -> Iterator[Case]:
    """grouped_matmul's speed over torch's."""
    for product in scale.products:
        yield Case(str(product), partial(_experts, scale, product, repetitions))


def _experts(scale: Scale, product: Experts, repetitions: int) -> Figure:
    x = scale.random(product.rows, product.k)
    w = scale.random(product.experts, product.n, product.k).mT  # as checkpoints have them
    offsets = offsets_of(product).to(scale.device)
    calls: dict[str, Call] = {
        OURS: partial(grouped_matmul, x, w, offsets),
        TORCH: partial(torch._grouped_mm, x, w, offs=offsets[1:]),
    }
    for blocks, warps, stages in scale.blocks:
        name = f"{'x'.join(map(str, blocks))}, {warps} warps, {stages}"
        options: dict[str, Any] = {"blocks": blocks, "warps": warps, "stages": stages}
        calls[name] = partial(grouped_matmul, x, w, offsets, **options)
    times = interleaved(calls, repetitions, tiny=scale.tiny, graphs=True)
    operations = 2e-12 * product.rows * product.n * product.k
    theirs = times.pop(TORCH)
    best = min(times, key=lambda name: times[name].median)
    rates = {f"TFLOP/s {n}": operations / times[n].median for n in dict.fromkeys((OURS, best))}
    rates["torch's"] = operations / theirs.median
    return Figure(*ratio(theirs, times[OURS]), details=rates)


def offsets_of(product: Experts) -> Tensor:
    """int32 [experts + 1]: rows spread evenly, or all of the expert in the middle."""
    if product.even:
        ends = [product.rows * e // product.experts for e in range(product.experts + 1)]
    else:
        ends = [product.rows * (e > product.experts // 2) for e in range(product.experts + 1)]
    return torch.tensor(ends, dtype=torch.int32)
