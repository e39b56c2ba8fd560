"""Queries of a ragged batch in tiles of one request each, and what is made of them back.

A tile has up to BLOCK_Q queries, and for each KV head a row for each of its query heads: row i is
head i % G of query i // G. Where the tiles are follows from the lengths on the device; how many
there are, from the sizes of the arrays. Those in use come first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

LANES = 128

ROWS = 128
"""Of a tile for each KV head, at most, where requests may have more than one query."""

MOST_NUMBERS = 1 << 18
"""Of a tile's rows for all KV heads, of which a kernel has about eight such arrays in VMEM."""

BUFFER_BYTES = 4 << 20
"""Of the two buffers of pages."""

MOST_KEYS = 512
"""Of a block."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a kernel is compiled for.

    Attributes:
        group: query heads of a KV head.
        dim: of a head.
        page: tokens of a page.
        pages: entries of a request's block table.
        block_q: queries of a tile.
        rows: of a tile for each KV head; group * block_q, rounded up to whole registers.
        block_pages: pages of a block.
        world: chips that the pages of a request are dealt out to: chip p mod world has page p.
    """

    kv_heads: int
    group: int
    dim: int
    page: int
    pages: int
    block_q: int
    rows: int
    block_pages: int
    scale: float
    window: int | None
    softcap: float | None
    dtype: jnp.dtype
    world: int

    @property
    def keys(self) -> int:
        """Tokens of a block."""
        return self.block_pages * self.page

    @property
    def lanes(self) -> int:
        """Numbers of a query and of a result in the kernel. Where a key does not fill registers of
        its own, the query is followed by zeros and multiplied with key and value, and the result
        comes after as many numbers that do not count."""
        return self.dim if self.dim % LANES == 0 else 2 * self.dim


def make_shape(
    q: jax.Array,
    kv_pages: jax.Array,
    block_table: jax.Array,
    *,
    block_q: int | None,
    block_k: int | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    world: int = 1,
) -> Shape:
    """What to compile for.

    Raises:
        NotImplementedError: shapes or dtypes that kernels do not take.
    """
    (tokens, heads, dim), (_, kv_heads, page, both) = q.shape, kv_pages.shape
    if q.dtype not in (jnp.bfloat16, jnp.float32) or kv_pages.dtype != q.dtype:
        raise NotImplementedError(
            f"q is {q.dtype} and kv_pages {kv_pages.dtype}; both must be bfloat16, or float32"
        )
    if dim % 64 or both != 2 * dim:
        raise NotImplementedError(
            f"q {q.shape} has heads of {dim}, kv_pages {kv_pages.shape} rows of {both}; "
            "heads must be multiples of 64, and a row a key and a value"
        )
    if heads % kv_heads:
        raise NotImplementedError(f"{heads=} must be a multiple of {kv_heads=}")
    if page % 16:
        raise NotImplementedError(f"{page=} must be a multiple of 16")
    group = heads // kv_heads
    if block_q is None:
        block_q = 1 if tokens == len(block_table) else tile_queries(heads, kv_heads, dim)
    registers = 32 // q.dtype.itemsize  # rows of a register
    if block_k is None:
        block_k = min(MOST_KEYS, BUFFER_BYTES // (2 * kv_heads * both * q.dtype.itemsize))
    return Shape(
        kv_heads=kv_heads,
        group=group,
        dim=dim,
        page=page,
        pages=block_table.shape[1],
        block_q=block_q,
        rows=pl.cdiv(group * block_q, registers) * registers,
        block_pages=max(1, block_k // page),
        scale=scale,
        window=window,
        softcap=softcap,
        dtype=q.dtype,
        world=world,
    )


def tile_queries(heads: int, kv_heads: int, dim: int) -> int:
    """Queries of a tile where requests may have more than one."""
    lanes = dim if dim % LANES == 0 else 2 * dim
    rows = min(ROWS, MOST_NUMBERS // (kv_heads * lanes))
    return max(1, rows * kv_heads // heads)


def cost(shape: Shape, tiles: int, requests: int) -> pl.CostEstimate:
    """Of attention to full block tables."""
    keys = shape.pages * shape.page // shape.world
    rows = tiles * shape.kv_heads * shape.rows
    numbers = 2 * requests * shape.kv_heads * keys * shape.dim + 2 * rows * shape.lanes
    return pl.CostEstimate(
        flops=4 * rows * shape.dim * keys,
        bytes_accessed=shape.dtype.itemsize * numbers,
        transcendentals=rows * keys,
    )


class Tiles(NamedTuple):
    """Where N tiles are: int32 arrays, or refs to them.

    Attributes:
        count: [1]; tiles in use.
        request: [N].
        first: [N]; position in the request of the tile's first query.
        queries: [N]; of the tile.
    """

    count: jax.Array
    request: jax.Array
    first: jax.Array
    queries: jax.Array


def plan_tiles(
    query_start: jax.Array, context_len: jax.Array, tokens: int, block_q: int, cores: int
) -> Tiles:
    """The tiles of a batch: as many as any of so many tokens and requests needs.

    Args:
        query_start: int32 [B + 1].
        context_len: int32 [B].
        cores: the number of tiles is a multiple of it.
    """
    requests = len(context_len)
    most = max(1, min(tokens, tokens // block_q + requests))
    tile = jnp.arange(-(-most // cores) * cores, dtype=jnp.int32)
    queries = jnp.diff(query_start)
    ends = jnp.cumsum(_tiles(query_start, block_q))
    request = jnp.minimum(owner(ends, tile), requests - 1)
    before = (tile - jnp.append(0, ends)[request]) * block_q  # of the request's queries
    first = (context_len - queries)[request] + before
    in_tile = jnp.clip(queries[request] - before, 0, block_q)
    return Tiles(*(x.astype(jnp.int32) for x in (ends[-1:], request, first, in_tile)))


def gather_queries(
    shape: Shape, q: jax.Array, query_start: jax.Array, context_len: jax.Array, tiles: Tiles
) -> jax.Array:
    """Queries [T, H, D] in tiles [N, Hk, rows, lanes]; 0 or any query behind a tile's."""
    queries = jnp.diff(query_start)
    before = tiles.first - (context_len - queries)[tiles.request]
    token = (query_start[tiles.request] + before)[:, None] + jnp.arange(shape.block_q)
    picked = q.at[token].get(mode="clip")
    picked = picked.reshape(*token.shape, shape.kv_heads, shape.group, shape.dim)
    picked = picked.swapaxes(1, 2).reshape(len(token), shape.kv_heads, -1, shape.dim)
    padding = ((0, shape.rows - picked.shape[2]), (0, shape.lanes - shape.dim))
    return jnp.pad(picked, ((0, 0), (0, 0), *padding))


def scatter_results(
    shape: Shape,
    out: jax.Array,
    logs: jax.Array,
    query_start: jax.Array,
    tokens: int,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Results [N, Hk, rows, lanes], the last D of which count, as [T, H, D], and LSE
    [N, Hk, rows or more] as [T, H], with one more score of each head, if there are sinks [H].
    Tokens of no request have 0, and -inf."""
    token = jnp.arange(tokens, dtype=jnp.int32)
    whose = owner(query_start[1:], token)
    known = whose < len(query_start) - 1
    request = jnp.minimum(whose, len(query_start) - 2)
    before = token - query_start[request]
    tiles = jnp.cumsum(_tiles(query_start, shape.block_q)) - _tiles(query_start, shape.block_q)
    place = tiles[request] * shape.block_q + before  # tiles of a request follow each other
    rows = shape.block_q * shape.group
    sizes = (len(out), shape.kv_heads, shape.block_q, shape.group)
    heads = shape.kv_heads * shape.group
    out = out[:, :, :rows, -shape.dim :].reshape(*sizes, shape.dim).swapaxes(1, 2)
    out = out.reshape(-1, heads, shape.dim).at[place].get(mode="clip")
    logs = logs[:, :, :rows].reshape(sizes).swapaxes(1, 2)
    logs = logs.reshape(-1, heads).at[place].get(mode="clip")
    none = jnp.logical_not(known)[:, None]
    out, lse = jnp.where(none[..., None], 0, out), jnp.where(none, -jnp.inf, logs)
    if sinks is not None:
        total = jnp.logaddexp(lse, jnp.asarray(sinks, jnp.float32))
        out, lse = out * jnp.exp(lse - total)[..., None], total
    return out.astype(shape.dtype), lse


def column_to_row(column: jax.Array) -> jax.Array:
    """Numbers [rows, LANES], each in all lanes of its row, as [1, rows] in whole registers.

    For use in kernels: a transpose by selection, which any number of rows has.
    """
    parts = [
        jnp.sum(jnp.where(_diagonal(len(part)), part, 0), axis=0, keepdims=True)
        for part in (column[i : i + LANES] for i in range(0, len(column), LANES))
    ]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def row_to_column(row: jax.Array, rows: int) -> jax.Array:
    """The reverse, of one register: [1, LANES] as [rows, 1]; rows <= LANES."""
    spread = jnp.broadcast_to(row, (rows, LANES))
    return jnp.sum(jnp.where(_diagonal(rows), spread, 0), axis=1, keepdims=True)


def _diagonal(rows: int) -> jax.Array:
    shape = (rows, LANES)
    return lax.broadcasted_iota(jnp.int32, shape, 0) == lax.broadcasted_iota(jnp.int32, shape, 1)


def _tiles(query_start: jax.Array, block_q: int) -> jax.Array:
    """Of each request."""
    return -(-jnp.diff(query_start) // block_q)


def owner(ends: jax.Array, places: jax.Array) -> jax.Array:
    """Whose each place is, of those that end at `ends`; len(ends) if nobody's."""
    return jnp.searchsorted(ends, places, side="right", method="compare_all")
