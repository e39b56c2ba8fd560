"""The kernel for paged attention on ragged batches of prefill chunks and decodes.

The cache has the layout of kernels/cpu/attention.py. `attend` is FlashAttention-2 (Dao 2023) over a
block table (PagedAttention: Kwon et al. 2023). Work is cut as follows:

- A program has one KV head and a tile with BLOCK_M rows. G = H / Hk query heads share the KV head,
  and the rows hold them all: row i is head i % G of query i // G. Keys and values are therefore
  loaded once for all G heads, and a decode with G heads fills a tensor core's 16 rows.
- A step with decodes and prompts takes two launches (mixed.py), because a decode would leave most
  of a prompt's tile empty. Each launch leaves the other's requests (tile.Served).
- Tiles do not cross requests. Request b has at most cdiv(queries, BLOCK_Q) tiles, each with BLOCK_Q
  = BLOCK_M // G queries. Its first tile has number query_start[b] // BLOCK_Q + b. The grid
  therefore depends on T and B only, and a captured CUDA graph serves any lengths. Surplus programs
  do nothing. A request's last tile sees most keys and starts first.
- A tile iterates over BLOCK_N keys at a time, from its first query's first visible key to its last
  query's last one. Interior blocks, visible to all rows, come first and need no mask; then come the
  blocks at the edges.
- With SPLITS > 1, SPLITS programs share a tile's blocks, and decode.py merges the results. If ranks
  share the pages, a rank has the pages p with p % WORLD == rank (distributed_decode.py). The kernel
  counts its keys within its own pages, and `position_of` maps them to positions in the request.

Each program writes its own rows in `out` and `lse`, in its split's slot. No two programs write the
same row, so there are no signals; only `status` is shared, and updated atomically.

Scores are float32, in units of log 2. Weights and values are multiplied in q's dtype. Keys and
values in fp8 are cast to it exactly; their scales are applied to the scores and to the sum. Head
sizes are padded to powers of two.

A page outside the pool is never loaded: the program loads page 0 instead, flags the request, and
stores zeros and +inf as the LSE. Callers must ignore a flagged request's output.

Not supported: non-causal attention, gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.attention.inputs import (
    LONGER_THAN_TABLE,
    OUT_OF_POOL,
    SHORTER_THAN_QUERIES,
)
from weft.kernels.gpu.attention.tile import Served

_OUT_OF_POOL = tl.constexpr(OUT_OF_POOL)
_LONGER = tl.constexpr(LONGER_THAN_TABLE)
_SHORTER = tl.constexpr(SHORTER_THAN_QUERIES)

_ONE, _MORE = tl.constexpr(int(Served.ONE)), tl.constexpr(int(Served.MORE))
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class Cache(NamedTuple):
    """A paged cache for keys and values: one kernel argument (runtime/peers.py).

    Attributes:
        k: keys [num_blocks, KV_HEADS, PAGE, D + ROPE].
        v: values [num_blocks, KV_HEADS, PAGE, D], or None: each key's first D numbers.
        k_scale, v_scale: float32 [KV_HEADS], or None.
    """

    k: Tensor
    v: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None


class Batch(NamedTuple):
    """A step's requests: one kernel argument (runtime/peers.py).

    Attributes:
        query_start: int32 [requests + 1]; None if each request has one query. See PagedBatch.
        context_len: int32 [requests].
        block_table: int32 [requests, table_width]; this rank's pages.
        status: int32 [requests].
    """

    query_start: Tensor | None
    context_len: Tensor
    block_table: Tensor
    status: Tensor


class Form(NamedTuple):
    """Compile-time constants for attention: its kernel's argument FORM (runtime/peers.py).

    Attributes:
        heads, kv_heads: HEADS and KV_HEADS.
        group: number of heads in a tile; they share a KV head.
        page: PAGE, tokens in a page.
        dim: D, numbers in a value.
        rope: ROPE, numbers in a key after the first D.
        window: maximum number of keys that a query sees; 0 for all.
        softcap: softcap for the scores; 0 for none.
        served: the requests that the launch serves: a tile.Served.
        block_m, block_n: rows in a tile; keys that it takes at a time.
        block_d, block_r: D and ROPE rounded up to powers of two, at least 16.
    """

    heads: int
    kv_heads: int
    group: int
    page: int
    dim: int
    rope: int
    window: int
    softcap: float
    served: int
    block_m: int
    block_n: int
    block_d: int
    block_r: int


@triton.jit
def local_length(length, rank, WORLD: tl.constexpr, PAGE: tl.constexpr):
    """Count the tokens that a rank has among a request's first `length` tokens."""
    if WORLD > 1:
        pages, rest = length // PAGE, length % PAGE
        whole = (pages + (WORLD - 1) - rank) // WORLD
        length = whole * PAGE + tl.where(pages % WORLD == rank, rest, 0)
    return length


@triton.jit
def position_of(at, rank, WORLD: tl.constexpr, PAGE: tl.constexpr):
    """Map a rank's token indices to positions in the request."""
    if WORLD > 1:
        at = (at // PAGE * WORLD + rank) * PAGE + at % PAGE
    return at


@triton.jit
def find_request(query_start, tile, requests, BLOCK_Q: tl.constexpr):
    """Find a tile's request: the last one with its first tile at or before this tile."""
    low = tl.full((), 0, tl.int32)
    high = low + requests
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(query_start + middle) // BLOCK_Q + middle <= tile
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def load_block(
    x,  # memory with the rows
    rows,  # [BLOCK_N]; each row's first index
    needed,  # bool [BLOCK_N]; other rows become 0
    D: tl.constexpr,
    EDGE: tl.constexpr,  # some rows are not needed
    BLOCK_D: tl.constexpr,
):
    """Load the rows' first D numbers: [BLOCK_N, BLOCK_D], padded with zeros."""
    d = tl.arange(0, BLOCK_D)
    places = x + rows[:, None] + d[None, :]
    if EDGE and D < BLOCK_D:
        block = tl.load(places, mask=needed[:, None] & (d < D)[None, :], other=0.0)
    elif EDGE:
        block = tl.load(places, mask=needed[:, None], other=0.0)
    elif D < BLOCK_D:
        block = tl.load(places, mask=(d < D)[None, :], other=0.0)
    else:
        block = tl.load(places)
    return block


@triton.jit
def soften(
    scores,  # float32 [BLOCK_M, BLOCK_N]; the weights' log 2
    top,  # float32 [BLOCK_M]; the largest score so far
    weight,  # float32 [BLOCK_M]; the weights' sum so far, in units of 2^top
):
    """Take one online softmax step (Milakov and Gimelshein 2018).

    Returns:
        the scores' weights; the factor by which earlier weights fade; the new top and weight.
    """
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    anchor = tl.where(new_top == float("-inf"), 0.0, new_top)  # no key seen yet
    weights = tl.exp2(scores - anchor[:, None])
    fade = tl.exp2(top - anchor)
    return weights, fade, new_top, weight * fade + tl.sum(weights, axis=1)


@triton.jit
def load_pages(
    table,  # int32 [n]; this request's pages
    start,  # the block's first key, among this rank's keys
    begin,  # first key for the tile, inclusive
    end,  # end (exclusive) for the tile's keys
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Load the page of each key in a block, int32 [BLOCK_N]; 0 for keys outside of the tile's.

    A table's entries before `begin` and from `end` on may be missing or stale.
    """
    at = start + tl.arange(0, BLOCK_N)
    return tl.load(table + at // PAGE, mask=(at >= begin) & (at < end), other=0)


@triton.jit
def attend_block(
    q,  # [BLOCK_M, BLOCK_D]
    q_rope,  # [BLOCK_M, BLOCK_R], or None; each query's numbers after the first D
    total,  # float32 [BLOCK_M, BLOCK_D]; weighted sum over values
    top,  # float32 [BLOCK_M]; the largest score so far
    weight,  # float32 [BLOCK_M]; the weights' sum, in units of 2^top
    bad,  # int32 [BLOCK_N]; 1 where a page was outside the pool
    keys,  # [num_blocks, KV_HEADS, PAGE, D + ROPE]
    values,  # [num_blocks, KV_HEADS, PAGE, D], or None: each key's first D numbers
    page,  # int32 [BLOCK_N]; each key's page
    num_blocks,
    head,
    start,  # the block's first key, among this rank's keys
    begin,  # first key for the tile, inclusive
    end,  # end (exclusive) for the tile's keys
    position,  # int32 [BLOCK_M]; each row's position in its request
    scale,
    rank,
    WORLD: tl.constexpr,
    EDGE: tl.constexpr,  # some rows may not see some keys
    FORM: tl.constexpr,
):
    """Process one block with an online softmax step."""
    KV_HEADS: tl.constexpr = FORM.kv_heads
    PAGE: tl.constexpr = FORM.page
    D: tl.constexpr = FORM.dim
    ROPE: tl.constexpr = FORM.rope
    WINDOW: tl.constexpr = FORM.window
    SOFTCAP: tl.constexpr = FORM.softcap
    BLOCK_N: tl.constexpr = FORM.block_n
    BLOCK_D: tl.constexpr = FORM.block_d
    BLOCK_R: tl.constexpr = FORM.block_r
    at = start + tl.arange(0, BLOCK_N)
    needed = (at >= begin) & (at < end)
    out_of_pool = (page < 0) | (page >= num_blocks)
    bad = bad | out_of_pool.to(tl.int32)
    page = tl.where(out_of_pool, 0, page)
    of_page, slot = page.to(tl.int64) * KV_HEADS + head, at % PAGE
    # Not (of_page * PAGE + slot) * WIDTH: Triton 3.6 takes each sum for a multiple of PAGE, and
    # then loads 16 bytes at once from rows that are not aligned to 16 bytes.
    key_rows = of_page * (PAGE * (D + ROPE)) + slot * (D + ROPE)
    k = load_block(keys, key_rows, needed, D, EDGE, BLOCK_D).to(q.dtype)
    scores = tl.dot(q, k.T, input_precision="ieee")
    if ROPE > 0:
        k_rope = load_block(keys + D, key_rows, needed, ROPE, EDGE, BLOCK_R)
        scores = tl.dot(q_rope, k_rope.to(q.dtype).T, scores, input_precision="ieee")
    if SOFTCAP > 0:  # tanh without overflow
        shrunk = scores * (scale / SOFTCAP)
        small = tl.exp2(tl.abs(shrunk) * (-2 * LOG2E))
        bent = (1 - small) / (1 + small)
        scores = tl.where(shrunk < 0, -bent, bent) * (SOFTCAP * LOG2E)
    else:
        scores = scores * (scale * LOG2E)
    if EDGE:
        key = position_of(at, rank, WORLD, PAGE)[None, :]
        seen = needed[None, :] & (key <= position[:, None])
        if WINDOW > 0:
            seen = seen & (key > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    weights, fade, top, weight = soften(scores, top, weight)
    v = k
    if values is not None:
        value_rows = of_page * (PAGE * D) + slot * D
        v = load_block(values, value_rows, needed, D, EDGE, BLOCK_D).to(q.dtype)
    total = tl.dot(weights.to(q.dtype), v, total * fade[:, None], input_precision="ieee")
    return total, top, weight, bad


@triton.jit
def attend_tile(
    q,  # [tokens, HEADS, D + ROPE]; consecutive tokens are q_stride numbers apart
    cache,  # Cache
    batch,  # Batch
    sinks,  # [HEADS], or None
    scale,
    requests,
    table_width,
    num_blocks,
    q_stride,
    rank,
    tile,
    first_head,
    split,
    WORLD: tl.constexpr,
    SPLITS: tl.constexpr,
    FORM: tl.constexpr,
):
    """Attend with one tile, for GROUP heads, over one split of its keys.

    Returns:
        float32 [BLOCK_M, BLOCK_D], zeros if the request is flagged; its LSE, float32 [BLOCK_M];
        each row's token and head, both int32 [BLOCK_M]; and bool [BLOCK_M], True for rows to store.
    """
    GROUP: tl.constexpr = FORM.group
    PAGE: tl.constexpr = FORM.page
    D: tl.constexpr = FORM.dim
    ROPE: tl.constexpr = FORM.rope
    WINDOW: tl.constexpr = FORM.window
    BLOCK_M: tl.constexpr = FORM.block_m
    BLOCK_N: tl.constexpr = FORM.block_n
    BLOCK_D: tl.constexpr = FORM.block_d
    BLOCK_R: tl.constexpr = FORM.block_r
    BLOCK_Q: tl.constexpr = FORM.block_m // FORM.group
    SHARED: tl.constexpr = FORM.heads // FORM.kv_heads
    head = first_head // SHARED
    if FORM.served == _ONE:
        request, first_row, first, queries = tile, tile, 0, 1
        if batch.query_start is not None:
            first_row = tl.load(batch.query_start + request)
            has = tl.load(batch.query_start + request + 1) - first_row
            queries = tl.where(has == 1, 1, 0)
    else:
        request = find_request(batch.query_start, tile, requests, BLOCK_Q)
        first_row = tl.load(batch.query_start + request)
        queries = tl.load(batch.query_start + request + 1) - first_row
        if FORM.served == _MORE:
            queries = tl.where(queries == 1, 0, queries)
        first = (tile - first_row // BLOCK_Q - request) * BLOCK_Q
    context = tl.load(batch.context_len + request)
    fault = tl.where(local_length(context, rank, WORLD, PAGE) > table_width * PAGE, _LONGER, 0)
    fault = fault | tl.where(context < queries, _SHORTER, 0)

    # The keys that the tile sees, and the range that all its queries see.
    first_position = context - queries + first
    last_position = context - queries + tl.minimum(first + BLOCK_Q, queries) - 1
    begin, inner_begin = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    if WINDOW > 0:
        begin += local_length(tl.maximum(first_position + 1 - WINDOW, 0), rank, WORLD, PAGE)
        inner_begin += local_length(tl.maximum(last_position + 1 - WINDOW, 0), rank, WORLD, PAGE)
    inner_end = local_length(first_position + 1, rank, WORLD, PAGE)
    end = local_length(last_position + 1, rank, WORLD, PAGE)
    end = tl.where((fault == 0) & (first < queries), end, begin)

    # The same ranges in blocks, limited to this split.
    first_block = begin // BLOCK_N
    end_block = tl.where(begin < end, tl.cdiv(end, BLOCK_N), first_block)
    if SPLITS > 1:
        each = tl.cdiv(end_block - first_block, SPLITS)
        last_block = end_block
        first_block = tl.minimum(first_block + split * each, last_block)
        end_block = tl.minimum(first_block + each, last_block)
    inner_first = tl.cdiv(inner_begin, BLOCK_N)
    inner_first = tl.minimum(tl.maximum(inner_first, first_block), end_block)
    inner_last = tl.minimum(tl.maximum(inner_end // BLOCK_N, inner_first), end_block)

    row = tl.arange(0, BLOCK_M)
    query, q_head = first + row // GROUP, first_head + row % GROUP
    stored = (row < BLOCK_Q * GROUP) & (query < queries)
    token = first_row + query
    q_rows = token.to(tl.int64) * q_stride + q_head * (D + ROPE)
    block_q = load_block(q, q_rows, stored, D, True, BLOCK_D)
    q_rope = None
    if ROPE > 0:
        q_rope = load_block(q + D, q_rows, stored, ROPE, True, BLOCK_R)
    position = context - queries + query
    if cache.k_scale is not None:
        scale = scale * tl.load(cache.k_scale + head)

    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if sinks is not None:
        top = tl.load(sinks + q_head, mask=stored, other=0.0).to(tl.float32) * LOG2E
        weight = tl.full((BLOCK_M,), 1.0, tl.float32)
    else:
        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        weight = tl.zeros((BLOCK_M,), tl.float32)
    bad = tl.zeros((BLOCK_N,), tl.int32)
    table = batch.block_table + tl.cast(request, tl.int64) * table_width
    # A block's pages are loaded one iteration early. In the same iteration, Triton would spend its
    # stages on them, and keep no keys and values on their way.
    page = load_pages(table, inner_first * BLOCK_N, begin, end, PAGE, BLOCK_N)
    for block in range(inner_first, inner_last):
        following = load_pages(table, (block + 1) * BLOCK_N, begin, end, PAGE, BLOCK_N)
        total, top, weight, bad = attend_block(
            block_q, q_rope, total, top, weight, bad, cache.k, cache.v, page, num_blocks,
            head, block * BLOCK_N, begin, end, position, scale, rank, WORLD, False, FORM,
        )  # fmt: skip
        page = following
    interior = inner_last - inner_first
    block = first_block + tl.where(first_block >= inner_first, interior, 0)
    page = load_pages(table, block * BLOCK_N, begin, end, PAGE, BLOCK_N)
    for edge in range(first_block, end_block - interior):
        block = edge + tl.where(edge >= inner_first, interior, 0)
        next_block = edge + 1 + tl.where(edge + 1 >= inner_first, interior, 0)
        following = load_pages(table, next_block * BLOCK_N, begin, end, PAGE, BLOCK_N)
        total, top, weight, bad = attend_block(
            block_q, q_rope, total, top, weight, bad, cache.k, cache.v, page, num_blocks,
            head, block * BLOCK_N, begin, end, position, scale, rank, WORLD, True, FORM,
        )  # fmt: skip
        page = following

    fault = fault | tl.where(tl.max(bad, axis=0) > 0, _OUT_OF_POOL, 0)
    if fault != 0:
        tl.atomic_or(batch.status + request, fault, sem="relaxed", scope="gpu")
    if cache.v_scale is not None:
        total = total * tl.load(cache.v_scale + head)
    unseen = weight == 0
    weight = tl.where(unseen, 1.0, weight)
    total = tl.where(fault == 0, total / weight[:, None], 0.0)
    log_sum = tl.where(unseen, float("-inf"), (top + tl.log2(weight)) * LN2)
    return total, tl.where(fault == 0, log_sum, float("inf")), token, q_head, stored


@triton.jit
def store_rows(out, lse, total, log_sum, place, stored, D: tl.constexpr):
    """Store rows from `attend_tile` at `place` in out [*, D], and in lse [*] if it is given."""
    d = tl.arange(0, total.shape[1])
    inside = stored[:, None] & (d < D)[None, :]
    tl.store(out + place[:, None] * D + d[None, :], total.to(out.dtype.element_ty), mask=inside)
    if lse is not None:
        tl.store(lse + place, log_sum, mask=stored)


@triton.jit(do_not_specialize=["rows", "requests", "table_width", "num_blocks", "rank"])
def attend(
    q,  # q to sinks: see `attend_tile`
    cache,
    batch,
    sinks,
    out,  # [tokens, HEADS, D], or [SPLITS, rows, HEADS, D]
    lse,  # float32, as out without its last axis, or None
    scale,
    rows,  # of a split: tokens, or requests if each has one query
    requests,
    table_width,
    num_blocks,
    q_stride,
    rank,
    WORLD: tl.constexpr,
    SPLITS: tl.constexpr,
    FORM: tl.constexpr,
):
    """Attend with one tile over one split. Grid: (tiles, HEADS / GROUP, SPLITS)."""
    HEADS: tl.constexpr = FORM.heads
    GROUP: tl.constexpr = FORM.group
    D: tl.constexpr = FORM.dim
    tile, split = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(2)
    total, log_sum, token, head, stored = attend_tile(
        q, cache, batch, sinks, scale, requests, table_width, num_blocks, q_stride, rank,
        tile, tl.program_id(1) * GROUP, split, WORLD, SPLITS, FORM,
    )  # fmt: skip
    row = token
    if SPLITS > 1:
        if FORM.served == _ONE:
            row = tile
        row = tl.cast(split, tl.int64) * rows + row
    place = tl.cast(row, tl.int64) * HEADS + head
    store_rows(out, lse, total, log_sum, place, stored, D)
