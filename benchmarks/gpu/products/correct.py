"""Each op on virtual ranks, several calls in a row, some ranks late, against its oracle."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from harness.ranks import prepare, run
from harness.report import Case, Figure, LeftOut
from torch import Tensor

from products.scale import Scale
from weft.kernels.check.ops.op import Op, Sizes
from weft.kernels.check.ops.table import OPS
from weft.kernels.symmetric.memory import Home

TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""Of the largest difference from the oracle over the largest result."""

CALLS = 3
LATE = 2_000_000
"""Clock cycles that a slow rank comes late: a millisecond."""


def correct(scale: Scale, repetitions: int) -> Iterator[Case]:
    """Every op on every number of ranks."""
    for world in scale.worlds:
        for op in OPS:
            name = f"{op.name}, {world} ranks"
            yield Case(name, partial(check, scale, op, world))


def check(scale: Scale, op: Op, world: int) -> Figure:
    """The largest error of all calls on all ranks."""
    if "multimem" in op.name and not scale.tiny:
        raise LeftOut("multicast needs several GPUs on an NVLink switch")
    if op.far:
        raise LeftOut("puts need several nodes")
    sizes = Sizes(world, *scale.checked, scale.dtype, scale.checked_tile)
    torch.manual_seed(world)
    inputs = [_tensors(op, sizes) for _ in range(CALLS)]

    def work(home: Home) -> list[Tensor]:
        mine = [[ranks[home.rank].to(home.device) for ranks in call] for call in inputs]
        workspace = op.workspace(home, sizes)
        calls = [partial(op.call, x, workspace, sizes) for x in mine]
        _come_late(scale, 1)
        prepare(home, calls)
        out = []
        for number, call in enumerate(calls):
            if home.rank == number % world:
                _come_late(scale, LATE)
            out.append(call())
        home.exchange("launched")
        workspace.check()
        return [result.cpu() for result in out]

    got = run(work, world, tiny=scale.tiny)
    worst = max(
        error(got[rank][number], expected)
        for number, tensors in enumerate(inputs)
        for rank, expected in enumerate(op.oracle(*tensors))
    )
    most = max(TOLERANCE[scale.dtype], op.tolerance)
    return Figure(worst, "of the largest", worst, worst, f"at most {most:g}", worst <= most)


def _tensors(op: Op, sizes: Sizes) -> list[list[Tensor]]:
    """Of one call, each of the op's tensors, on each rank."""
    return [
        [torch.randn(shape).to(sizes.dtype) for _ in range(sizes.world)]
        for shape in op.shapes(sizes)
    ]


def error(result: Tensor, expected: Tensor) -> float:
    """Infinite for a wrong shape or a result that is no number."""
    if result.shape != expected.shape or not result.isfinite().all():
        return float("inf")
    difference = (result.float() - expected.float()).abs().max()
    return float(difference / expected.float().abs().max())


def _come_late(scale: Scale, cycles: int) -> None:
    """The first time loads its kernel."""
    if not scale.tiny:
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
