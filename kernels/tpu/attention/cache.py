"""Writes new keys and values into a KV cache's pages, in place.

    write_pages(kv_pages [P, Hk, page, 2 D], k [T, Hk, D], v [T, Hk, D], ...) -> kv_pages

A DMA moves whole tiles, not single rows. A program therefore takes a group, consecutive rows that
include new tokens, replaces those rows, and writes the group back. Pallas' pipeline fetches and
stores the groups, and the result aliases the argument (`input_output_aliases`; donate the cache to
the jitted step). The lengths on the device determine the groups. The number of programs covers the
worst batch; surplus programs repeat the last group, for which nothing is moved.

Each group is read and written once, and two programs never share one, because a page that is
written belongs to one request. The engine's rule for shared prefixes agrees: they are whole pages.

The alternative, XLA's scatter `pages.at[page, :, row].set(...)`, was compiled for v5e with a
donated 134 MB cache. With 2048 tokens it copies the whole cache to another layout and back (134 MB
temporaries; with 64 tokens it does not). With one index per head it stays in place, as one update
per token and head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from weft.kernels.tpu.attention.query_tiles import segment_of

GROUP = 16
"""Page rows written at once for a few tokens: a bfloat16 tile."""


def write_pages(
    kv_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    query_start: jax.Array,
    context_len: jax.Array,
    block_table: jax.Array,
) -> jax.Array:
    """Write a ragged batch's tokens where `ragged_paged_attention` reads them.

    Args:
        kv_pages: bfloat16 or float32 [P, Hk, page, 2 D]; page is a multiple of 16. Donate it.
        k, v: [T, Hk, D]; tokens after the last request's are padding.
        query_start: int32 [B + 1], jax's cu_q_lens; request b's new tokens are
            query_start[b]:query_start[b + 1], which end its context_len[b] tokens.
        context_len: int32 [B], jax's kv_lens.
        block_table: int32 [B, n].

    Raises:
        NotImplementedError: the kernel does not support these shapes.
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
    index = jnp.clip(jnp.arange(programs, dtype=jnp.int32), 0, jnp.maximum(ends[-1] - 1, 0))
    request = jnp.minimum(segment_of(ends, index), requests - 1)
    first = (begin[request] // group + index - (ends - groups)[request]) * group
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
    page: jax.Array,  # int32 [programs]
    group_in_page: jax.Array,  # int32 [programs]
    begin: jax.Array,  # int32 [programs]; rows begin:end of the group are new
    end: jax.Array,  # int32 [programs]
) -> jax.Array:
    programs, heads, group, lanes = rows.shape

    def kernel(
        page: jax.Ref, group_in_page: jax.Ref, begin: jax.Ref, end: jax.Ref,
        new: jax.Ref, old: jax.Ref, out: jax.Ref,
    ) -> None:  # fmt: skip
        i = pl.program_id(0)
        row = lax.broadcasted_iota(jnp.int32, (1, 1, group, 1), 2)
        is_new = (row >= begin[i]) & (row < end[i])
        out[...] = jnp.where(is_new, new[...], old[...])

    block = (1, heads, group, lanes)
    in_cache = pl.BlockSpec(block, lambda i, page, part, *_: (page[i], 0, part[i], 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(programs,),
            in_specs=[pl.BlockSpec(block, lambda i, *_: (i, 0, 0, 0)), in_cache],
            out_specs=in_cache,
        ),
        input_output_aliases={5: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(flops=0, bytes_accessed=3 * rows.nbytes, transcendentals=0),
        name="write_pages",
    )(page, group_in_page, begin, end, rows.astype(kv_pages.dtype), kv_pages)
