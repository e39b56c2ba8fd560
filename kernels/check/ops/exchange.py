"""Check entries for the expert-parallel exchange: dispatch, simple experts, combine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.kernels import reference
from weft.kernels.check.ops.op import CONVERTS, FP8_TOLERANCE, NVIDIA, Op, Sizes, node_size
from weft.kernels.check.ops.rows import restored
from weft.kernels.gpu.experts.dispatch import (
    LowLatencyWorkspace,
    moe_combine,
    moe_dispatch,
    moe_workspace,
)
from weft.kernels.gpu.experts.dispatch_two_level import (
    TwoLevelExpertWorkspace,
    moe_combine_two_level,
    moe_dispatch_two_level,
    moe_two_level_workspace,
)
from weft.kernels.gpu.experts.expert_tokens import Arrived, ExpertWorkspace
from weft.kernels.gpu.experts.placement import Placement, Tables, balanced
from weft.kernels.gpu.matmul.epilogue import FP8
from weft.kernels.gpu.rowwise.activation import GROUP
from weft.kernels.gpu.runtime.workspace import Workspace
from weft.kernels.symmetric.memory import Home


def _top_k(world_size: int) -> int:
    """Choose the experts per token, in routing ops."""
    return min(8, world_size + 1)


def _few(m: int) -> int:
    """Choose a rank's tokens in a decode, fewer than other ops have rows."""
    return -(-m // 4)


def _placement(world_size: int) -> Placement:
    """Place one expert more than ranks in two slots per rank, so that most have a replica."""
    return balanced([1.0] * (world_size + 1), world_size, 2)


def _route(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids and weights of the best experts: int32 and float32 [m, k]."""
    best = scores.float().topk(_top_k(scores.shape[1] - 1))
    return best.indices.to(torch.int32), best.values.softmax(dim=1)


def _as_experts(rows: Tensor, offsets: Tensor, experts: Sequence[int]) -> Tensor:
    """Run experts; each multiplies by its number plus 1."""
    at = torch.arange(len(rows), device=rows.device, dtype=torch.int32)
    slots = torch.searchsorted(offsets, at, right=True).clamp(1, len(experts)) - 1
    factors = torch.tensor(experts, device=rows.device)[slots] + 1
    return (rows * factors[:, None]).to(rows.dtype)


def _outputs(sent: Arrived, workspace: ExpertWorkspace) -> Tensor:
    """Run these experts on a rank's received rows."""
    rows = sent.rows if sent.scales is None else restored((sent.rows, sent.scales))
    experts = workspace.placement.experts(workspace.rank)
    return _as_experts(rows.to(workspace.dtype), sent.offsets, experts)


def _moe(x: Tensor, scores: Tensor, workspace: LowLatencyWorkspace) -> Tensor:
    """Run moe_dispatch, these experts, and moe_combine."""
    ids, weights = _route(scores)
    sent = moe_dispatch(x, ids, workspace)
    return moe_combine(_outputs(sent, workspace), weights, sent, workspace)


def _moe_counted(x: Tensor, scores: Tensor, workspace: LowLatencyWorkspace) -> Tensor:
    """Run the same with a layer's own tables, in which dispatches count rows."""
    ids, weights = _route(scores)
    placement = workspace.placement
    rows = torch.zeros(placement.slots_per_rank, dtype=torch.int64, device=x.device)
    sent = moe_dispatch(x, ids, workspace, tables=Tables(placement, x.device, rows))
    return moe_combine(_outputs(sent, workspace), weights, sent, workspace)


def _moe_two_level(x: Tensor, scores: Tensor, workspace: TwoLevelExpertWorkspace) -> Tensor:
    """Run the same over one rank per node."""
    sent = moe_dispatch_two_level(x, *_route(scores), workspace)
    return moe_combine_two_level(_outputs(sent, workspace), sent, workspace)


def _moe_oracle(xs: Sequence[Tensor], scores: Sequence[Tensor]) -> list[Tensor]:
    placement = _placement(len(xs))
    ids, weights = zip(*map(_route, scores), strict=True)
    ys = [
        _as_experts(rows.float(), torch.tensor(offsets), placement.experts(rank))
        for rank, (rows, offsets) in enumerate(reference.moe_dispatch(xs, ids, placement.slots))
    ]
    return reference.moe_combine(ys, ids, weights, placement.slots)


def _moe_fp8_oracle(xs: Sequence[Tensor], scores: Sequence[Tensor]) -> list[Tensor]:
    rounded = [restored(reference.quantize(x, GROUP)).to(x.dtype) for x in xs]
    return _moe_oracle(rounded, scores)


def _all_to_all(
    name: str,
    function: Callable[..., Tensor] = _moe,
    *,
    two_level: bool = False,
    fp8: bool = False,
    far: bool = False,
) -> Op:
    """Make an entry for the exchange; with fp8, rows are wide enough for several scales."""
    width, wire = (16, FP8) if fp8 else (1, None)

    def workspace(home: Home, s: Sizes) -> Workspace:
        made = (_few(s.m), width * s.k, _top_k(s.world), s.dtype, _placement(s.world))
        if two_level:
            chunk: dict[str, Any] = {"chunk": 8} if s.chunk else {}
            node = node_size(s.world)
            return moe_two_level_workspace(home, *made, ranks_per_node=node, wire=wire, **chunk)
        return moe_workspace(home, *made, wire=wire)

    return Op(
        name,
        _moe_two_level if two_level else function,
        _moe_fp8_oracle if fp8 else _moe_oracle,
        lambda s: [(_few(s.m), width * s.k), (_few(s.m), s.world + 1)],
        workspace,
        targets=NVIDIA if far else CONVERTS if fp8 else (),
        tolerance=FP8_TOLERANCE if fp8 else 0.0,
        far=far,
    )


EXCHANGES = (
    _all_to_all("moe_dispatch_combine"),
    _all_to_all("moe_dispatch_combine_fp8", fp8=True),
    _all_to_all("moe_dispatch_counted", _moe_counted),
    _all_to_all("moe_two_level", two_level=True),
    _all_to_all("moe_two_level_fp8", two_level=True, fp8=True),
    _all_to_all("moe_two_level_far", two_level=True, far=True),
)
