"""Attention over a paged KV cache on the CPU, for ragged batches of prefills and decodes.

A page holds `block_size` consecutive tokens of one request, for every KV head. `keys` and `values`
are [num_blocks, Hk, block_size, D], so a gather copies runs of block_size x D numbers.

With compiled kernels, attention is one call to csrc/attention.cpp, which
reads pages in place. Elsewhere, and in float32, it uses torch operators:

1. `AttentionPlan` is made once per step and shared by all layers. It cuts each request's queries
   into pieces. Pieces with equally many queries and similar contexts form a tile. Decodes with
   similar lengths are one tile. A long prefill is several tiles; each skips pages that its queries
   cannot see, because of causality or the sliding window.
2. `write_kv` scatters the step's keys and values into their pages.
3. `paged_attention` gathers a tile's pages and computes it with two matrix products around a
   softmax. The G = H / Hk query heads that share a KV head are folded into query rows, so keys and
   values are not repeated. Scores are float32. Tiles with few rows per head are one batched
   product. Tiles with many rows go head by head, in query blocks that stay in cache and end at the
   diagonal. Both beat torch's `scaled_dot_product_attention` here.

A tile's masked positions still go through the matmuls, times a weight of zero, so they must be
finite. `write_kv` therefore clears a page when its first token is written, and tiles are padded
with pages of the same request. A request never sees data that another request left in a page, not
even NaN.

If ranks share a request's pages, page p is on rank p mod W, as in
gpu/attention/distributed_decode.py. Each rank attends to its own pages and returns the log of the
sum of its weights (LSE). `merge_parts` combines the ranks' results by these.

MAX_TILE_ELEMENTS bounds each temporary tensor. The exception is one request's gathered keys and
values, which are as long as its context.

Not handled: attention sinks, logit soft-capping, MLA, gradients.
"""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from weft.kernels.cpu import native
from weft.kernels.cpu.linear import matmul_transposed, padded
from weft.kernels.cpu.tile_limits import (
    BY_HEAD_ROWS,
    BY_HEAD_SCORES,
    MAX_BLOCK_QUERIES,
    MAX_BLOCK_SCORES,
    MAX_TILE_ELEMENTS,
    MAX_TILE_QUERIES,
    TILE_COST_IN_SCORES,
)

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive queries of one request: row, row + 1, ... at positions first, first + 1, ..."""

    request: int
    row: int
    first: int
    queries: int
    start_page: int
    pages: int


@dataclass(frozen=True, slots=True)
class _Tile:
    """N pieces computed together, all with Q queries and padded to P pages.

    Attributes:
        rows: int64 [N * Q]; rows in the batch.
        pages: int64 [N * Hk * P]; rows in the cache seen as [num_blocks * Hk, block_size * D].
        queries: Q.
        length: P * block_size keys.
        masked_from: every query sees all keys before this one.
        reach: maximum number of keys that a piece's first query sees; its q-th query sees q more.
        mask: float32 [N, Q, 1, length - masked_from]; 0 where the query sees the key, else -inf.
    """

    rows: Tensor
    pages: Tensor
    queries: int
    length: int
    masked_from: int
    reach: int
    mask: Tensor

    @property
    def sees_all(self) -> bool:
        """True if each piece is one query, which sees every key up to its own."""
        return self.queries == 1 and self.masked_from == self.reach


@dataclass
class AttentionPlan:
    """A step's places in the cache, and its tiles.

    Attributes:
        query_start, context_len, block_table: as in models/interface.StepInput.
        block_size: tokens in a page.
        pages: int64 [T]; the page that each token is written to; -1 if it is on another rank.
        slots: int64 [T]; the token's offset in that page.
        fresh_pages: int64 [F]; pages whose first token is written in this step.
        rank, world_size: this rank, among the ranks that share each request's pages.
    """

    query_start: Int32
    context_len: Int32
    block_table: Int32
    block_size: int
    pages: Tensor
    slots: Tensor
    fresh_pages: Tensor
    rank: int = 0
    world_size: int = 1
    _tiles: dict[tuple[int, int, int, int | None], list[_Tile]] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        query_start: Int32,
        context_len: Int32,
        block_table: Int32,
        *,
        block_size: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> AttentionPlan:
        """Lay out one step.

        Args:
            query_start: int32 [B + 1]; request b owns rows query_start[b]:query_start[b + 1].
            context_len: int32 [B]; its tokens in the cache after this step's are written.
            block_table: int32 [B, n]; its pages in order; entries beyond its context are ignored.
                With several ranks, only this rank's pages p, where p % W == r.
            block_size: tokens in a page.
            rank, world_size: r and W.
        """
        queries = np.diff(query_start)
        request = np.repeat(np.arange(len(queries)), queries)
        position = np.arange(query_start[-1]) + np.repeat(context_len - query_start[1:], queries)
        page_number, slot = position // block_size, position % block_size
        page = block_table[request, page_number // world_size].astype(np.int64)
        fresh = slot == 0
        if world_size > 1:
            own = page_number % world_size == rank
            page, fresh = np.where(own, page, -1), fresh & own
        return cls(
            query_start=np.ascontiguousarray(query_start, np.int32),
            context_len=np.ascontiguousarray(context_len, np.int32),
            block_table=np.ascontiguousarray(block_table, np.int32),
            block_size=block_size,
            pages=torch.from_numpy(page),
            slots=torch.from_numpy(slot.astype(np.int64)),
            fresh_pages=torch.from_numpy(page[fresh]),
            rank=rank,
            world_size=world_size,
        )

    @cached_property
    def batch(self) -> native.Batch:
        """The step in csrc/layer.cpp's format; made for the step's first layer."""
        return native.Batch(
            page=self.pages.data_ptr(),
            slot=self.slots.data_ptr(),
            query_start=self.query_start.ctypes.data,
            context_len=self.context_len.ctypes.data,
            block_table=self.block_table.ctypes.data,
            tokens=len(self.slots),
            requests=len(self.context_len),
            table_width=self.block_table.shape[1],
            block_size=self.block_size,
        )

    def tiles(
        self, heads: int, kv_heads: int, head_dim: int, sliding_window: int | None
    ) -> list[_Tile]:
        """Return the tiles for layers with this shape; made for the step's first such layer."""
        key = (heads, kv_heads, head_dim, sliding_window)
        if key not in self._tiles:
            pieces = self._pieces(sliding_window)
            # Longest first, because a tile is padded to its first piece.
            pieces.sort(key=lambda piece: (piece.queries, piece.pages), reverse=True)
            elements_per_key = max(heads, kv_heads * head_dim)
            self._tiles[key] = [
                self._tile(batch, kv_heads, sliding_window)
                for batch in _batches(pieces, heads, elements_per_key, self.block_size)
            ]
        return self._tiles[key]

    def _pieces(self, sliding_window: int | None) -> list[_Piece]:
        pieces = []
        starts, contexts = self.query_start.tolist(), self.context_len.tolist()
        for request, context in enumerate(contexts):
            row, end = starts[request], starts[request + 1]
            while row < end:
                queries = min(MAX_TILE_QUERIES, end - row)
                first = context - (end - row)
                seen = 0 if sliding_window is None else max(0, first - sliding_window + 1)
                start_page = self._own_pages(seen // self.block_size)
                end_page = self._own_pages(-(-(first + queries) // self.block_size))
                if start_page < end_page:
                    pieces.append(
                        _Piece(request, row, first, queries, start_page, end_page - start_page)
                    )
                row += queries
        return pieces

    def _own_pages(self, pages: int) -> int:
        """Count this rank's pages among a request's first `pages`."""
        return -(-(pages - self.rank) // self.world_size)

    def _own_tokens(self, tokens: Int64) -> Int64:
        """Count this rank's tokens among a request's first `tokens`."""
        pages, rest = np.divmod(tokens, self.block_size)
        whole = (pages + (self.world_size - 1) - self.rank) // self.world_size
        return whole * self.block_size + np.where(pages % self.world_size == self.rank, rest, 0)

    def _positions(self, tokens: Int64) -> Int64:
        """Map this rank's n-th tokens of a request to positions in it."""
        pages, slots = np.divmod(tokens, self.block_size)
        return (pages * self.world_size + self.rank) * self.block_size + slots

    def _tile(self, pieces: list[_Piece], kv_heads: int, sliding_window: int | None) -> _Tile:
        request = np.array([piece.request for piece in pieces])
        row = np.array([piece.row for piece in pieces])
        first = np.array([piece.first for piece in pieces])
        start_page = np.array([piece.start_page for piece in pieces])
        pages = np.array([piece.pages for piece in pieces])
        queries = np.arange(pieces[0].queries)

        # Pad with the piece's own last page, because it is finite whenever the request is.
        nth = start_page[:, None] + np.minimum(np.arange(pages[0]), pages[:, None] - 1)
        page = self.block_table[request[:, None], nth].astype(np.int64)
        cache_row = page[:, None, :] * kv_heads + np.arange(kv_heads)[:, None]

        length = int(pages[0]) * self.block_size
        # Without a window, causality hides nothing up to the first query's own key.
        before_first = self._own_tokens(first + 1) - start_page * self.block_size
        masked_from = 0 if sliding_window is not None else int(before_first.min())
        at = start_page[:, None] * self.block_size + np.arange(masked_from, length)
        key = self._positions(at)
        key, query = key[:, None, :], (first[:, None] + queries)[:, :, None]
        seen = key <= query
        if sliding_window is not None:
            seen &= key > query - sliding_window
        mask = np.where(seen, np.float32(0), np.float32(-np.inf))
        return _Tile(
            rows=torch.from_numpy((row[:, None] + queries).reshape(-1)),
            pages=torch.from_numpy(cache_row.reshape(-1)),
            queries=len(queries),
            length=length,
            masked_from=masked_from,
            reach=max(1, int(before_first.max())),
            mask=torch.from_numpy(mask)[:, :, None, :],
        )


def _batches(
    pieces: list[_Piece], heads: int, elements_per_key: int, block_size: int
) -> list[list[_Piece]]:
    """Group sorted pieces with equally many queries while padding is cheaper than a new tile."""
    batches: list[list[_Piece]] = []
    padding = 0
    for piece in pieces:
        if batches and piece.queries == batches[-1][0].queries:
            batch = batches[-1]
            padding += (batch[0].pages - piece.pages) * block_size * piece.queries * heads
            keys = (len(batch) + 1) * batch[0].pages * block_size
            elements = keys * max(elements_per_key, piece.queries * heads)
            if padding <= TILE_COST_IN_SCORES and elements <= MAX_TILE_ELEMENTS:
                batch.append(piece)
                continue
        batches.append([piece])
        padding = 0
    return batches


def write_kv(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan) -> None:
    """Write the step's keys and values into their pages, in place.

    Args:
        k, v: [T, Hk, D].
        keys, values: [num_blocks, Hk, block_size, D], the layer's cache.
        plan: the step's plan.
    """
    if plan.fresh_pages.numel():
        keys.index_fill_(0, plan.fresh_pages, 0)
        values.index_fill_(0, plan.fresh_pages, 0)
    pages, slots = plan.pages, plan.slots
    if plan.world_size > 1:
        own = pages >= 0
        k, v, pages, slots = k[own], v[own], pages[own], slots[own]
    keys[pages, :, slots] = k
    values[pages, :, slots] = v


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    sliding_window: int | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Compute causal attention for the step's queries over their requests' pages.

    Args:
        q: [T, H, D], a token's heads contiguous; query head h reads KV head h // (H / Hk).
        keys, values: contiguous [num_blocks, Hk, block_size, D], including the step's tokens.
        plan: the step's plan.
        scale: multiplies the scores.
        sliding_window: token i sees the tokens j with i - window < j <= i; None sees all.
        lse: float32 [T, H], written: the log of the sum of exp(score). Required if ranks share
            pages. A query may then see no key here; its LSE is -inf and its result 0.

    Returns:
        [T, H, D], q's dtype.
    """
    num_blocks, kv_heads, block_size, dim = keys.shape
    heads = q.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype)
    if lse is None and native.supports(q.dtype) and native.takes_heads(heads, kv_heads, dim):
        native.kernels().weft_attention(
            byref(
                native.AttentionStep(
                    q=q.data_ptr(),
                    q_stride=q.stride(0),
                    keys=keys.data_ptr(),
                    values=values.data_ptr(),
                    query_start=plan.query_start.ctypes.data,
                    context_len=plan.context_len.ctypes.data,
                    block_table=plan.block_table.ctypes.data,
                    requests=len(plan.context_len),
                    table_width=plan.block_table.shape[1],
                    block_size=block_size,
                    heads=heads,
                    kv_heads=kv_heads,
                    dim=dim,
                    window=sliding_window or 0,
                    scale=scale,
                    out=out.data_ptr(),
                )
            )
        )
        return out
    if lse is not None:
        out.zero_()
        lse.fill_(-torch.inf)
    group = heads // kv_heads
    flat_keys = keys.view(num_blocks * kv_heads, block_size * dim)
    flat_values = values.view(num_blocks * kv_heads, block_size * dim)
    for tile in plan.tiles(heads, kv_heads, dim, sliding_window):
        n, queries, length = len(tile.mask), tile.queries, tile.length
        tile_q = q.index_select(0, tile.rows)
        tile_k = flat_keys.index_select(0, tile.pages).view(n * kv_heads, length, dim)
        tile_v = flat_values.index_select(0, tile.pages).view(n * kv_heads, length, dim)
        if n == 1 and tile.sees_all and lse is None:
            tile_out = _attend_one(tile_q.view(kv_heads, group, dim), tile_k, tile_v, tile, scale)
            out.index_copy_(0, tile.rows, tile_out.view(1, heads, dim))
            continue
        tile_q = tile_q.view(n, queries, kv_heads, group, dim)
        tile_q = tile_q.transpose(1, 2).reshape(n * kv_heads, queries * group, dim)
        tile_q, tile_k = tile_q.float().mul_(scale), tile_k.float()
        rows = queries * group
        many_rows = rows >= BY_HEAD_ROWS or len(tile_q) * rows * length > MAX_TILE_ELEMENTS
        by_head = many_rows and rows * length >= BY_HEAD_SCORES
        attend = _attend_by_head if by_head else _attend_batched
        tile_lse = None if lse is None else tile_q.new_empty(tile_q.shape[:2])
        tile_out = attend(tile_q, tile_k, tile_v, tile, tile_lse)
        tile_out = tile_out.view(n, kv_heads, queries, group, dim).transpose(1, 2)
        out.index_copy_(0, tile.rows, tile_out.reshape(n * queries, heads, dim))
        if lse is not None and tile_lse is not None:
            tile_lse = tile_lse.view(n, kv_heads, queries, group).transpose(1, 2)
            lse.index_copy_(0, tile.rows, tile_lse.reshape(n * queries, heads))
    return out


def _attend_one(q: Tensor, k: Tensor, v: Tensor, tile: _Tile, scale: float) -> Tensor:
    """Attend with one query of one request, whose keys need no mask except an end.

    torch's fused attention is a single call, and a batch of one is bound by calls: 41 us per layer
    instead of 90 (2 KV heads, 192 keys). From about 16 requests on it is no faster.

    Args:
        q: [Hk, G, D].
        k, v: [Hk, length, D].
        tile: gives the number of visible keys.
        scale: multiplies the scores.

    Returns:
        [Hk, G, D].
    """
    seen = slice(tile.reach)
    return scaled_dot_product_attention(q[None], k[None, :, seen], v[None, :, seen], scale=scale)[0]


def _attend_batched(q: Tensor, k: Tensor, v: Tensor, tile: _Tile, lse: Tensor | None) -> Tensor:
    """Compute softmax(q @ k.T + mask) @ v for all heads in a tile at once.

    Args:
        q: float32 [N * Hk, Q * G, D], scaled.
        k: float32 [N * Hk, length, D].
        v: [N * Hk, length, D].
        tile: gives N, Q, length and the mask.
        lse: float32 [N * Hk, Q * G], written, or None.

    Returns:
        [N * Hk, Q * G, D], v's dtype.
    """
    n = len(tile.mask)
    scores = torch.bmm(q, k.transpose(1, 2))
    unfolded = scores.view(n, len(q) // n, tile.queries, -1, tile.length)
    unfolded[..., tile.masked_from :].add_(tile.mask[:, None])
    return torch.bmm(_weights(scores, lse).to(v.dtype), v)


def _attend_by_head(q: Tensor, k: Tensor, v: Tensor, tile: _Tile, lse: Tensor | None) -> Tensor:
    """Compute the same as `_attend_batched`, head by head and block by block."""
    kv_heads, group = len(q) // len(tile.mask), q.shape[1] // tile.queries
    step = max(1, min(MAX_BLOCK_QUERIES, MAX_BLOCK_SCORES // (group * tile.length)))
    out = torch.empty_like(q, dtype=v.dtype)
    for start in range(0, tile.queries, step):
        end = min(start + step, tile.queries)
        seen = min(tile.length, padded(tile.reach + end - 1))  # keys beyond are masked
        rows = slice(start * group, end * group)
        for head in range(len(q)):
            mask = tile.mask[head // kv_heads, start:end, :, : seen - tile.masked_from]
            scores = matmul_transposed(q[head, rows], k[head, :seen])
            scores.view(end - start, group, seen)[..., tile.masked_from :].add_(mask)
            weights = _weights(scores, None if lse is None else lse[head, rows])
            torch.mm(weights.to(v.dtype), v[head, :seen], out=out[head, rows])
    return out


def _weights(scores: Tensor, lse: Tensor | None) -> Tensor:
    """Compute softmax(scores) by row, 0 in rows of -inf; write the logs of the sums to `lse`."""
    if lse is None:
        return scores.softmax(dim=-1)
    lse.copy_(scores.logsumexp(dim=-1))
    return scores.sub_(lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp_()


def merge_parts(parts: Tensor, lses: Tensor) -> Tensor:
    """Merge the ranks' attention results over their own keys (Dao et al. 2023).

    Args:
        parts: float32 [W, T, H, D].
        lses: float32 [W, T, H]; for each query, some rank has a key.

    Returns:
        [T, H, D].
    """
    return (parts * lses.softmax(dim=0)[..., None]).sum(dim=0)
