"""Multi-head latent attention for decode, over a paged cache of latents.

    mla_decode_attention(q [T, H, R + P], latents [num_blocks, page, R + P], batch) -> [T, H, R]

The cache has one latent per token, shared by all heads. Its first R numbers (kv_lora_rank)
determine keys and values; its last P numbers are the rotated part of a key. This op does not expand
latents to keys or values. Instead, the caller absorbs the up-projections:

- It multiplies each head's query by the up-projection of keys: W_uk q has R numbers, and the P
  numbers of the rotated query follow.
- It multiplies the result by the up-projection of values: W_uv out.

The op is therefore attention with H query heads and one KV head. The key is the latent, and the
value is the latent's first R numbers (DeepSeek-V2, 2024: 2.1.2, 2.1.3, appendix C).

kernel.py and decode.py cut and merge the work, with the same kernels, `attend` and `merge_splits`.
Two things differ:

- A block of latents is loaded once, for both keys and values. The last P columns are multiplied
  separately, so the first R need no padding.
- A tile has BLOCK_M rows with R float32 sums each, and cannot fit all heads. It takes as many heads
  as fit and divide H. Several programs therefore load the same latents: H divided by the heads per
  tile. All but one mostly hit L2.

distributed_decode.py exchanges the LSE between ranks, but no op does this with latents.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from weft.kernels.gpu.attention.decode import MAX_SPLITS, choose_splits, launch_split
from weft.kernels.gpu.attention.inputs import (
    Options,
    PagedBatch,
    check_batch,
    check_cache,
    check_queries,
    check_scale,
)
from weft.kernels.gpu.attention.tile import Tile, asked_tile, is_decode
from weft.kernels.gpu.runtime.arguments import require, require_tensor
from weft.kernels.gpu.runtime.target import target
from weft.kernels.gpu.tuning.costs import count_processors
from weft.kernels.gpu.tuning.search import Choice

MAX_RANK, MAX_ROPE = 512, 128
"""Maxima of R and P."""


def choose_latent_tile(heads: int, queries: int, rank: int, itemsize: int, *, cast: bool) -> Tile:
    """Choose a tile from the heads and from the number of queries in the longest request.

    Larger tiles spill registers.

    Args:
        heads: H.
        queries: number of queries in the longest request.
        rank: R.
        itemsize: bytes per number of q.
        cast: latents have a narrower dtype than q.
    """
    amd = target()[0] == "hip"
    wide = rank * max(1, itemsize // 2) > (512 if itemsize < 4 or not amd else 256)
    stages = 1 if amd else 2
    if heads * queries <= 16 or wide or (cast and amd):
        return Tile(16, 16 if cast or wide else 32, 4, stages)
    return Tile(32 if cast else 64, 16, 8, stages)


def mla_decode_attention(
    q: Tensor,
    latents: Tensor,
    batch: PagedBatch,
    *,
    kv_lora_rank: int,
    scale: float,
    kv_scale: Tensor | None = None,
    lse: Tensor | None = None,
    splits: int = 0,
    blocks: tuple[int, int] | None = None,
    warps: int = 0,
    stages: int = 0,
    choice: Choice | None = None,
) -> Tensor:
    """Compute causal attention between absorbed queries and their requests' latents.

    Args:
        q: [T, H, R + P], float32, float16 or bfloat16; a token's heads contiguous. Each head has
            W_uk q, then the rotated part of q.
        latents: contiguous [num_blocks, page, R + P], q's dtype or float8_e4m3fn; they already
            include the step's tokens.
        batch: the step's requests, with one query each, or a few. The kernel flags a bad request in
            the batch's status.
        kv_lora_rank: R, from 1 to 512. P is the rest, at most 128; it may be 0.
        scale: multiplies the scores: (D + P) ** -0.5, for heads of size D before absorption.
        kv_scale: float32 [1], for latents in float8_e4m3fn; multiplies them.
        lse: float32 [T, H], written: see Options.
        splits: programs that share a tile's keys, at most MAX_SPLITS; 0 to choose.
        blocks: BLOCK_M and BLOCK_N of a tile; None to choose.
        warps, stages: compile options of the kernel; 0 to choose.
        choice: tuned tiles and splits, used if blocks is None and an entry fits the number of
            decodes.

    Returns:
        [T, H, R], q's dtype, to be multiplied by each head's W_uv. A flagged request has zeros in
        some or all of its rows.

    Raises:
        KernelError: the tensors do not match, or an argument is invalid.
    """
    check = functools.partial(require, "mla_decode_attention")
    check_queries(check, q, MAX_RANK + MAX_ROPE)
    check_cache(check, "latents", latents, q)
    (tokens, heads, width), shape = q.shape, list(latents.shape)
    fits = len(shape) == 3 and shape[2] == width and latents.numel() > 0
    check("latents's shape", shape, fits, f"be [blocks, page, {width}], with no axis of size 0")
    check("H", heads, heads > 0, "be at least 1")
    whole = isinstance(kv_lora_rank, int) and 0 < kv_lora_rank <= min(MAX_RANK, width)
    check("kv_lora_rank", kv_lora_rank, whole, f"be from 1 to {min(MAX_RANK, width)}")
    rope = width - kv_lora_rank
    check("P = D - kv_lora_rank", rope, rope <= MAX_ROPE, f"be at most {MAX_ROPE}")
    check_batch(check, q, batch)
    check_scale(check, "kv_scale", kv_scale, [1], latents)
    if lse is not None:
        require_tensor(check, "lse", lse, [tokens, heads], q.device, torch.float32)
    cast, itemsize = latents.dtype != q.dtype, q.element_size()
    chosen = choose_latent_tile(heads, batch.max_queries, kv_lora_rank, itemsize, cast=cast)
    options, keys = Options(scale, k_scale=kv_scale, v_scale=kv_scale), latents[:, None]
    config = None
    if choice and blocks is None and is_decode(q, batch):
        config = choice.of_attention(q, keys, len(q), batch.max_context)
    if config:
        chosen = Tile(config.block_m, config.block_n, config.warps, config.stages)
    tile = asked_tile(check, chosen, blocks, warps, stages)
    must = f"be from 1 to {MAX_SPLITS}, or 0 for the default"
    check("splits", splits, 0 <= splits <= MAX_SPLITS, must)
    splits = splits or (config.splits if config else 0)
    splits = splits or choose_splits(
        *(q, keys, batch, tile, options, count_processors(q.device)), op="mla_decode_attention"
    )
    out = torch.empty((tokens, heads, kv_lora_rank), dtype=q.dtype, device=q.device)
    launch_split(q, keys, None, batch, out, lse, tile, options, splits)
    return out
