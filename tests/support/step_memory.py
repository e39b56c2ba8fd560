"""Measures the tensors that live at once in a step of a GPU's model, without a GPU.

    TRITON_INTERPRET=0 python tests/support/step_memory.py CASES

CASES is JSON: a list of [config, tp, ep, overlapped]. Prints a JSON list with a pair of bytes for
each: the most that lived at once, and what `triton_activations` counts.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.driver import driver

from weft.kernels.gpu.runtime.absent import NoDevice
from weft.kernels.gpu.runtime.launches import decided
from weft.kernels.symmetric.absent import AbsentGpu
from weft.models.interface import Size
from weft.models.memory.activations import LargestStep, triton_activations
from weft.models.memory.plan import Recordings
from weft.models.spec.build import build_spec
from weft.models.spec.layout import Layout
from weft.models.torch.dry import META, DryModel, Sizes
from weft.models.torch.graphs import Buffers

TOKENS, MAX_LEN, PAGE = 4096, 4096, 16


class Alive(TorchDispatchMode):
    """Within, adds up the bytes of new tensors that live at once; `peak` is the most."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {key for key, _ in _storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for key, storage in _storages(out):
            if key not in given and key not in self._live:
                self._live[key] = storage.nbytes()
                weakref.finalize(storage, self._live.pop, key)
                self.peak = max(self.peak, sum(self._live.values()))
        return out


def _storages(tree: Any) -> Iterator[tuple[int, torch.UntypedStorage]]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            storage = leaf.untyped_storage()
            yield storage._cdata, storage


def measure(config: dict[str, Any], tp: int, ep: int, overlapped: bool) -> tuple[int, int]:
    """The bytes of one request's prompt."""
    spec, layout = build_spec(config, Path("config.json")), Layout(tp, ep)
    spec = dataclasses.replace(spec, layers=spec.layers[:2])
    recorded = Recordings(mixed=(TOKENS,))
    model = DryModel(
        *(spec, layout, "bfloat16"),
        Sizes(PAGE, 64, 1, TOKENS, MAX_LEN, recorded),
        AbsentGpu("H100", 132, multicast=False),
        overlapped=overlapped,
    )
    step = Buffers.make(recorded, 1, MAX_LEN // PAGE, META).mixed(TOKENS, MAX_LEN)
    rows = torch.zeros(1, dtype=torch.int64, device=META)
    sizes = (Size(TOKENS, 1),) * layout.dp_size if layout.dp_size > 1 else ()
    with decided(lambda name: "compile"), Alive() as alive:
        model.forward(step, rows, sizes)
    largest = LargestStep(1, TOKENS, MAX_LEN, layout.dp_size)
    counted = triton_activations(layout.local(spec), "bfloat16", largest, sampled=False)
    return alive.peak, counted


if __name__ == "__main__":
    driver.set_active(NoDevice("sm_90"))
    triton.knobs.runtime.jit_cache_hook = lambda **details: True  # nothing is compiled
    print(json.dumps([measure(*case) for case in json.loads(sys.argv[1])]))
