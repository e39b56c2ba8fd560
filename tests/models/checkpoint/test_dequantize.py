"""Dequantised parts of matrices equal those of the formats' own libraries."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.quantized import (
    FORMATS,
    Format,
    awq,
    gptq,
    integers,
    nvfp4,
    to_words,
)
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from weft.models.checkpoint import dequantize as module
from weft.models.checkpoint.dequantize import dequantize, scale_grid, zero_grid
from weft.models.checkpoint.packing import form_of, pack
from weft.models.spec.quantization import QuantSpec

ROWS, COLUMNS, GROUP = 48, 96, 32
WEIGHT = "m.weight"


def compute(
    spec: QuantSpec,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    part: tuple[slice, slice] = (slice(0, ROWS), slice(0, COLUMNS)),
    global_scale: Tensor | None = None,
) -> Tensor:
    """Dequantise a part of a [ROWS, COLUMNS] matrix."""
    height, width = (b or n for b, n in zip(spec.block, (ROWS, COLUMNS), strict=True))
    blocks = -(-ROWS // height), -(-COLUMNS // width)
    grids = scale_grid(spec, scales, blocks, global_scale), zero_grid(spec, zeros, blocks)
    return dequantize(spec, codes, *grids, *part)


def words(*shape: int) -> Tensor:
    """Return random int32 words."""
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def test_fp8_blocks_are_those_of_transformers() -> None:
    codes = (100 * torch.randn(ROWS, COLUMNS)).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 4)
    expected = Fp8Dequantize(None)._dequantize_one(codes, scales)
    assert torch.equal(compute(QuantSpec("fp8", (16, 24)), codes, scales, None), expected)


def test_mxfp4_is_that_of_transformers() -> None:
    blocks = torch.randint(0, 256, (1, ROWS, COLUMNS // 32, 16), dtype=torch.uint8)
    scales = torch.randint(0, 255, (1, ROWS, COLUMNS // 32), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].mT
    actual = compute(QuantSpec("mxfp4", (1, 32), 4), blocks[0], scales[0], None)
    assert torch.equal(actual, expected)


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1_BYTES = [16, 50, 84, 118, 152, 186, 220, 254]
"""The 16 numbers of fp4 e2m1 in order, as compressed-tensors 0.20 packs them."""


@pytest.mark.parametrize("form", ["nvfp4", "nvfp4_modelopt"])
def test_nvfp4_is_that_of_its_writers(form: Literal["nvfp4", "nvfp4_modelopt"]) -> None:
    """compressed-tensors 0.20 divides by the global scale, and ModelOpt 0.47 multiplies."""
    codes = torch.tensor([E2M1_BYTES], dtype=torch.uint8).repeat(ROWS, COLUMNS // 16)
    scales = (448 * torch.rand(ROWS, COLUMNS // 16)).to(torch.float8_e4m3fn)
    whole = torch.tensor([0.0037])
    spec = QuantSpec(form, (1, 16), 4)
    actual = compute(spec, codes, scales, None, global_scale=whole)
    wide = scales.float().repeat_interleave(16, 1)
    wide = wide / whole if form == "nvfp4" else wide * whole
    numbers = torch.tensor([*E2M1, *(-each for each in E2M1)])
    assert torch.equal(actual, numbers.repeat(ROWS, COLUMNS // 16) * wide)


def test_packed_mxfp4_is_that_of_transformers() -> None:
    blocks = torch.randint(0, 256, (ROWS, COLUMNS // 2), dtype=torch.uint8)
    scales = torch.randint(0, 255, (ROWS, COLUMNS // 32), dtype=torch.uint8)
    stacked = blocks.unflatten(1, (-1, 16))[None]
    expected = convert_moe_packed_tensors(stacked, scales[None], dtype=torch.float32)[0].mT
    actual = compute(QuantSpec("mxfp4_packed", (1, 32), 4), blocks, scales, None)
    assert torch.equal(actual, expected)


def test_awq_is_that_of_autoawq() -> None:
    """AutoAWQ 0.2.9 unpacks the word 0x76543210 to these columns."""
    codes = torch.full((COLUMNS, ROWS // 8), 0x76543210, dtype=torch.int32)
    zeros = torch.zeros(COLUMNS // GROUP, ROWS // 8, dtype=torch.int32)
    scales = torch.ones(COLUMNS // GROUP, ROWS)
    actual = compute(QuantSpec("awq", (1, GROUP), 4, zero_points=True), codes, scales, zeros)
    assert actual[:8, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert (actual == actual[:8, :1].repeat(ROWS // 8, COLUMNS)).all()


@pytest.mark.parametrize(("version", "more"), [("gptq", 1), ("gptq_v2", 0)])
@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_is_that_of_gptqmodel(version: str, more: int, bits: int) -> None:
    """The expected numbers are computed as in GPTQModel 7.7's `dequantize_weight`."""
    each, largest_code = 32 // bits, (1 << bits) - 1
    codes, scales = words(COLUMNS // each, ROWS), torch.rand(COLUMNS // GROUP, ROWS)
    points = torch.randint(1, largest_code + 1, (COLUMNS // GROUP, ROWS))
    shifts, columns = torch.arange(0, 32, bits), torch.arange(COLUMNS) // GROUP
    numbers = (codes[:, None] >> shifts[:, None] & largest_code).reshape(COLUMNS, ROWS)
    expected = scales[columns] * (numbers - points[columns])
    spec = QuantSpec(version, (1, GROUP), bits, zero_points=True)  # type: ignore[arg-type]
    assert torch.equal(compute(spec, codes, scales, to_words(points - more, bits)), expected.mT)


def test_words_are_those_of_compressed_tensors() -> None:
    """compressed-tensors 0.20 packs -8 to 7 into these words, in 4 bits and in 8."""
    numbers = torch.arange(-8, 8)
    four, eight = [1985229328, -19088744], [2071624056, 2138996092, -2088599168, -2021227132]
    for bits, expected in ((4, four), (8, eight)):
        assert to_words(numbers[None] + (1 << bits - 1), bits).tolist() == [expected]
        codes = torch.tensor([expected], dtype=torch.int32).repeat(ROWS, COLUMNS // 16)
        spec = QuantSpec("packed", (1, 0), bits)
        actual = compute(spec, codes, torch.ones(ROWS, 1), None)
        assert torch.equal(actual, numbers.float().repeat(ROWS, COLUMNS // 16))
    points = torch.arange(-8, 3)[:, None]
    assert to_words(points.t() + 8, 4).tolist() == [[1985229328, 2712]], "packed on its first axis"


CASES: dict[str, tuple[Format, QuantSpec]] = {
    "fp8, channel": (FORMATS["compressed-tensors fp8, channel"], QuantSpec("fp8", (1, 0))),
    "fp8, blocks": (FORMATS["fp8, blocks"], QuantSpec("fp8", (40, 24))),
    "int8": (integers({}, 8, (1, 0), zeros=True), QuantSpec("int8", (1, 0), 8, True)),
    "int8, groups": (integers({}, 8, (1, 20)), QuantSpec("int8", (1, 20), 8)),
    "packed": (
        integers({}, 4, (1, 24), zeros=True, packed=True),
        QuantSpec("packed", (1, 24), 4, True),
    ),
    "packed, 8 bits": (
        integers({}, 8, (1, 0), zeros=True, packed=True),
        QuantSpec("packed", (1, 0), 8, True),
    ),
    "awq": (awq({}, GROUP), QuantSpec("awq", (1, GROUP), 4, True)),
    "gptq": (gptq({}, 8, GROUP), QuantSpec("gptq", (1, GROUP), 8, True)),
    "nvfp4": (nvfp4({}, modelopt=False), QuantSpec("nvfp4", (1, 16), 4)),
    "nvfp4, modelopt": (nvfp4({}, modelopt=True), QuantSpec("nvfp4_modelopt", (1, 16), 4)),
}


@st.composite
def parts(draw: st.DrawFn) -> tuple[slice, slice]:
    """Draw rows and columns of a matrix, perhaps none."""
    return tuple(  # type: ignore[return-value]
        slice(*sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))))
        for size in (ROWS, COLUMNS)
    )


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=40, deadline=None)
@given(part=parts(), seed=st.integers(0, 9))
def test_a_part_may_begin_and_end_inside_a_block(
    case: str, part: tuple[slice, slice], seed: int
) -> None:
    form, spec = CASES[case]
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))
    tensors, expected = form.pack(WEIGHT, weight)
    by_end = {name.removeprefix("m.").removeprefix("weight"): t for name, t in tensors.items()}
    codes = next(by_end[end] for end in ("_packed", "qweight", "") if end in by_end)
    scales = next(by_end[end] for end in ("_scale", "_scale_inv", "scales") if end in by_end)
    zeros = next((by_end[end] for end in ("_zero_point", "qzeros") if end in by_end), None)
    ends = ("_global_scale", "_scale_2")
    global_scale = next((by_end[end] for end in ends if end in by_end), None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", 10 * COLUMNS)  # several chunks, not of equal size
        actual = compute(spec, codes, scales, zeros, part, global_scale)
    assert torch.equal(actual, expected[part])
    height, width = (b or n for b, n in zip(spec.block, (ROWS, COLUMNS), strict=True))
    blocks = -(-ROWS // height), -(-COLUMNS // width)
    if (form := form_of(spec, (ROWS, COLUMNS), *part)) is not None:
        grids = scale_grid(spec, scales, blocks, global_scale), zero_grid(spec, zeros, blocks)
        packed = pack(spec, codes, *grids, *part, form[1])
        assert packed.form == form
        assert all(tensor.is_contiguous() for tensor in packed.parts)
        assert packed.shape == actual.shape
        assert torch.equal(packed.dequantize(), actual)
