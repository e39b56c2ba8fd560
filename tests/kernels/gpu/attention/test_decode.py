"""Split-KV attention against its oracle, how many splits there are, and planted faults."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.faults import planted
from support.overlapped import SEEDS
from support.paged import Case, Shape, shapes
from torch import Tensor

from weft.kernels.gpu.attention import decode as module
from weft.kernels.gpu.attention import kernel, paged
from weft.kernels.gpu.attention.decode import (
    MAX_SPLITS,
    choose_splits,
    decode_attention,
)
from weft.kernels.gpu.attention.inputs import Options
from weft.kernels.gpu.attention.paged import paged_attention
from weft.kernels.gpu.attention.tile import Tile
from weft.kernels.gpu.runtime.arguments import KernelError
from weft.kernels.gpu.tuning.costs import SPLITS
from weft.kernels.interpreter import gpu as interpreter


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    with interpreter.installed():
        yield


def decode(case: Case, **options: Any) -> tuple[Tensor, Tensor]:
    """(result, LSE); nothing was flagged."""
    batch, lse = case.batch(), case.lse()
    out = decode_attention(
        *(case.q, case.keys[0], case.values[0], batch), **case.options, lse=lse, **options
    )
    assert batch.errors() == {}
    return out, lse


@settings(max_examples=20, deadline=None)
@given(
    shape=shapes,
    requests=st.lists(
        st.tuples(st.integers(0, 120), st.sampled_from([1, 1, 1, 0, 4])), min_size=1, max_size=3
    ).map(lambda rs: [(old + new, new) for old, new in rs]),
    splits=st.integers(0, 9),
    seed=SEEDS,
)
def test_equals_the_reference(
    shape: Shape, requests: list[tuple[int, int]], splits: int, seed: int
) -> None:
    """Also where requests have fewer blocks than there are splits, and where some have none."""
    case = Case(shape, requests, seed)
    case.close(*decode(case, splits=splits, blocks=(16, 16)))


def test_many_splits_are_merged_in_several_steps() -> None:
    case = Case(Shape(1, 2, 16, 16, sinks=True), [(700, 1), (33, 1)])
    for splits in (17, 40, MAX_SPLITS):
        case.close(*decode(case, splits=splits, blocks=(16, 16)))


def test_one_split_is_paged_attention() -> None:
    case = Case(Shape(), [(60, 1), (9, 1)])
    out, _ = decode(case, splits=1)
    expected = paged_attention(case.q, case.keys[0], case.values[0], case.batch(), **case.options)
    assert torch.equal(out, expected)


def test_what_it_chooses_by_itself_is_split() -> None:
    case = Case(Shape(1, 2, 16, 16), [(1100, 1)])
    batch = case.batch()
    tile = Tile(16, 64, 4, 2)
    assert choose_splits(case.q, case.keys[0], batch, tile, Options(1.0), 132) == 16
    assert choose_splits(case.q, case.keys[0], batch, tile, Options(1.0), 132, world_size=8) == 1
    windowed = Options(1.0, sliding_window=128)
    assert choose_splits(case.q, case.keys[0], batch, tile, windowed, 132) == 1
    case.close(*decode(case))


def test_splits_have_a_kernel_each() -> None:
    assert SPLITS[-1] == MAX_SPLITS


def test_a_split_that_is_flagged_flags_the_request() -> None:
    case = Case(Shape(), [(60, 1), (61, 1)])
    expected, _ = decode(case, splits=3, blocks=(16, 16))
    batch, lse = case.batch(), case.lse()
    batch.block_table[0, 12] = -1  # of the third split
    out = decode_attention(
        *(case.q, case.keys[0], case.values[0], batch),
        **{**case.options, "lse": lse, "splits": 3, "blocks": (16, 16)},
    )
    assert list(batch.errors()) == [0]
    assert (out[0] == 0).all()
    assert (lse[0] == torch.inf).all()
    assert torch.equal(out[1], expected[1])


def test_splits_out_of_range_are_refused() -> None:
    case = Case(Shape(), [(60, 1)])
    for splits in (-1, MAX_SPLITS + 1):
        with pytest.raises(KernelError, match=f"splits is {splits}; it must be from 1 to 64, or 0"):
            decode(case, splits=splits)


# Planted faults.

MERGE_FAULTS = {
    "a part without its weight": ("share[:, None] * numbers", "numbers"),
    "a part that is left out": ("range(0, SPLITS, PARTS)", "range(0, SPLITS - 1, PARTS)"),
    "the sink twice": ("weight += tl.exp2((sink", "weight += 2 * tl.exp2((sink"),
    "another head's sink": ("row % HEADS)", "(row + 1) % HEADS)"),
    "an LSE without its anchor": ("anchor + tl.log2(weight)", "tl.log2(weight)"),
}
SPLIT_FAULTS = {
    "a split that begins late": ("first_block + split * each", "first_block + split * each + 1"),
    "splits that overlap": (
        "tl.minimum(first_block + each, ",
        "tl.minimum(first_block + each + 1, ",
    ),
    "a split that stores over another": ("tl.cast(split, tl.int64) * rows", "0 * rows"),
}
REQUESTS = [(250, 1), (17, 1), (90, 2)]


def is_wrong(op: Any) -> bool:
    case = Case(Shape(2, 2, 16, 4, sinks=True), REQUESTS)
    batch, lse = case.batch(), case.lse()
    with warnings.catch_warnings():  # what was never stored may be any number
        warnings.simplefilter("ignore", RuntimeWarning)
        out = op(
            *(case.q, case.keys[0], case.values[0], batch),
            **{**case.options, "lse": lse, "splits": 3, "blocks": (16, 16)},
        )
    try:
        case.close(out, lse)
    except AssertionError:
        return True
    return False


def test_the_sample_is_right_without_a_fault() -> None:
    assert not is_wrong(decode_attention)


@pytest.mark.parametrize("fault", MERGE_FAULTS)
def test_a_fault_of_the_merge_is_found(fault: str, tmp_path: Path) -> None:
    changes = [MERGE_FAULTS[fault], ("PARTS = 16", "PARTS = 2")]
    assert is_wrong(planted(module, tmp_path, *changes).decode_attention)


@pytest.mark.parametrize("fault", SPLIT_FAULTS)
def test_a_fault_of_the_splits_is_found(fault: str, tmp_path: Path) -> None:
    weak = planted(paged, tmp_path, SPLIT_FAULTS[fault], parts=[kernel])
    faulty = planted(module, tmp_path)
    faulty.launch_attend = weak.launch_attend  # type: ignore[attr-defined]
    assert is_wrong(faulty.decode_attention)
