"""A decode step's real launches, without a GPU (models/torch/dry.py).

Triton launches are noted and left out, and so are torch's operators, which only compute shapes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from weft.kernels.gpu.attention.inputs import PagedBatch
from weft.kernels.gpu.runtime.absent import NoDevice
from weft.kernels.gpu.tuning.costs import Gpu
from weft.kernels.symmetric.absent import AbsentGpu
from weft.models.interface import Size
from weft.models.spec.layout import Layout
from weft.models.spec.spec import ModelSpec
from weft.models.torch.dry import DryModel, Sizes, meta
from weft.models.torch.inputs import PagedPlan, StepTensors

PAGE = 16
MAX_TOKENS = 2048
"""In a step of the engine, for its workspaces."""

LAUNCHES_NOTHING = frozenset(
    {
        *("view", "_unsafe_view", "t", "transpose", "slice", "select", "expand", "permute"),
        *("as_strided", "unsqueeze", "squeeze", "detach", "alias", "split", "unbind", "mT"),
        *("numpy_T", "empty", "empty_like", "new_empty", "empty_strided"),
    }
)
"""Operators of torch that give a view, or memory without contents."""


@dataclass(frozen=True)
class Launch:
    """A kernel's launch.

    Attributes:
        name: of Triton's kernel or torch's operator.
        grid: number of programs; 0 for torch's.
        arguments: by name; for torch's operators, tensors in and out.
    """

    name: str
    grid: int
    arguments: dict[str, Any]

    @property
    def is_torch(self) -> bool:
        """Whether it is an operator of torch."""
        return self.grid == 0


@dataclass(frozen=True)
class Recorded:
    """A step's launches.

    Attributes:
        layers: of one layer of each kind, without what comes once in a step.
        whole: of the step.
    """

    layers: Sequence[Launch]
    whole: Sequence[Launch]


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes torch's operators that launch a kernel."""

    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._launches = launches

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name not in LAUNCHES_NOTHING:
            tensors = [x for x in (*args, out) if isinstance(x, Tensor)]
            named = {f"tensor {number}": x for number, x in enumerate(tensors)}
            self._launches.append(Launch(name, 0, named))
        return out


@contextmanager
def _launches(gpu: Gpu) -> Iterator[list[Launch]]:
    """Note Triton's launches in this context for a GPU that is not here; run none."""
    found: list[Launch] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        programs = 1
        for size in grid(kwargs) if callable(grid) else grid:
            programs *= size
        found.append(Launch(kernel.fn.__name__, programs, kwargs))

    driver.set_active(NoDevice(gpu.target))
    with mock.patch.object(JITFunction, "run", run):
        yield found


def record(spec: ModelSpec, layout: Layout, users: int, context: int, gpu: Gpu) -> Recorded:
    """Record one rank's decode step.

    Args:
        spec: the whole model; its first layer stands for all.
        layout: the rank's.
        users: number of decodes; with data-parallel attention, on each rank.
        context: tokens of each.
        gpu: the GPU.
    """
    one, two = (_run(spec, count, layout, users, context, gpu) for count in (1, 2))
    layer = _repeated([launch.name for launch in one], two)
    more = len(spec.layers) - 1
    return Recorded(layer, [*one, *(layer * more)])


def _repeated(one: Sequence[str], two: Sequence[Launch]) -> list[Launch]:
    """Return a layer's launches, from the names in a step with one layer and a step with two."""
    count = len(two) - len(one)
    same = 0
    while same < len(one) and one[same] == two[same].name:
        same += 1
    return list(two[same - count : same])


def _run(
    spec: ModelSpec, layers: int, layout: Layout, users: int, context: int, gpu: Gpu
) -> list[Launch]:
    """Return the launches of a step with so many layers."""
    spec = dataclasses.replace(spec, layers=spec.layers[:layers])
    pages = -(-context // PAGE)
    sizes = Sizes(PAGE, users * pages, users, MAX_TOKENS, context)
    overlapped = layout.world_size > 1
    batch = PagedBatch(
        *(ints(users + 1), ints(users), ints(users, pages), ints(users)),
        max_queries=1,
        max_context=context,
        decodes=users,
    )
    step = StepTensors(ints(users), ints(users), PagedPlan(ints(users), ints(users), batch))
    tokens = [Size(users, users)] * layout.dp_size if layout.dp_size > 1 else []
    with _launches(gpu) as launches:
        absent = AbsentGpu(gpu.name, gpu.processors, multicast=False)
        model = DryModel(spec, layout, "bfloat16", sizes, absent, overlapped=overlapped)
        launches.clear()  # of the model's making
        with _Operators(launches):
            model.forward(step, sizes=tokens)
        return list(launches)


def ints(*shape: int) -> Tensor:
    """Make a tensor of int32 without memory."""
    return meta(shape, torch.int32)
