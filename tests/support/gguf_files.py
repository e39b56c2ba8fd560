"""GGUF files written by the package `gguf` from small checkpoints, as llama.cpp's converter does.

`write_gguf` also writes the plain checkpoint with the numbers that the file stands for. Nothing
here uses weft.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

ARCHITECTURE = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "phi3": "phi3",
    "glm4": "glm4",
    "smollm3": "smollm3",
}
_PERMUTED = ("llama", "smollm3")
"""Architectures with each head's rows in the order for neighbouring pairs, by the converter."""
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
_GLM4 = {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}
_EXPERTS = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}


def write_gguf(
    source: Path,
    folder: Path,
    kind: Type = Type.Q8_0,
    *,
    pre: str = "gpt-2",
    change: Callable[[gguf.GGUFWriter], None] | None = None,
    extra: dict[str, np.ndarray[Any, Any]] | None = None,
    tensors_each: int = 0,
) -> tuple[Path, Path]:
    """Write the checkpoint `source` as a GGUF file, and dequantised as safetensors.

    Args:
        source: a checkpoint that `make_checkpoint` wrote.
        folder: gets m.gguf and plain/.
        kind: of the matrices. Those that cannot be quantised by `gguf` get random blocks.
        pre: the tokenizer's split.
        change: adds metadata.
        extra: more tensors, as they are.
        tensors_each: splits the model into files with as many tensors; 0 for one file.

    Returns:
        The file, the first of several, and the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file, plain = folder / "m.gguf", folder / "plain"
    config = json.loads((source / "config.json").read_text())
    family = config["model_type"]
    writer = gguf.GGUFWriter(file, ARCHITECTURE[family], split_max_tensors=tensors_each)
    _write_config(writer, config, family)
    write_tokenizer(writer, source, pre)
    if change is not None:
        change(writer)
    tensors, held = load_file(source / "model.safetensors"), {}
    heads = (config["num_attention_heads"], config["num_key_value_heads"])
    stacked: dict[str, list[np.ndarray[Any, Any]]] = {}
    types: dict[str, Type] = {}
    generator = np.random.default_rng(0)
    for name in sorted(tensors, key=_in_order):
        tensor = tensors[name].float()
        block, _ = gguf.GGML_QUANT_SIZES[kind]
        matrix = tensor.ndim > 1 and "gate.weight" not in name
        own = kind if matrix and tensor.shape[-1] % block == 0 else Type.F32
        packed, held[name] = _packed(tensor.numpy(), own, generator)
        stored = _name(name)
        if ARCHITECTURE[family] in _PERMUTED and (".attn_q." in stored or ".attn_k." in stored):
            packed = _for_neighbours(packed, heads[".attn_k." in stored])
        if "ffn_gate_inp_shexp" in stored:
            packed = packed[0]
        stacked.setdefault(stored, []).append(packed)
        types[stored] = own
    for stored, parts in stacked.items():
        data = np.stack(parts) if "_exps." in stored else parts[0]
        writer.add_tensor(stored, data, raw_dtype=types[stored])
    for name, data in (extra or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    plain.mkdir()
    for each in source.iterdir():
        if each.suffix in (".json", ".jinja"):
            shutil.copy(each, plain)
    save_file(
        {name: tensor.contiguous() for name, tensor in held.items()}, plain / "model.safetensors"
    )
    return (min(folder.glob("m-*.gguf")) if tensors_each else file), plain


def _in_order(name: str) -> list[int | str]:
    return [f"{int(part):05}" if part.isdigit() else part for part in name.split(".")]


def _packed(
    values: np.ndarray[Any, Any], kind: Type, generator: np.random.Generator
) -> tuple[np.ndarray[Any, Any], torch.Tensor]:
    """Return what the file holds, and the numbers that it stands for."""
    if kind == Type.F32:
        return values, torch.from_numpy(values.copy())
    if kind == Type.F16:
        return values.astype(np.float16), torch.from_numpy(values.astype(np.float16))
    try:
        packed = gguf.quantize(values, kind)
    except NotImplementedError:
        packed = random_blocks(values.shape, kind, generator)
    if kind == Type.BF16:
        return packed, torch.from_numpy(values.copy()).bfloat16()
    return packed, torch.from_numpy(gguf.dequantize(packed, kind).astype(np.float32))


_SCALES = {Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2)}
_SCALES |= {Type.Q6_K: (208,), Type.IQ4_XS: (0,), Type.IQ4_NL: (0,)}


def random_blocks(
    shape: tuple[int, ...], kind: Type, generator: np.random.Generator
) -> np.ndarray[Any, Any]:
    """Return random bytes with small float16 scales, which are where the format has them."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (*shape[:-1], shape[-1] // block, size), np.uint8)
    for start in _SCALES[kind]:
        scale = generator.uniform(1e-4, 4e-4, blocks.shape[:-1]).astype(np.float16)
        blocks[..., start : start + 2] = scale[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def _for_neighbours(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Order each head's rows as llama.cpp's converter does (`LlamaModel.permute`)."""
    split = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(rows.shape))


def _name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    _, _, layer, rest = name.split(".", 3)
    part, _, end = rest.rpartition(".")
    if ".experts." in part:
        return f"blk.{layer}.{_EXPERTS[part.rpartition('.')[2]]}.{end}"
    return f"blk.{layer}.{(_PARTS | _GLM4)[part]}.{end}"


def _write_config(writer: gguf.GGUFWriter, config: dict[str, Any], family: str) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if head_dim := config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    head_dim = head_dim or config["hidden_size"] // config["num_attention_heads"]
    rotated = int(head_dim * config["rope_parameters"].get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(rotated)
    if family == "phi3":
        writer.add_sliding_window(config["sliding_window"] or 0)
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if family != "mixtral" and experts:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if shared := config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(shared)


def write_tokenizer(writer: gguf.GGUFWriter, source: Path, pre: str) -> None:
    """Write byte-level BPE, or SentencePiece's if the vocabulary has single bytes."""
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    settings = json.loads((source / "tokenizer_config.json").read_text())
    added = {each["content"]: each for each in tokenizer["added_tokens"]}
    vocab = tokenizer["model"]["vocab"] | {text: each["id"] for text, each in added.items()}
    texts = sorted(vocab, key=vocab.__getitem__)
    kinds = [gguf.TokenType.NORMAL] * len(texts)
    for text, each in added.items():
        special = gguf.TokenType.CONTROL if each["special"] else gguf.TokenType.USER_DEFINED
        kinds[vocab[text]] = special
    merges = [
        each if isinstance(each, str) else " ".join(each) for each in tokenizer["model"]["merges"]
    ]
    if "<0x00>" in vocab:
        writer.add_tokenizer_model("llama")
        wholes = [merge.replace(" ", "") for merge in merges]
        writer.add_token_scores([-float(wholes.index(t)) if t in wholes else -1e6 for t in texts])
        for i, text in enumerate(texts):
            if text.startswith("<0x"):
                kinds[i] = gguf.TokenType.BYTE
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges(merges)
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    for name, add in (
        ("bos_token", writer.add_bos_token_id),
        ("eos_token", writer.add_eos_token_id),
        ("unk_token", writer.add_unk_token_id),
        ("pad_token", writer.add_pad_token_id),
    ):
        if isinstance(settings.get(name), str):
            add(vocab[settings[name]])
    template = source / "chat_template.jinja"
    if template.exists():
        writer.add_chat_template(template.read_text())
    elif "chat_template" in settings:
        writer.add_chat_template(settings["chat_template"])
