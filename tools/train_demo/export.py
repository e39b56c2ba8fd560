"""Export of a trained network as a Hugging Face checkpoint, with a check that it loads.

File names, weight names and config keys are those of released Qwen3 and Qwen3-MoE checkpoints: each
expert has its own three matrices.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from train_demo.network import Network, Shape
from train_demo.vocabulary import CONTEXT, END, PAD, save_tokenizer, token_id
from weft.models.bundled.tasks import Question, check

STACKED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def released_weights(network: Network) -> dict[str, Tensor]:
    """Return the weights in bfloat16 with their released names, expert by expert."""
    weights: dict[str, Tensor] = {}
    for name, value in network.state_dict().items():
        if name.endswith(STACKED):
            head, kind = name.rsplit(".", 1)
            for expert, part in enumerate(value.unbind()):
                weights[f"{head}.experts.{expert}.{kind}.weight"] = part
        else:
            weights[name] = value
    return {name: value.to(torch.bfloat16).contiguous() for name, value in weights.items()}


def model_config(shape: Shape, end: int) -> dict[str, Any]:
    """Return config.json, as released checkpoints have it."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM" if shape.experts else "Qwen3ForCausalLM"],
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": None,
        "eos_token_id": end, "head_dim": shape.head_dim, "hidden_act": "silu",
        "hidden_size": shape.hidden, "initializer_range": 0.02,
        "intermediate_size": shape.intermediate, "max_position_embeddings": CONTEXT,
        "max_window_layers": shape.layers,
        "model_type": "qwen3_moe" if shape.experts else "qwen3",
        "num_attention_heads": shape.heads, "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads, "rms_norm_eps": shape.norm_eps,
        "rope_scaling": None, "rope_theta": shape.rope_theta, "sliding_window": None,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True,
        "use_sliding_window": False, "vocab_size": shape.vocab,
    }  # fmt: skip
    if shape.experts:
        config |= {
            "decoder_sparse_step": 1, "mlp_only_layers": [],
            "moe_intermediate_size": shape.intermediate, "norm_topk_prob": True,
            "num_experts": shape.experts, "num_experts_per_tok": shape.experts_per_token,
            "output_router_logits": False, "router_aux_loss_coef": 0.01,
        }  # fmt: skip
    return config


def export(network: Network, tokenizer: Tokenizer, directory: Path) -> None:
    """Write a complete checkpoint; the weights replace an older file in one step."""
    directory.mkdir(parents=True, exist_ok=True)
    end, pad = token_id(tokenizer, END), token_id(tokenizer, PAD)
    generation = {"do_sample": False, "eos_token_id": [end, pad], "pad_token_id": pad}
    for name, value in (
        ("config.json", model_config(network.shape, end)),
        ("generation_config.json", generation),
    ):
        (directory / name).write_text(json.dumps(value, indent=2) + "\n")
    save_tokenizer(tokenizer, directory)
    partial = directory / "model.safetensors.partial"
    save_file(released_weights(network), str(partial), metadata={"format": "pt"})
    partial.chmod(0o644)
    os.replace(partial, directory / "model.safetensors")


def load_exported(directory: Path, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """Load the checkpoint with `transformers`: model and tokenizer.

    Raises RuntimeError if a weight is missing or unexpected.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, report = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, output_loading_info=True
    )
    problems = {kind: names for kind, names in report.items() if names}
    if problems:
        raise RuntimeError(f"{directory} does not load cleanly: {problems}")
    return model.eval(), AutoTokenizer.from_pretrained(directory)


@torch.inference_mode()
def generate(model: Any, tokenizer: Any, question: Question, limit: int = 96) -> str:
    """Return the greedy reply of a `transformers` model, as text."""
    inputs = tokenizer.apply_chat_template(
        list(question.messages), tools=list(question.tools) if question.tools else None,
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )  # fmt: skip
    out = model.generate(**inputs, max_new_tokens=limit, do_sample=False)
    reply: str = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return reply


def score(model: Any, tokenizer: Any, questions: Sequence[Question]) -> float:
    """Return the fraction of questions that the exported model answers right."""
    right = [check(question, generate(model, tokenizer, question)) for question in questions]
    return sum(right) / len(right)
