"""What a checkpoint weighs: the bytes that one decoded token has to read.

Counted from the tensors' headers and config.json: a token reads every weight
once, of the routed experts only those it is sent to, and the keys and values
of its context. The embedding is read only where it is the output layer too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

_BYTES = {"F32": 4, "BF16": 2, "F16": 2}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint in numbers; all in bytes.

    Attributes:
        path: its directory.
        weights: of all tensors.
        weights_per_token: read to decode one token.
        cache_per_token: keys and values of one token, bfloat16.
    """

    path: Path
    weights: int
    weights_per_token: int
    cache_per_token: int

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Read the headers of a checkpoint's files, not the weights."""
        from safetensors import safe_open

        config = json.loads((path / "config.json").read_text())
        sizes: dict[str, int] = {}
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    part = tensors.get_slice(name)
                    size = _BYTES[part.get_dtype()]
                    for length in part.get_shape():
                        size *= length
                    sizes[name] = size
        experts = config.get("num_experts") or config.get("num_local_experts")
        active = config["num_experts_per_tok"] / experts if experts else 1.0
        is_tied = "lm_head.weight" not in sizes
        per_token = 0.0
        for name, size in sizes.items():
            if name != "model.embed_tokens.weight" or is_tied:
                per_token += size * (active if ".experts." in name else 1.0)
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        kv_heads = config.get("num_key_value_heads") or heads
        cache = 2 * 2 * config["num_hidden_layers"] * kv_heads * head_dim
        return cls(path, sum(sizes.values()), round(per_token), cache)

    def bytes_read(self, context: float) -> float:
        """Bytes that decoding one token reads, `context` tokens into a request."""
        return self.weights_per_token + context * self.cache_per_token
