"""Check entries for expert products: on one rank, and split by columns over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.kernels import reference
from weft.kernels.check.ops.op import FP8_TOLERANCE, HOPPER, Op, Shapes, Sizes
from weft.kernels.check.ops.rows import restored
from weft.kernels.gpu.experts.all_gather_grouped_matmul import (
    GatherGroupsWorkspace,
    all_gather_grouped_matmul,
    all_gather_grouped_matmul_workspace,
    make_plan,
)
from weft.kernels.gpu.experts.grouped_matmul import grouped_matmul
from weft.kernels.gpu.experts.grouped_matmul_reduce_scatter import (
    grouped_matmul_reduce_scatter,
    grouped_matmul_reduce_scatter_workspace,
)
from weft.kernels.gpu.matmul.epilogue import FP8, Epilogue
from weft.kernels.gpu.rowwise.activation import GROUP
from weft.kernels.gpu.runtime.workspace import Workspace
from weft.kernels.symmetric.memory import Home

EXPERTS, TOP_K = 4, 2


def _wide(k: int) -> int:
    """Round up to columns with several scales."""
    return k if k > GROUP else k + GROUP


def _plans(world: int, m: int, device: torch.device | None = None) -> Tensor:
    """Assign all ranks' tokens to TOP_K experts each, as a function of m alone."""
    numbers = torch.Generator().manual_seed(m)
    scores = torch.rand(world, m, EXPERTS, generator=numbers)
    weights, ids = scores.topk(TOP_K, dim=2)
    plans = [make_plan(*both, EXPERTS) for both in zip(ids, weights, strict=True)]
    return torch.stack(plans).to(device)


def grouped(x: Tensor, *ws: Any, **options: Any) -> Tensor:
    """Run grouped_matmul on one weight, or on gate and up, with a plan for m tokens."""
    *weights, _ = ws
    offsets = _plans(1, len(x) // TOP_K, x.device)[0, : EXPERTS + 1].clone()
    offsets[-1] = len(x)
    silu = Epilogue(silu_multiply=len(weights) > 1)
    return grouped_matmul(x, weights, offsets, epilogue=options.pop("epilogue", silu), **options)


def _in_order(rows: int) -> Tensor:
    """Choose an order for pairs: every second one, then the others."""
    return torch.cat([torch.arange(0, rows, 2), torch.arange(1, rows, 2)]).to(torch.int32)


def _grouped_in_order(x: Tensor, *ws: Any, **options: Any) -> Tensor:
    """Run gate and up on tokens in an order."""
    return grouped(x, *ws, order=_in_order(len(x)).to(x.device), **options)


def _grouped_in_order_oracle(xs: Sequence[Tensor], *ws: Sequence[Tensor]) -> list[Tensor]:
    return grouped_oracle([x[_in_order(len(x))] for x in xs], *ws)


def grouped_oracle(xs: Sequence[Tensor], *ws: Sequence[Tensor]) -> list[Tensor]:
    results = []
    for x, *weights in zip(xs, *ws, strict=True):
        offsets = _plans(1, len(x) // TOP_K)[0, : EXPERTS + 1].clone()
        offsets[-1] = len(x)
        product = reference.grouped_matmul(x, torch.cat(weights, dim=2), offsets)
        gate_up = "halves" if len(weights) > 1 else ""
        results.append(reference.epilogue(product, gate_up=gate_up))
    return results


def _to_fp8(w: Tensor) -> Tensor:
    """Cast to e4m3, as the transpose of [N, K]."""
    return w.mT.contiguous().to(FP8).mT


def _grouped_fp8(x: Tensor, w: Tensor, workspace: Workspace, **options: Any) -> Tensor:
    scales = torch.full((len(x),), 0.5, device=x.device), torch.full((EXPERTS, 1), 2.0).to(x.device)
    epilogue = Epilogue(*scales, out_dtype=x.dtype)
    return grouped(x.to(FP8), _to_fp8(w), workspace, epilogue=epilogue, **options)


def _scales(x: Tensor) -> Tensor:
    """Make a scale for each row and 128 columns: float32, at most 1."""
    row = torch.arange(len(x), device=x.device)[:, None]
    group = torch.arange(-(-x.shape[1] // GROUP), device=x.device)
    return (1 + (row + group) % 4) / 4


def _grouped_scaled(x: Tensor, *ws: Any, **options: Any) -> Tensor:
    """Run gate and up on rows as moe_dispatch delivers them: fp8 with scales per 128 columns."""
    gate, up, workspace = ws
    epilogue = Epilogue(_scales(x), silu_multiply=True, out_dtype=x.dtype)
    weights = (_to_fp8(gate), _to_fp8(up), workspace)
    return grouped(x.to(FP8), *weights, epilogue=epilogue, **options)


def _grouped_scaled_oracle(xs: Sequence[Tensor], *ws: Sequence[Tensor]) -> list[Tensor]:
    scaled = [restored((x.to(FP8), _scales(x))) for x in xs]
    return grouped_oracle(scaled, *([w.to(FP8).float() for w in each] for each in ws))


def _gather_experts(x: Tensor, *ws: Any, **options: Any) -> Tensor:
    """Run all_gather_grouped_matmul on one weight, or on gate and up."""
    *weights, workspace = ws
    plan = _plans(workspace.world_size, len(x), x.device)[workspace.rank]
    silu = Epilogue(silu_multiply=len(weights) > 1)
    epilogue = options.pop("epilogue", silu)
    return all_gather_grouped_matmul(x, weights, plan, workspace, epilogue=epilogue, **options)


def _gather_experts_oracle(xs: Sequence[Tensor], *ws: Sequence[Tensor]) -> list[Tensor]:
    joined = [torch.cat(weights, dim=2) for weights in zip(*ws, strict=True)]
    plans = list(_plans(len(xs), len(xs[0])))
    products = reference.all_gather_grouped_matmul(xs, joined, plans, TOP_K)
    gate_up = "halves" if len(ws) > 1 else ""
    return [reference.epilogue(product, gate_up=gate_up) for product in products]


def _gather_experts_fp8(
    x: Tensor, w: Tensor, workspace: GatherGroupsWorkspace, **options: Any
) -> Tensor:
    scales = torch.full((len(x),), 0.5, device=x.device), torch.full((1,), 2.0, device=x.device)
    epilogue = Epilogue(*scales, out_dtype=x.dtype)
    return _gather_experts(x.to(FP8), _to_fp8(w), workspace, epilogue=epilogue, **options)


def _scatter_experts(x: Tensor, w: Tensor, workspace: Any, **options: Any) -> Tensor:
    size = workspace.world_size
    plans = _plans(size, len(x) // size // TOP_K, x.device)
    return grouped_matmul_reduce_scatter(x, w, plans, workspace, **options)


def _scatter_experts_oracle(xs: Sequence[Tensor], ws: Sequence[Tensor]) -> list[Tensor]:
    plans = list(_plans(len(xs), len(xs[0]) // len(xs) // TOP_K))
    return reference.grouped_matmul_reduce_scatter(xs, ws, plans, TOP_K)


def _scatter_experts_fp8(x: Tensor, w: Tensor, workspace: Any, **options: Any) -> Tensor:
    scales = torch.full((len(x),), 0.5, device=x.device), torch.full((1,), 2.0, device=x.device)
    options["epilogue"] = Epilogue(*scales, out_dtype=x.dtype)
    return _scatter_experts(x.to(FP8), _to_fp8(w), workspace, **options)


def _expert_op(
    name: str,
    function: Callable[..., Tensor],
    weights: int = 1,
    *,
    fp8: bool = False,
    oracle: Callable[..., list[Tensor]] = grouped_oracle,
) -> Op:
    """Make an entry for tensor-parallel experts, or for one rank's experts."""
    gathers, scatters = "all_gather" in name, "reduce_scatter" in name
    if gathers or scatters:
        oracle = _gather_experts_oracle if gathers else _scatter_experts_oracle

    def shapes(s: Sizes) -> Shapes:
        rows = s.world * s.m * TOP_K if scatters else s.m
        return [(rows, s.k), *[(EXPERTS, s.k, s.n)] * weights]

    def workspace(home: Home, s: Sizes) -> Workspace:
        dtype = FP8 if fp8 and gathers else s.dtype
        of = (EXPERTS, TOP_K, dtype)
        if gathers:
            return all_gather_grouped_matmul_workspace(home, s.m, s.k, *of)
        if scatters:
            sides = (16, 16) if s.tile else ()
            return grouped_matmul_reduce_scatter_workspace(home, s.m, s.n, *of, *sides)
        return Workspace(home, "grouped_matmul", 1, s.dtype, 1)

    def rounded(*tensors: Sequence[Tensor]) -> list[Tensor]:
        return oracle(*([x.to(FP8).to(x.dtype) for x in each] for each in tensors))

    expected, targets = (rounded, HOPPER) if fp8 else (oracle, ())
    return Op(name, function, expected, shapes, workspace, tiled=True, targets=targets)


EXPERT_PRODUCTS = (
    _expert_op("grouped_matmul", grouped),
    _expert_op("grouped_gate_up", grouped, 2),
    _expert_op("grouped_gate_up_in_order", _grouped_in_order, 2, oracle=_grouped_in_order_oracle),
    _expert_op("grouped_matmul_fp8", _grouped_fp8, fp8=True),
    Op(
        "grouped_gate_up_scaled_fp8",
        _grouped_scaled,
        _grouped_scaled_oracle,
        lambda s: [(s.m, _wide(s.k)), *[(EXPERTS, _wide(s.k), s.n)] * 2],
        lambda home, s: Workspace(home, "grouped_matmul", 1, s.dtype, 1),
        tiled=True,
        targets=HOPPER,
        tolerance=FP8_TOLERANCE,
    ),
    _expert_op("all_gather_grouped_matmul", _gather_experts),
    _expert_op("all_gather_grouped_gate_up", _gather_experts, 2),
    _expert_op("all_gather_grouped_matmul_fp8", _gather_experts_fp8, fp8=True),
    _expert_op("grouped_matmul_reduce_scatter", _scatter_experts),
    _expert_op("grouped_matmul_reduce_scatter_fp8", _scatter_experts_fp8, fp8=True),
)
