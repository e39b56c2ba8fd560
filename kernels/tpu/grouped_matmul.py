"""Products of groups of rows, each with a weight of its own: jax's megablox, for any number of
rows.

    grouped_matmul(x [T, K], w [E, K, N], offsets [E + 1]) -> [T, N]

The kernel is `jax.experimental.pallas.ops.tpu.megablox.gmm` (after MegaBlocks: Gale et al. 2023):
tiles of rows are multiplied with the weights of the groups that they belong to, one after the other
where a tile has several. What it wants and this gives: rows in whole tiles, tiles that divide the
weight, and zeros in rows of no group, which it leaves as they are.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

from weft.kernels.tpu.pipeline import LANES, largest

TALL = 128
"""Rows of a tile: experts seldom have more."""


def grouped_matmul(x: jax.Array, w: jax.Array, offsets: jax.Array) -> jax.Array:
    """Rows offsets[e]:offsets[e + 1] times w[e], for each group e.

    Args:
        x: [T, K].
        w: [E, K, N].
        offsets: int32 [E + 1], from 0 on.

    Returns:
        [T, N] in x's dtype, added up in float32; 0 in rows of no group.

    Raises:
        ValueError: shapes do not fit.
    """
    rows, k = x.shape
    groups, depth, n = w.shape
    if k != depth or offsets.shape != (groups + 1,):
        raise ValueError(
            f"x is {list(x.shape)}, w {list(w.shape)} and offsets {list(offsets.shape)}; "
            "they must be [T, K], [E, K, N] and [E + 1]"
        )
    tall = min(TALL, -(-rows // 16) * 16)
    padded = jnp.pad(x, ((0, -rows % tall), (0, 0)))
    sizes = (offsets[1:] - offsets[:-1]).astype(jnp.int32)
    tiling = (tall, largest(k, 1024, LANES), largest(n, 1024, LANES))
    out = gmm(padded, w, sizes, preferred_element_type=x.dtype, tiling=tiling)[:rows]
    return jnp.where(jnp.arange(rows)[:, None] < offsets[-1], out, 0)
