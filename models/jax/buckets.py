"""Padded step shapes. Every step fits one, and all are compiled before the first step.

| | every request has one token | other steps |
| --- | --- | --- |
| tokens | multiples of 8, up to the slots | multiples of 32, up to the token budget |
| block tables | as wide as the longest request's, and as wide as fits scalar memory |

`plan/sizes.py` chooses few of these multiples, by the predicted seconds of a padded step. A step
has as many rows (requests, sampled tokens) as tokens, or as slots if these are fewer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from weft.models.interface import Int32, StepInput
from weft.models.jax.kernels import TOKEN_UNIT, Choice
from weft.models.jax.mesh import device_of, slice_of
from weft.models.jax.model import Batch
from weft.models.plan.hardware import Slice
from weft.models.plan.sizes import (
    TABLE_BYTES,
    TABLE_ENTRY,
    group_pages,
    step_sizes,
    table_width,
)
from weft.models.plan.step import anonymous
from weft.models.spec.layout import Layout
from weft.models.spec.spec import ModelSpec


class Bucket(NamedTuple):
    """A step's shape: see model.Batch.

    Attributes:
        tokens: T.
        rows: B and S.
        pages: n.
        decodes: whether each request has at most one token.
    """

    tokens: int
    rows: int
    pages: int
    decodes: bool

    @property
    def name(self) -> str:
        """Description in words."""
        what = "decodes" if self.decodes else "tokens"
        return f"{self.tokens} {what}, {self.pages} pages each"


class Buckets:
    """The shapes of all steps in an engine.

    Args:
        spec: the whole model.
        layout: its parallel layout.
        mesh: real or described devices.
        dtype: compute dtype.
        max_num_seqs: maximum number of requests in a step.
        max_num_batched_tokens: maximum number of tokens in a step.
        max_model_len: maximum number of tokens in a request.
        block_size: tokens in a block.
        kernels: --kernels; theirs need more tokens on each device.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layout: Layout,
        mesh: Mesh,
        dtype: str,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        kernels: Choice = "auto",
    ) -> None:
        self._block_size = block_size
        self._slots = max_num_seqs
        group, widest = group_pages(block_size), table_width(max_model_len, block_size)
        fitting = TABLE_BYTES // (TABLE_ENTRY * max_num_seqs) // group * group
        self._pages = sorted({widest, max(group, min(widest, fitting))})
        device = device_of(mesh.devices.flat[0])
        place = Slice(device, (1, layout.tp)) if device.cpu else slice_of(mesh)
        self._decodes, self._tokens = step_sizes(
            *(anonymous(spec), layout, place, dtype),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            parts=layout.tp * (TOKEN_UNIT if kernels == "overlapped" else 2),
        )

    def all(self) -> list[Bucket]:
        """List every shape, the largest first, so a lack of memory shows up early."""
        shapes = [
            self._bucket(tokens, decodes, pages)
            for pages in self._pages
            for decodes, sizes in ((False, self._tokens), (True, self._decodes))
            for tokens in sizes
        ]
        return sorted(shapes, reverse=True)

    def choose(self, batch: StepInput) -> Bucket:
        """Choose the smallest sufficient shape for a step."""
        tokens, requests = len(batch.token_ids), len(batch.context_len)
        decodes = tokens == requests
        sizes = self._decodes if decodes else self._tokens
        width = batch.block_table.shape[1]
        return self._bucket(
            _smallest_fitting(sizes, tokens), decodes, _smallest_fitting(self._pages, width)
        )

    def _bucket(self, tokens: int, decodes: bool, pages: int) -> Bucket:
        return Bucket(tokens, tokens if decodes else min(tokens, self._slots), pages, decodes)

    def pad(self, batch: StepInput, bucket: Bucket) -> Batch:
        """Pad a step's arrays to that shape."""
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
    """Pad values to a size."""
    full = np.full(size, fill, np.int32)
    full[: len(values)] = values
    return full


def _smallest_fitting(sizes: list[int], need: int) -> int:
    return next(size for size in sizes if size >= need)
