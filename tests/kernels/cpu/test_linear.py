"""The packed linear against the plain one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.kernels import reference
from weft.kernels.cpu import linear as module
from weft.kernels.cpu.linear import PackedLinear

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 70),
    n=st.integers(1, 130),
    k=st.integers(1, 130),
    dtype=DTYPES,
    with_bias=st.booleans(),
    packed=st.booleans(),
)
def test_equals_the_reference(
    rows: int, n: int, k: int, dtype: torch.dtype, with_bias: bool, packed: bool
) -> None:
    x, weight, bias = torch.randn(rows, k), torch.randn(n, k) / k**0.5, torch.randn(n)
    x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        if not packed:
            patch.setattr(module, "can_pack", lambda dtype: False)
        layer = PackedLinear(weight, bias if with_bias else None)
    got = layer(x)
    assert got.dtype == dtype
    expected = reference.linear(x, weight, bias if with_bias else None)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.float(), expected, atol=tolerance, rtol=tolerance)


def test_input_may_be_a_view() -> None:
    x, weight = torch.randn(9, 40), torch.randn(7, 20)
    torch.testing.assert_close(PackedLinear(weight)(x[::2, 10:30]), x[::2, 10:30] @ weight.T)


def test_weight_may_be_a_view() -> None:
    x, weight = torch.randn(9, 5), torch.randn(5, 7).T
    torch.testing.assert_close(PackedLinear(weight)(x), x @ weight.T)


def test_the_plain_weight_is_not_kept() -> None:
    x, weight = torch.randn(3, 20), torch.randn(7, 20)
    layer, expected = PackedLinear(weight), x @ weight.T
    if not module.can_pack(torch.float32):
        pytest.skip("this torch cannot pack")
    weight.fill_(torch.nan)
    torch.testing.assert_close(layer(x), expected)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weight has shape \(3,\)"):
        PackedLinear(torch.zeros(3))
    with pytest.raises(ValueError, match=r"bias is torch.float32 \(4,\).*\(3,\)"):
        PackedLinear(torch.zeros(3, 5), torch.zeros(4))


def test_other_types_are_not_packed() -> None:
    assert not module.can_pack(torch.float64)
    weight = torch.randn(3, 4, dtype=torch.float64)
    assert torch.equal(PackedLinear(weight)(weight), torch.nn.functional.linear(weight, weight))
