"""Shapes that steps are padded to: every step fits one, and all are compiled before the first.

| | every request has one token | other steps |
| --- | --- | --- |
| tokens | 8, times powers of 4, up to the slots | 32, times powers of 2, up to the token budget |
| block tables | as wide as the longest request's, or a power of 8 less, down to 64 groups |

A step's rows (requests, sampled tokens) are as many as its tokens, or all slots.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.models.interface import Int32, StepInput
from weft.models.jax.attention import group_pages
from weft.models.jax.model import Batch

MIN_DECODES, DECODES_FACTOR = 8, 4
MIN_TOKENS, TOKENS_FACTOR = 32, 2
MIN_GROUPS, GROUPS_FACTOR = 64, 8


class Bucket(NamedTuple):
    """The shape of a step: see model.Batch.

    Attributes:
        tokens: T.
        rows: B and S.
        pages: n.
        decodes: whether each request has one token, or none.
    """

    tokens: int
    rows: int
    pages: int
    decodes: bool

    @property
    def name(self) -> str:
        """What it is for, in words."""
        what = "decodes" if self.decodes else "tokens"
        return f"{self.tokens} {what}, {self.pages} pages each"


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
            self._bucket(tokens, decodes, pages)
            for pages in self._pages
            for decodes, sizes in ((False, self._tokens), (True, self._decodes))
            for tokens in sizes
        ]
        return sorted(shapes, reverse=True)

    def of(self, batch: StepInput) -> Bucket:
        """The smallest shape that a step fits."""
        tokens, requests = len(batch.token_ids), len(batch.context_len)
        decodes = tokens == requests
        sizes = self._decodes if decodes else self._tokens
        width = batch.block_table.shape[1]
        return self._bucket(_least(sizes, tokens), decodes, _least(self._pages, width))

    def _bucket(self, tokens: int, decodes: bool, pages: int) -> Bucket:
        return Bucket(tokens, tokens if decodes else min(tokens, self._slots), pages, decodes)

    def pad(self, batch: StepInput, bucket: Bucket) -> Batch:
        """A step's arrays in that shape."""
        requests = len(batch.context_len)
        tables = np.zeros((bucket.rows, bucket.pages), np.int32)
        tables[:requests, : batch.block_table.shape[1]] = batch.block_table
        return Batch(
            tokens=padded(batch.token_ids, bucket.tokens),
            query_start=padded(batch.query_start, bucket.rows + 1, len(batch.token_ids)),
            context_len=padded(batch.context_len, bucket.rows),
            tables=tables,
            rows=padded(batch.sample_index, bucket.rows),
        )


def padded(values: Int32, size: int, fill: int = 0) -> Int32:
    """Values, followed by others up to a size."""
    full = np.full(size, fill, np.int32)
    full[: len(values)] = values
    return full


def _powers(low: int, high: int, factor: int) -> list[int]:
    """`low` times powers of a factor, and the multiple of `low` that is enough for `high`."""
    sizes = [low]
    while sizes[-1] < high:
        sizes.append(min(sizes[-1] * factor, -(-high // low) * low))
    return sizes


def _least(sizes: list[int], need: int) -> int:
    return next(size for size in sizes if size >= need)
