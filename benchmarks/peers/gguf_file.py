"""A Hugging Face checkpoint as one GGUF file in bfloat16 or Q4_0, for llama.cpp.

Written with the `gguf` package, because llama.cpp's own converter knows
tokenizers by a hash and refuses those of made-up checkpoints. Handles qwen2
and qwen3_moe with byte-level BPE: the shapes that are raced. Norms, biases
and routers are float32, as llama.cpp's converter has them.

The names of tensors are weft's own table. Not handled: rope scaling, sliding windows, other
families.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from weft.models.checkpoint.gguf_model import LAYER, TOP

if TYPE_CHECKING:
    import torch
    from gguf import GGUFWriter

GgufKind = Literal["BF16", "Q4_0"]

_ARCHITECTURE = {"qwen2": "qwen2", "qwen3_moe": "qwen3moe"}
_TOP = {name: part for part, name in TOP.items()}
_OF_LAYER = {name: part for part, name in LAYER.items()}


def convert(checkpoint: Path, out: Path, kind: GgufKind = "BF16") -> Path:
    """Write `out`, with matrices of `kind`, if it is not there; returns it.

    Raises ValueError for a family that is not handled.
    """
    if out.exists():
        return out
    from gguf import GGUFWriter

    config = json.loads((checkpoint / "config.json").read_text())
    # transformers 5 writes `num_local_experts` where published checkpoints have `num_experts`.
    config["num_experts"] = config.get("num_experts") or config.get("num_local_experts") or 0
    family = config["model_type"]
    if family not in _ARCHITECTURE:
        raise ValueError(f"model_type is {family!r}; it must be one of {sorted(_ARCHITECTURE)}")
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_suffix(".part")
    writer = GGUFWriter(part, _ARCHITECTURE[family])
    _write_config(writer, config, kind)
    _write_tokenizer(writer, checkpoint, config)
    _write_tensors(writer, checkpoint, config, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return part.rename(out)


def _write_config(writer: GGUFWriter, config: dict[str, Any], kind: GgufKind) -> None:
    from gguf import LlamaFileType

    writer.add_name("benchmark")
    writer.add_file_type(LlamaFileType[f"MOSTLY_{kind}"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(_rope_theta(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if config["num_experts"]:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _rope_theta(config: dict[str, Any]) -> float:
    """Where transformers 5 and earlier releases write it."""
    return float(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])


def _write_tokenizer(writer: GGUFWriter, checkpoint: Path, config: dict[str, Any]) -> None:
    from gguf import TokenType

    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    model = tokenizer["model"]
    tokens = dict(model["vocab"])
    special = {added["content"]: added["id"] for added in tokenizer["added_tokens"]}
    names = {id: name for name, id in (tokens | special).items()}
    listed = [names.get(i, f"[unused{i}]") for i in range(config["vocab_size"])]
    kinds = [TokenType.CONTROL if name in special else TokenType.NORMAL for name in listed]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(listed)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    end = config["eos_token_id"]
    writer.add_eos_token_id(end[0] if isinstance(end, list) else end)
    writer.add_add_bos_token(False)


def _write_tensors(
    writer: GGUFWriter, checkpoint: Path, config: dict[str, Any], kind: GgufKind
) -> None:
    import torch
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        tensors |= load_file(file)
    for name, tensor in tensors.items():
        if ".experts." not in name:
            _add(writer, _gguf_name(name), tensor, kind)
    for layer in range(config["num_hidden_layers"] if config["num_experts"] else 0):
        for name, part in _OF_LAYER.items():
            if "{expert}" not in name:
                continue
            experts = [
                tensors[f"model.layers.{layer}.{name.format(expert=expert)}.weight"]
                for expert in range(config["num_experts"])
            ]
            _add(writer, f"blk.{layer}.{part}.weight", torch.stack(experts), kind)


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_OF_LAYER[part]}.{kind}"


def _add(writer: GGUFWriter, name: str, tensor: torch.Tensor, kind: GgufKind) -> None:
    """Matrices of `kind`, as bytes (NumPy has no such types); all else in float32."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    if tensor.ndim == 1 or "ffn_gate_inp" in name:
        writer.add_tensor(name, tensor.float().numpy())
    else:
        raw = quantize(tensor.float().numpy(), GGMLQuantizationType[kind])
        writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType[kind])
