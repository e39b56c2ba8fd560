"""Paged attention against its oracle, over ragged batches, chunks and poisoned pages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import compiled_kernels
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from weft.kernels import reference
from weft.kernels.cpu import attention as module
from weft.kernels.cpu.attention import AttentionPlan, Int32, merge_parts, paged_attention, write_kv

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@dataclass
class Shape:
    kv_heads: int
    group: int
    dim: int
    block_size: int
    window: int | None
    dtype: torch.dtype


class Cache:
    """One layer's pages, all NaN at first, and requests with randomly drawn pages."""

    def __init__(self, shape: Shape, num_blocks: int, seed: int = 0) -> None:
        self.shape = shape
        size = (num_blocks, shape.kv_heads, shape.block_size, shape.dim)
        self.keys = torch.full(size, torch.nan, dtype=shape.dtype)
        self.values = self.keys.clone()
        # Page 0 is never assigned, because tables are padded with 0.
        self.free = (np.random.default_rng(seed).permutation(num_blocks - 1) + 1).tolist()

    def take(self, tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-tokens // self.shape.block_size))]

    def step(
        self, requests: list[tuple[list[int], int, int]], poison: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run one step with (pages, computed tokens, new tokens); return our result and the
        oracle's.

        The keys and values of request `poison` are NaN.
        """
        shape = self.shape
        query_start = np.cumsum([0] + [new for _, _, new in requests], dtype=np.int32)
        context_len = np.array([old + new for _, old, new in requests], np.int32)
        table = np.zeros((len(requests), max(len(r[0]) for r in requests) + 1), np.int32)
        for row, (pages, _, _) in zip(table, requests, strict=True):
            row[: len(pages)] = pages
        heads = (shape.kv_heads * shape.group, shape.kv_heads, shape.kv_heads)
        q, k, v = (torch.randn(query_start[-1], h, shape.dim).to(shape.dtype) for h in heads)
        if poison is not None:
            rows = slice(query_start[poison], query_start[poison + 1])
            k[rows], v[rows] = torch.nan, torch.nan
        plan = AttentionPlan.build(query_start, context_len, table, block_size=shape.block_size)
        write_kv(k, v, self.keys, self.values, plan)
        settings = {"scale": 0.4, "sliding_window": shape.window}
        ours = paged_attention(q, self.keys, self.values, plan, **settings)  # type: ignore[arg-type]
        oracle = reference.paged_attention(
            q,
            self.keys,
            self.values,
            query_start.tolist(),
            context_len.tolist(),
            table.tolist(),
            **settings,  # type: ignore[arg-type]
        )
        assert ours.dtype == shape.dtype
        return ours.float(), oracle

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query_start: Int32,
        context_len: Int32,
        table: Int32,
        rank: int = 0,
        ranks: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """Run one rank's step; return result and LSE."""
        plan = AttentionPlan.build(
            *(query_start, context_len, table),
            block_size=self.shape.block_size,
            rank=rank,
            world_size=ranks,
        )
        write_kv(k, v, self.keys, self.values, plan)
        lse = torch.full(q.shape[:2], torch.nan)
        attend = partial(paged_attention, scale=0.4, sliding_window=self.shape.window)
        out = attend(q, self.keys, self.values, plan, lse=lse)
        if ranks == 1:  # as without an LSE
            plain = attend(q, self.keys, self.values, plan)
            tolerance = TOLERANCE[self.shape.dtype]
            torch.testing.assert_close(out, plain, atol=tolerance, rtol=tolerance)
        return out.float(), lse


def table_of(pages: list[list[int]]) -> Int32:
    """Return a table with one request's pages per row."""
    table = np.zeros((len(pages), max(map(len, pages))), np.int32)
    for row, own in zip(table, pages, strict=True):
        row[: len(own)] = own
    return table


shapes = st.builds(
    Shape,
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    dim=st.sampled_from([8, 16, 30, 64, 80]),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, None, 1, 5, 16]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)

limits = st.sampled_from(
    [
        {},
        {"MAX_TILE_QUERIES": 3, "TILE_COST_IN_SCORES": 0},
        {"MAX_TILE_ELEMENTS": 500},
        {"BY_HEAD_ROWS": 2, "BY_HEAD_SCORES": 0, "MAX_BLOCK_QUERIES": 3},
        {"BY_HEAD_ROWS": 1, "BY_HEAD_SCORES": 0, "MAX_BLOCK_SCORES": 100},
    ]
)


@settings(max_examples=100, deadline=None)
@given(
    shape=shapes,
    chunks=st.lists(
        st.lists(st.sampled_from([1, 1, 2, 7, 20]), min_size=1, max_size=4), min_size=1, max_size=5
    ),
    limits=limits,
    compiled=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_the_reference(
    shape: Shape, chunks: list[list[int]], limits: dict[str, int], compiled: bool, seed: int
) -> None:
    """Requests are computed chunk by chunk, together; requests with fewer chunks drop out."""
    torch.manual_seed(seed)
    cache = Cache(shape, num_blocks=450, seed=seed)
    pages = [cache.take(sum(sizes)) for sizes in chunks]
    with compiled_kernels(compiled), pytest.MonkeyPatch.context() as patch:
        for name, limit in limits.items():
            patch.setattr(module, name, limit)
        for nth in range(max(map(len, chunks))):
            batch = [
                (pages[i], sum(sizes[:nth]), sizes[nth])
                for i, sizes in enumerate(chunks)
                if nth < len(sizes)
            ]
            ours, oracle = cache.step(batch)
            tolerance = TOLERANCE[shape.dtype]
            torch.testing.assert_close(ours, oracle, atol=tolerance, rtol=tolerance)


@settings(max_examples=25, deadline=None)
@given(
    ranks=st.integers(2, 4),
    shape=shapes,
    chunks=st.lists(
        st.lists(st.sampled_from([1, 1, 2, 7, 20]), min_size=1, max_size=4), min_size=1, max_size=5
    ),
    limits=limits,
    seed=st.integers(0, 2**31),
)
def test_ranks_that_share_pages_equal_one_that_has_them_all(
    ranks: int, shape: Shape, chunks: list[list[int]], limits: dict[str, int], seed: int
) -> None:
    """Each rank writes and reads only its own positions; parts are merged by their LSE."""
    torch.manual_seed(seed)
    whole = Cache(shape, num_blocks=450, seed=seed)
    parts = [Cache(shape, num_blocks=250, seed=seed) for _ in range(ranks)]
    pages = [whole.take(sum(sizes)) for sizes in chunks]
    own_pages = [parts[0].take(-(-sum(sizes) // ranks) + shape.block_size) for sizes in chunks]
    with compiled_kernels(False), pytest.MonkeyPatch.context() as patch:
        for name, limit in limits.items():
            patch.setattr(module, name, limit)
        for nth in range(max(map(len, chunks))):
            some = [i for i, sizes in enumerate(chunks) if nth < len(sizes)]
            queries = [chunks[i][nth] for i in some]
            query_start = np.cumsum([0, *queries], dtype=np.int32)
            context_len = np.array([sum(chunks[i][: nth + 1]) for i in some], np.int32)
            heads = (shape.kv_heads * shape.group, shape.kv_heads, shape.kv_heads)
            q, k, v = (torch.randn(query_start[-1], h, shape.dim).to(shape.dtype) for h in heads)

            step = (q, k, v, query_start, context_len)
            expected, expected_lse = whole.attend(*step, table_of([pages[i] for i in some]))
            table = table_of([own_pages[i] for i in some])
            got = [cache.attend(*step, table, rank, ranks) for rank, cache in enumerate(parts)]
            for out, lse in got:
                assert not out[lse == -torch.inf].any()
            outs, lses = (torch.stack(each) for each in zip(*got, strict=True))
            tolerance = TOLERANCE[shape.dtype]
            merged = merge_parts(outs, lses)
            torch.testing.assert_close(merged, expected, atol=tolerance, rtol=tolerance)
            torch.testing.assert_close(lses.logsumexp(0), expected_lse, atol=1e-4, rtol=1e-4)
    slots = sum(int(cache.keys[..., 0].isfinite().any(1).sum()) for cache in parts)
    pages_of_all = sum(-(-sum(sizes) // shape.block_size) for sizes in chunks)
    assert slots == pages_of_all * shape.block_size  # pages are cleared, each on one rank


def test_requests_share_the_pages_of_a_common_prefix() -> None:
    shape = Shape(2, 2, 8, 4, None, torch.float32)
    cache = Cache(shape, 30)
    first = cache.take(10)
    torch.testing.assert_close(*cache.step([(first, 0, 10)]))
    second = first[:2] + cache.take(6)
    third = first[:1] + cache.take(3)
    batch = [(second, 8, 6), (first, 10, 1), (third, 4, 3)]
    torch.testing.assert_close(*cache.step(batch), atol=2e-5, rtol=2e-5)


BOTH_WAYS = pytest.mark.parametrize(
    ("dtype", "compiled"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
)


@BOTH_WAYS
def test_what_a_page_held_before_is_not_seen(dtype: torch.dtype, compiled: bool) -> None:
    cache = Cache(Shape(2, 2, 8, 4, None, dtype), 30)
    pages, others = cache.take(7), cache.take(30)
    tolerance = TOLERANCE[dtype]
    with compiled_kernels(compiled):
        ours, _ = cache.step([(pages, 0, 7), (others, 0, 5)], poison=0)
        assert ours[:7].isnan().all()
        assert ours[7:].isfinite().all()
        # The failed request's pages go to another request, which decodes with a longer neighbour.
        for batch in ([(pages, 0, 2), (others, 5, 24)], [(pages, 2, 1), (others, 29, 1)]):
            torch.testing.assert_close(*cache.step(batch), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_request_that_is_not_finite_stays_alone(compiled: bool) -> None:
    shape = Shape(2, 2, 8, 4, None, torch.bfloat16)
    cache = Cache(shape, 60)
    pages = [cache.take(n) for n in (9, 20, 20)]
    with compiled_kernels(compiled):
        cache.step([(own, 0, 8) for own in pages])
        ours, oracle = cache.step([(own, 8, 1) for own in pages], poison=1)
    assert ours[1].isnan().all()
    torch.testing.assert_close(ours[[0, 2]], oracle[[0, 2]], atol=2e-2, rtol=2e-2)


@settings(max_examples=8, deadline=None)
@given(
    contexts=st.lists(st.integers(1, 2600), min_size=1, max_size=4),
    group=st.sampled_from([1, 7]),
    window=st.sampled_from([None, 900, 1500]),
    seed=st.integers(0, 2**31),
)
def test_compiled_attention_does_not_depend_on_company_or_chunks(
    contexts: list[int], group: int, window: int | None, seed: int
) -> None:
    """Decoding in a batch and prefilling at once give the same bits, over several spans."""
    torch.manual_seed(seed)
    kv_heads, dim, block_size = 2, 64, 32
    heads = kv_heads * group
    width = -(-max(contexts) // block_size)
    table = np.random.default_rng(seed).permutation(len(contexts) * width).astype(np.int32)
    table = table.reshape(len(contexts), width)
    size = (table.size, kv_heads, block_size, dim)
    keys, values = torch.randn(size).bfloat16(), torch.randn(size).bfloat16()

    def attend(q: Tensor, requests: list[int], queries: list[int]) -> Tensor:
        plan = AttentionPlan.build(
            np.cumsum([0, *queries], dtype=np.int32),
            np.array([contexts[r] for r in requests], np.int32),
            table[requests],
            block_size=block_size,
        )
        return paged_attention(q, keys, values, plan, scale=dim**-0.5, sliding_window=window)

    everyone = list(range(len(contexts)))
    q = torch.randn(len(contexts), heads, dim).bfloat16()
    with compiled_kernels(True):
        decoded = attend(q, everyone, [1] * len(contexts))
        for r, context in enumerate(contexts):
            assert torch.equal(attend(q[r : r + 1], [r], [1]), decoded[r : r + 1])
            many = torch.randn(min(context, 40), heads, dim).bfloat16()
            many[-1] = q[r]
            assert torch.equal(attend(many, [r], [len(many)])[-1], decoded[r])


@BOTH_WAYS
@pytest.mark.parametrize("window", [None, 100, 1100])
def test_long_prefill_in_two_chunks(window: int | None, dtype: torch.dtype, compiled: bool) -> None:
    """Long enough for several tiles, against dense attention."""
    heads, kv_heads, dim, tokens, cut, block_size = 4, 2, 16, 1400, 300, 32
    shapes = (heads, kv_heads, kv_heads)
    q, k, v = (torch.randn(tokens, h, dim).to(dtype) for h in shapes)
    keys = torch.full((60, kv_heads, block_size, dim), torch.nan, dtype=dtype)
    values = keys.clone()
    table = np.arange(59, 59 - 44, -1, dtype=np.int32)[None]
    parts = []
    for start, end in ((0, cut), (cut, tokens)):
        plan = AttentionPlan.build(
            np.array([0, end - start], np.int32),
            np.array([end], np.int32),
            table,
            block_size=block_size,
        )
        write_kv(k[start:end], v[start:end], keys, values, plan)
        with compiled_kernels(compiled):
            parts.append(
                paged_attention(
                    q[start:end], keys, values, plan, scale=dim**-0.5, sliding_window=window
                )
            )
    i, j = torch.arange(tokens)[:, None], torch.arange(tokens)
    seen = (j <= i) & (j > i - (window or tokens))
    expected = scaled_dot_product_attention(
        *(x.float().transpose(0, 1) for x in (q, k, v)), attn_mask=seen, enable_gqa=True
    )
    got, tolerance = torch.cat(parts).float(), TOLERANCE[dtype]
    torch.testing.assert_close(got, expected.transpose(0, 1), atol=tolerance, rtol=tolerance)


def plan_of(contexts: list[int], chunks: list[int], block_size: int = 16) -> AttentionPlan:
    table = np.arange(len(contexts) * 2048, dtype=np.int32).reshape(len(contexts), 2048)
    return AttentionPlan.build(
        np.cumsum([0, *chunks], dtype=np.int32),
        np.array(contexts, np.int32),
        table,
        block_size=block_size,
    )


def test_similar_decodes_are_one_tile() -> None:
    (tile,) = plan_of([250, 256, 200, 130] * 4, [1] * 16).tiles(14, 2, 64, None)
    assert sorted(tile.rows.tolist()) == list(range(16))
    assert tile.length == 256


def test_a_long_request_does_not_pad_the_others() -> None:
    tiles = plan_of([100, 16000, 120, 90], [1] * 4).tiles(14, 2, 64, None)
    assert [(len(tile.rows), tile.length) for tile in tiles] == [(1, 16000), (3, 128)]


def test_tiles_of_a_long_prefill_end_at_the_diagonal() -> None:
    tiles = plan_of([16384], [2048]).tiles(14, 2, 64, None)
    rows = torch.cat([tile.rows for tile in tiles])
    assert sorted(rows.tolist()) == list(range(2048))
    for tile in tiles:
        end = 16384 - 2048 + int(tile.rows.max()) + 1
        assert tile.length == end
        # A column for each query but the first.
        assert tile.mask.numel() == tile.queries * (tile.queries - 1)


def test_a_window_reads_its_own_pages_only() -> None:
    (tile,) = plan_of([16000], [1]).tiles(14, 2, 64, 128)
    assert tile.length <= 128 + 16


def test_layers_share_the_tiles() -> None:
    plan = plan_of([100], [1])
    assert plan.tiles(14, 2, 64, None) is plan.tiles(14, 2, 64, None)
    assert plan.tiles(14, 2, 64, 5) is not plan.tiles(14, 2, 64, None)
