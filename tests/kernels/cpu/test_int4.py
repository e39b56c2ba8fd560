"""Int4 weights against the product, in float64, with the weights they represent."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import compiled_kernels, int4_rows
from torch import Tensor
from torch.nn.functional import silu

from weft.kernels import reference
from weft.kernels.cpu import int4 as module
from weft.kernels.cpu.int4 import GROUP, Int4Linear, dequantize, quantize
from weft.kernels.cpu.linear import Linear, NativeLinear, Norm
from weft.kernels.cpu.quantized import make_rounded_linear

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def rounded(weight: Tensor) -> Tensor:
    """Return the weight that a layer represents, in float64."""
    codes, scale = quantize(weight)
    return dequantize(codes, scale.double())


def least_error(group: Tensor) -> float:
    """Return the least squared error of a group of bfloat16 over all scales that are tried."""
    largest = max(group.tolist(), key=abs)
    errors = []
    for fraction in module.SCALES:
        scale = float(torch.tensor(-largest * fraction / 8).bfloat16()) or 1.0
        integers = [min(max(round(number / scale), -8), 7) for number in group.tolist()]
        errors.append(
            sum((i * scale - n) ** 2 for i, n in zip(integers, group.tolist(), strict=True))
        )
    return min(errors)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(0, 70) | st.sampled_from([97, 400]),
    n=st.integers(1, 130) | st.sampled_from([64, 128]),
    k=st.integers(1, 130) | st.sampled_from([64, 320, 1100, 2090]),
    block=st.sampled_from([1, 300, 1 << 21]),
    dtype=DTYPES,
    with_bias=st.booleans(),
    with_norm=st.booleans(),
    with_residual=st.booleans(),
    gated=st.booleans(),
    compiled=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_the_product_with_the_rounded_weight(
    rows: int,
    n: int,
    k: int,
    block: int,
    dtype: torch.dtype,
    with_bias: bool,
    with_norm: bool,
    with_residual: bool,
    gated: bool,
    compiled: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    outputs = 2 * n if gated else n
    x = torch.randn(rows, k).to(dtype)
    weight = (torch.randn(outputs, k) / k**0.5).to(dtype)
    bias = torch.randn(outputs).to(dtype) if with_bias else None
    norm = Norm(torch.rand(k).to(dtype), 1e-5) if with_norm else None
    residual = torch.randn(rows, n).to(dtype) if with_residual else None
    with compiled_kernels(compiled), pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_ELEMENTS", block)
        layer: Linear = make_rounded_linear("int4", weight, bias, gated=gated)
        assert isinstance(layer, NativeLinear) == (compiled and dtype == torch.bfloat16)
        got = layer(x, norm=norm, residual=residual)
    assert got.dtype == dtype
    inputs = x if norm is None else reference.rms_norm(x, norm.weight, norm.eps).to(dtype)
    rows_read = int4_rows(inputs) if isinstance(layer, NativeLinear) else inputs.double()
    expected = rows_read @ rounded(weight).T
    if bias is not None:
        expected += bias.double()
    if gated:
        gate, up = expected.chunk(2, dim=-1)
        expected = silu(gate) * up
    if residual is not None:
        expected += residual.double()
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("compiled", [True, False])
def test_each_group_has_its_own_scale(compiled: bool) -> None:
    """An error in one group's scale would be lost in the others' tolerance: one input at a time."""
    k = 3 * GROUP + 5
    weight = (torch.randn(33, k) * torch.exp2(torch.arange(k) // GROUP * 9.0 - 18)).bfloat16()
    with compiled_kernels(compiled):
        got = make_rounded_linear("int4", weight)(torch.eye(k).bfloat16())
    torch.testing.assert_close(got.T.double(), rounded(weight), atol=0, rtol=1 / 128)


@given(
    n=st.integers(1, 10), k=st.integers(1, 100), exponent=st.integers(-20, 20), seed=st.integers(0)
)
@settings(max_examples=40, deadline=None)
def test_rounds_with_the_best_scale(n: int, k: int, exponent: int, seed: int) -> None:
    torch.manual_seed(seed % 2**31)
    weight = (torch.randn(n, k) * 2.0**exponent).bfloat16()
    codes, scale = quantize(weight)
    assert codes.dtype == torch.uint8
    assert codes.shape == weight.shape
    assert int(codes.max()) <= 15
    assert scale.shape == (n, -(-k // GROUP))
    assert scale.dtype == torch.bfloat16
    error = (rounded(weight) - weight.double()).square()
    for row, start in itertools.product(range(n), range(0, k, GROUP)):
        part = slice(start, start + GROUP)
        least = least_error(weight[row, part])
        assert float(error[row, part].sum()) == pytest.approx(least, rel=1e-4, abs=1e-30)


def test_the_error_is_less_than_that_of_one_scale() -> None:
    """That of llama.cpp's Q4_0, on normal numbers: 0.0074 of the weights' squares."""
    weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    error = (rounded(weight) - weight).square().sum() / weight.square().sum()
    assert error < 0.0070


@pytest.mark.parametrize("width", [GROUP, GROUP // 2 * 3])
def test_a_cut_between_groups_changes_nothing(width: int) -> None:
    """Ranks round their own parts of a row; a cut within a group begins new groups."""
    weight = torch.randn(8, 2 * width)
    parts = torch.cat([rounded(part) for part in weight.split(width, dim=1)], dim=1)
    assert torch.equal(parts, rounded(weight)) == (width % GROUP == 0)
    bounds = 0.55 * weight.abs().max() / 7
    assert (parts - weight).abs().max() < 2 * bounds


@pytest.mark.parametrize("compiled", [True, False])
def test_zeros_stay_zero(compiled: bool) -> None:
    weight = torch.randn(3, 80).bfloat16()
    weight[1] = 0
    with compiled_kernels(compiled):
        out = make_rounded_linear("int4", weight)(torch.randn(5, 80).bfloat16())
    assert (out[:, 1] == 0).all()
    assert out.isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_row_that_is_not_finite_stays_so(value: float, compiled: bool) -> None:
    weight = torch.randn(3, 64).bfloat16()
    weight[1, 40] = value
    with compiled_kernels(compiled):
        out = make_rounded_linear("int4", weight)(torch.rand(2, 64).bfloat16())
    assert out.isfinite().all(dim=0).tolist() == [True, False, True]


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 100),
    n=st.integers(1, 100),
    k=st.integers(1, 700),
    gated=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_a_compiled_row_does_not_depend_on_its_company(
    rows: int, n: int, k: int, gated: bool, seed: int
) -> None:
    """Not even in its last bit, although many rows take columns that were widened before."""
    torch.manual_seed(seed)
    weight = torch.randn(2 * n if gated else n, k).bfloat16()
    x = torch.randn(rows, k).bfloat16()
    with compiled_kernels(True):
        layer = make_rounded_linear("int4", weight, gated=gated)
        together, row = layer(x), seed % rows
        assert torch.equal(together[row : row + 1], layer(x[row : row + 1]))


@pytest.mark.parametrize("compiled", [True, False])
def test_it_takes_a_little_more_than_a_quarter_of_bfloat16(compiled: bool) -> None:
    weight = torch.randn(64, 128, dtype=torch.bfloat16)
    with compiled_kernels(compiled):
        layer = make_rounded_linear("int4", weight)
    if isinstance(layer, NativeLinear):
        assert layer.nbytes == 64 * 128 * 4.5 / 8
    else:
        assert isinstance(layer, Int4Linear)
        assert layer.nbytes == 64 * 128 / 2 + 64 * 4 * 4  # torch's kernel has zero points
        assert layer.nbytes < 0.35 * weight.nbytes


@pytest.mark.parametrize(
    ("weight", "bias", "problem"),
    [
        (torch.zeros(3), None, r"weight has shape \(3,\)"),
        (torch.zeros(3, 2), torch.zeros(2), "bias is"),
    ],
)
def test_what_does_not_fit_is_refused(weight: Tensor, bias: Tensor | None, problem: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(ValueError, match=problem):
            make_rounded_linear("int4", weight.to(dtype), bias)
