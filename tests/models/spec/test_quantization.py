"""`quantization_config` describes the matrices' formats, or is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.quantized import (
    AWQ,
    EXPERT_FORMATS,
    FORMATS,
    FP8,
    GPTQ,
    MODELOPT,
    MODELOPT_MIXED,
    MXFP4,
    NVFP4,
    PER_ROW,
    compressed,
    torchao_config,
)
from support.recorded_config import Recorder
from transformers.quantizers.quantizers_utils import should_convert_module

from weft.errors import ModelError
from weft.models.spec.build import build_spec, unread_fields
from weft.models.spec.config_fields import Fields
from weft.models.spec.quantization import (
    METHODS,
    Quantization,
    QuantSpec,
    read_quantization,
)

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 320,
}
GROUP4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32}


def read(section: Any) -> Quantization | None:
    return read_quantization(Fields({"quantization_config": section}, Path("config.json")))


def spec_of(section: Any, name: str = "model.layers.0.mlp.up_proj") -> QuantSpec | None:
    quantization = read(section)
    assert quantization is not None
    return quantization.of(name)


@pytest.mark.parametrize(
    ("section", "spec"),
    [
        (FORMATS["fp8, blocks"].config, QuantSpec("fp8", (40, 24))),
        (FP8, QuantSpec("fp8", (0, 0))),
        (MODELOPT, QuantSpec("fp8", (0, 0))),
        (compressed("float-quantized", type="float", num_bits=8), QuantSpec("fp8", (0, 0))),
        (
            compressed("naive-quantized", type="float", strategy="channel"),
            QuantSpec("fp8", (1, 0)),
        ),
        (compressed("int-quantized", group_size=-1), QuantSpec("int8", (1, 0))),
        (
            compressed("int-quantized", strategy="channel", symmetric=False),
            QuantSpec("int8", (1, 0), zero_points=True),
        ),
        (compressed("pack-quantized", **GROUP4), QuantSpec("packed", (1, 32), 4)),
        (
            compressed("pack-quantized", num_bits=4, group_size=64, actorder="weight"),
            QuantSpec("packed", (1, 64), 4),
        ),
        (AWQ, QuantSpec("awq", (1, 128), 4, zero_points=True)),
        ({**AWQ, "version": "GEMM"}, QuantSpec("awq", (1, 128), 4, zero_points=True)),
        ({**GPTQ, "bits": 8}, QuantSpec("gptq", (1, 128), 8, zero_points=True)),
        (
            {**GPTQ, "bits": 4, "group_size": -1, "checkpoint_format": "gptq_v2"},
            QuantSpec("gptq_v2", (1, 0), 4, zero_points=True),
        ),
        (compressed("nvfp4-pack-quantized", **NVFP4), QuantSpec("nvfp4", (1, 16), 4)),
        (compressed("mxfp4-pack-quantized", **MXFP4), QuantSpec("mxfp4_packed", (1, 32), 4)),
        (FORMATS["torchao fp8, row"].config, QuantSpec("fp8_torchao", (1, 0))),
        (FORMATS["torchao fp8, tensor"].config, QuantSpec("fp8_torchao", (0, 0))),
        (FORMATS["torchao int8, groups"].config, QuantSpec("int8_torchao", (1, 16), 8, True)),
        ({**MODELOPT, "quant_algo": "NVFP4"}, QuantSpec("nvfp4_modelopt", (1, 16), 4)),
        ({**MODELOPT, "quant_algo": "W4A16_NVFP4"}, QuantSpec("nvfp4_modelopt", (1, 16), 4)),
    ],
)
def test_each_method_gives_its_format(section: dict[str, Any], spec: QuantSpec) -> None:
    assert spec_of(section) == spec


def test_mxfp4_is_the_format_of_experts() -> None:
    section = EXPERT_FORMATS["mxfp4"].config
    spec = QuantSpec("mxfp4", (1, 32), 4)
    assert spec_of(section, "model.layers.0.mlp.experts.gate_up_proj") == spec
    assert spec_of(section, "model.layers.0.self_attn.q_proj") is None


def test_a_model_without_the_section_is_not_quantized() -> None:
    assert read(None) is None
    assert build_spec(LLAMA, Path("config.json")).quantization is None


NAMES = [
    "lm_head",
    "model.layers.1.mlp.gate",
    "model.layers.1.mlp.gate_proj",
    "model.layers.11.mlp.gate",
    "model.layers.1.self_attn.q_proj",
    "model.visual.blocks.1.fc1",
]
PATTERNS = ["lm_head", "model.layers.1.mlp.gate", "layers.1", "model.layers.*gate", "fc1", "visual"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_modules_not_to_convert_are_those_of_transformers(pattern: str) -> None:
    section = {**FP8, "modules_to_not_convert": [pattern]}
    expected = [name for name in NAMES if should_convert_module(name, [pattern])]
    assert [name for name in NAMES if spec_of(section, name) is not None] == expected


@pytest.mark.parametrize(
    ("section", "ignored"),
    [
        (compressed("int-quantized", strategy="channel"), ["lm_head", "model.layers.1.mlp.gate"]),
        (MODELOPT, ["lm_head", "model.layers.1.mlp.gate"]),
        ({**MODELOPT, "ignore": None, "exclude_modules": ["model.layers.1"]}, "model.layers.1."),
        ({**GPTQ, "bits": 4, "dynamic": {r"-:.*visual.*": {}}}, "model.visual"),
        ({**FP8, "modules_to_not_convert": None, "ignored_layers": ["fc1"]}, NAMES[-1:]),
    ],
)
def test_other_lists_of_exceptions(section: dict[str, Any], ignored: list[str] | str) -> None:
    names = [name for name in NAMES if "11" not in name]
    if isinstance(ignored, str):
        ignored = [name for name in names if name.startswith(ignored)]
    assert [name for name in names if spec_of(section, name) is None] == ignored


def test_a_name_comes_before_a_class() -> None:
    section = compressed("pack-quantized", **GROUP4)
    other = {"type": "float", "num_bits": 8, "strategy": "channel"}
    section["config_groups"]["group_1"] = {
        "targets": ["re:.*down_proj", "model.layers.0.mlp.gate_proj"],
        "weights": other,
        "format": "float-quantized",
    }
    channel = QuantSpec("fp8", (1, 0))
    assert spec_of(section, "model.layers.1.mlp.down_proj") == channel
    assert spec_of(section, "model.layers.0.mlp.gate_proj") == channel
    assert spec_of(section, "model.layers.1.mlp.gate_proj") == QuantSpec("packed", (1, 32), 4)
    section["config_groups"]["group_0"]["targets"] = ["Conv1d"]
    assert spec_of(section, "model.layers.1.mlp.gate_proj") is None


def test_modelopt_names_layers_of_mixed_precision() -> None:
    """An experts' module stands for all of its matrices; other modules are not quantized."""
    layers = {
        "model.layers.1.self_attn.q_proj": {"quant_algo": "FP8"},
        "model.layers.1.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.1.mlp.experts.3": {"quant_algo": "FP8", "group_size": 0},
    }
    section = {**MODELOPT_MIXED, "quantized_layers": layers}
    nvfp4, fp8 = QuantSpec("nvfp4_modelopt", (1, 16), 4), QuantSpec("fp8", (0, 0))
    assert spec_of(section, "model.layers.1.self_attn.q_proj") == fp8
    assert spec_of(section, "model.layers.1.mlp.experts.7.up_proj") == nvfp4
    assert spec_of(section, "model.layers.1.mlp.experts.3.up_proj") == fp8
    assert spec_of(section, "model.layers.11.self_attn.q_proj") is None
    assert spec_of(section, "model.layers.1.mlp.experts_more") is None
    section["ignore"] = ["model.layers.1.mlp.experts.7*"]
    assert spec_of(section, "model.layers.1.mlp.experts.7.up_proj") is None


def mixed(**layer: Any) -> dict[str, Any]:
    return {**MODELOPT_MIXED, "quantized_layers": {"a.b": layer}}


def nvfp4(**fields: Any) -> dict[str, Any]:
    return compressed("nvfp4-pack-quantized", **NVFP4 | fields)


def torchao(name: str = "Float8WeightOnlyConfig", **fields: Any) -> dict[str, Any]:
    config = torchao_config(name, PER_ROW)
    config["_version"] = fields.pop("version", 2)
    config["_data"] |= fields
    return {"quant_method": "torchao", "quant_type": {"default": config}}


AO = ".quant_type.default."


def weights(**fields: Any) -> dict[str, Any]:
    return compressed("pack-quantized", **GROUP4 | fields)


IN_GROUP = ".config_groups.group_0."


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("fp8", " is 'fp8'; supported is an object"),
        ({}, ".quant_method is missing; supported is 'fp8' or 'compressed-tensors' or "),
        ({"quant_method": "bitsandbytes"}, ".quant_method is 'bitsandbytes'; supported is 'fp8'"),
        ({**FP8, "fmt": "e5m2"}, ".fmt is 'e5m2'; supported is 'e4m3'"),
        ({**FP8, "expert_dtype": "fp4"}, ".expert_dtype is 'fp4'; supported is 'fp8'"),
        ({**FP8, "activation_scheme": "x"}, ".activation_scheme is 'x'; supported is 'dynamic'"),
        ({**FP8, "weight_block_size": [128]}, ".weight_block_size is [128]; supported is [rows, c"),
        ({**FP8, "weight_block_size": [0, 8]}, ".weight_block_size is [0, 8]; supported is"),
        ({**FP8, "weight_block_size": [True, 8]}, ".weight_block_size is [true, 8]; supported is"),
        ({**FP8, "modules_to_not_convert": ["["]}, ".modules_to_not_convert has a wrong regular"),
        ({**FP8, "modules_to_not_convert": [1]}, ".modules_to_not_convert is [1]; supported is a"),
        ({**FP8, "modules_to_not_convert": "x"}, ".modules_to_not_convert is 'x'; supported is a"),
        ({"quant_method": "modelopt"}, ".quant_algo is missing; supported is 'FP8'"),
        ({**MODELOPT, "quant_algo": "NVFP4_AWQ"}, ".quant_algo is 'NVFP4_AWQ'; supported is 'FP8'"),
        ({**MODELOPT, "group_size": 32}, ".group_size is 32; supported is 0 or 16"),
        ({**MODELOPT, "quant_algo": "MIXED_PRECISION"}, ".quantized_layers is missing; supported"),
        (mixed(quant_algo="W4A8_AWQ"), ".quantized_layers.a.b.quant_algo is 'W4A8_AWQ'; supported"),
        (mixed(quant_algo="NVFP4", group_size=32), ".quantized_layers.a.b.group_size is 32; suppo"),
        (mixed(), ".quantized_layers.a.b.quant_algo is missing; supported is 'FP8' or 'NVFP4'"),
        ({**AWQ, "bits": 8}, ".bits is 8; supported is 4"),
        ({**AWQ, "version": "gemv"}, ".version is 'gemv'; supported is 'gemm' or 'GEMM'"),
        ({**AWQ, "zero_point": False}, ".zero_point is false; supported is true"),
        ({**AWQ, "group_size": 0}, ".group_size is 0; supported is a whole number of at least 1"),
        ({**GPTQ, "bits": 3}, ".bits is 3; supported is 4 or 8"),
        ({**GPTQ, "bits": 4, "desc_act": True}, ".desc_act is true; supported is false"),
        ({**GPTQ, "bits": 4, "checkpoint_format": "marlin"}, ".checkpoint_format is 'marlin'; "),
        ({**GPTQ, "bits": 4, "dynamic": {".*": {"bits": 8}}}, ".dynamic has '.*'; supported are"),
        (weights(actorder="group"), f"{IN_GROUP}weights.actorder is 'group'; supported is false"),
        (weights(actorder=True), f"{IN_GROUP}weights.actorder is true; supported is false"),
        (weights(dynamic=True), f"{IN_GROUP}weights.dynamic is true; supported is false"),
        (weights(num_bits=3), f"{IN_GROUP}weights.num_bits is 3; supported is 4 or 8"),
        (weights(strategy="tensor"), f"{IN_GROUP}weights.strategy is 'tensor'; supported is 'chan"),
        (weights(group_size=0), f"{IN_GROUP}weights.group_size is 0; supported is a whole number"),
        (weights(rotation=1), f"{IN_GROUP}weights.rotation is 1; supported is no such field"),
        (weights(type="float"), ".format is 'pack-quantized'; supported is not 'pack-quantized'"),
        (
            compressed("float-quantized", type="float", num_bits=4),
            f"{IN_GROUP}weights.num_bits is 4; supported is 8",
        ),
        (
            compressed("float-quantized", type="float", symmetric=False),
            f"{IN_GROUP}weights.symmetric is false; supported is true",
        ),
        (
            compressed("float-quantized", type="float", strategy="block", block_structure="2"),
            f"{IN_GROUP}weights.block_structure is '2'; supported is a list",
        ),
        (compressed("mxfp6-pack-quantized"), ".format is 'mxfp6-pack-quantized'; supported is 'fl"),
        (torchao("Int4WeightOnlyConfig"), f"{AO}_type is 'Int4WeightOnlyConfig'; supported is 'Fl"),
        (torchao(version=1), f"{AO}_version is 1; supported is 2"),
        (torchao(group_size=32), f"{AO}_data.group_size is 32; supported is null"),
        (torchao(weight_dtype={"_data": "float8_e5m2"}), f"{AO}_data.weight_dtype is {{'_data': '"),
        (torchao(packing_format={"_data": "SPARSE"}), f"{AO}_data.packing_format is {{'_data': 'S"),
        (torchao(granularity={"_type": "PerBlock"}), f"{AO}_data.granularity._type is 'PerBlock';"),
        (
            torchao(granularity=None),
            f"{AO}_data.granularity._type is missing; supported is 'PerRow",
        ),
        (
            {**torchao(), "quant_type": "int8_weight_only"},
            ".quant_type is 'int8_weight_only'; suppo",
        ),
        (
            {**torchao(), "include_input_output_embeddings": True},
            ".include_input_output_embeddings is true; supported is false",
        ),
        (nvfp4(type="int"), ".format is 'nvfp4-pack-quantized'; supported is not 'nvfp4-pack-quan"),
        (nvfp4(num_bits=8), f"{IN_GROUP}weights.num_bits is 8; supported is 4"),
        (nvfp4(group_size=32), f"{IN_GROUP}weights.group_size is 32; supported is 16"),
        (nvfp4(strategy="group"), f"{IN_GROUP}weights.strategy is 'group'; supported is 'tensor_"),
        (nvfp4(symmetric=False), f"{IN_GROUP}weights.symmetric is false; supported is true"),
        (
            compressed("mxfp4-pack-quantized", **MXFP4 | {"group_size": 16}),
            f"{IN_GROUP}weights.group_size is 16; supported is 32",
        ),
        (
            compressed("int-quantized") | {"quantization_status": "calibration"},
            ".quantization_status is 'calibration'; supported is 'compressed'",
        ),
        (
            compressed("int-quantized") | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            ".sparsity_config is {'format': 'sparse-24-bitmask'}; supported is none",
        ),
        (
            compressed("int-quantized") | {"transform_config": {"config_groups": {"R1": {}}}},
            ".transform_config is {'config_groups': {'R1': {}}}; supported is none",
        ),
        (compressed("int-quantized") | {"config_groups": {}}, ".config_groups is {}; supported is"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(section: Any, message: str) -> None:
    with pytest.raises(ModelError) as error:
        build_spec(LLAMA | {"quantization_config": section}, Path("config.json"))
    assert f"config.json: quantization_config{message}" in str(error.value)


def test_unknown_fields_are_named() -> None:
    section = {**AWQ, "do_fuse": False, "colour": "red", "shade": None}
    config = LLAMA | {"quantization_config": section}
    assert build_spec(config, Path("config.json")).quantization is not None
    assert unread_fields(config) == ["quantization_config.colour"]


@pytest.mark.parametrize("method", METHODS)
def test_the_table_has_what_is_read_and_nothing_else(method: str) -> None:
    sections = [form.config for form in (*FORMATS.values(), *EXPERT_FORMATS.values())]
    sections += [{"quant_method": "fp8"}, {**MODELOPT, "ignore": None}]
    read_names: set[str] = set()
    for section in sections:
        if section["quant_method"] == method:
            recorder = Recorder(section)
            read(recorder)
            read_names |= recorder.names
    table = METHODS[method]
    assert read_names == {"quant_method", *table.fields, *table.only}


@pytest.mark.parametrize("method", METHODS)
def test_each_field_has_one_effect(method: str) -> None:
    fields, only, harmless = (
        set(each)
        for each in (METHODS[method].fields, METHODS[method].only, METHODS[method].harmless)
    )
    assert len(fields | only | harmless) == len(fields) + len(only) + len(harmless)
