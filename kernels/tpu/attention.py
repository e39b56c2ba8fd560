"""Attention of a ragged batch over a paged KV cache: prefill chunks and decodes in one launch.

    ragged_paged_attention(q [T, H, D], pages) -> [T, H, D]

jax's own (jax.experimental.pallas.ops.tpu.ragged_paged_attention) gives no log-sum-exp, which is
what chips that share a context need, does not run in the interpreter, and wants keys and values of
a token side by side. This is flash attention (Dao et al. 2022) with online softmax over pages:

Work. A request's queries are cut into blocks of at most `queries_per_block`; the T tokens of B
requests are no more than B + T / queries_per_block blocks, of which those that are not needed do
nothing. XLA gathers the queries by block and KV head, so that a block's rows are [queries x group,
D]: a decode wastes none if there is one query a block.

Pages. A block needs the pages from its first visible key to its last query. They come by DMA,
`pages_per_block` at a time, into one of two slots of VMEM, a semaphore for each:

    slot a    pages i      ── waited for, multiplied ──
    slot b    pages i + 1  ── on their way ────────────

Behind the last pages of a block come the first ones of the next block, so that memory is never idle
between requests; which slot is whose turn goes from program to program in SMEM. A slot is written
again only when the products that read it are done: the core is one thread.

Shared contexts. Chip r of W may have pages r, r + W, r + 2 W, ... of every request (`page_offset`,
`page_stride`); positions stay those of the whole context, so that causal masks and windows are
right, and what the chips get is joined by distributed_decode_attention.py.

Megacore: each core has half of the KV heads. Not handled: sinks, fp8 caches, heads of other than a
multiple of 128 numbers on a TPU (DMAs take whole tiles).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from weft.kernels.tpu.topology import Index, cores

NEGATIVE = -1e30
"""For what is masked. Not -inf: the difference of two is no number."""

ROWS = 128
"""Rows of queries that a block has by default, if there are as many."""

KEYS = 2048
"""Keys, of all KV heads together, that are under way at once by default; at most 1024 of a head."""


def ragged_paged_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    query_start: jax.Array,
    context_len: jax.Array,
    block_table: jax.Array,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    page_stride: int = 1,
    page_offset: Index = 0,
    queries_per_block: int | None = None,
    pages_per_block: int | None = None,
    dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Causal attention: request b has the queries query_start[b]:query_start[b + 1], the last ones
    of its context_len[b] tokens, whose keys are in the pages block_table[b].

    Args:
        q: [T, H, D].
        keys, values: [pages, Hk, page, D]; query head h reads head h // (H / Hk).
        query_start: int32 [B + 1]; what is behind the last one is padding, whose result is 0.
        context_len: int32 [B].
        block_table: int32 [B, n].
        scale: scores are multiplied with it.
        sliding_window: token i sees the tokens j with i - window < j <= i.
        softcap: scores become softcap * tanh(score / softcap).
        page_stride, page_offset: entry e of a row of the table is page e * stride + offset of the
            request; the others are on other chips.
        queries_per_block: tokens of a request that are one block; 1 where all have one, else as
            many as fill 128 rows.
        pages_per_block: pages that come at once.
        dtype: of the result; q's if None.

    Returns:
        [T, H, D], and float32 [T, H]: the log of the sum of exp(score), -inf where no key is
        seen.

    Raises:
        ValueError: shapes do not fit.
    """
    tokens, heads, depth = q.shape
    _, kv_heads, page, _ = keys.shape
    if heads % kv_heads or keys.shape[3] != depth or keys.shape != values.shape:
        raise ValueError(
            f"q is {list(q.shape)}, keys are {list(keys.shape)} and values {list(values.shape)}; "
            "they must be [T, H, D] and twice [pages, Hk, page, D] with Hk a divisor of H"
        )
    group = heads // kv_heads
    requests, table_width = block_table.shape
    if queries_per_block is None:
        queries_per_block = 1 if tokens <= requests else min(max(ROWS // group, 1), tokens)
    if pages_per_block is None:
        pages_per_block = max(min(KEYS // kv_heads, 1024) // page, 1)
    pages_per_block = min(pages_per_block, table_width)

    blocks = requests + tokens // queries_per_block
    request, offset, count, place = _blocks(query_start, blocks, tokens, queries_per_block)
    queries = query_start[1:] - query_start[:-1]
    position = (context_len - queries)[request] + offset
    rows = queries_per_block * group
    at = query_start[request][:, None] + offset[:, None] + jnp.arange(queries_per_block)
    by_block = q[jnp.minimum(at, tokens - 1)].reshape(
        blocks, queries_per_block, kv_heads, group, depth
    )
    by_block = by_block.transpose(0, 2, 1, 3, 4).reshape(blocks, kv_heads, rows, depth)

    parts = 2 if cores() == 2 and kv_heads % 2 == 0 else 1
    local = kv_heads // parts
    buffer = pltpu.VMEM((2, local, pages_per_block * page, depth), keys.dtype)
    row_spec = pl.BlockSpec((1, local, rows, depth), lambda c, i, *_: (i, c, 0, 0))
    sum_spec = pl.BlockSpec((1, local, rows, 1), lambda c, i, *_: (i, c, 0, 0))
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    seen = table_width * page
    out, lse = pl.pallas_call(
        lambda *refs: _kernel(
            *refs,
            scale=scale,
            window=sliding_window,
            softcap=softcap,
            stride=page_stride,
            group=group,
            width=table_width,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(parts, blocks),
            in_specs=[row_spec, hbm, hbm],
            out_specs=[row_spec, sum_spec],
            scratch_shapes=[
                buffer,
                buffer,
                pltpu.VMEM((local, rows, depth), jnp.float32),
                pltpu.VMEM((local, rows, 1), jnp.float32),
                pltpu.VMEM((local, rows, 1), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2, 2)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(by_block.shape, dtype or q.dtype),
            jax.ShapeDtypeStruct((blocks, kv_heads, rows, 1), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(  # of full tables
            flops=4 * tokens * heads * depth * seen,
            bytes_accessed=2 * q.nbytes
            + 2 * requests * seen * kv_heads * depth * keys.dtype.itemsize,
            transcendentals=tokens * heads * seen,
        ),
        name="ragged_paged_attention",
    )(
        block_table.reshape(-1),
        request,
        position,
        count,
        jnp.asarray(page_offset, jnp.int32).reshape(1),
        by_block,
        keys,
        values,
    )
    real = jnp.arange(tokens) < query_start[-1]
    block, row = place // queries_per_block, place % queries_per_block
    out = out.reshape(blocks, kv_heads, queries_per_block, group, depth)[block, :, row]
    lse = lse.reshape(blocks, kv_heads, queries_per_block, group)[block, :, row]
    out = jnp.where(real[:, None, None], out.reshape(tokens, heads, depth), 0)
    return out, jnp.where(real[:, None], lse.reshape(tokens, heads), -jnp.inf)


def _blocks(
    query_start: jax.Array, blocks: int, tokens: int, size: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Cut the queries of requests into blocks.

    Returns:
        int32 [blocks] each: its request, its first query of that, its queries (0 for none); and
        [T]: the row of each token, `size` to a block.
    """
    queries = query_start[1:] - query_start[:-1]
    of_request = (queries + size - 1) // size
    end = jnp.cumsum(of_request)
    index = jnp.arange(blocks, dtype=jnp.int32)
    request = jnp.minimum(jnp.searchsorted(end, index, side="right"), len(queries) - 1)
    request = request.astype(jnp.int32)
    offset = (index - (end - of_request)[request]) * size
    count = jnp.where(index < end[-1], jnp.clip(queries[request] - offset, 0, size), 0)
    token = jnp.arange(tokens, dtype=jnp.int32)
    owner = jnp.searchsorted(query_start[1:], token, side="right")
    owner = jnp.minimum(owner, len(queries) - 1)
    place = (end - of_request)[owner] * size + token - query_start[owner]
    return request, offset, count, jnp.clip(place, 0, blocks * size - 1)


def _kernel(
    table: jax.Ref,  # int32 [B * n]
    request: jax.Ref,  # int32 [blocks]
    position: jax.Ref,  # int32 [blocks]; of the first query
    count: jax.Ref,  # int32 [blocks]
    page_offset: jax.Ref,  # int32 [1]
    q: jax.Ref,  # [1, Hk, rows, D]
    keys: jax.Ref,  # [pages, all Hk, page, D] in HBM
    values: jax.Ref,
    out: jax.Ref,  # [1, Hk, rows, D]
    lse: jax.Ref,  # float32 [1, Hk, rows, 1]
    k_slots: jax.Ref,  # [2, Hk, pages_per_block * page, D]
    v_slots: jax.Ref,
    total: jax.Ref,  # float32 [Hk, rows, D]
    largest: jax.Ref,  # float32 [Hk, rows, 1]
    weight: jax.Ref,  # float32 [Hk, rows, 1]
    turn: jax.Ref,  # int32 [1]
    arrived: jax.Ref,  # DMA semaphores [2, 2]: slot; keys, values
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    stride: int,
    group: int,
    width: int,
) -> None:
    heads, page = q.shape[1], keys.shape[2]
    at_once = k_slots.shape[2] // page
    part, block = pl.program_id(0), pl.program_id(1)

    def bounds(block: Index) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Of a block: its first group of pages, the one behind its last, and the entry behind."""
        begin = 0 if window is None else jnp.maximum(position[block] - window + 1, 0)
        end = position[block] + count[block] + page - 1
        first = _entries(lax.div(begin, page), page_offset[0], stride)
        last = _entries(lax.div(end, page), page_offset[0], stride)
        last = jnp.where(count[block] > 0, last, 0)
        return lax.div(first, at_once), lax.div(last + at_once - 1, at_once), last

    def each_page(block: Index, number: jax.Array, slot: jax.Array, act: str) -> None:
        """Start, or wait for, the copies of a group of pages; of those that the block has."""
        last = bounds(block)[2]
        row = request[block] * width
        for i in range(at_once):
            entry = number * at_once + i

            @pl.when(entry < last)
            def _(i: int = i, entry: jax.Array = entry) -> None:
                source = (table[row + entry], pl.ds(part * heads, heads))
                target = (slot, slice(None), pl.ds(i * page, page))
                for which, (pool, slots) in enumerate(((keys, k_slots), (values, v_slots))):
                    copy = pltpu.make_async_copy(
                        pool.at[source], slots.at[target], arrived.at[slot, which]
                    )
                    getattr(copy, act)()

    def begin(block: Index, slot: jax.Array) -> None:
        """Start the first group of a block, if there is one."""
        last_block = pl.num_programs(1) - 1
        inside = jnp.minimum(block, last_block)
        first, end, _ = bounds(inside)
        pl.when((block <= last_block) & (first < end))(
            lambda: each_page(inside, first, slot, "start")
        )

    @pl.when(block == 0)
    def _() -> None:
        turn[0] = 0
        begin(0, turn[0])

    total[...] = jnp.zeros_like(total)
    weight[...] = jnp.zeros_like(weight)
    largest[...] = jnp.full_like(largest, NEGATIVE)
    first, end, last = bounds(block)
    pl.when(first >= end)(lambda: begin(block + 1, turn[0]))

    @pl.loop(first, end)
    def _(number: jax.Array) -> None:
        slot = turn[0]
        turn[0] = 1 - slot
        pl.when(number + 1 < end)(lambda: each_page(block, number + 1, 1 - slot, "start"))
        pl.when(number + 1 == end)(lambda: begin(block + 1, 1 - slot))
        each_page(block, number, slot, "wait")

        entry = number * at_once * page + lax.broadcasted_iota(jnp.int32, (1, at_once * page), 1)
        column = number * at_once * page + lax.broadcasted_iota(jnp.int32, (at_once * page, 1), 0)
        there = column < last * page
        key = entry
        if stride > 1:
            key = (lax.div(entry, page) * stride + page_offset[0]) * page + lax.rem(entry, page)
        row = lax.broadcasted_iota(jnp.int32, (q.shape[2], 1), 0)
        query = position[block] + lax.div(row, group)
        sees = (key <= query) & (entry < last * page)
        if window is not None:
            sees &= key > query - window
        for head in range(heads):
            _attend(
                q[0, head],
                k_slots[slot, head],
                jnp.where(there, v_slots[slot, head], 0),  # behind the last page is anything
                sees,
                total.at[head],
                largest.at[head],
                weight.at[head],
                scale=scale,
                softcap=softcap,
            )

    seen = weight[...] > 0
    out[0] = (total[...] / jnp.where(seen, weight[...], 1.0)).astype(out.dtype)
    lse[0] = jnp.where(seen, largest[...] + jnp.log(jnp.where(seen, weight[...], 1.0)), -jnp.inf)


def _entries(pages: Index, offset: Index, stride: int) -> Index:
    """How many of the first pages of a request are those offset, offset + stride, ..."""
    return pages if stride == 1 else lax.div(pages - offset + stride - 1, stride)


def _attend(
    q: jax.Array,  # [rows, D]
    k: jax.Array,  # [n, D]
    v: jax.Array,  # [n, D]
    sees: jax.Array,  # bool [rows, n]
    total: jax.Ref,  # float32 [rows, D]
    largest: jax.Ref,  # float32 [rows, 1]
    weight: jax.Ref,  # float32 [rows, 1]
    *,
    scale: float,
    softcap: float | None,
) -> None:
    """Take some keys into the softmax so far."""
    scores = lax.dot_general(q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    scores *= scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(sees, scores, NEGATIVE)
    before = largest[...]
    now = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    fades = jnp.exp(before - now)
    p = jnp.where(sees, jnp.exp(scores - now), 0.0)
    largest[...] = now
    weight[...] = weight[...] * fades + jnp.sum(p, axis=1, keepdims=True)
    product = jnp.dot(p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    total[...] = total[...] * fades + product
