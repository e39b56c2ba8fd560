"""Rounded matrices are those of the package compressed-tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor

from weft.models.checkpoint import quantize as module
from weft.models.checkpoint.quantize import quantize, round_matrix
from weft.models.spec.schemes import SCHEMES, Scheme, quantization_config

ROWS, COLUMNS = 180, 192
FORMS = {
    **{name: scheme for name, scheme in SCHEMES.items() if not name.startswith("W4")},
    "W4A16": SCHEMES["W4A16"].with_groups(64),
    "W4A16_ASYM": SCHEMES["W4A16_ASYM"].with_groups(32),
    "W8A16, groups": SCHEMES["W8A16"].with_groups(32),
}


def matrix(dtype: torch.dtype = torch.float32) -> Tensor:
    """A matrix with rows of zeros, of tiny numbers, of one sign, and with a large number."""
    weight = 0.05 * torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    weight[4] *= 1e-4
    weight[5] = weight[5].abs() + 1
    weight[6, 7] = -60
    return weight.to(dtype)


def package(scheme: Scheme) -> tuple[Any, Any]:
    """Return the package's scheme and compressor."""
    config = QuantizationConfig.model_validate(quantization_config(scheme, []))
    return config.config_groups["group_0"], BaseCompressor.get_value_from_registry(config.format)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_the_package_decompresses_what_was_rounded(form: str, dtype: torch.dtype) -> None:
    scheme, weight = FORMS[form], matrix(dtype)
    arguments, compressor = package(scheme)
    tensors = quantize(scheme.spec, "m.weight", weight, dtype)
    state = {name.removeprefix("m."): tensor for name, tensor in tensors.items()}
    expected = compressor.decompress(state, arguments)["weight"]
    rounded = round_matrix(scheme.spec, weight, dtype)
    assert torch.equal(rounded.values().to(dtype), expected.to(dtype))
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    assert rounded.scales.dtype == dtype


@pytest.mark.parametrize("form", FORMS)
def test_the_package_compresses_to_the_same_tensors(form: str) -> None:
    scheme, weight = FORMS[form], matrix()
    if scheme.spec.zero_points:
        weight[3] = 1  # the package divides 0 by 0
    arguments, compressor = package(scheme)
    height, width = (b or n for b, n in zip(scheme.spec.block, weight.shape, strict=True))
    padded = torch.zeros(-(-ROWS // height) * height, -(-COLUMNS // width) * width)
    padded[:ROWS, :COLUMNS] = weight
    blocks = padded.view(-1, height, padded.shape[1] // width, width)
    scales, zeros = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), arguments.weights)
    state = {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}
    expected = compressor.compress(state, arguments)
    tensors = quantize(scheme.spec, "weight", weight, torch.float32)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8)), name


@pytest.mark.parametrize("form", FORMS)
def test_no_number_moves_by_more_than_a_step(form: str) -> None:
    """A step of fp8 is a sixteenth of the number, or the smallest one."""
    spec, weight = FORMS[form].spec, matrix()
    rounded = round_matrix(spec, weight, torch.bfloat16)
    step = round_matrix(spec, weight, torch.bfloat16)
    step.codes.copy_(torch.ones(ROWS, COLUMNS))
    if step.zeros is not None:
        step.zeros.zero_()
    error = (rounded.values() - weight).abs()
    if spec.format == "fp8":
        assert (error <= weight.abs() / 15 + step.values() * 2**-9).all()
    else:
        assert (error <= step.values()).all()
        assert (error <= 0.51 * step.values()).float().mean() > 0.95


@pytest.mark.parametrize("form", FORMS)
def test_chunks_change_nothing(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, weight = FORMS[form].spec, matrix(torch.bfloat16)
    whole = quantize(spec, "weight", weight, weight.dtype)
    monkeypatch.setattr(module, "CHUNK", 10 * COLUMNS)
    for name, tensor in quantize(spec, "weight", weight, weight.dtype).items():
        assert torch.equal(tensor.view(torch.uint8), whole[name].view(torch.uint8)), name
