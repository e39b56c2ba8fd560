"""The config.json of models that are too large for tests; only their shapes count."""

from __future__ import annotations

from typing import Any

from tpu_steps import QWEN3_MOE

GLM4_MOE = QWEN3_MOE | {
    "architectures": ["Glm4MoeForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "partial_rotary_factor": 0.5,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
}
QWEN2_MOE = QWEN3_MOE | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": 64,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_attention_heads": 16,
}
MINIMAX_M2 = QWEN3_MOE | {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_local_experts": 256,
    "num_experts": 256,
    "rotary_dim": 64,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
}

COMMAND_R: dict[str, Any] = {
    "architectures": ["CohereForCausalLM"],
    "dtype": "bfloat16",
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "model_type": "cohere",
    "num_attention_heads": 64,
    "num_hidden_layers": 2,
    "num_key_value_heads": 8,
    "rope_theta": 4000000.0,
    "use_qk_norm": True,
    "vocab_size": 256000,
}
