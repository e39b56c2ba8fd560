"""The overlapped ops as the checks call them: one entry of OPS each.

`weft check kernels` (suite.py) runs each entry against its oracle, `weft check
aot` (aot.py) compiles every kernel that it launches, and `weft check timeline`
(timeline.py) draws it. A new op, or another method of one, is a new entry here.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from weft.errors import ConfigError
from weft.kernels import reference
from weft.kernels.check.row_ops import EPS, ROW_OPS, RowOp, beside, restored
from weft.kernels.gpu import decomposed
from weft.kernels.gpu.activation import GROUP
from weft.kernels.gpu.all_gather import METHODS as GATHERS
from weft.kernels.gpu.all_gather import all_gather, all_gather_workspace
from weft.kernels.gpu.all_gather_grouped_matmul import (
    GatherGroupsWorkspace,
    all_gather_grouped_matmul,
    all_gather_grouped_matmul_workspace,
    make_plan,
)
from weft.kernels.gpu.all_gather_matmul import (
    GatherWorkspace,
    all_gather_matmul,
    all_gather_matmul_workspace,
)
from weft.kernels.gpu.all_reduce import METHODS as REDUCES
from weft.kernels.gpu.all_reduce import all_reduce, all_reduce_workspace
from weft.kernels.gpu.all_reduce_norm import all_reduce_rms_norm, all_reduce_rms_norm_workspace
from weft.kernels.gpu.attention import PagedBatch, paged_attention
from weft.kernels.gpu.decode_attention import decode_attention
from weft.kernels.gpu.distributed_decode_attention import (
    distributed_decode_attention,
    distributed_decode_attention_workspace,
)
from weft.kernels.gpu.epilogue import FP8, Epilogue
from weft.kernels.gpu.expert_tokens import Arrived, ExpertWorkspace
from weft.kernels.gpu.grouped_matmul import grouped_matmul
from weft.kernels.gpu.grouped_matmul_reduce_scatter import (
    grouped_matmul_reduce_scatter,
    grouped_matmul_reduce_scatter_workspace,
)
from weft.kernels.gpu.matmul import matmul
from weft.kernels.gpu.matmul_reduce_scatter import (
    matmul_all_reduce,
    matmul_all_reduce_workspace,
    matmul_reduce_scatter,
    matmul_reduce_scatter_workspace,
)
from weft.kernels.gpu.mla_attention import mla_decode_attention
from weft.kernels.gpu.moe_dispatch import (
    LowLatencyWorkspace,
    moe_combine,
    moe_dispatch,
    moe_workspace,
)
from weft.kernels.gpu.moe_dispatch_two_level import (
    TwoLevelExpertWorkspace,
    moe_combine_two_level,
    moe_dispatch_two_level,
    moe_two_level_workspace,
)
from weft.kernels.gpu.placement import Placement, balanced
from weft.kernels.gpu.reduce_scatter import METHODS as SCATTERS
from weft.kernels.gpu.reduce_scatter import reduce_scatter, reduce_scatter_workspace
from weft.kernels.gpu.sequence_parallel_attention import (
    CHUNK,
    sequence_parallel_attention,
    sequence_parallel_attention_workspace,
)
from weft.kernels.gpu.workspace import Workspace
from weft.kernels.symmetric.memory import Home

Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What one call of an op is made for.

    Attributes:
        world: ranks.
        m: rows that a rank has, or will have.
        n, k: columns of the weight, and its rows, on one rank.
        tile: BLOCK_M, BLOCK_N, BLOCK_K; what the op takes by itself if empty.
        programs: of the product; what the op takes by itself if 0.
        chunk: numbers that have a signal of their own; what the op takes by itself if 0.
    """

    world: int
    m: int
    n: int
    k: int
    dtype: torch.dtype
    tile: tuple[int, ...] = ()
    programs: int = 0
    chunk: int = 0

    @property
    def chunks(self) -> dict[str, int]:
        """For the workspaces that are told of it."""
        return {"chunk": self.chunk} if self.chunk else {}


@dataclass(frozen=True, slots=True)
class Op:
    """One op, with what is needed to call it at any sizes.

    Attributes:
        function: (*tensors, workspace, **options) -> result, on each rank.
        oracle: of each tensor a list by rank -> results by rank.
        shapes: of the tensors, on one rank.
        workspace: made on each rank.
        tiled: takes `blocks` and `programs`.
        options: further ones.
        targets: of aot.py, that have what it takes; all if empty.
        far: ranks have no address of those of other nodes, and put to them.
        tolerance: absolute and relative, where it is more than suite.py's.
    """

    name: str
    function: Callable[..., Tensor]
    oracle: Callable[..., list[Tensor]]
    shapes: Callable[[Sizes], Shapes]
    workspace: Callable[[Home, Sizes], Workspace]
    tiled: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    targets: tuple[str, ...] = ()
    far: bool = False
    tolerance: float = 0.0

    def reach(self, world_size: int) -> int | None:
        """Of how many ranks, its node's, a rank has addresses; None for all."""
        return _node(world_size) if self.far else None

    def call(self, tensors: Sequence[Tensor], workspace: Workspace, sizes: Sizes) -> Tensor:
        """One rank's result."""
        options = dict(self.options)
        if self.tiled and sizes.tile:
            options |= {"blocks": sizes.tile, "programs": sizes.programs}
        return self.function(*tensors, workspace, **options)


NVIDIA = ("sm_80", "sm_90", "sm_100")
HOPPER = ("sm_90", "sm_100")
CONVERTS = (*HOPPER, "gfx942")
"""That have fp8, be it to store it only."""
METHOD_TARGETS = {"ll128": NVIDIA, "multimem": HOPPER}
FP8_TOLERANCE = 0.07
"""Of numbers that are rounded to 3 bits behind the leading one."""


def _node(world_size: int) -> int:
    """Ranks of a node, for the methods of several nodes: as many nodes as there can be."""
    return 2 if world_size % 2 == 0 and world_size > 2 else 1


def _whole_units(numel: int) -> int:
    """At least as many, that fill units of 16 bytes."""
    return -(-numel // 8) * 8


def _name(op: str, method: str, far: bool) -> str:
    return op + (f"_{method}" if method != "push" else "") + ("_far" if far else "")


def _all_gather(method: str, *, far: bool = False) -> Op:
    return Op(
        _name("all_gather", method, far),
        all_gather,
        reference.all_gather,
        lambda s: [(s.m, _whole_units(s.k))],
        lambda home, s: all_gather_workspace(
            home,
            s.m * _whole_units(s.k),
            s.dtype,
            [method],
            ranks_per_node=_node(s.world),
            **s.chunks,
        ),
        options={} if method == "push" else {"method": method},
        targets=NVIDIA if far else METHOD_TARGETS.get(method, ()),
        far=far,
    )


def _reduce_scatter(method: str, *, far: bool = False) -> Op:
    return Op(
        _name("reduce_scatter", method, far),
        reduce_scatter,
        reference.reduce_scatter,
        lambda s: [(s.world * s.m, s.k)],
        lambda home, s: reduce_scatter_workspace(
            home, s.m * s.k, s.dtype, [method], ranks_per_node=_node(s.world), **s.chunks
        ),
        options={"method": method},
        targets=NVIDIA if far else (),
        far=far,
    )


def _all_reduce(method: str) -> Op:
    return Op(
        f"all_reduce_{method}",
        all_reduce,
        reference.all_reduce,
        lambda s: [(s.m, _whole_units(s.k))],
        lambda home, s: all_reduce_workspace(
            home, s.m * _whole_units(s.k), s.dtype, [method], **s.chunks
        ),
        options={"method": method},
        targets=METHOD_TARGETS.get(method, ()),
    )


def _product_beside_rows(x: Tensor, w: Tensor, workspace: Any, **options: Any) -> Tensor:
    """all_gather_matmul with the gathered rows, of one dtype, as columns to the right of it."""
    gathered = x.new_empty(workspace.world_size * len(x), x.shape[1])
    out = all_gather_matmul(x, w, workspace, gathered=gathered, **options)
    return torch.cat([out, gathered], dim=1)


def _product_beside_rows_oracle(xs: Sequence[Tensor], ws: Sequence[Tensor]) -> list[Tensor]:
    products, gathered = reference.all_gather_matmul(xs, ws), reference.all_gather(xs)
    return [torch.cat(pair, dim=1) for pair in zip(products, gathered, strict=True)]


def _gather_gate_up(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    residual: Tensor,
    workspace: GatherWorkspace,
    **options: Any,
) -> Tensor:
    """all_gather_matmul of two weights, and all that may follow."""
    epilogue = Epilogue(silu_multiply=True, residual=residual)
    return all_gather_matmul(x, (gate, up), workspace, epilogue=epilogue, **options)


def _gather_gate_up_oracle(
    xs: Sequence[Tensor], gates: Sequence[Tensor], ups: Sequence[Tensor], added: Sequence[Tensor]
) -> list[Tensor]:
    ws = [torch.cat(pair, dim=1) for pair in zip(gates, ups, strict=True)]
    totals = reference.all_gather_matmul(xs, ws)
    return [
        reference.epilogue(total, gate_up="halves", residual=residual)
        for total, residual in zip(totals, added, strict=True)
    ]


def in_fp8(op: Op, *, gathers: bool) -> Op:
    """The same of e4m3 operands, scaled by row and by column; the weight is transposed.

    Args:
        gathers: x travels, and not a product of it.
    """

    def function(
        x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, workspace: Any, **options: Any
    ) -> Tensor:
        epilogue = Epilogue(_positive(x_scale), _positive(w_scale), out_dtype=x.dtype)
        w = w.T.contiguous().to(FP8).T
        return op.function(x.to(FP8), w, workspace, epilogue=epilogue, **options)

    def oracle(
        xs: Sequence[Tensor],
        ws: Sequence[Tensor],
        x_scales: Sequence[Tensor],
        w_scales: Sequence[Tensor],
    ) -> list[Tensor]:
        left = [
            x.to(FP8).float() * _positive(s)[:, None] for x, s in zip(xs, x_scales, strict=True)
        ]
        right = [w.to(FP8).float() * _positive(s) for w, s in zip(ws, w_scales, strict=True)]
        return op.oracle(left, right)

    def shapes(sizes: Sizes) -> Shapes:
        x, w = op.shapes(sizes)
        return [x, w, x[:1], w[1:]]

    return replace(
        op,
        name=f"{op.name}_fp8",
        function=function,
        oracle=oracle,
        shapes=shapes,
        workspace=lambda home, s: op.workspace(home, replace(s, dtype=FP8) if gathers else s),
        targets=HOPPER,
    )


def _positive(scale: Tensor) -> Tensor:
    """At most 1, so that a sum is no less exact than without: float32."""
    return scale.float().sigmoid()


EXPERTS, TOP_K = 4, 2


def _plans(world: int, m: int, device: torch.device | None = None) -> Tensor:
    """Where the tokens of all ranks go, by their number alone: each to TOP_K experts."""
    numbers = torch.Generator().manual_seed(m)
    scores = torch.rand(world, m, EXPERTS, generator=numbers)
    weights, ids = scores.topk(TOP_K, dim=2)
    plans = [make_plan(*both, EXPERTS) for both in zip(ids, weights, strict=True)]
    return torch.stack(plans).to(device)


def _grouped(x: Tensor, *ws: Any, **options: Any) -> Tensor:
    """grouped_matmul of one weight, or of gate and up, where a plan of m tokens sends them."""
    *weights, _ = ws
    offsets = _plans(1, len(x) // TOP_K, x.device)[0, : EXPERTS + 1].clone()
    offsets[-1] = len(x)
    silu = Epilogue(silu_multiply=len(weights) > 1)
    return grouped_matmul(x, weights, offsets, epilogue=options.pop("epilogue", silu), **options)


def _grouped_oracle(xs: Sequence[Tensor], *ws: Sequence[Tensor]) -> list[Tensor]:
    results = []
    for x, *weights in zip(xs, *ws, strict=True):
        offsets = _plans(1, len(x) // TOP_K)[0, : EXPERTS + 1].clone()
        offsets[-1] = len(x)
        product = reference.grouped_matmul(x, torch.cat(weights, dim=2), offsets)
        gate_up = "halves" if len(weights) > 1 else ""
        results.append(reference.epilogue(product, gate_up=gate_up))
    return results


def _to_fp8(w: Tensor) -> Tensor:
    """e4m3, the transposes of [N, K]."""
    return w.mT.contiguous().to(FP8).mT


def _grouped_fp8(x: Tensor, w: Tensor, workspace: Workspace, **options: Any) -> Tensor:
    scales = torch.full((len(x),), 0.5, device=x.device), torch.full((EXPERTS, 1), 2.0).to(x.device)
    epilogue = Epilogue(*scales, out_dtype=x.dtype)
    return _grouped(x.to(FP8), _to_fp8(w), workspace, epilogue=epilogue, **options)


def _gather_experts(x: Tensor, *ws: Any, **options: Any) -> Tensor:
    """all_gather_grouped_matmul of one weight, or of gate and up."""
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


def _of_experts(
    name: str, function: Callable[..., Tensor], weights: int = 1, *, fp8: bool = False
) -> Op:
    """An op of tensor-parallel experts, or of the experts of one rank."""
    gathers, scatters = "all_gather" in name, "reduce_scatter" in name
    oracle: Callable[..., list[Tensor]] = _grouped_oracle
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
    """Here, each rank has a weight of its own."""
    return [
        beside(reference.all_reduce_rms_norm(xs, residuals, weight[0], EPS)[rank])
        for rank, weight in enumerate(weights)
    ]


HEADS, KV_HEADS, PAGE, SCALE = 4, 2, 16, 0.2
CONTEXTS = (40, 1, 17, 90)
"""Of the requests that decode, in turns."""


def _head_dim(s: Sizes) -> int:
    return -(-s.k // 2) * 2 if s.k <= 256 else 128


def _step(m: int, decodes: bool, world: int = 1) -> tuple[Any, Any, Any]:
    """query_start, context_len and block_table of a step with m queries; the latter of each rank.

    They are m decodes, or a chunk of a prefill and another one, which is empty if m is 1.
    """
    queries = [1] * m if decodes else [m - m // 2, m // 2]
    contexts = [CONTEXTS[b % 4] if decodes else count + 7 for b, count in enumerate(queries)]
    width = -(-max(contexts) // (PAGE * world))
    table = np.arange(len(queries) * width, dtype=np.int32)[::-1].reshape(-1, width)
    return np.cumsum([0, *queries], dtype=np.int32), np.array(contexts, np.int32), table


def _cast_to_fp8(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The cache in fp8, and all that attention has besides."""
    half, sinks = torch.full((KV_HEADS,), 0.5), torch.arange(HEADS) / HEADS
    scales = {"k_scale": half.to(keys.device), "v_scale": 2 * half.to(keys.device)}
    more = {"sliding_window": 9, "softcap": 2.0, "sinks": sinks.to(keys.device), **scales}
    return keys.to(FP8), values.to(FP8), more


def _common(q: Tensor) -> Tensor:
    """The same on all ranks."""
    return torch.arange(q.numel(), device=q.device).sin().to(q.dtype).view(q.shape)


def _attention(name: str, decodes: bool, fp8: bool = False, **options: Any) -> Op:
    """One of the attention ops, over a cache [blocks, KV_HEADS, PAGE, D]."""
    shared = name == "distributed_decode_attention"

    def attend(
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        workspace: Any,
        blocks: Any = None,
        programs: int = 0,
        **tile: Any,
    ) -> Tensor:
        size = workspace.world_size if shared else 1
        step = _step(len(q), decodes, size)
        batch = PagedBatch.build(*step, block_size=PAGE, device=q.device, world_size=size)
        if fp8:
            keys, values, more = _cast_to_fp8(keys, values)
        how = {**options, **tile, **(more if fp8 else {}), "scale": SCALE}
        how["blocks"] = blocks and blocks[:2]
        if shared:
            return distributed_decode_attention(_common(q), keys, values, batch, workspace, **how)
        op = decode_attention if decodes else paged_attention
        return op(q, keys, values, batch, **how)

    def oracle(
        qs: Sequence[Tensor], keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> list[Tensor]:
        starts, lengths, table = (x.tolist() for x in _step(len(qs[0]), decodes))
        if shared:
            tables = [_step(len(qs[0]), True, len(qs))[2].tolist()] * len(qs)
            return reference.distributed_decode_attention(
                [_common(q) for q in qs], keys, values, lengths, tables, scale=SCALE
            )
        out = []
        for q, k, v in zip(qs, keys, values, strict=True):
            k, v, more = _cast_to_fp8(k, v) if fp8 else (k, v, {})
            step = (starts, lengths, table)
            out.append(reference.paged_attention(q, k, v, *step, scale=SCALE, **more))
        return out

    def rows(s: Sizes) -> int:  # fewer, for each has programs of its own
        return -(-s.m // (8 if decodes else 2))

    def shapes(s: Sizes) -> Shapes:
        blocks = _step(rows(s), decodes, s.world if shared else 1)[2].size
        cache = (blocks, KV_HEADS, PAGE, _head_dim(s))
        return [(rows(s), HEADS, _head_dim(s)), cache, cache]

    def workspace(home: Home, s: Sizes) -> Workspace:
        if shared:
            made = (rows(s), HEADS, _head_dim(s), s.dtype)
            return distributed_decode_attention_workspace(home, *made)
        return Workspace(home, name, 1, s.dtype, 1)

    targets = (*HOPPER, "gfx942") if fp8 else ()
    return Op(name, attend, oracle, shapes, workspace, tiled=True, targets=targets)


def _latents(s: Sizes) -> tuple[int, int, int]:
    """H, R and P: those of DeepSeek-V2 on one rank or on 8, or small ones."""
    return (128 if s.k > 512 else 16, 512, 64) if s.k > 128 else (HEADS, s.k, 8)


def _mla_decode_attention(fp8: bool = False) -> Op:
    def cached(latents: Tensor) -> tuple[Tensor, dict[str, Any]]:
        rope = 64 if latents.shape[2] > 136 else 8
        more: dict[str, Any] = {"kv_lora_rank": latents.shape[2] - rope, "scale": SCALE}
        if fp8:
            latents, more["kv_scale"] = latents.to(FP8), torch.full((1,), 0.5).to(latents.device)
        return latents, more

    def attend(
        q: Tensor, latents: Tensor, workspace: Any, blocks: Any = None, programs: int = 0
    ) -> Tensor:
        batch = PagedBatch.build(*_step(len(q), True), block_size=PAGE, device=q.device)
        latents, more = cached(latents)
        return mla_decode_attention(
            q, latents, batch, splits=2, blocks=blocks and blocks[:2], **more
        )

    def oracle(qs: Sequence[Tensor], latents: Sequence[Tensor]) -> list[Tensor]:
        step = [x.tolist() for x in _step(len(qs[0]), True)]
        return [
            reference.mla_decode_attention(q, each, *step, **more)
            for q, (each, more) in zip(qs, map(cached, latents), strict=True)
        ]

    def shapes(s: Sizes) -> Shapes:
        heads, rank, rope = _latents(s)
        rows = -(-s.m // 8)
        return [(rows, heads, rank + rope), (_step(rows, True)[2].size, PAGE, rank + rope)]

    return Op(
        "mla_decode_attention" + ("_fp8" if fp8 else ""),
        attend,
        oracle,
        shapes,
        lambda home, s: Workspace(home, "mla_decode_attention", 1, s.dtype, 1),
        tiled=True,
        targets=CONVERTS if fp8 else (),
    )


def _sequence_parallel_attention(zigzag: bool) -> Op:
    """Of one sequence, or of three by zigzag; m is even."""

    def starts(m: int, world: int) -> Any:
        return [0, m * world // 3, m * world // 2] if zigzag else None

    def attend(
        q: Tensor, k: Tensor, v: Tensor, workspace: Any, blocks: Any = None, programs: int = 0
    ) -> Tensor:
        begun = starts(len(q), workspace.world_size)
        if begun is not None:
            begun = torch.tensor(begun, dtype=torch.int32, device=q.device)
        how = {"query_start": begun, "zigzag": zigzag, "blocks": blocks and blocks[:2]}
        return sequence_parallel_attention(
            *(q, k, v, workspace), scale=SCALE, programs=programs, **how
        )

    def oracle(qs: Sequence[Tensor], *kv: Sequence[Tensor]) -> list[Tensor]:
        order = {"query_start": starts(len(qs[0]), len(qs)), "zigzag": zigzag}
        return reference.sequence_parallel_attention(qs, *kv, scale=SCALE, **order)

    def rows(s: Sizes) -> int:
        return 2 * -(-s.m // 8)

    return Op(
        "sequence_parallel_attention" + ("_zigzag" if zigzag else ""),
        attend,
        oracle,
        lambda s: [(rows(s), heads, _head_dim(s)) for heads in (HEADS, KV_HEADS, KV_HEADS)],
        lambda home, s: sequence_parallel_attention_workspace(
            *(home, rows(s), KV_HEADS, _head_dim(s), s.dtype), 4 if s.tile else CHUNK
        ),
        tiled=True,
    )


def _top_k(world_size: int) -> int:
    """Experts of a token, in the ops that route."""
    return min(8, world_size + 1)


def _few(m: int) -> int:
    """Tokens of a rank in decode: fewer than other ops have rows."""
    return -(-m // 4)


def _placement(world_size: int) -> Placement:
    """Of one expert more than ranks, in two slots of each rank: most have a replica."""
    return balanced([1.0] * (world_size + 1), world_size, 2)


def _route(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The ids and weights of the best experts: int32 and float32 [m, k]."""
    best = scores.float().topk(_top_k(scores.shape[1] - 1))
    return best.indices.to(torch.int32), best.values.softmax(dim=1)


def _as_experts(rows: Tensor, offsets: Tensor, experts: Sequence[int]) -> Tensor:
    """Experts that multiply by their number and 1."""
    at = torch.arange(len(rows), device=rows.device, dtype=torch.int32)
    slots = torch.searchsorted(offsets, at, right=True).clamp(1, len(experts)) - 1
    factors = torch.tensor(experts, device=rows.device)[slots] + 1
    return (rows * factors[:, None]).to(rows.dtype)


def _outputs(sent: Arrived, workspace: ExpertWorkspace) -> Tensor:
    """What such experts make of what has come to a rank."""
    rows = sent.rows if sent.scales is None else restored((sent.rows, sent.scales))
    experts = workspace.placement.experts(workspace.rank)
    return _as_experts(rows.to(workspace.dtype), sent.offsets, experts)


def _moe(x: Tensor, scores: Tensor, workspace: LowLatencyWorkspace) -> Tensor:
    """moe_dispatch, such experts, and moe_combine."""
    ids, weights = _route(scores)
    sent = moe_dispatch(x, ids, workspace)
    return moe_combine(_outputs(sent, workspace), weights, sent, workspace)


def _moe_two_level(x: Tensor, scores: Tensor, workspace: TwoLevelExpertWorkspace) -> Tensor:
    """The same by way of one rank of each node."""
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


def _all_to_all(name: str, *, two_level: bool = False, fp8: bool = False, far: bool = False) -> Op:
    """Expert parallelism's; rows are wide where they have several scales."""
    width, wire = (16, FP8) if fp8 else (1, None)

    def workspace(home: Home, s: Sizes) -> Workspace:
        made = (_few(s.m), width * s.k, _top_k(s.world), s.dtype, _placement(s.world))
        if two_level:
            chunk: dict[str, Any] = {"chunk": 8} if s.chunk else {}
            node = _node(s.world)
            return moe_two_level_workspace(home, *made, ranks_per_node=node, wire=wire, **chunk)
        return moe_workspace(home, *made, wire=wire)

    return Op(
        name,
        _moe_two_level if two_level else _moe,
        _moe_fp8_oracle if fp8 else _moe_oracle,
        lambda s: [(_few(s.m), width * s.k), (_few(s.m), s.world + 1)],
        workspace,
        targets=NVIDIA if far else CONVERTS if fp8 else (),
        far=far,
    )


OVERLAPPED = (
    Op(
        "all_gather_matmul",
        all_gather_matmul,
        reference.all_gather_matmul,
        lambda s: [(s.m, s.k), (s.k, s.n)],
        lambda home, s: all_gather_matmul_workspace(home, s.m, s.k, s.dtype, *s.tile[:1]),
        tiled=True,
    ),
    Op(
        "matmul_reduce_scatter",
        matmul_reduce_scatter,
        reference.matmul_reduce_scatter,
        lambda s: [(s.world * s.m, s.k), (s.k, s.n)],
        lambda home, s: matmul_reduce_scatter_workspace(home, s.m, s.n, s.dtype, *s.tile[:2]),
        tiled=True,
    ),
    Op(
        "matmul_all_reduce",
        matmul_all_reduce,
        reference.matmul_all_reduce,
        lambda s: [(s.m, s.k), (s.k, s.n)],
        lambda home, s: matmul_all_reduce_workspace(home, s.m, s.n, s.dtype, *s.tile[:2]),
        tiled=True,
    ),
)

OPS = (
    *(_all_gather(method) for method in GATHERS),
    *(_reduce_scatter(method) for method in SCATTERS),
    _all_gather("two_level", far=True),
    _reduce_scatter("two_level", far=True),
    *(_all_reduce(method) for method in REDUCES),
    *OVERLAPPED,
    Op(
        "all_gather_matmul_mesh",
        _product_beside_rows,
        _product_beside_rows_oracle,
        lambda s: [(s.m, s.k), (s.k, s.n)],
        lambda home, s: all_gather_matmul_workspace(home, s.m, s.k, s.dtype, *s.tile[:1]),
        tiled=True,
        options={"topology": "mesh"},
    ),
    Op(
        "all_gather_gate_up",
        _gather_gate_up,
        _gather_gate_up_oracle,
        lambda s: [(s.m, s.k), (s.k, s.n), (s.k, s.n), (s.world * s.m, s.n)],
        lambda home, s: all_gather_matmul_workspace(home, s.m, s.k, s.dtype, *s.tile[:1]),
        tiled=True,
    ),
    *(in_fp8(op, gathers=op.name == "all_gather_matmul") for op in OVERLAPPED),
    Op(
        "matmul",
        lambda x, w, workspace, **options: matmul(x, w, **options),
        lambda xs, ws: [x.float() @ w.float() for x, w in zip(xs, ws, strict=True)],
        lambda s: [(s.m, s.k), (s.k, s.n)],
        lambda home, s: Workspace(home, "matmul", 1, s.dtype, 1),
        tiled=True,
    ),
    _of_experts("grouped_matmul", _grouped),
    _of_experts("grouped_gate_up", _grouped, 2),
    _of_experts("grouped_matmul_fp8", _grouped_fp8, fp8=True),
    _of_experts("all_gather_grouped_matmul", _gather_experts),
    _of_experts("all_gather_grouped_gate_up", _gather_experts, 2),
    _of_experts("all_gather_grouped_matmul_fp8", _gather_experts_fp8, fp8=True),
    _of_experts("grouped_matmul_reduce_scatter", _scatter_experts),
    _of_experts("grouped_matmul_reduce_scatter_fp8", _scatter_experts_fp8, fp8=True),
    *(
        Op(
            f"decomposed_all_gather_matmul_{method}",
            decomposed.all_gather_matmul,
            reference.all_gather_matmul,
            lambda s: [(s.m, s.k), (s.k, s.n)],
            lambda home, s: decomposed.all_gather_matmul_workspace(home, s.m, s.k, s.dtype),
            options={"method": method},
        )
        for method in get_args(decomposed.Method)
    ),
    *(
        Op(
            f"decomposed_matmul_reduce_scatter_{method}",
            decomposed.matmul_reduce_scatter,
            reference.matmul_reduce_scatter,
            lambda s: [(s.world * s.m, s.k), (s.k, s.n)],
            lambda home, s: decomposed.matmul_reduce_scatter_workspace(home, s.m, s.n, s.dtype),
            options={"method": method},
        )
        for method in get_args(decomposed.Method)
    ),
    Op(
        "decomposed_matmul_all_reduce",
        decomposed.matmul_all_reduce,
        reference.matmul_all_reduce,
        lambda s: [(s.m, s.k), (s.k, s.n)],
        lambda home, s: decomposed.matmul_all_reduce_workspace(home, s.m, s.n, s.dtype),
    ),
    *(_alone(op) for op in ROW_OPS),
    Op(
        "all_reduce_rms_norm",
        _all_reduce_rms_norm,
        _all_reduce_rms_norm_oracle,
        lambda s: [(s.m, s.k), (s.m, s.k), (1, s.k)],
        lambda home, s: all_reduce_rms_norm_workspace(home, s.m, s.k, s.dtype),
    ),
    _attention("paged_attention", decodes=False),
    _attention("paged_attention_fp8", decodes=False, fp8=True),
    _attention("decode_attention", decodes=True, splits=4),
    _attention("distributed_decode_attention", decodes=True, splits=2),
    _mla_decode_attention(),
    _mla_decode_attention(fp8=True),
    _sequence_parallel_attention(zigzag=False),
    _sequence_parallel_attention(zigzag=True),
    _all_to_all("moe_dispatch_combine"),
    _all_to_all("moe_dispatch_combine_fp8", fp8=True),
    _all_to_all("moe_two_level", two_level=True),
    _all_to_all("moe_two_level_fp8", two_level=True, fp8=True),
    _all_to_all("moe_two_level_far", two_level=True, far=True),
)


def named(names: Sequence[str]) -> tuple[Op, ...]:
    """The ops of these names, all for none.

    Raises:
        ConfigError: there is none of that name.
    """
    known = [op.name for op in OPS]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            raise ConfigError(f"op is {name!r}{meant}; it must be one of {', '.join(known)}")
    return tuple(op for op in OPS if not names or op.name in names)
