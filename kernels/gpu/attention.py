"""Paged attention on a GPU, for ragged batches of prefill chunks and decodes.

    paged_attention(q [T, H, D], keys, values [num_blocks, Hk, page, D], batch) -> [T, H, D]

The cache is that of kernels/cpu/attention.py. `attend` is FlashAttention-2 (Dao
2023) over a block table (PagedAttention: Kwon et al. 2023). How work is cut:

- A program has one KV head and a tile of BLOCK_M rows. The G = H / Hk query heads
  that share the KV head are packed into the rows: row i is head i % G of query
  i // G, so that keys and values are loaded once for all of them, and a decode
  of G heads fills a tensor core's 16 rows.
- Tiles do not cross requests. Request b has at most cdiv(queries, BLOCK_Q) tiles
  of BLOCK_Q = BLOCK_M // G queries, and its first one is number
  query_start[b] // BLOCK_Q + b. So the grid follows from T and B alone, and a
  captured CUDA graph serves any lengths; programs that are left over do nothing.
  A request's last tile, which sees most, is started first.
- A tile goes over BLOCK_N keys at a time, from the first that its first query
  sees to the last that its last one does. Blocks that all of its rows see (the
  interior) are computed without a mask; then come those at the edges.
- With SPLITS > 1 the blocks of a tile are dealt out to as many programs, and
  merged (decode_attention.py). Over several ranks a rank has the pages p with
  p % WORLD == rank (distributed_decode_attention.py): its keys are counted by
  their place in its own pages, and `position_of` says where they are in the
  request.

Scores are float32, in units of log 2. Weights and values are multiplied in q's
dtype; so are keys and values in fp8, which are cast, exactly, and whose scales
are applied to the scores and to the sum. Head sizes that are no power of two are
padded to one.

A page that is not in the pool is never loaded: the program loads page 0 in its
place, flags the request, and stores zeros with an LSE of +inf. Nobody may look at
the output of a flagged request.

Not handled: attention that is not causal, gradients.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.arguments import KernelError, Require, require, require_tensor
from weft.kernels.gpu.costs import Config
from weft.kernels.gpu.epilogue import FP8, RESULTS
from weft.kernels.gpu.matmul import target
from weft.kernels.gpu.tune import Choice

Int32 = npt.NDArray[np.int32]

OUT_OF_POOL, LONGER_THAN_TABLE, SHORTER_THAN_QUERIES, ON_ANOTHER_RANK = 1, 2, 4, 8
FLAGS = {
    OUT_OF_POOL: "an entry of its block table is not in the pool",
    LONGER_THAN_TABLE: "its context is longer than its block table",
    SHORTER_THAN_QUERIES: "its context is shorter than its queries",
    ON_ANOTHER_RANK: "another rank has flagged it",
}
"""Bits of a request's status word."""

_OUT_OF_POOL = tl.constexpr(OUT_OF_POOL)
_LONGER = tl.constexpr(LONGER_THAN_TABLE)
_SHORTER = tl.constexpr(SHORTER_THAN_QUERIES)

MAX_HEAD_DIM = 256
MAX_GROUP = 128
"""Query heads that share a KV head: rows of the largest tile."""

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def local_length(length, rank, WORLD: tl.constexpr, PAGE: tl.constexpr):
    """How many of a request's first `length` tokens a rank has."""
    if WORLD > 1:
        pages, rest = length // PAGE, length % PAGE
        whole = (pages + (WORLD - 1) - rank) // WORLD
        length = whole * PAGE + tl.where(pages % WORLD == rank, rest, 0)
    return length


@triton.jit
def position_of(at, rank, WORLD: tl.constexpr, PAGE: tl.constexpr):
    """Where in the request a rank's tokens are."""
    if WORLD > 1:
        at = (at // PAGE * WORLD + rank) * PAGE + at % PAGE
    return at


@triton.jit
def find_request(query_start, tile, requests, BLOCK_Q: tl.constexpr):
    """The request that a tile is of: the last whose first tile is not after it."""
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
    x,  # of rows of numbers
    rows,  # [BLOCK_N]; where each row begins
    needed,  # bool [BLOCK_N]; the others are 0
    D: tl.constexpr,
    EDGE: tl.constexpr,  # not all are needed
    BLOCK_D: tl.constexpr,
):
    """The first D numbers of rows: [BLOCK_N, BLOCK_D], zeros behind them."""
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
    scores,  # float32 [BLOCK_M, BLOCK_N]; log 2 of weights
    top,  # float32 [BLOCK_M]; the largest so far
    weight,  # float32 [BLOCK_M]; sum of weights so far, in units of 2^top
):
    """A step of the online softmax: weights of scores, what earlier ones fade to; top and weight.

    Milakov and Gimelshein 2018.
    """
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    anchor = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing is seen yet
    weights = tl.exp2(scores - anchor[:, None])
    fade = tl.exp2(top - anchor)
    return weights, fade, new_top, weight * fade + tl.sum(weights, axis=1)


@triton.jit
def attend_block(
    q,  # [BLOCK_M, BLOCK_D]
    q_rope,  # [BLOCK_M, BLOCK_R], or None; what follows the first D numbers of each query
    total,  # float32 [BLOCK_M, BLOCK_D]; sum of weights times values
    top,  # float32 [BLOCK_M]; the largest score
    weight,  # float32 [BLOCK_M]; sum of weights, in units of 2^top
    bad,  # int32 [BLOCK_N]; 1 where a page was out of the pool
    keys,  # [num_blocks, KV_HEADS, PAGE, D + ROPE]
    values,  # [num_blocks, KV_HEADS, PAGE, D], or None: the first D numbers of each key
    table,  # int32 [n]; this request's pages
    num_blocks,
    head,
    start,  # of the block, among this rank's keys
    begin,  # of the keys that the tile sees
    end,
    position,  # int32 [BLOCK_M]; of each row's query in its request
    scale,
    rank,
    WORLD: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    EDGE: tl.constexpr,  # some row may not see some key
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One block of keys and values: a step of the online softmax."""
    at = start + tl.arange(0, BLOCK_N)
    needed = (at >= begin) & (at < end)
    if EDGE:  # before begin and from end on there may be no page, or what another request left
        page = tl.load(table + at // PAGE, mask=needed, other=0)
    else:
        page = tl.load(table + at // PAGE)
    out_of_pool = (page < 0) | (page >= num_blocks)
    bad = bad | out_of_pool.to(tl.int32)
    page = tl.where(out_of_pool, 0, page)
    slots = (page.to(tl.int64) * KV_HEADS + head) * PAGE + at % PAGE
    k = load_block(keys, slots * (D + ROPE), needed, D, EDGE, BLOCK_D).to(q.dtype)
    scores = tl.dot(q, k.T, input_precision="ieee")
    if ROPE > 0:
        k_rope = load_block(keys + D, slots * (D + ROPE), needed, ROPE, EDGE, BLOCK_R)
        scores = tl.dot(q_rope, k_rope.to(q.dtype).T, scores, input_precision="ieee")
    if SOFTCAP > 0:  # tanh, by what does not overflow
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
        v = load_block(values, slots * D, needed, D, EDGE, BLOCK_D).to(q.dtype)
    total = tl.dot(weights.to(q.dtype), v, total * fade[:, None], input_precision="ieee")
    return total, top, weight, bad


@triton.jit
def attend_tile(
    q,  # [tokens, HEADS, D + ROPE]; a token is q_stride numbers after the one before
    keys,  # [num_blocks, KV_HEADS, PAGE, D + ROPE]
    values,  # [num_blocks, KV_HEADS, PAGE, D], or None: the first D numbers of each key
    query_start,  # int32 [requests + 1]
    context_len,  # int32 [requests]
    block_table,  # int32 [requests, table_width]; of this rank's pages
    status,  # int32 [requests]
    sinks,  # [HEADS], or None
    k_scale,  # float32 [KV_HEADS], or None
    v_scale,
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
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # heads of a tile, which share a KV head
    PAGE: tl.constexpr,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 for none
    SOFTCAP: tl.constexpr,  # 0 for none
    SINGLE: tl.constexpr,  # each request has one query
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One tile of GROUP heads, over a split of its keys.

    Returns:
        float32 [BLOCK_M, BLOCK_D], zeros if the request is flagged; its LSE, float32 [BLOCK_M];
        of each row, int32 [BLOCK_M], the token and the head; bool [BLOCK_M], which rows count.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    head = first_head // (HEADS // KV_HEADS)
    if SINGLE:
        request, first_row, first, queries = tile, tile, 0, 1
    else:
        request = find_request(query_start, tile, requests, BLOCK_Q)
        first_row = tl.load(query_start + request)
        queries = tl.load(query_start + request + 1) - first_row
        first = (tile - first_row // BLOCK_Q - request) * BLOCK_Q
    context = tl.load(context_len + request)
    fault = tl.where(local_length(context, rank, WORLD, PAGE) > table_width * PAGE, _LONGER, 0)
    fault = fault | tl.where(context < queries, _SHORTER, 0)

    # Which keys the tile sees, and which of them all of its queries do.
    first_position = context - queries + first
    last_position = context - queries + tl.minimum(first + BLOCK_Q, queries) - 1
    begin, inner_begin = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    if WINDOW > 0:
        begin += local_length(tl.maximum(first_position + 1 - WINDOW, 0), rank, WORLD, PAGE)
        inner_begin += local_length(tl.maximum(last_position + 1 - WINDOW, 0), rank, WORLD, PAGE)
    inner_end = local_length(first_position + 1, rank, WORLD, PAGE)
    end = local_length(last_position + 1, rank, WORLD, PAGE)
    end = tl.where((fault == 0) & (first < queries), end, begin)

    # In blocks, of this split.
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
    if k_scale is not None:
        scale = scale * tl.load(k_scale + head)

    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if sinks is not None:
        top = tl.load(sinks + q_head, mask=stored, other=0.0).to(tl.float32) * LOG2E
        weight = tl.full((BLOCK_M,), 1.0, tl.float32)
    else:
        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        weight = tl.zeros((BLOCK_M,), tl.float32)
    bad = tl.zeros((BLOCK_N,), tl.int32)
    table = block_table + tl.cast(request, tl.int64) * table_width
    for block in range(inner_first, inner_last):
        total, top, weight, bad = attend_block(
            block_q, q_rope, total, top, weight, bad, keys, values, table, num_blocks, head,
            block * BLOCK_N, begin, end, position, scale, rank,
            WORLD, KV_HEADS, PAGE, D, ROPE, WINDOW, SOFTCAP, False, BLOCK_N, BLOCK_D, BLOCK_R,
        )  # fmt: skip
    interior = inner_last - inner_first
    for edge in range(first_block, end_block - interior):
        block = edge + tl.where(edge >= inner_first, interior, 0)
        total, top, weight, bad = attend_block(
            block_q, q_rope, total, top, weight, bad, keys, values, table, num_blocks, head,
            block * BLOCK_N, begin, end, position, scale, rank,
            WORLD, KV_HEADS, PAGE, D, ROPE, WINDOW, SOFTCAP, True, BLOCK_N, BLOCK_D, BLOCK_R,
        )  # fmt: skip

    fault = fault | tl.where(tl.max(bad, axis=0) > 0, _OUT_OF_POOL, 0)
    if fault != 0:
        tl.atomic_or(status + request, fault, sem="relaxed", scope="gpu")
    if v_scale is not None:
        total = total * tl.load(v_scale + head)
    unseen = weight == 0
    weight = tl.where(unseen, 1.0, weight)
    total = tl.where(fault == 0, total / weight[:, None], 0.0)
    log_sum = tl.where(unseen, float("-inf"), (top + tl.log2(weight)) * LN2)
    return total, tl.where(fault == 0, log_sum, float("inf")), token, q_head, stored


@triton.jit
def store_rows(out, lse, total, log_sum, place, stored, D: tl.constexpr):
    """Store some rows of `attend_tile` to places of out [*, D] and, unless it is None, lse [*]."""
    d = tl.arange(0, total.shape[1])
    inside = stored[:, None] & (d < D)[None, :]
    tl.store(out + place[:, None] * D + d[None, :], total.to(out.dtype.element_ty), mask=inside)
    if lse is not None:
        tl.store(lse + place, log_sum, mask=stored)


@triton.jit(do_not_specialize=["tokens", "requests", "table_width", "num_blocks", "rank"])
def attend(
    q,  # as the next ones, of `attend_tile`
    keys,
    values,
    query_start,
    context_len,
    block_table,
    status,
    sinks,
    k_scale,
    v_scale,
    out,  # [SPLITS, tokens, HEADS, D]
    lse,  # float32 [SPLITS, tokens, HEADS], or None
    scale,
    tokens,
    requests,
    table_width,
    num_blocks,
    q_stride,
    rank,
    WORLD: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINGLE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One tile over a split of its keys. Grid: (tiles, HEADS / GROUP, SPLITS)."""
    tile, split = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(2)
    total, log_sum, token, head, stored = attend_tile(
        q, keys, values, query_start, context_len, block_table, status, sinks, k_scale, v_scale,
        scale, requests, table_width, num_blocks, q_stride, rank,
        tile, tl.program_id(1) * GROUP, split,
        WORLD, HEADS, KV_HEADS, GROUP, PAGE, D, ROPE, WINDOW, SOFTCAP, SINGLE, SPLITS,
        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_R,
    )  # fmt: skip
    place = (tl.cast(split, tl.int64) * tokens + token) * HEADS + head
    store_rows(out, lse, total, log_sum, place, stored, D)


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The requests of one step, on the device: as models/interface.StepInput. All layers' alike.

    Attributes:
        query_start: int32 [B + 1]; request b owns rows query_start[b]:query_start[b + 1] of q.
        context_len: int32 [B]; its tokens in the cache, those of this step included.
        block_table: int32 [B, n]; its pages in order. Entries that no query sees are ignored. Over
            several ranks, those pages p that this rank has: p % W == rank.
        status: int32 [B]; bits of FLAGS, which kernels add and nobody takes away.
        max_queries: of a request; no more than this in any step that a captured graph serves.
        max_context: no request's is longer; for how decodes are split.
    """

    query_start: Tensor
    context_len: Tensor
    block_table: Tensor
    status: Tensor
    max_queries: int
    max_context: int

    @classmethod
    def build(
        cls,
        query_start: Int32,
        context_len: Int32,
        block_table: Int32,
        *,
        block_size: int,
        device: torch.device | str = "cpu",
        world_size: int = 1,
    ) -> PagedBatch:
        """Check what the host knows, and copy it to the device.

        Args:
            query_start, context_len, block_table: int32, of the attributes' shapes.
            block_size: tokens in a page.
            device: of the cache.
            world_size: ranks that the pages of each request are dealt out to.

        Raises:
            KernelError: shapes do not go together, queries are not counted upwards from 0, or a
                context is shorter than its queries or longer than its table: naming the request.
        """
        check = functools.partial(require, "paged_attention")
        requests = len(context_len)
        check("context_len's length", requests, requests > 0, "be at least 1")
        starts, tables = len(query_start), block_table.shape
        check("query_start's length", starts, starts == requests + 1, f"be {requests + 1}")
        matches = block_table.ndim == 2 and len(block_table) == requests
        check("block_table's shape", list(tables), matches, f"be [{requests}, n]")
        check("query_start[0]", query_start[0], query_start[0] == 0, "be 0")
        queries = np.diff(query_start)
        most = tables[1] * block_size * world_size
        for request, (count, context) in enumerate(zip(queries, context_len, strict=True)):
            check(f"request {request}'s queries", count, count >= 0, "be at least 0")
            fits = count <= context <= most
            must = f"be at least its {count} queries, and at most {most}, which its table holds"
            check(f"request {request}'s context_len", context, fits, must)

        def copied(array: Int32) -> Tensor:
            return torch.from_numpy(np.array(array, np.int32)).to(device)

        return cls(
            copied(query_start),
            copied(context_len),
            copied(block_table),
            torch.zeros(requests, dtype=torch.int32, device=device),
            int(queries.max()),
            int(context_len.max()),
        )

    def errors(self) -> dict[int, KernelError]:
        """By request, what kernels have flagged since status was zero. Waits for the device."""
        return {
            request: KernelError(
                f"request {request}: {next(FLAGS[flag] for flag in FLAGS if word & flag)}"
            )
            for request, word in enumerate(self.status.tolist())
            if word
        }


@dataclass(frozen=True, slots=True)
class Options:
    """How a layer attends: what all attention ops take by name, as `reference.paged_attention`.

    Attributes:
        scale: multiplies the scores.
        sliding_window: token i sees the tokens j with i - window < j <= i; None sees all.
        softcap: scores become softcap * tanh(score / softcap); None leaves them.
        sinks: [H], float32, float16 or bfloat16; one more score of each head, without a value.
        k_scale, v_scale: float32 [Hk], with a cache in float8_e4m3fn; what it is multiplied with.
        lse: float32 [T, H], written: the log of the sum of exp(score), the sink's included. +inf
            for a request that is flagged.
    """

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    lse: Tensor | None = None


class Tile(NamedTuple):
    """How attention is cut, and compiled."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def choose_tile(group: int, queries: int, head_dim: int, itemsize: int, *, cast: bool) -> Tile:
    """What suits a batch whose longest request has so many queries.

    Args:
        group: query heads that share a KV head.
        queries: of that request.
        head_dim: D.
        itemsize: bytes of a number of q.
        cast: whether keys and values are narrower.
    """
    backend, capability = target()
    wide = triton.next_power_of_2(head_dim) * max(1, itemsize // 2)
    old = backend == "cuda" and capability < 90
    most = max(64 if wide > 128 or (old and wide <= 64) else 128, triton.next_power_of_2(group))
    block_m = min(most, max(16, triton.next_power_of_2(group * queries)))
    block_n = 64 if wide <= 128 else 32
    block_m = 64 if block_m == 32 else block_m  # else registers spill; and so below
    if cast and backend == "hip" and wide > 128:
        block_n = 16
    if old and block_m == 64 and wide == 128:
        block_n = 32
    warps = 8 if block_m >= 128 or block_m * wide >= 128 * 128 else 4
    stages = 2 if old else 3
    return Tile(block_m, block_n, warps, 1 if backend == "hip" else stages)


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    lse: Tensor | None = None,
    blocks: tuple[int, int] | None = None,
    warps: int = 0,
    stages: int = 0,
    choice: Choice | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> Tensor:
    """Causal attention of the step's queries over their requests' pages.

    Args:
        q: [T, H, D], float32, float16 or bfloat16; a token's heads contiguous. Query head h reads
            KV head h // (H / Hk). D is at most 256, H / Hk at most 128.
        keys, values: contiguous [num_blocks, Hk, page, D], q's dtype or float8_e4m3fn; the step's
            tokens included.
        batch: of the step. What is wrong with a request is flagged in its status.
        scale, sliding_window, softcap, sinks, k_scale, v_scale, lse: see Options.
        blocks: BLOCK_M and BLOCK_N of a tile; chosen if None.
        warps, stages: that the kernel is compiled with; chosen if 0.
        choice: of a tile where blocks is None, if one was tuned.
        rank, world_size: whose pages these are, if ranks share those of each request: see
            PagedBatch. A query that sees no key here has a result of 0, and an LSE of -inf.

    Returns:
        [T, H, D], q's dtype. Zeros for a request that is flagged, in part or as a whole.

    Raises:
        KernelError: the tensors do not go together, or one cannot be taken.
    """
    check = functools.partial(require, "paged_attention")
    options = Options(scale, sliding_window, softcap, sinks, k_scale, v_scale, lse)
    check("rank", rank, 0 <= rank < world_size, f"be in [0, {world_size}), the world size")
    once = sinks is None or world_size == 1
    check("sinks", "given", once, "be None where ranks share pages: they count once")
    check_attention(check, q, keys, values, batch, options, world_size)
    config = None
    if choice and blocks is None:
        config = choice.of_attention(q, keys, batch.max_queries, batch.max_context)
    tile = checked_tile(check, q, keys, batch, blocks, warps, stages, config)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch_attend(
        *(q, keys, values, batch, out, lse, tile, options), rank=rank, world_size=world_size
    )
    return out


def launch_attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor | None,
    batch: PagedBatch,
    out: Tensor,
    lse: Tensor | None,
    tile: Tile,
    options: Options,
    *,
    splits: int = 1,
    sinks: bool = True,
    rank: int = 0,
    world_size: int = 1,
) -> None:
    """Launch `attend` on what has been checked.

    Args:
        values: None, if they are the first D numbers of the keys.
        out: [splits, T, H, D], or without the first axis.
        lse: float32 [splits, T, H], likewise, or None.
        sinks: whether they count here, and not where parts are merged.
        rank, world_size: whose pages they are.
    """
    if not q.numel():
        return
    (tokens, heads, width), (num_blocks, kv_heads, page, _) = q.shape, keys.shape
    dim = out.shape[-1]
    group = heads_of_tile(heads // kv_heads, tile)
    attend[(count_tiles(q, batch, tile, group), heads // group, splits)](
        *(q, keys, values, batch.query_start, batch.context_len, batch.block_table, batch.status),
        *(options.sinks if sinks else None, options.k_scale, options.v_scale),
        *(out, lse, options.scale, tokens, len(batch.context_len), batch.block_table.shape[1]),
        *(num_blocks, q.stride(0), rank),
        WORLD=world_size,
        HEADS=heads,
        KV_HEADS=kv_heads,
        GROUP=group,
        PAGE=page,
        D=dim,
        ROPE=width - dim,
        WINDOW=options.sliding_window or 0,
        SOFTCAP=options.softcap or 0.0,
        SINGLE=is_decode(q, batch),
        SPLITS=splits,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        BLOCK_R=max(16, triton.next_power_of_2(width - dim)),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def heads_of_tile(group: int, tile: Tile) -> int:
    """How many of the heads that share a KV head a tile has: all, or as many as divide them."""
    return next(n for n in range(min(group, tile.block_m), 0, -1) if group % n == 0)


def count_tiles(q: Tensor, batch: PagedBatch, tile: Tile, group: int) -> int:
    """At least as many as a batch's queries have, with so many heads in a tile; see the top."""
    requests = len(batch.context_len)
    return requests if is_decode(q, batch) else len(q) // (tile.block_m // group) + requests


def is_decode(q: Tensor, batch: PagedBatch) -> bool:
    """Whether each request has exactly one query."""
    return batch.max_queries == 1 and len(q) == len(batch.context_len)


def checked_tile(
    check: Require,
    q: Tensor,
    keys: Tensor,
    batch: PagedBatch,
    blocks: tuple[int, int] | None,
    warps: int,
    stages: int,
    config: Config | None = None,
) -> Tile:
    """What a caller asks for, or what was tuned, or what suits the batch."""
    group, dim = q.shape[1] // keys.shape[1], q.shape[2]
    cast = keys.element_size() < q.element_size()
    chosen = choose_tile(group, batch.max_queries, dim, q.element_size(), cast=cast)
    if config:  # no higher than the batch has rows for
        low = min(config.block_m, chosen.block_m)
        chosen = Tile(low, config.block_n, config.warps, config.stages)
    return asked_tile(check, chosen, blocks, warps, stages, group)


def asked_tile(
    check: Require,
    chosen: Tile,
    blocks: tuple[int, int] | None,
    warps: int,
    stages: int,
    group: int = 1,
) -> Tile:
    """`chosen`, but for what a caller asks for; with room for so many heads."""
    sides = chosen[:2] if blocks is None else blocks
    fine = len(sides) == 2 and all(side >= 16 and side & (side - 1) == 0 for side in sides)
    must = f"be two powers of two of at least 16, the first not below H / Hk, which is {group}"
    check("blocks", blocks, fine and sides[0] >= group, must)
    check("warps", warps, warps in (0, 1, 2, 4, 8, 16), "be 1, 2, 4, 8 or 16, or 0 to choose")
    check("stages", stages, 0 <= stages <= 8, "be from 1 to 8, or 0 to choose")
    return Tile(*sides, warps or chosen.warps, stages or chosen.stages)


def check_queries(check: Require, q: Tensor, most: int = MAX_HEAD_DIM) -> None:
    """Refuse queries that are not [T, H, D], of a dtype that is multiplied, with at most that D."""
    check("q", f"a {type(q).__name__}", isinstance(q, Tensor), "be a tensor")
    check("q's shape", list(q.shape), q.dim() == 3, "be [T, H, D]")
    check("q's dtype", q.dtype, q.dtype in RESULTS, f"be one of {', '.join(map(str, RESULTS))}")
    dim = q.shape[2]
    check("D", dim, 0 < dim <= most, f"be from 1 to {most}")
    together = q.stride()[1:] == (dim, 1) or not q.numel()
    check("q's stride", q.stride(), together, "have a token's heads contiguous")


def check_heads(check: Require, name: str, q: Tensor, kv_heads: int) -> None:
    """Refuse KV heads that do not divide q's, or by too many for a tile."""
    heads = q.shape[1]
    divides = kv_heads > 0 and heads % kv_heads == 0 and heads > 0
    check(name, kv_heads, divides, f"divide q's {heads}")
    group = heads // kv_heads
    check("H / Hk", group, group <= MAX_GROUP, f"be at most {MAX_GROUP}")


def check_cache(check: Require, name: str, cache: Tensor, q: Tensor) -> None:
    """Refuse a cache that is not of q's dtype or e4m3, or not where this GPU has that."""
    require_tensor(check, name, cache, None, q.device, q.dtype, FP8)
    if cache.dtype == FP8:
        backend, capability = target()
        able = backend != "cuda" or capability >= 89
        check(f"{name}'s dtype", FP8, able, f"be {q.dtype}: sm_{capability} has no e4m3")


def check_batch(check: Require, q: Tensor, page: int, batch: PagedBatch, ranks: int = 1) -> None:
    """Refuse a batch that does not go together, or not with its queries."""
    requests, width = len(batch.context_len), batch.block_table.shape[-1]
    for name, shape in (
        ("context_len", [requests]),
        ("query_start", [requests + 1]),
        ("status", [requests]),
        ("block_table", [requests, width]),
    ):
        require_tensor(check, name, getattr(batch, name), shape, q.device, torch.int32)
    most, context, queries = width * page * ranks, batch.max_context, batch.max_queries
    check("max_context", context, context <= most, f"be at most {most}, which the tables hold")
    check("max_queries", queries, queries <= len(q), f"be at most {len(q)}, all queries of q")


def check_scale(
    check: Require, name: str, scale: Tensor | None, shape: list[int], cache: Tensor
) -> None:
    """Refuse a scale that does not go with the cache."""
    fits = scale is None or cache.dtype == FP8
    check(name, f"given with {cache.dtype}", fits, f"come with {FP8} only")
    if scale is not None:
        require_tensor(check, name, scale, shape, cache.device, torch.float32)


def check_attention(
    check: Require,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: PagedBatch,
    options: Options,
    world_size: int = 1,
) -> None:
    """Refuse what does not go together. `check` raises the error."""
    check_queries(check, q)
    check_cache(check, "keys", keys, q)
    (tokens, heads, dim), shape, device = q.shape, list(keys.shape), q.device
    check(
        "keys's shape", shape, keys.dim() == 4 and shape[3] == dim, f"be [blocks, Hk, page, {dim}]"
    )
    check("keys's shape", shape, keys.numel() > 0, "have no side of 0")
    check_heads(check, "keys's heads", q, shape[1])
    require_tensor(check, "values", values, shape, device, keys.dtype)
    check_batch(check, q, shape[2], batch, world_size)
    check_scale(check, "k_scale", options.k_scale, shape[1:2], keys)
    check_scale(check, "v_scale", options.v_scale, shape[1:2], keys)
    if options.sinks is not None:
        require_tensor(check, "sinks", options.sinks, [heads], device, *RESULTS)
    if options.lse is not None:
        require_tensor(check, "lse", options.lse, [tokens, heads], device, torch.float32)
    window, softcap = options.sliding_window, options.softcap
    check("sliding_window", window, window is None or window > 0, "be at least 1, or None")
    check("softcap", softcap, softcap is None or softcap > 0, "be above 0, or None")
