"""Attention that several families have: windows, Granite's multipliers, Hunyuan's norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from weft.errors import ModelError
from weft.models.spec.config_fields import Fields
from weft.models.spec.decoder import Decoder
from weft.models.spec.spec import AttentionSpec, LayerSpec


def read_window(fields: Fields, default: int | None) -> int | None:
    """Read the sliding window: null means none, an absent field means `default`."""
    if fields.values.get("sliding_window", default) is None:
        return None
    return fields.integer("sliding_window", default)


def layer_types(fields: Fields, decoder: Decoder) -> list[Any]:
    """Read each layer's attention kind; the field is not absent."""
    kinds = fields.array("layer_types")
    if len(kinds) != decoder.layers:
        raise ModelError(
            f"{fields.source}: layer_types has {len(kinds)} entries; it must have one for each of "
            f"the {decoder.layers} layers"
        )
    return kinds


def check_layer_types(fields: Fields, decoder: Decoder, layers: Sequence[LayerSpec]) -> None:
    """Refuse `layer_types` that do not agree with the layers' windows and chunks."""
    if not fields.has("layer_types"):
        return
    for i, (kind, layer) in enumerate(zip(layer_types(fields, decoder), layers, strict=True)):
        wanted, why = "full_attention", "sliding_window"
        if layer.attention.sliding_window is not None:
            wanted = "sliding_attention"
        elif layer.attention.chunk is not None:
            wanted, why = "chunked_attention", "attention_chunk_size"
        if kind != wanted:
            raise fields.error("layer_types", f"{wanted} in layer {i}, as {why} says")


def rotated_layers(fields: Fields, decoder: Decoder) -> list[int]:
    """Tell which layers have a rotary embedding, 1, and which have none, 0."""
    interval = fields.integer("no_rope_layer_interval", 4)
    rotated = fields.array("no_rope_layers") or [
        int((layer + 1) % interval != 0) for layer in range(decoder.layers)
    ]
    if len(rotated) != decoder.layers or any(each not in (0, 1) for each in rotated):
        raise fields.error("no_rope_layers", f"0 or 1 for each of the {decoder.layers} layers")
    return rotated


def is_sliding(fields: Fields, decoder: Decoder, i: int, period: int) -> bool:
    """Tell whether layer i has a window: by `layer_types`, or else all but each period's last."""
    if fields.has("layer_types"):
        return bool(layer_types(fields, decoder)[i] == "sliding_attention")
    return (i + 1) % period != 0


def qwen_window(fields: Fields, decoder: Decoder, i: int) -> int | None:
    """Read layer i's window in Qwen's families, which have none without `use_sliding_window`."""
    sliding = fields.flag("use_sliding_window", False)
    window = read_window(fields, default=4096) if sliding else None
    return window_of_last_layers(fields, decoder, i, window, first=28)


def window_of_last_layers(
    fields: Fields, decoder: Decoder, i: int, window: int | None, first: int
) -> int | None:
    """Tell layer i's window: by `layer_types`, or else in layers from `max_window_layers` on.

    Args:
        fields, decoder, i: the config, the model's sizes, and the layer's index.
        window: of the layers that have one.
        first: what an absent `max_window_layers` means.

    Raises:
        ModelError: the layers' kinds are unknown, or do not fit the window.
    """
    if not fields.has("layer_types"):
        if window is None or i < fields.integer("max_window_layers", first, low=0):
            return None
        return window
    kinds = layer_types(fields, decoder)
    if any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        raise fields.error("layer_types", "full_attention or sliding_attention in each layer")
    if kinds[i] == "full_attention":
        return None
    if window is None:
        raise fields.error("layer_types", "full_attention in all layers without a sliding window")
    return window


def granite_attention(fields: Fields, decoder: Decoder, i: int) -> AttentionSpec:
    """Describe layer i's attention in all of Granite's families."""
    bias = fields.flag("attention_bias", False)
    attention = decoder.attention(i, qkv_bias=bias, o_bias=bias)
    return replace(
        attention,
        o=attention.o.scaled(residual_multiplier(fields)),
        scale=fields.number("attention_multiplier", 1.0),
    )


def residual_multiplier(fields: Fields) -> float:
    """Read Granite's factor of each block's output."""
    return fields.number("residual_multiplier", 1.0)


def hunyuan_attention(fields: Fields, decoder: Decoder, i: int) -> AttentionSpec:
    """Describe layer i's attention in both of Hunyuan's families."""
    bias = fields.flag("attention_bias", False)
    return decoder.attention(
        i,
        qkv_bias=bias,
        o_bias=bias,
        norm="rotated head",
        norm_names=("query_layernorm", "key_layernorm"),
        rope=replace(decoder.rope, amplitude=1.0),  # the norms after it remove any other
    )
