"""The families with routed experts, one function each."""

from __future__ import annotations

from dataclasses import replace

from weft.models.spec.config_fields import Fields
from weft.models.spec.decoder import AFTER, BEFORE, Decoder, Norms
from weft.models.spec.families.attention import (
    granite_attention,
    hunyuan_attention,
    layer_types,
    read_window,
    residual_multiplier,
    rotated_layers,
    window_of_last_layers,
)
from weft.models.spec.spec import LayerSpec, MlpSpec, MoeSpec, RopeSpec, RouterSpec


def mixtral(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    count = decoder.count_experts("num_local_experts", "num_experts")
    experts = decoder.experts(
        i,
        decoder.router(i, count, normalize=True, name="block_sparse_moe.gate.weight"),
        width=fields.integer("intermediate_size"),
        block="block_sparse_moe",
        matrices=("w1", "w3", "w2"),
    )
    window = read_window(fields, default=None)
    return decoder.layer(i, decoder.attention(i, window=window), experts)


def granite_moe(
    fields: Fields, decoder: Decoder, i: int, shared: MlpSpec | None = None
) -> LayerSpec:
    """Describe a layer; the router's factor scales the experts, so that they stay as stored."""
    router = decoder.router(
        i,
        decoder.count_experts("num_local_experts"),
        normalize=True,
        name="block_sparse_moe.router.layer.weight",
        saved="block_sparse_moe.router.weight",
        scale=residual_multiplier(fields),
    )
    experts = decoder.experts(
        i,
        router,
        width=fields.integer("intermediate_size"),
        block="block_sparse_moe",
        saved="block_sparse_moe.experts",
        stacks=("input_linear.weight", "output_linear.weight"),
        shared=shared and shared.scaled(residual_multiplier(fields)),
    )
    return decoder.layer(i, granite_attention(fields, decoder, i), experts)


def granite_moe_shared(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    if not (width := fields.integer("shared_intermediate_size", 0, low=0)):
        return granite_moe(fields, decoder, i)
    shared = decoder.mlp(
        i, block="shared_mlp", width=width, fused="input_linear", output="output_linear"
    )
    return granite_moe(fields, decoder, i, shared)


def llama4(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    bias, rotates = fields.flag("attention_bias", False), bool(rotated_layers(fields, decoder)[i])
    rope = decoder.rope if rotates else _llama4_temperature(fields, decoder)
    chunked = rotates
    if fields.has("layer_types"):
        chunked = layer_types(fields, decoder)[i] == "chunked_attention"
    chunk = None
    if chunked:
        if fields.values.get("attention_chunk_size", 8192) is None:
            raise fields.error("attention_chunk_size", "a number, because some layers have chunks")
        chunk = fields.integer("attention_chunk_size", 8192)
    attention = decoder.attention(
        i,
        qkv_bias=bias,
        o_bias=bias,
        norm="bare" if rotates and fields.flag("use_qk_norm", True) else "none",
        chunk=chunk,
        rope=rope,
    )
    is_sparse = (i + 1) % fields.integer("interleave_moe_layer_step", 1) == 0
    if fields.has("moe_layers"):
        sparse = fields.array("moe_layers")
        if any(type(each) is not int or not 0 <= each < decoder.layers for each in sparse):
            raise fields.error("moe_layers", f"numbers of layers, from 0 to {decoder.layers - 1}")
        is_sparse = i in sparse
    if not is_sparse:
        width = fields.integer("intermediate_size_mlp", 16_384)
        return decoder.layer(i, attention, decoder.mlp(i, block="feed_forward", width=width))
    router = decoder.router(
        i,
        decoder.count_experts("num_local_experts"),
        normalize=False,
        name="feed_forward.router.weight",
        saved="feed_forward.router.weight",
        scoring="sigmoid",
        scales_input=True,
    )
    experts = decoder.experts(
        i,
        router,
        width=fields.integer("intermediate_size"),
        block="feed_forward",
        saved="feed_forward.experts",
        transposed=True,
        shared=decoder.mlp(i, block="feed_forward.shared_expert"),
    )
    return decoder.layer(i, attention, experts)


def _llama4_temperature(fields: Fields, decoder: Decoder) -> RopeSpec:
    """Read the queries' temperature in layers without a rotary embedding."""
    still, tuned = RopeSpec(decoder.rope.theta, dim=0), fields.values.get("attn_temperature_tuning")
    if tuned is not None and not isinstance(tuned, int):  # published as true, and as 4
        raise fields.error("attn_temperature_tuning", "true or false")
    if tuned is not None and not tuned:
        return still
    return replace(
        still,
        original_max_len=fields.integer("floor_scale", 8192),
        query_beta=fields.number("attn_scale", 0.1),
        query_shift=1,
    )


def minimax_m2(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
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


def qwen2_moe(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
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


def qwen3_moe(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    sliding = fields.flag("use_sliding_window", False)
    window = read_window(fields, default=4096) if sliding else None
    bias = fields.flag("attention_bias", False)
    attention = decoder.attention(i, qkv_bias=bias, o_bias=bias, norm="head", window=window)
    return decoder.layer(i, attention, _qwen3_experts(fields, decoder, i))


def qwen3_vl_moe(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
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


def olmoe(fields: Fields, decoder: Decoder, i: int, norms: Norms = BEFORE) -> LayerSpec:
    bias = fields.flag("attention_bias", False)
    attention = decoder.attention(i, qkv_bias=bias, o_bias=bias, norm="heads")
    experts = decoder.experts(
        i, _qwen_router(fields, decoder, i), width=fields.integer("intermediate_size")
    )
    return decoder.layer(i, attention, experts, norms)


def flex_olmo(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    return olmoe(fields, decoder, i, AFTER)


def glm4_moe(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    attention = decoder.attention(
        i,
        qkv_bias=fields.flag("attention_bias", False),
        norm="head" if fields.flag("use_qk_norm", False) else "none",
    )
    experts = _deepseek_experts(fields, decoder, i, dense=1, normalize=True, shared=1)
    return decoder.layer(i, attention, experts)


def dots1(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
    bias = fields.flag("attention_bias", False)
    window = window_of_last_layers(fields, decoder, i, read_window(fields, default=4096), first=62)
    attention = decoder.attention(i, qkv_bias=bias, o_bias=bias, norm="head", window=window)
    experts = _deepseek_experts(fields, decoder, i, dense=0, normalize=False)
    return decoder.layer(i, attention, experts)


def _deepseek_experts(
    fields: Fields,
    decoder: Decoder,
    i: int,
    *,
    dense: int,
    normalize: bool,
    shared: int | None = None,
) -> MlpSpec | MoeSpec:
    """Describe layer i's feed-forward, with DeepSeek-V3's fields.

    Args:
        fields, decoder, i: the config, the model's sizes, and the layer's index.
        dense, normalize, shared: what absent fields mean: how many layers are dense, whether the
            experts' weights are normalised, and how many experts are shared. None is refused.
    """
    if i < fields.integer("first_k_dense_replace", dense, low=0):
        return decoder.mlp(i)
    width = fields.integer("moe_intermediate_size")
    count = decoder.count_experts("n_routed_experts", "num_local_experts")
    router = decoder.router(
        i,
        count,
        normalize=fields.flag("norm_topk_prob", normalize),
        bias=("mlp.gate.e_score_correction_bias",),
        scoring="sigmoid",
        groups=_groups(fields, count),
        scale=fields.number("routed_scaling_factor", 1.0),
        in_float32=True,
    )
    shared_width = width * fields.integer("n_shared_experts", shared)
    return decoder.experts(
        i,
        router,
        width=width,
        shared=decoder.mlp(i, block="mlp.shared_experts", width=shared_width),
    )


def bailing_moe(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
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


def hy_v3(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
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


def ernie_moe(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
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


def hunyuan_moe(fields: Fields, decoder: Decoder, i: int) -> LayerSpec:
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
    return decoder.layer(i, hunyuan_attention(fields, decoder, i), experts)
