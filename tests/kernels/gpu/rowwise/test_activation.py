"""SiLU and multiply, and fp8 with scales of rows and groups, against the oracles."""

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
from weft.kernels.check.ops.rows import restored
from weft.kernels.gpu.rowwise import activation, rows
from weft.kernels.gpu.rowwise.activation import (
    GROUP,
    quantize,
    silu_multiply,
    silu_multiply_quantize,
)
from weft.kernels.gpu.runtime.arguments import KernelError

COLUMNS = st.one_of(st.integers(1, 300), st.sampled_from([127, 128, 129, 1024, 1025, 2500]))
SCALES = st.sampled_from(["row", "group"])


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    with bounded():
        yield


@settings(max_examples=40, deadline=None)
@given(tokens=st.integers(0, 6), columns=COLUMNS, dtype=DTYPES, seed=SEEDS)
def test_silu_multiply(tokens: int, columns: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(tokens, 2 * columns).to(dtype)
    close(silu_multiply(x), reference.epilogue(x, gate_up="halves"), dtype)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 5),
    columns=COLUMNS,
    scales=SCALES,
    dtype=DTYPES,
    magnitude=st.sampled_from([1e-4, 1.0, 1e3]),
    seed=SEEDS,
)
def test_quantize_has_the_bits_of_the_oracle(
    tokens: int, columns: int, scales: str, dtype: torch.dtype, magnitude: float, seed: int
) -> None:
    torch.manual_seed(seed)
    x = (torch.randn(tokens, columns) * magnitude).to(dtype)
    x[:1, : columns // 2] = 0
    out, scale = quantize(x, scales)  # type: ignore[arg-type]
    expected, expected_scale = reference.quantize(x, GROUP if scales == "group" else 0)
    same(scale, expected_scale)
    assert out.dtype == FP8
    same(out.view(torch.uint8), expected.view(torch.uint8))


@settings(max_examples=30, deadline=None)
@given(tokens=st.integers(1, 4), columns=COLUMNS, scales=SCALES, dtype=DTYPES, seed=SEEDS)
def test_both_at_once(
    tokens: int, columns: int, scales: str, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    x = torch.randn(tokens, 2 * columns).to(dtype)
    quantized = silu_multiply_quantize(x, scales)  # type: ignore[arg-type]
    expected = reference.epilogue(x, gate_up="halves")
    torch.testing.assert_close(restored(quantized), expected, atol=0.01, rtol=0.07)
    assert quantized[1].shape == reference.quantize(expected, GROUP * (scales == "group"))[1].shape


def test_what_is_not_finite_stays_in_its_group() -> None:
    x = torch.ones(1, 384)
    x[0, 3], x[0, 130] = torch.nan, torch.inf
    out, scale = quantize(x, "group")
    assert out.float()[0, 3].isnan()
    same(scale, torch.tensor([[1 / 448, torch.inf, 1 / 448]]))
    assert out.float()[0, 130].isnan()
    assert (out.float()[0, 256:] == 448).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: silu_multiply(torch.zeros(2, 3)), "silu_multiply: x's columns is 3; it must be e"),
        (lambda: silu_multiply(torch.zeros(2)), "silu_multiply: x's shape"),
        (lambda: quantize(torch.zeros(2, 0)), "quantize: x's columns is 0; it must be from 1"),
        (lambda: quantize(torch.zeros(1, 16385)), "x's columns is 16385; it must be from 1 to 163"),
        (lambda: quantize(torch.zeros(2, 3), "tile"), "is 'tile'; it must be 'row' or 'group'"),  # type: ignore[arg-type]
        (lambda: quantize(torch.zeros(2, 3, dtype=torch.int32)), "x's dtype is torch.int32"),
        (lambda: silu_multiply_quantize(torch.zeros(4, 2).T), "silu_multiply_quantize: x's stride"),
    ],
)
def test_what_cannot_be_taken(call: object, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        call()  # type: ignore[operator]


def test_older_gpus_have_no_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "target", lambda: ("cuda", 86))
    with pytest.raises(KernelError, match="quantize: fp8 is requested; it must not be: sm_86"):
        quantize(torch.zeros(1, 2))


# Planted faults.


def check(module: ModuleType) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 2 * 1200)
    torch.testing.assert_close(module.silu_multiply(x), reference.epilogue(x, gate_up="halves"))
    for scales, group in (("row", 0), ("group", GROUP)):
        out, scale = module.quantize(x, scales)
        expected, expected_scale = reference.quantize(x, group)
        same(scale, expected_scale)
        same(out.view(torch.uint8), expected.view(torch.uint8))


def test_nothing_is_found_without_a_fault() -> None:
    assert not finds(check, activation)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("begin + N + column", "begin + column"),
        ("(2 if SILU else 1)", "1"),
        ("row * groups + group", "row * GROUPS + group"),
        ("y = y / divisor[:, None]", "y = y / tl.max(divisor, axis=0)"),
        ("tl.program_id(1) * GROUPS", "tl.program_id(1)"),
        ("-(-groups // at_once)", "groups // at_once or 1"),
    ],
)
def test_a_fault_is_found(old: str, new: str, tmp_path: Path) -> None:
    assert finds(check, planted(activation, tmp_path, (old, new)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("largest / FP8_MAX", "largest / 240.0"),
        ("tl.abs(y)", "y"),
        ("largest == 0, 1.0", "largest == 0, 2.0"),
    ],
)
def test_a_fault_in_the_scale_is_found(old: str, new: str, tmp_path: Path) -> None:
    def check_scale(module: ModuleType) -> None:
        faulty = planted(activation, tmp_path)
        faulty.fp8_scale = module.fp8_scale  # type: ignore[attr-defined]
        x = -torch.arange(6.0).view(2, 3)
        x[0] = 0
        same(faulty.quantize(x)[1], reference.quantize(x)[1])

    assert not finds(check_scale, rows)
    assert finds(check_scale, planted(rows, tmp_path, (old, new)))
