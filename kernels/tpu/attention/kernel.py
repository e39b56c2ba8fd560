"""The inside of attention kernels: a query tile iterates over the pages that it sees.

Each step processes a page block, with a running softmax (FlashAttention-2: Dao 2023).

Protocol. DMAs fetch pages from HBM into one of two buffers while the core multiplies the other
buffer. At a tile's end, they fetch the first block of the core's next tile. Only visible pages are
fetched. Stale rows in the last one are zeroed before they are multiplied, because they may be NaN.

    block b of a tile:   start the DMAs of block b + 1, or of the next tile's first block, into the
                         other buffer; wait for the DMAs of block b; multiply

A buffer is refilled only after its contents have been multiplied, by the same core in program
order. Every DMA that is started is waited for, in the same tile or in the core's next one.

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

from weft.kernels.tpu.attention.query_tiles import (
    LANES,
    KernelConfig,
    Tiles,
    gather_queries,
    plan_tiles,
)
from weft.kernels.tpu.runtime.topology import Index, cores

MASK_VALUE = -1e30
"""Score of an invisible token; finite, so that differences of scores are never NaN."""


_START, _WAIT = methodcaller("start"), methodcaller("wait")  # of DMAs


class PrefetchedScalars(NamedTuple):
    """int32 scalars in SMEM: the tiles, this chip's rank [1], and the block tables [B * n]."""

    tiles: Tiles
    rank: jax.Array
    block_table: jax.Array

    @classmethod
    def from_args(cls, args: Sequence[jax.Ref]) -> PrefetchedScalars:
        """Take them from a kernel's first NUM_SCALARS arguments."""
        *tiles, rank, block_table = args
        return cls(Tiles(*tiles), rank, block_table)

    @property
    def args(self) -> tuple[jax.Array, ...]:
        """The kernel's arguments."""
        return *self.tiles, self.rank, self.block_table


NUM_SCALARS = len(Tiles._fields) + 2


def tile_batch(
    config: KernelConfig,
    q: jax.Array,
    query_start: jax.Array,
    context_len: jax.Array,
    block_table: jax.Array,
    rank: jax.Array,
) -> tuple[PrefetchedScalars, jax.Array]:
    """Plan a batch's tiles; return the kernel's scalars and its queries, [N, Hk, rows, lanes]."""
    tiles = plan_tiles(query_start, context_len, len(q), config.block_q, cores())
    queries = gather_queries(config, q, query_start, context_len, tiles)
    return PrefetchedScalars(tiles, rank, block_table.ravel()), queries


class Scratch(NamedTuple):
    """Memory for one tile.

    Attributes:
        kv_buffers: [2, Hk, block_k, 2 D]; the double buffer.
        arrived: DMA semaphores [2].
        first_buffer: int32 [1] in SMEM; the buffer with the tile's first block.
        acc: float32 [Hk, rows, lanes]; sum of weights times values.
        running_max: float32 [Hk, rows, LANES]; the largest score so far, in every lane.
        running_sum: float32 [Hk, rows, LANES]; sum of weights, in units of exp(running_max).
    """

    kv_buffers: jax.Ref
    arrived: jax.Ref
    first_buffer: jax.Ref
    acc: jax.Ref
    running_max: jax.Ref
    running_sum: jax.Ref


def scratch_shapes(config: KernelConfig) -> list[object]:
    """Return the scratch shapes for `Scratch`."""
    heads, rows = config.kv_heads, config.rows
    return [
        pltpu.VMEM((2, heads, config.block_k, 2 * config.head_dim), config.dtype),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SMEM((1,), jnp.int32),
        pltpu.VMEM((heads, rows, config.lanes), jnp.float32),
        pltpu.VMEM((heads, rows, LANES), jnp.float32),
        pltpu.VMEM((heads, rows, LANES), jnp.float32),
    ]


class _VisiblePages(NamedTuple):
    """Visible pages: entries first_page to first_page + num_pages in the request's table."""

    first_page: jax.Array
    num_pages: jax.Array
    last_position: jax.Array  # position of the last visible token


@dataclass(frozen=True, slots=True)
class Attention:
    """One core's attention, in a kernel.

    Attributes:
        config: what the kernel is compiled for.
        scalars: the batch.
        kv_pages: [P, Hk, page, 2 D], in HBM.
        scratch: memory for the tile.
    """

    config: KernelConfig
    scalars: PrefetchedScalars
    kv_pages: jax.Ref
    scratch: Scratch

    def attend(self, tile: Index, is_first: Index, next_tile: Index, q: jax.Ref) -> None:
        """Compute a tile's sums in `scratch`.

        Args:
            tile: the tile's index.
            is_first: whether it is the core's first tile.
            next_tile: the core's next tile, which may be unused.
            q: [Hk, rows, lanes].
        """
        scratch = self.scratch
        visible = self._visible_pages(tile)
        blocks = lax.max(1, pl.cdiv(visible.num_pages, self.config.pages_per_block))

        @pl.when(is_first)
        def _() -> None:
            scratch.first_buffer[0] = 0
            self._copy_pages(tile, 0, 0, _START)

        scratch.acc[...] = jnp.zeros_like(scratch.acc)
        scratch.running_max[...] = jnp.full_like(scratch.running_max, MASK_VALUE)
        scratch.running_sum[...] = jnp.zeros_like(scratch.running_sum)
        first_buffer = scratch.first_buffer[0]

        @pl.loop(0, blocks)
        def _(block: jax.Array) -> None:
            buffer = lax.rem(first_buffer + block, 2)
            is_last = block == blocks - 1

            @pl.when(jnp.logical_not(is_last))
            def _() -> None:
                self._copy_pages(tile, block + 1, 1 - buffer, _START)

            @pl.when(is_last & (next_tile < self.scalars.tiles.count[0]))
            def _() -> None:
                self._copy_pages(next_tile, 0, 1 - buffer, _START)

            self._copy_pages(tile, block, buffer, _WAIT)
            first_page = visible.first_page + block * self.config.pages_per_block

            @pl.when(is_last)
            def _() -> None:
                stale = self._positions(first_page, 0) > visible.last_position
                for head in range(self.config.kv_heads):
                    pages = scratch.kv_buffers.at[buffer, head]
                    pages[...] = jnp.where(stale, jnp.zeros_like(pages), pages[...])

            for head in range(self.config.kv_heads):
                scores = self._scores(q[head], buffer, head)
                self._update(
                    scores, self._mask(tile, first_page, visible.last_position), buffer, head
                )

        scratch.first_buffer[0] = lax.rem(first_buffer + blocks, 2)

    def result(self, head: int) -> tuple[jax.Array, jax.Array]:
        """Return a KV head's result, float32 [rows, lanes], and LSE [rows, LANES], in every lane.

        Rows that have seen nothing have 0 and -inf.
        """
        total = self.scratch.running_sum[head]
        has_keys = total > 0
        scale = jnp.where(has_keys, 1 / jnp.where(has_keys, total, 1), 0)
        log_total = jnp.log(jnp.where(has_keys, total, 1))
        lse = jnp.where(has_keys, self.scratch.running_max[head] + log_total, -jnp.inf)
        return self.scratch.acc[head] * scale[:, :1], lse

    def _visible_pages(self, tile: Index) -> _VisiblePages:
        config, tiles = self.config, self.scalars.tiles
        first = tiles.first[tile]
        last = first + tiles.queries[tile] - 1
        earliest = 0 if config.window is None else lax.max(0, first - config.window + 1)

        def own_pages(pages: Index) -> Index:
            """Count this chip's pages among a request's first `pages`."""
            return lax.div(
                pages + (config.world_size - 1 - self.scalars.rank[0]), config.world_size
            )

        first_page = own_pages(lax.div(earliest, config.page_size))
        return _VisiblePages(
            first_page,
            lax.max(0, own_pages(lax.div(last, config.page_size) + 1) - first_page),
            last,
        )

    def _copy_pages(
        self,
        tile: Index,
        block: Index,
        buffer: Index,
        action: Callable[[Any], None],
    ) -> None:
        """Start a block's DMAs, or wait for them."""
        config, scratch = self.config, self.scratch
        visible = self._visible_pages(tile)
        pages_before = block * config.pages_per_block
        entry = (
            self.scalars.tiles.request[tile] * config.pages_per_request
            + visible.first_page
            + pages_before
        )

        @pl.loop(0, lax.min(config.pages_per_block, visible.num_pages - pages_before))
        def _(i: jax.Array) -> None:
            page = lax.clamp(0, self.scalars.block_table[entry + i], self.kv_pages.shape[0] - 1)
            rows = pl.ds(pl.multiple_of(i * config.page_size, config.page_size), config.page_size)
            action(
                pltpu.make_async_copy(
                    self.kv_pages.at[page],
                    scratch.kv_buffers.at[buffer, :, rows],
                    scratch.arrived.at[buffer],
                )
            )

    def _positions(self, first_page: Index, axis: int) -> jax.Array:
        """Return the request positions for a block's tokens, along axis 0 or 1."""
        config = self.config
        sizes = (config.block_k, 1) if axis == 0 else (1, config.block_k)
        token = lax.broadcasted_iota(jnp.int32, sizes, axis) + first_page * config.page_size
        if config.world_size == 1:
            return token
        page = lax.div(token, config.page_size)
        pages_elsewhere = page * (config.world_size - 1) + self.scalars.rank[0]
        return token + pages_elsewhere * config.page_size

    def _mask(self, tile: Index, first_page: Index, last: Index) -> jax.Array:
        """Return which tokens in a block each row sees: [rows, block_k]."""
        config = self.config
        row = lax.broadcasted_iota(jnp.int32, (config.rows, 1), 0)
        query = self.scalars.tiles.first[tile] + lax.div(row, config.group)
        key = self._positions(first_page, 1)
        seen = key <= lax.min(query, last)
        return seen if config.window is None else seen & (key > query - config.window)

    def _scores(self, q: jax.Array, buffer: Index, head: int) -> jax.Array:
        config = self.config
        keys = self.scratch.kv_buffers[buffer, head, :, : config.lanes]
        scores = self._dot(q, keys, contract=1) * config.scale
        if config.softcap is not None:
            scores = config.softcap * jnp.tanh(scores * (1 / config.softcap))
        return scores

    def _update(self, scores: jax.Array, seen: jax.Array, buffer: Index, head: int) -> None:
        """Update the running softmax with a block's scores."""
        config, scratch = self.config, self.scratch
        values = scratch.kv_buffers[buffer, head, :, 2 * config.head_dim - config.lanes :]
        scores = jnp.where(seen, scores, MASK_VALUE)
        old_max = scratch.running_max[head]
        new_max = jnp.maximum(old_max, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(scores - new_max[:, :1]), 0)
        rescale = jnp.exp(old_max - new_max)
        scratch.running_max[head] = new_max
        scratch.running_sum[head] = scratch.running_sum[head] * rescale + jnp.sum(
            weights, axis=1, keepdims=True
        )
        product = self._dot(weights.astype(config.dtype), values, contract=0)
        scratch.acc[head] = scratch.acc[head] * rescale[:, :1] + product

    def _dot(self, a: jax.Array, b: jax.Array, contract: int) -> jax.Array:
        """Multiply over a's columns and b's axis `contract`: float32."""
        return lax.dot_general(
            a,
            b,
            (((1,), (contract,)), ((), ())),
            precision=lax.Precision.HIGHEST if self.config.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )
