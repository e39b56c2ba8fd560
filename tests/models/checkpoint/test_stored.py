"""Quantised checkpoints load as the numbers that they stand for, or are refused by name."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import FAMILIES, make_checkpoint
from support.quantized import (
    EXPERT_FORMATS,
    FILE,
    FORMATS,
    by_module,
    edit_config,
    fp8,
    quantize,
    stack_experts,
)
from torch import Tensor

from weft.errors import ModelError
from weft.models.checkpoint.locate import read_spec
from weft.models.checkpoint.weights import Weights
from weft.models.spec.layout import Layout
from weft.models.spec.spec import WeightSpec

Tensors = dict[str, Tensor]
WEIGHT = "model.layers.1.mlp.down_proj.weight"
STEM = WEIGHT.removesuffix("weight")
LAYOUTS = [
    Layout(),
    *(Layout(tp=2, rank=rank) for rank in range(2)),
    *(Layout(tp=4, rank=rank) for rank in (0, 3)),
    Layout(cp=2, rank=1),
    *(Layout(pp=2, rank=rank) for rank in range(2)),
]
EXPERT_LAYOUTS = [*LAYOUTS, *(Layout(ep=2, rank=rank) for rank in range(2))]
STACKED = {
    **EXPERT_FORMATS,
    "fp8": FORMATS["fp8, blocks"],
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints to quantise. Neither heads nor widths are multiples of all blocks."""
    few_experts: dict[str, dict[str, int]] = {
        "qwen3_moe": {"num_experts": 4},
        "bailing_moe": {"n_routed_experts": 4, "n_group": 2, "topk_group": 1},
    }
    return {
        family: make_checkpoint(
            tmp_path_factory.mktemp(family), family, **few_experts.get(family, {})
        )
        for family in ("llama", "phi3", "qwen3_moe", "bailing_moe", "granite")
    }


def check_equal(quantized: Path, plain: Path, layouts: list[Layout]) -> None:
    """Compare all that each rank reads from two checkpoints."""
    spec, plain_spec = read_spec(quantized), read_spec(plain)
    assert spec.quantization is not None
    assert spec.dtype == plain_spec.dtype
    for layout in layouts:
        weights = Weights(quantized, spec, layout=layout)
        expected = Weights(plain, plain_spec, layout=layout)
        for weight in layout.of_stage(plain_spec).weights:
            pairs = zip(weights.read_each(weight), expected.read_each(weight), strict=True)
            assert all(torch.equal(one, other) for one, other in pairs), (weight.name, layout)
        for weight in layout.of_stage(spec).products():
            form = weights.packed_form(weight)
            # Kernels read rows. A stack whose columns are outputs is dequantised.
            place, (stored, *_) = weights.sources(weight)
            is_turned = getattr(stored, "is_transposed", False) != place.transposed
            assert (form is None) == (weight.stored is None or is_turned), (weight.name, layout)
            for packed, values in zip(
                weights.read_packed(weight) if form else (), weights.read_each(weight), strict=False
            ):
                assert packed.form == form
                # A factor in the weight multiplies the scales, which rounds otherwise.
                tolerance = 0.0 if weight.scale == 1.0 else 1e-6
                torch.testing.assert_close(packed.dequantize(), values, rtol=tolerance, atol=0.0)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3_moe", "bailing_moe", "granite"])
@pytest.mark.sweep
def test_every_format_is_read_as_its_numbers(
    family: str, form: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    """Scales are in other files than the codes, and ranks' cuts are inside blocks."""
    layouts = EXPERT_LAYOUTS if family.endswith("_moe") else LAYOUTS
    check_equal(*quantize(sources[family], tmp_path, FORMATS[form], files=2), layouts)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sweep
def test_every_family_is_read_as_its_numbers(family: str, tmp_path: Path) -> None:
    """In one format: the family decides the tensors' names and places, the format their numbers."""
    source = make_checkpoint(tmp_path / "source", family)
    check_equal(*quantize(source, tmp_path, FORMATS["fp8, blocks"]), LAYOUTS)


@pytest.mark.parametrize("form", STACKED)
def test_stacked_experts_have_stacked_scales(form: str, tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 96, "hidden_size": 64}
    source = make_checkpoint(tmp_path / "source", "qwen3_moe", **sizes)
    separate = {weight.name: load(source, weight) for weight in read_spec(source).weights}
    stack_experts(source, transposed=form == "mxfp4")
    assert all(
        torch.equal(load(source, weight), separate[weight.name])
        for weight in read_spec(source).weights
    )
    check_equal(*quantize(source, tmp_path, STACKED[form]), EXPERT_LAYOUTS)


@pytest.mark.parametrize("form", [form for form in STACKED if form != "mxfp4"])
def test_granite_has_stacks_of_its_own(form: str, tmp_path: Path) -> None:
    sizes = {"intermediate_size": 96, "shared_intermediate_size": 96}
    source = make_checkpoint(tmp_path / "source", "granitemoeshared", **sizes)
    assert "model.layers.1.block_sparse_moe.input_linear.weight" in load_file(source / FILE)
    check_equal(*quantize(source, tmp_path, STACKED[form]), EXPERT_LAYOUTS)


def load(path: Path, weight: WeightSpec) -> Tensor:
    return torch.stack(list(Weights(path, read_spec(path)).read_each(weight)))


def test_scales_of_activations_and_caches_are_skipped(
    sources: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    form = FORMATS["compressed-tensors fp8, tensor"]
    quantized, _ = quantize(sources["llama"], tmp_path, form)
    with caplog.at_level(logging.INFO):
        Weights(quantized, read_spec(quantized))
    assert "skipped tensors: 28, 112 bytes: *.input_scale, *.k_scale" in caplog.text


def test_progress_counts_bytes_of_the_files(sources: dict[str, Path], tmp_path: Path) -> None:
    quantized, _ = quantize(sources["llama"], tmp_path, FORMATS["int4, groups"])
    counts: list[tuple[int, int]] = []
    spec = read_spec(quantized)
    weights = Weights(quantized, spec, lambda done, total: counts.append((done, total)))
    for weight in spec.weights:
        weights.read(weight)
    held = sum(tensor.nbytes for tensor in load_file(quantized / FILE).values())
    assert counts[-1] == (held, held)


def change_scale(value: float, end: str = "weight_scale_inv") -> Callable[[Tensors], Any]:
    def change(tensors: Tensors) -> None:
        tensors[STEM + end].view(-1)[-1] = value

    return change


BLOCKS, INT4, INT8 = "fp8, blocks", "int4, groups", "int8, channel, zero points"
MODELOPT, TORCHAO = "modelopt nvfp4", "torchao int8, groups"
WRONG: dict[str, tuple[str, Callable[[Tensors], Any], str]] = {
    "no scale": (
        BLOCKS,
        lambda tensors: tensors.pop(f"{WEIGHT}_scale_inv"),
        f"{FILE} has {WEIGHT}, but no safetensors file has {WEIGHT}_scale_inv",
    ),
    "no zero point": (
        INT8,
        lambda tensors: tensors.pop(f"{WEIGHT}_zero_point"),
        f"{FILE} has {WEIGHT}, but no safetensors file has {WEIGHT}_zero_point",
    ),
    "no numbers": (
        INT4,
        lambda tensors: tensors.pop(f"{WEIGHT}_packed"),
        f"{FILE} has {WEIGHT}_scale, {WEIGHT}_shape, which are part of a quantized weight",
    ),
    "numbers twice": (
        INT4,
        lambda tensors: tensors.update({WEIGHT: torch.zeros(64, 96)}),
        f"{FILE} has both {WEIGHT}_packed and {WEIGHT}",
    ),
    "scale's shape": (
        BLOCKS,
        lambda tensors: tensors.update({f"{WEIGHT}_scale_inv": torch.ones(1, 4)}),
        f"{FILE}: {WEIGHT}_scale_inv has shape (1, 4); by config.json it is (2, 4)",
    ),
    "scale's dtype": (
        BLOCKS,
        lambda tensors: tensors.update({f"{WEIGHT}_scale_inv": torch.ones(2, 4).int()}),
        f"{WEIGHT}_scale_inv is I32; supported is F32, BF16, F16, F8_E8M0",
    ),
    "zero point's shape": (
        "awq",
        lambda tensors: tensors.update({f"{STEM}qzeros": torch.zeros(6, 7, dtype=torch.int32)}),
        f"{STEM}qzeros has shape (6, 7); by config.json it is (6, 8)",
    ),
    "zero point's dtype": (
        INT8,
        lambda tensors: tensors.update({f"{WEIGHT}_zero_point": torch.zeros(64, 1)}),
        f"{WEIGHT}_zero_point is F32; supported is I8",
    ),
    "numbers' shape": (
        "gptq, 4 bits",
        lambda tensors: tensors.update({f"{STEM}qweight": torch.zeros(4, dtype=torch.int32)}),
        f"{STEM}qweight has shape (4,); no gptq matrix has this shape",
    ),
    "matrix's shape": (
        BLOCKS,
        lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT][:60].clone()}),
        f"{FILE}: {WEIGHT} has shape (60, 96); by config.json it is (64, 96)",
    ),
    "another format": (
        INT4,
        lambda tensors: tensors.update({f"{STEM}qweight": torch.zeros(8, 8, dtype=torch.int32)}),
        f"{STEM}qweight, which is part of a quantized weight; config.json has another",
    ),
    "float8 e5m2": (
        BLOCKS,
        lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT].to(torch.float8_e5m2)}),
        f"{WEIGHT}_scale_inv, which is part of a quantized weight",
    ),
    "zero": (BLOCKS, change_scale(0.0), f"{FILE}: {WEIGHT}_scale_inv holds 0.0; a scale is a fin"),
    "NaN": (BLOCKS, change_scale(float("nan")), f"{FILE}: {WEIGHT}_scale_inv holds nan; a scale"),
    "infinity": (
        INT4,
        change_scale(float("-inf"), "weight_scale"),
        f"{FILE}: {WEIGHT}_scale holds -inf; a scale is a finite number",
    ),
    "NaN in the numbers": (
        BLOCKS,
        change_scale(float("nan"), "weight"),
        f"{FILE}: {WEIGHT} holds nan; the file is damaged",
    ),
    "product too large": (
        BLOCKS,
        lambda tensors: (change_scale(3e38)(tensors), change_scale(448.0, "weight")(tensors)),
        f"{FILE}: {WEIGHT} holds inf; the file is damaged",
    ),
    "stored shape": (
        INT4,
        lambda tensors: tensors.update({f"{WEIGHT}_shape": torch.tensor([64, 90])}),
        f"{FILE}: {WEIGHT}_shape holds (64, 90); {WEIGHT}_packed and config.json say (64, 96)",
    ),
    "shape of the stored shape": (
        INT4,
        lambda tensors: tensors.update({f"{WEIGHT}_shape": torch.tensor(64)}),
        f"{FILE}: {WEIGHT}_shape has shape (); by config.json it is (2,)",
    ),
    "no rows": (
        BLOCKS,
        lambda tensors: tensors.update({WEIGHT: torch.zeros(0, 96).to(torch.float8_e4m3fn)}),
        f"{FILE}: {WEIGHT} has shape (0, 96); no fp8 matrix has this shape",
    ),
    "act-order": (
        "gptq, 4 bits",
        lambda tensors: tensors.update({f"{STEM}g_idx": tensors[f"{STEM}g_idx"].flip(0)}),
        f"{FILE}: {STEM}g_idx reorders the columns (act-order); weft supports desc_act false",
    ),
    "zero point of 0": (
        "gptq, 4 bits",
        lambda tensors: tensors[f"{STEM}qzeros"].fill_(-1),
        f"{FILE}: {STEM}qzeros holds a zero point of 0, which checkpoint_format 'gptq' cannot",
    ),
    "no scale, torchao": (
        TORCHAO,
        lambda tensors: tensors.pop(f"{STEM}_weight_scale"),
        f"{FILE} has {STEM}_weight_qdata, but no safetensors file has {STEM}_weight_scale",
    ),
    "NaN, torchao": (
        TORCHAO,
        change_scale(float("nan"), "_weight_scale"),
        f"{FILE}: {STEM}_weight_scale holds nan; a scale is a finite number other than 0",
    ),
    "zero point's shape, torchao": (
        TORCHAO,
        lambda tensors: tensors.update({f"{STEM}_weight_zero_point": torch.zeros(64, 1).char()}),
        f"{STEM}_weight_zero_point has shape (64, 1); by config.json it is (64, 6)",
    ),
    "scale of activations, torchao": (
        TORCHAO,
        lambda tensors: tensors.update({f"{STEM}_weight_act_pre_scale": torch.ones(96)}),
        f"{FILE} has {STEM}_weight_act_pre_scale, which is part of a quantized weight",
    ),
    "no global scale": (
        "nvfp4",
        lambda tensors: tensors.pop(f"{WEIGHT}_global_scale"),
        f"{FILE} has {WEIGHT}_packed, but no safetensors file has {WEIGHT}_global_scale",
    ),
    "no scale, nvfp4": (
        MODELOPT,
        lambda tensors: tensors.pop(f"{WEIGHT}_scale"),
        f"{FILE} has {WEIGHT}, but no safetensors file has {WEIGHT}_scale;",
    ),
    "no numbers, nvfp4": (
        MODELOPT,
        lambda tensors: tensors.pop(WEIGHT),
        f"{FILE} has {WEIGHT}_scale, {WEIGHT}_scale_2, which are part of a quantized weight",
    ),
    "global scale's shape": (
        MODELOPT,
        lambda tensors: tensors.update({f"{WEIGHT}_scale_2": torch.ones(64)}),
        f"{FILE}: {WEIGHT}_scale_2 has shape (64,); by config.json it is (1,)",
    ),
    "global scale's dtype": (
        "nvfp4",
        lambda tensors: tensors.update({f"{WEIGHT}_global_scale": torch.ones(1).bfloat16()}),
        f"{WEIGHT}_global_scale is BF16; supported is F32",
    ),
    "scale's shape, nvfp4": (
        "nvfp4",
        lambda tensors: tensors.update(
            {f"{WEIGHT}_scale": tensors[f"{WEIGHT}_scale"][:, :3].clone()}
        ),
        f"{FILE}: {WEIGHT}_scale has shape (64, 3); by config.json it is (64, 6)",
    ),
    "scale's dtype, nvfp4": (
        "nvfp4",
        lambda tensors: tensors.update({f"{WEIGHT}_scale": torch.ones(64, 6)}),
        f"{WEIGHT}_scale is F32; supported is F8_E4M3",
    ),
    "scale's dtype, mxfp4": (
        "mxfp4, packed",
        lambda tensors: tensors.update({f"{WEIGHT}_scale": torch.ones(64, 3)}),
        f"{WEIGHT}_scale is F32; supported is U8",
    ),
    "numbers' shape, nvfp4": (
        "nvfp4",
        lambda tensors: tensors.update(
            {f"{WEIGHT}_packed": tensors[f"{WEIGHT}_packed"][None].clone()}
        ),
        f"{WEIGHT}_packed has shape (1, 64, 48); no nvfp4 matrix has this shape",
    ),
    "global zero": (
        "nvfp4",
        change_scale(0.0, "weight_global_scale"),
        f"{FILE}: {WEIGHT}_global_scale holds 0.0; a scale is a finite number other than 0",
    ),
    "global NaN": (
        MODELOPT,
        change_scale(float("nan"), "weight_scale_2"),
        f"{FILE}: {WEIGHT}_scale_2 holds nan; a scale is a finite number other than 0",
    ),
    "NaN, nvfp4": (
        MODELOPT,
        change_scale(float("nan"), "weight_scale"),
        f"{FILE}: {WEIGHT}_scale holds nan; a scale is a finite number, so the file is damaged",
    ),
    "NaN, mxfp4": (
        "mxfp4, packed",
        change_scale(255, "weight_scale"),
        f"{FILE}: {WEIGHT}_scale holds nan; a scale is a finite number other than 0",
    ),
    "bias": (
        "gptq, 4 bits",
        lambda tensors: tensors[f"{STEM}bias"].fill_(1.0),
        f"{FILE}: {STEM}bias is not 0, but the model has no such bias",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_parts_are_refused_by_name(
    wrong: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    form, change, message = WRONG[wrong]
    quantized, _ = quantize(sources["llama"], tmp_path, FORMATS[form])
    tensors = load_file(quantized / FILE)
    change(tensors)
    save_file(tensors, quantized / FILE)
    with pytest.raises(ModelError, match=re.escape(message)):
        read_all(quantized)


def read_all(path: Path) -> None:
    spec = read_spec(path)
    weights = Weights(path, spec)
    for weight in spec.weights:
        for _ in weights.read_each(weight):
            pass


@pytest.mark.parametrize("form", ["nvfp4", MODELOPT])
def test_a_scale_of_tiny_numbers_may_be_zero(
    form: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    """Earlier releases of ModelOpt round such scales to zero."""
    quantized, plain = quantize(sources["llama"], tmp_path, FORMATS[form])
    for path, name in ((quantized, f"{WEIGHT}_scale"), (plain, WEIGHT)):
        tensors = load_file(path / FILE)
        tensors[name][-1, -16 if path == plain else -1 :] = 0
        save_file(tensors, path / FILE)
    check_equal(quantized, plain, LAYOUTS)


def test_an_ignored_module_may_not_be_quantized(sources: dict[str, Path], tmp_path: Path) -> None:
    quantized, _ = quantize(sources["llama"], tmp_path, FORMATS[BLOCKS])
    section = json.loads((quantized / "config.json").read_text())["quantization_config"]
    section["modules_to_not_convert"] = ["lm_head", "model.layers.1.mlp.down_proj"]
    edit_config(quantized, quantization_config=section)
    message = f"{WEIGHT} is F8_E4M3; by quantization_config in config.json, {WEIGHT} is not quant"
    with pytest.raises(ModelError, match=re.escape(message)):
        read_spec_and_weights(quantized)


def test_biases_of_a_text_model_may_be_extra(sources: dict[str, Path], tmp_path: Path) -> None:
    """AutoGPTQ writes a bias of zeros for each matrix, also under a prefix."""
    quantized, _ = quantize(sources["llama"], tmp_path, FORMATS["gptq, 4 bits"])
    tensors = load_file(quantized / FILE)
    assert not tensors[f"{STEM}bias"].any()
    renamed = {name.replace("model.", "model.language_model."): t for name, t in tensors.items()}
    save_file(renamed, quantized / FILE)
    read_all(quantized)


def read_spec_and_weights(path: Path) -> Weights:
    return Weights(path, read_spec(path))


def test_a_tied_head_may_not_be_quantized(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "llama")
    form = fp8(dict(FORMATS[BLOCKS].config, modules_to_not_convert=None), (40, 24))
    quantized, _ = quantize(source, tmp_path, form)
    tensors = load_file(quantized / FILE)
    packed, _ = form.pack("lm_head.weight", tensors.pop("lm_head.weight"))
    save_file(tensors | packed, quantized / FILE)
    read_all(quantized)
    edit_config(quantized, tie_word_embeddings=True)
    with pytest.raises(
        ModelError, match=r"lm_head\.weight is quantized, but tie_word_embeddings is true"
    ):
        read_spec_and_weights(quantized)


@pytest.mark.parametrize("rest", [INT4, "nvfp4"])
def test_groups_of_a_checkpoint_differ_by_name(
    rest: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    """Attention is fp8 and the rest is not, each with the part of the names that it targets.

    nvfp4's scales are float8, like the numbers of fp8.
    """
    one, other = FORMATS["compressed-tensors fp8, channel"], FORMATS[rest]
    sections = [json.loads(json.dumps(form.config)) for form in (one, other)]
    groups = {}
    for section, targets in zip(sections, (["re:.*self_attn.*"], ["Linear"]), strict=True):
        group = section["config_groups"]["group_0"]
        groups[targets[0]] = {**group, "targets": targets, "format": section["format"]}
    config = {**sections[0], "config_groups": groups, "format": "mixed-precision"}
    form = by_module(config, one, other)
    check_equal(*quantize(sources["llama"], tmp_path, form), LAYOUTS)
