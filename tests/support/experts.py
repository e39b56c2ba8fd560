"""What the tests of tensor-parallel experts share: plans of every routing."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from weft.kernels.gpu.experts.all_gather_grouped_matmul import make_plan

ROUTINGS = st.sampled_from(["any", "any", "one", "few", "none"])


def plans_of(size: int, m: int, experts: int, top_k: int, routing: str) -> list[Tensor]:
    """Of each rank: any experts or none, all the same, one for each rank, or none at all."""
    plans = []
    for rank in range(size):
        ids = {
            "any": torch.randint(-1, experts + 1, (m, top_k)),
            "one": torch.full((m, top_k), experts - 1),
            "few": torch.full((m, top_k), rank % experts),
            "none": torch.full((m, top_k), -1),
        }[routing]
        plans.append(make_plan(ids, torch.rand(m, top_k) + 0.5, experts))
    return plans


def own_experts(rank: int, experts: int, cut: bool) -> range:
    """All experts; if cut, and there are several, the first half or the others."""
    half = experts // 2 if cut else 0
    return range(half) if half and rank % 2 else range(half, experts)


def routed(plans: list[Tensor], own: range, pairs: int) -> Tensor:
    """Which rows belong to one of the experts: bool [W * pairs]."""
    at = torch.arange(pairs)
    return torch.cat([(at >= plan[own.start]) & (at < plan[own.stop]) for plan in plans])
