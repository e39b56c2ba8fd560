"""Norms of rows, with residual and with fp8, against the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.faults import planted
from support.overlapped import DTYPES, FP8, SEEDS, close
from support.rows import bounded, finds, same

from weft.kernels import reference
from weft.kernels.gpu.rowwise import norm, rows
from weft.kernels.gpu.rowwise.norm import layer_norm, mean_squares, rms_norm
from weft.kernels.gpu.runtime.arguments import KernelError

EPS = 1e-5


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    with bounded():
        yield


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 9),
    columns=st.one_of(st.integers(1, 300), st.sampled_from([1023, 4096, 5120])),
    dtype=DTYPES,
    weight_dtype=DTYPES,
    with_residual=st.booleans(),
    fp8=st.booleans(),
    seed=SEEDS,
)
def test_equals_the_reference(
    tokens: int,
    columns: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    with_residual: bool,
    fp8: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    x, weight = torch.randn(tokens, columns).to(dtype), torch.randn(columns).to(weight_dtype)
    residual = torch.randn(tokens, columns).to(dtype) if with_residual else None
    out, total, scale = rms_norm(x, weight, EPS, residual=residual, fp8=fp8)
    if residual is None:
        assert total is None
        normed = x
    else:
        assert total is not None
        normed = (x.float() + residual.float()).to(dtype)
        same(total, normed)
    expected = reference.rms_norm(normed, weight, EPS)
    if not fp8:
        assert scale is None
        close(out, expected, dtype)
        return
    assert scale is not None
    assert out.dtype == FP8
    torch.testing.assert_close(scale, expected.abs().amax(1) / 448, atol=0, rtol=1e-5)
    # Half a step of 3 bits behind the leading one; below 2**-6, of the smallest numbers.
    smallest = float(scale.max()) * 2.0**-10 if tokens else 0.0
    torch.testing.assert_close(
        out.float() * scale[:, None], expected, atol=smallest * 1.01, rtol=2.0**-4 * 1.01
    )


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 9),
    columns=st.one_of(st.integers(1, 300), st.sampled_from([1023, 4096, 5120])),
    dtype=DTYPES,
    weight_dtype=DTYPES,
    biased=st.booleans(),
    with_residual=st.booleans(),
    offset=st.sampled_from([0.0, 30.0]),
    seed=SEEDS,
)
def test_layer_norm_equals_the_reference(
    tokens: int,
    columns: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    biased: bool,
    with_residual: bool,
    offset: float,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    x, weight = (offset + torch.randn(tokens, columns)).to(dtype), torch.randn(columns)
    bias = torch.randn(columns).to(weight_dtype) if biased else None
    residual = torch.randn(tokens, columns).to(dtype) if with_residual else None
    out, total, _ = layer_norm(x, weight.to(weight_dtype), EPS, bias=bias, residual=residual)
    summed = x
    if residual is not None:
        assert total is not None
        summed = (x.float() + residual.float()).to(dtype)
        same(total, summed)
    # With one column, rounding the mean leaves what epsilon divides.
    expected = reference.layer_norm(summed, weight.to(weight_dtype), EPS, bias)
    assert out.dtype == dtype
    close(out, expected, dtype)


def test_rows_of_zeros() -> None:
    x = torch.zeros(2, 5)
    out, _, scale = rms_norm(x, torch.ones(5), EPS, fp8=True)
    assert scale is not None
    assert scale.tolist() == [1, 1]
    same(out.float(), x)


def test_a_row_does_not_depend_on_the_others() -> None:
    x, weight = torch.randn(7, 130), torch.randn(130)
    whole = rms_norm(x, weight, EPS).out
    same(rms_norm(x[3:4], weight, EPS).out, whole[3:4])
    x[2] = torch.nan
    same(rms_norm(x, weight, EPS).out[3:], whole[3:])


def test_the_longest_row() -> None:
    columns = rows.MAX_BYTES // 2
    x, weight = torch.randn(1, columns).half(), torch.randn(columns)
    close(rms_norm(x, weight, EPS).out, reference.rms_norm(x, weight, EPS), torch.float16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"x": torch.zeros(4)}, r"x's shape is \[4\]; it must be a matrix"),
        ({"x": torch.zeros(4, 0)}, "x's columns is 0; it must be from 1 to 16384"),
        ({"x": torch.zeros(1, 32769).half()}, "x's columns is 32769; it must be from 1 to 32768"),
        ({"x": torch.zeros(4, 3, dtype=torch.float64)}, "x's dtype is torch.float64"),
        ({"x": torch.zeros(3, 4).T}, "x's stride"),
        ({"weight": torch.zeros(4)}, r"weight's shape is \[4\]; it must be \[3\]"),
        ({"eps": 0.0}, "eps is 0.0; it must be positive"),
        ({"residual": torch.zeros(4, 3).half()}, "residual's dtype is torch.float16"),
        ({"residual": torch.zeros(3, 3)}, r"residual's shape is \[3, 3\]; it must be \[4, 3\]"),
    ],
)
def test_what_cannot_be_normalised(options: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"x": torch.zeros(4, 3), "weight": torch.zeros(3), "eps": 1e-6}
    with pytest.raises(KernelError, match=f"^rms_norm: {message}"):
        rms_norm(**arguments | options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"x": torch.zeros(4)}, r"x's shape is \[4\]; it must be a matrix"),
        ({"bias": torch.zeros(4)}, r"bias's shape is \[4\]; it must be \[3\]"),
    ],
)
def test_what_has_no_layer_norm(options: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"x": torch.zeros(4, 3), "weight": torch.zeros(3), "eps": 1e-6}
    with pytest.raises(KernelError, match=f"^layer_norm: {message}"):
        layer_norm(**arguments | options)  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 19),
    first=st.one_of(st.integers(1, 90), st.sampled_from([1024, 1025, 3000])),
    second=st.integers(1, 1100),
    rest=st.integers(0, 40),
    ranks=st.integers(1, 4),
    dtype=DTYPES,
    seed=SEEDS,
)
def test_the_ranks_mean_squares_add_up_to_those_of_all_columns(
    tokens: int, first: int, second: int, rest: int, ranks: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    each = torch.randn(ranks, tokens, first + second + rest).to(dtype)
    total = sum(mean_squares(x, first, second, ranks=ranks) for x in each)
    assert isinstance(total, torch.Tensor)
    parts = each.float().split((first, second, rest), dim=2)[:2]
    expected = torch.stack([part.square().mean(dim=(0, 2)) for part in parts], dim=1)
    torch.testing.assert_close(total, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"x": torch.zeros(4)}, r"x's shape is \[4\]; it must be a matrix"),
        ({"x": torch.zeros(5, 4).T}, "x's stride"),
        ({"first": 4}, r"first \+ second is 4 \+ 2; it must be at most 5, and at least 1 each"),
        ({"second": 0}, r"first \+ second is 3 \+ 0; it must be at most 5, and at least 1 each"),
        ({"ranks": 0}, "ranks is 0; it must be positive"),
    ],
)
def test_what_has_no_mean_squares(options: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"x": torch.zeros(4, 5), "first": 3, "second": 2}
    with pytest.raises(KernelError, match=f"^mean_squares: {message}"):
        mean_squares(**arguments | options)  # type: ignore[arg-type]


def test_older_gpus_have_no_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "target", lambda: ("cuda", 80))
    with pytest.raises(KernelError, match="rms_norm: fp8 is requested; it must not be: sm_80"):
        rms_norm(torch.zeros(1, 2), torch.zeros(2), EPS, fp8=True)


# Planted faults.


def check(module: ModuleType) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 37).half() / 100, torch.randn(37)
    residual = torch.randn(5, 37).half()
    out, total, scale = module.rms_norm(x, weight, 0.5, residual=residual, fp8=True)
    same(total, x + residual)
    expected = reference.rms_norm(total, weight, 0.5)
    torch.testing.assert_close(scale, expected.abs().amax(1) / 448, atol=0, rtol=1e-5)
    torch.testing.assert_close(out.float() * scale[:, None], expected, atol=0.07, rtol=0.07)


def check_layer_norm(module: ModuleType) -> None:
    torch.manual_seed(0)
    x, weight, bias = 3 + torch.randn(5, 37), torch.randn(37), torch.randn(37)
    residual = torch.randn(5, 37)
    out, total, _ = module.layer_norm(x, weight, 0.5, bias=bias, residual=residual)
    torch.testing.assert_close(out, reference.layer_norm(total, weight, 0.5, bias))


def check_squares(module: ModuleType) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 1500)
    squares = module.mean_squares(x, 1100, 300, ranks=2)
    parts = x.split((1100, 300, 100), dim=1)[:2]
    expected = torch.stack([part.square().mean(dim=1) / 2 for part in parts], dim=1)
    torch.testing.assert_close(squares, expected)


def test_nothing_is_found_without_a_fault() -> None:
    assert not finds(check, norm)
    assert not finds(check_layer_norm, norm)
    assert not finds(check_squares, norm)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("/ N + eps", "/ BLOCK + eps"),
        ("/ N + eps", "/ N"),
        ("row * row", "row"),
        ("tl.store(total + at, stored", "tl.store(total + at, value - stored"),
        ("value = value / divisor", "value = value * divisor"),
        ("tl.store(scale + row, divisor)", "tl.store(scale, divisor)"),
        ("at = row * N + column", "at = row // 2 * N + column"),
    ],
)
def test_a_fault_is_found(old: str, new: str, tmp_path: Path) -> None:
    assert finds(check, planted(norm, tmp_path, (old, new)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tl.sum(row, axis=0) / N", "tl.sum(row, axis=0) / BLOCK"),
        ("tl.where(inside, row - tl.sum(row, axis=0) / N, 0.0)", "row - tl.sum(row, axis=0) / N"),
        ("row += tl.load(bias", "row -= tl.load(bias"),
        ("BLOCK, bias, CENTERED)", "BLOCK, None, CENTERED)"),
        ("BLOCK, bias, CENTERED)", "BLOCK, bias, False)"),
        ("CENTERED=centered", "CENTERED=False"),
    ],
)
def test_a_fault_in_layer_norm_is_found(old: str, new: str, tmp_path: Path) -> None:
    assert finds(check_layer_norm, planted(norm, tmp_path, (old, new)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("part * first", "part * second"),
        ("column < width", "column < width - 1"),
        ("value * value", "value"),
        ("(width * ranks)", "width"),
        ("range(0, width, BLOCK)", "range(0, BLOCK, BLOCK)"),
        ("start + tl.arange(0, BLOCK)", "tl.arange(0, BLOCK)"),
        ("out + 2 * row + part", "out + row + part"),
    ],
)
def test_a_fault_in_the_squares_is_found(old: str, new: str, tmp_path: Path) -> None:
    assert finds(check_squares, planted(norm, tmp_path, (old, new)))
