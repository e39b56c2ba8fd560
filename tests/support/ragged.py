"""Runs a torch Model over ragged batches through a paged cache with scattered blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from weft.kernels.cpu.attention import AttentionPlan
from weft.models.spec.spec import ModelSpec
from weft.models.torch.cpu_model import CpuModel

Step = Sequence[tuple[int, int]]
"""What one step runs: (request, how many of its next tokens)."""


@torch.inference_mode()
def run_ragged(
    model: CpuModel,
    spec: ModelSpec,
    requests: Sequence[Sequence[int]],
    steps: Sequence[Step],
    *,
    dtype: torch.dtype = torch.float32,
    block_size: int = 4,
    seed: int = 0,
) -> list[Tensor]:
    """The logits after every token of every request, float32 [tokens, vocab_size] each.

    The cache starts out full of NaN, and blocks are dealt out in random order.
    """
    pages = [-(-len(tokens) // block_size) for tokens in requests]
    deal = np.random.default_rng(seed).permutation(sum(pages) + 3).astype(np.int32)
    blocks = np.split(deal, np.cumsum(pages))
    shape = (len(deal), spec.num_kv_heads, block_size, spec.head_dim)
    cache = [
        (torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype))
        for _ in spec.layers
    ]
    done = [0] * len(requests)
    logits: list[list[Tensor]] = [[] for _ in requests]
    for step in steps:
        sizes = [count for _, count in step]
        token_ids, positions = [], []
        for request, count in step:
            positions += range(done[request], done[request] + count)
            token_ids += requests[request][done[request] : done[request] + count]
            done[request] += count
        block_table = np.zeros((len(step), max(pages)), np.int32)
        for row, (request, _) in enumerate(step):
            block_table[row, : pages[request]] = blocks[request]
        plan = AttentionPlan.build(
            np.cumsum([0, *sizes], dtype=np.int32),
            np.array([done[request] for request, _ in step], np.int32),
            block_table,
            block_size=block_size,
        )
        rows = model.embed(torch.tensor(token_ids))
        hidden = model(rows, torch.tensor(positions), cache, plan)
        for (request, _), own in zip(step, hidden.split_with_sizes(sizes), strict=True):
            logits[request].append(model.logits(own).local.float())
    return [torch.cat(parts) for parts in logits]
