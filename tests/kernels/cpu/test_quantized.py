"""Layers of a checkpoint's quantised matrices against the product, in float64, with its numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import compiled_kernels, int4_rows
from torch import Tensor
from torch.nn.functional import silu

from weft.kernels import reference
from weft.kernels.cpu import native
from weft.kernels.cpu.linear import NativeLinear, Norm, split_scales
from weft.kernels.cpu.moe import PackedExperts
from weft.kernels.cpu.quantized import make_packed_linear, takes
from weft.kernels.packed import Kind, PackedMatrix

HALF, BFLOAT = torch.float16, torch.bfloat16


def made(
    kind: Kind,
    rows: int,
    columns: int,
    *,
    block: tuple[int, int] = (1, 32),
    zeros: bool = False,
    dtype: torch.dtype = HALF,
) -> PackedMatrix:
    """Make random codes with scales that `dtype` has, over eight octaves."""
    width = columns // 2 if kind == "int4" else columns
    codes = torch.randint(0, 256, (rows, width), dtype=torch.uint8)
    grid = [-(-n // (size or n)) for n, size in zip((rows, columns), block, strict=True)]
    scales = torch.exp2(8 * torch.rand(grid) - 10).to(dtype).float() / columns**0.5
    points = torch.randint(-8, 9, grid).to(torch.int8) if zeros else None
    return PackedMatrix(kind, codes, scales.to(dtype).float(), points, block)


def layer(*parts: PackedMatrix, **options: Any) -> NativeLinear:
    with compiled_kernels(True):
        made = make_packed_linear(parts, **options)
    assert made is not None
    return made


def whole(*parts: PackedMatrix) -> Tensor:
    return torch.cat([part.dequantize().double() for part in parts])


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(0, 30) | st.sampled_from([97, 400]),
    heights=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    pairs=st.integers(1, 80) | st.sampled_from([320, 1045]),
    block=st.sampled_from([(1, 0), (1, 32), (5, 64), (0, 128), (16, 32)]),
    zeros=st.lists(st.booleans(), min_size=3, max_size=3),
    dtype=st.sampled_from([HALF, BFLOAT]),
    with_bias=st.booleans(),
    with_norm=st.booleans(),
    gated=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_int4_equals_the_product_with_the_checkpoints_numbers(
    rows: int,
    heights: list[int],
    pairs: int,
    block: tuple[int, int],
    zeros: list[bool],
    dtype: torch.dtype,
    with_bias: bool,
    with_norm: bool,
    gated: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    heights = heights * 2 if gated else heights
    parts = [
        made("int4", height, 2 * pairs, block=block, zeros=zeros[i % 3], dtype=dtype)
        for i, height in enumerate(heights)
    ]
    x = torch.randn(rows, 2 * pairs).bfloat16()
    bias = torch.randn(sum(heights)).bfloat16() if with_bias else None
    norm = Norm(torch.rand(2 * pairs).bfloat16(), 1e-5) if with_norm else None
    got = layer(*parts, bias=bias, gated=gated)(x, norm=norm)
    inputs = x if norm is None else reference.rms_norm(x, norm.weight, norm.eps).bfloat16()
    expected = int4_rows(inputs) @ whole(*parts).T
    if bias is not None:
        expected += bias.double()
    if gated:
        gate, up = expected.chunk(2, dim=-1)
        expected = silu(gate) * up
    # An input may round to the other neighbour: to int8 in a near-tie, to bfloat16 after a norm.
    norms = [float(each.norm(dim=1).max()) if len(each) else 0 for each in (inputs, whole(*parts))]
    step = norms[0] * norms[1] / (2 * pairs) / 5
    size = float(expected.abs().max()) if expected.numel() else 0
    torch.testing.assert_close(
        got.double(), expected, rtol=1 / 128, atol=step + (1e-2 if with_norm else 1e-4) * size
    )


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
def test_each_number_is_the_checkpoints(zeros: bool, dtype: torch.dtype) -> None:
    """One input at a time, so a wrong scale or zero point is not lost in a sum."""
    part = made("int4", 45, 102, zeros=zeros, dtype=dtype)
    got = layer(part)(torch.eye(102).bfloat16())
    torch.testing.assert_close(got.T, part.dequantize(BFLOAT), rtol=1 / 128, atol=0)


@pytest.mark.parametrize("block", [(1, 0), (0, 0), (7, 0)])
def test_int8_equals_the_product_with_the_checkpoints_numbers(block: tuple[int, int]) -> None:
    part = made("int8", 40, 70, block=block, dtype=torch.float32)
    got = layer(part)(torch.eye(70).bfloat16())
    assert torch.equal(got.T, part.dequantize(BFLOAT))


@pytest.mark.parametrize("zeros", [False, True])
def test_a_row_does_not_depend_on_its_company(zeros: bool) -> None:
    product = layer(made("int4", 70, 160, zeros=zeros))
    x = torch.randn(40, 160).bfloat16()
    together = product(x)
    for size in (1, 3, 17):
        for start in range(0, 40, size):
            part = slice(start, start + size)
            assert torch.equal(product(x[part]), together[part])


def test_experts_may_differ_in_their_zero_points() -> None:
    """Symmetric experts beside others: all take the kernels' sums of rows."""
    experts = [
        [made("int4", n, k, zeros=zeros) for n, k in ((40, 64), (40, 64), (64, 40))]
        for zeros in (False, True, False)
    ]
    gate, up, down = zip(*experts, strict=True)
    x = torch.randn(20, 64).bfloat16()
    ids = torch.stack([torch.randperm(3)[:2] for _ in range(20)]).int()
    weights = torch.rand(20, 2)

    def make(weight: Any, *, gated: bool = False) -> NativeLinear:
        return layer(*(weight if isinstance(weight, tuple) else (weight,)), gated=gated)

    with compiled_kernels(True):
        got = PackedExperts(gate, up, down, make)(x, ids, weights)
    plain = [torch.stack([each.dequantize() for each in part]) for part in (gate, up, down)]
    expected = reference.moe(x, *plain, ids, weights)
    assert (got.float() - expected).norm() < 0.02 * expected.norm()


def test_forms_that_the_kernels_do_not_have() -> None:
    assert takes(("int4", (1, 32), True))
    assert takes(("int4", (1, 0), False))
    assert takes(("int8", (1, 0), False))
    for form in (
        ("int4", (1, 16), False),
        ("int8", (1, 32), False),
        ("int8", (1, 0), True),
        ("fp8", (1, 0), False),
        ("fp4", (1, 32), False),
    ):
        assert not takes(form)  # type: ignore[arg-type]


def test_scales_that_float16_does_not_have_are_refused() -> None:
    part = made("int4", 4, 64, dtype=torch.float32)
    assert make_packed_linear([part]) is None
    mixed = [made("int4", 4, 64), made("int8", 4, 64, block=(1, 0))]
    assert make_packed_linear(mixed) is None


def test_scales_are_exact_within_their_range() -> None:
    """float16's own limits do not count: a row's largest scale is moved into them."""
    for power in (-126, -40, 0, 100):
        scale = torch.tensor([[1.5, 2.0**-27, 0.0], [1.9921875 * 2**-20, 1.0, -3.0]]) * 2.0**power
        halves, powers = split_scales(scale)
        assert torch.equal(halves.double() * powers.double()[:, None], scale.double())
    halves, powers = split_scales(torch.tensor([[torch.nan, 2.0], [0.0, 0.0]]))
    assert halves[0].isnan().tolist() == [True, False]
    assert halves[0, 1] * powers[0] == 2
    assert not halves[1].any()


def test_zero_points_take_a_byte_for_each_group() -> None:
    plain, zeros = (layer(made("int4", 64, 256, zeros=each)) for each in (False, True))
    assert plain.nbytes == 64 * (128 + 8 * 2)
    assert zeros.nbytes == 64 * (128 + 8 * 3)
    assert zeros.format is native.Format.INT4_ZEROS
