"""Tiles for attention: their sizes and compile options; see kernel.py."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import triton
from torch import Tensor

from weft.kernels.gpu.attention.inputs import PagedBatch
from weft.kernels.gpu.runtime.arguments import Require
from weft.kernels.gpu.runtime.target import target
from weft.kernels.gpu.tuning.costs import Config


class Served(IntEnum):
    """The requests that a launch serves, by their number of queries; the others it leaves."""

    ANY = 0
    ONE = 1
    MORE = 2


class Tile(NamedTuple):
    """Tile size and compile options for an attention kernel."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def choose_tile(group: int, queries: int, head_dim: int, itemsize: int, *, cast: bool) -> Tile:
    """Choose a tile for a batch by its longest request.

    Args:
        group: query heads that share a KV head.
        queries: number of queries in that request.
        head_dim: D.
        itemsize: bytes per number of q.
        cast: keys and values have a narrower dtype than q.
    """
    backend, capability = target()
    wide = triton.next_power_of_2(head_dim) * max(1, itemsize // 2)
    old = backend == "cuda" and capability < 90
    most = max(64 if wide > 128 or (old and wide <= 64) else 128, triton.next_power_of_2(group))
    block_m = min(most, max(16, triton.next_power_of_2(group * queries)))
    block_n = 64 if wide <= 128 else 32
    block_m = 64 if block_m == 32 else block_m  # 32 rows spill registers; see also below
    if cast and backend == "hip" and wide > 128:
        block_n = 16
    if old and block_m == 64 and wide == 128:
        block_n = 32
    warps = 8 if block_m >= 128 or block_m * wide >= 128 * 128 else 4
    stages = 2 if old else 3
    return Tile(block_m, block_n, warps, 1 if backend == "hip" else stages)


def heads_of_tile(group: int, tile: Tile) -> int:
    """Return a tile's number of heads: the largest divisor of `group` that fits."""
    return next(n for n in range(min(group, tile.block_m), 0, -1) if group % n == 0)


def count_tiles(
    q: Tensor, batch: PagedBatch, tile: Tile, group: int, served: Served = Served.ANY
) -> int:
    """Return an upper bound on a launch's tiles, with `group` heads per tile; see kernel.py."""
    requests, one = len(batch.context_len), served == Served.ONE or is_decode(q, batch)
    return requests if one else len(q) // (tile.block_m // group) + requests


def is_decode(q: Tensor, batch: PagedBatch) -> bool:
    """Return whether each request has exactly one query."""
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
    """Return the caller's tile, else the tuned one, else one chosen for the batch."""
    group, dim = q.shape[1] // keys.shape[1], q.shape[2]
    cast = keys.element_size() < q.element_size()
    chosen = choose_tile(group, batch.max_queries, dim, q.element_size(), cast=cast)
    if config:  # no more rows than the batch can fill
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
    """Return `chosen` with the caller's overrides; refuse a tile without room for `group` heads."""
    sides = chosen[:2] if blocks is None else blocks
    fine = len(sides) == 2 and all(side >= 16 and side & (side - 1) == 0 for side in sides)
    must = f"be two powers of two, at least 16, and the first at least H / Hk = {group}"
    check("blocks", blocks, fine and sides[0] >= group, must)
    check("warps", warps, warps in (0, 1, 2, 4, 8, 16), "be 1, 2, 4, 8 or 16, or 0 for the default")
    check("stages", stages, 0 <= stages <= 8, "be from 1 to 8, or 0 for the default")
    return Tile(*sides, warps or chosen.warps, stages or chosen.stages)
