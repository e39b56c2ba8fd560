"""Paged attention on a TPU, for ragged batches of prefill chunks and decodes.

    ragged_paged_attention(q [T, H, D], kv_pages [P, Hk, page, 2 D], ...) -> [T, H, D], LSE [T, H]

The cache. For each KV head, a page has one row per token: its key, then its value. A page is
therefore one DMA of consecutive memory. Its data is one matrix per head, as the matrix unit needs
it. A head of 64 numbers fills a row's 128 lanes, while separate keys and values would be padded to
twice their size. (jax's own kernel has the token before the head. Such pages are easier to write,
but every read must separate the heads.)

Tiling. As on GPUs (gpu/attention/kernel.py), a tile has up to BLOCK_Q queries of one request, and
the query heads that share a KV head are its rows (query_tiles.py). XLA gathers the queries into
tiles and the results out of them. The lengths on the device determine each tile's request, so one
compiled program serves all lengths. Surplus tiles are neither moved nor computed. A program
computes one tile (kernel.py). With two cores, tiles are assigned to them alternately.

Why not jax.experimental.pallas.ops.tpu.ragged_paged_attention: it has no LSE, needs an even number
of KV heads on a chip, and cannot be interpreted.

Not handled: attention that is not causal, gradients, fp8 pages, head sizes that are not multiples
of 64.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from weft.kernels.tpu.attention.kernel import (
    NUM_SCALARS,
    Attention,
    PrefetchedScalars,
    Scratch,
    scratch_shapes,
    tile_batch,
)
from weft.kernels.tpu.attention.query_tiles import (
    LANES,
    KernelConfig,
    column_to_row,
    cost,
    make_config,
    scatter_results,
)
from weft.kernels.tpu.runtime.topology import Index, cores


def ragged_paged_attention(
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
    block_q: int | None = None,
    block_k: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Compute causal attention for a ragged batch over a paged KV cache.

    The oracle is reference.paged_attention. Request b has the query rows
    query_start[b]:query_start[b + 1], which end its context_len[b] tokens. Its token j is in page
    block_table[b, j // page] at row j % page. Requests without queries, and rows after the last
    request's, are padding.

    Args:
        q: bfloat16 or float32 [T, H, D]; D is a multiple of 64.
        kv_pages: q's dtype [P, Hk, page, 2 D], a key and a value in each row; query head h reads KV
            head h // (H / Hk). A page has a multiple of 16 tokens.
        query_start: int32 [B + 1], not decreasing; jax's cu_q_lens.
        context_len: int32 [B]; jax's kv_lens.
        block_table: int32 [B, n]; entries beyond a request's context are ignored.
        scale: multiplies the scores.
        sliding_window: token i sees the tokens j with i - sliding_window < j <= i.
        softcap: scores become softcap * tanh(score / softcap) (Gemma 2).
        sinks: [H], an additional score per head without a value (gpt-oss).
        block_q: queries in a tile; by default 1 if T = B, else enough for about 128 rows, or fewer
            with many KV heads.
        block_k: keys fetched at a time, in whole pages; by default as many as fit VMEM.

    Returns:
        q's dtype [T, H, D], and float32 [T, H], the log of the sum of exp(score), including the
            sink's. Padding rows have 0, and without sinks -inf.

    Raises:
        NotImplementedError: the kernel does not support these shapes or dtypes.
    """
    config = make_config(
        *(q, kv_pages, block_table),
        block_q=block_q,
        block_k=block_k,
        scale=scale,
        window=sliding_window,
        softcap=softcap,
    )
    rank = jnp.zeros(1, jnp.int32)
    scalars, queries = tile_batch(config, q, query_start, context_len, block_table, rank)
    out, lse = _attend_tiles(config, scalars, queries, kv_pages)
    return scatter_results(config, out, lse, query_start, len(q), sinks)


def _attend_tiles(
    config: KernelConfig, scalars: PrefetchedScalars, queries: jax.Array, kv_pages: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attend with queries [N, Hk, rows, lanes]; return results, and LSE [N, Hk, rows or more]."""
    tiles, heads, rows, lanes = queries.shape
    width = pl.cdiv(rows, LANES) * LANES

    def block_index(core: Index, i: Index, count: jax.Ref, *_: jax.Ref) -> tuple[Index, ...]:
        """Return the tile's block; beyond the core's last tile, repeat it, so that nothing is
        moved.
        """
        last = lax.max(0, lax.div(count[0] - 1 - core, cores()))
        return lax.min(i, last) * cores() + core, 0, 0, 0

    def kernel(*refs: jax.Ref) -> None:
        batch, (q, pages, out, lse, *scratch) = (
            PrefetchedScalars.from_args(refs[:NUM_SCALARS]),
            refs[NUM_SCALARS:],
        )
        core, i = pl.program_id(0), pl.program_id(1)
        tile = i * cores() + core

        @pl.when(tile < batch.tiles.count[0])
        def _() -> None:
            attention = Attention(config, batch, pages, Scratch(*scratch))
            attention.attend(tile, i == 0, tile + cores(), q.at[0])
            for head in range(heads):
                result, head_lse = attention.result(head)
                out[0, head] = result.astype(out.dtype)
                lse[0, pl.ds(head, 1)] = column_to_row(head_lse)

    block = pl.BlockSpec((1, heads, rows, lanes), block_index)
    lse_block = pl.BlockSpec((1, heads, width), lambda *args: block_index(*args)[:3])
    call = pl.pallas_call(
        kernel,
        out_shape=[
            jax.ShapeDtypeStruct(queries.shape, queries.dtype),
            jax.ShapeDtypeStruct((tiles, heads, width), jnp.float32),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=NUM_SCALARS,
            grid=(cores(), tiles // cores()),
            in_specs=[block, pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=[block, lse_block],
            scratch_shapes=scratch_shapes(config),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=cost(config, tiles, len(scalars.block_table) // config.pages_per_request),
        name="ragged_paged_attention",
    )
    out, lse = call(*scalars.args, queries, kv_pages)
    return out, lse
