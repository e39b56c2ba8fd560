"""Attention over the paged cache for a ragged batch: kernels/tpu, or plain XLA operations.

A layer's cache is [num_blocks, Hk, block_size, 2 D]: each row holds a key, then its value, as the
kernels expect. Both ways need a `Plan`: the step's lengths and block tables on the device.

The plain way assigns a step's tokens to tiles. A tile holds consecutive tokens of one request: one
token if all requests decode, else up to `TILE_TOKENS`. All tiles walk through their pages together,
one group at a time, with a running softmax (Milakov and Gimelshein 2018; Dao et al. 2022). They
stop at the step's longest context.

Stale page contents are never multiplied, because they may be NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from weft.kernels.tpu.attention.cache import write_pages
from weft.kernels.tpu.attention.paged import ragged_paged_attention
from weft.kernels.tpu.attention.query_tiles import plan_tiles, segment_of, tile_queries
from weft.models.jax.collectives import precision
from weft.models.plan.sizes import group_pages

TILE_TOKENS = 16
"""Tile size in the plain way, for steps in which some request has several tokens."""


class Plan(NamedTuple):
    """A step's tokens and what they attend to; T tokens, B requests.

    Attributes:
        query_start: int32 [B + 1]; request b has the tokens query_start[b]:query_start[b + 1],
            which end its context. Tokens after the last request's are padding.
        context_len: int32 [B]; 0 for padding.
        tables: int32 [B, n]; each request's blocks, n a multiple of `group_pages`.
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
    """Make the plan for a step that is padded to `tokens`."""
    token = jnp.arange(tokens, dtype=jnp.int32)
    request = jnp.minimum(segment_of(query_start[1:], token), len(context_len) - 1)
    # A request's last token is the last in its context.
    position = context_len[request] - query_start[request + 1] + token
    position = jnp.where(token < query_start[-1], position, -1)
    return Plan(query_start, context_len, tables, request, position)


def write_cache(
    cache: jax.Array, k: jax.Array, v: jax.Array, plan: Plan, *, kernel: bool
) -> jax.Array:
    """Write a step's keys and values, [T, Hk, D], to the cache."""
    if kernel:
        return write_pages(cache, k, v, plan.query_start, plan.context_len, plan.tables)
    blocks, heads, block_size, both = cache.shape
    page, offset = jnp.divmod(plan.position, block_size)
    block = plan.tables[plan.request, page]
    block = jnp.where(plan.position < 0, blocks, block)  # padding is written nowhere
    # One index per head: with one per token, XLA copies the cache to another layout.
    row = (block[:, None] * heads + jnp.arange(heads, dtype=jnp.int32)) * block_size
    flat = cache.reshape(-1, both)
    new = jnp.concatenate((k, v), axis=2).astype(cache.dtype)
    return flat.at[row + offset[:, None]].set(new, mode="drop").reshape(cache.shape)


def paged_attention(
    q: jax.Array,
    cache: jax.Array,
    plan: Plan,
    *,
    scale: float,
    decodes: bool,
    window: int | None,
    kernel: bool,
) -> jax.Array:
    """Compute causal attention for each token over its request's tokens.

    Args:
        q: [T, H, D].
        cache: [num_blocks, Hk, block_size, 2 D], including this step's keys and values.
        plan: the step's plan.
        scale: multiplies the scores.
        decodes: each request has at most one token.
        window: a token sees itself and `window - 1` tokens before it; None means all.
        kernel: use a Pallas kernel.

    Returns:
        [T, H, D]; arbitrary for padding.
    """
    heads, dim = q.shape[1:]
    if not kernel:
        return _attend(q, cache, plan, scale, 1 if decodes else TILE_TOKENS, window)
    out, _ = ragged_paged_attention(
        *(q, cache, plan.query_start, plan.context_len, plan.tables),
        scale=scale,
        sliding_window=window,
        block_q=1 if decodes else tile_queries(heads, cache.shape[1], dim),
    )
    return out


def _attend(
    q: jax.Array,
    cache: jax.Array,
    plan: Plan,
    scale: float,
    tile_tokens: int,
    window: int | None,
) -> jax.Array:
    """Compute attention the plain way."""
    tokens, heads, dim = q.shape
    _, kv_heads, block_size, _ = cache.shape
    pages = group_pages(block_size)
    tiles = plan_tiles(plan.query_start, plan.context_len, tokens, tile_tokens, cores=1)
    request = tiles.request
    offset = jnp.arange(tile_tokens, dtype=jnp.int32)
    position = tiles.first[:, None] + offset  # [N, tile]
    token = position + (plan.query_start[1:] - plan.context_len)[request][:, None]
    position = jnp.where(offset < tiles.queries[:, None], position, -1)
    tiled = q.at[token].get(mode="clip")
    tiled = tiled.reshape(*token.shape, kv_heads, heads // kv_heads, dim)
    last = position.max(axis=1)
    span = pages * block_size

    def attend_group(group: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Attend to one page group in every tile."""
        running_max, total, out = carry
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
        scores = jnp.where(seen, scores * jnp.float32(scale), -jnp.inf)
        new_max = jnp.maximum(running_max, scores.max(axis=-1))
        # If a token has seen nothing yet, its maximum is -inf.
        base = jnp.where(new_max == -jnp.inf, 0.0, new_max)
        weights = jnp.where(seen, jnp.exp(scores - base[..., None]), 0.0)
        rescale = jnp.exp(running_max - base)
        product = jnp.einsum(
            "nhgqk,nhkd->nhgqd",
            *(weights.astype(q.dtype), values),
            precision=precision(q),
            preferred_element_type=jnp.float32,
        )
        return (
            new_max,
            total * rescale + weights.sum(axis=-1),
            out * rescale[..., None] + product,
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
    _, total, out = lax.fori_loop(first, position.max() // span + 1, attend_group, carry)
    out = out / jnp.where(total == 0.0, 1.0, total)[..., None]
    out = out.transpose(0, 3, 1, 2, 4).reshape(len(request) * tile_tokens, heads, dim)
    return out.at[_index_in_tiles(plan, tile_tokens)].get(mode="clip").astype(q.dtype)


def _index_in_tiles(plan: Plan, tile_tokens: int) -> jax.Array:
    """Return each token's tile * tile_tokens + offset in it, int32 [T]; arbitrary for padding."""
    each = -(-jnp.diff(plan.query_start) // tile_tokens)
    tiles_before = (jnp.cumsum(each) - each)[plan.request]
    token = jnp.arange(len(plan.request), dtype=jnp.int32)
    return tiles_before * tile_tokens + token - plan.query_start[plan.request]
