"""Paged caches with random requests, whose every number that may not be seen is NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from weft.kernels import reference
from weft.kernels.gpu.attention.inputs import PagedBatch

FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.float32: 3e-5, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Absolute and relative, of means of standard normal numbers."""

GARBAGE = 1 << 30
"""In entries of block tables that no query may look at."""


@dataclass
class Shape:
    """Of heads and pages."""

    kv_heads: int = 2
    group: int = 2
    dim: int = 16
    page: int = 4
    dtype: torch.dtype = torch.float32
    cache: torch.dtype | None = None  # fp8, if not dtype
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    world: int = 1

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


shapes = st.builds(
    Shape,
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 7]),
    dim=st.sampled_from([8, 16, 20, 40]),
    page=st.sampled_from([1, 3, 4, 16, 32]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    cache=st.sampled_from([None, None, FP8]),
    window=st.sampled_from([None, None, 1, 5, 20]),
    softcap=st.sampled_from([None, None, 1.5]),
    sinks=st.booleans(),
)


@dataclass
class Case:
    """One step: requests of (context, queries), each with pages of its own on each rank.

    Attributes:
        keys, values, tables: of each rank.
    """

    shape: Shape
    requests: Sequence[tuple[int, int]]
    seed: int = 0
    q: Tensor = field(init=False)
    keys: list[Tensor] = field(init=False)
    values: list[Tensor] = field(init=False)
    tables: list[Any] = field(init=False)
    options: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        shape, page, world = self.shape, self.shape.page, self.shape.world
        numbers = torch.Generator().manual_seed(self.seed)
        draw = np.random.default_rng(self.seed)
        contexts, queries = zip(*self.requests, strict=True)
        self.query_start = np.cumsum([0, *queries], dtype=np.int32)
        self.context_len = np.array(contexts, np.int32)

        def random(*size: int) -> Tensor:
            return torch.randn(size, generator=numbers)

        self.q = random(int(self.query_start[-1]), shape.heads, shape.dim).to(shape.dtype)
        width = max(-(-context // (page * world)) for context in contexts) + 1
        blocks = len(contexts) * width + 1
        kind = shape.cache or shape.dtype
        size = (blocks, shape.kv_heads, page, shape.dim)
        self.keys, self.values, self.tables = [], [], []
        for rank in range(world):
            ids = draw.permutation(blocks)[: len(contexts) * width]
            table = ids.reshape(len(contexts), width).astype(np.int32)
            keys, values = torch.full(size, torch.nan), torch.full(size, torch.nan)
            for b, (context, count) in enumerate(self.requests):
                first = 0 if shape.window is None else max(0, context - count - shape.window + 1)
                for j in range(first, context):
                    if j // page % world == rank:
                        place = (int(table[b, j // page // world]), slice(None), j % page)
                        keys[place] = random(shape.kv_heads, shape.dim)
                        values[place] = random(shape.kv_heads, shape.dim)
                for entry in range(width):
                    begin = (entry * world + rank) * page
                    if not count or begin >= context or begin + page <= first:
                        table[b, entry] = draw.choice([-1, -GARBAGE, blocks, GARBAGE])
            self.keys.append(keys.to(kind))
            self.values.append(values.to(kind))
            self.tables.append(table)
        self.options = {
            "scale": 0.4,
            "sliding_window": shape.window,
            "softcap": shape.softcap,
            "sinks": random(shape.heads) if shape.sinks else None,
        }
        if kind == FP8:
            self.options["k_scale"] = torch.rand(shape.kv_heads, generator=numbers) + 0.5
            self.options["v_scale"] = torch.rand(shape.kv_heads, generator=numbers) + 0.5

    def batch(self, rank: int = 0) -> PagedBatch:
        """As a rank gets it, anew."""
        return PagedBatch.build(
            self.query_start,
            self.context_len,
            self.tables[rank],
            block_size=self.shape.page,
            world_size=self.shape.world,
        )

    def lse(self) -> Tensor:
        """To be written."""
        return torch.full(self.q.shape[:2], torch.nan)

    @cached_property
    def oracle(self) -> tuple[Tensor, Tensor]:
        """The result and its LSE, for one rank or several."""
        lse = self.lse()
        lengths = self.context_len.tolist()
        if self.shape.world == 1:
            out = reference.paged_attention(
                *(self.q, self.keys[0], self.values[0], self.query_start.tolist(), lengths),
                self.tables[0].tolist(),
                **{**self.options, "lse": lse},
            )
        else:
            tables = [table.tolist() for table in self.tables]
            out = reference.distributed_decode_attention(
                *([self.q] * self.shape.world, self.keys, self.values, lengths, tables),
                self.query_start.tolist(),
                **{**self.options, "lse": lse},
            )[0]
        return out, lse

    def close(self, out: Tensor, lse: Tensor | None = None, tolerance: float = 0.0) -> None:
        """Whether it is what the oracle says."""
        expected, expected_lse = self.oracle
        tolerance = tolerance or TOLERANCE[self.shape.dtype]
        assert out.dtype == self.shape.dtype
        torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)
        if lse is not None:
            torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=1e-4)
