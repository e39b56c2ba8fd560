"""The inside of attention kernels: a tile of queries goes over the pages that it sees.

A block of pages at a time, with a running softmax (FlashAttention-2: Dao 2023). Pages are fetched
from HBM by DMA into one of two buffers while the other one is multiplied, and at the end of a tile
those of the core's next tile. Only pages that are seen are fetched. What is stale in the last of
them is zeroed before it is multiplied, for it may be NaN.

    block b of a tile:   start the DMAs of block b + 1, or of the next tile's first, into the other
                         buffer; wait for the DMAs of b, as many as were started; multiply

A buffer is filled again only after what it had is multiplied, by the same core in its program's
order. What is started is waited for, in the same tile or in the core's next.

Scores are float32. Weights and values are multiplied in q's dtype; float32 as float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from weft.kernels.tpu.attention.query_tiles import LANES, Shape, Tiles, gather_queries, plan_tiles
from weft.kernels.tpu.runtime.topology import Index, cores

MASKED = -1e30
"""A score that is not seen; finite, so that the difference of two is a number."""


_START, _WAIT = methodcaller("start"), methodcaller("wait")  # of DMAs


class Scalars(NamedTuple):
    """int32 in SMEM: the tiles, this chip's rank [1], and the block tables [B * pages]."""

    tiles: Tiles
    rank: jax.Array
    table: jax.Array

    @classmethod
    def of(cls, flat: Sequence[jax.Ref]) -> Scalars:
        """Of a kernel's first SCALARS arguments."""
        *tiles, rank, table = flat
        return cls(Tiles(*tiles), rank, table)

    @property
    def flat(self) -> tuple[jax.Array, ...]:
        """As a kernel's arguments."""
        return *self.tiles, self.rank, self.table


SCALARS = len(Tiles._fields) + 2


def tile_batch(
    shape: Shape,
    q: jax.Array,
    query_start: jax.Array,
    context_len: jax.Array,
    block_table: jax.Array,
    rank: jax.Array,
) -> tuple[Scalars, jax.Array]:
    """What a kernel is told of a batch, and its queries in tiles [N, Hk, rows, lanes]."""
    tiles = plan_tiles(query_start, context_len, len(q), shape.block_q, cores())
    queries = gather_queries(shape, q, query_start, context_len, tiles)
    return Scalars(tiles, rank, block_table.ravel()), queries


class Work(NamedTuple):
    """Where a tile is computed.

    Attributes:
        pages: [2, Hk, keys, 2 D]; the buffers.
        arrived: DMA semaphores [2].
        turn: int32 [1] in SMEM; which buffer the tile's first block is in.
        total: float32 [Hk, rows, lanes]; sum of weights times values.
        top: float32 [Hk, rows, LANES]; the largest score, in every lane.
        weight: float32 [Hk, rows, LANES]; sum of weights, in units of exp(top).
    """

    pages: jax.Ref
    arrived: jax.Ref
    turn: jax.Ref
    total: jax.Ref
    top: jax.Ref
    weight: jax.Ref


def work(shape: Shape) -> list[object]:
    """The scratch shapes of a kernel's `Work`."""
    heads, rows = shape.kv_heads, shape.rows
    return [
        pltpu.VMEM((2, heads, shape.keys, 2 * shape.dim), shape.dtype),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SMEM((1,), jnp.int32),
        pltpu.VMEM((heads, rows, shape.lanes), jnp.float32),
        pltpu.VMEM((heads, rows, LANES), jnp.float32),
        pltpu.VMEM((heads, rows, LANES), jnp.float32),
    ]


class _Span(NamedTuple):
    """The pages that a tile sees: entries begin to begin + pages of its request's table."""

    begin: jax.Array
    pages: jax.Array
    last: jax.Array  # position of the last token that is seen


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of one core, in a kernel.

    Attributes:
        kv_pages: [P, Hk, page, 2 D], in HBM.
    """

    shape: Shape
    scalars: Scalars
    kv_pages: jax.Ref
    work: Work

    def attend(self, tile: Index, is_first: Index, next_tile: Index, q: jax.Ref) -> None:
        """Leave a tile's sums in `work`.

        Args:
            is_first: of the core's tiles.
            next_tile: of the core; none if it is not in use.
            q: [Hk, rows, lanes].
        """
        at = self.work
        seen = self._span(tile)
        blocks = lax.max(1, pl.cdiv(seen.pages, self.shape.block_pages))

        @pl.when(is_first)
        def _() -> None:
            at.turn[0] = 0
            self._fetch(tile, 0, 0, _START)

        at.total[...] = jnp.zeros_like(at.total)
        at.top[...] = jnp.full_like(at.top, MASKED)
        at.weight[...] = jnp.zeros_like(at.weight)
        turn = at.turn[0]

        @pl.loop(0, blocks)
        def _(block: jax.Array) -> None:
            buffer = lax.rem(turn + block, 2)
            is_last = block == blocks - 1

            @pl.when(jnp.logical_not(is_last))
            def _() -> None:
                self._fetch(tile, block + 1, 1 - buffer, _START)

            @pl.when(is_last & (next_tile < self.scalars.tiles.count[0]))
            def _() -> None:
                self._fetch(next_tile, 0, 1 - buffer, _START)

            self._fetch(tile, block, buffer, _WAIT)
            begin = seen.begin + block * self.shape.block_pages

            @pl.when(is_last)
            def _() -> None:
                stale = self._positions(begin, 0) > seen.last
                for head in range(self.shape.kv_heads):
                    pages = at.pages.at[buffer, head]
                    pages[...] = jnp.where(stale, jnp.zeros_like(pages), pages[...])

            for head in range(self.shape.kv_heads):
                scores = self._scores(q[head], buffer, head)
                self._add(scores, self._seen(tile, begin, seen.last), buffer, head)

        at.turn[0] = lax.rem(turn + blocks, 2)

    def result(self, head: int) -> tuple[jax.Array, jax.Array]:
        """Of a KV head: float32 [rows, lanes], and LSE [rows, LANES], in every lane. Rows that have
        seen nothing have 0, and -inf."""
        weight = self.work.weight[head]
        some = weight > 0
        scale = jnp.where(some, 1 / jnp.where(some, weight, 1), 0)
        lse = jnp.where(some, self.work.top[head] + jnp.log(jnp.where(some, weight, 1)), -jnp.inf)
        return self.work.total[head] * scale[:, :1], lse

    def _span(self, tile: Index) -> _Span:
        shape, tiles = self.shape, self.scalars.tiles
        first = tiles.first[tile]
        last = first + tiles.queries[tile] - 1
        earliest = 0 if shape.window is None else lax.max(0, first - shape.window + 1)

        def own(pages: Index) -> Index:
            """How many of a request's first pages this chip has."""
            return lax.div(pages + (shape.world - 1 - self.scalars.rank[0]), shape.world)

        begin = own(lax.div(earliest, shape.page))
        return _Span(begin, lax.max(0, own(lax.div(last, shape.page) + 1) - begin), last)

    def _fetch(
        self,
        tile: Index,
        block: Index,
        buffer: Index,
        do: Callable[[Any], None],
    ) -> None:
        """Start the DMAs of a tile's block, or wait for them."""
        shape, at = self.shape, self.work
        seen = self._span(tile)
        before = block * shape.block_pages
        entry = self.scalars.tiles.request[tile] * shape.pages + seen.begin + before

        @pl.loop(0, lax.min(shape.block_pages, seen.pages - before))
        def _(i: jax.Array) -> None:
            page = lax.clamp(0, self.scalars.table[entry + i], self.kv_pages.shape[0] - 1)
            rows = pl.ds(pl.multiple_of(i * shape.page, shape.page), shape.page)
            do(
                pltpu.make_async_copy(
                    self.kv_pages.at[page], at.pages.at[buffer, :, rows], at.arrived.at[buffer]
                )
            )

    def _positions(self, begin: Index, axis: int) -> jax.Array:
        """Where in the request a block's tokens are, along an axis of two."""
        shape = self.shape
        sizes = (shape.keys, 1) if axis == 0 else (1, shape.keys)
        token = lax.broadcasted_iota(jnp.int32, sizes, axis) + begin * shape.page
        if shape.world == 1:
            return token
        page = lax.div(token, shape.page)
        others = page * (shape.world - 1) + self.scalars.rank[0]
        return token + others * shape.page

    def _seen(self, tile: Index, begin: Index, last: Index) -> jax.Array:
        """Which tokens of a block are seen by which rows: [rows, keys]."""
        shape = self.shape
        row = lax.broadcasted_iota(jnp.int32, (shape.rows, 1), 0)
        query = self.scalars.tiles.first[tile] + lax.div(row, shape.group)
        key = self._positions(begin, 1)
        seen = key <= lax.min(query, last)
        return seen if shape.window is None else seen & (key > query - shape.window)

    def _scores(self, q: jax.Array, buffer: Index, head: int) -> jax.Array:
        shape = self.shape
        keys = self.work.pages[buffer, head, :, : shape.lanes]
        scores = self._dot(q, keys, contract=1) * shape.scale
        if shape.softcap is not None:
            scores = shape.softcap * jnp.tanh(scores * (1 / shape.softcap))
        return scores

    def _add(self, scores: jax.Array, seen: jax.Array, buffer: Index, head: int) -> None:
        """A step of the running softmax."""
        shape, at = self.shape, self.work
        values = at.pages[buffer, head, :, 2 * shape.dim - shape.lanes :]
        scores = jnp.where(seen, scores, MASKED)
        old = at.top[head]
        top = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(scores - top[:, :1]), 0)
        fade = jnp.exp(old - top)
        at.top[head] = top
        at.weight[head] = at.weight[head] * fade + jnp.sum(weights, axis=1, keepdims=True)
        product = self._dot(weights.astype(shape.dtype), values, contract=0)
        at.total[head] = at.total[head] * fade[:, :1] + product

    def _dot(self, a: jax.Array, b: jax.Array, contract: int) -> jax.Array:
        """The product over a's columns and b's axis `contract`: float32."""
        return lax.dot_general(
            a,
            b,
            (((1,), (contract,)), ((), ())),
            precision=lax.Precision.HIGHEST if self.shape.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )
