"""The ledger's weights and KV cache, beside what a process takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.checkpoints import make_checkpoint

MEASURE = """
import ctypes, gc, sys
from pathlib import Path
import torch
from weft.kernels.cpu import native
from weft.kernels.cpu.linear import can_pack
from weft.models.checkpoint.locate import read_spec
from weft.models.memory.plan import MemoryPlan
from weft.models.torch.runner import TorchRunner

def private():
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return 1024 * sum(int(lines[kind].split()[0]) for kind in kinds)

def load(path):
    return TorchRunner.load(
        path, read_spec(path), dtype=dtype, quantization=quantization, block_size=16,
        max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, threads=1,
    )

small, large, dtype, quantization = Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
# Weights that cannot be packed stay in their file, where each step reads them.
packs = can_pack(getattr(torch, dtype)) or native.supports(getattr(torch, dtype))
in_file = quantization == "none" and not packs
kinds = ["RssAnon", "RssFile"] if in_file else ["RssAnon"]
first = load(small)  # libraries, and the code that they compile
before = private()
runner = load(large)
plan = MemoryPlan(
    spec=read_spec(large), dtype=dtype, quantization=quantization, available=2**30,
    memory_fraction=1.0, kv_cache_memory=1 << 26, block_size=16, max_num_seqs=4096,
    max_num_batched_tokens=64, max_model_len=64, saved=runner.saved_bytes,
)
ledger = plan.ledger()
runner.allocate_kv_cache(ledger.num_blocks)
for keys, values in runner._cache:
    keys.zero_()
    values.zero_()
rarely = runner.saved_bytes if in_file else 0  # the embedding, whose pages the system can drop
print(private() - before - rarely, ledger.weights + ledger.kv_cache)
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models with about 100 MB in bfloat16, and one that is tiny."""
    found = {"tiny": make_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", dtype="bfloat16")}
    large = {"hidden_size": 1024, "vocab_size": 8192, "num_hidden_layers": 4}
    shapes = {"qwen2": {"intermediate_size": 2816}, "qwen3_moe": {"moe_intermediate_size": 512}}
    for family, widths in shapes.items():
        path = tmp_path_factory.mktemp(family)
        found[family] = make_checkpoint(path, family, dtype="bfloat16", **large, **widths)
    return found


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [("bfloat16", "none"), ("float32", "none"), ("bfloat16", "int8"), ("bfloat16", "int4")],
)
def test_a_process_takes_what_the_ledger_says(
    models: dict[str, Path], family: str, dtype: str, quantization: str
) -> None:
    command = [sys.executable, "-P", "-c", MEASURE, str(models["tiny"]), str(models[family])]
    done = subprocess.run([*command, dtype, quantization], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    measured, planned = map(int, done.stdout.split())
    assert measured == pytest.approx(planned, rel=0.03)
