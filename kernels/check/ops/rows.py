"""Check entries for row-wise ops: on one rank, except all_reduce_rms_norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.kernels import reference
from weft.kernels.check.ops.op import CONVERTS, FP8_TOLERANCE, Op, Shapes, Sizes
from weft.kernels.cpu.rope import HeadNorms, Rotation
from weft.kernels.gpu.collectives.all_reduce_norm import (
    all_reduce_rms_norm,
    all_reduce_rms_norm_workspace,
)
from weft.kernels.gpu.experts.combine import combine
from weft.kernels.gpu.experts.routing import route, sort_by_expert
from weft.kernels.gpu.matmul.epilogue import FP8
from weft.kernels.gpu.rowwise.activation import (
    GROUP,
    quantize,
    silu_multiply,
    silu_multiply_quantize,
)
from weft.kernels.gpu.rowwise.norm import layer_norm, mean_squares, rms_norm
from weft.kernels.gpu.rowwise.rope import CacheScales, rotate_into_cache
from weft.kernels.gpu.rowwise.sampling import Changes, How, draw, edit
from weft.kernels.gpu.runtime.workspace import Workspace

EPS = 1e-5
HEADS, KV_HEADS, BLOCK_SIZE = 6, 2, 4
CACHE_SCALE = 0.5
TOP_K = 5


class RowOp(NamedTuple):
    """One op; its oracle takes the same tensors and returns the same results in float32."""

    name: str
    function: Callable[..., Tensor]
    oracle: Callable[..., Tensor]
    shapes: Callable[[Sizes], Shapes]
    fp8: bool = False


def beside(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate several results [T, ...] to float32 [T, n]."""
    return torch.cat([part.float().reshape(len(part), -1) for part in parts], dim=1)


def restored(quantized: tuple[Tensor, Tensor]) -> Tensor:
    """Restore fp8 numbers [T, N] by their scales [T] or [T, groups]."""
    out, scale = quantized
    columns = scale[:, None] if scale.dim() == 1 else scale.repeat_interleave(GROUP, dim=1)
    return out.float() * columns[:, : out.shape[1]]


def _routed(choose: Callable[..., Sequence[Tensor]], logits: Tensor) -> Tensor:
    return beside(choose(logits, min(TOP_K, logits.shape[1]), normalize=True))


def _routed_by_groups(choose: Callable[..., Sequence[Tensor]], logits: Tensor) -> Tensor:
    """Route to 2 of 4 groups. Scores are 0.5 and 1 with exact sums, so rounding decides nothing."""
    logits = 200 * (logits > 0).to(logits.dtype)
    experts = logits.shape[1]
    options: dict[str, Any] = {"normalize": True, "scoring": "sigmoid", "scale": 2.5}
    options["bias"] = torch.arange(experts, dtype=torch.float32, device=logits.device) % 5 / 4
    return beside(choose(logits, min(TOP_K, experts // 4), groups=4, top_groups=2, **options))


def _by_expert(sort: Callable[..., Sequence[Tensor]], x: Tensor) -> Tensor:
    """Sort ids made from the numbers; some may be out of range."""
    ids = (x[:, :8].float() * 2).abs().to(torch.int32)
    return torch.cat([part.float().flatten() for part in sort(ids, x.shape[1])])


def _places(x: Tensor) -> tuple[Tensor, Tensor]:
    """Make places and weights for two choices of each row; some have none."""
    row = torch.arange(len(x), device=x.device)
    places = torch.stack([len(x) - 1 - row, row - 1], dim=1).to(torch.int32)
    return places, (1 + row[:, None] + torch.arange(2, device=x.device)) / (2 + len(x))


def _combined(x: Tensor) -> Tensor:
    return combine(x, *_places(x))


def _combined_oracle(x: Tensor) -> Tensor:
    places, weights = _places(x)
    rows = x.float()[places.clamp(min=0)] * (places >= 0)[..., None]
    return (rows * weights[..., None]).sum(1)


def _rms_norm(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    out, total, _ = rms_norm(x, weight[0], EPS, residual=residual)
    assert total is not None
    return beside([out, total])


def _rms_norm_oracle(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    total = (x.float() + residual.float()).to(x.dtype)
    return beside([reference.rms_norm(total, weight[0], EPS), total])


def _rms_norm_fp8(x: Tensor, weight: Tensor) -> Tensor:
    out, _, scale = rms_norm(x, weight[0], EPS, fp8=True)
    assert scale is not None
    return restored((out, scale))


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    out, total, _ = layer_norm(x, weight[0], EPS, bias=bias[0], residual=residual)
    assert total is not None
    return beside([out, total])


def _layer_norm_oracle(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    total = (x.float() + residual.float()).to(x.dtype)
    return beside([reference.layer_norm(total, weight[0], EPS, bias[0]), total])


def _turns(tokens: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return positions, and radians per position."""
    each = torch.arange(dim // 2, device=device)
    return torch.arange(tokens, device=device) * 7, 100.0 ** (-each / dim)


def _rotated(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    *,
    fp8: bool = False,
    wide: bool = False,
    by_head: bool = False,
) -> Tensor:
    """Return the queries, and the cache's new keys and values.

    `wide` norms span all heads; those `by_head` are layer norms with weights for each head.
    """
    tokens, device = len(qkv), qkv.device
    dim = qkv.shape[1] // (HEADS + 2 * KV_HEADS)
    place = torch.arange(tokens, device=device)
    pages, slots = place // BLOCK_SIZE, place % BLOCK_SIZE
    keys = qkv.new_empty(tokens, KV_HEADS, BLOCK_SIZE, dim, dtype=FP8 if fp8 else qkv.dtype)
    values = torch.empty_like(keys)
    scale = torch.full((KV_HEADS,), CACHE_SCALE, device=device)
    rotation = Rotation.of(*_turns(tokens, dim, device), torch.float32)
    queries, _ = rotate_into_cache(
        *(qkv, rotation, keys, values, pages, slots),
        heads=HEADS,
        norms=HeadNorms(q_norm, k_norm, EPS, is_centered=True)
        if by_head
        else HeadNorms(q_norm[0], k_norm[0], EPS),
        means=mean_squares(qkv, HEADS * dim, KV_HEADS * dim) if wide else None,
        scales=CacheScales(scale, scale) if fp8 else None,
    )
    written = [cache.float()[pages, :, slots] for cache in (keys, values)]
    return beside([queries, *(part * CACHE_SCALE if fp8 else part for part in written)])


def _rotated_oracle(qkv: Tensor, q_norm: Tensor, k_norm: Tensor) -> Tensor:
    heads = qkv.view(len(qkv), HEADS + 2 * KV_HEADS, -1)
    q, k, v = heads.tensor_split((HEADS, HEADS + KV_HEADS), dim=1)
    turns = _turns(len(qkv), heads.shape[2], qkv.device)
    q, k = (
        reference.rope(
            reference.rms_norm(x.reshape(len(x), -1, weight.shape[1]), weight[0], EPS).view(
                x.shape
            ),
            *turns,
        )
        for x, weight in ((q, q_norm), (k, k_norm))
    )
    return beside([q, k, v])


def _rotated_by_head_oracle(qkv: Tensor, q_norm: Tensor, k_norm: Tensor) -> Tensor:
    heads = qkv.view(len(qkv), HEADS + 2 * KV_HEADS, -1)
    q, k, v = heads.tensor_split((HEADS, HEADS + KV_HEADS), dim=1)
    turns = _turns(len(qkv), heads.shape[2], qkv.device)
    q, k = (
        reference.rope(reference.layer_norm(x, weight, EPS), *turns)
        for x, weight in ((q, q_norm), (k, k_norm))
    )
    return beside([q, k, v])


def _rotated_by_head_shapes(s: Sizes) -> Shapes:
    dim = max(2, s.k // 4 * 2)
    return [(s.m, (HEADS + 2 * KV_HEADS) * dim), (HEADS, dim), (KV_HEADS, dim)]


def _rotated_shapes(s: Sizes, *, wide: bool = False) -> Shapes:
    dim = max(2, s.k // 4 * 2)
    q_heads, k_heads = (HEADS, KV_HEADS) if wide else (1, 1)
    return [(s.m, (HEADS + 2 * KV_HEADS) * dim), (1, q_heads * dim), (1, k_heads * dim)]


def _drawing(rows: int, columns: int) -> list[tuple[float, dict[str, Any]]]:
    """Return the uniform number, and the settings, for each row."""
    return [
        (
            reference.uniform(7 * row - 3, row),
            {
                "temperature": 0.5 + row % 3,
                "top_k": row % 7,
                "top_p": 1.0 - 0.3 * (row % 2),
                "min_p": 0.1 * (row % 4),
            },
        )
        for row in range(rows)
    ]


def _drawn(x: Tensor) -> Tensor:
    count, columns = x.shape
    drawing = _drawing(count, columns)

    def tensor(dtype: torch.dtype, values: list[Any]) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(x.device)

    how = How(
        tensor(torch.float32, [s["temperature"] * math.log(2) for _, s in drawing]),
        tensor(torch.float32, [math.log2(s["min_p"] or 2.0**-149) for _, s in drawing]),
        tensor(torch.int32, [s["top_k"] or columns for _, s in drawing]),
        tensor(torch.int64, [round((1 - s["top_p"]) * 2**48) for _, s in drawing]),
        tensor(torch.int64, [int(u * 2**48) for u, _ in drawing]),
    )
    rows = torch.arange(count, dtype=torch.int32, device=x.device)
    return draw(x, rows, how)[:, None]


def _drawn_oracle(x: Tensor) -> Tensor:
    drawing = _drawing(*x.shape)
    tokens = [
        reference.draw(row, u, **settings) for row, (u, settings) in zip(x, drawing, strict=True)
    ]
    return torch.tensor(tokens, dtype=torch.float32, device=x.device)[:, None]


def _editing(rows: int, columns: int) -> list[dict[str, Any]]:
    """Return the changes to each row, as `reference.edit_logits` takes them."""
    return [
        {
            "prompt": sorted({row % columns, (3 * row + 1) % columns}),
            "output": [(row + i * i) % columns for i in range(row % 5)],
            "repetition": 1.0 + 0.5 * (row % 3),
            "presence": 0.25 * (row % 2),
            "frequency": 0.125 * (row % 4),
            "bias": {(2 * row) % columns: 1.5} if row % 2 else {},
            "ended": [columns - 1] if row % 3 == 1 else [],
            "allowed": list(range(row % 2, columns, 2)) if row % 4 == 2 else None,
        }
        for row in range(rows)
    ]


def _edited(x: Tensor) -> Tensor:
    count, columns = x.shape
    editing = _editing(count, columns)

    def tensor(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(x.device)

    listed = [[*each["prompt"], *each["output"]] for each in editing]
    width = max(1, *(len(each) for each in listed), 0)
    extra = [[*each["bias"].items(), *((t, -math.inf) for t in each["ended"])] for each in editing]
    flat = [pair for each in extra for pair in each] or [(0, 0.0)]
    masked = [row for row, each in enumerate(editing) if each["allowed"] is not None]
    masks = torch.zeros(max(1, len(masked)), -(-columns // 32) * 32, dtype=torch.int64)
    for number, row in enumerate(masked):
        masks[number, editing[row]["allowed"]] = 1
    words = (masks.view(len(masks), -1, 32) << torch.arange(32)).sum(-1)
    changes = Changes(
        rows=tensor(list(range(count))),
        history=tensor([each + [0] * (width - len(each)) for each in listed]).view(count, width),
        slot=tensor(list(range(count))),
        prompt_end=tensor([len(each["prompt"]) for each in editing]),
        output_end=tensor([len(each) for each in listed]),
        penalties=tensor(
            [[e[name] for e in editing] for name in ("repetition", "presence", "frequency")],
            torch.float32,
        ).view(3, count),
        tokens=tensor([token for token, _ in flat]),
        bias=tensor([bias for _, bias in flat], torch.float32),
        tokens_end=tensor([0, *accumulate(len(each) for each in extra)]),
        masks=words.to(torch.int32).to(x.device),
        mask=tensor([masked.index(row) if row in masked else -1 for row in range(count)]),
    )
    return edit(x, changes).clamp(min=-1e30)


def _edited_oracle(x: Tensor) -> Tensor:
    rows = [
        reference.edit_logits(row, **each) for row, each in zip(x, _editing(*x.shape), strict=True)
    ]
    return torch.stack(rows).clamp(min=-1e30) if rows else x.float()


def _multiplied(x: Tensor) -> Tensor:
    return reference.epilogue(x, gate_up="halves")


ROW_OPS = (
    RowOp(
        "route",
        lambda logits: _routed(route, logits),
        lambda logits: _routed(reference.route, logits),
        lambda s: [(s.m, s.n)],
    ),
    RowOp(
        "route_grouped",
        lambda logits: _routed_by_groups(route, logits),
        lambda logits: _routed_by_groups(reference.route, logits),
        lambda s: [(s.m, 4 * max(2, s.n // 4))],
    ),
    RowOp(
        "sort_by_expert",
        lambda x: _by_expert(sort_by_expert, x),
        lambda x: _by_expert(reference.sort_by_expert, x),
        lambda s: [(s.m, s.n)],
    ),
    RowOp("combine", _combined, _combined_oracle, lambda s: [(s.m, s.n)]),
    RowOp("rms_norm", _rms_norm, _rms_norm_oracle, lambda s: [(s.m, s.k), (1, s.k), (s.m, s.k)]),
    RowOp(
        "layer_norm",
        _layer_norm,
        _layer_norm_oracle,
        lambda s: [(s.m, s.k), (1, s.k), (1, s.k), (s.m, s.k)],
    ),
    RowOp(
        "rms_norm_fp8",
        _rms_norm_fp8,
        lambda x, weight: reference.rms_norm(x, weight[0], EPS),
        lambda s: [(s.m, 96 * s.k), (1, 96 * s.k)],
        fp8=True,
    ),
    RowOp("rotate_into_cache", _rotated, _rotated_oracle, _rotated_shapes),
    RowOp(
        "rotate_into_cache_fp8",
        lambda *tensors: _rotated(*tensors, fp8=True),
        _rotated_oracle,
        _rotated_shapes,
        fp8=True,
    ),
    RowOp(
        "rotate_into_cache_wide",
        partial(_rotated, wide=True),
        _rotated_oracle,
        partial(_rotated_shapes, wide=True),
    ),
    RowOp(
        "rotate_into_cache_by_head",
        partial(_rotated, by_head=True),
        _rotated_by_head_oracle,
        _rotated_by_head_shapes,
    ),
    RowOp("silu_multiply", silu_multiply, _multiplied, lambda s: [(s.m, 2 * s.n)]),
    RowOp(
        "silu_multiply_quantize",
        lambda x: restored(silu_multiply_quantize(x, "group")),
        _multiplied,
        lambda s: [(s.m, 16 * s.n)],
        fp8=True,
    ),
    RowOp(
        "quantize",
        lambda x: restored(quantize(x)),
        lambda x: restored(reference.quantize(x)),
        lambda s: [(s.m, 96 * s.k)],
        fp8=True,
    ),
    RowOp("draw", _drawn, _drawn_oracle, lambda s: [(s.m, s.n)]),
    RowOp("edit", _edited, _edited_oracle, lambda s: [(s.m, s.n)]),
)


def _alone(op: RowOp) -> Op:
    return Op(
        op.name,
        lambda *tensors: op.function(*tensors[:-1]),
        lambda *tensors: [op.oracle(*mine) for mine in zip(*tensors, strict=True)],
        op.shapes,
        lambda home, s: Workspace(home, op.name, 1, s.dtype, 1),
        targets=CONVERTS if op.fp8 else (),
        tolerance=FP8_TOLERANCE if op.fp8 else 0.0,
    )


def _all_reduce_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, workspace: Any) -> Tensor:
    return beside(all_reduce_rms_norm(x, residual, weight[0], EPS, workspace))


def _all_reduce_rms_norm_oracle(
    xs: Sequence[Tensor], residuals: Sequence[Tensor], weights: Sequence[Tensor]
) -> list[Tensor]:
    """Run the oracle with each rank's own weight."""
    return [
        beside(reference.all_reduce_rms_norm(xs, residuals, weight[0], EPS)[rank])
        for rank, weight in enumerate(weights)
    ]


ROWS = (
    *(_alone(op) for op in ROW_OPS),
    Op(
        "all_reduce_rms_norm",
        _all_reduce_rms_norm,
        _all_reduce_rms_norm_oracle,
        lambda s: [(s.m, s.k), (s.m, s.k), (1, s.k)],
        lambda home, s: all_reduce_rms_norm_workspace(home, s.m, s.k, s.dtype),
    ),
)
