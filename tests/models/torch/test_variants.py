"""Number of kernel compilations over steps of many sizes, by Triton's cache keys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.checkpoints import make_checkpoint

COUNT_VARIANTS = """
import json, sys
from pathlib import Path

import torch
import triton
from triton.runtime.driver import driver

from weft.kernels.gpu.runtime.absent import NoDevice

variants = {}


def seen(*, key, repr, fn, compile, is_manual_warmup, already_compiled):
    variants.setdefault(fn.name.rpartition(".")[2], set()).add(key)
    return True  # it is not compiled, and so not launched


driver.set_active(NoDevice("sm_90"))
triton.knobs.runtime.jit_cache_hook = seen
# What no kernel writes is an index nevertheless.
torch.empty, torch.empty_like = torch.zeros, torch.zeros_like
torch.Tensor.new_empty = torch.Tensor.new_zeros

from support.steps import Driver
from weft.kernels.symmetric.virtual import VirtualHome, VirtualWorld
from weft.models.checkpoint.locate import read_spec
from weft.models.torch.runner import TorchRunner

path = Path(sys.argv[1])
runner = TorchRunner.load(
    path,
    read_spec(path),
    dtype="bfloat16",
    block_size=16,
    max_num_seqs=32,
    max_num_batched_tokens=128,
    max_model_len=256,
    home=VirtualHome(VirtualWorld(1), 0),
    cuda_graphs=False,
)
runner.allocate_kv_cache(512)


def count(what, sizes):
    variants.clear()
    for size in sizes:
        steps = Driver(runner, 16, 512)
        if what == "prompts":
            steps.step((steps.add([5] * size, size + 1), size))
        else:
            requests = [steps.add([5], 4) for _ in range(size)]
            steps.step(*((request, 1) for request in requests))
    return {name: len(keys) for name, keys in variants.items()}


print(json.dumps([count(*each) for each in json.loads(sys.argv[2])]))
"""


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen3_moe", "minimax_m2", pytest.param("qwen2_moe", marks=pytest.mark.slow)],
)
def test_kernels_are_not_compiled_for_each_number_of_rows(family: str, tmp_path: Path) -> None:
    """For one tile that divides none of the sizes; 16 divides some."""
    path = make_checkpoint(tmp_path / "model", family, num_hidden_layers=1, dtype="bfloat16")
    script = tmp_path / "count.py"
    script.write_text(COUNT_VARIANTS)
    asked = [("prompts", [35]), ("prompts", [*range(33, 64), 48]), ("decodes", [*range(17, 32)])]
    asked += [("decodes", [19])]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(path), json.dumps(asked)],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    prompt, prompts, decodes, decode = json.loads(done.stdout.splitlines()[-1])
    assert {"normalize_rows", "attend", "rotate_heads"} <= prompt.keys()
    assert prompts == prompt
    assert decodes == decode
