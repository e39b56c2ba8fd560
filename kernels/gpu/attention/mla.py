"""Multi-head latent attention for decode, over a paged cache of latents.

    mla_decode_attention(q [T, H, R + P], latents [num_blocks, page, R + P], batch) -> [T, H, R]

The cache has one latent per token, shared by all heads: R numbers that determine keys and values
(kv_lora_rank), and P numbers of a key with rotary positions. Keys and values are not computed here.
Each head's up-projection of keys is multiplied into its query beforehand (W_uk q, of R numbers,
beside the P numbers of the rotated query). The up-projection of values is multiplied into the
result afterwards (W_uv out). So this is attention of H query heads to one KV head: its key is the
latent, and its value is the latent's first R numbers (DeepSeek-V2, 2024: 2.1.2, 2.1.3, appendix C).

The same kernels as in kernel.py and decode.py, `attend` and `merge_splits`, divide and merge the
work, with two differences:

- A block of latents is loaded once, as keys and as values. Its last P columns form a separate
  product, so the first R need no padding.
- A tile has BLOCK_M rows of R float32 sums, so one tile cannot hold all heads. It holds as many as
  divide H, and H / that many programs load the latents (mostly from L2, except the first).

distributed_decode.py sends such an LSE to other ranks, but no op does so with latents.
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
from weft.kernels.gpu.matmul.matmul import count_processors, target
from weft.kernels.gpu.runtime.arguments import require, require_tensor
from weft.kernels.gpu.tuning.search import Choice

MAX_RANK, MAX_ROPE = 512, 128
"""Maximum R and P."""


def choose_latent_tile(heads: int, queries: int, rank: int, itemsize: int, *, cast: bool) -> Tile:
    """Choose a tile for a batch whose longest request has `queries` queries of `heads` heads.

    Larger tiles spill registers.

    Args:
        rank: R.
        itemsize: bytes of one number of q.
        cast: whether latents are narrower than q.
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
    """Compute causal attention of absorbed queries over their requests' latents.

    Args:
        q: [T, H, R + P], float32, float16 or bfloat16; a token's heads contiguous. For each head
            W_uk q, then the part of q with rotary positions.
        latents: contiguous [num_blocks, page, R + P], q's dtype or float8_e4m3fn; they include the
            step's tokens.
        batch: of the step; one query per request, or a few. Bad requests are flagged in its status.
        kv_lora_rank: R, from 1 to 512. P is the rest, at most 128; it may be 0.
        scale: multiplies the scores: (D + P) ** -0.5, for heads of D before absorption.
        kv_scale: float32 [1], with latents in float8_e4m3fn; multiplies their numbers.
        lse: float32 [T, H], output: see inputs.Options.
        splits: programs that share the keys of a tile, at most MAX_SPLITS; chosen if 0.
        blocks: BLOCK_M and BLOCK_N of a tile; chosen if None.
        warps, stages: for compiling the kernel; chosen if 0.
        choice: provides a tuned tile and splits if blocks is None, if tuned for as many decodes.

    Returns:
        [T, H, R], q's dtype, to be multiplied by each head's W_uv. Zeros, in part or as a whole,
        for a flagged request.

    Raises:
        KernelError: the tensors do not fit each other, or one is refused.
    """
    check = functools.partial(require, "mla_decode_attention")
    check_queries(check, q, MAX_RANK + MAX_ROPE)
    check_cache(check, "latents", latents, q)
    (tokens, heads, width), shape = q.shape, list(latents.shape)
    fits = len(shape) == 3 and shape[2] == width and latents.numel() > 0
    check("latents's shape", shape, fits, f"be [blocks, page, {width}], with no side of 0")
    check("H", heads, heads > 0, "be at least 1")
    whole = isinstance(kv_lora_rank, int) and 0 < kv_lora_rank <= min(MAX_RANK, width)
    check("kv_lora_rank", kv_lora_rank, whole, f"be from 1 to {min(MAX_RANK, width)}")
    rope = width - kv_lora_rank
    check("P, of D - kv_lora_rank,", rope, rope <= MAX_ROPE, f"be at most {MAX_ROPE}")
    check_batch(check, q, shape[1], batch)
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
    must = f"be from 1 to {MAX_SPLITS}, or 0 to choose"
    check("splits", splits, 0 <= splits <= MAX_SPLITS, must)
    splits = splits or (config.splits if config else 0)
    splits = splits or choose_splits(q, keys, batch, tile, options, count_processors(q.device))
    out = torch.empty((tokens, heads, kv_lora_rank), dtype=q.dtype, device=q.device)
    launch_split(q, keys, None, batch, out, lse, tile, options, splits)
    return out
