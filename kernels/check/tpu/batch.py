"""Ragged batches over a paged cache, for attention checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from weft.kernels.check.tpu.case import Input


@dataclass(frozen=True, slots=True)
class Batch:
    """A ragged batch over a paged cache.

    Attributes:
        queries, contexts: one number per request; contexts include the queries.
        padding: tokens after the last request.
        heads, kv_heads, depth, page: head counts, head size, page size.
    """

    queries: Sequence[int]
    contexts: Sequence[int]
    padding: int = 0
    heads: int = 4
    kv_heads: int = 2
    depth: int = 128
    page: int = 16

    @property
    def tokens(self) -> int:
        """Queries and padding."""
        return sum(self.queries) + self.padding

    def table(self, devices: int) -> np.ndarray:
        """Assign pages on devices that share them: [devices, B, n].

        Entries beyond a request's context are out of the pool.
        """
        requests = len(self.queries)
        width = -(-max(self.contexts) // (self.page * devices))
        rng = np.random.default_rng(5)
        table = np.stack([rng.permutation(requests * width) for _ in range(devices)])
        table = table.reshape(devices, requests, width)
        pages = -(-np.array(self.contexts) // self.page)
        place = np.arange(width) * devices + np.arange(devices)[:, None, None]
        return np.where(place < pages[:, None], table, 1 << 20)

    def pool(self, rng: np.random.Generator, devices: int) -> np.ndarray:
        """Make pages [devices * B * n, Hk, page, 2 D]; NaN outside all contexts."""
        table = self.table(devices)
        _, requests, width = table.shape
        pool = np.full((devices, requests * width, self.kv_heads, self.page, 2 * self.depth),
                       np.nan, np.float32)  # fmt: skip
        for request, context in enumerate(self.contexts):
            for page in range(-(-context // self.page)):
                device, entry = page % devices, page // devices
                rows = min(self.page, context - page * self.page)
                numbers = rng.standard_normal((self.kv_heads, rows, 2 * self.depth))
                pool[device, table[device, request, entry], :, :rows] = numbers
        return pool.reshape(-1, *pool.shape[2:])

    def inputs(self, dtype: Any, axis: str | None, devices: int) -> list[Input]:
        """Return kv_pages, query_start, context_len, block_table; devices share the pages."""
        table = self.table(devices)
        _, requests, width = table.shape
        start = np.concatenate([[0], np.cumsum(self.queries)])
        pool = (devices * requests * width, self.kv_heads, self.page, 2 * self.depth)
        return [
            Input(pool, P(axis), dtype, lambda rng: self.pool(rng, devices)),
            Input(start.shape, P(), jnp.int32, lambda _: start),
            Input((requests,), P(), jnp.int32, lambda _: np.array(self.contexts)),
            Input((devices * requests, width), P(axis), jnp.int32,
                  lambda _: table.reshape(-1, width)),
        ]  # fmt: skip
