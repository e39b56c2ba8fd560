"""After the warm-up on a GPU, no step needs another kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.large_models import COMMAND_R, GLM4_MOE, MINIMAX_M2, QWEN2_MOE
from tpu_steps import LLAMA_8B, QWEN3_MOE

from weft.models.torch import warm_up

ROOT = Path(__file__).parents[3]
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
}

MODELS = [
    (LLAMA_8B, 1, 1),
    (LLAMA_70B, 8, 1),
    (QWEN3_MOE, 1, 8),
    (QWEN3_MOE, 4, 1),
    (GLM4_MOE, 4, 1),
    (MINIMAX_M2, 8, 8),
    (COMMAND_R, 4, 1),
]
MORE_MODELS = [
    (GLM4_MOE, 1, 8),
    (QWEN2_MOE, 4, 1),
    (MINIMAX_M2, 1, 1),
    (LLAMA_70B, 2, 1),
    (QWEN3_MOE, 1, 1),
    (QWEN3_MOE, 8, 8),
]
WAYS = ("graphs", "none")
CASES = [(*MODELS[0], "none"), *((*model, WAYS[i % 2]) for i, model in enumerate(MODELS))]
"""Each model in one way; the smallest, on one rank, in both."""
MORE = [
    *((*model, WAYS[i % 2 - 1]) for i, model in enumerate(MODELS[1:], 1)),
    *((*model, way) for model in MORE_MODELS for way in WAYS),
]


FEW_STEPS, MANY_STEPS = 60, 400
"""Random steps to compare with the warm-up's."""


@pytest.mark.parametrize(
    ("config", "tp", "ep", "graphs", "steps"),
    [
        *((*case, FEW_STEPS) for case in CASES),
        *(pytest.param(*case, MANY_STEPS, marks=pytest.mark.slow) for case in [*CASES, *MORE]),
    ],
    ids=lambda value: value["architectures"][0] if isinstance(value, dict) else str(value),
)
def test_no_step_needs_another_kernel(
    config: dict[str, Any], tp: int, ep: int, graphs: str, steps: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    script = str(ROOT / "tests/support/kernel_variants.py")
    done = subprocess.run(
        [sys.executable, script, str(tmp_path), str(tp), str(ep), graphs, str(steps)],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["missed"] == {}
    assert found["known"] > 5


@pytest.mark.parametrize("most", [1, 2, 5, 100, 2048, 8192])
def test_prompts_have_an_even_and_an_odd_length_in_each_bucket(most: int) -> None:
    found = warm_up.prompts(most)
    assert found[-1] == most
    for low, high in pairwise([4, *(1 << n for n in range(3, 14) if 1 << n <= most)]):
        inside = [length for length in found if low < length <= high]
        assert high in inside
        assert any(length % 2 for length in inside)
    assert {1, most} <= {*warm_up.decodes(most)} <= {*range(1, most + 1)}
