"""Shapes that steps are padded to: every step fits one, and all are compiled before the first.

| | every request has one token | other steps |
| --- | --- | --- |
| tokens | 8, times powers of 4, up to the slots | 32, times powers of 2, up to the token budget |
| attention tiles | one token each | 16 tokens, or fewer at a request's end |
| block tables | as wide as the longest request's, or a power of 8 less, down to 64 groups |

A step's rows (requests, sampled tokens) are as many as its tokens, or all slots.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.models.interface import StepInput
from weft.models.jax.attention import TILE_TOKENS, group_pages
from weft.models.jax.collectives import shards_tokens
from weft.models.jax.model import Batch, Shape

MIN_DECODES, DECODES_FACTOR = 8, 4
MIN_TOKENS, TOKENS_FACTOR = 32, 2
MIN_GROUPS, GROUPS_FACTOR = 64, 8


class Bucket(NamedTuple):
    """The shape of a step: see model.Batch.

    Attributes:
        tokens: T.
        rows: B and S.
        tiles: N.
        tile_tokens: of a tile of attention.
        pages: n.
    """

    tokens: int
    rows: int
    tiles: int
    tile_tokens: int
    pages: int

    @property
    def name(self) -> str:
        """What it is for, in words."""
        what = "decodes" if self.tile_tokens == 1 else "tokens"
        return f"{self.tokens} {what}, {self.pages} pages each"

    def shape(self, devices: int) -> Shape:
        """What `forward` is told."""
        return Shape(self.tile_tokens, shards_tokens(self.tokens, devices))


class Buckets:
    """The shapes of all steps of an engine.

    Args:
        max_num_seqs: most requests of a step.
        max_num_batched_tokens: most tokens of a step.
        max_model_len: most tokens of a request.
        block_size: tokens of a block.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
    ) -> None:
        self._block_size = block_size
        self._slots = max_num_seqs
        group = group_pages(block_size)
        widest = -(-max_model_len // (block_size * group))
        self._pages = [group * n for n in _powers(min(MIN_GROUPS, widest), widest, GROUPS_FACTOR)]
        most = min(max_num_seqs, max_num_batched_tokens)
        self._decodes = _powers(MIN_DECODES, most, DECODES_FACTOR)
        self._tokens = _powers(MIN_TOKENS, max_num_batched_tokens, TOKENS_FACTOR)

    def all(self) -> list[Bucket]:
        """Every shape, the largest first: if that does not fit, nothing has to wait to tell."""
        shapes = [
            self._bucket(tokens, decode, pages)
            for pages in self._pages
            for decode, sizes in ((False, self._tokens), (True, self._decodes))
            for tokens in sizes
        ]
        return sorted(shapes, reverse=True)

    def of(self, batch: StepInput) -> Bucket:
        """The smallest shape that a step fits."""
        tokens, requests = len(batch.token_ids), len(batch.context_len)
        decode = tokens == requests
        sizes = self._decodes if decode else self._tokens
        width = batch.block_table.shape[1]
        return self._bucket(_least(sizes, tokens), decode, _least(self._pages, width))

    def _bucket(self, tokens: int, decode: bool, pages: int) -> Bucket:
        if decode:
            return Bucket(tokens, tokens, tokens, 1, pages)
        rows = min(tokens, self._slots)
        return Bucket(tokens, rows, tokens // TILE_TOKENS + rows, TILE_TOKENS, pages)

    def pad(self, batch: StepInput, bucket: Bucket, num_blocks: int) -> Batch:
        """A step's arrays in that shape, for a cache of so many blocks."""
        count, size = len(batch.token_ids), bucket.tile_tokens
        lengths = np.diff(batch.query_start)
        request = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        tokens = np.zeros((4, bucket.tokens), np.int32)
        tokens[0, :count] = batch.token_ids
        tokens[1, count:] = -1
        tokens[1, :count] = batch.positions
        page, place = np.divmod(batch.positions, self._block_size)
        tokens[2, count:] = num_blocks * self._block_size
        tokens[2, :count] = batch.block_table[request, page] * self._block_size + place
        in_request = np.arange(count, dtype=np.int32) - batch.query_start[request]
        each = -(-lengths // size)
        first = np.zeros(len(each) + 1, np.int32)
        np.cumsum(each, out=first[1:])
        tokens[3, :count] = first[request] * size + in_request

        tiles = np.zeros((3, bucket.tiles), np.int32)
        owner = np.repeat(np.arange(len(each), dtype=np.int32), each)
        start = batch.query_start[owner] + (np.arange(len(owner)) - first[owner]) * size
        tiles[0, : len(owner)] = owner
        tiles[1, : len(owner)] = start
        tiles[2, : len(owner)] = np.minimum(start + size, batch.query_start[owner + 1])

        tables = np.zeros((bucket.rows, bucket.pages), np.int32)
        tables[: len(lengths), : batch.block_table.shape[1]] = batch.block_table
        rows = np.zeros(bucket.rows, np.int32)
        rows[: len(batch.sample_index)] = batch.sample_index
        return Batch(tokens, tiles, tables, rows)


def _powers(low: int, high: int, factor: int) -> list[int]:
    """`low` times powers of a factor, and the multiple of `low` that is enough for `high`."""
    sizes = [low]
    while sizes[-1] < high:
        sizes.append(min(sizes[-1] * factor, -(-high // low) * low))
    return sizes


def _least(sizes: list[int], need: int) -> int:
    return next(size for size in sizes if size >= need)
