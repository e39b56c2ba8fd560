"""Attention over a context that chips share by pages: each its part, joined by log-sum-exp.

    distributed_decode_attention(q [T, H, D], 1 / W of the pages) -> [T, H, D]

Every chip has all queries, and of each request the pages r, r + W, r + 2 W, ... if it is chip r of
W. It attends to those (attention.py), and gets a result and the log-sum-exp of its scores for each
query and head. Both go to all chips in one all-gather (all_gather.py) of T H (D + 1) float32,
padded to whole rows of 128, and every chip joins them: a part's weight is exp(lse - the largest
lse). That is exact (distributed flash decoding; Triton-distributed: Zheng et al. 2025). With no key
on a chip its lse is -inf and its weight 0.

Protocol: that of all_gather.py; nothing else crosses chips.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from weft.kernels.tpu.all_gather import all_gather
from weft.kernels.tpu.attention import ragged_paged_attention
from weft.kernels.tpu.topology import Axes, names, size

ROW = 128


def distributed_decode_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    query_start: jax.Array,
    context_len: jax.Array,
    block_table: jax.Array,
    axes: Axes,
    **options: Any,
) -> jax.Array:
    """Attention of queries that all devices have, over pages that are dealt out to them.

    Args:
        q: [T, H, D], the same on all devices, in `shard_map`. Few: all of the result is sent.
        keys, values: [pages, Hk, page, D], this device's.
        query_start: int32 [B + 1].
        context_len: int32 [B], of the whole contexts.
        block_table: int32 [B, n]; entry e of device r of W is page e W + r of the request.
        axes: of the mesh; later ones are minor in the numbers of devices.
        options: scale, sliding_window and the others of `ragged_paged_attention`.

    Returns:
        [T, H, D] in q's dtype.

    Raises:
        ValueError: shapes do not fit.
    """
    devices = size(axes)
    out, lse = ragged_paged_attention(
        q,
        keys,
        values,
        query_start,
        context_len,
        block_table,
        page_stride=devices,
        page_offset=lax.axis_index(names(axes)),
        dtype=jnp.float32,
        **options,
    )
    flat = jnp.concatenate([out.reshape(-1), lse.reshape(-1)])
    rows = jnp.pad(flat, (0, -flat.size % ROW)).reshape(-1, ROW)
    parts = all_gather(rows, axes).reshape(devices, -1)
    outs = parts[:, : out.size].reshape(devices, *out.shape)
    sums = parts[:, out.size : out.size + lse.size].reshape(devices, *lse.shape)
    return combine(outs, sums)[0].astype(q.dtype)


def combine(outs: jax.Array, lses: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Join attention over parts of the keys.

    Args:
        outs: float32 [W, ..., D], of each part.
        lses: float32 [W, ...]; -inf for a part with no key.

    Returns:
        float32 [..., D]: 0 where no part has a key; and the log-sum-exp of all keys, [...].
    """
    largest = jnp.max(lses, axis=0)
    weights = jnp.where(
        lses > -jnp.inf, jnp.exp(lses - jnp.where(largest > -jnp.inf, largest, 0)), 0
    )
    weight = jnp.sum(weights, axis=0)
    out = jnp.sum(weights[..., None] * outs, axis=0)
    return out / jnp.where(weight > 0, weight, 1)[..., None], largest + jnp.log(weight)
