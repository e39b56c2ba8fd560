"""The product alone, the cost of waiting, and overlapped ops over their parts.

One rank runs, by itself: it finds the signals of all others set, for all calls
to come, and what it sends goes to buffers on the same GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from harness.ranks import alone, run
from harness.report import Case, Figure
from harness.timing import (
    Times,
    interleaved,
    only_product,
    ratio,
    without_waits,
)
from torch import Tensor

from products.scale import Scale, Shape
from weft.kernels.check.ops.quantized import packed
from weft.kernels.gpu.collectives.all_gather import all_gather, all_gather_workspace
from weft.kernels.gpu.collectives.all_reduce import all_reduce, all_reduce_workspace
from weft.kernels.gpu.collectives.reduce_scatter import reduce_scatter, reduce_scatter_workspace
from weft.kernels.gpu.matmul import all_gather_matmul as gather_module
from weft.kernels.gpu.matmul import decomposed
from weft.kernels.gpu.matmul import matmul_reduce_scatter as scatter_module
from weft.kernels.gpu.matmul.matmul import matmul
from weft.kernels.gpu.matmul.packed_tile import dequantize
from weft.kernels.gpu.runtime.workspace import Workspace
from weft.kernels.gpu.tuning.clock import Call
from weft.kernels.packed import KINDS, PAIRED
from weft.kernels.symmetric.memory import Home

TORCH, COLLECTIVE, CHOSEN = "torch.matmul", "collective", "as chosen"
WAYS = ("chunks", "ring")


@dataclass(frozen=True, slots=True)
class Overlapped:
    """An overlapped op and its unoverlapped parts.

    Attributes:
        function: (x, w, workspace, **tiling) -> result.
        workspace: (home, scale, shape) -> for `function`, at every tiling.
        collective: (tensor, workspace) -> result.
        collective_workspace: (home, scale, shape) -> for `collective`.
        gathers: the collective comes before the product, not after it.
    """

    function: Callable[..., Tensor]
    workspace: Callable[[Home, Scale, Shape], Workspace]
    collective: Callable[..., Tensor]
    collective_workspace: Callable[[Home, Scale, Shape], Workspace]
    gathers: bool = False


def _smallest(scale: Scale) -> tuple[int, int]:
    return min(t.block_m for t in scale.tilings), min(t.block_n for t in scale.tilings)


OVERLAPPED = {
    "all_gather_matmul": Overlapped(
        gather_module.all_gather_matmul,
        lambda home, scale, s: gather_module.all_gather_matmul_workspace(
            home, s.rows // home.world_size, s.k, scale.dtype, _smallest(scale)[0]
        ),
        all_gather,
        lambda home, scale, s: all_gather_workspace(
            home, s.rows // home.world_size * s.k, scale.dtype
        ),
        gathers=True,
    ),
    "matmul_reduce_scatter": Overlapped(
        scatter_module.matmul_reduce_scatter,
        lambda home, scale, s: scatter_module.matmul_reduce_scatter_workspace(
            home, s.rows // home.world_size, s.n, scale.dtype, *_smallest(scale)
        ),
        reduce_scatter,
        lambda home, scale, s: reduce_scatter_workspace(
            home, s.rows // home.world_size * s.n, scale.dtype
        ),
    ),
    "matmul_all_reduce": Overlapped(
        scatter_module.matmul_all_reduce,
        lambda home, scale, s: scatter_module.matmul_all_reduce_workspace(
            home, s.rows, s.n, scale.dtype, *_smallest(scale)
        ),
        all_reduce,
        lambda home, scale, s: all_reduce_workspace(home, s.rows * s.n, scale.dtype),
    ),
}


def product(scale: Scale, repetitions: int) -> Iterator[Case]:
    """The persistent product alone over torch.matmul."""
    for shape in scale.shapes:
        if shape.op != "matmul_all_reduce":
            yield Case(str(shape), lambda s=shape: _product(scale, s, repetitions))  # type: ignore[misc]


def _product(scale: Scale, shape: Shape, repetitions: int) -> Figure:
    def measure(home: Home) -> dict[str, Times]:
        x, w = _random(scale, home, shape.rows, shape.k), _random(scale, home, shape.k, shape.n)
        calls: dict[str, Call] = {TORCH: lambda: torch.matmul(x, w)}
        for tiling in scale.tilings:
            calls[str(tiling)] = lambda t=tiling: matmul(x, w, programs=scale.programs, **t.options)  # type: ignore[misc]
        return interleaved(calls, repetitions, tiny=scale.tiny)

    times = run(measure, 1, tiny=scale.tiny)[0]
    theirs = times.pop(TORCH)
    name, ours = fastest(times)
    speed = ratio(theirs, ours)
    flops = 2e-12 * shape.rows * shape.n * shape.k
    return Figure(
        *speed,
        goal="at least 0.95",
        good=None if scale.tiny else speed.value >= 0.95,
        details={
            f"TFLOP/s at {name}": flops / ours.median,
            "torch's": flops / theirs.median,
        },
    )


def few_rows(scale: Scale, repetitions: int) -> Iterator[Case]:
    """Products with few rows, as in decodes: torch.matmul over ours, by tile."""
    for rows in scale.few:
        for of in scale.decoded:
            shape = of._replace(rows=rows)
            yield Case(str(shape), partial(_few_rows, scale, shape, repetitions))


def _few_rows(scale: Scale, shape: Shape, repetitions: int) -> Figure:
    def measure(home: Home) -> dict[str, Times]:
        x, w = _random(scale, home, shape.rows, shape.k), _random(scale, home, shape.n, shape.k).mT
        calls: dict[str, Call] = {TORCH: partial(torch.matmul, x, w), CHOSEN: partial(matmul, x, w)}
        for tiling in scale.few_tilings:
            calls[str(tiling)] = partial(matmul, x, w, **tiling.options)
        return interleaved(calls, repetitions, tiny=scale.tiny, graphs=True)

    times = run(measure, 1, tiny=scale.tiny)[0]
    size = torch.empty((), dtype=scale.dtype).itemsize
    nbytes = size * (shape.k * (shape.rows + shape.n) + shape.rows * shape.n)
    return Figure(
        *ratio(times[TORCH], times[CHOSEN]),
        details={f"us {name}": 1e6 * each.median for name, each in times.items()}
        | {"GB/s of torch": 1e-9 * nbytes / times[TORCH].median},
    )


def quantized(scale: Scale, repetitions: int) -> Iterator[Case]:
    """Products with quantised weights: torch.matmul with plain ones over ours, by kind."""
    for rows in scale.few:
        for of in scale.decoded:
            shape = of._replace(rows=rows)
            yield Case(str(shape), partial(_quantized, scale, shape, repetitions))


def _quantized(scale: Scale, shape: Shape, repetitions: int) -> Figure:
    def measure(home: Home) -> dict[str, Times]:
        x, w = _random(scale, home, shape.rows, shape.k), _random(scale, home, shape.n, shape.k)
        out = torch.empty_like(w)
        calls: dict[str, Call] = {TORCH: partial(torch.matmul, x, w.mT)}
        for kind in KINDS:
            matrix = packed(w, kind)
            calls[kind] = partial(matmul, x, matrix)
            calls[f"dequantize {kind}"] = partial(dequantize, matrix, out)
        return interleaved(calls, repetitions, tiny=scale.tiny, graphs=True)

    times = run(measure, 1, tiny=scale.tiny)[0]
    nbytes = {kind: shape.n * shape.k // (2 if kind in PAIRED else 1) for kind in KINDS}
    return Figure(
        *ratio(times[TORCH], times["fp8"]),
        details={f"us {name}": 1e6 * each.median for name, each in times.items()}
        | {f"GB/s {kind}": 1e-9 * nbytes[kind] / times[kind].median for kind in KINDS},
    )


def waiting(scale: Scale, repetitions: int) -> Iterator[Case]:
    """The product with all signals set, over the same without waits."""
    for shape in scale.shapes:
        if shape.op == "all_gather_matmul":  # in the others the product does not wait
            yield Case(str(shape), lambda s=shape: _waiting(scale, s, repetitions))  # type: ignore[misc]


def _waiting(scale: Scale, shape: Shape, repetitions: int) -> Figure:
    op = OVERLAPPED[shape.op]

    def measure(home: Home, workspaces: list[Workspace]) -> dict[str, Times]:
        x, w = _operands(scale, home, shape)
        options = {"programs": scale.programs, **scale.tilings[0].options}
        calls = {}
        for name, function in (("waits", op.function), ("does not", without_waits(op.function))):
            calls[name] = only_product(lambda f=function: f(x, w, workspaces[0], **options))  # type: ignore[misc]
        return interleaved(calls, repetitions, tiny=scale.tiny)

    times = _alone(scale, shape, [op.workspace], measure)
    longer = ratio(times["waits"], times["does not"])
    return Figure(
        *longer,
        goal="at most 1.02",
        good=None if scale.tiny else longer.value <= 1.02,
        details={"ms": 1e3 * times["waits"].median},
    )


def overlap(scale: Scale, repetitions: int) -> Iterator[Case]:
    """A call over its parts in turn, and over the decomposed op."""
    for shape in scale.shapes:
        name = f"{shape.op}, {shape}"
        yield Case(f"{name}: over its parts", lambda s=shape: _over_parts(scale, s, repetitions))  # type: ignore[misc]
        yield Case(
            f"{name}: over decomposed",
            lambda s=shape: _over_decomposed(scale, s, repetitions),  # type: ignore[misc]
        )


def _over_parts(scale: Scale, shape: Shape, repetitions: int) -> Figure:
    op = OVERLAPPED[shape.op]

    def measure(home: Home, workspaces: list[Workspace]) -> dict[str, Times]:
        x, w = _operands(scale, home, shape)
        width = shape.k if op.gathers else shape.n
        whole = _random(scale, home, shape.rows, width)  # what is gathered, or to be reduced
        calls: dict[str, Call] = {
            COLLECTIVE: lambda: op.collective(x if op.gathers else whole, workspaces[1])
        }
        for tiling in scale.tilings:
            options = tiling.options
            calls[f"overlapped {tiling}"] = lambda o=options: op.function(x, w, workspaces[0], **o)  # type: ignore[misc]
            calls[f"product {tiling}"] = lambda o=options: matmul(  # type: ignore[misc]
                whole if op.gathers else x, w, programs=scale.programs, **o
            )
        return interleaved(calls, repetitions, tiny=scale.tiny)

    times = _alone(scale, shape, [op.workspace, op.collective_workspace], measure)
    collective = times[COLLECTIVE]
    name, overlapped = fastest(times, "overlapped ")
    _, alone = fastest(times, "product ")
    return Figure(
        *ratio(overlapped, collective + alone),
        details={
            f"ms at {name}": 1e3 * overlapped.median,
            "collective": 1e3 * collective.median,
            "product": 1e3 * alone.median,
        },
    )


def _over_decomposed(scale: Scale, shape: Shape, repetitions: int) -> Figure:
    op = OVERLAPPED[shape.op]
    function = getattr(decomposed, shape.op)
    rows, width = shape.rows, shape.k if op.gathers else shape.n

    def make(home: Home, scale: Scale, shape: Shape) -> Workspace:
        most = rows if shape.op == "matmul_all_reduce" else rows // home.world_size
        workspace: Workspace = getattr(decomposed, f"{shape.op}_workspace")(
            home, most, width, scale.dtype
        )
        return workspace

    def measure(home: Home, workspaces: list[Workspace]) -> dict[str, Times]:
        x, w = _operands(scale, home, shape)
        ways = [{}] if shape.op == "matmul_all_reduce" else [{"method": m} for m in WAYS]
        calls: dict[str, Call] = {}
        for way in ways:
            name = f"decomposed {way.get('method', 'chunks')}"
            calls[name] = lambda way=way: function(x, w, workspaces[1], **way)  # type: ignore[misc]
        for tiling in scale.tilings:
            options = tiling.options
            calls[f"overlapped {tiling}"] = lambda o=options: op.function(x, w, workspaces[0], **o)  # type: ignore[misc]
        return interleaved(calls, repetitions, tiny=scale.tiny)

    times = _alone(scale, shape, [op.workspace, make], measure)
    name, overlapped = fastest(times, "overlapped ")
    way, parts = fastest(times, "decomposed ")
    return Figure(
        *ratio(overlapped, parts),
        details={f"ms at {name}": 1e3 * overlapped.median, way: 1e3 * parts.median},
    )


def fastest(times: dict[str, Times], prefix: str = "") -> tuple[str, Times]:
    """Of those whose names begin so: the name without the prefix, and its times."""
    some = {name.removeprefix(prefix): t for name, t in times.items() if name.startswith(prefix)}
    name = min(some, key=lambda name: some[name].median)
    return name, some[name]


def _alone(
    scale: Scale,
    shape: Shape,
    make: Sequence[Callable[[Home, Scale, Shape], Workspace]],
    measure: Callable[[Home, list[Workspace]], dict[str, Times]],
) -> dict[str, Times]:
    """What `measure` says on the first of `scale.world` ranks, while the others wait."""
    workspaces = [lambda home, each=each: each(home, scale, shape) for each in make]
    return alone(measure, workspaces, scale.world, scale.programs, tiny=scale.tiny)


def _operands(scale: Scale, home: Home, shape: Shape) -> tuple[Tensor, Tensor]:
    """x and w of one rank."""
    rows = shape.rows // home.world_size if OVERLAPPED[shape.op].gathers else shape.rows
    return _random(scale, home, rows, shape.k), _random(scale, home, shape.k, shape.n)


def _random(scale: Scale, home: Home, *shape: int) -> Tensor:
    """Not zeros: a GPU is faster on those."""
    return torch.randn(shape, dtype=scale.dtype, device=home.device)
