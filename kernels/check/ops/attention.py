"""Check entries for attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from weft.kernels import reference
from weft.kernels.check.ops.op import CONVERTS, HOPPER, Op, Shapes, Sizes
from weft.kernels.gpu.attention.decode import decode_attention
from weft.kernels.gpu.attention.distributed_decode import (
    distributed_decode_attention,
    distributed_decode_attention_workspace,
)
from weft.kernels.gpu.attention.inputs import PagedBatch
from weft.kernels.gpu.attention.mixed import mixed_attention
from weft.kernels.gpu.attention.mla import mla_decode_attention
from weft.kernels.gpu.attention.paged import paged_attention
from weft.kernels.gpu.attention.sequence_parallel import (
    CHUNK,
    sequence_parallel_attention,
    sequence_parallel_attention_workspace,
)
from weft.kernels.gpu.matmul.epilogue import FP8
from weft.kernels.gpu.runtime.workspace import Workspace
from weft.kernels.symmetric.memory import Home

HEADS, KV_HEADS, PAGE, SCALE = 4, 2, 16, 0.2
CONTEXTS = (40, 1, 17, 90)
"""Context lengths of decoding requests, used in turn."""

Batch = Literal["decodes", "prompts", "mixed"]
"""The requests of a step: with one query each, with more, or both."""


def _head_dim(s: Sizes) -> int:
    return -(-s.k // 2) * 2 if s.k <= 256 else 128


def _queries(m: int, batch: Batch) -> list[int]:
    """Return each request's queries, m together.

    Prompts are two chunks; the second is empty if m is 1. In a mixed step, decodes come before a
    prompt, and one after it: [1, 1, 5, 1] for m = 8. Three queries are a decode and a prompt.
    """
    if batch == "decodes":
        return [1] * m
    if batch == "prompts":
        return [m - m // 2, m // 2]
    before, after = min(m, 1 + m // 8), int(m > 3)
    return [1] * before + [m - before - after] + [1] * after


def _step(m: int, batch: Batch, world: int = 1) -> tuple[Any, Any, Any]:
    """Build query_start, context_len and block_table (on each rank) for a step with m queries."""
    queries = _queries(m, batch)
    alone = [count == 1 and batch != "prompts" for count in queries]
    contexts = [CONTEXTS[b % 4] if alone[b] else count + 7 for b, count in enumerate(queries)]
    width = -(-max(contexts) // (PAGE * world))
    table = np.arange(len(queries) * width, dtype=np.int32)[::-1].reshape(-1, width)
    return np.cumsum([0, *queries], dtype=np.int32), np.array(contexts, np.int32), table


def _cast_to_fp8(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Cast the cache to fp8, and use all other attention options."""
    half, sinks = torch.full((KV_HEADS,), 0.5), torch.arange(HEADS) / HEADS
    scales = {"k_scale": half.to(keys.device), "v_scale": 2 * half.to(keys.device)}
    more = {"sliding_window": 9, "softcap": 2.0, "sinks": sinks.to(keys.device), **scales}
    return keys.to(FP8), values.to(FP8), more


def _common(q: Tensor) -> Tensor:
    """Return the same queries on all ranks."""
    return torch.arange(q.numel(), device=q.device).sin().to(q.dtype).view(q.shape)


def _attention(name: str, kind: Batch, fp8: bool = False, **options: Any) -> Op:
    """Make an entry for an attention op, over a cache [blocks, KV_HEADS, PAGE, D]."""
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
        step = _step(len(q), kind, size)
        batch = PagedBatch.build(*step, block_size=PAGE, device=q.device, world_size=size)
        if fp8:
            keys, values, more = _cast_to_fp8(keys, values)
        how = {**options, **tile, **(more if fp8 else {}), "scale": SCALE}
        how["blocks"] = blocks and blocks[:2]
        if shared:
            return distributed_decode_attention(_common(q), keys, values, batch, workspace, **how)
        ops: dict[Batch, Callable[..., Tensor]] = {
            "decodes": decode_attention,
            "prompts": paged_attention,
            "mixed": mixed_attention,
        }
        return ops[kind](q, keys, values, batch, **how)

    def oracle(
        qs: Sequence[Tensor], keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> list[Tensor]:
        starts, lengths, table = (x.tolist() for x in _step(len(qs[0]), kind))
        if shared:
            tables = [_step(len(qs[0]), kind, len(qs))[2].tolist()] * len(qs)
            return reference.distributed_decode_attention(
                [_common(q) for q in qs], keys, values, lengths, tables, scale=SCALE
            )
        out = []
        for q, k, v in zip(qs, keys, values, strict=True):
            k, v, more = _cast_to_fp8(k, v) if fp8 else (k, v, {})
            step = (starts, lengths, table)
            out.append(reference.paged_attention(q, k, v, *step, scale=SCALE, **more))
        return out

    def rows(s: Sizes) -> int:  # fewer rows, because each has its own programs
        return -(-s.m // (8 if kind == "decodes" else 2))

    def shapes(s: Sizes) -> Shapes:
        blocks = _step(rows(s), kind, s.world if shared else 1)[2].size
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
    """Choose H, R and P: DeepSeek-V2's on one rank or on 8, or small ones."""
    return (128 if s.k > 512 else 16, 512, 64) if s.k > 128 else (HEADS, s.k, 8)


def _mla_decode_attention(fp8: bool = False) -> Op:
    def cached(latents: Tensor) -> tuple[Tensor, dict[str, Any]]:
        rope = 64 if latents.shape[2] > 136 else 8
        more: dict[str, Any] = {"kv_lora_rank": latents.shape[2] - rope, "scale": SCALE}
        if fp8:
            latents, more["kv_scale"] = latents.to(FP8), torch.full((1,), 0.5).to(latents.device)
        return latents, more

    def attend(
        q: Tensor,
        latents: Tensor,
        workspace: Any,
        blocks: Any = None,
        programs: int = 0,
        **tile: Any,
    ) -> Tensor:
        batch = PagedBatch.build(*_step(len(q), "decodes"), block_size=PAGE, device=q.device)
        latents, more = cached(latents)
        how = {"splits": 2, **tile, "blocks": blocks and blocks[:2]}
        return mla_decode_attention(q, latents, batch, **how, **more)

    def oracle(qs: Sequence[Tensor], latents: Sequence[Tensor]) -> list[Tensor]:
        step = [x.tolist() for x in _step(len(qs[0]), "decodes")]
        return [
            reference.mla_decode_attention(q, each, *step, **more)
            for q, (each, more) in zip(qs, map(cached, latents), strict=True)
        ]

    def shapes(s: Sizes) -> Shapes:
        heads, rank, rope = _latents(s)
        rows = -(-s.m // 8)
        return [(rows, heads, rank + rope), (_step(rows, "decodes")[2].size, PAGE, rank + rope)]

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
    """Make an entry with one sequence, or with three and zigzag; m is even."""

    def starts(m: int, world: int) -> Any:
        return [0, m * world // 3, m * world // 2] if zigzag else None

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        workspace: Any,
        blocks: Any = None,
        programs: int = 0,
        **tile: Any,
    ) -> Tensor:
        begun = starts(len(q), workspace.world_size)
        if begun is not None:
            begun = torch.tensor(begun, dtype=torch.int32, device=q.device)
        how = {"query_start": begun, "zigzag": zigzag, "blocks": blocks and blocks[:2], **tile}
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


ATTENTION = (
    _attention("paged_attention", "prompts"),
    _attention("paged_attention_fp8", "prompts", fp8=True),
    _attention("decode_attention", "decodes", splits=4),
    _attention("mixed_attention", "mixed", splits=3),
    _attention("mixed_attention_fp8", "mixed", fp8=True, splits=3),
    _attention("distributed_decode_attention", "decodes", splits=2),
    _mla_decode_attention(),
    _mla_decode_attention(fp8=True),
    _sequence_parallel_attention(zigzag=False),
    _sequence_parallel_attention(zigzag=True),
)
