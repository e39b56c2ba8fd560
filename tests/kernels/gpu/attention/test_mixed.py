"""Attention with a launch for decodes and one for prompts, against its oracle; planted faults."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.faults import planted
from support.overlapped import SEEDS
from support.paged import Case, Shape, shapes
from torch import Tensor

from weft.kernels.gpu.attention import decode, kernel, paged
from weft.kernels.gpu.attention import mixed as module
from weft.kernels.gpu.attention.mixed import mixed_attention
from weft.kernels.interpreter import gpu as interpreter

REQUESTS = [(60, 1), (40, 9), (9, 1), (21, 21), (33, 1)]
"""(context, queries) of decodes among prompts."""


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    with interpreter.installed():
        yield


def attend(
    case: Case, splits: int, op: Callable[..., Tensor] = mixed_attention
) -> tuple[Tensor, Tensor]:
    """(result, LSE), poisoned before; nothing was flagged."""
    batch, lse = case.batch(), case.lse()
    out = op(
        *(case.q, case.keys[0], case.values[0], batch),
        **case.options,
        lse=lse,
        splits=splits,
        blocks=(16, 16),
    )
    assert batch.errors() == {}
    return out, lse


@settings(max_examples=25, deadline=None)
@given(
    shape=shapes,
    requests=st.lists(
        st.tuples(st.integers(0, 90), st.sampled_from([1, 1, 0, 2, 7])), min_size=1, max_size=4
    ).map(lambda rs: [(old + new, new) for old, new in rs]),
    splits=st.integers(0, 5),
    seed=SEEDS,
)
def test_equals_the_reference(
    shape: Shape, requests: list[tuple[int, int]], splits: int, seed: int
) -> None:
    """Also without decodes, without prompts, and with requests that have no query."""
    case = Case(shape, requests, seed)
    case.close(*attend(case, splits))


def test_a_recorded_step_may_hold_fewer_decodes_than_it_was_recorded_for() -> None:
    """Its launches are the same for any mixture: only the lengths on the device change."""
    case = Case(Shape(group=4), [(40, 9), (21, 21)])
    batch, lse = replace(case.batch(), decodes=2), case.lse()
    out = mixed_attention(
        *(case.q, case.keys[0], case.values[0], batch), **case.options, lse=lse, splits=3
    )
    case.close(out, lse)


FAULTS = {
    "decodes that are left out": ("tl.where(has == 1, 1, 0)", "tl.where(has == 1, 0, 1)"),
    "prompts that are left out": ("tl.where(queries == 1, 0, queries)", "0 * queries"),
    "all parts in one row": ("            row = tile\n", "            row = 0 * tile\n"),
    "results in the request's row": ("place = first * HEADS + row % HEADS", "place = row"),
    "merged rows of another request": ("query_start + row // HEADS)", "query_start + row % HEADS)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_launches_is_found(fault: str, tmp_path: Path) -> None:
    faulty = planted(module, tmp_path, FAULTS[fault], parts=[kernel, paged, decode])
    case = Case(Shape(group=4), REQUESTS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what was never stored may be any number
        got = attend(case, 3, faulty.mixed_attention)
    with pytest.raises(AssertionError):
        case.close(*got)
