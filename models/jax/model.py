"""A decoder as a pure function of its ModelSpec and a tree of parameters.

The code is one device's view, inside `shard_map`. `forward` runs a ragged batch through the layers,
writes keys and values to the paged cache and returns the sampled rows' logits. With many tokens,
each device has some between blocks (collectives.py); attention always has all tokens and some
heads. kernels.py chooses which parts are Pallas kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from weft.models.jax.attention import Plan, make_plan, paged_attention, write_cache
from weft.models.jax.collectives import (
    MlpPart,
    all_reduce,
    block_input,
    block_output,
    precision,
    scatter_sum,
    weight_gathered_mlp,
)
from weft.models.jax.experts import dense, gated, run_experts
from weft.models.jax.kernels import Shape
from weft.models.jax.mesh import TENSOR
from weft.models.jax.parameters import Attention, Mlp, Moe, Norm, Params
from weft.models.spec.spec import LayerSpec, ModelSpec, MoeSpec, NormSpec, RopeSpec

Cache = tuple[jax.Array, ...]
"""One array per layer, [num_blocks, Hk, block_size, 2 D]."""


class Batch(NamedTuple):
    """One step as int32 arrays: T tokens, B requests, S sampled rows.

    Attributes:
        tokens: [T]; token ids; -1 - slot stands for the slot's last sampled token.
        query_start, context_len, tables: as in Plan.
        rows: [S]; indices of the sampled tokens.
    """

    tokens: Any
    query_start: Any
    context_len: Any
    tables: Any
    rows: Any


def forward(
    spec: ModelSpec,
    vocab_size: int,
    shape: Shape,
    params: Params,
    cache: Cache,
    newest: jax.Array,
    batch: Batch,
) -> tuple[jax.Array, jax.Array, Cache]:
    """Run one step.

    Args:
        spec: a device's part of the model.
        vocab_size: the whole vocabulary's size.
        shape: the step's shape.
        params: this device's part.
        cache: this device's heads; returned with this step's keys and values.
        newest: int32 [slots]; each slot's last sampled token.
        batch: the step.

    Returns:
        the sampled rows' logits, [S, vocab / devices]; -inf beyond the vocabulary;
        hidden states, [T, hidden], or this device's tokens; the cache.
    """
    ids = batch.tokens
    plan = make_plan(batch.query_start, batch.context_len, batch.tables, len(ids))
    ids = jnp.where(ids < 0, newest[jnp.maximum(-1 - ids, 0)], ids)
    x = embed(params.embedding, ids, sharded=shape.sharded)
    turns = turns_of(spec, plan.position)
    new_cache = []
    for layer, own, pages in zip(spec.layers, params.layers, cache, strict=True):
        update, pages = _attend(
            spec, layer, own.attention, shape, x, turns[layer.attention.rope], pages, plan
        )
        stream = _add(x, normalize(layer.attention_output_norm, own.attention_output_norm, update))
        if layer.is_parallel:
            normed = normalize(layer.attention_norm, own.attention.norm, x)  # XLA reuses it
        else:
            normed = normalize(layer.feed_forward_norm, own.feed_forward.norm, stream)
        if isinstance(own.feed_forward, Moe):
            assert isinstance(layer.feed_forward, MoeSpec)
            update = run_experts(layer.feed_forward, own.feed_forward, shape, normed)
        else:
            update = _feed_forward(own.feed_forward, shape, normed)
        update = normalize(layer.feed_forward_output_norm, own.feed_forward_output_norm, update)
        x = _add(stream, update)
        new_cache.append(pages)
    logits = head(spec, vocab_size, params, _rows(x, batch.rows, sharded=shape.sharded))
    return logits, x, tuple(new_cache)


def embed(table: jax.Array, ids: jax.Array, *, sharded: bool) -> jax.Array:
    """int32 [T] -> [T, hidden], or this device's tokens; each device has a part of the table."""
    each = table.shape[0]
    local = ids - lax.axis_index(TENSOR) * each
    here = (local >= 0) & (local < each)
    x = jnp.where(here[:, None], table[jnp.clip(local, 0, each - 1)], 0)
    return scatter_sum(x) if sharded else all_reduce(x)


def head(spec: ModelSpec, vocab_size: int, params: Params, x: jax.Array) -> jax.Array:
    """[S, hidden] -> logits for this device's tokens, [S, vocab / devices], in x's dtype."""
    table = params.embedding if params.lm_head is None else params.lm_head
    logits = lax.dot_general(
        *(normalize(spec.norm, params.norm, x), table),
        (((1,), (1,)), ((), ())),
        precision=precision(x),
        preferred_element_type=jnp.float32,
    ).astype(x.dtype)
    word = lax.axis_index(TENSOR) * table.shape[0] + jnp.arange(table.shape[0], dtype=jnp.int32)
    return jnp.where(word < vocab_size, logits, -jnp.inf)


def normalize(spec: NormSpec | None, own: Norm | None, x: jax.Array) -> jax.Array:
    """Apply a norm over the last axis, in float32, if there is one; see NormSpec."""
    if spec is None or own is None:
        return x
    wide = x.astype(jnp.float32)
    if spec.is_centered:
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + jnp.float32(spec.eps))
    if not spec.is_centered:
        return wide.astype(x.dtype) * own.weight
    # As torch, layer norm rounds once.
    wide = wide * own.weight.astype(jnp.float32)
    if own.bias is not None:
        wide = wide + own.bias.astype(jnp.float32)
    return wide.astype(x.dtype)


class Turn(NamedTuple):
    """A step's rotary embedding: cosine and sine of each token's angles, float32 [T, 1, D / 2].

    `query_scale`, float32 [T, 1, 1], multiplies the queries; None for 1.
    """

    cos: jax.Array
    sin: jax.Array
    query_scale: jax.Array | None


def turns_of(spec: ModelSpec, positions: jax.Array) -> dict[RopeSpec, Turn]:
    """Return the turns for tokens at `positions`, int32 [T], for each embedding in the model."""
    turns = {}
    for rope in {layer.attention.rope: None for layer in spec.layers}:
        inverse = jnp.asarray(rope.inverse_frequencies(spec.head_dim))
        angles = positions.astype(jnp.float32)[:, None, None] * inverse
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        if (amplitudes := rope.amplitudes(spec.head_dim)) is not None:
            cos, sin = cos * amplitudes, sin * amplitudes
        query_scale = None
        if rope.query_beta:
            shifted = positions + rope.query_shift
            contexts = (shifted // rope.original_max_len).astype(jnp.float32)
            query_scale = (1 + rope.query_beta * jnp.log1p(contexts))[:, None, None]
        turns[rope] = Turn(cos, sin, query_scale)
    return turns


def rotate(x: jax.Array, turn: Turn) -> jax.Array:
    """Rotate each pair (x[d], x[d + D/2]) of [T, H, D] by its token's angles (Su et al. 2021)."""
    cos, sin = turn.cos, turn.sin
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1).astype(
        x.dtype
    )


def _add(x: jax.Array, block: jax.Array) -> jax.Array:
    """Add a block's output to the residual stream."""
    return (x.astype(jnp.float32) + block.astype(jnp.float32)).astype(x.dtype)


def _attend(
    spec: ModelSpec,
    layer: LayerSpec,
    own: Attention,
    shape: Shape,
    x: jax.Array,
    turn: Turn,
    pages: jax.Array,
    plan: Plan,
) -> tuple[jax.Array, jax.Array]:
    """Return attention(norm(x)), and the layer's cache with the new keys and values."""
    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    attention = layer.attention
    qkv = block_input(normalize(layer.attention_norm, own.norm, x), *own.qkv, shape)
    qkv = qkv.reshape(-1, heads + 2 * kv_heads, dim)
    q, k, v = jnp.split(qkv, (heads, heads + kv_heads), axis=1)
    q_norm, k_norm = attention.q_norm, attention.k_norm
    if attention.norms_after_rope:
        q, k = rotate(q, turn), rotate(k, turn)
    if q_norm is not None and k_norm is not None:
        if q_norm.spans_heads and own.q_norm is not None and own.k_norm is not None:
            q, k = _norm_heads((q, k), (own.q_norm.weight, own.k_norm.weight), q_norm.eps)
        else:
            q, k = normalize(q_norm, own.q_norm, q), normalize(k_norm, own.k_norm, k)
    if not attention.norms_after_rope:
        q, k = rotate(q, turn), rotate(k, turn)
    if turn.query_scale is not None:
        q = q * turn.query_scale.astype(q.dtype)
    kernel = shape.kernels.attention
    pages = write_cache(pages, k, v, plan, kernel=kernel)
    out = paged_attention(
        *(q, pages, plan),
        scale=attention.scale,
        decodes=shape.decodes,
        window=attention.sliding_window,
        kernel=kernel,
    )
    return block_output(out.reshape(-1, heads * dim), *own.o, shape), pages


def _norm_heads(
    parts: tuple[jax.Array, jax.Array], weights: tuple[jax.Array, jax.Array], eps: float
) -> list[jax.Array]:
    """Normalize queries and keys, [T, H, D] each, over all devices' heads together."""
    wide = [part.astype(jnp.float32) for part in parts]
    # Devices with the same heads have them equally often, so the mean over devices is exact.
    means = lax.pmean(jnp.stack([(x * x).mean(axis=(1, 2)) for x in wide]), TENSOR)
    scales = lax.rsqrt(means + jnp.float32(eps))[..., None, None]
    return [
        (x * scale).astype(part.dtype) * weight.reshape(1, *part.shape[1:])
        for x, scale, part, weight in zip(wide, scales, parts, weights, strict=True)
    ]


def _feed_forward(own: Mlp, shape: Shape, x: jax.Array) -> jax.Array:
    """down(silu(gate(x)) * up(x))."""
    if shape.weights_travel:
        gate, up = jnp.split(own.gate_up.weight, 2, axis=1)
        bias = own.gate_up.bias
        gate_bias, up_bias = (None, None) if bias is None else jnp.split(bias, 2)
        part = MlpPart(gate, up, gate_bias, up_bias, own.down.weight)
        out = weight_gathered_mlp(x, part, gated).astype(x.dtype)
        return out if own.down.bias is None else out + own.down.bias
    return dense(own, shape, x)


def _rows(x: jax.Array, rows: jax.Array, *, sharded: bool) -> jax.Array:
    """Select tokens' hidden states, [S, hidden], on every device."""
    if not sharded:
        return x[rows]
    each = x.shape[0]
    local = rows - lax.axis_index(TENSOR) * each
    here = (local >= 0) & (local < each)
    return all_reduce(jnp.where(here[:, None], x[jnp.clip(local, 0, each - 1)], 0))
