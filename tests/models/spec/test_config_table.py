"""The field table for config.json agrees with weft's own reading and with transformers."""

from __future__ import annotations

import inspect
import re
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from support.recorded_config import Recorder
from transformers import CONFIG_MAPPING, cache_utils, masking_utils, modeling_rope_utils
from transformers.integrations import moe

from weft.errors import ModelError
from weft.models.spec.build import build_spec
from weft.models.spec.config_table import (
    HARMLESS,
    HARMLESS_BY,
    ONLY,
    ONLY_BY,
    READ,
    READ_BY,
    READ_FOR_TEXT,
    ROPE_HARMLESS,
    ROPE_READ,
    ROPE_SECTIONS,
    WRAPPER,
    effect,
    only,
    rope_effect,
    unread,
)
from weft.models.spec.families.registry import ALL_FAMILIES, FAMILIES, WRAPPERS
from weft.models.spec.spec import ModelSpec

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_num_experts": 8,
    "moe_k": 2,
    "shared_expert_intermediate_size": 72,
}
ONE_EXPERT = {"llama4_text": {"num_experts_per_tok": 1}}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"use_sliding_window": True},
    {"mlp_only_layers": [0]},
    {"first_k_dense_replace": 1},
    {"layer_types": ["full_attention"] * 2, "sliding_window": None},
    {"num_experts": None, "dtype": "bfloat16"},
    {"moe_k": None},
    {"sliding_window": 9},
    {"rope_scaling": LLAMA3},
    {"rope_parameters": LLAMA3 | {"rope_type": None, "type": "llama3"}},
    {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}},
    {"rope_parameters": {"type": "dynamic", "alpha": 4.0}},
    {"moe_topk": 2},
    {"no_rope_layer_interval": 2, "interleave_moe_layer_step": 2},
    {"rope_parameters": LONGROPE | {"partial_rotary_factor": 1.0}},
)
ALONE = {family.model_type: name for name, family in FAMILIES.items()}
WRAPPED = {text.model_type: name for name, wrapper in WRAPPERS.items() for text in wrapper.texts}
TYPES = [family.model_type for family in ALL_FAMILIES]
families = pytest.mark.parametrize("model_type", TYPES)
# transformers has no class for Ling 2.0.
known_families = pytest.mark.parametrize("model_type", [t for t in TYPES if t != "bailing_moe"])


def sizes_of(model_type: str) -> dict[str, Any]:
    """Return sizes that a family takes."""
    return SIZES | ONE_EXPERT.get(model_type, {})


@families
def test_what_is_read_is_in_the_table_and_nothing_else(model_type: str) -> None:
    read: set[str] = set()
    of_rope: set[str] = set()
    for variant in VARIANTS:
        recorded = {name: Recorder(variant.get(name, {})) for name in ROPE_SECTIONS}
        sections: dict[str, dict[str, Any]] = dict(recorded)
        if (alone := ALONE.get(model_type)) and FAMILIES[alone].rope.by_kind:
            sections["rope_parameters"] = {"full_attention": recorded["rope_parameters"]}
        text = Recorder(sizes_of(model_type) | variant | sections)
        if alone:
            text["architectures"], config = [alone], text
        else:
            named = {"architectures": [WRAPPED[model_type]]}
            config = Recorder(named | {"text_config": text})
        with suppress(ModelError):  # a type of scaling that the family does not have
            build_spec(config, Path("config.json"))
        read |= (config.names | text.names) - WRAPPER
        of_rope |= set().union(*(section.names for section in recorded.values()))
    checked = {name for name in only(model_type) if effect(name, model_type) == "only"}
    assert read - checked == READ | READ_BY[model_type]
    yarn = {"beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"}
    llama3 = {"low_freq_factor", "high_freq_factor"}
    longrope = {"short_factor", "long_factor"}
    not_read = {
        "phi3": yarn | llama3 | {"original_max_position_embeddings"},
        "ministral3": llama3 | longrope,
    }.get(model_type, set())
    not_read |= set() if model_type.startswith("hunyuan") else {"alpha"}
    not_read |= set() if model_type == "ministral3" else {"llama_4_scaling_beta"}
    assert of_rope == ROPE_READ - not_read


def described(model_type: str, text: dict[str, Any]) -> ModelSpec:
    """Describe a model with a language model's fields."""
    if alone := ALONE.get(model_type):
        return build_spec(text | {"architectures": [alone]}, Path("config.json"))
    config = {"architectures": [WRAPPED[model_type]], "text_config": text}
    return build_spec(config, Path("config.json"))


def described_unless_missing(model_type: str, text: dict[str, Any]) -> ModelSpec | None:
    """Describe a model; return None if a field is refused because it is missing or null."""
    try:
        return described(model_type, text)
    except ModelError as error:
        if re.search("is missing|is null|as sliding_window says", str(error)):
            return None
        raise


@known_families
@pytest.mark.parametrize("given", [{}, {"use_sliding_window": True, "sliding_window": 9}])
def test_an_absent_field_means_what_transformers_means(
    model_type: str, given: dict[str, Any]
) -> None:
    """And so does null, where transformers takes it. A size may be refused as missing."""
    known = READ | READ_BY[model_type]
    sizes = {name: value for name, value in sizes_of(model_type).items() if name in known}
    sizes |= {"hidden_size": 512, "num_attention_heads": 32}  # 32 query heads fit all defaults
    window = known if model_type != "qwen2_moe" else ()  # which weft refuses there
    given = {name: value for name, value in given.items() if name in window}
    theirs = type(CONFIG_MAPPING[model_type]())
    whole = theirs(**sizes | given).to_dict()
    # A wrapper's own class says whether its text model is tied; some fields have two names.
    skipped = {"tie_word_embeddings"} if model_type in WRAPPED else set()
    skipped |= {"architectures", "model_type", "num_experts", "num_local_experts"}
    skipped |= set(theirs.attribute_map)
    compared = set()
    for name in known - skipped:
        rope = dict(whole["rope_parameters"] or {})
        rope.pop(name, None)
        rest = {other: whole[other] for other in whole if other not in (name, "architectures")}
        rest |= {} if name == "rope_parameters" else {"rope_parameters": rope}
        for config in (rest, rest | {name: None}):
            if (spec := described_unless_missing(model_type, config)) is None:
                continue
            with suppress(StrictDataclassError):
                assert spec == described(model_type, theirs(**config).to_dict()), name
                compared.add(name)
    eps = "layer_norm_eps" if "layer_norm_eps" in known else "rms_norm_eps"
    optional = {"head_dim", "num_key_value_heads", eps, "max_position_embeddings"}
    assert compared >= optional | {"rope_theta", "dtype"}


def source_of(*modules: ModuleType | type) -> str:
    """Return the sources without comments."""
    return re.sub(r"(?m)#.*$", "", "".join(map(inspect.getsource, modules)))


@known_families
def test_the_table_has_every_field_that_transformers_reads(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type]()
    configuration = import_module(type(config).__module__)
    modeling = import_module(configuration.__name__.replace("configuration_", "modeling_"))
    classes = [
        value
        for module in (modeling, configuration)
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__ and "Text" in name
    ]
    is_part = model_type.endswith("_text")  # of modules that also have image encoders
    own = classes if is_part else [modeling, configuration]
    source = source_of(*own, modeling_rope_utils, cache_utils, masking_utils, moe)
    used = set(re.findall(r"config\.([a-z_]+)\b(?!\()", source))
    used |= set(re.findall(r"getattr\(\w*config, \"([a-z_]+)\"", source))
    if not is_part:
        used |= set(re.findall(r"self\.([a-z_]+)\b(?!\()", source_of(configuration)))
    used -= {"json", "default_theta"}  # a file's name, and a class constant
    methods = {name for name in used if callable(getattr(config, name, None))}
    assert {"layer_norm_eps", "rms_norm_eps"} & used
    assert "attention_chunk_size" in used
    names = (set(config.to_dict()) | used) - methods
    assert {name for name in names if effect(name, model_type) == "unknown"} == set()


def test_the_table_has_every_field_of_rope() -> None:
    source = source_of(modeling_rope_utils)
    used = set(re.findall(r"rope_parameters(?:_dict)?(?:\.get\(|\[)\"([a-z_]+)\"", source))
    assert {"factor", "long_factor", "rope_theta"} <= used
    assert {name for name in used if rope_effect(name) == "unknown"} == set()


def test_names_of_composite_configs_are_refused() -> None:
    source = inspect.getsource(type(CONFIG_MAPPING["llama"]()).get_text_config)
    names = {"decoder", "generator", "text_config", "text_encoder"}
    assert all(f'"{name}"' in source for name in names)
    assert names <= set(ONLY)


@families
def test_each_field_has_one_effect(model_type: str) -> None:
    harmless = HARMLESS | HARMLESS_BY.get(model_type, frozenset())
    assert not (READ | READ_FOR_TEXT) & (harmless | set(ONLY))
    assert not READ_BY[model_type] & (READ | harmless)
    assert not HARMLESS & set(only(model_type))
    assert not (READ | READ_FOR_TEXT | READ_BY[model_type] | harmless) & set(
        ONLY_BY.get(model_type, {})
    )
    assert not ROPE_READ & ROPE_HARMLESS


def test_a_field_in_no_table_has_no_effect_and_is_named() -> None:
    config = SIZES | {"architectures": ["LlamaForCausalLM"]}
    more = {
        "attention_multiplier": 3.0,
        "norm_topk_prob": True,
        "rope_thetaa": 5.0,
        "unset": None,
        "use_cache": True,
        "rope_scaling": {"type": "linear", "factor": 2.0, "original_max_position_embedding": 9},
    }
    source = Path("config.json")
    scaled = config | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert build_spec(config | more, source) == build_spec(scaled, source)
    assert unread(config | more, "llama") == [
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "num_local_experts",
        "n_routed_experts",
        "n_shared_experts",
        "moe_num_experts",
        "moe_k",
        "shared_expert_intermediate_size",
        "attention_multiplier",
        "norm_topk_prob",
        "rope_thetaa (did you mean rope_theta?)",
        "rope_scaling.original_max_position_embedding (did you mean "
        "original_max_position_embeddings?)",
    ]


def test_a_misspelt_field_in_one_kind_of_layers_is_named() -> None:
    ropes = {"full_attention": {"rope_thetaa": 1.0}, "sliding_attention": {"rope_theta": 1.0}}
    assert unread({"rope_parameters": ropes}, "olmo3") == [
        "rope_parameters.full_attention.rope_thetaa (did you mean rope_theta?)"
    ]
