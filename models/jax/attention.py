"""Attention over the paged cache, of a ragged batch, in plain XLA operations.

A step's tokens are dealt out to tiles, each of which has consecutive tokens of one request: one
token where all requests decode, up to `TILE_TOKENS` otherwise. All tiles walk through their
pages together, a group at a time, with a running softmax (Milakov and Gimelshein 2018; Dao et
al. 2022), up to the longest context of the step and no further.

The cache of a layer is [num_blocks, block_size, 2 Hk, D], each head's keys before its values,
which is how TPU kernels for ragged paged attention take it. `paged_attention` is where one goes.

What is stale in a page is never multiplied, for it may be NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from weft.models.jax.collectives import precision

TILE_TOKENS = 16
"""Of a step that has more than one token of some request."""

GROUP_TOKENS = 128
"""Keys of a tile that are looked at at once: a group of pages has at least so many."""


class Plan(NamedTuple):
    """Where a step's tokens are and what they see; T tokens, B requests, N tiles.

    Attributes:
        positions: int32 [T]; -1 for padding.
        write: int32 [T]; block * block_size + place in it; beyond the cache for padding.
        place: int32 [T]; tile * tile_tokens + place in it.
        tiles: int32 [3, N]; request, first token, end of its tokens in [0, T].
        tables: int32 [B, n]; blocks of each request, n a multiple of `group_pages`.
    """

    positions: jax.Array
    write: jax.Array
    place: jax.Array
    tiles: jax.Array
    tables: jax.Array


def group_pages(block_size: int) -> int:
    """Pages that are looked at at once."""
    return max(1, GROUP_TOKENS // block_size)


def write_cache(cache: jax.Array, k: jax.Array, v: jax.Array, plan: Plan) -> jax.Array:
    """Put a step's keys and values [T, Hk, D] where the plan says."""
    blocks, block_size, heads, dim = cache.shape
    new = jnp.stack((k, v), axis=2).reshape(k.shape[0], heads, dim)
    flat = cache.reshape(blocks * block_size, heads, dim)
    return flat.at[plan.write].set(new, mode="drop").reshape(cache.shape)


def paged_attention(
    q: jax.Array, cache: jax.Array, plan: Plan, *, tile_tokens: int, window: int | None
) -> jax.Array:
    """Causal attention of each token to its request's tokens.

    Args:
        q: [T, H, D].
        cache: [num_blocks, block_size, 2 Hk, D], with this step's keys and values.
        plan: the step's.
        tile_tokens: of a tile.
        window: a token sees itself and `window - 1` tokens before it; all if None.

    Returns:
        [T, H, D].
    """
    tokens, heads, dim = q.shape
    _, block_size, combined, _ = cache.shape
    kv_heads = combined // 2
    pages = group_pages(block_size)
    request, start, end = plan.tiles
    token = start[:, None] + jnp.arange(tile_tokens, dtype=jnp.int32)
    token = jnp.where(token < end[:, None], token, tokens)
    position = plan.positions.at[token].get(mode="fill", fill_value=-1)  # [N, tile]
    tiled = q.at[token].get(mode="fill", fill_value=0)
    tiled = tiled.reshape(*token.shape, kv_heads, heads // kv_heads, dim)
    last = position.max(axis=1)
    scale = jnp.float32(dim**-0.5)

    def look(group: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """At one group of pages of every tile."""
        largest, total, out = carry
        table = lax.dynamic_slice_in_dim(plan.tables, group * pages, pages, axis=1)
        kv = cache[table[request]].reshape(len(request), pages * block_size, kv_heads, 2, dim)
        key = group * (pages * block_size) + jnp.arange(pages * block_size, dtype=jnp.int32)
        seen = key <= position[:, :, None]
        if window is not None:
            seen &= key > position[:, :, None] - window
        seen = seen[:, None, None]  # [N, 1, 1, tile, keys]
        values = jnp.where((key <= last[:, None])[:, :, None, None], kv[:, :, :, 1], 0)
        scores = jnp.einsum(
            "nqhgd,nkhd->nhgqk",
            *(tiled, kv[:, :, :, 0]),
            precision=precision(q),
            preferred_element_type=jnp.float32,
        )
        scores = jnp.where(seen, scores * scale, -jnp.inf)
        new_largest = jnp.maximum(largest, scores.max(axis=-1))
        # Of a token that has seen nothing yet, the largest is -inf.
        base = jnp.where(new_largest == -jnp.inf, 0.0, new_largest)
        weights = jnp.where(seen, jnp.exp(scores - base[..., None]), 0.0)
        shrink = jnp.exp(largest - base)
        product = jnp.einsum(
            "nhgqk,nkhd->nhgqd",
            *(weights.astype(q.dtype), values),
            precision=precision(q),
            preferred_element_type=jnp.float32,
        )
        return (
            new_largest,
            total * shrink + weights.sum(axis=-1),
            out * shrink[..., None] + product,
        )

    shape = (len(request), kv_heads, heads // kv_heads, tile_tokens)
    carry = (
        jnp.full(shape, -jnp.inf, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, dim), jnp.float32),
    )
    span = pages * block_size
    first = jnp.int32(0)
    if window is not None:
        oldest = jnp.where(position >= 0, position, jnp.iinfo(jnp.int32).max).min()
        first = jnp.maximum(0, oldest - (window - 1)) // span
    _, total, out = lax.fori_loop(first, position.max() // span + 1, look, carry)
    out = out / jnp.where(total == 0.0, 1.0, total)[..., None]
    out = out.transpose(0, 3, 1, 2, 4).reshape(len(request) * tile_tokens, heads, dim)
    return out[plan.place].astype(q.dtype)
