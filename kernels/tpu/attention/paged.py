"""Paged attention on a TPU, for ragged batches of prefill chunks and decodes.

    ragged_paged_attention(q [T, H, D], kv_pages [P, Hk, page, 2 D], ...) -> [T, H, D], LSE [T, H]

The cache. A page has, for each KV head, a row for each token: its key, then its value. So a page is
one DMA of consecutive memory; what is fetched is a matrix for each head, as the matrix unit takes
it; and a head of 64 numbers fills the 128 lanes of a row, where keys and values apart would be
padded to twice their size. (Pages with the token before the head, as of jax's own kernel, are
easier to write, and have to be unpicked head by head whenever they are read.)

How work is cut. As on GPUs (gpu/attention.py) a tile has up to BLOCK_Q queries of one request, and
the query heads that share a KV head are its rows (query_tiles.py). XLA gathers the queries into
tiles, and the rows of the result out of them. Which request a tile is of follows from the lengths
on the device, so one compiled program serves all lengths; tiles that are left over are not moved
and not computed. A program is a tile (attend.py). With two cores, tiles are dealt out to them.

jax.experimental.pallas.ops.tpu.ragged_paged_attention has no LSE, needs an even number of KV heads
on a chip, and cannot be interpreted; so it is not used.

Not handled: attention that is not causal, gradients, fp8 pages, heads of other sizes than multiples
of 64.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from weft.kernels.tpu.attention.kernel import SCALARS, Attention, Scalars, Work, tile_batch, work
from weft.kernels.tpu.attention.query_tiles import (
    LANES,
    Shape,
    column_to_row,
    cost,
    make_shape,
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
    """Causal attention of a ragged batch over a paged KV cache: reference.paged_attention.

    Request b has the query rows query_start[b]:query_start[b + 1], the last of its context_len[b]
    tokens; its token j is in page block_table[b, j // page] at row j % page. Requests without
    queries, and rows behind the last request's, are padding.

    Args:
        q: bfloat16 or float32 [T, H, D]; D is a multiple of 64.
        kv_pages: q's dtype [P, Hk, page, 2 D], a key and a value in each row; query head h reads
            KV head h // (H / Hk). A page has a multiple of 16 tokens.
        query_start: int32 [B + 1], not decreasing.
        context_len: int32 [B].
        block_table: int32 [B, n]; entries behind a request's context are not looked at.
        scale: of the scores.
        sliding_window: token i sees the tokens j with i - sliding_window < j <= i.
        softcap: scores become softcap * tanh(score / softcap) (Gemma 2).
        sinks: [H], one more score of each head, whose weight goes nowhere (gpt-oss).
        block_q: queries of a tile; by default 1 where T = B, else what makes about 128 rows, or
            fewer with many KV heads.
        block_k: keys that are fetched at a time, in whole pages; by default what fits in VMEM.

    Returns:
        q's dtype [T, H, D], and float32 [T, H], the log of the sum of exp(score), the sink's
        included. Padding rows have 0, and without sinks -inf.

    Raises:
        NotImplementedError: shapes or dtypes that the kernel does not take.
    """
    shape = make_shape(
        *(q, kv_pages, block_table),
        block_q=block_q,
        block_k=block_k,
        scale=scale,
        window=sliding_window,
        softcap=softcap,
    )
    alone = jnp.zeros(1, jnp.int32)
    scalars, queries = tile_batch(shape, q, query_start, context_len, block_table, alone)
    out, logs = _attend_tiles(shape, scalars, queries, kv_pages)
    return scatter_results(shape, out, logs, query_start, len(q), sinks)


def _attend_tiles(
    shape: Shape, scalars: Scalars, queries: jax.Array, kv_pages: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Results of queries [N, Hk, rows, lanes], and LSE [N, Hk, rows or more]."""
    tiles, heads, rows, lanes = queries.shape
    width = pl.cdiv(rows, LANES) * LANES

    def place(core: Index, i: Index, count: jax.Ref, *_: jax.Ref) -> tuple[Index, ...]:
        """The tile's block; behind the core's last tile, that one's, which is not moved again."""
        last = lax.max(0, lax.div(count[0] - 1 - core, cores()))
        return lax.min(i, last) * cores() + core, 0, 0, 0

    def kernel(*refs: jax.Ref) -> None:
        known, (q, pages, out, lse, *scratch) = Scalars.of(refs[:SCALARS]), refs[SCALARS:]
        core, i = pl.program_id(0), pl.program_id(1)
        tile = i * cores() + core

        @pl.when(tile < known.tiles.count[0])
        def _() -> None:
            attention = Attention(shape, known, pages, Work(*scratch))
            attention.attend(tile, i == 0, tile + cores(), q.at[0])
            for head in range(heads):
                result, log = attention.result(head)
                out[0, head] = result.astype(out.dtype)
                lse[0, pl.ds(head, 1)] = column_to_row(log)

    block = pl.BlockSpec((1, heads, rows, lanes), place)
    log_block = pl.BlockSpec((1, heads, width), lambda *at: place(*at)[:3])
    call = pl.pallas_call(
        kernel,
        out_shape=[
            jax.ShapeDtypeStruct(queries.shape, queries.dtype),
            jax.ShapeDtypeStruct((tiles, heads, width), jnp.float32),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=SCALARS,
            grid=(cores(), tiles // cores()),
            in_specs=[block, pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=[block, log_block],
            scratch_shapes=work(shape),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=cost(shape, tiles, len(scalars.table) // shape.pages),
        name="ragged_paged_attention",
    )
    out, logs = call(*scalars.flat, queries, kv_pages)
    return out, logs
