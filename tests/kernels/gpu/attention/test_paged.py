"""Paged attention against its oracle, over poisoned pages; what it flags, and what it refuses."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.faults import planted
from support.overlapped import SEEDS
from support.paged import FP8, GARBAGE, Case, Shape, shapes
from torch import Tensor

from weft.kernels.check.aot import TENSOR_CORES
from weft.kernels.gpu.attention import kernel
from weft.kernels.gpu.attention import paged as module
from weft.kernels.gpu.attention.decode import decode_attention
from weft.kernels.gpu.attention.inputs import (
    LONGER_THAN_TABLE,
    OUT_OF_POOL,
    SHORTER_THAN_QUERIES,
    PagedBatch,
)
from weft.kernels.gpu.attention.paged import paged_attention
from weft.kernels.gpu.runtime.arguments import KernelError
from weft.kernels.interpreter import gpu as interpreter
from weft.kernels.interpreter.gpu import Array, Atomic, Kind, Program


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    with interpreter.installed():
        yield


REQUESTS = st.lists(
    st.tuples(st.integers(0, 50), st.sampled_from([0, 1, 1, 1, 2, 5, 18])),
    min_size=1,
    max_size=4,
).map(lambda rs: [(old + new, new) for old, new in rs])
BLOCKS = st.sampled_from([None, (16, 16), (32, 16), (16, 32)])


def attend(case: Case, **options: Any) -> tuple[Tensor, Tensor]:
    """(result, LSE); nothing was flagged."""
    batch, lse = case.batch(), case.lse()
    out = paged_attention(
        *(case.q, case.keys[0], case.values[0], batch), **case.options, lse=lse, **options
    )
    assert batch.errors() == {}
    return out, lse


@settings(max_examples=20, deadline=None)
@given(shape=shapes, requests=REQUESTS, blocks=BLOCKS, seed=SEEDS)
def test_equals_the_reference(
    shape: Shape, requests: list[tuple[int, int]], blocks: tuple[int, int] | None, seed: int
) -> None:
    """What may not be seen is NaN, and no page that holds nothing else is looked at."""
    case = Case(shape, requests, seed)
    case.close(*attend(case, blocks=blocks))


@pytest.mark.sweep
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("cache", [None, FP8])
def test_head_sizes(dim: int, cache: torch.dtype | None) -> None:
    """With the tiles that it takes by itself."""
    shape = Shape(2, 4, dim, 16, torch.bfloat16, cache)
    case = Case(shape, [(70, 20), (90, 1), (5, 5)])
    case.options["scale"] = dim**-0.5
    case.close(*attend(case))


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 128), (8, 1), (1, 71)])
def test_queries_per_key(kv_heads: int, group: int) -> None:
    case = Case(Shape(kv_heads, group, 32, 16), [(9, 3), (40, 1)])
    case.close(*attend(case))


def test_queries_that_are_a_part_of_a_wider_product() -> None:
    case = Case(Shape(), [(20, 7), (9, 1)])
    tokens = len(case.q)
    wide = torch.cat([case.q.reshape(tokens, -1), torch.full((tokens, 24), torch.nan)], dim=1)
    expected, _ = attend(case)
    case.q = wide[:, : case.shape.heads * case.shape.dim].unflatten(1, (case.shape.heads, -1))
    assert not case.q.is_contiguous()
    assert torch.equal(attend(case)[0], expected)


def test_a_prefill_in_chunks_is_a_prefill_at_once() -> None:
    whole = Case(Shape(window=11), [(40, 40)])
    expected, _ = attend(whole)
    for start, end in ((0, 13), (13, 14), (14, 40)):
        chunk = copy(whole)
        chunk.q, chunk.query_start = whole.q[start:end], np.array([0, end - start], np.int32)
        chunk.context_len = np.array([end], np.int32)
        torch.testing.assert_close(attend(chunk)[0], expected[start:end], atol=1e-5, rtol=1e-5)


def test_programs_that_are_left_over_look_at_nothing() -> None:
    """The second request's 18 queries fill one tile; that of a third begins behind its last key."""
    case = Case(Shape(1, 1, 8, 1, window=1), [(18, 18), (33, 18)])
    case.close(*attend(case, blocks=(32, 16)))


def test_no_queries() -> None:
    case = Case(Shape(), [(0, 0), (3, 0)])
    assert attend(case)[0].shape == (0, 4, 16)


def test_a_batch_can_be_filled_anew() -> None:
    """As under a captured graph: the same tensors, T and B, with other lengths."""
    first, second = Case(Shape(), [(30, 6), (9, 1)]), Case(Shape(), [(4, 4), (31, 3)], seed=1)
    batch = replace(first.batch(), max_queries=6, max_context=31)
    for case, source in ((first, first.batch()), (second, second.batch())):
        for name in ("query_start", "context_len", "block_table"):
            getattr(batch, name).copy_(getattr(source, name))
        out = paged_attention(case.q, case.keys[0], case.values[0], batch, **case.options)
        case.close(out)


# What is wrong with a request.


class Bounds:
    """Observes kernels: every access must be within one of the tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._spans = sorted(
            (x.data_ptr(), x.data_ptr() + x.untyped_storage().nbytes()) for x in tensors
        )
        self.outside = 0

    def access(self, kind: Kind, addresses: Array, itemsize: int) -> None:
        starts = np.array([start for start, _ in self._spans], np.uint64)
        ends = np.array([end for _, end in self._spans], np.uint64)
        at = np.searchsorted(starts, addresses.astype(np.uint64), side="right") - 1
        inside = (at >= 0) & (addresses.astype(np.uint64) + np.uint64(itemsize) <= ends[at])
        self.outside += int((~inside).sum())

    def atomics(self, atomics: Sequence[Atomic]) -> None: ...

    def launched(self, tensors: Mapping[str, Tensor]) -> None: ...

    def finished(self) -> None: ...

    def program(self, index: Program) -> None: ...


def outside(attention: Any, case: Case, batch: PagedBatch, **options: Any) -> int:
    """Accesses out of bounds, which are not done: the table is replaced where it would hurt."""
    lse, sinks = case.lse(), case.options["sinks"]
    allowed = [case.q, case.keys[0], case.values[0], lse, batch.query_start, batch.context_len]
    allowed += [batch.block_table, batch.status, *([] if sinks is None else [sinks])]
    bounds = Bounds(allowed)
    made = torch.empty

    def remember(*args: Any, **kwargs: Any) -> Tensor:
        tensor = made(*args, **kwargs)
        allowed.append(tensor)
        bounds.__init__(allowed)  # type: ignore[misc]
        return tensor

    interpreter.observe(bounds)  # type: ignore[arg-type]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty", remember)
            out = attention(
                *(case.q, case.keys[0], case.values[0], batch), **case.options, lse=lse, **options
            )
    finally:
        interpreter.observe(None)
    case.got, case.got_lse = out, lse  # type: ignore[attr-defined]
    return bounds.outside


ENTRIES = st.sampled_from([-GARBAGE, -1, 0, 1, 2, 5, 10**6, 2 * GARBAGE - 1, -2 * GARBAGE])


@settings(max_examples=20, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(-5, 60), st.sampled_from([1, 1, 3])), min_size=1, max_size=4
    ),
    entries=st.lists(ENTRIES, min_size=40, max_size=40),
    window=st.sampled_from([None, 7]),
    splits=st.sampled_from([0, 1, 3]),
    seed=SEEDS,
)
def test_whatever_tables_and_lengths_say_nothing_is_accessed_out_of_bounds(
    requests: list[tuple[int, int]],
    entries: list[int],
    window: int | None,
    splits: int,
    seed: int,
) -> None:
    """And exactly those requests are flagged that cannot be served, with zeros for results."""
    shape = Shape(page=4, window=window)
    case = Case(shape, [(12 + count, count) for _, count in requests], seed)
    blocks, width = len(case.keys[0]), 10
    case.keys[0].normal_()
    case.values[0].normal_()
    table = torch.tensor(entries[: len(requests) * width] * 4, dtype=torch.int64)
    table = table[: len(requests) * width].view(len(requests), width).to(torch.int32)
    batch = PagedBatch(
        torch.from_numpy(case.query_start),
        torch.tensor([context for context, _ in requests], dtype=torch.int32),
        table,
        torch.zeros(len(requests), dtype=torch.int32),
        max_queries=max(count for _, count in requests),
        max_context=0,
        decodes=sum(count == 1 for _, count in requests),
    )
    op = decode_attention if splits else paged_attention
    options = {"splits": splits} if splits else {}
    assert outside(op, case, batch, blocks=(16, 16), **options) == 0
    for b, (context, count) in enumerate(requests):
        first = 0 if window is None else max(0, context - count - window + 1)
        seen = table[b, first // 4 : -(-context // 4)]
        flag = LONGER_THAN_TABLE if context > 4 * width else 0
        flag |= SHORTER_THAN_QUERIES if context < count else 0
        if not flag and not all(0 <= entry < blocks for entry in seen.tolist()):
            flag = OUT_OF_POOL
        assert batch.status[b] == flag
        assert (b in batch.errors()) == bool(flag)
        rows = slice(int(case.query_start[b]), int(case.query_start[b + 1]))
        lse = case.got_lse[rows]  # type: ignore[attr-defined]
        if flag:
            assert (lse == torch.inf).all()
            assert (case.got[rows] == 0).all()  # type: ignore[attr-defined]
        else:
            assert lse.isfinite().all()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("page = tl.where(out_of_pool, 0, page)", "page = page"),
        ("(page < 0) | (page >= num_blocks)", "(page < 0) | (page > num_blocks)"),
        ("(page < 0) | (page >= num_blocks)", "page >= num_blocks"),
        ("table_width * PAGE, _LONGER, 0)", "table_width * PAGE + 8, _LONGER, 0)"),
        ("tl.where((fault == 0) & (first < queries), end, begin)", "end"),
    ],
)
def test_accesses_out_of_bounds_are_found(old: str, new: str, tmp_path: Path) -> None:
    """The pool is in the middle of a larger one, so that they do no harm."""
    faulty = planted(module, tmp_path, (old, new), parts=[kernel])
    case = Case(Shape(page=4), [(12, 1), (12, 1)])
    case.keys[0], case.values[0] = (
        torch.randn(3 * x.numel()).split(x.numel())[1].view(x.shape)
        for x in (case.keys[0], case.values[0])
    )
    whole = torch.zeros(20, 3, dtype=torch.int32)
    status, blocks = torch.zeros(2, dtype=torch.int32), len(case.keys[0])
    found = 0
    for page, length in ((-1, 12), (blocks, 12), (0, 16)):
        whole[8:10] = page
        batch = PagedBatch(
            torch.from_numpy(case.query_start),
            torch.tensor([length, length], dtype=torch.int32),
            *(whole[8:10], status, 1, 0, 2),
        )
        found += _outside_of_views(faulty.paged_attention, case, batch)
        assert _outside_of_views(paged_attention, case, batch) == 0
    assert found


def _outside_of_views(attention: Any, case: Case, batch: PagedBatch) -> int:
    """As `outside`, where tensors are parts of larger ones that may be accessed without harm."""
    count = 0
    spans = [
        (x.data_ptr(), x.data_ptr() + x.nbytes, x.untyped_storage().data_ptr())
        for x in (case.keys[0], case.values[0], batch.block_table)
    ]

    class Around(Bounds):
        def access(self, kind: Kind, addresses: Array, itemsize: int) -> None:
            nonlocal count
            for begin, end, storage in spans:
                near = (addresses >= storage) & (addresses < end + (begin - storage))
                count += int((near & ((addresses < begin) | (addresses >= end))).sum())

    interpreter.observe(Around([]))  # type: ignore[arg-type]
    try:
        attention(case.q, case.keys[0], case.values[0], batch, **case.options, blocks=(16, 16))
    finally:
        interpreter.observe(None)
    return count


def test_one_bad_request_leaves_the_others_as_they_were() -> None:
    """To the last bit; and so does one whose numbers are not finite."""
    case = Case(Shape(), [(40, 3), (30, 5), (20, 1)])
    expected, _ = attend(case)
    first, second = 3, 8
    for fault in ("entry", "length", "nan"):
        batch, q = case.batch(), case.q.clone()
        match fault:
            case "entry":
                batch.block_table[1, 2] = -7
            case "length":
                batch.context_len[1] = 10**6
            case _:
                q[first:second] = torch.nan
        out = paged_attention(q, case.keys[0], case.values[0], batch, **case.options)
        assert torch.equal(out[:first], expected[:first])
        assert torch.equal(out[second:], expected[second:])
        assert set(batch.errors()) == (set() if fault == "nan" else {1})


def test_errors_name_the_request_and_what_is_wrong() -> None:
    case = Case(Shape(), [(40, 1), (30, 1), (20, 1), (9, 1)])
    batch = case.batch()
    batch.block_table[0, 3] = len(case.keys[0])
    batch.context_len[1] = 10**6
    batch.context_len[2] = 0
    paged_attention(case.q, case.keys[0], case.values[0], batch, **case.options)
    assert {request: str(error) for request, error in batch.errors().items()} == {
        0: "request 0: its block table has an entry outside the pool",
        1: "request 1: its context is longer than its block table",
        2: "request 2: its context is shorter than its queries",
    }


# What the host knows.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_len": [5, 41]}, "request 1's context_len is 41; it must be at least its 1 quer"),
        (
            {"context_len": [2, 9]},
            "request 0's context_len is 2; it must be at least its 3 queries",
        ),
        ({"query_start": [0, 3, 2]}, "request 1's queries is -1; it must be at least 0"),
        ({"query_start": [1, 3, 4]}, r"query_start\[0\] is 1; it must be 0"),
        ({"query_start": [0, 3]}, "query_start's length is 2; it must be 3"),
        ({"context_len": []}, "context_len's length is 0; it must be at least 1"),
        ({"block_table": [[0] * 10]}, r"block_table's shape is \[1, 10\]; it must be \[2, n\]"),
    ],
)
def test_lengths_that_do_not_go_together_are_refused(
    changes: dict[str, list[int]], message: str
) -> None:
    step = {"query_start": [0, 3, 4], "context_len": [5, 9], "block_table": [[0] * 10] * 2}
    arrays = {name: np.array(x, np.int32) for name, x in {**step, **changes}.items()}
    with pytest.raises(KernelError, match=f"paged_attention: {message}"):
        PagedBatch.build(**arrays, block_size=4)


def changed(case: Case, name: str, value: Any) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of a call with one of them changed."""
    tensors = {"q": case.q, "keys": case.keys[0], "values": case.values[0], "batch": case.batch()}
    options = dict(case.options)
    (tensors if name in tensors else options)[name] = value
    return list(tensors.values()), options


BAD: list[tuple[str, Any, str]] = [
    ("q", torch.zeros(4, 64), "q's shape is [4, 64]"),
    ("q", torch.zeros(4, 4, 16, dtype=torch.float64), "q's dtype is torch.float64"),
    ("q", torch.zeros(4, 16, 4).mT, "q's stride"),
    ("q", torch.zeros(4, 4, 257), "D is 257; it must be from 1 to 256"),
    ("q", torch.zeros(4, 3, 16), "keys's heads is 2; it must divide q's 3 heads"),
    ("q", torch.zeros(4, 258, 16), "H / Hk is 129; it must be at most 128"),
    ("keys", torch.zeros(9, 2, 4, 8), "keys's shape is [9, 2, 4, 8]; it must be [blocks, Hk, page"),
    ("keys", torch.zeros(0, 2, 4, 16), "keys's shape is [0, 2, 4, 16]; it must have no axis of"),
    ("keys", torch.zeros(9, 2, 4, 16).half(), "keys's dtype is torch.float16"),
    ("keys", torch.zeros(9, 4, 2, 16).transpose(1, 2), "keys's stride"),
    ("values", torch.zeros(1, 2, 4, 16), "values's shape is [1, 2, 4, 16]; it must be ["),
    ("values", torch.zeros(19, 2, 4, 16).to(FP8), "values's dtype is torch.float8_e4m3fn"),
    ("sinks", torch.zeros(2), "sinks's shape is [2]; it must be [4]"),
    ("lse", torch.zeros(4, 4).half(), "lse's dtype is torch.float16; it must be torch.float32"),
    ("k_scale", torch.ones(2), "k_scale is given with torch.float32; it must come with torch.flo"),
    ("sliding_window", 0, "sliding_window is 0; it must be at least 1, or None"),
    ("softcap", -1.0, "softcap is -1.0; it must be above 0, or None"),
    ("blocks", (8, 16), "blocks is (8, 16); it must be two powers of two, at least 16"),
    ("blocks", (16, 48), "blocks is (16, 48)"),
    ("warps", 3, "warps is 3"),
    ("stages", 9, "stages is 9"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD, ids=[case[2][:40] for case in BAD])
def test_bad_input_is_named_and_nothing_is_launched(name: str, value: Any, message: str) -> None:
    tensors, options = changed(Case(Shape(), [(9, 3), (30, 1)]), name, value)
    for op in (paged_attention, decode_attention):
        with pytest.raises(KernelError) as error:
            op(*tensors, **options)  # type: ignore[operator]
        assert str(error.value).startswith(f"{op.__name__}: ")
        assert message in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_queries": 5}, "max_queries is 5; it must be at most 4"),
        ({"status": torch.zeros(3, dtype=torch.int32)}, "status's shape is [3]; it must be [2]"),
        ({"context_len": torch.zeros(2)}, "context_len's dtype is torch.float32"),
        ({"block_table": torch.zeros(3, 9, dtype=torch.int32)}, "block_table's shape is [3, 9]"),
    ],
)
def test_a_batch_that_does_not_go_together_is_refused(change: dict[str, Any], message: str) -> None:
    case = Case(Shape(), [(9, 3), (30, 1)])
    tensors, options = changed(case, "batch", replace(case.batch(), **change))
    with pytest.raises(KernelError) as error:
        paged_attention(*tensors, **options)
    assert message in str(error.value)


# Planted faults.

FAULTS = {
    "a key after the query": ("key <= position[:, None]", "key <= position[:, None] + 1"),
    "the own key is not seen": ("key <= position[:, None]", "key < position[:, None]"),
    "a window of one more": ("> position[:, None] - WINDOW)", ">= position[:, None] - WINDOW)"),
    "a window that begins late": ("first_position + 1 - WINDOW", "first_position + 4 - WINDOW"),
    "interior from too early": (
        "inner_first = tl.cdiv(inner_begin, BLOCK_N)",
        "inner_first = inner_begin // BLOCK_N",
    ),
    "interior up to too far": ("inner_end // BLOCK_N, inner_f", "tl.cdiv(end, BLOCK_N), inner_f"),
    "an edge that is left out": ("end_block - interior)", "end_block - interior - 1)"),
    "an edge that counts twice": ("tl.where(edge >= inner_first, interior, 0)", "0"),
    "heads that read their neighbour": (
        "first_head + row % GROUP",
        "first_head + row // BLOCK_Q",
    ),
    "requests that are mixed up": ("+ middle <= tile", "+ middle < tile"),
    "no fade": ("total * fade[:, None]", "total"),
    "a slot of another page": ("+ head, at % PAGE", "+ head, at % 2"),
    "no softcap": ("if SOFTCAP > 0:", "if SOFTCAP < 0:"),
    "a sink that is scaled": ("other=0.0).to(tl.float32) * LOG2E", "other=0.0).to(tl.float32)"),
    "keys without their scale": ("if cache.k_scale is not None:", "if False:"),
    "values without their scale": ("if cache.v_scale is not None:", "if False:"),
    "an LSE in bits": ("(top + tl.log2(weight)) * LN2", "top + tl.log2(weight)"),
}
SAMPLES = [
    (Shape(2, 3, 16, 4), [(60, 20), (50, 1), (5, 5)]),
    (Shape(2, 2, 20, 4, window=7, softcap=1.5, sinks=True), [(60, 20), (50, 1), (3, 3)]),
    (Shape(2, 2, 16, 4, cache=FP8), [(40, 1), (50, 7)]),
]


@functools.cache
def samples() -> list[Case]:
    return [Case(shape, requests) for shape, requests in SAMPLES]


def is_wrong(attention: Any) -> bool:
    """Whether one of the samples shows it."""
    for case in samples():
        batch, lse = case.batch(), case.lse()
        out = attention(
            *(case.q, case.keys[0], case.values[0], batch),
            **{**case.options, "lse": lse, "blocks": (16, 16)},
        )
        try:
            case.close(out, lse)
            assert batch.errors() == {}
        except AssertionError:
            return True
    return False


def test_the_samples_are_right_without_a_fault() -> None:
    assert not is_wrong(paged_attention)


@pytest.mark.sweep
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, tmp_path: Path) -> None:
    assert is_wrong(planted(module, tmp_path, FAULTS[fault], parts=[kernel]).paged_attention)


# What the interpreter cannot show.

EVERY_TILE = """
import sys
import numpy as np, torch
from weft.kernels.check.aot import compiling, describe
from weft.kernels.gpu.attention.paged import paged_attention
from weft.kernels.gpu.attention.inputs import PagedBatch
target = sys.argv[1]
caches = [torch.bfloat16] + [torch.float8_e4m3fn] * (target != "sm_80")
for dim in (64, 80, 128, 256):
    for cache in caches:
        for queries in (1, 4, 8, 100):
            table = np.zeros((2, 8), np.int32)
            starts, contexts = np.array([0, queries, queries + 1]), np.array([120, 120])
            batch = PagedBatch.build(starts, contexts, table, block_size=16)
            q = torch.empty(queries + 1, 8, dim, dtype=torch.bfloat16)
            keys = torch.empty(9, 2, 16, dim, dtype=cache)
            options = {"scale": 0.1, "sliding_window": 9, "softcap": 2.0, "sinks": torch.ones(8)}
            with compiling(target) as launches:
                paged_attention(q, keys, keys, batch, **options, lse=torch.empty(len(q), 8))
            row = describe("paged_attention", target, launches[0])
            for problem in row.problems:
                print(dim, cache, queries, row.constants, problem)
"""


@pytest.mark.slow
@pytest.mark.parametrize("target", TENSOR_CORES)
def test_no_tile_of_its_choice_spills(target: str) -> None:
    """With all that attention has besides, at each height of a tile."""
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", EVERY_TILE, target],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TRITON_INTERPRET": "0"},
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@settings(max_examples=5, deadline=None)
@given(
    world=st.integers(2, 3),
    shape=shapes,
    requests=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 7)), min_size=1, max_size=2),
    seed=SEEDS,
)
def test_a_ranks_part_of_many_queries_has_its_lse(
    world: int, shape: Shape, requests: list[tuple[int, int]], seed: int
) -> None:
    """Prefills: each rank attends to its own pages, and what they made of them is merged."""
    shape = replace(shape, world=world, sinks=False)
    case = Case(shape, [(before + queries, queries) for before, queries in requests], seed)
    outs, lses = [], []
    for rank in range(world):
        batch, lse = case.batch(rank), case.lse()
        out = paged_attention(
            *(case.q, case.keys[rank], case.values[rank], batch),
            **{**case.options, "lse": lse, "blocks": (16, 16)},
            rank=rank,
            world_size=world,
        )
        assert batch.errors() == {}
        assert not out[lse == -torch.inf].any()
        outs.append(out.float())
        lses.append(lse)
    weights = torch.stack(lses).softmax(0)[..., None]
    case.close((torch.stack(outs) * weights).sum(0).to(shape.dtype), torch.stack(lses).logsumexp(0))


def test_a_part_has_no_sinks() -> None:
    case = Case(Shape(world=2, sinks=True), [(9, 3)])
    with pytest.raises(KernelError, match="sinks is given; it must be None where ranks"):
        paged_attention(
            *(case.q, case.keys[0], case.values[0], case.batch(0)),
            **{**case.options, "lse": case.lse()},
            rank=0,
            world_size=2,
        )
