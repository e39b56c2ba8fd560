"""Attention for few queries over long contexts: a request's keys are split among programs.

    decode_attention(q [T, H, D], keys, values, batch) -> [T, H, D]

A small decode batch has fewer tiles than the GPU has processors. SPLITS programs therefore share
each tile's keys (split-KV: Flash-Decoding, Dao et al. 2023):

- `attend` (kernel.py) runs with SPLITS splits. Program (tile, head, s) reads the s-th range of the
  tile's blocks. It writes slot s of `parts` and `parts_lse`: the attention result for this range in
  float32, already divided by its weights' sum, and that sum's log (LSE). The LSE is -inf for a
  range without keys.
- `merge_splits` is the next launch, with one program per row. It weights each part by exp(LSE - the
  largest LSE), and adds the head's sink, if any, to the sum.

Both launches are on one stream, which orders them; there are no signals. Each call allocates its
own `parts`, so no slot is reused early.

`choose_splits` compares the predicted times of 1, 2, 4, ... splits (tuning/costs.py), for the
longest context known to the host. A captured CUDA graph keeps the SPLITS from its capture. Every
request's keys are cut into SPLITS ranges, even if there are few keys.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.attention.inputs import Options, PagedBatch, check_attention
from weft.kernels.gpu.attention.kernel import LN2, LOG2E
from weft.kernels.gpu.attention.paged import launch_attend
from weft.kernels.gpu.attention.tile import (
    Served,
    Tile,
    checked_tile,
    count_tiles,
    heads_of_tile,
    is_decode,
)
from weft.kernels.gpu.runtime.arguments import require
from weft.kernels.gpu.tuning.costs import Config, Problem, best_splits, count_processors, gpu_of
from weft.kernels.gpu.tuning.search import Choice

MAX_SPLITS = 64
PARTS = 16
"""Number of parts that a merge program loads at a time."""


@triton.jit(do_not_specialize=["rows"])
def merge_splits(
    parts,  # float32 [SPLITS, rows, D]
    parts_lse,  # float32 [SPLITS, rows]
    query_start,  # int32 [rows / HEADS + 1]; None if a row of parts is the same row of out
    sinks,  # [HEADS], or None
    out,  # [*, D]
    lse,  # float32 [*], or None
    rows,
    HEADS: tl.constexpr,  # row % HEADS is the row's head
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge one row's parts, weighted by their sums. Grid: (rows,).

    With query_start, parts have a row for each request and head, and requests with more than one
    query have no result here.
    """
    row = tl.program_id(0)
    place = row
    if query_start is not None:
        first = tl.load(query_start + row // HEADS)
        if tl.load(query_start + row // HEADS + 1) - first != 1:
            return
        place = first * HEADS + row % HEADS
    stride = tl.cast(rows, tl.int64)
    split = tl.arange(0, BLOCK_S)
    logs = tl.load(parts_lse + split * stride + row, mask=split < SPLITS, other=float("-inf"))
    top = tl.max(logs, axis=0)
    if sinks is not None:
        sink = tl.load(sinks + row % HEADS).to(tl.float32)
        top = tl.maximum(top, sink)
    flagged = top == float("inf")
    anchor = tl.where(flagged | (top == float("-inf")), 0.0, top)
    weight = tl.sum(tl.where(logs == float("inf"), 0.0, tl.exp2((logs - anchor) * LOG2E)), axis=0)
    if sinks is not None:
        weight += tl.exp2((sink - anchor) * LOG2E)
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for first in range(0, SPLITS, PARTS):
        part = first + tl.arange(0, PARTS)
        at = part * stride + row
        log = tl.load(parts_lse + at, mask=part < SPLITS, other=float("-inf"))
        share = tl.where(log == float("inf"), 0.0, tl.exp2((log - anchor) * LOG2E))
        inside = (part < SPLITS)[:, None] & (d < D)[None, :]
        numbers = tl.load(parts + at[:, None] * D + d[None, :], mask=inside, other=0.0)
        total += tl.sum(share[:, None] * numbers, axis=0)
    unseen = weight == 0
    weight = tl.where(unseen, 1.0, weight)
    total = tl.where(flagged, 0.0, total / weight)
    to = out + place * tl.cast(D, tl.int64) + d
    tl.store(to, total.to(out.dtype.element_ty), mask=d < D)
    if lse is not None:
        log_sum = tl.where(unseen, float("-inf"), anchor + tl.log2(weight) * LN2)
        tl.store(lse + place, tl.where(flagged, float("inf"), log_sum))


def decode_attention(
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
    splits: int = 0,
    blocks: tuple[int, int] | None = None,
    warps: int = 0,
    stages: int = 0,
    choice: Choice | None = None,
) -> Tensor:
    """Compute `paged_attention` for small batches: requests with one query each, or a few.

    Args:
        q, keys, values, batch, blocks, warps, stages: see `paged_attention`.
        scale, sliding_window, softcap, sinks, k_scale, v_scale, lse: see Options.
        splits: programs that share a tile's keys, at most MAX_SPLITS; 0 to choose.
        choice: tuned tiles and splits, used if blocks is None and an entry fits the number of
            decodes.

    Returns:
        [T, H, D], q's dtype.

    Raises:
        KernelError: the tensors do not match, or an argument is invalid.
    """
    check = functools.partial(require, "decode_attention")
    options = Options(scale, sliding_window, softcap, sinks, k_scale, v_scale, lse)
    check_attention(check, q, keys, values, batch, options)
    config = None
    if choice and blocks is None and is_decode(q, batch):
        config = choice.of_attention(q, keys, len(q), batch.max_context)
    tile = checked_tile(check, q, keys, batch, blocks, warps, stages, config)
    must = f"be from 1 to {MAX_SPLITS}, or 0 for the default"
    check("splits", splits, 0 <= splits <= MAX_SPLITS, must)
    splits = splits or (config.splits if config else 0)
    splits = splits or choose_splits(q, keys, batch, tile, options, count_processors(q.device))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch_split(q, keys, values, batch, out, lse, tile, options, splits)
    return out


def choose_splits(
    q: Tensor,
    keys: Tensor,
    batch: PagedBatch,
    tile: Tile,
    options: Options,
    processors: int,
    world_size: int = 1,
    op: str = "decode_attention",
    served: Served = Served.ANY,
) -> int:
    """Return how many programs share a tile's keys: the number with the least predicted time.

    Args:
        q, keys, batch, tile, options: see `decode_attention`.
        processors: processors on the device; each runs one program.
        world_size: number of ranks that share each request's keys.
        op: as in `costs.Problem`.
        served: the requests that the launch serves.

    Returns:
        A power of two, at most MAX_SPLITS: each one compiles its own kernels. It is the same for
        all numbers of tiles up to the next power of two, so that a warm-up meets every one.
    """
    heads, kv_heads = q.shape[1], keys.shape[1]
    group = heads_of_tile(heads // kv_heads, tile)
    longest = -(-batch.max_context // world_size)
    if options.sliding_window is not None:
        queries = 1 if served == Served.ONE else batch.max_queries
        longest = min(longest, options.sliding_window + queries)
    problem = Problem(
        op,
        world_size=1,
        rows=triton.next_power_of_2(count_tiles(q, batch, tile, group, served))
        * (heads // kv_heads // group),
        n=longest,
        k=q.shape[2],
        dtype=str(keys.dtype).removeprefix("torch."),
        groups=kv_heads,
        top_k=group,
    )
    config = Config("local", tile.block_m, tile.block_n, stages=tile.stages, warps=tile.warps)
    return best_splits(problem, config, replace(gpu_of(q.device), processors=processors))


def launch_split(
    q: Tensor,
    keys: Tensor,
    values: Tensor | None,
    batch: PagedBatch,
    out: Tensor,
    lse: Tensor | None,
    tile: Tile,
    options: Options,
    splits: int,
    *,
    served: Served = Served.ANY,
    sinks: bool = True,
    rank: int = 0,
    world_size: int = 1,
) -> None:
    """Launch `attend`, then `merge_splits` if splits > 1. The caller has checked the arguments."""
    if splits == 1 or not q.numel():
        launch_attend(
            q,
            keys,
            values,
            batch,
            out,
            lse,
            tile,
            options,
            served=served,
            sinks=sinks,
            rank=rank,
            world_size=world_size,
        )
        return
    (tokens, heads, dim), one = out.shape, served == Served.ONE
    rows = len(batch.context_len) if one else tokens
    parts = torch.empty((splits, rows, heads, dim), dtype=torch.float32, device=q.device)
    parts_lse = torch.empty((splits, rows, heads), dtype=torch.float32, device=q.device)
    launch_attend(
        q,
        keys,
        values,
        batch,
        parts,
        parts_lse,
        tile,
        options,
        splits=splits,
        served=served,
        sinks=False,
        rank=rank,
        world_size=world_size,
    )
    merge_splits[(rows * heads,)](
        parts=parts,
        parts_lse=parts_lse,
        query_start=batch.query_start if one else None,
        sinks=options.sinks if sinks else None,
        out=out,
        lse=lse,
        rows=rows * heads,
        HEADS=heads,
        D=dim,
        SPLITS=splits,
        PARTS=min(PARTS, triton.next_power_of_2(splits)),
        BLOCK_S=triton.next_power_of_2(splits),
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
    )
