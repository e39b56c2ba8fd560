"""New keys and values into the pages of a KV cache, in place.

    write_pages(kv_pages [P, Hk, page, 2 D], k [T, Hk, D], v [T, Hk, D], ...) -> kv_pages

A DMA moves whole tiles, not a row of one. So a program takes a group of consecutive rows of a page
that new tokens fall into, replaces those, and puts it back: pages come and go by Pallas' pipeline,
and the result is the argument (`input_output_aliases`; donate the cache to the jitted step). Which
groups they are follows from the lengths on the device; what is left over of the worst batch's
number does the last one again, for which nothing is moved.

A group is read and written once, and two programs never have the same one: a page that is written
belongs to one request. That is the engine's rule for shared prefixes too: they are whole pages.

XLA's scatter, `pages.at[page, :, row].set(...)`, compiled for v5e with a donated cache of 134 MB:
2048 tokens copy all of it to another layout and back (134 MB of temporaries; 64 tokens do not).
With an index for each head it stays in place, as one update for each token and head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from weft.kernels.tpu.attention.query_tiles import owner

GROUP = 16
"""Rows of a page that are written at once for a few tokens: a tile of bfloat16."""


def write_pages(
    kv_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    query_start: jax.Array,
    context_len: jax.Array,
    block_table: jax.Array,
) -> jax.Array:
    """Write the tokens of a ragged batch where `ragged_paged_attention` looks for them.

    Args:
        kv_pages: bfloat16 or float32 [P, Hk, page, 2 D]; page is a multiple of 16. Donate it.
        k, v: [T, Hk, D]; tokens behind the last request's are padding.
        query_start: int32 [B + 1]; request b's new tokens are query_start[b]:query_start[b + 1],
            the last of its context_len[b].
        context_len: int32 [B].
        block_table: int32 [B, n].

    Raises:
        NotImplementedError: shapes that the kernel does not take.
    """
    _, heads, page, lanes = kv_pages.shape
    if page % GROUP or k.shape != v.shape or (heads, lanes) != (k.shape[1], 2 * k.shape[2]):
        raise NotImplementedError(
            f"kv_pages is {kv_pages.shape}, k {k.shape} and v {v.shape}; they must be "
            f"[P, Hk, page, 2 D], with pages of a multiple of {GROUP}, and twice [T, Hk, D]"
        )
    tokens, requests = len(k), len(context_len)
    group = page if tokens >= requests * page else GROUP
    queries = jnp.diff(query_start)
    begin = context_len - queries  # position of the first new token
    groups = jnp.where(queries > 0, (context_len - 1) // group - begin // group + 1, 0)
    ends = jnp.cumsum(groups)
    programs = max(1, min(tokens, tokens // group + 2 * requests))
    item = jnp.clip(jnp.arange(programs, dtype=jnp.int32), 0, jnp.maximum(ends[-1] - 1, 0))
    request = jnp.minimum(owner(ends, item), requests - 1)
    first = (begin[request] // group + item - (ends - groups)[request]) * group
    entry = jnp.clip(first // page, 0, block_table.shape[1] - 1)
    target = jnp.clip(block_table[request, entry], 0, len(kv_pages) - 1)
    position = first[:, None] + jnp.arange(group)
    token = query_start[request][:, None] + position - begin[request][:, None]
    rows = jnp.concatenate([k, v], axis=2).at[token].get(mode="clip").swapaxes(1, 2)
    scalars = (
        target,
        first % page // group,
        begin[request] - first,  # rows begin:end of the group are new
        context_len[request] - first,
    )
    return _replace_rows(kv_pages, rows, *(each.astype(jnp.int32) for each in scalars))


def _replace_rows(
    kv_pages: jax.Array,
    rows: jax.Array,  # [programs, Hk, group, 2 D]
    target: jax.Array,  # int32 [programs]; the page
    part: jax.Array,  # int32 [programs]; the group in it
    begin: jax.Array,  # int32 [programs]
    end: jax.Array,  # int32 [programs]
) -> jax.Array:
    programs, heads, group, lanes = rows.shape

    def kernel(
        target: jax.Ref, part: jax.Ref, begin: jax.Ref, end: jax.Ref,
        new: jax.Ref, old: jax.Ref, out: jax.Ref,
    ) -> None:  # fmt: skip
        i = pl.program_id(0)
        row = lax.broadcasted_iota(jnp.int32, (1, 1, group, 1), 2)
        is_new = (row >= begin[i]) & (row < end[i])
        out[...] = jnp.where(is_new, new[...], old[...])

    block = (1, heads, group, lanes)
    place = pl.BlockSpec(block, lambda i, target, part, *_: (target[i], 0, part[i], 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(programs,),
            in_specs=[pl.BlockSpec(block, lambda i, *_: (i, 0, 0, 0)), place],
            out_specs=place,
        ),
        input_output_aliases={5: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(flops=0, bytes_accessed=3 * rows.nbytes, transcendentals=0),
        name="write_pages",
    )(target, part, begin, end, rows.astype(kv_pages.dtype), kv_pages)
