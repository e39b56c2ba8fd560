"""Attention over the paged cache, of a ragged batch: with kernels/tpu, or in plain XLA operations.

The cache of a layer is [num_blocks, Hk, block_size, 2 D], a key and then its value in each row, as
the kernels take it. `Plan` is what both need of a step: lengths and block tables on the device.

The plain way deals out a step's tokens to tiles, each of which has consecutive tokens of one
request: one token where all requests decode, up to `TILE_TOKENS` otherwise. All tiles walk through
their pages together, a group at a time, with a running softmax (Milakov and Gimelshein 2018; Dao et
al. 2022), up to the longest context of the step and no further.

What is stale in a page is never multiplied, for it may be NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from weft.kernels.tpu.attention.cache import write_pages
from weft.kernels.tpu.attention.paged import ragged_paged_attention
from weft.kernels.tpu.attention.query_tiles import owner, plan_tiles, tile_queries
from weft.models.jax.collectives import precision

TILE_TOKENS = 16
"""Of a step that has more than one token of some request, in the plain way."""

GROUP_TOKENS = 128
"""Keys of a tile that are looked at at once: a group of pages has at least so many."""


class Plan(NamedTuple):
    """Where a step's tokens are and what they see; T tokens, B requests.

    Attributes:
        query_start: int32 [B + 1]; request b has the tokens query_start[b]:query_start[b + 1], the
            last ones of its context. Tokens behind the last request's are padding.
        context_len: int32 [B]; 0 of padding.
        tables: int32 [B, n]; blocks of each request, n a multiple of `group_pages`.
        request: int32 [T]; B - 1 for padding.
        position: int32 [T]; -1 for padding.
    """

    query_start: jax.Array
    context_len: jax.Array
    tables: jax.Array
    request: jax.Array
    position: jax.Array


def make_plan(
    query_start: jax.Array, context_len: jax.Array, tables: jax.Array, tokens: int
) -> Plan:
    """The plan of a step that is padded to so many tokens."""
    token = jnp.arange(tokens, dtype=jnp.int32)
    request = jnp.minimum(owner(query_start[1:], token), len(context_len) - 1)
    # The last token of a request is the last of its context.
    position = context_len[request] - query_start[request + 1] + token
    position = jnp.where(token < query_start[-1], position, -1)
    return Plan(query_start, context_len, tables, request, position)


def group_pages(block_size: int) -> int:
    """Pages that are looked at at once."""
    return max(1, GROUP_TOKENS // block_size)


def write_cache(
    cache: jax.Array, k: jax.Array, v: jax.Array, plan: Plan, *, kernel: bool
) -> jax.Array:
    """The cache with a step's keys and values [T, Hk, D]."""
    if kernel:
        return write_pages(cache, k, v, plan.query_start, plan.context_len, plan.tables)
    blocks, heads, block_size, both = cache.shape
    page, place = jnp.divmod(plan.position, block_size)
    block = plan.tables[plan.request, page]
    block = jnp.where(plan.position < 0, blocks, block)  # padding is written nowhere
    # An index for each head: with one for each token XLA copies the cache to another layout.
    row = (block[:, None] * heads + jnp.arange(heads, dtype=jnp.int32)) * block_size
    flat = cache.reshape(-1, both)
    new = jnp.concatenate((k, v), axis=2).astype(cache.dtype)
    return flat.at[row + place[:, None]].set(new, mode="drop").reshape(cache.shape)


def paged_attention(
    q: jax.Array,
    cache: jax.Array,
    plan: Plan,
    *,
    decodes: bool,
    window: int | None,
    kernel: bool,
) -> jax.Array:
    """Causal attention of each token to its request's tokens.

    Args:
        q: [T, H, D].
        cache: [num_blocks, Hk, block_size, 2 D], with this step's keys and values.
        plan: the step's.
        decodes: each request has one token, or none.
        window: a token sees itself and `window - 1` tokens before it; all if None.
        kernel: whether a Pallas kernel does it.

    Returns:
        [T, H, D]; anything for padding.
    """
    heads, dim = q.shape[1:]
    if not kernel:
        return _attend(q, cache, plan, 1 if decodes else TILE_TOKENS, window)
    out, _ = ragged_paged_attention(
        *(q, cache, plan.query_start, plan.context_len, plan.tables),
        scale=dim**-0.5,
        sliding_window=window,
        block_q=1 if decodes else tile_queries(heads, cache.shape[1], dim),
    )
    return out


def _attend(
    q: jax.Array, cache: jax.Array, plan: Plan, tile_tokens: int, window: int | None
) -> jax.Array:
    """The plain way."""
    tokens, heads, dim = q.shape
    _, kv_heads, block_size, _ = cache.shape
    pages = group_pages(block_size)
    tiles = plan_tiles(plan.query_start, plan.context_len, tokens, tile_tokens, cores=1)
    request = tiles.request
    place = jnp.arange(tile_tokens, dtype=jnp.int32)
    position = tiles.first[:, None] + place  # [N, tile]
    token = position + (plan.query_start[1:] - plan.context_len)[request][:, None]
    position = jnp.where(place < tiles.queries[:, None], position, -1)
    tiled = q.at[token].get(mode="clip")
    tiled = tiled.reshape(*token.shape, kv_heads, heads // kv_heads, dim)
    last = position.max(axis=1)
    scale = jnp.float32(dim**-0.5)
    span = pages * block_size

    def look(group: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """At one group of pages of every tile."""
        largest, total, out = carry
        table = lax.dynamic_slice_in_dim(plan.tables, group * pages, pages, axis=1)
        kv = cache[table[request]].swapaxes(1, 2)  # [N, Hk, pages, block_size, 2 D]
        kv = kv.reshape(len(request), kv_heads, span, 2 * dim)
        key = group * span + jnp.arange(span, dtype=jnp.int32)
        seen = key <= position[:, :, None]
        if window is not None:
            seen &= key > position[:, :, None] - window
        seen = seen[:, None, None]  # [N, 1, 1, tile, keys]
        values = jnp.where((key <= last[:, None])[:, None, :, None], kv[..., dim:], 0)
        scores = jnp.einsum(
            "nqhgd,nhkd->nhgqk",
            *(tiled, kv[..., :dim]),
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
            "nhgqk,nhkd->nhgqd",
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
    first = jnp.int32(0)
    if window is not None:
        oldest = jnp.where(position >= 0, position, jnp.iinfo(jnp.int32).max).min()
        first = jnp.maximum(0, oldest - (window - 1)) // span
    _, total, out = lax.fori_loop(first, position.max() // span + 1, look, carry)
    out = out / jnp.where(total == 0.0, 1.0, total)[..., None]
    out = out.transpose(0, 3, 1, 2, 4).reshape(len(request) * tile_tokens, heads, dim)
    return out.at[_place_in_tiles(plan, tile_tokens)].get(mode="clip").astype(q.dtype)


def _place_in_tiles(plan: Plan, tile_tokens: int) -> jax.Array:
    """Of each token, int32 [T]: tile * tile_tokens + place in it; any for padding."""
    each = -(-jnp.diff(plan.query_start) // tile_tokens)
    tiles_before = (jnp.cumsum(each) - each)[plan.request]
    token = jnp.arange(len(plan.request), dtype=jnp.int32)
    return tiles_before * tile_tokens + token - plan.query_start[plan.request]
