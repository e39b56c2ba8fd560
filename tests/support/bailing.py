"""Ling 2.0's checkpoints (`BailingMoeV2ForCausalLM`), which transformers has no class for.

A layer computes what GLM-4.5's does, but config.json and the tensors have other names, and queries,
keys and values are one tensor. So transformers' GLM-4.5 is the oracle.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GLM = "glm4_moe"
"""The folder in a checkpoint with the same model as GLM-4.5."""
NAMES = {
    "model.embed_tokens.": "model.word_embeddings.",
    ".self_attn.o_proj.": ".attention.dense.",
    ".self_attn.q_norm.": ".attention.query_layernorm.",
    ".self_attn.k_norm.": ".attention.key_layernorm.",
    ".gate.e_score_correction_bias": ".gate.expert_bias",
}
FIELDS = {
    "attention_bias": "use_qkv_bias",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
}
DEFAULTS: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "n_group": 8,
    "num_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "topk_group": 4,
    "use_qk_norm": True,
    "use_qkv_bias": False,
}
"""Fields that config.json may lack, as in the published configuration_bailing_moe_v2.py."""


def rewrite(path: Path) -> None:
    """Turn a GLM-4.5 checkpoint into Ling's form, and keep the original in a folder inside it."""
    original = path / GLM
    original.mkdir()
    for file in list(path.iterdir()):
        if file.suffix in (".json", ".safetensors"):
            shutil.move(file, original)
    tensors = load_file(original / "model.safetensors")
    for stem in [name.removesuffix("q_proj.weight") for name in tensors if "q_proj.w" in name]:
        for kind in ("weight", "bias"):
            names = [f"{stem}{part}_proj.{kind}" for part in "qkv"]
            if names[0] in tensors:
                rows = torch.cat([tensors.pop(name) for name in names])
                fused = stem.replace("self_attn", "attention")
                tensors[f"{fused}query_key_value.{kind}"] = rows
    save_file({_renamed(name): tensors[name] for name in tensors}, path / "model.safetensors")
    shutil.copy(original / "generation_config.json", path)
    config = json.loads((original / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(_config(config)))


def _renamed(name: str) -> str:
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def _config(glm: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json as Ling-1T's: with `rotary_dim`, not `partial_rotary_factor`."""
    assert glm["norm_topk_prob"]
    rope = glm.pop("rope_parameters")
    config = {FIELDS.get(name, name): value for name, value in glm.items()}
    config |= {
        "architectures": ["BailingMoeV2ForCausalLM"],
        "model_type": "bailing_moe",
        "moe_router_enable_expert_bias": True,
        "rope_theta": rope.pop("rope_theta"),
        "rotary_dim": int(rope.pop("partial_rotary_factor") * glm["head_dim"]),
        "rope_scaling": rope if rope["rope_type"] != "default" else None,
        "router_dtype": "fp32",
        "score_function": "sigmoid",
        "use_bias": False,
        "use_rmsnorm": True,
    }
    return {name: config[name] for name in config if config[name] != DEFAULTS.get(name)}
