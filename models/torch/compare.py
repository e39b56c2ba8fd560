"""A model and its copy on one text: perplexity of both, and how far their predictions differ.

The text is cut into windows that do not overlap, and each token but a window's first is predicted
from those before it. The perplexity is exp(-mean log probability). The divergence is the mean of
KL(original || copy) over the same predictions (Kullback and Leibler 1951), in nats.

Both models must have the same final norm and LM head, as a quantised copy has. The original's
hidden states are kept instead of its predictions, so that one model is in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from weft.kernels.cpu.attention import AttentionPlan
from weft.models.checkpoint.locate import read_spec
from weft.models.checkpoint.weights import Weights
from weft.models.spec.spec import ModelSpec
from weft.models.torch.cpu_layers import LayerCache
from weft.models.torch.cpu_model import CpuModel

BLOCK = 64  # tokens in a page of the cache
ROWS = 64
"""Rows of logits in memory at once."""

Advance = Callable[[int], object]
"""Called after each window, with its tokens."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Difference between a model and its copy on a text.

    Attributes:
        tokens: number of predicted tokens.
        before, after: perplexity of the original and of the copy.
        divergence: KL divergence of the copy's predictions, in nats.
    """

    tokens: int
    before: float
    after: float
    divergence: float


@torch.inference_mode()
def compare(
    original: Path, copy: Path, windows: Sequence[Sequence[int]], advance: Advance
) -> Comparison:
    """Run two checkpoints over the same windows, on the CPU, in the original's dtype.

    Args:
        original, copy: the checkpoints.
        windows: token ids; together they predict at least one token.
        advance: called for each window of each model.

    Raises:
        ModelError: a checkpoint cannot be loaded.
    """
    dtype: torch.dtype = getattr(torch, read_spec(original).compute_dtype("auto"))
    longest = max(map(len, windows))
    states = list(_states(_load(original, dtype, longest), windows, dtype, advance))
    model = _load(copy, dtype, longest)
    sums = np.zeros(3)
    count = 0
    for window, before, after in zip(
        windows, states, _states(model, windows, dtype, advance), strict=True
    ):
        for start in range(0, len(window) - 1, ROWS):
            rows = slice(start, min(start + ROWS, len(window) - 1))
            following = torch.tensor(window[rows.start + 1 : rows.stop + 1])[:, None]
            p, q = (model[0].logits(each[rows]).local.float() for each in (before, after))
            p, q = p.log_softmax(-1), q.log_softmax(-1)
            sums += [
                p.gather(1, following).double().sum().item(),
                q.gather(1, following).double().sum().item(),
                (p.exp() * (p - q)).double().sum().item(),
            ]
            count += len(following)
    p_mean, q_mean, divergence = sums / count
    return Comparison(count, math.exp(-p_mean), math.exp(-q_mean), divergence)


def _load(path: Path, dtype: torch.dtype, longest: int) -> tuple[CpuModel, ModelSpec]:
    spec = read_spec(path).for_context(longest)
    return CpuModel(spec, Weights(path, spec), dtype), spec


def _states(
    loaded: tuple[CpuModel, ModelSpec],
    windows: Sequence[Sequence[int]],
    dtype: torch.dtype,
    advance: Advance,
) -> Iterator[Tensor]:
    """Yield each window's hidden states after the last layer, [tokens, hidden]."""
    model, spec = loaded
    for window in windows:
        plan, cache = lone_request(spec, len(window), dtype)
        positions = torch.arange(len(window))
        yield model(model.embed(torch.tensor(window)), positions, [cache] * len(spec.layers), plan)
        advance(len(window))


def lone_request(
    spec: ModelSpec, tokens: int, dtype: torch.dtype
) -> tuple[AttentionPlan, LayerCache]:
    """Return a step that runs one whole prompt, and a cache; all layers may use it in turn."""
    pages = -(-tokens // BLOCK)
    shape = (pages, spec.num_kv_heads, BLOCK, spec.head_dim)
    plan = AttentionPlan.build(
        np.array([0, tokens], np.int32),
        np.array([tokens], np.int32),
        np.arange(pages, dtype=np.int32)[None],
        block_size=BLOCK,
    )
    return plan, (torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))
