"""How large everything is, on a GPU and in the interpreter."""

from __future__ import annotations

from typing import Any

from model.model import PAGE, Scale

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def full() -> Scale:
    """For the GPU that this process has."""
    return Scale(
        tiny=False,
        device="cuda:0",
        dtype="bfloat16",
        config=LLAMA | LLAMA_8B,
        users=(1, 16, 64, 128, 256),
        context=1024,
        worlds=(2, 4, 8),
        steps=32,
        copied=1 << 31,
        prompt=(2000, 100),
        models=("weft-demo", "weft-demo-moe"),
        chain=16,
        product=(8192, 8192, 8192),
    )


TINY = Scale(
    tiny=True,
    device="cpu",
    dtype="float32",
    config=LLAMA | SMALL,
    users=(1, 3),
    context=PAGE + 3,
    worlds=(2,),
    steps=1,
    copied=1 << 20,
    prompt=(PAGE, 3),
    models=("weft-demo-moe",),
    chain=2,
    product=(64, 64, 64),
)
