"""Models on CPUs keep a checkpoint's integers, and give what the numbers give."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.kernels import compiled_kernels
from support.quantized import AWQ, FORMATS, GPTQ, INT4, awq, compressed, gptq, integers, quantize
from support.ragged import run_ragged
from torch import Tensor
from transformers import AutoModelForCausalLM

from weft.kernels.packed import Kind
from weft.models.checkpoint.locate import read_spec
from weft.models.checkpoint.weights import Weights
from weft.models.spec.layout import Layout
from weft.models.spec.spec import WeightSpec
from weft.models.torch.cpu_model import CpuModel

LENGTHS = (19, 6)
ERROR = 0.09
"""Of a token's logits, relative to their norm. Rounding activations to bfloat16 costs up to 0.026,
and to int8, with int4 on AVX2, up to 0.058. With routers, the median is up to 0.037. The
dequantised model in bfloat16 has up to 0.039.
"""

GROUPS = compressed("pack-quantized", strategy="group", group_size=32, **INT4)
ZEROS = INT4 | {"symmetric": False}
POINTS = compressed("pack-quantized", strategy="group", group_size=64, **ZEROS)
FORMS = {
    "awq": awq({**AWQ, "group_size": 32}, 32),
    "awq, one group": FORMATS["awq, one group"],
    "gptq": gptq({**GPTQ, "bits": 4, "group_size": 32}, 4, 32),
    "gptq, version 2": FORMATS["gptq, version 2"],
    "int4, groups of 32": integers(GROUPS, 4, (1, 32), packed=True),
    "int4, groups of 64, zero points": integers(POINTS, 4, (1, 64), zeros=True, packed=True),
    "int4, channel": FORMATS["int4, channel"],
    "int8, channel": FORMATS["int8, channel"],
}


def requests() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in LENGTHS]


def loaded(path: Path, dtype: torch.dtype = torch.bfloat16, quantization: str = "none") -> CpuModel:
    spec = read_spec(path)
    return CpuModel(spec, Weights(path, spec), dtype, quantization=quantization)


def logits(model: CpuModel, path: Path, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    steps = [[(i, length) for i, length in enumerate(LENGTHS)]]
    return torch.cat(run_ragged(model, read_spec(path), requests(), steps, dtype=dtype)).float()


@pytest.fixture(params=["llama", "qwen3_moe"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    sizes = {"moe_intermediate_size": 64} if request.param == "qwen3_moe" else {}
    return make_checkpoint(tmp_path / "source", request.param, **sizes)


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_the_numbers(form: str, source: Path, tmp_path: Path) -> None:
    quantized, plain = quantize(source, tmp_path, FORMS[form])
    with compiled_kernels(True):
        model = loaded(quantized)
        got = logits(model, quantized)
    kind: Kind = "int8" if "int8" in form else "int4"
    spec = read_spec(quantized)
    assert model.quantized.dequantized == 0
    products = spec.products()
    rows = sum(weight.size // weight.shape[-1] for weight in products)
    # The plan also counts a factor for each row. These matrices fill their panels of 32 columns.
    assert model.quantized.kept[kind] + 4 * rows == native_bytes(products)
    oracle = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = torch.cat([oracle(torch.tensor([each])).logits[0] for each in requests()])
    errors = (got - expected).norm(dim=1) / expected.norm(dim=1)
    # A router's near-tie may fall the other way in bfloat16, and changes its row.
    routed = any(weight.has_experts for weight in products)
    assert (errors.median() if routed else errors.max()) < ERROR


def native_bytes(products: Iterable[WeightSpec]) -> int:
    """Return what the plan counts; each product must stay packed."""
    sizes = [weight.native_bytes(weight.shape) for weight in products]
    assert None not in sizes
    return sum(size for size in sizes if size is not None)


def test_the_plan_counts_packed_weights(source: Path, tmp_path: Path) -> None:
    quantized, plain = quantize(source, tmp_path, FORMS["awq"])
    spec, other = read_spec(quantized), read_spec(plain)
    products = spec.products()
    saved = other.weight_bytes("bfloat16") - spec.weight_bytes("bfloat16", packed="cpu")
    assert saved == sum(2 * weight.size for weight in products) - native_bytes(products)
    assert spec.weight_bytes("bfloat16") == other.weight_bytes("bfloat16")


@pytest.mark.parametrize("form", ["int4, groups", "fp8, tensor", "int8, channel, zero points"])
def test_other_forms_are_dequantized(form: str, source: Path, tmp_path: Path) -> None:
    quantized, plain = quantize(source, tmp_path, FORMATS[form])
    spec = read_spec(quantized)
    with compiled_kernels(True):
        model, other = loaded(quantized), loaded(plain)
        assert torch.equal(logits(model, quantized), logits(other, plain))
    assert not model.quantized.kept
    assert model.quantized.dequantized == sum(2 * weight.size for weight in spec.products())
    assert model.saved_bytes == other.saved_bytes
    assert spec.weight_bytes("bfloat16", packed="cpu") == spec.weight_bytes("bfloat16")
    (line,) = model.quantized.lines
    assert line.startswith("other quantized weights are dequantized, and take ")


def test_scales_that_the_kernels_do_not_have(tmp_path: Path) -> None:
    """The plan counts the packed form; `saved_bytes` takes that back."""
    source = make_checkpoint(tmp_path / "source", "llama")
    form = integers(GROUPS, 4, (1, 32), packed=True)
    quantized, _ = quantize(source, tmp_path, form)
    spec = read_spec(quantized)
    with compiled_kernels(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.models.torch.cpu_model.make_packed_linear", lambda *_, **__: None)
        model = loaded(quantized)
    products = spec.products()
    assert not model.quantized.kept
    assert model.quantized.dequantized == sum(2 * weight.size for weight in products)
    assert model.saved_bytes < 0


def test_scaled_weights_are_dequantized_as_the_plan_says(tmp_path: Path) -> None:
    """Granite's factor of o and down gives scales that float16 does not have."""
    source = make_checkpoint(tmp_path / "source", "granite")
    quantized, plain = quantize(source, tmp_path, FORMS["awq"])
    spec = read_spec(quantized)
    with compiled_kernels(True):
        model, other = loaded(quantized), loaded(plain)
    scaled = [weight for weight in spec.products() if weight.scale != 1.0]
    assert len(scaled) == 2 * len(spec.layers)
    assert {weight.native_bytes(weight.shape) for weight in scaled} == {None}
    assert model.quantized.dequantized == sum(2 * weight.size for weight in scaled)
    assert model.quantized.kept["int4"]
    assert 0 <= model.saved_bytes <= other.saved_bytes


def test_the_log_says_that_other_weights_are_rounded(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "llama")
    quantized, _ = quantize(source, tmp_path, FORMATS["fp8, tensor"])
    with compiled_kernels(True):
        model = loaded(quantized, quantization="int8")
    (line,) = model.quantized.lines
    assert line == "other quantized weights are dequantized, and rounded to int8"


def test_rounding_leaves_a_checkpoints_integers(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "llama")
    quantized, _ = quantize(source, tmp_path, FORMS["awq"])
    with compiled_kernels(True):
        model = loaded(quantized, quantization="int8")
    assert model.quantized.kept["int4"]
    assert not model.quantized.dequantized
    assert model.quantized.lines[0].startswith("int4 weights stay packed: ")


def test_without_compiled_kernels_weights_are_dequantized(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "llama")
    quantized, plain = quantize(source, tmp_path, FORMS["awq"])
    with compiled_kernels(False):
        model, other = loaded(quantized), loaded(plain)
        assert torch.equal(logits(model, quantized), logits(other, plain))
    assert model.quantized.dequantized


def test_a_rank_that_cuts_groups_dequantizes(tmp_path: Path) -> None:
    """Half of 64 columns has whole groups of 32, but half of 96 has not."""
    source = make_checkpoint(tmp_path / "source", "llama")
    quantized, _ = quantize(source, tmp_path, FORMS["awq"])
    local = Layout(tp=2).local(read_spec(quantized))
    native = {
        weight.name.rsplit(".", 2)[1]: weight.native_bytes(weight.shape)
        for weight in local.products()
    }
    assert native["down_proj"] is None
    assert native["o_proj"]
