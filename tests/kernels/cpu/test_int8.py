"""Int8 weights against the product with the weights they represent."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import compiled_kernels

from weft.kernels import reference
from weft.kernels.cpu import int8 as module
from weft.kernels.cpu.int8 import Int8Linear, quantize
from weft.kernels.cpu.linear import Linear, NativeLinear
from weft.kernels.cpu.quantized import make_rounded_linear

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(0, 70),
    n=st.integers(1, 130) | st.sampled_from([64, 128, 192]),
    k=st.integers(1, 130) | st.sampled_from([64, 128, 320]),
    block=st.sampled_from([1, 300, 1 << 21]),
    dtype=DTYPES,
    with_bias=st.booleans(),
    compiled=st.booleans(),
)
def test_equals_the_product_with_the_rounded_weight(
    rows: int, n: int, k: int, block: int, dtype: torch.dtype, with_bias: bool, compiled: bool
) -> None:
    x, weight, bias = torch.randn(rows, k), torch.randn(n, k) / k**0.5, torch.randn(n)
    x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    integers, scale = quantize(weight)
    with compiled_kernels(compiled), pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_ELEMENTS", block)
        layer: Linear = make_rounded_linear("int8", weight, bias if with_bias else None)
        assert isinstance(layer, NativeLinear) == (compiled and dtype == torch.bfloat16)
        got = layer(x)
    assert got.dtype == dtype
    rounded = integers.float() * scale.float()[:, None]
    expected = reference.linear(x.float(), rounded, bias.float() if with_bias else None)
    torch.testing.assert_close(got.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@given(n=st.integers(1, 40), k=st.integers(1, 40), scale=st.floats(1e-3, 1e3), dtype=DTYPES)
def test_rounds_to_the_nearest_of_127_steps(
    n: int, k: int, scale: float, dtype: torch.dtype
) -> None:
    weight = (torch.randn(n, k) * scale).to(dtype)
    integers, scales = quantize(weight)
    assert integers.dtype == torch.int8
    assert scales.dtype == dtype
    # Half a step, plus the rounding error of a bfloat16 scale at 127 steps.
    error = (integers.float() * scales.float()[:, None] - weight.float()).abs()
    assert (error <= scales.float()[:, None] * (0.51 if dtype == torch.float32 else 1.0)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weight_is_not_written_to(dtype: torch.dtype) -> None:
    weight = torch.randn(5, 7, dtype=dtype)
    before = weight.clone()
    quantize(weight)
    torch.testing.assert_close(weight, before, atol=0, rtol=0)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_row_of_zeros_stays_zero(compiled: bool) -> None:
    weight = torch.randn(3, 8).bfloat16()
    weight[1] = 0
    with compiled_kernels(compiled):
        out = make_rounded_linear("int8", weight)(torch.randn(5, 8).bfloat16())
    assert (out[:, 1] == 0).all()
    assert out.isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_stays_so(value: float) -> None:
    weight = torch.randn(3, 16)
    weight[1, 5] = value
    _, scale = quantize(weight)
    assert scale.isfinite().tolist() == [True, False, True]


def test_a_row_does_not_depend_on_its_company_in_float32() -> None:
    layer = Int8Linear(torch.randn(64, 128))
    x = torch.randn(module.FEW_ROWS + 8, 128)
    torch.testing.assert_close(layer(x)[:4], layer(x[:4]), atol=1e-4, rtol=1e-4)


def test_input_may_be_a_view() -> None:
    x, weight = torch.randn(9, 40), torch.randn(7, 20)
    layer = Int8Linear(weight)
    torch.testing.assert_close(layer(x[::2, 10:30]), layer(x[::2, 10:30].contiguous()))


def test_it_takes_half_the_memory_of_bfloat16() -> None:
    integers, scale = quantize(torch.randn(64, 128, dtype=torch.bfloat16))
    assert integers.nbytes + scale.nbytes == 64 * 128 + 64 * 2


@pytest.mark.parametrize(
    ("weight", "bias", "problem"),
    [
        (torch.zeros(3), None, r"weight has shape \(3,\)"),
        (torch.zeros(3, 2), torch.zeros(2), "bias is"),
    ],
)
def test_what_does_not_fit_is_refused(
    weight: torch.Tensor, bias: torch.Tensor | None, problem: str
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(ValueError, match=problem):
            make_rounded_linear("int8", weight.to(dtype), bias)
