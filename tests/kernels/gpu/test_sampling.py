"""The largest and the k largest of rows, against oracles and the CPU's; and with draw.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.faults import planted
from support.overlapped import DTYPES, SEEDS
from support.rows import bounded, finds, same

from weft.kernels import reference
from weft.kernels.cpu.argmax import argmax as argmax_on_cpu
from weft.kernels.gpu import sampling
from weft.kernels.gpu.arguments import KernelError
from weft.kernels.gpu.sampling import argmax, top_k

SIZES = st.one_of(st.integers(1, 60), st.sampled_from([4095, 4097, 8193, 20000]))


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    with bounded():
        yield


def numbers(rows: int, columns: int, dtype: torch.dtype, seed: int, *, ties: bool) -> torch.Tensor:
    torch.manual_seed(seed)
    x = torch.randn(rows, columns)
    return (x.round() if ties else x).to(dtype)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 4),
    columns=SIZES,
    dtype=DTYPES,
    ties=st.booleans(),
    odd=st.sampled_from([None, torch.nan, torch.inf, -torch.inf]),
    seed=SEEDS,
)
def test_argmax(
    rows: int, columns: int, dtype: torch.dtype, ties: bool, odd: float | None, seed: int
) -> None:
    x = numbers(rows, columns, dtype, seed, ties=ties)
    if odd is not None:
        x[:, torch.randint(0, columns, (3,))] = odd
        x[1:2] = -torch.inf
    largest, index = argmax(x)
    for row, one, at in zip(x.float(), largest, index, strict=True):
        whole = row.numpy()
        first = int(np.argmax(whole))  # of NaN too
        assert at == first
        np.testing.assert_equal(one.item(), whole[first].item())
    if odd is None:
        for got, expected in zip((largest, index), argmax_on_cpu(x), strict=True):
            same(got, expected)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 3),
    columns=SIZES,
    data=st.data(),
    dtype=DTYPES,
    ties=st.booleans(),
    seed=SEEDS,
)
def test_top_k(
    rows: int, columns: int, data: st.DataObject, dtype: torch.dtype, ties: bool, seed: int
) -> None:
    x = numbers(rows, columns, dtype, seed, ties=ties)
    k = data.draw(st.integers(1, min(columns, 300)))
    for got, expected in zip(top_k(x, k), reference.top_k(x, k), strict=True):
        same(got, expected)


def test_signs_infinities_and_zeros_have_their_order() -> None:
    x = torch.tensor([[-torch.inf, -1.0, -0.0, 0.0, 1e-45, -1e-45, 1.0, torch.inf, 3e38, -3e38]])
    for k in range(1, 11):
        for got, expected in zip(top_k(x, k), reference.top_k(x, k), strict=True):
            same(got, expected)


def test_nan_gives_ids_that_are_there() -> None:
    x = torch.full((2, 9), torch.nan)
    x[1, 4:] = 1.0
    _, ids = top_k(x, 5)
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 2


@pytest.mark.parametrize(
    ("x", "k", "message"),
    [
        (torch.zeros(3), 1, r"x's shape is \[3\]; it must be a matrix"),
        (torch.zeros(3, 0), 1, "x's columns is 0; it must be from 1"),
        (torch.zeros(2, 3), 0, "k is 0; it must be a whole number of at least 1"),
        (torch.zeros(2, 3), 4, "k is 4; it must be at most 3, the columns"),
        (torch.zeros(3, 2).T, 1, "x's stride"),
        (torch.zeros(3, 2, dtype=torch.int64), 1, "x's dtype is torch.int64"),
    ],
)
def test_what_cannot_be_taken(x: torch.Tensor, k: int, message: str) -> None:
    with pytest.raises(KernelError, match=f"^top_k: {message}"):
        top_k(x, k)
    if message.startswith("x"):
        with pytest.raises(KernelError, match=f"^argmax: {message}"):
            argmax(x)


# Planted faults.


def check(module: ModuleType) -> None:
    x = numbers(3, 9000, torch.float32, 0, ties=True)
    x[2, 8500] = torch.nan
    largest, index = module.argmax(x)
    assert index.tolist() == [int(row.argmax()) for row in x.numpy()]
    assert largest[2].isnan()
    x = numbers(2, 5000, torch.float32, 0, ties=False)
    x[1] = x[1].round()
    for k in (1, 40, 2500, 4999):
        for got, expected in zip(module.top_k(x, k), reference.top_k(x, k), strict=True):
            same(got, expected)


def test_nothing_is_found_without_a_fault() -> None:
    assert not finds(check, sampling)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("nan = inside & (x != x)", "nan = inside & (x > x)"),
        (
            "tl.where(inside & (x == largest), column, NONE)",
            "tl.where(x == largest, column + 1, NONE)",
        ),
        ("span * SPAN + tl.arange", "tl.arange"),
        ("bits ^ 0x7FFFFFFF", "bits"),
        ("tl.where(x == 0.0, 0.0, x)", "x"),
        ("numbers = x + row * V", "numbers = x + row * 0"),
        ("<= missing)))", "< missing)))"),
        ("missing -= tl.minimum(missing, tl.sum(equal, axis=0))", "missing -= missing"),
        ("place += tl.sum", "place += 0 * tl.sum"),
    ],
)
def test_a_fault_is_found(old: str, new: str, tmp_path: Path) -> None:
    assert finds(check, planted(sampling, tmp_path, (old, new)))
