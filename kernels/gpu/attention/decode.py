"""Attention for few queries over long contexts: several programs share the keys of a request.

    decode_attention(q [T, H, D], keys, values, batch) -> [T, H, D]

A batch of few decodes has fewer tiles than a GPU has processors. So SPLITS programs share each
tile's keys (split-KV: Flash-Decoding, Dao et al. 2023):

- `attend` (kernel.py) runs with SPLITS splits. Program (tile, head, s) processes the s-th piece of
  the tile's blocks. It stores its result in float32, already divided by the sum of its weights, and
  the log of that sum. A piece without keys has an LSE of -inf.
- `merge_splits` follows, with one program for each row. It weights each part with
  exp(LSE - the largest) and adds the head's sink, if any, to the sum.

The number of splits depends on the device's processors and the longest context that the host knows
of (`count_splits`); under a captured CUDA graph, on the values at the capture. Each request's keys
are cut into that many pieces, however few they are.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.attention.inputs import Options, PagedBatch, check_attention
from weft.kernels.gpu.attention.kernel import LN2, LOG2E
from weft.kernels.gpu.attention.paged import launch_attend
from weft.kernels.gpu.attention.tile import (
    Tile,
    checked_tile,
    count_tiles,
    heads_of_tile,
    is_decode,
)
from weft.kernels.gpu.matmul.matmul import count_processors
from weft.kernels.gpu.runtime.arguments import require
from weft.kernels.gpu.tuning.search import Choice

MAX_SPLITS = 64
KEYS_OF_A_SPLIT = 256
"""Minimum; fewer keys are not worth a part of the merge."""

PARTS = 16
"""Parts that a program of the merge loads at a time."""


@triton.jit(do_not_specialize=["rows"])
def merge_splits(
    parts,  # float32 [SPLITS, rows, D]
    parts_lse,  # float32 [SPLITS, rows]
    sinks,  # [HEADS], or None
    out,  # [rows, D]
    lse,  # float32 [rows], or None
    rows,
    HEADS: tl.constexpr,  # row % HEADS is a row's head
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge the parts of one row, weighted by their sums. Grid: (rows,)."""
    row = tl.program_id(0)
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
    tl.store(out + row * tl.cast(D, tl.int64) + d, total.to(out.dtype.element_ty), mask=d < D)
    if lse is not None:
        log_sum = tl.where(unseen, float("-inf"), anchor + tl.log2(weight) * LN2)
        tl.store(lse + row, tl.where(flagged, float("inf"), log_sum))


def count_splits(tiles: int, blocks: int, processors: int, least: int) -> int:
    """Return the number of programs that share a tile's keys: the smallest that nearly fills the
    device.

    A device with work for part of a round of programs is idle for the rest of it. Among the numbers
    whose use of the device is within 15% of the best, the smallest wins (FlashAttention's rule).
    Only powers of two are considered, because kernels are compiled for each number of splits.

    Args:
        tiles: programs without a split.
        blocks: blocks of keys in the longest context.
        processors: of the device; one program each.
        least: minimum number of blocks in a split.

    Returns:
        A power of two, at most MAX_SPLITS.
    """
    most = max(1, min(MAX_SPLITS, blocks // max(1, least)))

    def use(splits: int) -> float:
        longest = -(-blocks // splits)  # 5 blocks take as long with 4 splits as with 3
        rounds = -(-tiles * splits // processors)
        return tiles * blocks / (processors * rounds * longest)

    powers = [1 << number for number in range(most.bit_length())]
    best = max(map(use, powers))
    return next(splits for splits in powers if use(splits) >= 0.85 * best)


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
    """Compute `paged_attention` for small batches: one query per request, or a few.

    Args:
        q, keys, values, batch, blocks, warps, stages: as for `paged_attention`.
        scale, sliding_window, softcap, sinks, k_scale, v_scale, lse: see inputs.Options.
        splits: programs that share the keys of a tile, at most MAX_SPLITS; chosen if 0.
        choice: provides a tuned tile and splits if blocks is None, if tuned for as many decodes.

    Returns:
        [T, H, D], q's dtype.

    Raises:
        KernelError: the tensors do not fit each other, or one is refused.
    """
    check = functools.partial(require, "decode_attention")
    options = Options(scale, sliding_window, softcap, sinks, k_scale, v_scale, lse)
    check_attention(check, q, keys, values, batch, options)
    config = None
    if choice and blocks is None and is_decode(q, batch):
        config = choice.of_attention(q, keys, len(q), batch.max_context)
    tile = checked_tile(check, q, keys, batch, blocks, warps, stages, config)
    must = f"be from 1 to {MAX_SPLITS}, or 0 to choose"
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
) -> int:
    """Apply `count_splits` to a batch."""
    heads, kv_heads = q.shape[1], keys.shape[1]
    group = heads_of_tile(heads // kv_heads, tile)
    tiles = count_tiles(q, batch, tile, group) * (heads // group)
    longest = -(-batch.max_context // world_size)
    if options.sliding_window is not None:
        longest = min(longest, options.sliding_window + batch.max_queries)
    blocks = max(1, -(-longest // tile.block_n))
    return count_splits(tiles, blocks, processors, KEYS_OF_A_SPLIT // tile.block_n)


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
    sinks: bool = True,
    rank: int = 0,
    world_size: int = 1,
) -> None:
    """Launch `attend`, and `merge_splits` if there are several parts, on checked arguments."""
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
            sinks=sinks,
            rank=rank,
            world_size=world_size,
        )
        return
    tokens, heads, dim = out.shape
    parts = torch.empty((splits, *out.shape), dtype=torch.float32, device=q.device)
    parts_lse = torch.empty((splits, tokens, heads), dtype=torch.float32, device=q.device)
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
        sinks=False,
        rank=rank,
        world_size=world_size,
    )
    merge_splits[(tokens * heads,)](
        parts=parts,
        parts_lse=parts_lse,
        sinks=options.sinks if sinks else None,
        out=out,
        lse=lse,
        rows=tokens * heads,
        HEADS=heads,
        D=dim,
        SPLITS=splits,
        PARTS=min(PARTS, triton.next_power_of_2(splits)),
        BLOCK_S=triton.next_power_of_2(splits),
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
    )
