"""Attention over a paged cache, against a copy of its bytes, a product, and torch's attention.

Blocks of the cache lie in no order. torch's scaled_dot_product_attention has
keys and values of each request in one piece, and all requests of one length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from harness.ranks import alone
from harness.report import Case, Figure
from harness.timing import Times, copying, interleaved, ratio
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from layers.scale import Batch, Scale
from weft.kernels.gpu.attention.decode import decode_attention
from weft.kernels.gpu.attention.inputs import PagedBatch
from weft.kernels.gpu.attention.mla import mla_decode_attention
from weft.kernels.gpu.attention.paged import paged_attention
from weft.kernels.gpu.attention.sequence_parallel import (
    SequenceParallelWorkspace,
    sequence_parallel_attention,
    sequence_parallel_attention_workspace,
)
from weft.kernels.gpu.attention.tile import Tile
from weft.kernels.gpu.matmul.epilogue import FP8
from weft.kernels.gpu.runtime.workspace import Workspace
from weft.kernels.gpu.tuning.clock import Call
from weft.kernels.gpu.tuning.costs import latent_rank
from weft.kernels.symmetric.memory import Home

OURS, TORCH, COPY, PRODUCT = "as chosen", "torch", "copy", "product"


def decode(scale: Scale, repetitions: int) -> Iterator[Case]:
    """The bandwidth of attention over that of a copy."""
    for batch in scale.decodes:
        yield Case(str(batch), partial(_decode, scale, batch, repetitions))


def _decode(scale: Scale, batch: Batch, repetitions: int) -> Figure:
    q, keys, values, paged = operands(scale, batch)
    call = partial(decode_attention, q, keys, values, paged, scale=batch.head_dim**-0.5)
    nbytes = keys.nbytes + values.nbytes + 2 * q.nbytes
    calls: dict[str, Call] = {
        OURS: call,
        **_tiles(call, scale.decode_tiles),
        **{f"{count} splits": partial(call, splits=count) for count in scale.splits},
        TORCH: torch_attention(batch, q, keys, values, paged),
        COPY: copying(nbytes, scale.device),
    }
    times = interleaved(calls, repetitions, tiny=scale.tiny, graphs=True)
    return Figure(
        *ratio(times[COPY], times[OURS]),
        details={"GB/s": 1e-9 * nbytes / times[OURS].median, **_details(times)},
    )


def prefill(scale: Scale, repetitions: int) -> Iterator[Case]:
    """The rate of attention over that of a product."""
    for batch in scale.prefills:
        yield Case(str(batch), partial(_prefill, scale, batch, repetitions))


def _prefill(scale: Scale, batch: Batch, repetitions: int) -> Figure:
    q, keys, values, paged = operands(scale, batch)
    call = partial(paged_attention, q, keys, values, paged, scale=batch.head_dim**-0.5)
    m, n, k = scale.product
    x, w = scale.random(m, k), scale.random(k, n)
    calls: dict[str, Call] = {
        OURS: call,
        **_tiles(call, scale.prefill_tiles),
        TORCH: torch_attention(batch, q, keys, values, paged),
        PRODUCT: partial(torch.matmul, x, w),
    }
    times = interleaved(calls, repetitions, tiny=scale.tiny, graphs=True)
    operations = count_operations(batch)
    return Figure(
        *ratio(times[PRODUCT], times[OURS], operations / (2 * m * n * k)),
        details={"TFLOP/s": 1e-12 * operations / times[OURS].median, **_details(times)},
    )


def latents(scale: Scale, repetitions: int) -> Iterator[Case]:
    """The bandwidth of attention to latents over that of a copy."""
    for batch in scale.latents:
        yield Case(str(batch), partial(_latents, scale, batch, repetitions))


def _latents(scale: Scale, batch: Batch, repetitions: int) -> Figure:
    q, keys, _, paged = operands(scale, batch)
    rank = latent_rank(batch.head_dim)
    how: dict[str, Any] = {"kv_lora_rank": rank, "scale": batch.head_dim**-0.5}
    call = partial(mla_decode_attention, q, keys[:, 0], paged, **how)
    calls: dict[str, Call] = {
        OURS: call,
        **_tiles(call, scale.latent_tiles),
        **{f"{count} splits": partial(call, splits=count) for count in scale.splits},
        TORCH: torch_attention(batch, q, keys, keys[..., :rank], paged),
        COPY: copying(keys.nbytes + 2 * q.nbytes, scale.device),
    }
    times = interleaved(calls, repetitions, tiny=scale.tiny, graphs=True)
    bandwidth = 1e-9 * (keys.nbytes + 2 * q.nbytes) / times[OURS].median
    return Figure(*ratio(times[COPY], times[OURS]), details={"GB/s": bandwidth, **_details(times)})


def sequence(scale: Scale, repetitions: int) -> Iterator[Case]:
    """The rate of one rank's part of a prefill over that of a product.

    The others' keys have come before, and what it sends goes to memory of the same GPU.
    """
    for batch in scale.sequences:
        name = f"{batch}, 1 of {scale.world} ranks"
        yield Case(name, partial(_sequence, scale, batch, repetitions))


def _sequence(scale: Scale, batch: Batch, repetitions: int) -> Figure:
    tokens = batch.context // scale.world
    m, n, k = scale.product

    def make(home: Home) -> Workspace:
        made = (tokens, batch.kv_heads, batch.head_dim, scale.dtype)
        return sequence_parallel_attention_workspace(home, *made)

    def measure(home: Home, workspaces: list[Workspace]) -> dict[str, Times]:
        q = scale.random(tokens, batch.heads, batch.head_dim)
        keys, values = (scale.random(tokens, batch.kv_heads, batch.head_dim) for _ in range(2))
        how: dict[str, Any] = {"scale": batch.head_dim**-0.5, "zigzag": True}
        (workspace,) = workspaces
        assert isinstance(workspace, SequenceParallelWorkspace)
        call = partial(sequence_parallel_attention, q, keys, values, workspace, **how)
        calls: dict[str, Call] = {
            OURS: call,
            **_tiles(call, scale.prefill_tiles),
            PRODUCT: partial(torch.matmul, scale.random(m, k), scale.random(k, n)),
        }
        return interleaved(calls, repetitions, tiny=scale.tiny, graphs=True)

    times = alone(measure, [make], scale.world, scale.processors, tiny=scale.tiny)
    operations = count_operations(batch) / scale.world
    return Figure(
        *ratio(times[PRODUCT], times[OURS], operations / (2 * m * n * k)),
        details={"TFLOP/s": 1e-12 * operations / times[OURS].median, **_details(times)},
    )


def count_operations(batch: Batch) -> int:
    """Multiplications and additions of scores and of weighted values, of what is seen."""
    queries, earlier = batch.queries, batch.context - batch.queries
    seen = queries * earlier + queries * (queries + 1) // 2
    return 4 * batch.requests * batch.heads * batch.head_dim * seen


def operands(scale: Scale, batch: Batch) -> tuple[Tensor, Tensor, Tensor, PagedBatch]:
    """q [T, H, D], keys and values [num_blocks, Hk, page, D], and the requests."""
    pages = -(-batch.context // scale.page)
    count = batch.requests * pages
    keys, values = (
        scale.random(count, batch.kv_heads, scale.page, batch.head_dim) for _ in range(2)
    )
    if batch.fp8:
        keys, values = keys.to(FP8), values.to(FP8)
    table = np.random.default_rng(0).permutation(count).astype(np.int32)
    paged = PagedBatch.build(
        np.arange(batch.requests + 1, dtype=np.int32) * batch.queries,
        np.full(batch.requests, batch.context, np.int32),
        table.reshape(batch.requests, pages),
        block_size=scale.page,
        device=scale.device,
    )
    q = scale.random(batch.requests * batch.queries, batch.heads, batch.head_dim)
    return q, keys, values, paged


def torch_attention(
    batch: Batch, q: Tensor, keys: Tensor, values: Tensor, paged: PagedBatch
) -> Callable[[], Tensor]:
    """torch's attention of the same numbers, in q's dtype: [requests, heads, queries, D]."""

    def in_one_piece(cache: Tensor) -> Tensor:
        pages = cache[paged.block_table.long()].transpose(1, 2).flatten(2, 3)
        return pages[:, :, : batch.context].to(q.dtype).contiguous()

    by_request = q.view(batch.requests, batch.queries, *q.shape[1:]).transpose(1, 2).contiguous()
    pieces = in_one_piece(keys), in_one_piece(values)
    if batch.queries == 1 and batch.kv_heads == 1:  # else torch copies the latents for each head
        heads_as_queries = by_request.transpose(1, 2)
        return lambda: scaled_dot_product_attention(heads_as_queries, *pieces).transpose(1, 2)
    options: dict[str, Any] = {"enable_gqa": True}
    if batch.queries == batch.context:
        options["is_causal"] = True
    elif batch.queries > 1:
        options["attn_mask"] = causal_lower_right(batch.queries, batch.context)
    return partial(scaled_dot_product_attention, by_request, *pieces, **options)


def _tiles(call: Callable[..., Tensor], tiles: tuple[Tile, ...]) -> dict[str, Call]:
    return {
        f"{m}x{n}, {warps} warps, {stages}": partial(
            call, blocks=(m, n), warps=warps, stages=stages
        )
        for m, n, warps, stages in tiles
    }


def _details(times: dict[str, Times]) -> dict[str, float]:
    """Of what was chosen and of torch, and of the fastest if that is another one; in us."""
    ours = {name: t for name, t in times.items() if name not in (TORCH, COPY, PRODUCT)}
    best = min(ours, key=lambda name: ours[name].median)
    named = [name for name in dict.fromkeys((OURS, TORCH, best)) if name in times]
    return {f"us {name}": 1e6 * times[name].median for name in named}
