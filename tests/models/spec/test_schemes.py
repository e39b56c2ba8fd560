"""Schemes are those of compressed-tensors, and weft reads what it says about them."""

from __future__ import annotations

from pathlib import Path

import pytest
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

from weft.models.spec.config_fields import Fields
from weft.models.spec.quantization import SECTION, read_quantization
from weft.models.spec.schemes import SCHEMES, quantization_config


@pytest.mark.parametrize("name", SCHEMES)
def test_a_section_is_that_of_compressed_tensors(name: str) -> None:
    scheme = SCHEMES[name]
    if name == "W8A16":
        scheme = scheme.with_groups(128)  # as in the preset
    section = quantization_config(scheme, ["lm_head"])
    config = QuantizationConfig.model_validate(section)
    preset = preset_name_to_scheme(name, ["Linear"])
    group = config.config_groups["group_0"]
    assert (group.weights, group.input_activations) == (preset.weights, preset.input_activations)
    assert (config.ignore, config.quantization_status) == (["lm_head"], "compressed")
    assert group.format == config.format
    written = config.model_dump(mode="json")
    assert written.pop("moe_sparsity_config") is None
    assert written == section


@pytest.mark.parametrize("name", SCHEMES)
def test_weft_reads_the_section(name: str) -> None:
    section = quantization_config(SCHEMES[name], ["model.layers.0.mlp.gate", "lm_head"])
    read = read_quantization(Fields({SECTION: section}, Path("config.json")))
    assert read is not None
    assert read.of("model.layers.0.mlp.experts.0.gate_proj") == SCHEMES[name].spec
    assert read.of("model.layers.0.mlp.gate") is None
    assert read.of("lm_head") is None


@pytest.mark.parametrize(
    ("name", "unit"), [("W4A16", 128), ("W8A16", 4), ("W8A8", 1), ("FP8_BLOCK", 1)]
)
def test_columns_are_whole_groups_and_words(name: str, unit: int) -> None:
    assert SCHEMES[name].unit == unit


def test_groups_have_another_size() -> None:
    scheme = SCHEMES["W8A16"].with_groups(32)
    assert (scheme.unit, scheme.spec.bits) == (32, 8)
