"""Tokens of the bundled models on the device, compared with the CPU's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from harness.report import Case, Figure

from model.model import PAGE, Scale
from weft.kernels.symmetric.memory import Home
from weft.kernels.symmetric.virtual import VirtualHome, VirtualWorld
from weft.models.checkpoint.locate import locate, read_spec
from weft.models.interface import SlotSampling, StepInput
from weft.models.torch.runner import TorchRunner

PROMPTS = (5, 17, 40)
"""Tokens of each request's prompt: less than a page, and more than one or two."""


def tokens(scale: Scale, repetitions: int) -> Iterator[Case]:
    """The share of equal greedy tokens in float32, with and without CUDA graphs."""
    for model in scale.models:
        for graphs in (True, False):
            name = f"{model}, {'with' if graphs else 'without'} graphs"
            yield Case(name, partial(_equal, scale, model, graphs))


def _equal(scale: Scale, model: str, graphs: bool) -> Figure:
    home = VirtualHome(VirtualWorld(1, device=scale.device), 0)
    theirs, ours = _chain(scale, model, None, graphs=False), _chain(scale, model, home, graphs)
    equal = float(np.mean(np.equal(theirs, ours)))
    return Figure(equal, "equal", equal, equal, "all", equal == 1.0)


def _chain(scale: Scale, model: str, home: Home | None, graphs: bool) -> list[list[int]]:
    """Prefill all prompts in one step, then decode; return each step's tokens."""
    path = locate(model)
    spec = read_spec(path)
    prompts = PROMPTS[:1] if scale.tiny else PROMPTS
    longest = max(prompts) + scale.chain
    runner = TorchRunner.load(
        path,
        spec,
        dtype="float32",
        block_size=PAGE,
        max_num_seqs=len(prompts),
        max_num_batched_tokens=sum(prompts),
        max_model_len=longest,
        home=home,
        cuda_graphs=graphs,
    )
    pages = -(-longest // PAGE)
    runner.allocate_kv_cache(len(prompts) * pages)
    if not scale.tiny:
        runner.warm_up()
    each = np.arange(len(prompts), dtype=np.int32)
    table = np.arange(len(prompts) * pages, dtype=np.int32).reshape(len(prompts), -1)
    found: list[list[int]] = []
    for number in range(scale.chain):
        queries = np.array(prompts, np.int32) if number == 0 else np.ones_like(each)
        context = np.array(prompts, np.int32) + number
        start = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
        ids = 7 + np.arange(start[-1], dtype=np.int32) % 50 if number == 0 else -1 - each
        places = [np.arange(c - q, c) for q, c in zip(queries, context, strict=True)]
        step = StepInput(
            step=number,
            token_ids=ids,
            positions=np.concatenate(places).astype(np.int32),
            query_start=start,
            context_len=context,
            block_table=table,
            slot=each,
            sample_index=start[1:] - 1,
            sample_slot=each,
            output_index=np.full_like(each, number),
            new_slots=() if number else tuple(SlotSampling(slot=int(slot)) for slot in each),
        )
        found.append(runner.step(step).token_ids.tolist())
    runner.close()
    if not scale.tiny:
        torch.cuda.empty_cache()
    return found
