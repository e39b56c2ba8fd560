"""Hugging Face config.json -> ModelSpec, with one function per model family.

Both generations of configs are read: `rope_theta` + `rope_scaling` + `torch_dtype`, and
`rope_parameters` + `dtype` of transformers 5. Sizes must be in the file. Other fields have the same
defaults as in `transformers`. If weft does not implement a value, `build_spec` raises a ModelError
with the field, the value and the supported values: a model runs right or not at all.

To add a family, write its function, list it in `FAMILIES`, put its fields into config_table.py, and
add its rows to the parity test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import ModelError
from weft.models.spec.config_fields import Fields
from weft.models.spec.config_table import refuse_others, unread
from weft.models.spec.decoder import Decoder
from weft.models.spec.quantization import UNUSED, read_quantization
from weft.models.spec.spec import DTYPE_BYTES, LayerSpec, ModelSpec, RopeSpec


def build_spec(config: dict[str, Any], source: Path) -> ModelSpec:
    """Describe the model in a config.json.

    Args:
        config: the parsed file.
        source: its path, for messages.

    Raises:
        ModelError: a field is missing, or the architecture or a value is not supported.
    """
    fields = Fields(config, source)
    architecture = _architecture(fields)
    family = FAMILIES[architecture]
    # transformers goes by the type: another family's may have tensors with the same names.
    fields.choice("model_type", (family.model_type,), default=family.model_type)
    refuse_others(fields, family.model_type)
    quantization = read_quantization(fields)
    decoder = Decoder.read(fields)
    tied = fields.flag("tie_word_embeddings", False)
    context = fields.integer("max_position_embeddings", family.max_position_embeddings)
    return ModelSpec(
        architecture=architecture,
        dtype=_dtype(fields),
        vocab_size=decoder.vocab,
        hidden_size=decoder.hidden,
        num_heads=decoder.heads,
        num_kv_heads=decoder.kv_heads,
        head_dim=decoder.head_dim,
        max_model_len=context,
        norm_eps=fields.number("rms_norm_eps", family.rms_norm_eps),
        rope=_rope(fields, family.rope_theta, context),
        embedding=decoder.table("model.embed_tokens", tied="lm_head" if tied else None),
        layers=tuple(family.describe_layer(fields, decoder, i) for i in range(decoder.layers)),
        norm=decoder.norm("model.norm"),
        lm_head=None if tied else decoder.table("lm_head"),
        skipped=SKIPPED if quantization is None else SKIPPED + UNUSED,
        quantization=quantization,
    )


def unread_fields(config: dict[str, Any]) -> list[str]:
    """Return the unknown fields in a config.json, already accepted by `build_spec`.

    They have no effect in transformers either. A misspelt field has a suggestion.
    """
    architecture = _architecture(Fields(config, Path("config.json")))
    return unread(config, FAMILIES[architecture].model_type)


def _architecture(fields: Fields) -> str:
    architecture = next(iter(fields.array("architectures")), None)
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise fields.error("architectures", f"one of {', '.join(FAMILIES)}")
    return architecture


def _llama(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    _check_layer_types(fields, decoder, None)
    bias = fields.flag("attention_bias", False)
    return decoder.layer(
        i,
        decoder.attention(i, qkv_bias=bias, o_bias=bias),
        decoder.mlp(i, bias=fields.flag("mlp_bias", False)),
    )


def _mistral(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    window = _window(fields, default=4096)
    _check_layer_types(fields, decoder, window)
    return decoder.layer(i, decoder.attention(i, window=window), decoder.mlp(i))


def _qwen2(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    window = _qwen_window(fields, decoder, i)
    return decoder.layer(i, decoder.attention(i, qkv_bias=True, window=window), decoder.mlp(i))


def _qwen3(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    window = _qwen_window(fields, decoder, i)
    bias = fields.flag("attention_bias", False)
    return decoder.layer(
        i,
        decoder.attention(i, qkv_bias=bias, o_bias=bias, head_norm=True, window=window),
        decoder.mlp(i),
    )


def _qwen3_moe(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    sliding = fields.flag("use_sliding_window", False)
    window = _window(fields, default=4096) if sliding else None
    _check_layer_types(fields, decoder, window)
    bias = fields.flag("attention_bias", False)
    attention = decoder.attention(i, qkv_bias=bias, o_bias=bias, head_norm=True, window=window)
    dense = i in fields.array("mlp_only_layers")
    if dense or (i + 1) % fields.integer("decoder_sparse_step", 1) != 0:
        return decoder.layer(i, attention, decoder.mlp(i))
    experts = decoder.experts(
        i,
        "mlp",
        ("gate_proj", "up_proj", "down_proj"),
        width=fields.integer("moe_intermediate_size"),
        normalize=fields.flag("norm_topk_prob", False),
    )
    return decoder.layer(i, attention, experts)


def _mixtral(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    experts = decoder.experts(
        i,
        "block_sparse_moe",
        ("w1", "w3", "w2"),
        width=fields.integer("intermediate_size"),
        normalize=True,
    )
    window = _window(fields, default=None)
    _check_layer_types(fields, decoder, window)
    return decoder.layer(i, decoder.attention(i, window=window), experts)


@dataclass(frozen=True, slots=True)
class Family:
    """One model family.

    Attributes:
        model_type: its name in config.json.
        describe_layer: describes layer i.
        max_position_embeddings, rms_norm_eps, rope_theta: their values where config.json has none,
            as in transformers.
    """

    model_type: str
    describe_layer: Callable[[Fields, Decoder, int], LayerSpec]
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0


FAMILIES = {
    "LlamaForCausalLM": Family("llama", _llama, 2048),
    "MistralForCausalLM": Family("mistral", _mistral, 131_072),
    "MixtralForCausalLM": Family("mixtral", _mixtral, 131_072, 1e-5, 1_000_000.0),
    "Qwen2ForCausalLM": Family("qwen2", _qwen2, 32_768),
    "Qwen3ForCausalLM": Family("qwen3", _qwen3, 32_768),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", _qwen3_moe, 32_768),
}


SKIPPED = ("*.rotary_emb.inv_freq", "mtp.*", "v_head.*", "visual.*")
"""Tensors without an effect on a text's next token: tables that older versions of transformers
saved, heads that predict several tokens, values for training, and image encoders."""


def _dtype(fields: Fields) -> str:
    """Read the weights' dtype; the default is float32, but released configs always name one."""
    name = "dtype" if fields.has("dtype") else "torch_dtype"
    return fields.choice(name, tuple(DTYPE_BYTES), default="float32")


def _window(fields: Fields, default: int | None) -> int | None:
    """Read the sliding window: null means none, an absent field means `default`."""
    if fields.values.get("sliding_window", default) is None:
        return None
    return fields.integer("sliding_window", default)


def _layer_types(fields: Fields, decoder: Decoder) -> list[Any]:
    """Read each layer's attention kind; the field is not absent."""
    kinds = fields.array("layer_types")
    if len(kinds) != decoder.layers:
        raise ModelError(
            f"{fields.source}: layer_types has {len(kinds)} entries; it must have one for each of "
            f"the {decoder.layers} layers"
        )
    return kinds


def _check_layer_types(fields: Fields, decoder: Decoder, window: int | None) -> None:
    """Refuse `layer_types` unless all layers have the kind that `sliding_window` implies."""
    kind = "full_attention" if window is None else "sliding_attention"
    if fields.has("layer_types") and set(map(str, _layer_types(fields, decoder))) != {kind}:
        raise fields.error("layer_types", f"{kind} in all layers, as sliding_window says")


def _qwen_window(fields: Fields, decoder: Decoder, i: int) -> int | None:
    """Read layer i's window; it applies by `layer_types`, or else from `max_window_layers` on."""
    sliding = fields.flag("use_sliding_window", False)
    window = _window(fields, default=4096) if sliding else None
    if not fields.has("layer_types"):
        if window is None or i < fields.integer("max_window_layers", 28, low=0):
            return None
        return window
    kinds = _layer_types(fields, decoder)
    if any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        raise fields.error("layer_types", "full_attention or sliding_attention in each layer")
    if kinds[i] == "full_attention":
        return None
    if window is None:
        raise fields.error("layer_types", "full_attention in all layers without a sliding window")
    return window


def _rope(fields: Fields, default_theta: float, context: int) -> RopeSpec:
    """Read the rotary embedding, with transformers' priorities.

    `rope_scaling` replaces `rope_parameters`. Inside it, `rope_theta` comes before the one beside
    it; `original_max_position_embeddings` comes after the one beside it.
    """
    scaling = fields.section("rope_scaling")
    if not scaling.values:
        scaling = fields.section("rope_parameters")
    theta = (scaling if scaling.has("rope_theta") else fields).number("rope_theta", default_theta)
    for name, value in scaling.values.items():
        if isinstance(value, dict):
            raise scaling.error(name, "the same rotary embedding in all layers")
    kind_field = "rope_type" if scaling.has("rope_type") else "type"
    kind = scaling.choice(kind_field, ("default", "linear", "llama3"), default="default")
    if kind == "default":
        return RopeSpec(theta)
    if kind == "linear":
        return RopeSpec(theta, "linear", factor=scaling.number("factor"))
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if low >= high:
        raise scaling.error("low_freq_factor", f"less than high_freq_factor, {high}")
    return RopeSpec(
        theta,
        "llama3",
        factor=scaling.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_len=fields.integer(
            "original_max_position_embeddings",
            scaling.integer("original_max_position_embeddings", context),
        ),
    )
