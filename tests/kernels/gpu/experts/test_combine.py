"""Sums of expert outputs, against a plain sum; faults, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.faults import planted
from support.overlapped import DTYPES, SEEDS
from support.rows import bounded, finds
from torch import Tensor

from weft.kernels.gpu.experts import combine as module
from weft.kernels.gpu.experts.combine import combine
from weft.kernels.gpu.runtime.arguments import KernelError


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    with bounded():
        yield


def summed(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros(len(places), rows.shape[1], dtype=torch.float64)
    for token, choices in enumerate(places.tolist()):
        for choice, place in enumerate(choices):
            if 0 <= place < len(rows):
                out[token] += weights[token, choice].double() * rows[place].double()
    return out.float()


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(0, 9),
    rows=st.integers(0, 30),
    top_k=st.integers(1, 9),
    columns=st.sampled_from([1, 7, 64, 1025]),
    dtype=DTYPES,
    seed=SEEDS,
)
def test_any_places(
    tokens: int, rows: int, top_k: int, columns: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    outputs = torch.randn(rows, columns).to(dtype)
    places = torch.randint(-2, rows + 2, (tokens, top_k)).int()
    weights = torch.rand(tokens, top_k)
    got = combine(outputs, places, weights)
    assert got.dtype == dtype
    expected = summed(outputs, places, weights).to(dtype)
    torch.testing.assert_close(got, expected, atol=1e-2, rtol=1e-2)


def check(faulty: ModuleType) -> None:
    torch.manual_seed(0)
    outputs, weights = torch.randn(12, 1030), torch.rand(4, 3)
    outputs[0] = torch.nan  # of no token
    places = torch.tensor([[1, 2, 3], [-1, 5, 6], [11, 12, 4], [7, -1, -1]]).int()
    got = faulty.combine(outputs, places, weights)
    torch.testing.assert_close(got, summed(outputs, places, weights), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("place >= 0) &", "place >= -9) &"),
        ("(place < rows)", "(place < rows + 1)"),
        ("token * TOP_K + choice)\n        at", "choice)\n        at"),
        ("tl.program_id(1) * BLOCK + tl", "tl"),
        ("tl.static_range(TOP_K)", "tl.static_range(TOP_K - 1)"),
    ],
)
def test_faults_are_found(old: str, new: str, tmp_path: Path) -> None:
    assert not finds(check, module)
    assert finds(check, planted(module, tmp_path, (old, new)))


@pytest.mark.parametrize(
    ("places", "weights", "message"),
    [
        (torch.zeros(2).int(), torch.zeros(2, 2), "places's shape"),
        (torch.zeros(2, 2).long(), torch.zeros(2, 2), "places's dtype"),
        (torch.zeros(2, 2).int(), torch.zeros(2, 3), "weights's shape"),
    ],
)
def test_what_does_not_fit_is_refused(places: Tensor, weights: Tensor, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        combine(torch.zeros(3, 4), places, weights)
