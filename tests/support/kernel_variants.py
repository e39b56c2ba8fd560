"""Counts the variants of Triton's kernels in a model's steps, without a GPU.

    TRITON_INTERPRET=0 python tests/support/kernel_variants.py CONFIG_FOLDER TP EP GRAPHS

Prints JSON: how many variants the steps of warm_up.py have, and those that other steps have more.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from gpu.model import recorded
from torch import Tensor
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from weft.kernels.check.aot import NoDevice
from weft.kernels.gpu.attention.inputs import PagedBatch
from weft.kernels.gpu.tuning.costs import device_named
from weft.models.checkpoint.locate import read_spec
from weft.models.interface import Size
from weft.models.spec.layout import Layout
from weft.models.torch import warm_up
from weft.models.torch.exchange import Plain
from weft.models.torch.gpu_model import GpuModel
from weft.models.torch.graphs import recordings
from weft.models.torch.group import ALONE
from weft.models.torch.inputs import PagedPlan
from weft.models.torch.overlapped import Overlapped

MAX_TOKENS, MAX_SEQS, MAX_LEN, PAGE = 2048, 128, 8192, 16
OTHERS = 400
"""Random steps to compare."""


class Shape(NamedTuple):
    """A step's numbers: requests, the tokens of one of them, and its context; others decode."""

    requests: int
    queries: int
    context: int

    @property
    def tokens(self) -> int:
        return self.requests - 1 + self.queries


def variant(kernel: Any, arguments: dict[str, Any]) -> tuple[Any, ...]:
    """What Triton compiles a kernel for: constants, dtypes, and numbers that are 1 or 16 n."""
    found: list[Any] = [kernel.fn.__name__]
    for parameter in kernel.params:
        value = arguments.get(parameter.name)
        if parameter.is_constexpr or value is None or isinstance(value, bool):
            found.append(str(value))
        elif isinstance(value, Tensor):
            found.append(str(value.dtype))
        elif isinstance(value, int):
            found.append("int" if parameter.do_not_specialize else (value == 1, value % 16 == 0))
        else:
            found.append(type(value).__name__)
    return (*found, arguments.get("num_warps"), arguments.get("num_stages"))


class Steps:
    """A rank's model on the meta device."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        spec = read_spec(folder)
        self.spec = dataclasses.replace(spec, layers=spec.layers[:1])
        self.layout = layout
        self._gpu = device_named("NVIDIA H100 80GB HBM3")
        driver.set_active(NoDevice(self._gpu.target))
        self._processors = mock.patch.object(
            recorded.matmul_module, "count_processors", return_value=self._gpu.processors
        )
        with self._processors:
            exchange: Any = Plain(ALONE)
            if layout.world_size > 1:
                home = recorded.MetaRank(layout.world_size, self._gpu.target)
                exchange = Overlapped(home, None, self.spec, layout, torch.bfloat16, MAX_TOKENS)
            weights = recorded.NoWeights(self.spec, layout)
            self._model = GpuModel(
                *(self.spec, weights, torch.bfloat16),
                device=recorded.META,
                exchange=exchange,
                groups=ALONE,
            )

    def variants(self, shape: Shape) -> set[tuple[Any, ...]]:
        """The variants that a step uses."""
        found = set()

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            found.add(variant(kernel, kwargs))

        ints, meta = recorded.ints, recorded.meta
        tokens, requests, local = shape.tokens, shape.requests, self.layout.local(self.spec)
        cache = [(meta((64, local.num_kv_heads, PAGE, local.head_dim)),) * 2]
        batch = PagedBatch(
            *(ints(requests + 1), ints(requests), ints(requests, -(-shape.context // PAGE))),
            ints(requests),
            max_queries=shape.queries,
            max_context=shape.context,
        )
        plan = PagedPlan(ints(tokens), ints(tokens), batch)
        rows = ints(requests).long() if requests < tokens else None
        groups = self.layout.dp_size
        sizes = [Size(tokens, requests)] * groups if groups > 1 else []
        with mock.patch.object(JITFunction, "run", run), self._processors, torch.inference_mode():
            x = self._model.embed(ints(tokens))
            self._model.logits(self._model(x, ints(tokens), cache, plan, rows, sizes))
        return found


def warmed(layout: Layout, graphs: bool) -> Iterator[Shape]:
    """The steps of TorchRunner.warm_up."""
    yield Shape(1, PAGE, PAGE)
    yield Shape(1, 1, PAGE)
    for tokens in warm_up.prompts(MAX_TOKENS):
        yield Shape(1, tokens, tokens)
    if graphs:
        overlapped = layout.world_size > 1
        for size in recordings(layout, MAX_SEQS, MAX_TOKENS, overlapped=overlapped).decodes:
            yield Shape(size, 1, MAX_LEN)
    else:
        for requests, context in warm_up.decodes(MAX_SEQS, MAX_LEN):
            yield Shape(requests, 1, context)


def others(graphs: bool) -> Iterator[Shape]:
    """Random steps, except for decodes that are replayed."""
    rng = random.Random(0)
    for _ in range(OTHERS):
        requests = rng.choice([1, 2, 3, 8, 16, 17, 33, 64, 100, MAX_SEQS])
        queries = rng.randrange(2, MAX_TOKENS - requests + 2)
        if rng.random() < 0.5:
            queries = rng.randrange(2, 40)
        if not graphs and rng.random() < 0.3:
            queries = 1
        yield Shape(requests, queries, rng.randrange(max(queries, 16), MAX_LEN))


def main() -> None:
    """Compare both."""
    folder, tp, ep, graphs = sys.argv[1:]
    steps = Steps(Path(folder), Layout(int(tp), int(ep)))
    known = set().union(*map(steps.variants, warmed(steps.layout, graphs == "graphs")))
    missed = {
        str(more): shape
        for shape in others(graphs == "graphs")
        for more in steps.variants(shape) - known
    }
    print(json.dumps({"known": len(known), "missed": missed}))


if __name__ == "__main__":
    main()
