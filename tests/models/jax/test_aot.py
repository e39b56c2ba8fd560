"""Steps compiled for TPU slices that are not here; in a process of its own, for libtpu's sake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weft.errors import ConfigError
from weft.models.jax.aot import chip_of

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
LLAMA_SMALL = LLAMA_8B | {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
}
TARGETS = [("v5e:2x4", 8), ("v5p:2x2x1", 4), ("v6e:2x4", 8), ("tpu7x:2x2x1", 8)]
SMALL = ("--max-num-seqs", "8", "--max-num-batched-tokens", "256", "--max-model-len", "2048")

# argv: a folder with config.json, a slice, tp, ep. Prints the largest step's collectives.
LARGEST_STEP = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from weft.models.checkpoint import read_spec
from weft.models.jax.platform import described_devices

devices = described_devices(sys.argv[2])
from weft.models.jax.buckets import Buckets
from weft.models.jax.mesh import make_mesh
from weft.models.jax.overlap import collectives
from weft.models.jax.program import Program
from weft.models.layout import Layout

tp, ep = int(sys.argv[3]), int(sys.argv[4])
sizes = {"max_num_seqs": 8, "block_size": 16}
buckets = Buckets(max_num_batched_tokens=512, max_model_len=2048, **sizes).all()[:1]
program = Program(
    *(read_spec(Path(sys.argv[1])), Layout(tp, ep), make_mesh(devices, tp, ep)),
    dtype="bfloat16", num_blocks=1024, buckets=buckets, **sizes,
)
compiled = program.compile_forward(buckets[0])
print(json.dumps([asdict(one) for one in collectives(compiled.as_text())]))
"""


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
    ("config", "ep", "topology", "tp"),
    [
        pytest.param(LLAMA_SMALL, 1, "v5e:2x2", 4, id="small llama on v5e:2x2"),
        *(
            pytest.param(config, ep, *target, id=f"{name} on {target[0]}", marks=pytest.mark.slow)
            for name, config, ep in (("llama", LLAMA_8B, 1), ("qwen3_moe", QWEN3_MOE, 4))
            for target in TARGETS
        ),
    ],
)
@pytest.mark.timeout(900)
def test_a_step_compiles_and_hides_its_traffic(
    tmp_path: Path, config: dict[str, Any], ep: int, topology: str, tp: int
) -> None:
    """Of layers of Llama, at least 90% of the bytes that chips exchange are beside products."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-c", LARGEST_STEP, str(tmp_path), topology, str(tp), str(ep)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found
    if config is not QWEN3_MOE:  # each layer has four rings, of two directions
        of_layers = [one for one in found if one["kind"] == "collective-permute"]
        assert len(of_layers) == config["num_hidden_layers"] * 4 * 2 * (tp - 1)
        assert len(found) == len(of_layers) + 2  # the embedding, and the rows that are sampled
        moved = sum(one["bytes"] for one in of_layers)
        assert sum(one["bytes"] for one in of_layers if one["products"]) >= 0.9 * moved


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_programs_are_compiled_kept_and_told_of(tmp_path: Path) -> None:
    done = compile_for(tmp_path, LLAMA_8B, "v5e:2x2", "--tp", "4", *SMALL)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["memory"]["left"] > 0
    assert told["memory"]["temporaries"] > 0
    largest = told["programs"][0]
    assert largest["arguments"] >= told["memory"]["weights"] + told["memory"]["KV cache"]
    kept = list((tmp_path / "cache").glob("*-cache"))
    assert len(kept) == len(told["programs"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_that_does_not_fit_is_refused_in_the_compilers_words(tmp_path: Path) -> None:
    config = LLAMA_8B | {"intermediate_size": 48 * 14336}
    done = compile_for(tmp_path, config, "v5e:1x1", *SMALL)
    assert done.returncode == 2
    assert "available HBM (15.75G)" in done.stderr
    assert "it would fit on v5e:2x2, with --tp 4" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "flags", "message"),
    [
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


def test_what_is_no_tpu() -> None:
    with pytest.raises(ConfigError, match="--for is 'h100:8'; it must be a slice such as v5e:2x4"):
        chip_of("h100:8")
