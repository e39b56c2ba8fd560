"""Queries from a ragged batch, cut into tiles that each belong to one request.

A tile has up to `block_q` queries. For each KV head it has one row per query head: row i is head i
% G of query i // G. The lengths on the device determine the tiles; the arrays' sizes determine
their number. Used tiles come first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

LANES = 128

MAX_ROWS = 128
"""Maximum rows in a tile per KV head, if requests may have several queries."""

MAX_TILE_ELEMENTS = 1 << 18
"""Maximum elements in a tile's rows over all KV heads; a kernel has about eight such arrays in
VMEM.
"""

BUFFER_BYTES = 4 << 20
"""The page double buffer's size."""

MAX_BLOCK_K = 512
"""Maximum keys per block."""


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Static parameters for which a kernel is compiled.

    Attributes:
        kv_heads: KV heads on this chip.
        group: query heads per KV head.
        head_dim: head size.
        page_size: tokens in a page.
        pages_per_request: entries in a request's block table.
        block_q: queries in a tile.
        rows: a tile's rows per KV head; group * block_q, rounded up to whole registers.
        pages_per_block: pages in a block.
        scale, window, softcap: as in `ragged_paged_attention`.
        dtype: q's dtype.
        world_size: chips that share each request; chip p mod world_size has page p.
    """

    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    pages_per_request: int
    block_q: int
    rows: int
    pages_per_block: int
    scale: float
    window: int | None
    softcap: float | None
    dtype: jnp.dtype
    world_size: int

    @property
    def block_k(self) -> int:
        """Keys in a block."""
        return self.pages_per_block * self.page_size

    @property
    def lanes(self) -> int:
        """Columns per query and per result in the kernel.

        If a key does not fill whole registers, zeros follow the query, and it is multiplied with
        key and value together. The result then comes after as many columns to ignore.
        """
        return self.head_dim if self.head_dim % LANES == 0 else 2 * self.head_dim


def make_config(
    q: jax.Array,
    kv_pages: jax.Array,
    block_table: jax.Array,
    *,
    block_q: int | None,
    block_k: int | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    world_size: int = 1,
) -> KernelConfig:
    """Choose the static parameters.

    Raises:
        NotImplementedError: kernels do not support these shapes or dtypes.
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
    registers = 32 // q.dtype.itemsize  # rows per register
    if block_k is None:
        block_k = min(MAX_BLOCK_K, BUFFER_BYTES // (2 * kv_heads * both * q.dtype.itemsize))
    return KernelConfig(
        kv_heads=kv_heads,
        group=group,
        head_dim=dim,
        page_size=page,
        pages_per_request=block_table.shape[1],
        block_q=block_q,
        rows=pl.cdiv(group * block_q, registers) * registers,
        pages_per_block=max(1, block_k // page),
        scale=scale,
        window=window,
        softcap=softcap,
        dtype=q.dtype,
        world_size=world_size,
    )


def tile_queries(heads: int, kv_heads: int, dim: int) -> int:
    """Return the queries in a tile if requests may have several."""
    lanes = dim if dim % LANES == 0 else 2 * dim
    rows = min(MAX_ROWS, MAX_TILE_ELEMENTS // (kv_heads * lanes))
    return max(1, rows * kv_heads // heads)


def cost(config: KernelConfig, tiles: int, requests: int) -> pl.CostEstimate:
    """Estimate attention's cost over full block tables."""
    keys = config.pages_per_request * config.page_size // config.world_size
    rows = tiles * config.kv_heads * config.rows
    elements = 2 * requests * config.kv_heads * keys * config.head_dim + 2 * rows * config.lanes
    return pl.CostEstimate(
        flops=4 * rows * config.head_dim * keys,
        bytes_accessed=config.dtype.itemsize * elements,
        transcendentals=rows * keys,
    )


class Tiles(NamedTuple):
    """N tiles: int32 arrays, or refs to them.

        Attributes:
    count: [1]; used tiles.
            request: [N].
            first: [N]; request position where the tile's queries begin.
            queries: [N]; queries in the tile.
    """

    count: jax.Array
    request: jax.Array
    first: jax.Array
    queries: jax.Array


def plan_tiles(
    query_start: jax.Array, context_len: jax.Array, tokens: int, block_q: int, cores: int
) -> Tiles:
    """Plan a batch's tiles; their number suffices for any batch with these array sizes.

    Args:
        query_start: int32 [B + 1].
        context_len: int32 [B].
        tokens: T.
        block_q: maximum queries in a tile.
        cores: divides the number of tiles.
    """
    requests = len(context_len)
    max_tiles = max(1, min(tokens, tokens // block_q + requests))
    tile = jnp.arange(-(-max_tiles // cores) * cores, dtype=jnp.int32)
    queries = jnp.diff(query_start)
    ends = jnp.cumsum(_tiles_per_request(query_start, block_q))
    request = jnp.minimum(segment_of(ends, tile), requests - 1)
    before = (tile - jnp.append(0, ends)[request]) * block_q  # earlier queries in the request
    first = (context_len - queries)[request] + before
    in_tile = jnp.clip(queries[request] - before, 0, block_q)
    return Tiles(*(x.astype(jnp.int32) for x in (ends[-1:], request, first, in_tile)))


def gather_queries(
    config: KernelConfig, q: jax.Array, query_start: jax.Array, context_len: jax.Array, tiles: Tiles
) -> jax.Array:
    """Gather queries [T, H, D] into tiles [N, Hk, rows, lanes]; unused rows are arbitrary."""
    queries = jnp.diff(query_start)
    before = tiles.first - (context_len - queries)[tiles.request]
    token = (query_start[tiles.request] + before)[:, None] + jnp.arange(config.block_q)
    picked = q.at[token].get(mode="clip")
    picked = picked.reshape(*token.shape, config.kv_heads, config.group, config.head_dim)
    picked = picked.swapaxes(1, 2).reshape(len(token), config.kv_heads, -1, config.head_dim)
    padding = ((0, config.rows - picked.shape[2]), (0, config.lanes - config.head_dim))
    return jnp.pad(picked, ((0, 0), (0, 0), *padding))


def scatter_results(
    config: KernelConfig,
    out: jax.Array,
    tile_lse: jax.Array,
    query_start: jax.Array,
    tokens: int,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Scatter the tiles' results to tokens.

    Args:
        config: what the kernel was compiled for.
        out: [N, Hk, rows, lanes]; the last D columns count.
        tile_lse: [N, Hk, rows or more].
        query_start: int32 [B + 1].
        tokens: T.
        sinks: [H], an additional score per head, or None.

    Returns:
        [T, H, D] and LSE [T, H]; 0 and -inf for tokens without a request.
    """
    token = jnp.arange(tokens, dtype=jnp.int32)
    segment = segment_of(query_start[1:], token)
    is_real = segment < len(query_start) - 1
    request = jnp.minimum(segment, len(query_start) - 2)
    before = token - query_start[request]
    tiles = jnp.cumsum(_tiles_per_request(query_start, config.block_q)) - _tiles_per_request(
        query_start, config.block_q
    )
    index = tiles[request] * config.block_q + before  # a request's tiles are consecutive
    rows = config.block_q * config.group
    sizes = (len(out), config.kv_heads, config.block_q, config.group)
    heads = config.kv_heads * config.group
    out = out[:, :, :rows, -config.head_dim :].reshape(*sizes, config.head_dim).swapaxes(1, 2)
    out = out.reshape(-1, heads, config.head_dim).at[index].get(mode="clip")
    tile_lse = tile_lse[:, :, :rows].reshape(sizes).swapaxes(1, 2)
    tile_lse = tile_lse.reshape(-1, heads).at[index].get(mode="clip")
    is_padding = jnp.logical_not(is_real)[:, None]
    out, lse = jnp.where(is_padding[..., None], 0, out), jnp.where(is_padding, -jnp.inf, tile_lse)
    if sinks is not None:
        total = jnp.logaddexp(lse, jnp.asarray(sinks, jnp.float32))
        out, lse = out * jnp.exp(lse - total)[..., None], total
    return out.astype(config.dtype), lse


def column_to_row(column: jax.Array) -> jax.Array:
    """Transpose [rows, LANES], equal in all lanes of a row, to [1, rows] in whole registers.

    It is for kernels: a transpose by selection works for any number of rows.
    """
    parts = [
        jnp.sum(jnp.where(_diagonal(len(part)), part, 0), axis=0, keepdims=True)
        for part in (column[i : i + LANES] for i in range(0, len(column), LANES))
    ]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _diagonal(rows: int) -> jax.Array:
    shape = (rows, LANES)
    return lax.broadcasted_iota(jnp.int32, shape, 0) == lax.broadcasted_iota(jnp.int32, shape, 1)


def _tiles_per_request(query_start: jax.Array, block_q: int) -> jax.Array:
    """Count each request's tiles."""
    return -(-jnp.diff(query_start) // block_q)


def segment_of(ends: jax.Array, indices: jax.Array) -> jax.Array:
    """Find each index's segment, for segments that end at `ends`; len(ends) if beyond the last."""
    return jnp.searchsorted(ends, indices, side="right", method="compare_all")
