"""Decodes over a KV cache that is split by position among ranks: distributed flash decoding.

    distributed_decode_attention(q [B, H, D], keys, values, batch, workspace) -> [B, H, D]

Page p of a request is with rank p mod W, so that ranks have equally much, however
long the request grows. Every rank has all queries, and gets all results.

Protocol, of call n; slot n mod 2 of each rank's buffer has a row for each rank.

1. `attend` and `merge_splits` (attention.py, decode_attention.py), over the rank's
   own pages: of each head its part of the result, in q's dtype, and the log of
   the sum of its weights (LSE; -inf where the rank has no key that is seen).
2. `exchange_and_merge`: a program stores its rows of both to row r of the slot of
   every rank, as words that carry n (LL: low_latency.py), so there are no
   signals. Then it takes the same rows of every rank, and merges them in the
   order of the ranks: weights each with exp(LSE - the largest), and adds the
   head's sink. All ranks have the same bits.

A program waits only for those of its own number on the other ranks, which send
before they wait: no cycle. Every rank hears from every other one in each call,
so two slots are enough: gpu/workspace.py. The ranks' parts travel, and so are
rounded, in q's dtype; for bfloat16 that is an error of the size of the result's
own rounding.

A rank that flags a request (attention.py) sends an LSE of +inf. Then all ranks
flag it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.arguments import require_counts
from weft.kernels.gpu.attention import (
    LN2,
    LOG2E,
    ON_ANOTHER_RANK,
    Options,
    PagedBatch,
    check_attention,
    checked_tile,
)
from weft.kernels.gpu.decode_attention import MAX_SPLITS, choose_splits, launch_split
from weft.kernels.gpu.epilogue import RESULTS
from weft.kernels.gpu.low_latency import get_ll, load_words, put_ll
from weft.kernels.gpu.signals import peer_pointer
from weft.kernels.gpu.workspace import SLOTS, Workspace, agreed, triton_type
from weft.kernels.symmetric.memory import Home

EXCHANGED_WORDS = 512
"""That a program has in flight, of 4 bytes."""

_ON_ANOTHER_RANK = tl.constexpr(ON_ANOTHER_RANK)


@triton.jit(do_not_specialize=["rank", "rows", "slot_words", "rank_words"])
def exchange_and_merge(
    part,  # int32 or int16 [rows, D], the bits of dtype; this rank's part of the result
    part_lse,  # int32 [rows], the bits of float32
    sinks,  # [HEADS], or None
    out,  # [rows, D]
    lse,  # float32 [rows], or None
    status,  # int32 [rows / HEADS]
    buffers,  # int64 [W]; addresses of int64 [2, W, rank_words]
    calls,  # int32 [1]
    fault,  # int32 [4]
    rank,
    rows,
    slot_words,
    rank_words,  # at least rows * (WORDS + 1): the parts' words, and then those of their LSEs
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    HEADS: tl.constexpr,  # row % HEADS is a row's head, row // HEADS its request
    WORDS: tl.constexpr,  # of 4 bytes, in D numbers
    ROWS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    max_polls,
):
    """Send rows to all ranks, take the same ones from all, merge. Grid: (programs,), persistent."""
    WIDE: tl.constexpr = dtype == tl.float32
    PER_WORD: tl.constexpr = 1 if WIDE else 2
    call = tl.load(calls)
    slot = (call % 2) * tl.cast(slot_words, tl.int64)
    place = tl.arange(0, ROWS * BLOCK_W)
    column = place % BLOCK_W
    for item in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = item * ROWS + tl.arange(0, ROWS)
        of_word = item * ROWS + place // BLOCK_W
        word = of_word * WORDS + column
        sent = (column < WORDS) & (of_word < rows)
        words = load_words(part, tl.where(sent, word, 0), rows * WORDS * PER_WORD, WIDE)
        logs = tl.load(part_lse + row, mask=row < rows, other=0)
        for step in range(WORLD):
            to = peer_pointer(buffers, (rank + 1 + step) % WORLD, tl.int64) + slot
            to += rank * tl.cast(rank_words, tl.int64)
            put_ll(to + word, words, call, sent)
            put_ll(to + rows * WORDS + row, logs, call, row < rows)

    d = tl.arange(0, BLOCK_W * PER_WORD)
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
            come = peer_pointer(buffers, rank, tl.int64) + slot
            come += source * tl.cast(rank_words, tl.int64)
            first = source * rank_words + item * ROWS * WORDS
            got = get_ll(come + word, call, sent, fault, rank, first, max_polls)
            first = source * rank_words + rows * WORDS + item * ROWS
            logs = get_ll(
                come + rows * WORDS + row, call, row < rows, fault, rank, first, max_polls
            )
            if WIDE:
                numbers = got.to(tl.float32, bitcast=True)
            else:
                low = (got & 0xFFFF).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
                high = (got >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
                numbers = tl.join(low, high)
            numbers = tl.reshape(numbers, (ROWS, BLOCK_W * PER_WORD))
            log = logs.to(tl.float32, bitcast=True)
            flagged = flagged | (log == float("inf")).to(tl.int32)
            log = tl.where(log == float("inf"), float("-inf"), log)
            new_top = tl.maximum(top, log)
            anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
            fade, share = tl.exp2((top - anchor) * LOG2E), tl.exp2((log - anchor) * LOG2E)
            total = total * fade[:, None] + numbers * share[:, None]
            weight = weight * fade + share
            top = new_top
        unseen = weight == 0
        weight = tl.where(unseen, 1.0, weight)
        total = tl.where((flagged > 0)[:, None], 0.0, total / weight[:, None])
        inside = (row < rows)[:, None] & (d < WORDS * PER_WORD)[None, :]
        at = row.to(tl.int64)[:, None] * (WORDS * PER_WORD) + d[None, :]
        tl.store(out + at, total.to(dtype), mask=inside)
        tl.atomic_or(
            status + row // HEADS,
            _ON_ANOTHER_RANK,
            mask=(row < rows) & (flagged > 0),
            sem="relaxed",
            scope="gpu",
        )
        if lse is not None:
            log_sum = tl.where(unseen, float("-inf"), top + tl.log2(weight) * LN2)
            tl.store(lse + row, tl.where(flagged > 0, float("inf"), log_sum), mask=row < rows)


class DistributedDecodeWorkspace(Workspace):
    """Of `distributed_decode_attention`, on one rank; see its `_workspace`."""

    def __init__(
        self, home: Home, max_requests: int, heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        name = "distributed_decode_attention"
        asked = {"max_requests": max_requests, "heads": heads, "head_dim": head_dim, "dtype": dtype}
        with agreed(name, asked, home.exchange) as check:
            require_counts(check, 1, max_requests=max_requests, heads=heads, head_dim=head_dim)
            check("dtype", dtype, dtype in RESULTS, f"be one of {', '.join(map(str, RESULTS))}")
            whole = head_dim * dtype.itemsize % 4 == 0
            check("head_dim", head_dim, whole, f"be even with {dtype}: words of 4 bytes travel")
        super().__init__(home, name, 0, dtype, 0)
        self.max_requests, self.heads, self.head_dim = max_requests, heads, head_dim
        self.words = head_dim * dtype.itemsize // 4  # of 4 bytes, in a head's part
        self.rank_words = max_requests * heads * (self.words + 1)
        shape = (SLOTS, home.world_size, self.rank_words)
        self.ll = home.zeros(f"{name}.ll", shape, torch.int64)


def distributed_decode_attention_workspace(
    home: Home, max_requests: int, heads: int, head_dim: int, dtype: torch.dtype
) -> DistributedDecodeWorkspace:
    """A workspace for steps of at most `max_requests` decodes. Collective.

    Args:
        home: of this rank.
        max_requests: of a step.
        heads, head_dim: of q.
        dtype: of q; float32, float16 or bfloat16.

    Raises:
        KernelError: on every rank, if an argument is refused on one or not the same on all.
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
    """`decode_attention` of one query per request, over pages that ranks share. Collective.

    Args:
        q: [B, H, D], the same on all ranks.
        keys, values: [num_blocks, Hk, page, D]; this rank's pages.
        batch: of the step, the same on all ranks but for block_table: entry i is page i * W + r
            of the request on rank r, in this rank's cache.
        workspace: from `distributed_decode_attention_workspace`.
        scale, sliding_window, softcap, sinks, k_scale, v_scale, lse: see attention.Options; the
            same on all ranks.
        splits, blocks, warps, stages: as of `decode_attention`; each rank's own.

    Returns:
        [B, H, D], q's dtype; the same bits on all ranks.

    Raises:
        KernelError: on every rank, if one cannot take its arguments, or they do not agree.
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
        must = f"be {made}, which the workspace was made for"
        require("H, D", shape, shape == made, must)
        must = f"be {len(batch.context_len)}, one query for each request"
        require("q's rows", requests, requests == len(batch.context_len), must)
        queries = batch.max_queries
        require("max_queries", queries, queries == 1, "be 1: it is for decodes")
        must = f"be at most {workspace.max_requests}, which the workspace was made for"
        require("requests", requests, requests <= workspace.max_requests, must)
        tile = checked_tile(require, q, keys, batch, blocks, warps, stages)
        must = f"be from 1 to {MAX_SPLITS}, or 0 to choose"
        require("splits", splits, 0 <= splits <= MAX_SPLITS, must)
    size, rows = workspace.world_size, requests * heads
    splits = splits or choose_splits(
        q, keys, batch, tile, options, workspace.processors, workspace.world_size
    )
    part, out = torch.empty_like(q), torch.empty_like(q)
    part_lse = torch.empty((requests, heads), dtype=torch.float32, device=q.device)
    launch_split(
        *(q, keys, values, batch, part, part_lse, tile, options, splits),
        sinks=False,
        rank=workspace.rank,
        world_size=size,
    )
    block_w = max(16, triton.next_power_of_2(workspace.words))
    items = max(1, EXCHANGED_WORDS // block_w)
    workspace.begin()
    exchange_and_merge[(workspace.resident(-(-rows // items)),)](
        *(part.view(torch.int32 if q.itemsize == 4 else torch.int16), part_lse.view(torch.int32)),
        *(sinks, out, lse, batch.status, workspace.ll.addresses, workspace.calls, workspace.fault),
        *(workspace.rank, rows, size * workspace.rank_words, workspace.rank_words),
        dtype=triton_type(q.dtype),
        WORLD=size,
        HEADS=heads,
        WORDS=workspace.words,
        ROWS=items,
        BLOCK_W=block_w,
        max_polls=workspace.max_polls,
    )
    return out
