"""Oracles for TPU ops that are not collectives in `jax.lax`: plain jax, all devices at once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def times(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply x @ w in float32."""
    return jnp.einsum(
        "...k,kn->...n", x, w, preferred_element_type=jnp.float32, precision="highest"
    )


def paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    query_start: jax.Array,
    context_len: jax.Array,
    block_table: jax.Array,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Compute `ragged_paged_attention` over local pages."""
    (tokens, heads, depth), (_, kv_heads, page, _) = q.shape, kv_pages.shape
    request, position, real = _positions(query_start, context_len, tokens)
    key = jnp.arange(block_table.shape[1] * page)[None]
    sees = (key <= position[:, None]) & real[:, None]
    pool = kv_pages.at[block_table[request]].get(mode="clip").astype(jnp.float32)
    pool = pool.swapaxes(1, 2).reshape(tokens, kv_heads, -1, 2 * depth)
    pool = jnp.where(sees[:, None, :, None], pool, 0)  # invisible tokens may be NaN
    keys, values = jnp.split(jnp.repeat(pool, heads // kv_heads, axis=1), 2, axis=-1)
    scores = jnp.einsum("thd,thnd->thn", q.astype(jnp.float32), keys, precision="highest") * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if sliding_window is not None:
        sees &= key > position[:, None] - sliding_window
    scores = jnp.where(sees[:, None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    if sinks is not None:
        lse = jnp.logaddexp(lse, sinks)
    weights = jnp.where(
        sees[:, None], jnp.exp(scores - jnp.where(real[:, None], lse, 0)[..., None]), 0
    )
    return jnp.einsum("thn,thnd->thd", weights, values, precision="highest").astype(q.dtype), lse


def _positions(
    query_start: jax.Array, context_len: jax.Array, tokens: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return each token's request, its position there, and whether it belongs to one."""
    token = jnp.arange(tokens)
    request = jnp.searchsorted(query_start[1:], token, side="right")
    request = jnp.minimum(request, len(context_len) - 1)
    queries = query_start[request + 1] - query_start[request]
    position = context_len[request] - queries + token - query_start[request]
    return request, position, token < query_start[-1]


def shared_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    query_start: jax.Array,
    context_len: jax.Array,
    block_table: jax.Array,
    axes: tuple[str, ...],
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Compute `distributed_decode_attention`: page p is entry p // W on device p % W."""
    devices = lax.axis_size(axes)
    pool = lax.all_gather(kv_pages, axes, tiled=True)
    tables = lax.all_gather(block_table, axes).reshape(devices, *block_table.shape)
    tables = jnp.minimum(tables, len(kv_pages) - 1)
    tables = tables + jnp.arange(devices)[:, None, None] * len(kv_pages)
    table = tables.transpose(1, 2, 0).reshape(block_table.shape[0], -1)
    return paged_attention(q, pool, query_start, context_len, table, **options)


def write_pages(
    kv_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    query_start: jax.Array,
    context_len: jax.Array,
    block_table: jax.Array,
) -> jax.Array:
    """Write pages by XLA's scatter."""
    pages, _, page, _ = kv_pages.shape
    request, position, real = _positions(query_start, context_len, len(k))
    target = jnp.where(real, block_table[request, position // page], pages)
    new = jnp.concatenate([k, v], axis=2)
    return kv_pages.at[target, :, position % page].set(new, mode="drop")


def moe_dispatch(
    x: jax.Array, expert_ids: jax.Array, experts: int, axes: tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
    """Return this device's expert rows, ordered by device and token, and their offsets."""
    devices, k = lax.axis_size(axes), expert_ids.shape[1]
    local = experts // devices
    rows = lax.all_gather(x, axes, tiled=True)
    ids = lax.all_gather(expert_ids, axes, tiled=True) - lax.axis_index(axes) * local
    expert = jnp.where((ids >= 0) & (ids < local), ids, local).reshape(-1)
    limit = rows.shape[0] * min(k, local)
    order = jnp.argsort(expert, stable=True)[:limit]
    offsets = jnp.searchsorted(jnp.sort(expert), jnp.arange(local + 1)).astype(jnp.int32)
    real = jnp.arange(limit) < offsets[-1]
    return jnp.where(real[:, None], rows[order // k], 0), offsets


def experts(
    x: jax.Array, expert_ids: jax.Array, weights: jax.Array, w: jax.Array, axes: tuple[str, ...]
) -> jax.Array:
    """Run each token's experts, weighted and added; w is split over devices, [E / W, K, N]."""
    every = lax.all_gather(w, axes, tiled=True)[expert_ids].astype(jnp.float32)
    outs = jnp.einsum("tk,tjkn->tjn", x.astype(jnp.float32), every, precision="highest")
    return jnp.einsum("tj,tjn->tn", weights, outs).astype(x.dtype)


def grouped_matmul(x: jax.Array, w: jax.Array, offsets: jax.Array) -> jax.Array:
    """Multiply each row by its group's weight."""
    group = jnp.searchsorted(offsets[1:], jnp.arange(len(x)), side="right")
    inside = group < len(w)
    each = w[jnp.minimum(group, len(w) - 1)].astype(jnp.float32)
    out = jnp.einsum("tk,tkn->tn", x.astype(jnp.float32), each, precision="highest")
    return jnp.where(inside[:, None], out, 0).astype(x.dtype)


def grouped_gate_up(
    x: jax.Array, gate: jax.Array, up: jax.Array, offsets: jax.Array, transposed: bool = False
) -> jax.Array:
    """Multiply each row by its group's two weights: silu(first) * second."""
    if transposed:
        gate, up = gate.swapaxes(1, 2), up.swapaxes(1, 2)
    rows = x.astype(jnp.float32)
    gates, ups = grouped_matmul(rows, gate, offsets), grouped_matmul(rows, up, offsets)
    return (jax.nn.silu(gates) * ups).astype(x.dtype)
