"""Steps compiled for TPU slices that are not here; in a process of its own, for libtpu's sake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
}
SLOW_TARGETS = [("v5p:2x2x1", 4), ("v6e:2x4", 8), ("tpu7x:2x2x1", 8)]
SMALL = ("--max-num-seqs", "8", "--max-num-batched-tokens", "256", "--max-model-len", "2048")


def compile_for(
    folder: Path, config: dict[str, Any], topology: str, *flags: str
) -> subprocess.CompletedProcess[str]:
    """`weft compile` of a model that is nothing but a config.json."""
    (folder / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "weft", "compile", str(folder), "--for", topology]
    return subprocess.run(
        [*command, "--json", "--compile-cache", str(folder / "cache"), *flags],
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("topology", "tp"),
    [("v5e:2x4", 8), *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW_TARGETS)],
)
@pytest.mark.parametrize(
    ("config", "ep"),
    [
        pytest.param(LLAMA_8B, 1, id="llama"),
        pytest.param(QWEN3_MOE, 4, id="qwen3_moe", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(900)
def test_a_model_compiles_for_a_slice(
    tmp_path: Path, config: dict[str, Any], ep: int, topology: str, tp: int
) -> None:
    done = compile_for(tmp_path, config, topology, "--tp", str(tp), "--ep", str(ep), *SMALL)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["memory"]["left"] > 0
    assert told["memory"]["temporaries"] > 0
    largest = told["programs"][0]
    assert largest["arguments"] >= told["memory"]["weights"] + told["memory"]["KV cache"]
    of_layers = [one for one in largest["collectives"] if one["kind"] == "collective-permute"]
    if config is LLAMA_8B:  # each of two layers has four rings of two directions
        assert len(of_layers) == 2 * 4 * 2 * (tp - 1)
        moved = sum(one["bytes"] for one in of_layers)
        assert sum(one["bytes"] for one in of_layers if one["products"]) >= 0.9 * moved
    assert list((tmp_path / "cache").iterdir())


@pytest.mark.timeout(600)
def test_a_model_that_does_not_fit_is_refused_in_the_compilers_words(tmp_path: Path) -> None:
    config = LLAMA_8B | {"num_hidden_layers": 40, "vocab_size": 32000}
    done = compile_for(tmp_path, config, "v5e:1x1", *SMALL)
    assert done.returncode == 2
    assert "hbm" in done.stderr
    assert "it would fit on v5e:2x2, with --tp 4" in done.stderr


@pytest.mark.parametrize(
    ("topology", "flags", "message"),
    [
        ("h100:8", (), "--for is 'h100:8'; it must be a slice such as v5e:2x4"),
        ("v5e:3x5", (), "--for is 'v5e:3x5'"),
        ("v5e:2x4", ("--tp", "4"), "--tp is 4; v5e:2x4 has 8 devices"),
    ],
)
def test_what_is_no_slice(
    tmp_path: Path, topology: str, flags: tuple[str, ...], message: str
) -> None:
    done = compile_for(tmp_path, LLAMA_8B, topology, *flags)
    assert done.returncode == 2
    assert message in done.stderr
