"""Write a checkpoint of a known shape with random weights, for benchmarks.

Speed does not depend on what the weights are, so a shape is enough; the
tokenizer is real (byte-level BPE over the full vocabulary), so that text,
streaming and detokenizing cost what they cost in production.

Tensors are made and written one at a time, in the safetensors format, whose
library takes only what is in memory as a whole. Everything goes to a directory
beside OUT that is moved there once it is complete.

    python benchmarks/make_checkpoint.py qwen2.5-0.5b OUT
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import string
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from weft.errors import ConfigError, WeftError
from weft.serving.executor.loading import show_progress

END = "<|im_end|>"
# transformers gives every Qwen tokenizer the first, beyond the vocabulary if it lacks it.
SPECIAL = ("<|endoftext|>", "<|im_start|>", END)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STD = 0.02  # of the weights; norms are 1

COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "attention_dropout": 0.0,
    "use_cache": True,
}
SHAPES: dict[str, dict[str, Any]] = {
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


def tensor_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
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
                yield from _mlp_shapes(
                    f"{layer}.mlp.experts.{e}", hidden, size["moe_intermediate_size"]
                )
        else:
            yield from _mlp_shapes(f"{layer}.mlp", hidden, size["intermediate_size"])
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (size["vocab_size"], hidden)


def _mlp_shapes(name: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.gate_proj.weight", (inner, hidden)
    yield f"{name}.up_proj.weight", (inner, hidden)
    yield f"{name}.down_proj.weight", (hidden, inner)


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer with exactly `vocab_size` tokens.

    After the 256 bytes come all pairs, then triples, of letters until the vocabulary is full; the
    last three are special.

    Raises:
        ConfigError: the size is not between 259 and about 250,000.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(alphabet)}
    letters = string.ascii_lowercase + string.ascii_uppercase + string.digits
    pairs = [a + b for a, b in itertools.product("Ġ" + letters, letters)]
    room = vocab_size - len(vocab) - len(SPECIAL)
    most = len(pairs) * (1 + len(letters))
    if not 0 <= room <= most:
        raise ConfigError(
            f"vocab_size is {vocab_size}; it must be from {vocab_size - room} "
            f"to {vocab_size - room + most}"
        )
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
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def make_checkpoint(shape: str, out: Path, seed: int = 0, *, force: bool = False) -> None:
    """Write a checkpoint of a listed shape; see `write_checkpoint`."""
    write_checkpoint(COMMON | SHAPES[shape], out, seed, force=force)


def write_checkpoint(
    config: Mapping[str, Any], out: Path, seed: int = 0, *, force: bool = False
) -> None:
    """Write config, tokenizer and one safetensors file of random bfloat16 weights.

    Args:
        config: of a family that `tensor_shapes` knows, as in a config.json.
        out: the checkpoint's directory.
        seed: of the weights.
        force: replace a checkpoint that is there.

    Raises:
        ConfigError: there is something at `out`, or the vocabulary has a size that cannot be made.
    """
    if out.exists():
        if not force:
            raise ConfigError(f"{out} exists; --force replaces it")
        if not (out / "config.json").is_file():
            raise ConfigError(f"{out} is not a checkpoint; --force does not replace it")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    partial.mkdir()
    try:
        _write_tokenizer(config, partial)
        _write_weights(config, partial / "model.safetensors", seed)
        if out.exists():
            shutil.rmtree(out)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_tokenizer(config: Mapping[str, Any], path: Path) -> None:
    """tokenizer.json and its settings, and config.json, which names the end token."""
    tokenizer = make_tokenizer(config["vocab_size"])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "chat_template": TEMPLATE,
    }
    _write_json(path / "tokenizer_config.json", settings)
    _write_json(path / "config.json", {**config, "eos_token_id": tokenizer.token_to_id(END)})


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_weights(config: Mapping[str, Any], file: Path, seed: int) -> None:
    """The safetensors format: the header's length, the header, the tensors one after the other."""
    shapes = dict(tensor_shapes(config))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * torch.bfloat16.itemsize
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors are aligned
    generator = torch.Generator().manual_seed(seed)
    with file.open("wb") as out, show_progress("writing weights") as progress:
        out.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            tensor = torch.ones(shape, dtype=torch.bfloat16)
            if not name.endswith("norm.weight"):
                tensor.normal_(0.0, STD, generator=generator)
            out.write(tensor.view(torch.uint8).numpy().data)
            progress(header[name]["data_offsets"][1], end)


def main() -> None:
    """Read the command line, and write the checkpoint."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out", type=Path, help="the checkpoint's directory")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (0)")
    parser.add_argument("--force", action="store_true", help="replace a checkpoint that is there")
    options = parser.parse_args()
    try:
        make_checkpoint(options.shape, options.out, options.seed, force=options.force)
    except WeftError as error:
        parser.error(str(error))
    size = (options.out / "model.safetensors").stat().st_size
    print(f"{options.out}: {options.shape}, {size / 1e9:.2f} GB", file=sys.stderr)


if __name__ == "__main__":
    main()
