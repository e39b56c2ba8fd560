"""Counts the variants of Triton's kernels in a model's steps, without a GPU.

    TRITON_INTERPRET=0 python tests/support/kernel_variants.py CONFIG_FOLDER TP EP GRAPHS STEPS

Prints JSON: how many variants the steps of warm_up.py have, and those that STEPS random steps have
more.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import triton
from msgspec.structs import replace
from triton.runtime.driver import driver

from weft.kernels.gpu.runtime.absent import NoDevice
from weft.kernels.gpu.runtime.launches import decided
from weft.kernels.symmetric.absent import AbsentGpu
from weft.models.checkpoint.locate import read_spec
from weft.models.interface import SlotSampling, StepInput
from weft.models.memory.plan import NO_RECORDINGS
from weft.models.spec.layout import Layout
from weft.models.torch.dry import DryModel, Sizes
from weft.models.torch.graphs import recordings

MAX_TOKENS, MAX_SEQS, MAX_LEN, PAGE = 2048, 128, 8192, 16


class Shape(NamedTuple):
    """A step's numbers: requests, the tokens of one of them, and its context; others decode.

    All of them sample in the same way, except that only the first one may have a penalty.
    """

    requests: int
    queries: int
    context: int
    sampling: str
    prompt: int

    @property
    def tokens(self) -> int:
        return self.requests - 1 + self.queries


class Steps:
    """A rank's model, and the variants that its steps launch."""

    def __init__(self, folder: Path, layout: Layout, graphs: bool) -> None:
        self._found: set[tuple[str, str]] = set()
        driver.set_active(NoDevice("sm_90"))
        triton.knobs.runtime.jit_cache_hook = self._note
        spec = read_spec(folder)
        spec = dataclasses.replace(spec, layers=spec.layers[:2])
        overlapped = layout.world_size > 1
        recorded = NO_RECORDINGS
        if graphs:
            recorded = recordings(layout, MAX_SEQS, MAX_TOKENS, overlapped=overlapped)
        self._layout = layout
        self._model = DryModel(
            *(spec, layout, "bfloat16"),
            Sizes(PAGE, 64, MAX_SEQS, MAX_TOKENS, MAX_LEN, recorded),
            AbsentGpu("H100", 132, multicast=False),
            overlapped=overlapped,
        )

    def _note(self, *, key: str, fn: Any, **details: Any) -> bool:
        """Note what Triton would compile, by the key of its cache; it compiles nothing then."""
        self._found.add((fn.name, key))
        return True

    def warm_up(self) -> set[tuple[str, str]]:
        """The variants in a warm-up's steps."""
        return self._launched(self._model.warm_up)

    def step(self, shape: Shape) -> set[tuple[str, str]]:
        """The variants in one step."""
        lengths = np.ones(shape.requests, np.int32)
        lengths[-1] = shape.queries
        starts = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
        contexts = np.full(shape.requests, shape.context, np.int32)
        positions = [np.arange(shape.context - length, shape.context) for length in lengths]
        slots = np.arange(shape.requests, dtype=np.int32)
        batch = StepInput(
            step=0,
            token_ids=np.zeros(shape.tokens, np.int32),
            positions=np.concatenate(positions).astype(np.int32),
            query_start=starts,
            context_len=contexts,
            block_table=np.zeros((shape.requests, -(-shape.context // PAGE)), np.int32),
            slot=slots,
            sample_index=starts[1:] - 1,
            sample_slot=slots,
            output_index=slots,
            new_slots=tuple(map(self._sampling(shape), slots.tolist())),
        )
        sizes = self._layout.dp_size * (batch.size,)
        return self._launched(lambda: self._model.step(replace(batch, group_sizes=sizes)))

    def _sampling(self, shape: Shape) -> Callable[[int], SlotSampling]:
        if shape.sampling == "drawn":
            return lambda slot: SlotSampling(slot, temperature=0.7, top_p=0.9)
        if shape.sampling == "biased":
            return lambda slot: SlotSampling(slot, logit_bias={slot: 2.0})
        if shape.sampling == "penalty":
            prompt = range(shape.prompt)
            return lambda slot: SlotSampling(
                slot, repetition_penalty=1.0 + (slot == 0), prompt_token_ids=prompt
            )
        return SlotSampling

    def _launched(self, launch: Callable[[], None]) -> set[tuple[str, str]]:
        self._found = set()
        with decided(lambda name: "compile"):
            launch()
        return self._found


def others(count: int, *, replayed: bool) -> Iterator[Shape]:
    """Random steps, except for decodes if they are replayed."""
    rng = random.Random(0)
    for _ in range(count):
        requests = rng.choice([1, 2, 3, 8, 16, 17, 33, 64, 100, MAX_SEQS])
        queries = rng.randrange(2, MAX_TOKENS - requests + 2)
        if rng.random() < 0.5:
            queries = rng.randrange(2, 40)
        if not replayed and rng.random() < 0.3:
            queries = 1
        context = rng.randrange(max(queries, 16), MAX_LEN)
        sampling = rng.choice(["greedy", "drawn", "biased", "penalty"])
        yield Shape(requests, queries, context, sampling, rng.randrange(300, 5000))


def main() -> None:
    """Compare both."""
    folder, tp, ep, graphs, count = sys.argv[1:]
    layout = Layout(int(tp), int(ep))
    steps = Steps(Path(folder), layout, graphs == "graphs")
    known = steps.warm_up()
    replayed = graphs == "graphs" and layout.dp_size == 1
    missed = {
        str(more): shape
        for shape in others(int(count), replayed=replayed)
        for more in steps.step(shape) - known
    }
    print(json.dumps({"known": len(known), "missed": missed}))


if __name__ == "__main__":
    main()
