"""Paged attention on a GPU, for ragged batches of prefill chunks and decodes.

    paged_attention(q [T, H, D], keys, values [num_blocks, Hk, page, D], batch) -> [T, H, D]

The modules, by data flow: inputs.py checks the arguments, tile.py cuts the work, and
kernel.py has the kernel. This module has the op and launches the kernel.

Not supported: non-causal attention, gradients.
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from weft.kernels.gpu.attention.inputs import Options, PagedBatch, check_attention
from weft.kernels.gpu.attention.kernel import Batch, Cache, Form, attend
from weft.kernels.gpu.attention.tile import (
    Served,
    Tile,
    checked_tile,
    count_tiles,
    heads_of_tile,
    is_decode,
)
from weft.kernels.gpu.runtime.arguments import require
from weft.kernels.gpu.tuning.search import Choice


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    lse: Tensor | None = None,
    blocks: tuple[int, int] | None = None,
    warps: int = 0,
    stages: int = 0,
    choice: Choice | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> Tensor:
    """Compute causal attention between the step's queries and their requests' pages.

    Args:
        q: [T, H, D], float32, float16 or bfloat16; a token's heads contiguous. Query head h reads
            KV head h // (H / Hk). D is at most 256, H / Hk at most 128.
        keys, values: contiguous [num_blocks, Hk, page, D], q's dtype or float8_e4m3fn; they already
            include the step's tokens.
        batch: the step's requests. The kernel flags a bad request in the batch's status.
        scale, sliding_window, softcap, sinks, k_scale, v_scale, lse: see Options.
        blocks: BLOCK_M and BLOCK_N of a tile; None to choose.
        warps, stages: compile options of the kernel; 0 to choose.
        choice: tuned tiles, used if blocks is None.
        rank, world_size: the owner of these pages, if ranks share each request's pages: see
            PagedBatch. A query that sees no key here has a result of 0, and an LSE of -inf.

    Returns:
        [T, H, D], q's dtype. A flagged request has zeros in some or all of its rows.

    Raises:
        KernelError: the tensors do not match, or an argument is invalid.
    """
    check = functools.partial(require, "paged_attention")
    options = Options(scale, sliding_window, softcap, sinks, k_scale, v_scale, lse)
    check(
        "rank",
        rank,
        0 <= rank < world_size,
        f"be in [0, {world_size}) for {world_size} ranks",
    )
    once = sinks is None or world_size == 1
    check("sinks", "given", once, "be None where ranks share pages: a sink counts only once")
    check_attention(check, q, keys, values, batch, options, world_size)
    config = None
    if choice and blocks is None:
        config = choice.of_attention(q, keys, batch.max_queries, batch.max_context)
    tile = checked_tile(check, q, keys, batch, blocks, warps, stages, config)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch_attend(q, keys, values, batch, out, lse, tile, options, rank=rank, world_size=world_size)
    return out


def launch_attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor | None,
    batch: PagedBatch,
    out: Tensor,
    lse: Tensor | None,
    tile: Tile,
    options: Options,
    *,
    splits: int = 1,
    served: Served = Served.ANY,
    sinks: bool = True,
    rank: int = 0,
    world_size: int = 1,
) -> None:
    """Launch `attend`. The caller has checked the arguments.

    Args:
        values: None if values are the first D numbers of the keys.
        out: [T, H, D], or [splits, rows, H, D] with a row for each token; with `served` ONE, for
            each request.
        lse: float32, as out without its last axis, or None.
        served: the requests to serve.
        sinks: add the sinks here. False if they are added later, where parts are merged.
        rank, world_size: the owner of the pages.
    """
    if not q.numel():
        return
    (_, heads, width), (num_blocks, kv_heads, page, _) = q.shape, keys.shape
    dim = out.shape[-1]
    group = heads_of_tile(heads // kv_heads, tile)
    alone = is_decode(q, batch)
    attend[(count_tiles(q, batch, tile, group, served), heads // group, splits)](
        q=q,
        cache=Cache(keys, values, options.k_scale, options.v_scale),
        batch=Batch(
            None if alone else batch.query_start,
            batch.context_len,
            batch.block_table,
            batch.status,
        ),
        sinks=options.sinks if sinks else None,
        out=out,
        lse=lse,
        scale=options.scale,
        rows=out.shape[-3],
        requests=len(batch.context_len),
        table_width=batch.block_table.shape[1],
        num_blocks=num_blocks,
        q_stride=q.stride(0),
        rank=rank,
        WORLD=world_size,
        SPLITS=splits,
        FORM=Form(
            heads=heads,
            kv_heads=kv_heads,
            group=group,
            page=page,
            dim=dim,
            rope=width - dim,
            window=options.sliding_window or 0,
            softcap=options.softcap or 0.0,
            served=int(Served.ONE if alone else served),
            block_m=tile.block_m,
            block_n=tile.block_n,
            block_d=max(16, triton.next_power_of_2(dim)),
            block_r=max(16, triton.next_power_of_2(width - dim)),
        ),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
