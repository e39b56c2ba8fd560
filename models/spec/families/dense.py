"""The families with one MLP in each layer, one function each."""

from __future__ import annotations

from dataclasses import replace

from weft.models.spec.config_fields import Fields
from weft.models.spec.decoder import AFTER, PARALLEL, Decoder
from weft.models.spec.families.attention import (
    granite_attention,
    hunyuan_attention,
    is_sliding,
    layer_types,
    qwen_window,
    read_window,
    residual_multiplier,
    rotated_layers,
)
from weft.models.spec.spec import LayerSpec, ModelSpec


def llama(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    bias = fields.flag("attention_bias", False)
    return decoder.layer(
        i,
        decoder.attention(i, qkv_bias=bias, o_bias=bias),
        decoder.mlp(i, bias=fields.flag("mlp_bias", False)),
    )


def granite(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    mlp = decoder.mlp(i, bias=fields.flag("mlp_bias", False))
    mlp = mlp.scaled(residual_multiplier(fields))
    return decoder.layer(i, granite_attention(fields, decoder, i), mlp)


def scaled_ends(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Scale Granite's embedding and its logits."""
    factor = fields.number("embedding_multiplier", 1.0)
    divisor = fields.number("logits_scaling", 1.0)
    spec = replace(spec, embedding=replace(spec.embedding, scale=factor))
    return _with_scaled_logits(spec, 1 / divisor if spec.lm_head else 1 / (factor * divisor))


def _with_scaled_logits(spec: ModelSpec, factor: float) -> ModelSpec:
    """Scale the logits by the LM head or, if it is tied, by the norm."""
    if spec.lm_head is not None:
        return replace(spec, lm_head=replace(spec.lm_head, scale=factor))
    norm = replace(spec.norm.weight, scale=factor)
    return replace(spec, norm=replace(spec.norm, weight=norm))


def cohere(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    bias = fields.flag("attention_bias", False)
    normed = fields.flag("use_qk_norm", False)
    attention = decoder.attention(
        i, qkv_bias=bias, o_bias=bias, norm="each head" if normed else "none"
    )
    return decoder.layer(i, attention, decoder.mlp(i), PARALLEL, is_parallel=True)


def cohere2(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    window, rope = read_window(fields, default=4096), decoder.rope
    period = 1 if fields.has("layer_types") else fields.integer("sliding_window_pattern", 4)
    if not is_sliding(fields, decoder, i, period):
        window, rope = None, replace(rope, dim=0)
    elif window is None:
        raise fields.error("sliding_window", "a number, because some layers have a window")
    bias = fields.flag("attention_bias", False)
    attention = decoder.attention(i, qkv_bias=bias, o_bias=bias, window=window, rope=rope)
    return decoder.layer(i, attention, decoder.mlp(i), PARALLEL, is_parallel=True)


def cohere_logits(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Scale Cohere's logits."""
    return _with_scaled_logits(spec, fields.number("logit_scale", 0.0625))


def stablelm(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    if decoder.heads * decoder.head_dim != decoder.hidden:
        name = "head_dim" if fields.has("head_dim") else "num_attention_heads"
        raise fields.error(name, f"heads that together have hidden_size, {decoder.hidden}")
    names = "q_layernorm.norms.{expert}", "k_layernorm.norms.{expert}"
    attention = decoder.attention(
        i,
        qkv_bias=fields.flag("use_qkv_bias", False),
        norm="each head" if fields.flag("qk_layernorm", False) else "none",
        norm_names=names,
    )
    if fields.flag("use_parallel_residual", False):
        return decoder.layer(i, attention, decoder.mlp(i), PARALLEL, is_parallel=True)
    return decoder.layer(i, attention, decoder.mlp(i))


def mistral(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    window = read_window(fields, default=4096)
    return decoder.layer(i, decoder.attention(i, window=window), decoder.mlp(i))


def ministral3(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    window = read_window(fields, default=None)
    return decoder.layer(i, decoder.attention(i, window=window), decoder.mlp(i))


def qwen2(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    window = qwen_window(fields, decoder, i)
    return decoder.layer(i, decoder.attention(i, qkv_bias=True, window=window), decoder.mlp(i))


def qwen3(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    window = qwen_window(fields, decoder, i)
    bias = fields.flag("attention_bias", False)
    return decoder.layer(
        i,
        decoder.attention(i, qkv_bias=bias, o_bias=bias, norm="head", window=window),
        decoder.mlp(i),
    )


def qwen3_vl(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    bias = fields.flag("attention_bias", False)
    attention = decoder.attention(i, qkv_bias=bias, o_bias=bias, norm="head")
    return decoder.layer(i, attention, decoder.mlp(i))


def phi3(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    window = read_window(fields, default=None)
    attention = decoder.attention(i, window=window, fused="qkv_proj")
    return decoder.layer(i, attention, decoder.mlp(i, fused="gate_up_proj"))


def glm(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    attention = decoder.attention(i, qkv_bias=fields.flag("attention_bias", True))
    return decoder.layer(i, attention, decoder.mlp(i, fused="gate_up_proj"))


def glm4(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    attention = decoder.attention(i, qkv_bias=fields.flag("attention_bias", True))
    norms = (
        *("input_layernorm", "post_self_attn_layernorm"),
        *("post_attention_layernorm", "post_mlp_layernorm"),
    )
    return decoder.layer(i, attention, decoder.mlp(i, fused="gate_up_proj"), norms)


def ernie(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    bias = fields.flag("use_bias", False)
    attention = decoder.attention(i, qkv_bias=bias, o_bias=bias)
    return decoder.layer(i, attention, decoder.mlp(i, bias=bias))


def hunyuan(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    return decoder.layer(i, hunyuan_attention(fields, decoder, i), decoder.mlp(i))


def seed_oss(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    attention = decoder.attention(
        i,
        qkv_bias=fields.flag("attention_bias", True),
        o_bias=fields.flag("attention_out_bias", False),
    )
    return decoder.layer(i, attention, decoder.mlp(i, bias=fields.flag("mlp_bias", False)))


def smollm3(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    rotated = rotated_layers(fields, decoder)
    window = read_window(fields, default=None) if fields.flag("use_sliding_window", False) else None
    if fields.has("layer_types"):
        sliding = layer_types(fields, decoder)[i] == "sliding_attention"
    else:
        sliding = window is not None and not rotated[i]
    bias = fields.flag("attention_bias", False)
    attention = decoder.attention(
        i,
        qkv_bias=bias,
        o_bias=bias,
        window=window if sliding else None,
        rope=decoder.rope if rotated[i] else replace(decoder.rope, dim=0),
    )
    return decoder.layer(i, attention, decoder.mlp(i, bias=fields.flag("mlp_bias", False)))


def olmo2(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    bias = fields.flag("attention_bias", False)
    attention = decoder.attention(i, qkv_bias=bias, o_bias=bias, norm="heads")
    return decoder.layer(i, attention, decoder.mlp(i), AFTER)


def olmo3(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    bias = fields.flag("attention_bias", False)
    sliding, window = is_sliding(fields, decoder, i, period=4), read_window(fields, default=4096)
    if sliding and window is None:
        raise fields.error("sliding_window", "a number, because some layers have a window")
    attention = decoder.attention(
        i,
        qkv_bias=bias,
        o_bias=bias,
        norm="heads",
        window=window if sliding else None,
        rope=decoder.sliding_rope if sliding else decoder.rope,
    )
    return decoder.layer(i, attention, decoder.mlp(i), AFTER)


def exaone4(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    window, rope = read_window(fields, default=4096), decoder.rope
    if window is not None:
        # Some files have a text such as "LLLG" beside layer_types, which comes first.
        period = 1 if fields.has("layer_types") else fields.integer("sliding_window_pattern", 4)
        if not is_sliding(fields, decoder, i, period):
            window, rope = None, replace(rope, dim=0)
    attention = decoder.attention(i, norm="head", window=window, rope=rope)
    return decoder.layer(i, attention, decoder.mlp(i), AFTER)
