"""Write a checkpoint of a known shape with random weights, for benchmarks.

Speed does not depend on what the weights are, so a shape is enough; the
tokenizer is real (byte-level BPE over the full vocabulary), so that text,
streaming and detokenizing cost what they cost in production.

    python benchmarks/make_checkpoint.py qwen2.5-0.5b OUT
"""

from __future__ import annotations

import argparse
import itertools
import json
import string
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END = "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "attention_dropout": 0.0,
    "use_cache": True,
}
SHAPES: dict[str, dict[str, object]] = {
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "tinyllama-1.1b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    # About 1.0B parameters, 0.27B of them active for a token.
    "moe-1b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 32000,
        "hidden_size": 1024,
        "head_dim": 64,
        "intermediate_size": 2816,
        "moe_intermediate_size": 1024,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
}


def tensor_shapes(config: dict[str, object]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a checkpoint's tensors, as the family's releases have them."""
    size = {key: value for key, value in config.items() if isinstance(value, int)}
    hidden, heads, kv_heads = (
        size["hidden_size"],
        size["num_attention_heads"],
        size["num_key_value_heads"],
    )
    head_dim = size.get("head_dim", hidden // heads)
    yield "model.embed_tokens.weight", (size["vocab_size"], hidden)
    for i in range(size["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            yield f"{layer}.self_attn.{name}_proj.weight", (count * head_dim, hidden)
            if config["model_type"] == "qwen2":
                yield f"{layer}.self_attn.{name}_proj.bias", (count * head_dim,)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, heads * head_dim)
        if config["model_type"] == "qwen3_moe":
            yield f"{layer}.self_attn.q_norm.weight", (head_dim,)
            yield f"{layer}.self_attn.k_norm.weight", (head_dim,)
            yield f"{layer}.mlp.gate.weight", (size["num_experts"], hidden)
            for e in range(size["num_experts"]):
                yield from mlp_shapes(
                    f"{layer}.mlp.experts.{e}", hidden, size["moe_intermediate_size"]
                )
        else:
            yield from mlp_shapes(f"{layer}.mlp", hidden, size["intermediate_size"])
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (size["vocab_size"], hidden)


def mlp_shapes(name: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.gate_proj.weight", (inner, hidden)
    yield f"{name}.up_proj.weight", (inner, hidden)
    yield f"{name}.down_proj.weight", (hidden, inner)


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer with exactly `vocab_size` tokens.

    After the 256 bytes come all pairs, then triples, of letters until the vocabulary is full.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(alphabet)}
    letters = string.ascii_lowercase + string.ascii_uppercase + string.digits
    pairs = [a + b for a, b in itertools.product("Ġ" + letters, letters)]
    room = vocab_size - len(vocab) - 2
    merged = itertools.chain(
        ((pair, (pair[0], pair[1])) for pair in pairs),
        ((pair + c, (pair, c)) for pair, c in itertools.product(pairs, letters)),
    )
    merges = []
    for token, merge in itertools.islice(merged, room):
        vocab[token] = len(vocab)
        merges.append(merge)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", END])
    assert tokenizer.get_vocab_size() == vocab_size
    return tokenizer


def make_checkpoint(shape: str, out: Path, seed: int = 0) -> None:
    """Write config, tokenizer and one safetensors file of random bfloat16 weights to `out`."""
    config = COMMON | SHAPES[shape]
    vocab_size = config["vocab_size"]
    assert isinstance(vocab_size, int)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(vocab_size)
    tokenizer.save(str(out / "tokenizer.json"))
    config["eos_token_id"] = tokenizer.token_to_id(END)
    (out / "config.json").write_text(json.dumps(config, indent=2))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "chat_template": TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, dims in tensor_shapes(config):
        tensor = torch.empty(dims, dtype=torch.bfloat16)
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, 0.02, generator=generator)
        tensors[name] = tensor
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    size = sum(t.numel() for t in tensors.values())
    print(f"{out}: {shape}, {size / 1e9:.2f}B parameters")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make_checkpoint(arguments.shape, arguments.out, arguments.seed)


if __name__ == "__main__":
    main()
