"""Attention for steps with prompts, and decodes beside them: each in its own launch.

    mixed_attention(q [T, H, D], keys, values [num_blocks, Hk, page, D], batch) -> [T, H, D]

One kernel for both would be slow for decodes. A prompt's tile has up to 128 rows, and a decode
fills only G = H / Hk of them; and no other program shares the keys of a long context. So:

- `attend` (kernel.py) serves the requests with one query, with a small tile and with the keys split
  among programs, and `merge_splits` (decode.py) merges the parts.
- Another `attend` serves the requests with more queries.

Each launch finds the number of queries in query_start, and leaves the other's requests. A captured
CUDA graph therefore serves any mixture. No row of the result is written by both, and the launches
are on one stream; there are no signals.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from weft.kernels.gpu.attention.decode import choose_splits, launch_split
from weft.kernels.gpu.attention.inputs import Options, PagedBatch, check_attention
from weft.kernels.gpu.attention.paged import launch_attend
from weft.kernels.gpu.attention.tile import Served, checked_tile, choose_tile
from weft.kernels.gpu.runtime.arguments import require
from weft.kernels.gpu.tuning.costs import count_processors


def mixed_attention(
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
) -> Tensor:
    """Compute `paged_attention` with separate launches for decodes and prompts.

    Args:
        q, keys, values, batch: see `paged_attention`.
        scale, sliding_window, softcap, sinks, k_scale, v_scale, lse: see Options.
        splits: programs that share the keys of a decode; 0 to choose.
        blocks: BLOCK_M and BLOCK_N of a prompt's tile; None to choose.

    Returns:
        [T, H, D], q's dtype.

    Raises:
        KernelError: the tensors do not match, or an argument is invalid.
    """
    check = functools.partial(require, "mixed_attention")
    options = Options(scale, sliding_window, softcap, sinks, k_scale, v_scale, lse)
    check_attention(check, q, keys, values, batch, options)
    group, dim, cast = q.shape[1] // keys.shape[1], q.shape[2], keys.dtype != q.dtype
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    cached = (q, keys, values, batch, out, lse)
    if batch.decodes:
        tile = choose_tile(group, 1, dim, q.element_size(), cast=cast)
        splits = splits or choose_splits(
            *(q, keys, batch, tile, options, count_processors(q.device)), served=Served.ONE
        )
        launch_split(*cached, tile, options, splits, served=Served.ONE)
    tile = checked_tile(check, q, keys, batch, blocks, 0, 0)
    launch_attend(*cached, tile, options, served=Served.MORE)
    return out
