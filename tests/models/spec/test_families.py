"""config.json -> ModelSpec: both generations of config, and every refusal."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from weft.errors import ModelError
from weft.models.spec.build import build_spec
from weft.models.spec.families.registry import ARCHITECTURES
from weft.models.spec.spec import MlpSpec, ModelSpec, MoeSpec, NormSpec, RopeSpec

SOURCE = Path("config.json")

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
QWEN3_MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
LLAMA4 = {
    "architectures": ["Llama4ForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "no_rope_layer_interval": 2,
}
LING = "BailingMoeV2ForCausalLM"
"""An architecture without a class in transformers."""
EACH = QWEN3_MOE | {
    "head_dim": 16,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_num_experts": 8,
    "moe_k": 2,
    "shared_expert_intermediate_size": 72,
}
"""Sizes for each family."""


def config_of(architecture: str) -> dict[str, Any]:
    """Return a config.json of an architecture."""
    config = EACH | {"architectures": [architecture]}
    if architecture == "Ministral3ForCausalLM":
        yarn = {"rope_type": "yarn", "factor": 16.0, "llama_4_scaling_beta": 0.1}
        config |= {"rope_parameters": yarn}
    if architecture.startswith("Llama4"):
        config |= {"num_experts_per_tok": 1}
    return config


def ropes_of(config: dict[str, Any]) -> set[RopeSpec]:
    """Return the rotary embeddings of a model's layers."""
    return {layer.attention.rope for layer in build_spec(config, SOURCE).layers}


def norms_of(spec: ModelSpec) -> Iterator[NormSpec]:
    """Yield a model's norms."""
    yield spec.norm
    for layer in spec.layers:
        norms = (layer.attention_norm, layer.attention_output_norm)
        norms += (layer.feed_forward_norm, layer.feed_forward_output_norm)
        norms += (layer.attention.q_norm, layer.attention.k_norm)
        yield from filter(None, norms)


def test_sizes_come_from_the_config() -> None:
    spec = build_spec(LLAMA, SOURCE)
    assert (spec.head_dim, spec.num_heads, spec.num_kv_heads) == (16, 4, 2)
    assert spec.max_model_len == 512
    assert spec.kv_bytes_per_token() == 2 * 2 * 2 * 16 * 2
    per_layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 96 + 2 * 64
    assert spec.parameters == 2 * 320 * 64 + 2 * per_layer + 64
    assert spec.weight_bytes() == 2 * spec.parameters
    assert spec.weight_bytes("float32") == 4 * spec.parameters


def test_absent_fields_have_the_defaults_of_the_published_code() -> None:
    """Those in configuration_bailing_moe_v2.py, which is not in transformers."""
    config = config_of(LING) | {"num_experts": 16, "num_hidden_layers": 3}
    del config["max_position_embeddings"], config["rms_norm_eps"]
    spec = build_spec(config, SOURCE)
    assert (spec.max_model_len, {norm.eps for norm in norms_of(spec)}) == (32_768, {1e-6})
    assert spec.lm_head is not None
    assert ropes_of(config) == {RopeSpec(600_000.0, 16)}
    assert spec.layers[0].attention.q_norm is not None
    assert spec.layers[0].attention.q.bias is None
    dense, moe, _ = (layer.feed_forward for layer in spec.layers)
    assert isinstance(dense, MlpSpec)
    assert isinstance(moe, MoeSpec)
    assert (moe.router.groups, moe.router.top_groups, moe.router.scale) == (8, 4, 1.0)
    assert moe.shared is not None
    assert moe.shared.gate.weight.shape == (48, 64)


def test_ling_rotates_a_part_by_either_field() -> None:
    config = config_of(LING)
    for fields in (
        {"rotary_dim": 8},
        {"partial_rotary_factor": 0.5},
        {"partial_rotary_factor": 0.5, "rotary_dim": 4},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"model_type": "bailing_moe_v2", "rotary_dim": 8},
    ):
        assert ropes_of(config | fields) == {RopeSpec(600_000.0, 8)}


@pytest.mark.parametrize("tied", [True, False])
def test_int8_halves_the_matrices_but_an_untied_embedding(tied: bool) -> None:
    spec = build_spec(LLAMA | {"tie_word_embeddings": tied}, SOURCE)
    matrices = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 96) + 320 * 64
    rows = 2 * (64 + 32 + 32 + 64 + 96 + 96 + 64) + 320
    norms = 5 * 64
    kept = 0 if tied else 320 * 64
    assert spec.weight_bytes("auto", "int8") == matrices + 2 * (rows + norms + kept)


def test_int4_takes_four_bits_and_a_scale_for_each_group() -> None:
    """Also where the last group is not full: 48 inputs have two groups."""
    spec = build_spec(LLAMA | {"intermediate_size": 48, "tie_word_embeddings": True}, SOURCE)
    rows = 2 * (64 + 32 + 32 + 64 + 48 + 48 + 64) + 320  # all with two groups
    assert spec.weight_bytes("auto", "int4") == rows * 2 * (16 + 2) + 2 * 5 * 64


def test_int8_leaves_routers_and_norms_as_they_are() -> None:
    spec = build_spec(QWEN3_MOE, SOURCE)
    moe = spec.layers[0].feed_forward
    assert isinstance(moe, MoeSpec)
    experts = moe.gate.shape[0]
    assert experts < 100
    plain, int8 = spec.weight_bytes(), spec.weight_bytes("auto", "int8")
    matrices = sum(w.size for w in spec.weights if len(w.shape) > 1) - spec.embedding.size
    matrices -= len(spec.layers) * moe.router.weight.size
    scales = sum(w.size // w.shape[-1] for w in spec.weights if len(w.shape) > 1)
    scales -= spec.vocab_size + len(spec.layers) * experts
    assert plain - int8 == matrices - 2 * scales


def test_a_tied_embedding_counts_once() -> None:
    untied = build_spec(LLAMA, SOURCE)
    tied = build_spec(LLAMA | {"tie_word_embeddings": True}, SOURCE)
    assert tied.lm_head is None
    assert untied.parameters - tied.parameters == 320 * 64


def test_kv_heads_default_to_the_query_heads() -> None:
    config = LLAMA | {"num_key_value_heads": None}
    assert build_spec(config, SOURCE).num_kv_heads == 4


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        ),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 128,
                },
            },
            {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        ),
    ],
)
def test_both_generations_of_config_mean_the_same(old: dict[str, Any], new: dict[str, Any]) -> None:
    of_new = {key: value for key, value in LLAMA.items() if key != "torch_dtype"}
    of_new |= {"dtype": "bfloat16", "rope_parameters": new}
    assert build_spec(LLAMA | old, SOURCE) == build_spec(of_new, SOURCE)


_ROPE = st.none() | st.fixed_dictionaries(
    {
        "factor": st.just(4.0),
        "low_freq_factor": st.just(1.0),
        "high_freq_factor": st.just(4.0),
    },
    optional={
        "rope_type": st.sampled_from(["default", "linear", "llama3"]),
        "type": st.sampled_from(["linear", "llama3"]),
        "rope_theta": st.sampled_from([500.0, 2e5]),
        "original_max_position_embeddings": st.sampled_from([16, 32]),
    },
)


@settings(deadline=None)
@given(
    scaling=_ROPE,
    parameters=_ROPE,
    beside=st.fixed_dictionaries(
        {},
        optional={
            "rope_theta": st.sampled_from([700.0, 3e5]),
            "original_max_position_embeddings": st.sampled_from([24, 48]),
        },
    ),
)
def test_rope_is_what_transformers_takes(
    scaling: dict[str, Any] | None, parameters: dict[str, Any] | None, beside: dict[str, Any]
) -> None:
    import transformers

    config = LLAMA | beside | {"rope_scaling": scaling, "rope_parameters": parameters}
    (rope,) = ropes_of(config)
    theirs = transformers.LlamaConfig.from_dict(copy.deepcopy(config))
    theirs.standardize_rope_params()  # as the model does before it reads them
    expected = theirs.rope_parameters
    kind = "default" if rope.scaling == "none" else rope.scaling
    assert (rope.theta, kind) == (expected["rope_theta"], expected["rope_type"])
    if kind != "default":
        assert rope.factor == expected["factor"]
    if rope.scaling == "llama3":
        assert rope.original_max_len == expected["original_max_position_embeddings"]


@settings(deadline=None, max_examples=200)
@given(
    kind=st.sampled_from(["default", "linear", "llama3", "yarn", "longrope"]),
    part=st.sampled_from([0.25, 0.5, 0.75, 1.0]),
    theta=st.sampled_from([500.0, 1e4, 1e6]),
    factor=st.sampled_from([None, 1.0, 1.5, 8.0]),
    original=st.sampled_from([64, 300, 512]),
    more=st.fixed_dictionaries(
        {},
        optional={
            "beta_fast": st.sampled_from([8, 16.0, 32]),
            "beta_slow": st.sampled_from([1, 2.5]),
            "mscale": st.sampled_from([0.7, 1.0]),
            "mscale_all_dim": st.sampled_from([0.5, 1.0]),
            "attention_factor": st.sampled_from([0.5, 1.3]),
            "truncate": st.booleans(),
        },
    ),
    high=st.sampled_from([1.0, 4.0]),
    long=st.booleans(),
)
def test_frequencies_are_those_of_transformers(
    kind: str,
    part: float,
    theta: float,
    factor: float | None,
    original: int,
    more: dict[str, Any],
    high: float,
    long: bool,
) -> None:
    """Phi-3 reads longrope in its own way; GLM reads all other kinds."""
    pairs = int(16 * part) // 2
    if factor is None and kind in ("linear", "llama3"):
        factor = 2.0
    parameters = {"rope_type": kind, "rope_theta": theta, "factor": factor} | more
    parameters |= {"partial_rotary_factor": part, "original_max_position_embeddings": original}
    parameters |= {"low_freq_factor": 1.0, "high_freq_factor": high}
    parameters |= {"short_factor": [1.5] * pairs, "long_factor": [4.0] * pairs}
    name, model_type = "GlmForCausalLM", "glm"
    if kind == "longrope":
        name, model_type = "Phi3ForCausalLM", "phi3"
    beside = {"original_max_position_embeddings": original} if kind == "longrope" else {}
    config = LLAMA | {"architectures": [name], "rope_parameters": parameters} | beside
    config["head_dim"] = 16
    theirs = CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(config))
    theirs.standardize_rope_params()
    seq_len = original + 1 if long else original
    if kind == "default":
        expected, amplitude = theta ** (-torch.arange(0, 2 * pairs, 2) / (2 * pairs)), 1.0
    else:
        expected, amplitude = ROPE_INIT_FUNCTIONS[kind](theirs, seq_len=seq_len)
    (rope,) = {layer.attention.rope for layer in build_spec(config, SOURCE).layers}
    rope = replace(rope, max_len=seq_len)
    inverse, amplitudes = rope.inverse_frequencies(16), rope.amplitudes(16)
    torch.testing.assert_close(torch.from_numpy(inverse)[:pairs], expected, rtol=1e-5, atol=0)
    assert not inverse[pairs:].any()
    ours = [1.0] * 8 if amplitudes is None else amplitudes.tolist()
    assert ours == pytest.approx([amplitude] * pairs + [1.0] * (8 - pairs))


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(0, 20), st.booleans())
def test_the_order_of_a_head_pairs_what_the_checkpoint_pairs(
    half: int, rotated: int, neighbours: bool
) -> None:
    rope = RopeSpec(1e4, 2 * min(half, rotated), neighbours=neighbours)
    order = rope.head_order(2 * half) or tuple(range(2 * half))
    assert sorted(order) == list(range(2 * half))
    pairs = set(zip(order[:half], order[half:], strict=True))
    for i in range(rope.dim // 2):
        wanted = (2 * i, 2 * i + 1) if neighbours else (i, i + rope.dim // 2)
        assert (order[i], order[i + half]) == wanted
        assert wanted in pairs


def test_theta_defaults_to_that_of_the_family() -> None:
    assert ropes_of(LLAMA) == {RopeSpec(10_000.0, 16)}
    mixtral = LLAMA | {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    assert ropes_of(mixtral) == {RopeSpec(1_000_000.0, 16)}


def test_mistral_has_a_window_unless_the_config_says_null() -> None:
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"]}
    windows = [
        build_spec(config, SOURCE).layers[0].attention.sliding_window
        for config in (mistral, mistral | {"sliding_window": None}, mistral | {"sliding_window": 7})
    ]
    assert windows == [4096, None, 7]


def test_layer_types_of_mistral_must_agree_with_its_window() -> None:
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": 7}
    sliding = build_spec(mistral | {"layer_types": ["sliding_attention"] * 2}, SOURCE)
    assert sliding == build_spec(mistral, SOURCE)
    with pytest.raises(ModelError, match="supported is sliding_attention in layer 1"):
        build_spec(mistral | {"layer_types": ["sliding_attention", "full_attention"]}, SOURCE)


def test_qwen_windows_need_the_flag() -> None:
    qwen2 = LLAMA | {
        "architectures": ["Qwen2ForCausalLM"],
        "sliding_window": 7,
        "max_window_layers": 1,
    }
    off, on = (
        [layer.attention.sliding_window for layer in build_spec(config, SOURCE).layers]
        for config in (qwen2, qwen2 | {"use_sliding_window": True})
    )
    assert off == [None, None]
    assert on == [None, 7]


def test_experts_are_placed_by_step_and_list() -> None:
    def kinds(**fields: Any) -> list[type]:
        config = QWEN3_MOE | {"num_hidden_layers": 4} | fields
        return [type(layer.feed_forward) for layer in build_spec(config, SOURCE).layers]

    assert kinds() == [MoeSpec] * 4
    assert kinds(mlp_only_layers=[2]) == [MoeSpec, MoeSpec, MlpSpec, MoeSpec]
    assert kinds(decoder_sparse_step=2) == [MlpSpec, MoeSpec] * 2


def test_the_experts_of_a_weight_are_tensors_of_their_own() -> None:
    moe = build_spec(QWEN3_MOE, SOURCE).layers[1].feed_forward
    assert isinstance(moe, MoeSpec)
    assert moe.down.shape == (8, 64, 48)
    assert moe.down.axes == ("expert", "hidden", "moe_intermediate")
    usual, *_ = moe.down.places
    assert usual.shape == (64, 48)
    assert usual.tensors(8)[7] == "model.layers.1.mlp.experts.7.down_proj.weight"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures is ['GPT2LMHeadModel']"),
        ({"architectures": []}, "architectures is []"),
        ({"architectures": None}, "architectures is null"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures is [['LlamaForCausalLM']]"),
        ({"model_type": "granite"}, "model_type is 'granite'; supported is 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported is 'silu' or 'swish'"),
        ({"sliding_window": 7}, "sliding_window is 7; supported is no such field"),
        ({"attention_chunk_size": 8}, "attention_chunk_size is 8; supported is no such field"),
        ({"text_config": {}}, "text_config is {}; supported is no such field"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries; it must have one for e"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types is ['sliding_attention', 'slid"),
        ({"is_causal": False}, "is_causal is false; supported is true"),
        ({"is_causal": 1}, "is_causal is 1; supported is true"),
        ({"per_layer_config": {"0": {}}}, "per_layer_config is {'0': {}}; supported is no such"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; supported is at most"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64'; supported is a whole number"),
        ({"hidden_size": True}, "hidden_size is true"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; supported is a divisor of"),
        ({"head_dim": 15}, "head_dim is 15; supported is an even number"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps is 'tiny'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype is 'float8_e4m3fn'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; supported is true or"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor is 0.5; supported is 1 or 1.0",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; supported is an object"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_slow": 40}},
            "rope_scaling.beta_slow is 40; supported is at most beta_fast, 32",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type is 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_theta": 10**400}, "rope_theta is 1"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 1}, "rope_theta is 1.0"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_slow": 1e-320}},
            "rope_scaling.beta_slow is 1e-320; supported is at least 1e-06",
        ),
        (
            {
                "rope_scaling": {"type": "longrope", "factor": 2.0},
                "original_max_position_embeddings": 1,
            },
            "original_max_position_embeddings is 1; supported is at least 2",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}},
            "rope_parameters.short_factor is [1.0]; supported is a list with 8 numbers above 0",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "rope_parameters.full_attention",
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.5,
                    "high_freq_factor": 4.0,
                }
            },
            "rope_scaling.low_freq_factor is 4.5; supported is at most high_freq_factor",
        ),
        (
            LLAMA4 | {"num_experts_per_tok": 2},
            "num_experts_per_tok is 2; supported is 1, because the router scales the expert",
        ),
        (
            LLAMA4 | {"attention_chunk_size": None},
            "attention_chunk_size is null; supported is a number, because some layers have chunks",
        ),
        (
            LLAMA4 | {"layer_types": ["chunked_attention", "sliding_attention"]},
            "layer_types is ['chunked_attention', 'sliding_attention']; supported is full_atten",
        ),
        (LLAMA4 | {"attn_temperature_tuning": "4"}, "attn_temperature_tuning is '4'; supported is"),
        (LLAMA4 | {"moe_layers": [2]}, "moe_layers is [2]; supported is numbers of layers, from 0"),
        (LLAMA4 | {"no_rope_layers": [1]}, "no_rope_layers is [1]; supported is 0 or 1 for each"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"^config.json: {re.escape(message)}"):
        build_spec(LLAMA | fields, SOURCE)


@pytest.mark.parametrize("name", ["architectures", "hidden_size", "intermediate_size"])
def test_a_misspelt_field_is_found(name: str) -> None:
    others = {other: value for other, value in LLAMA.items() if other != name}
    with pytest.raises(ModelError, match=f"^config.json: {name} is missing($|; supported)"):
        build_spec(others | {f"moe_{name}": 64}, SOURCE)
    misspelt = f"{name} is missing; {name[1:]} is there: did you mean {name}\\?"
    with pytest.raises(ModelError, match=misspelt):
        build_spec(others | {name[1:]: LLAMA[name]}, SOURCE)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": None}, "num_experts is missing"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9; supported is at most the number"),
        ({"num_local_experts": 9}, "num_local_experts is 9; supported is the same as num_experts,"),
        ({"mlp_only_layers": 3}, "mlp_only_layers is 3; supported is a list"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
    ],
)
def test_experts_are_checked(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        build_spec(QWEN3_MOE | fields, SOURCE)


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (["full_attention"], "layer_types has 1 entries; it must have one for each of the 2 lay"),
        (["full_attention", "linear_attention"], "layer_types is"),
        ([["a"], ["b"]], "layer_types is"),
    ],
)
@pytest.mark.parametrize("sliding", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_layer_types_are_checked(
    architecture: str, sliding: bool, kinds: list[Any], message: str
) -> None:
    flag = {} if architecture == "Qwen2MoeForCausalLM" else {"use_sliding_window": sliding}
    config = config_of(architecture) | flag
    with pytest.raises(ModelError, match=message):
        build_spec(config | {"layer_types": kinds}, SOURCE)


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("SmolLM3ForCausalLM", {"no_rope_layers": [[1], [0]]}, "no_rope_layers is [[1], [0]]"),
        (
            "Olmo3ForCausalLM",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
            "rope_parameters.rope_type is 'default'; supported is one object for each of "
            "full_attention, sliding_attention",
        ),
        (
            "Olmo3ForCausalLM",
            {"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}},
            "rope_parameters.full_attention.partial_rotary_factor is 0.5; supported is 1 or 1.0",
        ),
        (
            "Olmo3ForCausalLM",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
            "rope_parameters.sliding_attention.factor is missing",
        ),
        (
            "Olmo3ForCausalLM",
            {"layer_types": ["full_attention", "chunked_attention"]},
            "layer_types is ['full_attention', 'chunked_attention']",
        ),
        (
            "Olmo3ForCausalLM",
            {"sliding_window": None},
            "sliding_window is null; supported is a number, because some layers have a window",
        ),
        (
            "Exaone4ForCausalLM",
            {"sliding_window_pattern": "LLLG"},
            "sliding_window_pattern is 'LLLG'; supported is a whole number of at least 1",
        ),
        (
            "Exaone4ForCausalLM",
            {"sliding_window": None, "layer_types": ["full_attention", "sliding_attention"]},
            "layer_types is ['full_attention', 'sliding_attention']; supported is full_attention",
        ),
        (
            "HunYuanDenseV1ForCausalLM",
            {"rope_scaling": {"type": "dynamic", "alpha": 1e308}},
            "rope_scaling.alpha is 1e+308; supported is a smaller number",
        ),
        (
            "HunYuanDenseV1ForCausalLM",
            {"rope_scaling": {"type": "dynamic", "alpha": 2.0}, "head_dim": 2},
            "rope_scaling.alpha is 2.0; supported is no such field for heads with 2 dimensions",
        ),
        (
            "Cohere2ForCausalLM",
            {"sliding_window": None},
            "sliding_window is null; supported is a number, because some layers have a window",
        ),
        ("Cohere2ForCausalLM", {"use_qk_norm": True}, "use_qk_norm is true; supported is false"),
        (
            "CohereForCausalLM",
            {"logit_scale": 0},
            "logit_scale is 0; supported is a number above 0",
        ),
        (
            "StableLmForCausalLM",
            {"head_dim": 40},
            "head_dim is 40; supported is heads that together have hidden_size, ",
        ),
        (
            "StableLmForCausalLM",
            {"partial_rotary_factor": 1.5},
            "partial_rotary_factor is 1.5; supported is a part",
        ),
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}, "clip_qkv is 8.0; supported is no such field"),
        (
            "Dots1ForCausalLM",
            {"n_shared_experts": None},
            "n_shared_experts is missing",
        ),
        (
            "Dots1ForCausalLM",
            {"sliding_window": None, "layer_types": ["full_attention", "sliding_attention"]},
            "layer_types is ['full_attention', 'sliding_attention']; supported is full_attention",
        ),
        (
            "GraniteMoeForCausalLM",
            {"num_experts_per_tok": 9},
            "num_experts_per_tok is 9; supported is at most the number of experts, 8",
        ),
        ("MiniMaxM2ForCausalLM", {"rotary_dim": 256}, "rotary_dim is 256; supported is at most 16"),
        ("MiniMaxM2ForCausalLM", {"rotary_dim": 7}, "rotary_dim is 7; supported is an even number"),
        (LING, {"model_type": "bailing_hybrid"}, "model_type is 'bailing_hybrid'; supported is "),
        (LING, {"moba_block_size": 1024}, "moba_block_size is 1024; supported is no such field"),
        (LING, {"use_bias": True}, "use_bias is true; supported is false"),
        (LING, {"norm_head": True}, "norm_head is true; supported is false"),
        (LING, {"norm_topk_prob": False}, "norm_topk_prob is false; supported is true"),
        (LING, {"score_function": "softmax"}, "score_function is 'softmax'; supported is "),
        (LING, {"router_dtype": "bf16"}, "router_dtype is 'bf16'; supported is 'fp32'"),
        (LING, {"topk_group": 9}, "topk_group is 9; supported is at most n_group, 8"),
    ],
)
def test_values_of_one_family_are_refused_by_name(
    architecture: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=f"^config.json: {re.escape(message)}"):
        build_spec(config_of(architecture) | fields, SOURCE)


def test_a_text_model_may_tie_its_table() -> None:
    """transformers ties Qwen2-VL if either object says so; Mistral 3 only if config.json does."""
    text = EACH | {"tie_word_embeddings": True}

    def tied(architecture: str, outer: dict[str, Any], inner: dict[str, Any]) -> bool:
        config = {"architectures": [architecture], "text_config": inner} | outer
        return build_spec(config, SOURCE).lm_head is None

    assert tied("Qwen2_5_VLForConditionalGeneration", {"tie_word_embeddings": False}, text)
    assert not tied("Qwen3VLForConditionalGeneration", {"tie_word_embeddings": False}, text)
    assert not tied("Mistral3ForConditionalGeneration", {}, EACH)
    assert tied("Mistral3ForConditionalGeneration", {}, text)


def test_quantized_weights_without_a_dtype_are_computed_in_bfloat16() -> None:
    config = {name: value for name, value in LLAMA.items() if name != "torch_dtype"}
    assert build_spec(config, SOURCE).dtype == "float32"
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    assert build_spec(config | fp8, SOURCE).dtype == "bfloat16"


def test_sliding_layers_need_a_window() -> None:
    qwen3 = LLAMA | {
        "architectures": ["Qwen3ForCausalLM"],
        "layer_types": ["sliding_attention"] * 2,
    }
    message = "full_attention in all layers without a sliding window"
    for window in ({}, {"sliding_window": None, "use_sliding_window": True}):
        with pytest.raises(ModelError, match=message):
            build_spec(qwen3 | window, SOURCE)


def test_an_unknown_architecture_is_told_the_known_ones() -> None:
    with pytest.raises(ModelError) as error:
        build_spec(LLAMA | {"architectures": ["Nope"]}, SOURCE)
    assert all(name in str(error.value) for name in ARCHITECTURES)


def test_every_spec_names_each_tensor_once() -> None:
    for config in (LLAMA, QWEN3_MOE):
        weights = build_spec(config, SOURCE).weights
        usual = [(each.known_places[0], each.shape[0]) for each in weights]
        names = [name for place, experts in usual for name in place.tensors(experts)]
        assert len(names) == len(set(names))


def test_rope_scaling_keeps_short_wavelengths_and_stretches_long_ones() -> None:
    plain = RopeSpec(10_000.0, 64).inverse_frequencies(64)
    scaled = RopeSpec(
        10_000.0,
        64,
        scaling="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_len=1024,
    ).inverse_frequencies(64)
    assert scaled[0] == plain[0]
    assert scaled[-1] == plain[-1] / 8
    assert (scaled <= plain).all()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 99) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)
_FIELDS = st.sampled_from(
    [
        *EACH,
        "dtype",
        "head_dim",
        "hidden_act",
        "layer_types",
        "mlp_only_layers",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "tie_word_embeddings",
    ]
)


@settings(deadline=None)
@given(
    architecture=st.sampled_from(ARCHITECTURES),
    changes=st.dictionaries(_FIELDS, _JSON, max_size=3),
    windows=st.booleans(),
)
def test_no_config_raises_anything_but_a_model_error(
    architecture: str, changes: dict[str, Any], windows: bool
) -> None:
    config = config_of(architecture) | {"use_sliding_window": windows}
    with suppress(ModelError):
        assert build_spec(config | changes, SOURCE).parameters > 0


def test_swish_is_silu() -> None:
    assert build_spec(LLAMA | {"hidden_act": "swish"}, SOURCE) == build_spec(LLAMA, SOURCE)
