"""Estimates for a step's temporary tensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.large_models import COMMAND_R, GLM4_MOE, MINIMAX_M2
from tpu_steps import LLAMA_8B, QWEN3_MOE

from weft.models.memory.activations import LargestStep, cpu_activations, jax_activations
from weft.models.spec.build import build_spec

QWEN_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "num_attention_heads": 14,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "vocab_size": 151936,
}


def spec(**changes: Any) -> Any:
    return build_spec(QWEN_MOE | changes, Path("config.json"))


DENSE = spec(mlp_only_layers=[0, 1])


def test_activations_grow_with_every_dimension() -> None:
    shape = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128}
    base = cpu_activations(DENSE, "bfloat16", LargestStep(**shape))
    assert cpu_activations(DENSE, "float32", LargestStep(**shape)) > base
    for name in shape:
        more = LargestStep(**shape | {name: shape[name] * 100})
        assert cpu_activations(DENSE, "bfloat16", more) > base


def test_experts_have_the_tokens_of_all_attention_groups() -> None:
    one, four = (
        cpu_activations(spec(), "bfloat16", LargestStep(16, 2048, 1024, dp_size))
        for dp_size in (1, 4)
    )
    assert 3 * one < four < 6 * one
    dense = {
        cpu_activations(DENSE, "auto", LargestStep(16, 2048, 1024, dp_size)) for dp_size in (1, 4)
    }
    assert len(dense) == 1


def test_mixture_of_experts_counts_the_experts_of_a_token() -> None:
    step = LargestStep(max_num_seqs=8, max_num_batched_tokens=4096, max_model_len=128)
    few, many = (
        cpu_activations(spec(num_experts_per_tok=top_k, vocab_size=1000), "auto", step)
        for top_k in (4, 8)
    )
    assert many > few


@pytest.mark.parametrize(
    ("rows", "vocab_size", "tp", "temporaries"),
    [
        (8, 128256, 8, 4210688),
        (64, 32000, 8, 9114112),
        (64, 128256, 8, 15611904),
        (256, 128256, 8, 69026304),
        (64, 32000, 1, 27575808),
        (64, 128256, 1, 167877120),
        (256, 128256, 1, 791680512),
    ],
)
def test_sampling_on_a_tpu_is_counted(
    rows: int, vocab_size: int, tp: int, temporaries: int
) -> None:
    """As libtpu 0.0.42 reports for sampling that many rows."""
    sizes = spec(vocab_size=vocab_size)
    counted = jax_activations(sizes, "bfloat16", LargestStep(rows, rows, 128), tp=tp)
    assert temporaries <= counted < 2.5 * temporaries + 2**24


def test_a_step_on_triton_kernels_has_no_more_than_is_counted() -> None:
    cases: list[tuple[dict[str, Any], int, int, bool]] = [
        (LLAMA_8B, 1, 1, False),
        (LLAMA_8B, 4, 1, True),
        (QWEN3_MOE, 1, 1, False),
        (GLM4_MOE, 1, 1, False),
        (GLM4_MOE, 4, 1, True),
        (GLM4_MOE, 2, 4, False),
        (MINIMAX_M2, 1, 1, False),
        (MINIMAX_M2, 4, 1, True),
        (COMMAND_R, 1, 1, False),
        (COMMAND_R, 4, 1, True),
    ]
    script = Path(__file__).parents[2] / "support/step_memory.py"
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(cases)],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for (config, *how), (peak, counted) in zip(cases, json.loads(done.stdout), strict=True):
        assert 0 < peak <= counted, (config["architectures"], how)
