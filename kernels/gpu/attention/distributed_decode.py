"""Decodes over a KV cache that is split by position among ranks: distributed flash decoding.

    distributed_decode_attention(q [B, H, D], keys, values, batch, workspace) -> [B, H, D]

A request's page p is on rank p mod W. Ranks therefore have equal shares at any request length.
Every rank has all queries and gets all results.

Protocol for call n. Each rank's buffer has two slots. Call n uses slot n mod 2, and a slot has one
row per rank.

1. `attend_and_send`. A program runs `attend_tile` (kernel.py) for one request's heads with a common
   KV head, over one split of the rank's own pages. A tile's programs store their splits, then
   increment a counter (an acquire-release atomic). The last one therefore sees all splits, and
   merges them. For each head it has the rank's partial result in q's dtype, and the log of its
   weights' sum (LSE; -inf if the rank has no visible key). Rank r writes both to row r in every
   rank's slot, as words that carry n (LL: runtime/low_latency.py). The words themselves are the
   signals. Programs run in head order, so finished heads travel while later heads are computed.
2. `collect_and_merge` polls one row from every rank until its words carry n, and merges the rows in
   rank order. It weights each by exp(LSE - the largest LSE) and adds the head's sink. All ranks get
   the same bits.

Why the attention kernel does the exchange: a part leaves when its head is done, not when all heads
are done. The alternative is a launch per group of heads, with the exchange on a side stream. Then
the end of each launch leaves the device partly idle, and parts pass through memory in between. The
price: one program merges BLOCK_M rows, while `merge_splits` has one program per row.

Only the second launch waits, and only for first launches, which wait for nothing. There is no
cycle. In each call a rank hears from every rank, and each rank sends only after its launches from
the previous call have ended. Two slots are therefore enough, and no slot is reused early (see
runtime/workspace.py).

Parts travel in q's dtype and are rounded to it. For bfloat16 this error is as large as the final
rounding.

A rank that flags a request (kernel.py) sends +inf as the LSE. All ranks then flag it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.attention.decode import MAX_SPLITS, choose_splits
from weft.kernels.gpu.attention.inputs import ON_ANOTHER_RANK, Options, PagedBatch, check_attention
from weft.kernels.gpu.attention.kernel import (
    LN2,
    LOG2E,
    Batch,
    Cache,
    Form,
    attend_tile,
    store_rows,
)
from weft.kernels.gpu.attention.tile import Served, checked_tile, heads_of_tile
from weft.kernels.gpu.matmul.epilogue import RESULTS
from weft.kernels.gpu.runtime.arguments import require_counts
from weft.kernels.gpu.runtime.low_latency import get_ll, put_ll
from weft.kernels.gpu.runtime.peers import SLOTS
from weft.kernels.gpu.runtime.signals import count_off, peer_pointer, slot_of
from weft.kernels.gpu.runtime.workspace import Workspace, agreed, triton_type
from weft.kernels.symmetric.memory import Home

COLLECTED_WORDS = 256
"""4-byte words that a program awaits at a time; twice as many spill registers."""

_ON_ANOTHER_RANK = tl.constexpr(ON_ANOTHER_RANK)


@triton.jit
def add_part(
    total,  # float32 [ROWS, BLOCK_D]; weighted sum over parts
    top,  # float32 [ROWS]; the largest LSE
    weight,  # float32 [ROWS]; the weights' sum, in units of exp(top)
    flagged,  # int32 [ROWS]; 1 where an LSE was +inf
    numbers,  # float32 [ROWS, BLOCK_D]
    log,  # float32 [ROWS]; the numbers' LSE
):
    """Take one online log-sum-exp step; flagged rows add nothing."""
    flagged = flagged | (log == float("inf")).to(tl.int32)
    log = tl.where(log == float("inf"), float("-inf"), log)
    new_top = tl.maximum(top, log)
    anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
    fade, share = tl.exp2((top - anchor) * LOG2E), tl.exp2((log - anchor) * LOG2E)
    total = total * fade[:, None] + numbers * share[:, None]
    return total, new_top, weight * fade + share, flagged


@triton.jit
def finish_parts(total, top, weight, flagged):
    """Return the sum from `add_part` and its LSE: zeros and +inf for flagged rows."""
    unseen = weight == 0
    weight = tl.where(unseen, 1.0, weight)
    total = tl.where((flagged > 0)[:, None], 0.0, total / weight[:, None])
    log_sum = tl.where(unseen, float("-inf"), top + tl.log2(weight) * LN2)
    return total, tl.where(flagged > 0, float("inf"), log_sum)


@triton.jit
def merge_tile(
    parts,  # float32 [SPLITS, rows, D]
    parts_lse,  # float32 [SPLITS, rows]
    row,  # int32 [BLOCK_M]
    stored,  # bool [BLOCK_M]
    rows,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge some rows' splits into float32 [BLOCK_M, BLOCK_D] and its LSE."""
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros((row.shape[0], BLOCK_D), tl.float32)
    top = tl.full((row.shape[0],), float("-inf"), tl.float32)
    weight = tl.zeros((row.shape[0],), tl.float32)
    flagged = tl.zeros((row.shape[0],), tl.int32)
    for split in range(SPLITS):
        at = split * tl.cast(rows, tl.int64) + row
        log = tl.load(parts_lse + at, mask=stored, other=float("-inf"))
        inside = stored[:, None] & (d < D)[None, :]
        numbers = tl.load(parts + at[:, None] * D + d[None, :], mask=inside, other=0.0)
        total, top, weight, flagged = add_part(total, top, weight, flagged, numbers, log)
    return finish_parts(total, top, weight, flagged)


@triton.jit
def send_rows(
    total,  # float32 [BLOCK_M, BLOCK_D]
    log_sum,  # float32 [BLOCK_M]
    row,  # int32 [BLOCK_M]
    stored,  # bool [BLOCK_M]
    buffers,  # int64 [W]; addresses of int64 [2, W, rank_words]
    call,
    rank,
    rows,
    rank_words,
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Send rows from this rank's part, in dtype, and their LSEs to all ranks."""
    if dtype == tl.float32:
        words = total.to(tl.int32, bitcast=True)
    else:
        pairs = tl.reshape(total.to(dtype), (total.shape[0], total.shape[1] // 2, 2))
        low, high = tl.split(pairs.to(tl.int16, bitcast=True))
        words = (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    column = tl.arange(0, words.shape[1])[None, :]
    at = row[:, None] * WORDS + column
    sent = stored[:, None] & (column < WORDS)
    logs = log_sum.to(tl.int32, bitcast=True)
    place = (slot_of(call) * WORLD + rank) * tl.cast(rank_words, tl.int64)
    for step in range(WORLD):
        to = peer_pointer(buffers, (rank + 1 + step) % WORLD, tl.int64) + place
        put_ll(to + at, words, call, sent)
        put_ll(to + rows * WORDS + row, logs, call, stored)


@triton.jit(do_not_specialize=["rank", "rows", "table_width", "num_blocks", "rank_words"])
def attend_and_send(
    q,  # [B, HEADS, D]; consecutive requests are q_stride numbers apart
    cache,  # Cache
    batch,  # Batch
    parts,  # float32 [SPLITS, rows, D], or None with one split
    parts_lse,  # float32 [SPLITS, rows], or None with one split
    done,  # int64 [W]; addresses of int32 [rows]: one counter per tile
    peers,  # buffers int64 [2, W, rank_words]
    scale,
    rank,
    rows,  # B * HEADS
    table_width,
    num_blocks,
    q_stride,
    rank_words,  # at least rows * (WORDS + 1): words for the parts, then for the LSEs
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    WORDS: tl.constexpr,  # number of 4-byte words in D numbers
    SPLITS: tl.constexpr,
    FORM: tl.constexpr,
):
    """Attend with some of a request's heads over a split. Grid: (B * SPLITS, HEADS / GROUP)."""
    HEADS: tl.constexpr = FORM.heads
    GROUP: tl.constexpr = FORM.group
    D: tl.constexpr = FORM.dim
    BLOCK_D: tl.constexpr = FORM.block_d
    call = tl.load(peers.calls)
    tile, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    total, log_sum, request, head, stored = attend_tile(
        q, cache, batch, None, scale, rows // HEADS, table_width, num_blocks, q_stride, rank,
        tile, tl.program_id(1) * GROUP, split, WORLD, SPLITS, FORM,
    )  # fmt: skip
    row = request * HEADS + head
    if SPLITS == 1:
        send_rows(
            total, log_sum, row, stored, peers.buffers, call, rank, rows, rank_words,
            dtype, WORLD, WORDS,
        )  # fmt: skip
    else:
        place = split * tl.cast(rows, tl.int64) + row
        store_rows(parts, parts_lse, total, log_sum, place, stored, D)
        number = tile * (HEADS // GROUP) + tl.program_id(1)
        if count_off(done, rank, number, SPLITS):
            merged, merged_lse = merge_tile(parts, parts_lse, row, stored, rows, D, SPLITS, BLOCK_D)
            send_rows(
                merged, merged_lse, row, stored, peers.buffers, call, rank, rows, rank_words,
                dtype, WORLD, WORDS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["rank", "rows", "rank_words"])
def collect_and_merge(
    sinks,  # [HEADS], or None
    out,  # [rows, D]
    lse,  # float32 [rows], or None
    status,  # int32 [rows / HEADS]
    peers,  # buffers int64 [2, W, rank_words]
    rank,
    rows,
    rank_words,
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    HEADS: tl.constexpr,  # row % HEADS is the row's head, row // HEADS its request
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Receive rows from all ranks and merge them. Grid: (programs,), persistent."""
    WIDE: tl.constexpr = dtype == tl.float32
    PER_WORD: tl.constexpr = 1 if WIDE else 2
    call = tl.load(peers.calls)
    slot = slot_of(call) * WORLD * tl.cast(rank_words, tl.int64)
    place = tl.arange(0, ROWS * BLOCK_W)
    column = place % BLOCK_W
    for item in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = item * ROWS + tl.arange(0, ROWS)
        of_word = item * ROWS + place // BLOCK_W
        word = of_word * WORDS + column
        sent = (column < WORDS) & (of_word < rows)
        total = tl.zeros((ROWS, BLOCK_W * PER_WORD), tl.float32)
        if sinks is not None:
            top = tl.load(sinks + row % HEADS).to(tl.float32)
            weight = tl.full((ROWS,), 1.0, tl.float32)
        else:
            top = tl.full((ROWS,), float("-inf"), tl.float32)
            weight = tl.zeros((ROWS,), tl.float32)
        flagged = tl.zeros((ROWS,), tl.int32)
        for source in range(WORLD):
            come = peer_pointer(peers.buffers, rank, tl.int64) + slot
            come += source * tl.cast(rank_words, tl.int64)
            first = source * rank_words + item * ROWS * WORDS
            got = get_ll(come + word, call, sent, peers, rank, first)
            first = source * rank_words + rows * WORDS + item * ROWS
            logs = get_ll(come + rows * WORDS + row, call, row < rows, peers, rank, first)
            if WIDE:
                numbers = got.to(tl.float32, bitcast=True)
            else:
                low = (got & 0xFFFF).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
                high = (got >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
                numbers = tl.join(low, high)
            numbers = tl.reshape(numbers, (ROWS, BLOCK_W * PER_WORD))
            log = logs.to(tl.float32, bitcast=True)
            total, top, weight, flagged = add_part(total, top, weight, flagged, numbers, log)
        total, log_sum = finish_parts(total, top, weight, flagged)
        store_rows(out, lse, total, log_sum, row.to(tl.int64), row < rows, WORDS * PER_WORD)
        tl.atomic_or(
            status + row // HEADS,
            _ON_ANOTHER_RANK,
            mask=(row < rows) & (flagged > 0) & (row % HEADS == 0),  # all heads have the same flag
            sem="relaxed",
            scope="gpu",
        )


class DistributedDecodeWorkspace(Workspace):
    """Workspace for `distributed_decode_attention` on one rank; see its `_workspace` function."""

    def __init__(
        self, home: Home, max_requests: int, heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        name = "distributed_decode_attention"
        asked = {"max_requests": max_requests, "heads": heads, "head_dim": head_dim, "dtype": dtype}
        with agreed(name, asked, home.exchange) as check:
            require_counts(check, 1, max_requests=max_requests, heads=heads, head_dim=head_dim)
            check("dtype", dtype, dtype in RESULTS, f"be one of {', '.join(map(str, RESULTS))}")
            whole = head_dim * dtype.itemsize % 4 == 0
            check("head_dim", head_dim, whole, f"be even with {dtype}: ranks send 4-byte words")
        super().__init__(home, name, 0, dtype, 0)
        self.max_requests, self.heads, self.head_dim = max_requests, heads, head_dim
        self.words = head_dim * dtype.itemsize // 4  # number of 4-byte words in a head's part
        self.rank_words = max_requests * heads * (self.words + 1)
        shape = (SLOTS, home.world_size, self.rank_words)
        self.ll = home.zeros(f"{name}.ll", shape, torch.int64)
        self.done = home.zeros(f"{name}.done", (max_requests * heads,), torch.int32)


def distributed_decode_attention_workspace(
    home: Home, max_requests: int, heads: int, head_dim: int, dtype: torch.dtype
) -> DistributedDecodeWorkspace:
    """Create a workspace for steps with at most `max_requests` decodes. Collective.

    Args:
        home: this rank's home.
        max_requests: maximum number of requests in a step.
        heads, head_dim: H and D of q.
        dtype: q's dtype; float32, float16 or bfloat16.

    Raises:
        KernelError: on every rank, if a rank refuses an argument or the ranks' arguments differ.
    """
    return DistributedDecodeWorkspace(home, max_requests, heads, head_dim, dtype)


def distributed_decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: PagedBatch,
    workspace: DistributedDecodeWorkspace,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    lse: Tensor | None = None,
    splits: int = 0,
    blocks: tuple[int, int] | None = None,
    warps: int = 0,
    stages: int = 0,
) -> Tensor:
    """Compute `decode_attention` for one query per request over shared pages. Collective.

    Args:
        q: [B, H, D], the same on all ranks.
        keys, values: [num_blocks, Hk, page, D]; this rank's pages.
        batch: the step's requests, the same on all ranks except for block_table: on rank r, entry i
            is the request's page i * W + r, as an index into this rank's cache.
        workspace: from `distributed_decode_attention_workspace`.
        scale, sliding_window, softcap, sinks, k_scale, v_scale, lse: see Options; the same on all
            ranks.
        splits, blocks, warps, stages: see `decode_attention`; they may differ between ranks.

    Returns:
        [B, H, D], q's dtype; the same bits on all ranks.

    Raises:
        KernelError: on every rank, if a rank refuses its arguments or the ranks' arguments differ.
    """
    options = Options(scale, sliding_window, softcap, sinks, k_scale, v_scale, lse)
    asked: dict[str, object] = {
        "scale": scale,
        "sliding_window": sliding_window,
        "softcap": softcap,
        "sinks": "given" if sinks is not None else None,
    }
    with workspace.agreed("distributed_decode_attention", asked):
        require = workspace.require
        workspace.require_tensor("q", q)
        check_attention(require, q, keys, values, batch, options, workspace.world_size)
        asked |= {"q's shape": tuple(q.shape), "page": keys.shape[2]}
        requests, heads, dim = q.shape
        shape, made = [heads, dim], [workspace.heads, workspace.head_dim]
        must = f"be {made}, the workspace's"
        require("H, D", shape, shape == made, must)
        must = f"be {len(batch.context_len)}, one query per request"
        require("q's rows", requests, requests == len(batch.context_len), must)
        queries = batch.max_queries
        require("max_queries", queries, queries == 1, "be 1: this op is for decodes")
        must = f"be at most {workspace.max_requests}, the workspace's maximum"
        require("requests", requests, requests <= workspace.max_requests, must)
        tile = checked_tile(require, q, keys, batch, blocks, warps, stages)
        must = f"be from 1 to {MAX_SPLITS}, or 0 for the default"
        require("splits", splits, 0 <= splits <= MAX_SPLITS, must)
    size, rows, kv_heads = workspace.world_size, requests * heads, keys.shape[1]
    splits = splits or choose_splits(q, keys, batch, tile, options, workspace.processors, size)
    group = heads_of_tile(heads // kv_heads, tile)
    parts = parts_lse = None
    if splits > 1:
        parts = torch.empty((splits, rows, dim), dtype=torch.float32, device=q.device)
        parts_lse = torch.empty((splits, rows), dtype=torch.float32, device=q.device)
    out = torch.empty_like(q)
    workspace.begin()
    peers, dtype = workspace.peers(workspace.ll), triton_type(q.dtype)
    attend_and_send[(requests * splits, heads // group)](
        q=q,
        cache=Cache(keys, values, k_scale, v_scale),
        batch=Batch(None, batch.context_len, batch.block_table, batch.status),
        parts=parts,
        parts_lse=parts_lse,
        done=workspace.done.addresses,
        peers=peers,
        scale=scale,
        rank=workspace.rank,
        rows=rows,
        table_width=batch.block_table.shape[1],
        num_blocks=len(keys),
        q_stride=q.stride(0),
        rank_words=workspace.rank_words,
        dtype=dtype,
        WORLD=size,
        WORDS=workspace.words,
        SPLITS=splits,
        FORM=Form(
            heads=heads,
            kv_heads=kv_heads,
            group=group,
            page=keys.shape[2],
            dim=dim,
            rope=0,
            window=sliding_window or 0,
            softcap=softcap or 0.0,
            served=int(Served.ONE),
            block_m=tile.block_m,
            block_n=tile.block_n,
            block_d=max(16, triton.next_power_of_2(dim)),
            block_r=16,
        ),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    block_w = max(16, triton.next_power_of_2(workspace.words))
    at_once = max(1, COLLECTED_WORDS // block_w)
    collect_and_merge[(workspace.resident(-(-rows // at_once)),)](
        sinks=sinks,
        out=out,
        lse=lse,
        status=batch.status,
        peers=peers,
        rank=workspace.rank,
        rows=rows,
        rank_words=workspace.rank_words,
        dtype=dtype,
        WORLD=size,
        HEADS=heads,
        WORDS=workspace.words,
        ROWS=at_once,
        BLOCK_W=block_w,
    )
    return out
