"""Tiny random checkpoints of every family, made by transformers, in a second.

What is written is what the Hugging Face hub holds: config.json,
generation_config.json, safetensors, and a byte-level BPE tokenizer with a
ChatML template. Weights are larger than usual, and norms and biases are
random too, so that a wrong layer shows in the logits.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from support import bailing

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCAB_SIZE = 320

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

FAMILIES = {
    "llama": "LlamaConfig",
    "granite": "GraniteConfig",
    "granitemoe": "GraniteMoeConfig",
    "granitemoeshared": "GraniteMoeSharedConfig",
    "cohere": "CohereConfig",
    "cohere2": "Cohere2Config",
    "stablelm": "StableLmConfig",
    "llama4_text": "Llama4TextConfig",
    "llama4": "Llama4Config",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "qwen3_moe": "Qwen3MoeConfig",
    "mixtral": "MixtralConfig",
    "qwen2_moe": "Qwen2MoeConfig",
    "phi3": "Phi3Config",
    "glm": "GlmConfig",
    "glm4_moe": "Glm4MoeConfig",
    "dots1": "Dots1Config",
    "bailing_moe": "Glm4MoeConfig",
    "minimax_m2": "MiniMaxM2Config",
    "hy_v3": "HYV3Config",
    "ernie4_5": "Ernie4_5Config",
    "ernie4_5_moe": "Ernie4_5_MoeConfig",
    "seed_oss": "SeedOssConfig",
    "hunyuan_v1_dense": "HunYuanDenseV1Config",
    "hunyuan_v1_moe": "HunYuanMoEV1Config",
    "ministral3": "Ministral3Config",
    "mistral3": "Mistral3Config",
    "smollm3": "SmolLM3Config",
    "olmo2": "Olmo2Config",
    "olmo3": "Olmo3Config",
    "olmoe": "OlmoeConfig",
    "flex_olmo": "FlexOlmoConfig",
    "exaone4": "Exaone4Config",
    "glm4": "Glm4Config",
    "qwen2_vl": "Qwen2VLConfig",
    "qwen2_5_vl": "Qwen2_5_VLConfig",
    "qwen3_vl": "Qwen3VLConfig",
    "qwen3_vl_moe": "Qwen3VLMoeConfig",
}

_VISION: dict[str, Any] = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48}
_VISION_OF: dict[str, dict[str, Any]] = {
    "mistral3": {
        "model_type": "pixtral",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 16,
        "image_size": 28,
        "patch_size": 14,
    },
    "llama4": {
        "hidden_size": 32,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "vision_output_dim": 48,
        "projector_input_dim": 48,
        "projector_output_dim": 48,
    },
    "qwen2_vl": {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 64},
    "qwen2_5_vl": _VISION | {"out_hidden_size": 64, "fullatt_block_indexes": [0]},
    "qwen3_vl": _VISION | {"out_hidden_size": 64, "deepstack_visual_indexes": [0]},
    "qwen3_vl_moe": _VISION | {"out_hidden_size": 64, "deepstack_visual_indexes": [0]},
}
"""The image encoders of models for several modalities."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": [2, 0],
    "pad_token_id": 0,
}
YARN_WITH_BETA = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "llama_4_scaling_beta": 0.3,
}
_MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
_GRANITE = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
}
_GRANITE_MOE = _GRANITE | {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 48,
}
_LLAMA4 = {
    "no_rope_layer_interval": 2,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 80,
    "num_local_experts": 4,
    "floor_scale": 4,
    "attn_scale": 0.5,
}
_FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "granite": _GRANITE,
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": _GRANITE_MOE | {"shared_intermediate_size": 72},
    "cohere": {"logit_scale": 0.8, "use_qk_norm": True, "tie_word_embeddings": True},
    "cohere2": {"num_hidden_layers": 4, "sliding_window": 6, "tie_word_embeddings": True},
    "stablelm": {"use_qkv_bias": True},
    "llama4_text": _LLAMA4,
    "llama4": _LLAMA4,
    "mistral": {"sliding_window": None},
    "qwen2": {"head_dim": None},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2_moe": {
        "head_dim": None,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 72,
    },
    "phi3": {"head_dim": None},
    "qwen2_vl": {"head_dim": None, "rope_parameters": _MROPE},
    "qwen2_5_vl": {"head_dim": None, "rope_parameters": _MROPE},
    "qwen3_vl_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "routed_scaling_factor": 1.5,
    },
    "dots1": {
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
    },
    "bailing_moe": {
        "n_routed_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "n_group": 8,
        "topk_group": 4,
        "use_qk_norm": True,
    },
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 8},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 48},
    "flex_olmo": {"num_experts": 8, "num_experts_per_tok": 4, "intermediate_size": 48},
    "olmo3": {"num_hidden_layers": 4, "sliding_window": 6},
    "exaone4": {"num_hidden_layers": 4, "sliding_window": 6},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2},
    "ministral3": {"rope_parameters": YARN_WITH_BETA},
    "mistral3": {"rope_parameters": YARN_WITH_BETA, "model_type": "ministral3"},
    "hy_v3": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 48,
        "head_dim": None,
    },
}


def make_checkpoint(
    path: Path,
    family: str,
    *,
    dtype: str = "float32",
    seed: int = 0,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Write a tiny random checkpoint into the directory `path` and return it.

    Args:
        path: made if it does not exist.
        family: one of `FAMILIES`.
        dtype: of the weights: "float32", "bfloat16" or "float16".
        seed: of the weights.
        max_shard_size: a small one ("20KB") makes a sharded checkpoint with an index.
        overrides: fields of the family's transformers config.
    """
    import torch
    import transformers

    sizes = {**_SIZES, **_FAMILY_SIZES.get(family, {}), **overrides}
    sizes = {name: value for name, value in sizes.items() if name != "head_dim" or value}
    kind, auto = getattr(transformers, FAMILIES[family]), transformers.AutoModelForCausalLM
    if (vision := _VISION_OF.get(family)) is not None:
        tied = sizes.pop("tie_word_embeddings")
        config = kind(text_config=sizes, vision_config=vision, tie_word_embeddings=tied)
        auto = transformers.AutoModelForImageTextToText
    else:
        config = kind(**sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                is_scale = "norm" in name and name.endswith("weight")  # some have a row per head
                if parameter.dim() == 1 or is_scale:
                    parameter.normal_(mean=1.0 if is_scale else 0.0, std=0.2)
            for name, buffer in (*model.named_buffers(), *model.named_parameters()):
                if name.endswith("correction_bias"):
                    buffer.normal_(std=0.3)
    with warnings.catch_warnings():  # Llama 4's image encoder has complex tables, not saved
        warnings.simplefilter("ignore")
        model = model.to(getattr(torch, dtype))
    model.save_pretrained(path, max_shard_size=max_shard_size)
    if family == "bailing_moe":
        bailing.rewrite(path)
    make_tokenizer(path)
    return path


def oracle(path: Path) -> Path:
    """Return the checkpoint that transformers loads with the same model as the one in `path`."""
    return path / bailing.GLM if (path / bailing.GLM).exists() else path


def load_oracle(path: Path, dtype: Any) -> Any:
    """Load a checkpoint's model in transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    path = oracle(path)
    several = hasattr(AutoConfig.from_pretrained(path), "vision_config")
    auto = AutoModelForImageTextToText if several else AutoModelForCausalLM
    return auto.from_pretrained(path, dtype=dtype)


def make_tokenizer(path: Path) -> None:
    """Write a byte-level BPE tokenizer of `VOCAB_SIZE` tokens with a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)


_CORPUS = (
    "the user asks the assistant for the weather and the assistant answers with the weather; "
    "the thread that crosses the warp is the weft, and the weft weaves the cloth together. "
    "one and two and three and four and five and six are numbers that the system counts. "
)
