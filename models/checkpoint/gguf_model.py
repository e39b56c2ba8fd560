"""A GGUF file's metadata and tensors -> config.json's fields and tensor names.

The rest of weft then reads a GGUF file as any checkpoint: build.py makes the spec, and
weights.py compares it with the tensors. Each architecture is one entry in `ARCHITECTURES`. Sources:
the names in the package `gguf` (constants.py), and llama.cpp's convert_hf_to_gguf.py, whose changes
are undone here:

- The rows of queries and keys are in the order for neighbouring pairs, in llama's architecture.
- All experts of a layer are in one tensor.
- llama3's rope scaling is a tensor, rope_freqs.weight, with a divisor for each wavelength. It
  becomes longrope with equal divisors for short and long contexts. longrope's divisors are two
  tensors.
- A tied LM head is absent.

A key of the architecture that no table here names is refused, because it may change the numbers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import ModelError, shown
from weft.models.checkpoint.gguf_header import Header, TensorInfo, read_header

if TYPE_CHECKING:
    from weft.models.checkpoint.gguf_tensor import GgufTensor

NEEDED: dict[str, tuple[str, type[Any]]] = {
    "block_count": ("num_hidden_layers", int),
    "context_length": ("max_position_embeddings", int),
    "embedding_length": ("hidden_size", int),
    "attention.head_count": ("num_attention_heads", int),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", float),
}
OPTIONAL: dict[str, tuple[str, type[Any]]] = {
    "attention.head_count_kv": ("num_key_value_heads", int),
    "attention.key_length": ("head_dim", int),
    "feed_forward_length": ("intermediate_size", int),
    "rope.freq_base": ("rope_theta", float),
}
"""Keys of all architectures, after `ARCHITECTURE.`, with config.json's field and type."""

SAMPLING: dict[str, tuple[str, type[Any]]] = {
    "min_p": ("min_p", float),
    "penalty_repeat": ("repetition_penalty", float),
    "temp": ("temperature", float),
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
}
"""Keys after `general.sampling.`, with generation_config.json's field and type."""

ROPE_THETA = 10_000.0
"""llama.cpp's base of the rotary embedding if a file has none."""

ROPE_SCALING: dict[str, dict[str, tuple[str, type[Any]]]] = {
    "none": {},
    "linear": {"factor": ("factor", float)},
    "yarn": {
        "factor": ("factor", float),
        "original_context_length": ("original_max_position_embeddings", int),
        "yarn_beta_fast": ("beta_fast", float),
        "yarn_beta_slow": ("beta_slow", float),
    },
}
"""Values of `rope.scaling.type`, with the keys after `rope.scaling.`."""

ONLY: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0.0,),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),  # 1 is softmax
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_used_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "final_logit_softcapping": (0.0,),
    "interleave_moe_layer_step": (0, 1),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "pooling_type": (0, 3),  # 3 is the last token
    "rope.scale_linear": (1.0,),
    "rope.scaling.factor": (0.0, 1.0),  # without linear or yarn
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
}
"""Keys with supported values."""

HARMLESS = (
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",  # without yarn
    "tensor_data_layout",
    "vocab_size",  # the embedding's rows say it
)
"""Keys without an effect."""

END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")
END_TEXTS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
    *("<end_of_turn>", "<EOT>", "[EOT]", "[EOS]", "<｜end▁of▁sentence｜>"),
)
"""Keys of tokens that end an answer, and texts of control tokens that do, as in llama.cpp."""
CONTROL = 3
"""The type of a control token in tokenizer.ggml.token_type."""

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_GLM4 = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}
MIXTRAL = {
    "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
}
"""Tensor names without .weight or .bias: the model's, those in a layer, and some families' own."""
ROPE_FREQS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_FACTORS = (ROPE_FREQS, SHORT_FACTORS, LONG_FACTORS)
"""Tensors that are a part of the config: divisors of wavelengths."""
EMBEDDING = "token_embd.weight"


@dataclass(frozen=True, slots=True)
class Architecture:
    """One value of general.architecture.

    Attributes:
        name: the class in config.json's `architectures`.
        fields: keys of its own, with config.json's field; all are whole numbers.
        windowed: it has a sliding window, unless the key is absent or 0.
        partial: it rotates `rope.dimension_count` dimensions of a head.
        fixed: fields with one value in llama.cpp.
        flags: fields that are true if a tensor is there.
        layer: tensor names of its own.
        neighbours: whether the rows of queries and keys are in the order for neighbouring pairs.
    """

    name: str
    fields: Mapping[str, str] = field(default_factory=dict)
    windowed: bool = False
    partial: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    layer: Mapping[str, str] = field(default_factory=dict)
    neighbours: bool = False


_BIAS = {"attention_bias": "blk.0.attn_q.bias"}
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
ARCHITECTURES = {
    ("llama", False): Architecture(
        "LlamaForCausalLM",
        flags=_BIAS | {"mlp_bias": "blk.0.ffn_gate.bias"},
        neighbours=True,
    ),
    ("llama", True): Architecture(
        "MixtralForCausalLM",
        fields={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        layer=MIXTRAL,
        neighbours=True,
    ),
    ("qwen2", False): Architecture("Qwen2ForCausalLM"),
    ("qwen2moe", True): Architecture(
        "Qwen2MoeForCausalLM",
        fields=_EXPERTS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        fixed={"norm_topk_prob": False},
    ),
    ("qwen3", False): Architecture("Qwen3ForCausalLM", flags=_BIAS),
    ("qwen3moe", True): Architecture(
        "Qwen3MoeForCausalLM", fields=_EXPERTS, fixed={"norm_topk_prob": True}, flags=_BIAS
    ),
    ("phi3", False): Architecture("Phi3ForCausalLM", windowed=True, partial=True, layer=_FUSED),
    ("glm4", False): Architecture("Glm4ForCausalLM", partial=True, flags=_BIAS, layer=_GLM4),
    ("smollm3", False): Architecture(
        "SmolLM3ForCausalLM",
        fixed={"no_rope_layer_interval": 4},
        flags=_BIAS | {"mlp_bias": "blk.0.ffn_gate.bias"},
        neighbours=True,
    ),
}
"""By general.architecture, and whether the model has experts."""


def gguf_config(file: Path) -> dict[str, Any]:
    """Return the fields that a config.json for a GGUF file's model has.

    Raises:
        ModelError: the file cannot be read (see `read_header`), its architecture is not supported,
            or a key is missing, has a wrong type or has an unsupported value.
    """
    header = read_header(file)
    prefix, architecture = _architecture(header)
    kinds: dict[str, tuple[str, type[Any]]] = {
        **NEEDED,
        **OPTIONAL,
        **{key: (f, int) for key, f in architecture.fields.items()},
    }
    needed = (*NEEDED, *architecture.fields)
    config: dict[str, Any] = {"architectures": [architecture.name]}
    for key, (name, kind) in kinds.items():
        get = header.need if key in needed else header.get
        if (value := get(prefix + key, kind)) is not None:
            config[name] = value
    if EMBEDDING not in header.tensors:
        raise ModelError(f"{file} lacks {EMBEDDING}; get another file")
    config.setdefault("rope_theta", ROPE_THETA)
    heads = config["num_attention_heads"]
    config.setdefault("num_key_value_heads", heads)
    head_dim = config.setdefault("head_dim", max(1, config["hidden_size"] // max(1, heads)))
    config |= architecture.fixed
    config |= {name: tensor in header.tensors for name, tensor in architecture.flags.items()}
    config["vocab_size"] = header.tensors[EMBEDDING].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    config["torch_dtype"] = _dtype(header)
    scaling, keys = _rope_scaling(header, prefix, config["max_position_embeddings"])
    config |= scaling
    if ends := _end_tokens(header):
        config["eos_token_id"] = ends
    if architecture.windowed:
        keys.append("attention.sliding_window")
        config["sliding_window"] = header.get(f"{prefix}attention.sliding_window", int) or None
    if architecture.partial:
        keys.append("rope.dimension_count")
        rotated = header.get(f"{prefix}rope.dimension_count", int) or head_dim
        config["partial_rotary_factor"] = rotated / head_dim
    only = {
        **{key: each for key, each in ONLY.items() if key not in kinds},
        "attention.value_length": (head_dim,),
        "rope.dimension_count": (head_dim,),
        "expert_weights_norm": (architecture.fixed.get("norm_topk_prob", True),),
    }
    _check_others(header, prefix, {*kinds, *keys}, only)
    return config


def gguf_sampling(file: Path) -> dict[str, Any]:
    """Return the fields that a generation_config.json for a GGUF file's model has.

    Other keys for sampling keep their own names.

    Raises:
        ModelError: as `read_header`, or a value has a wrong type.
    """
    header = read_header(file)
    found: dict[str, Any] = {}
    for name in header.metadata:
        key = name.removeprefix("general.sampling.")
        if key in SAMPLING:
            field_name, kind = SAMPLING[key]
            found[field_name] = header.need(name, kind)
        elif key != name:
            found[name] = header.metadata[name]
    return found


def gguf_tensors(file: Path) -> dict[str, GgufTensor]:
    """Return every tensor by the name that it has in other checkpoints; unknown ones by their own.

    Raises:
        ModelError: as `gguf_config`.
    """
    from weft.models.checkpoint.gguf_tensor import GgufTensor

    head_dim = gguf_config(file)["head_dim"]
    header = read_header(file)
    prefix, architecture = _architecture(header)
    found: dict[str, GgufTensor] = {}
    for info in header.tensors.values():
        if info.name in ROPE_FACTORS:
            continue
        part, name = _name(info.name, architecture)
        shape = (1, *info.shape) if part == "ffn_gate_inp_shexp" else info.shape
        turned = architecture.neighbours and part in ("attn_q", "attn_k")
        if "{expert}" not in name:
            found[name] = GgufTensor(info.file, info, shape, info.start, head_dim if turned else 0)
            continue
        experts = header.get(f"{prefix}expert_count", int) or 0
        if shape[0] != experts:
            raise ModelError(f"{file}: {info.name} has {shape[0]} experts; its metadata {experts}")
        for expert in range(experts):
            start = info.start + info.bytes // experts * expert
            found[name.format(expert=expert)] = GgufTensor(info.file, info, shape[1:], start)
    return found


def _architecture(header: Header) -> tuple[str, Architecture]:
    """Return the prefix of the architecture's keys, and its entry."""
    kind = header.get("general.type", str) or "model"
    if kind != "model":
        raise ModelError(f"{header.file}: general.type is {shown(kind)}; supported is 'model'")
    name = header.need("general.architecture", str)
    experts = (header.get(f"{name}.expert_count", int) or 0) > 0
    if (architecture := ARCHITECTURES.get((name, experts))) is None:
        names = dict.fromkeys(known for known, _ in ARCHITECTURES)
        within = f" {'with' if experts else 'without'} experts" if name in names else ""
        raise ModelError(
            f"{header.file}: general.architecture is {shown(name)}{within}; supported is "
            f"{', '.join(names)}. "
            "Others may load as safetensors: give the original model"
        )
    return f"{name}.", architecture


def _dtype(header: Header) -> str:
    """Return the dtype of the matrices; bfloat16 for quantised ones."""
    types = {info.type for info in header.tensors.values() if len(info.shape) > 1}
    if types <= {"F32"}:
        return "float32"
    return "float16" if types <= {"F32", "F16"} else "bfloat16"


def _rope_scaling(header: Header, prefix: str, context: int) -> tuple[dict[str, Any], list[str]]:
    """Return config.json's fields for the scaling, and the keys that they are from."""
    section = f"{prefix}rope.scaling."
    kind = header.get(f"{section}type", str) or "none"
    if kind not in ROPE_SCALING:
        names = ", ".join(ROPE_SCALING)
        raise ModelError(f"{header.file}: {section}type is {shown(kind)}; supported is {names}")
    scaling: dict[str, Any] = {"rope_type": kind}
    for key, (name, type_) in ROPE_SCALING[kind].items():
        if (value := header.get(section + key, type_)) is not None:
            scaling[name] = value
    keys = ["rope.scaling.type", *(f"rope.scaling.{key}" for key in ROPE_SCALING[kind])]
    tensors = [name for name in ROPE_FACTORS if name in header.tensors]
    if not tensors:
        return ({} if kind == "none" else {"rope_scaling": scaling}), keys
    if kind != "none":
        raise ModelError(f"{header.file} has both {section}type {shown(kind)} and {tensors[0]}")
    if tensors == [ROPE_FREQS]:
        factors = _factors(header.tensors[ROPE_FREQS])
        scaling = {"short_factor": factors, "long_factor": factors}
        scaling |= {"factor": 1.0, "attention_factor": 1.0}
        original = context
    elif tensors == [SHORT_FACTORS, LONG_FACTORS]:
        short, long = (_factors(header.tensors[name]) for name in tensors)
        scaling = {"short_factor": short, "long_factor": long}
        keys.append("rope.scaling.attn_factor")
        if amplitude := header.get(f"{section}attn_factor", float):
            scaling["attention_factor"] = amplitude
        original = header.need(f"{section}original_context_length", int)
    else:
        names = " and ".join(tensors)
        raise ModelError(
            f"{header.file} has {names}; supported is {ROPE_FREQS}, or {SHORT_FACTORS} and "
            f"{LONG_FACTORS}"
        )
    scaling["rope_type"] = "longrope"
    return {"rope_scaling": scaling, "original_max_position_embeddings": original}, keys


def _factors(info: TensorInfo) -> list[float]:
    """Read a small float32 vector."""
    file = info.file
    if info.type != "F32" or len(info.shape) != 1:
        raise ModelError(
            f"{file}: {info.name} is {info.type} with shape {info.shape}; supported is an F32 "
            "vector"
        )
    with file.open("rb") as opened:
        opened.seek(info.start)
        data = opened.read(info.bytes)
    factors = list(struct.unpack(f"<{len(data) // 4}f", data))
    if not all(0 < factor < math.inf for factor in factors):
        raise ModelError(f"{file}: {info.name} holds a divisor that is not above 0")
    return factors


def _end_tokens(header: Header) -> list[int]:
    """Return the tokens that end an answer."""
    ids = [header.get(f"tokenizer.ggml.{key}", int) for key in END_TOKENS]
    texts = header.get("tokenizer.ggml.tokens", list) or []
    types = header.get("tokenizer.ggml.token_type", list) or []
    named = {texts[i]: i for i, kind in enumerate(types[: len(texts)]) if kind == CONTROL}
    ids += [named.get(text) for text in END_TEXTS]
    return list(dict.fromkeys(id for id in ids if id is not None))


def _check_others(
    header: Header, prefix: str, read: set[str], only: Mapping[str, tuple[Any, ...]]
) -> None:
    """Refuse the architecture's other keys, unless they have a supported value or no effect."""
    for name, value in header.metadata.items():
        key = name.removeprefix(prefix)
        if key == name or key in read or key in HARMLESS:
            continue
        if key not in only:
            raise ModelError(
                f"{header.file}: {name} is {shown(value)}; weft does not know this key, so the "
                "answers could be wrong. Give the original model"
            )
        if value not in only[key]:
            supported = " or ".join(map(shown, only[key]))
            raise ModelError(f"{header.file}: {name} is {shown(value)}; supported is {supported}")


def _name(stored: str, architecture: Architecture) -> tuple[str, str]:
    """Return a tensor's part of the model, and its name in other checkpoints."""
    stem, _, kind = stored.rpartition(".")
    if stem in TOP:
        return stem, f"{TOP[stem]}.{kind}"
    block, layer, part = (*stem.split(".", 2), "", "")[:3]
    name = architecture.layer.get(part) or LAYER.get(part)
    if block != "blk" or name is None or kind not in ("weight", "bias"):
        return stem, stored
    return part, f"model.layers.{layer}.{name}.{kind}"
