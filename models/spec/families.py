"""Hugging Face config.json -> ModelSpec, with one function per model family.

Both generations of configs are read: `rope_theta` + `rope_scaling` + `torch_dtype`, and
`rope_parameters` + `dtype` of transformers 5. Sizes must be in the file. Other fields have the same
defaults as in `transformers`. If weft does not implement a value, `build_spec` raises a ModelError
with the field, the value and the supported values: a model runs right or not at all.

To add a family, write its function, list it in `FAMILIES`, put its fields into config_table.py, and
add its rows to the parity test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.errors import ModelError
from weft.models.spec.config_fields import MAX_PARTS, Fields
from weft.models.spec.config_table import WRAPPER, refuse_others, unread
from weft.models.spec.decoder import Decoder
from weft.models.spec.quantization import UNUSED, read_quantization, unread_quantization
from weft.models.spec.rope_fields import read_rope
from weft.models.spec.spec import (
    DTYPE_BYTES,
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    RouterSpec,
)


def build_spec(config: dict[str, Any], source: Path) -> ModelSpec:
    """Describe the model in a config.json.

    Args:
        config: the parsed file.
        source: its path, for messages.

    Raises:
        ModelError: a field is missing, or the architecture or a value is not supported.
    """
    whole = Fields(config, source)
    architecture = _architecture(whole)
    fields, family = _text_model(whole, architecture)
    refuse_others(fields, family.model_type)
    quantization = read_quantization(whole, fields)
    decoder = _decoder(fields, family)
    tied = _is_tied(whole, fields, architecture, family)
    layers = tuple(family.describe_layer(fields, decoder, i) for i in range(decoder.layers))
    _check_layer_types(fields, decoder, layers)
    spec = ModelSpec(
        architecture=architecture,
        # Quantized checkpoints without the field are of models that are published in bfloat16.
        dtype=_dtype(whole, fields, "float32" if quantization is None else "bfloat16"),
        vocab_size=decoder.vocab,
        hidden_size=decoder.hidden,
        num_heads=decoder.heads,
        num_kv_heads=decoder.kv_heads,
        head_dim=decoder.head_dim,
        max_model_len=fields.integer("max_position_embeddings", family.max_position_embeddings),
        embedding=decoder.table(family.embedding, tied="lm_head" if tied else None),
        layers=layers,
        norm=decoder.norm("model.norm"),
        lm_head=None if tied else decoder.table("lm_head"),
        skipped=(
            *SKIPPED,
            *(pattern.format(layers=decoder.layers) for pattern in family.skipped),
            *(UNUSED if quantization else ()),
        ),
        quantization=quantization,
    )
    return spec if family.finish is None else family.finish(fields, spec)


def unread_fields(config: dict[str, Any]) -> list[str]:
    """Return the unknown fields in a config.json, already accepted by `build_spec`.

    They have no effect in transformers either. A misspelt field has a suggestion.
    """
    whole = Fields(config, Path("config.json"))
    fields, family = _text_model(whole, _architecture(whole))
    names = [f"{fields.prefix}{name}" for name in unread(fields.values, family.model_type)]
    return names + unread_quantization(whole, fields)


def _architecture(fields: Fields) -> str:
    architecture = next(iter(fields.array("architectures")), None)
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise fields.error("architectures", f"one of {', '.join(ARCHITECTURES)}")
    return architecture


def _text_model(whole: Fields, architecture: str) -> tuple[Fields, Family]:
    """Return the language model's fields and family.

    transformers goes by the type: another family's may have tensors with the same names.
    """
    if (family := FAMILIES.get(architecture)) is not None:
        names = (family.model_type, *family.other_types)
        whole.choice("model_type", names, default=family.model_type)
        return whole, family
    wrapper = WRAPPERS[architecture]
    whole.choice("model_type", (wrapper.model_type,), default=wrapper.model_type)
    families = {family.model_type: family for family in wrapper.texts}
    if whole.has("text_config"):
        fields = whole.section("text_config")
        kind = fields.choice("model_type", tuple(families), default=wrapper.texts[0].model_type)
        return fields, families[kind]
    # Older files have all fields side by side.
    own = {name: value for name, value in whole.values.items() if name not in WRAPPER}
    return Fields(own, whole.source), wrapper.texts[0]


def _is_tied(whole: Fields, fields: Fields, architecture: str, family: Family) -> bool:
    """Tell whether the LM head is the embedding; `fields` are the language model's."""
    name = "tie_word_embeddings"
    tied = (whole if whole.has(name) else fields).flag(name, family.tied)
    if (wrapper := WRAPPERS.get(architecture)) is not None and wrapper.text_ties:
        return tied or fields.flag(name, False)
    return tied


def _decoder(fields: Fields, family: Family) -> Decoder:
    """Read the sizes that all layers share.

    Raises:
        ModelError: a size is missing or does not fit the others.
    """
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    head_dim = fields.integer("head_dim", max(1, hidden // heads))
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
    if head_dim % 2:
        raise fields.error("head_dim", f"an even number, not {head_dim}")
    return Decoder(
        fields=fields,
        vocab=fields.integer("vocab_size"),
        hidden=hidden,
        layers=fields.integer("num_hidden_layers", high=MAX_PARTS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=fields.number("rms_norm_eps", family.rms_norm_eps),
        rope=read_rope(fields, head_dim, family, "full_attention"),
        sliding_rope=read_rope(fields, head_dim, family, "sliding_attention"),
    )


def _llama(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    bias = fields.flag("attention_bias", False)
    return decoder.layer(
        i,
        decoder.attention(i, qkv_bias=bias, o_bias=bias),
        decoder.mlp(i, bias=fields.flag("mlp_bias", False)),
    )


def _granite(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    bias, factor = fields.flag("attention_bias", False), fields.number("residual_multiplier", 1.0)
    attention = decoder.attention(i, qkv_bias=bias, o_bias=bias)
    mlp = decoder.mlp(i, bias=fields.flag("mlp_bias", False))
    return decoder.layer(
        i,
        replace(
            attention,
            o=attention.o.scaled(factor),
            scale=fields.number("attention_multiplier", 1.0),
        ),
        replace(mlp, down=mlp.down.scaled(factor)),
    )


def _scaled_ends(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Scale Granite's embedding, and its logits by the LM head or, if it is tied, by the norm."""
    factor = fields.number("embedding_multiplier", 1.0)
    divisor = fields.number("logits_scaling", 1.0)
    spec = replace(spec, embedding=replace(spec.embedding, scale=factor))
    if spec.lm_head is not None:
        return replace(spec, lm_head=replace(spec.lm_head, scale=1 / divisor))
    norm = replace(spec.norm.weight, scale=1 / (factor * divisor))
    return replace(spec, norm=replace(spec.norm, weight=norm))


def _mistral(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    window = _window(fields, default=4096)
    return decoder.layer(i, decoder.attention(i, window=window), decoder.mlp(i))


def _qwen2(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    window = _qwen_window(fields, decoder, i)
    return decoder.layer(i, decoder.attention(i, qkv_bias=True, window=window), decoder.mlp(i))


def _qwen3(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    window = _qwen_window(fields, decoder, i)
    bias = fields.flag("attention_bias", False)
    return decoder.layer(
        i,
        decoder.attention(i, qkv_bias=bias, o_bias=bias, norm="head", window=window),
        decoder.mlp(i),
    )


def _qwen3_vl(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    bias = fields.flag("attention_bias", False)
    attention = decoder.attention(i, qkv_bias=bias, o_bias=bias, norm="head")
    return decoder.layer(i, attention, decoder.mlp(i))


def _qwen2_moe(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    if fields.flag("use_sliding_window", False):
        raise fields.error("use_sliding_window", "false")
    attention = decoder.attention(i, qkv_bias=fields.flag("qkv_bias", True))
    if not _is_sparse(fields, i):
        return decoder.layer(i, attention, decoder.mlp(i))
    width = fields.integer("shared_expert_intermediate_size")
    experts = decoder.experts(
        i,
        _qwen_router(fields, decoder, i),
        width=fields.integer("moe_intermediate_size"),
        shared=decoder.mlp(i, block="mlp.shared_expert", width=width),
        shared_gate="mlp.shared_expert_gate.weight",
    )
    return decoder.layer(i, attention, experts)


def _qwen3_moe(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    sliding = fields.flag("use_sliding_window", False)
    window = _window(fields, default=4096) if sliding else None
    bias = fields.flag("attention_bias", False)
    attention = decoder.attention(i, qkv_bias=bias, o_bias=bias, norm="head", window=window)
    return decoder.layer(i, attention, _qwen3_experts(fields, decoder, i))


def _qwen3_vl_moe(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    bias = fields.flag("attention_bias", False)
    attention = decoder.attention(i, qkv_bias=bias, o_bias=bias, norm="head")
    router = _qwen_router(fields, decoder, i, normalize=True)
    return decoder.layer(i, attention, _qwen3_experts(fields, decoder, i, router))


def _qwen3_experts(
    fields: Fields, decoder: Decoder, i: int, router: RouterSpec | None = None
) -> MlpSpec | MoeSpec:
    if not _is_sparse(fields, i):
        return decoder.mlp(i)
    router = router or _qwen_router(fields, decoder, i)
    return decoder.experts(i, router, width=fields.integer("moe_intermediate_size"))


def _qwen_router(
    fields: Fields, decoder: Decoder, i: int, normalize: bool | None = None
) -> RouterSpec:
    if normalize is None:
        normalize = fields.flag("norm_topk_prob", False)
    return decoder.router(
        i, decoder.count_experts("num_experts", "num_local_experts"), normalize=normalize
    )


def _is_sparse(fields: Fields, i: int) -> bool:
    """Tell whether layer i of a Qwen mixture has experts."""
    dense = i in fields.array("mlp_only_layers")
    return not dense and (i + 1) % fields.integer("decoder_sparse_step", 1) == 0


def _mixtral(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    count = decoder.count_experts("num_local_experts", "num_experts")
    experts = decoder.experts(
        i,
        decoder.router(i, count, normalize=True, name="block_sparse_moe.gate.weight"),
        width=fields.integer("intermediate_size"),
        block="block_sparse_moe",
        matrices=("w1", "w3", "w2"),
    )
    window = _window(fields, default=None)
    return decoder.layer(i, decoder.attention(i, window=window), experts)


def _minimax_m2(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    router = decoder.router(
        i,
        decoder.count_experts("num_local_experts", "num_experts"),
        normalize=True,
        name="block_sparse_moe.gate.weight",
        bias=("block_sparse_moe.e_score_correction_bias", "mlp.e_score_correction_bias"),
        scoring="sigmoid",
        in_float32=True,
    )
    experts = decoder.experts(
        i,
        router,
        width=fields.integer("intermediate_size"),
        block="block_sparse_moe",
        matrices=("w1", "w3", "w2"),
    )
    return decoder.layer(i, decoder.attention(i, norm="heads"), experts)


def _phi3(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    window = _window(fields, default=None)
    attention = decoder.attention(i, window=window, fused="qkv_proj")
    return decoder.layer(i, attention, decoder.mlp(i, fused="gate_up_proj"))


def _glm(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    attention = decoder.attention(i, qkv_bias=fields.flag("attention_bias", True))
    return decoder.layer(i, attention, decoder.mlp(i, fused="gate_up_proj"))


def _glm4(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    attention = decoder.attention(i, qkv_bias=fields.flag("attention_bias", True))
    norms = (
        *("input_layernorm", "post_self_attn_layernorm"),
        *("post_attention_layernorm", "post_mlp_layernorm"),
    )
    return decoder.layer(i, attention, decoder.mlp(i, fused="gate_up_proj"), norms)


def _glm4_moe(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    attention = decoder.attention(
        i,
        qkv_bias=fields.flag("attention_bias", False),
        norm="head" if fields.flag("use_qk_norm", False) else "none",
    )
    if i < fields.integer("first_k_dense_replace", 1, low=0):
        return decoder.layer(i, attention, decoder.mlp(i))
    width = fields.integer("moe_intermediate_size")
    count = decoder.count_experts("n_routed_experts", "num_local_experts")
    router = decoder.router(
        i,
        count,
        normalize=fields.flag("norm_topk_prob", True),
        bias=("mlp.gate.e_score_correction_bias",),
        scoring="sigmoid",
        groups=_groups(fields, count),
        scale=fields.number("routed_scaling_factor", 1.0),
        in_float32=True,
    )
    shared = decoder.mlp(
        i, block="mlp.shared_experts", width=width * fields.integer("n_shared_experts", 1)
    )
    return decoder.layer(i, attention, decoder.experts(i, router, width=width, shared=shared))


def _bailing_moe(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    attention = decoder.attention(
        i,
        qkv_bias=fields.flag("use_qkv_bias", False),
        norm="head" if fields.flag("use_qk_norm", True) else "none",
        norm_names=("query_layernorm", "key_layernorm"),
        block="attention",
        output="dense",
        fused="query_key_value",
    )
    if i < fields.integer("first_k_dense_replace", 1, low=0):
        return decoder.layer(i, attention, decoder.mlp(i))
    width = fields.integer("moe_intermediate_size")
    count = decoder.count_experts("num_experts")
    router = decoder.router(
        i,
        count,
        normalize=True,
        bias=("mlp.gate.expert_bias",),
        scoring="sigmoid",
        groups=_groups(fields, count, absent=(8, 4)),
        scale=fields.number("routed_scaling_factor", 1.0),
        in_float32=True,
    )
    shared = fields.integer("num_shared_experts", 1, low=0)
    shared *= fields.integer("moe_shared_expert_intermediate_size", width)
    experts = decoder.experts(
        i,
        router,
        width=width,
        shared=decoder.mlp(i, block="mlp.shared_experts", width=shared) if shared else None,
    )
    return decoder.layer(i, attention, experts)


def _groups(fields: Fields, experts: int, absent: tuple[int, int] = (1, 1)) -> tuple[int, int]:
    """Read the number of groups of experts, and of groups per token."""
    groups = fields.integer("n_group", absent[0])
    top_groups = fields.integer("topk_group", absent[1])
    if experts % groups:
        raise fields.error("n_group", f"a divisor of the {experts} experts")
    if top_groups > groups:
        raise fields.error("topk_group", f"at most n_group, {groups}")
    if fields.integer("num_experts_per_tok") > top_groups * (experts // groups):
        raise fields.error("num_experts_per_tok", "at most the experts in topk_group groups")
    return groups, top_groups


def _hy_v3(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    bias = fields.flag("attention_bias", False)
    attention = decoder.attention(i, qkv_bias=bias, o_bias=bias, norm="head")
    mlp_bias = fields.flag("mlp_bias", False)
    kinds = fields.array("mlp_layer_types") or ["dense"] + ["sparse"] * (decoder.layers - 1)
    if len(kinds) != decoder.layers or not set(map(str, kinds)) <= {"dense", "sparse"}:
        raise fields.error("mlp_layer_types", f"dense or sparse for each of {decoder.layers}")
    if kinds[i] == "dense":
        return decoder.layer(i, attention, decoder.mlp(i, bias=mlp_bias))
    width = fields.integer("moe_intermediate_size")
    router = decoder.router(
        i,
        decoder.count_experts("num_experts", "num_local_experts"),
        normalize=True,
        name="mlp.router.gate.weight",
        bias=("mlp.expert_bias", "mlp.e_score_correction_bias"),
        scoring="sigmoid",
        scale=fields.number("router_scaling_factor", 2.826),
        in_float32=True,
    )
    shared = decoder.mlp(
        i,
        bias=mlp_bias,
        block="mlp.shared_mlp",
        saved="mlp.shared_experts",
        width=width * fields.integer("num_shared_experts", 1),
    )
    return decoder.layer(i, attention, decoder.experts(i, router, width=width, shared=shared))


def _ernie(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    bias = fields.flag("use_bias", False)
    attention = decoder.attention(i, qkv_bias=bias, o_bias=bias)
    return decoder.layer(i, attention, decoder.mlp(i, bias=bias))


def _ernie_moe(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    if fields.flag("use_bias", False):
        raise fields.error("use_bias", "false, because the LM head would have a bias, too")
    attention = decoder.attention(i)
    first = fields.integer("moe_layer_start_index", 1, low=0)
    last = fields.integer("moe_layer_end_index", -1, low=-1)
    last = decoder.layers - 1 if last == -1 else last
    sparse = first <= i <= last and (i + 1) % fields.integer("moe_layer_interval", 1) == 0
    if not sparse:
        return decoder.layer(i, attention, decoder.mlp(i))
    width = fields.integer("moe_intermediate_size")
    count = decoder.count_experts("moe_num_experts", "num_experts")
    router = decoder.router(
        i,
        count,
        top_k="moe_k" if fields.has("moe_k") else "num_experts_per_tok",
        normalize=True,
        bias=(
            "mlp.moe_statics.e_score_correction_bias",
            "mlp.gate.moe_statics.e_score_correction_bias",
        ),
        bias_shape=(1, count),
        in_float32=True,
    )
    shared = fields.integer("moe_num_shared_experts", 2, low=0)
    experts = decoder.experts(
        i,
        router,
        width=width,
        shared=decoder.mlp(i, block="mlp.shared_experts", width=width * shared) if shared else None,
    )
    return decoder.layer(i, attention, experts)


def _hunyuan_attention(fields: Fields, decoder: Decoder, i: int) -> AttentionSpec:
    bias = fields.flag("attention_bias", False)
    return decoder.attention(
        i,
        qkv_bias=bias,
        o_bias=bias,
        norm="rotated head",
        norm_names=("query_layernorm", "key_layernorm"),
        rope=replace(decoder.rope, amplitude=1.0),  # the norms after it remove any other
    )


def _hunyuan(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    return decoder.layer(i, _hunyuan_attention(fields, decoder, i), decoder.mlp(i))


def _hunyuan_moe(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    top_k = "moe_topk" if fields.has("moe_topk") else "num_experts_per_tok"
    if isinstance(of_layers := fields.values.get(top_k), list):
        if len(of_layers) != decoder.layers:
            raise fields.error(top_k, f"a number, or one for each of the {decoder.layers} layers")
        values = fields.values | {top_k: of_layers[i]}
        decoder = replace(decoder, fields=replace(fields, values=values))
    router = decoder.router(
        i,
        decoder.count_experts("num_experts", "num_local_experts"),
        normalize=True,
        top_k=top_k,
        name="mlp.gate.wg.weight",
        in_float32=True,
    )
    experts = decoder.experts(
        i,
        router,
        width=fields.integer("intermediate_size"),
        shared=decoder.mlp(i, block="mlp.shared_mlp"),
    )
    return decoder.layer(i, _hunyuan_attention(fields, decoder, i), experts)


def _ministral3(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    window = _window(fields, default=None)
    return decoder.layer(i, decoder.attention(i, window=window), decoder.mlp(i))


def _seed_oss(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    attention = decoder.attention(
        i,
        qkv_bias=fields.flag("attention_bias", True),
        o_bias=fields.flag("attention_out_bias", False),
    )
    return decoder.layer(i, attention, decoder.mlp(i, bias=fields.flag("mlp_bias", False)))


def _smollm3(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    interval = fields.integer("no_rope_layer_interval", 4)
    rotated = fields.array("no_rope_layers") or [
        int((layer + 1) % interval != 0) for layer in range(decoder.layers)
    ]
    if len(rotated) != decoder.layers or any(each not in (0, 1) for each in rotated):
        raise fields.error("no_rope_layers", f"0 or 1 for each of the {decoder.layers} layers")
    window = _window(fields, default=None) if fields.flag("use_sliding_window", False) else None
    if fields.has("layer_types"):
        sliding = _layer_types(fields, decoder)[i] == "sliding_attention"
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


AFTER = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
"""Norms of the blocks' outputs alone; see `Decoder.layer`."""


def _olmo2(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    bias = fields.flag("attention_bias", False)
    attention = decoder.attention(i, qkv_bias=bias, o_bias=bias, norm="heads")
    return decoder.layer(i, attention, decoder.mlp(i), AFTER)


def _olmo3(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    bias = fields.flag("attention_bias", False)
    sliding, window = _is_sliding(fields, decoder, i, period=4), _window(fields, default=4096)
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


def _exaone4(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    window, rope = _window(fields, default=4096), decoder.rope
    if window is not None:
        # Some files have a text such as "LLLG" beside layer_types, which comes first.
        period = 1 if fields.has("layer_types") else fields.integer("sliding_window_pattern", 4)
        if not _is_sliding(fields, decoder, i, period):
            window, rope = None, replace(rope, dim=0)
    attention = decoder.attention(i, norm="head", window=window, rope=rope)
    return decoder.layer(i, attention, decoder.mlp(i), AFTER)


def _is_sliding(fields: Fields, decoder: Decoder, i: int, period: int) -> bool:
    """Tell whether layer i has a window: by `layer_types`, or else all but each period's last."""
    if fields.has("layer_types"):
        return bool(_layer_types(fields, decoder)[i] == "sliding_attention")
    return (i + 1) % period != 0


@dataclass(frozen=True, slots=True)
class Family:
    """One model family.

    Attributes:
        model_type: its name in config.json.
        describe_layer: describes layer i.
        max_position_embeddings, rms_norm_eps, rope_theta, rotated, tied: their values where
            config.json has none, as in transformers. `rotated` is `partial_rotary_factor`; families
            with None do not have the field.
        neighbours: as in RopeSpec.
        ropes_by_kind: layers with and without a window have their own rotary embeddings.
        embedding: its name in the checkpoint.
        other_types: other names of the family in config.json.
        finish: changes the described model; None if nothing is left to do.
        skipped: name patterns for more tensors without an effect; `{layers}` is the number of
            layers, because heads that predict several tokens are stored as layers.
    """

    model_type: str
    describe_layer: Callable[[Fields, Decoder, int], LayerSpec]
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rotated: float | None = None
    tied: bool = False
    neighbours: bool = False
    ropes_by_kind: bool = False
    embedding: str = "model.embed_tokens"
    other_types: tuple[str, ...] = ()
    finish: Callable[[Fields, ModelSpec], ModelSpec] | None = None
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A model for several modalities. weft loads its text model.

    Attributes:
        model_type: its name in config.json.
        texts: the families that its text model may have; the first is the default.
        text_ties: `tie_word_embeddings` in the text model's fields counts also where the model's
            own is false.
    """

    model_type: str
    texts: tuple[Family, ...]
    text_ties: bool = False


NEXT_LAYER = ("model.layers.{layers}.*",)
"""The layer after the last one; it predicts a second token."""

QWEN2_VL = Family("qwen2_vl_text", _qwen2, 32_768, 1e-5, 1_000_000.0)
QWEN2_5_VL = Family("qwen2_5_vl_text", _qwen2, 32_768, 1e-5, 1_000_000.0)
QWEN3_VL = Family("qwen3_vl_text", _qwen3_vl, 128_000, 1e-6, 500_000.0)
QWEN3_VL_MOE = Family("qwen3_vl_moe_text", _qwen3_vl_moe, 128_000, 1e-6, 500_000.0)
FAMILIES = {
    "LlamaForCausalLM": Family("llama", _llama, 2048),
    "GraniteForCausalLM": Family("granite", _granite, 2048, finish=_scaled_ends),
    "MistralForCausalLM": Family("mistral", _mistral, 131_072),
    "MixtralForCausalLM": Family("mixtral", _mixtral, 131_072, 1e-5, 1_000_000.0),
    "Qwen2ForCausalLM": Family("qwen2", _qwen2, 32_768),
    "Qwen2MoeForCausalLM": Family("qwen2_moe", _qwen2_moe, 32_768),
    "Qwen3ForCausalLM": Family("qwen3", _qwen3, 32_768),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", _qwen3_moe, 32_768),
    "Phi3ForCausalLM": Family("phi3", _phi3, 4096, 1e-5, rotated=1.0),
    "GlmForCausalLM": Family("glm", _glm, 131_072, 1.5625e-7, rotated=0.5, neighbours=True),
    "Glm4ForCausalLM": Family("glm4", _glm4, 131_072, 1.5625e-7, rotated=0.5, neighbours=True),
    "Glm4MoeForCausalLM": Family(
        "glm4_moe", _glm4_moe, 131_072, 1e-5, rotated=0.5, skipped=NEXT_LAYER
    ),
    "BailingMoeV2ForCausalLM": Family(
        "bailing_moe",
        _bailing_moe,
        32_768,
        1e-6,
        600_000.0,
        rotated=1.0,
        embedding="model.word_embeddings",
        other_types=("bailing_moe_v2",),
        skipped=NEXT_LAYER,
    ),
    "MiniMaxM2ForCausalLM": Family(
        "minimax_m2", _minimax_m2, 196_608, 1e-6, 5_000_000.0, rotated=1.0
    ),
    "HYV3ForCausalLM": Family("hy_v3", _hy_v3, 131_072, 1e-5, 11_158_840.0, skipped=NEXT_LAYER),
    "Ernie4_5ForCausalLM": Family(
        "ernie4_5", _ernie, 131_072, 1e-5, 500_000.0, tied=True, neighbours=True
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        "ernie4_5_moe",
        _ernie_moe,
        131_072,
        1e-5,
        500_000.0,
        tied=True,
        neighbours=True,
        skipped=("model.mtp_*", "mtp_*"),
    ),
    "HunYuanDenseV1ForCausalLM": Family("hunyuan_v1_dense", _hunyuan, 2048, 1e-5),
    "HunYuanMoEV1ForCausalLM": Family("hunyuan_v1_moe", _hunyuan_moe, 2048, 1e-5),
    "Ministral3ForCausalLM": Family("ministral3", _ministral3, 262_144, 1e-5, 1_000_000.0),
    "SeedOssForCausalLM": Family("seed_oss", _seed_oss, 524_288),
    "Olmo2ForCausalLM": Family("olmo2", _olmo2, 2048, 1e-5),
    "Olmo3ForCausalLM": Family("olmo3", _olmo3, 2048, 1e-5, 500_000.0, ropes_by_kind=True),
    "Exaone4ForCausalLM": Family("exaone4", _exaone4, 2048, 1e-5),
    "SmolLM3ForCausalLM": Family("smollm3", _smollm3, 32_768, 1e-6, 2_000_000.0, tied=True),
}


WRAPPERS = {
    "Qwen2VLForConditionalGeneration": Wrapper("qwen2_vl", (QWEN2_VL,), text_ties=True),
    "Qwen2_5_VLForConditionalGeneration": Wrapper("qwen2_5_vl", (QWEN2_5_VL,), text_ties=True),
    "Qwen3VLForConditionalGeneration": Wrapper("qwen3_vl", (QWEN3_VL,)),
    "Qwen3VLMoeForConditionalGeneration": Wrapper("qwen3_vl_moe", (QWEN3_VL_MOE,)),
    "Mistral3ForConditionalGeneration": Wrapper(
        "mistral3", (FAMILIES["MistralForCausalLM"], FAMILIES["Ministral3ForCausalLM"])
    ),
}
"""Models for several modalities."""

ALL_FAMILIES = tuple(
    dict.fromkeys(
        (*FAMILIES.values(), *(text for each in WRAPPERS.values() for text in each.texts))
    )
)
"""The families, also those of text models alone."""

ARCHITECTURES = (*FAMILIES, *WRAPPERS)
"""The architectures that weft loads."""


SKIPPED = (
    *("*.rotary_emb.inv_freq", "mtp.*", "v_head.*"),
    *("visual.*", "vision_tower.*", "multi_modal_projector.*"),
    *("model.visual.*", "model.vision_tower.*", "model.multi_modal_projector.*"),
)
"""Tensors without an effect on a text's next token: tables that older versions of transformers
saved, heads that predict several tokens, values for training, and image encoders."""


def _dtype(whole: Fields, fields: Fields, default: str) -> str:
    """Read the weights' dtype; the language model's own `fields` come first."""
    for holder in (fields, whole):
        for name in ("dtype", "torch_dtype"):
            if holder.has(name):
                return holder.choice(name, tuple(DTYPE_BYTES), default)
    return default


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


def _check_layer_types(fields: Fields, decoder: Decoder, layers: Sequence[LayerSpec]) -> None:
    """Refuse `layer_types` that do not agree with the layers' windows."""
    if not fields.has("layer_types"):
        return
    for i, (kind, layer) in enumerate(zip(_layer_types(fields, decoder), layers, strict=True)):
        full = layer.attention.sliding_window is None
        if kind != (wanted := "full_attention" if full else "sliding_attention"):
            raise fields.error("layer_types", f"{wanted} in layer {i}, as sliding_window says")


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
