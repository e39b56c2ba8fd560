"""The table of fields in config.json, with weft's treatment by family.

A field is read, has a supported value, is refused, or is harmless. Fields in no table have no
effect in transformers either; the log names them, because one may be misspelt. Tests compare the
tables with weft's own reading and with transformers' code. docs/config-fields.md shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Literal

from weft.errors import shown
from weft.models.spec.config_fields import SIMILAR, Fields

Effect = Literal["read", "only", "harmless", "unknown"]

READ = frozenset(
    {
        "architectures",
        "dtype",
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "layer_types",
        "max_position_embeddings",
        "model_type",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "original_max_position_embeddings",
        "quantization_config",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "tie_word_embeddings",
        "torch_dtype",
        "vocab_size",
    }
)
"""Fields of all families with an effect on the model's numbers."""

_DEEPSEEK = frozenset(
    {
        "attention_bias",
        "first_k_dense_replace",
        "moe_intermediate_size",
        "n_group",
        "n_routed_experts",
        "n_shared_experts",
        "norm_topk_prob",
        "num_experts_per_tok",
        "num_local_experts",
        "routed_scaling_factor",
        "topk_group",
    }
)
_GRANITE = frozenset(
    {
        "attention_bias",
        "attention_multiplier",
        "embedding_multiplier",
        "logits_scaling",
        "residual_multiplier",
    }
)
_GRANITE_MOE = frozenset({"num_experts_per_tok", "num_local_experts"})
_OLMOE = frozenset(
    {
        "attention_bias",
        "norm_topk_prob",
        "num_experts",
        "num_experts_per_tok",
        "num_local_experts",
    }
)
_QWEN2 = frozenset({"max_window_layers", "sliding_window", "use_sliding_window"})

_OWN: dict[str, frozenset[str]] = {
    "llama": frozenset({"attention_bias", "mlp_bias"}),
    "granite": _GRANITE | {"mlp_bias"},
    "granitemoe": _GRANITE | _GRANITE_MOE,
    "granitemoeshared": _GRANITE | _GRANITE_MOE | {"shared_intermediate_size"},
    "cohere": frozenset({"attention_bias", "layer_norm_eps", "logit_scale", "use_qk_norm"}),
    "cohere2": frozenset(
        {
            "attention_bias",
            "layer_norm_eps",
            "logit_scale",
            "sliding_window",
            "sliding_window_pattern",
        }
    ),
    "stablelm": frozenset(
        {
            "layer_norm_eps",
            "partial_rotary_factor",
            "qk_layernorm",
            "use_parallel_residual",
            "use_qkv_bias",
        }
    ),
    "llama4_text": frozenset(
        {
            "attention_bias",
            "attention_chunk_size",
            "attn_scale",
            "attn_temperature_tuning",
            "floor_scale",
            "interleave_moe_layer_step",
            "intermediate_size_mlp",
            "moe_layers",
            "no_rope_layer_interval",
            "no_rope_layers",
            "num_experts_per_tok",
            "num_local_experts",
            "use_qk_norm",
        }
    ),
    "mistral": frozenset({"sliding_window"}),
    "mixtral": frozenset(
        {"num_experts", "num_experts_per_tok", "num_local_experts", "sliding_window"}
    ),
    "qwen2_moe": frozenset(
        {
            "decoder_sparse_step",
            "mlp_only_layers",
            "moe_intermediate_size",
            "norm_topk_prob",
            "num_experts",
            "num_experts_per_tok",
            "num_local_experts",
            "qkv_bias",
            "shared_expert_intermediate_size",
            "use_sliding_window",
        }
    ),
    "qwen2_vl_text": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen3_vl_text": frozenset({"attention_bias"}),
    "qwen3_vl_moe_text": frozenset(
        {
            "attention_bias",
            "decoder_sparse_step",
            "mlp_only_layers",
            "moe_intermediate_size",
            "num_experts",
            "num_experts_per_tok",
            "num_local_experts",
        }
    ),
    "phi3": frozenset({"partial_rotary_factor", "sliding_window"}),
    "glm": frozenset({"attention_bias", "partial_rotary_factor"}),
    "glm4": frozenset({"attention_bias", "partial_rotary_factor"}),
    "olmo2": frozenset({"attention_bias"}),
    "olmo3": frozenset({"attention_bias", "sliding_window"}),
    "olmoe": _OLMOE,
    "flex_olmo": _OLMOE,
    "exaone4": frozenset({"sliding_window", "sliding_window_pattern"}),
    "glm4_moe": _DEEPSEEK | {"partial_rotary_factor", "use_qk_norm"},
    "dots1": _DEEPSEEK | {"max_window_layers", "sliding_window"},
    "bailing_moe": frozenset(
        {
            "first_k_dense_replace",
            "moe_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "n_group",
            "num_experts",
            "num_experts_per_tok",
            "num_shared_experts",
            "partial_rotary_factor",
            "rotary_dim",
            "routed_scaling_factor",
            "topk_group",
            "use_qk_norm",
            "use_qkv_bias",
        }
    ),
    "minimax_m2": frozenset(
        {
            "num_experts",
            "num_experts_per_tok",
            "num_local_experts",
            "partial_rotary_factor",
            "rotary_dim",
        }
    ),
    "hy_v3": frozenset(
        {
            "attention_bias",
            "mlp_bias",
            "mlp_layer_types",
            "moe_intermediate_size",
            "num_experts",
            "num_experts_per_tok",
            "num_local_experts",
            "num_shared_experts",
            "router_scaling_factor",
        }
    ),
    "ernie4_5": frozenset({"use_bias"}),
    "ernie4_5_moe": frozenset(
        {
            "moe_intermediate_size",
            "moe_k",
            "moe_layer_end_index",
            "moe_layer_interval",
            "moe_layer_start_index",
            "moe_num_experts",
            "moe_num_shared_experts",
            "num_experts",
            "num_experts_per_tok",
            "use_bias",
        }
    ),
    "hunyuan_v1_dense": frozenset({"attention_bias"}),
    "hunyuan_v1_moe": frozenset(
        {
            "attention_bias",
            "moe_topk",
            "num_experts",
            "num_experts_per_tok",
            "num_local_experts",
        }
    ),
    "ministral3": frozenset({"sliding_window"}),
    "seed_oss": frozenset({"attention_bias", "attention_out_bias", "mlp_bias"}),
    "smollm3": frozenset(
        {
            "attention_bias",
            "mlp_bias",
            "no_rope_layer_interval",
            "no_rope_layers",
            "sliding_window",
            "use_sliding_window",
        }
    ),
    "qwen2": _QWEN2,
    "qwen3": frozenset(
        {"attention_bias", "max_window_layers", "sliding_window", "use_sliding_window"}
    ),
    "qwen3_moe": frozenset(
        {
            "attention_bias",
            "decoder_sparse_step",
            "mlp_only_layers",
            "moe_intermediate_size",
            "norm_topk_prob",
            "num_experts",
            "num_experts_per_tok",
            "num_local_experts",
            "sliding_window",
            "use_sliding_window",
        }
    ),
}

READ_BY = {
    model_type: own if "layer_norm_eps" in own else own | {"rms_norm_eps"}
    for model_type, own in _OWN.items()
}
"""Fields of some families: model_type -> fields. They come before the other tables."""

READ_FOR_TEXT = frozenset(
    {
        "eos_token_id",
        "max_new_tokens",
        "min_p",
        "repetition_penalty",
        "temperature",
        "top_k",
        "top_p",
    }
)
"""Fields that count if generation_config.json does not have them, or does not exist."""

WRAPPER = frozenset(
    {
        "boi_token_index",
        "eoi_token_index",
        "image_token_id",
        "image_token_index",
        "text_config",
        "video_token_id",
        "vision_config",
        "vision_end_token_id",
        "vision_start_token_id",
        "vision_token_id",
    }
)
"""Fields of models for several modalities that do not concern their text models."""

ONLY: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_chunk_size": (),
    "decoder": (),
    "generator": (),
    "hidden_act": ("silu", "swish"),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "kv_sharing_modes": (),
    "moe_norm_min": (1e-12,),
    "mtp_layer_types": (),
    "number_of_conv_states": (),
    "partial_rotary_factor": (1, 1.0),
    "per_layer_config": (),
    "sliding_window": (),
    "text_config": (),
    "text_encoder": (),
}
"""Fields with their supported values; null is the same as absent."""

ONLY_BY: dict[str, dict[str, tuple[Any, ...]]] = {
    "bailing_moe": {
        "moba_block_size": (),
        "moe_router_enable_expert_bias": (True,),
        "norm_head": (False,),
        "norm_softmax": (False,),
        "norm_topk_prob": (True,),
        "router_dtype": ("fp32",),
        "score_function": ("sigmoid",),
        "use_bias": (False,),
        "use_rmsnorm": (True,),
    },
    "cohere2": {"use_qk_norm": (False,)},
    "olmoe": {"clip_qkv": ()},
}
"""The same for fields of one family. For Ling, the published code and vLLM agree on these values
alone."""

HARMLESS = frozenset(
    {
        # For training.
        "attention_dropout",
        "initializer_range",
        "output_router_logits",
        "pretraining_tp",
        "router_aux_loss_coef",
        "router_jitter_noise",
        # For what transformers' classes return, and how they compute it.
        "_attn_implementation",
        "_experts_implementation",
        "attn_implementation",
        "chunk_size_feed_forward",
        "experts_implementation",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "use_cache",
        # For other heads than the LM head, for padded batches, and for prompts without a text.
        "bos_token_id",
        "id2label",
        "label2id",
        "pad_token_id",
        "problem_type",
        # Where the file comes from.
        "_name_or_path",
        "auto_map",
        "transformers_version",
    }
)
"""Fields without an effect on answers."""

HARMLESS_BY: dict[str, frozenset[str]] = {
    "bailing_moe": frozenset(
        {
            "embedding_dropout",
            "max_window_layers",
            "mtp_loss_scaling_factor",
            "num_nextn_predict_layers",
            "output_dropout",
        }
    ),
    "cohere2": frozenset(
        {
            "cache_implementation",
            "layer_switch",
            "order_of_interleaved_layers",
            "position_embedding_type",
            "rotary_pct",
            "use_embedding_sharing",
            "use_gated_activation",
            "use_parallel_block",
            "use_parallel_embedding",
        }
    ),
    "glm4_moe": frozenset({"num_mtp_layers", "num_nextn_predict_layers"}),
    "hunyuan_v1_dense": frozenset({"eod_token_id", "sep_token_id"}),
    "hunyuan_v1_moe": frozenset({"eod_token_id", "sep_token_id"}),
    "hy_v3": frozenset({"enable_moe_fp32_combine"}),
    "minimax_m2": frozenset(
        {
            "attn_type_list",
            "mtp_transformer_layers",
            "num_mtp_modules",
            "qk_norm_type",
            "scoring_func",
            "shared_intermediate_size",
            "use_mtp",
            "use_qk_norm",
            "use_routing_bias",
        }
    ),
    "phi3": frozenset({"embd_pdrop", "resid_pdrop"}),
    "qwen2_moe": frozenset({"max_window_layers", "sliding_window"}),
    "qwen3_moe": frozenset({"max_window_layers"}),
    "seed_oss": frozenset({"residual_dropout"}),
    "stablelm": frozenset({"hidden_dropout"}),
}
"""Fields that released configs of a family have, and that transformers does not read there."""

ROPE_SECTIONS = ("rope_parameters", "rope_scaling")
ROPE_READ = frozenset(
    {
        "alpha",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "factor",
        "high_freq_factor",
        "llama_4_scaling_beta",
        "long_factor",
        "low_freq_factor",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "rope_theta",
        "rope_type",
        "short_factor",
        "truncate",
        "type",
    }
)
ROPE_HARMLESS = frozenset({"max_position_embeddings", "mrope_interleaved", "mrope_section"})
"""The same for the objects in `ROPE_SECTIONS`. mrope's sections are for images and videos."""


def effect(name: str, model_type: str) -> Effect:
    """Return the effect of a config.json field in a family."""
    if name in READ | READ_BY[model_type] | READ_FOR_TEXT:
        return "read"
    if name in HARMLESS | HARMLESS_BY.get(model_type, frozenset()):
        return "harmless"
    return "only" if name in only(model_type) else "unknown"


def only(model_type: str) -> dict[str, tuple[Any, ...]]:
    """Return a family's fields in `ONLY` and `ONLY_BY`."""
    return ONLY | ONLY_BY.get(model_type, {})


def rope_effect(name: str) -> Effect:
    """Return the effect of a field in `rope_parameters` or `rope_scaling`."""
    if name in ROPE_READ:
        return "read"
    return "harmless" if name in ROPE_HARMLESS else "unknown"


def refuse_others(fields: Fields, model_type: str) -> None:
    """Check the fields with supported values.

    Raises:
        ModelError: a field has another value.
    """
    checked = only(model_type).items()
    _check({n: allowed for n, allowed in checked if effect(n, model_type) == "only"}, fields)
    if effect("partial_rotary_factor", model_type) == "only":
        whole = {"partial_rotary_factor": ONLY["partial_rotary_factor"]}
        for name in ROPE_SECTIONS:
            section = fields.section(name)
            _check(whole, section)
            for kind, inner in section.values.items():
                if isinstance(inner, dict):
                    _check(whole, section.section(kind))


def unread(config: Mapping[str, Any], model_type: str) -> list[str]:
    """Return the fields in no table, each with a suggestion if it resembles a known field.

    Args:
        config: a config.json's content, accepted by `build_spec`.
        model_type: the family.
    """
    known = READ | READ_BY[model_type] | READ_FOR_TEXT
    found = list(_hints(config, known, lambda name: effect(name, model_type)))
    for name in ROPE_SECTIONS:
        section, objects = dict(config.get(name) or {}), {}
        for kind in [kind for kind, inner in section.items() if isinstance(inner, dict)]:
            objects[f"{name}.{kind}."] = section.pop(kind)
        for prefix, values in {f"{name}.": section, **objects}.items():
            found += [prefix + hint for hint in _hints(values, ROPE_READ, rope_effect)]
    return found


def _hints(
    values: Mapping[str, Any], known: frozenset[str], effect_of: Callable[[str], Effect]
) -> Iterator[str]:
    for name, value in values.items():
        if value is not None and effect_of(name) == "unknown":
            near = get_close_matches(name, known, n=1, cutoff=SIMILAR)
            yield f"{name} (did you mean {near[0]}?)" if near else name


def _check(supported: Mapping[str, tuple[Any, ...]], fields: Fields) -> None:
    for name, allowed in supported.items():
        value = fields.values.get(name)
        known = any(type(value) is type(each) and value == each for each in allowed)
        if value is not None and not known:
            raise fields.error(name, " or ".join(map(shown, allowed)) or "no such field")
