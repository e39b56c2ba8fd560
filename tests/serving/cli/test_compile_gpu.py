"""`weft compile` for GPUs fills the cache in which a server's launches look."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import make_checkpoint
from tpu_steps import LLAMA_8B

from weft.errors import ConfigError
from weft.serving.cli.compile import run
from weft.serving.config.settings import EngineConfig

SIZES = ("--max-num-seqs", 4, "--max-num-batched-tokens", 32, "--max-model-len", 128)

SERVE = """
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import triton
from triton.runtime.driver import driver

from weft.kernels.gpu.runtime.absent import NoDevice
from weft.kernels.gpu.tuning import costs

# Its tensors are on the CPU and real, and nothing else says which GPU it is.
costs.count_processors = lambda device: 108
costs.gpu_of = lambda device: costs.device_named("A100")
driver.set_active(NoDevice("sm_80"))

from weft.kernels.check.aot import LoneRank
from weft.kernels.gpu.runtime.launches import decided
from weft.models.checkpoint.locate import read_spec
from weft.models.spec.layout import Layout
from weft.models.torch import warm_up
from weft.models.torch.dry import Sizes, absent_groups
from weft.models.torch.runner import TorchRunner
from weft.serving.config.settings import EngineConfig
from weft.serving.executor.backend import recorded_steps
from weft.serving.executor.loading import SINGLE_RANK, compile_kernels

path, tp, graphs, starts = Path(sys.argv[1]), int(sys.argv[2]), *map(json.loads, sys.argv[3:])
layout, spec, home = Layout(tp, rank=tp - 1), read_spec(path), LoneRank(tp - 1, tp, "sm_80")
runner = TorchRunner.load(
    path,
    spec,
    dtype="auto",
    block_size=16,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_model_len=128,
    layout=layout,
    groups=absent_groups(layout),
    home=home,
    cuda_graphs=graphs,
)
runner.allocate_kv_cache(64)

config = EngineConfig(kernels="overlapped", max_num_seqs=4, max_num_batched_tokens=32)
recorded = recorded_steps(replace(config, cuda_graphs=graphs), layout, "overlapped")
if starts:
    sizes = Sizes(16, 64, 4, 32, 128, recorded)
    compile_kernels(config, spec, layout, "bfloat16", sizes, home, "overlapped", SINGLE_RANK)
# What no kernel writes is an index nevertheless.
torch.empty, torch.empty_like = torch.zeros, torch.zeros_like
torch.Tensor.new_empty = torch.Tensor.new_zeros
launched, found = [], {True: [], False: []}
def listen(*, src, cache_hit, **details):
    found[cache_hit].append(src.name)

triton.knobs.compilation.listener = listen
with decided(lambda name: launched.append(name) or "compile"), torch.inference_mode():
    runner.warm_up()
    for step in warm_up.steps(
        layout,
        block_size=16,
        max_num_seqs=4,
        max_tokens=32,
        max_model_len=128,
        on_gpu=True,
        recorded=max(recorded.decodes, default=0),
    ):
        runner.step(step)
    if graphs:
        for replay in runner._graphs._replays.values():
            replay()
print(len(launched), len(found[True]), *found[False])
"""


def weft_compile(model: Path, *options: object) -> subprocess.CompletedProcess[str]:
    """`weft compile`, where no other cache than the flag's is known."""
    environment = {name: it for name, it in os.environ.items() if name != "TRITON_CACHE_DIR"}
    command = [sys.executable, "-P", "-m", "weft", "compile", str(model)]
    return subprocess.run(
        [*command, *map(str, (*SIZES, *options))],
        env=environment | {"HOME": str(model.parent)},
        capture_output=True,
        text=True,
    )


def compiled(model: Path, cache: Path, *more: object) -> dict[str, Any]:
    """The report of `weft compile`."""
    done = weft_compile(model, "--for", "a100", "--compile-cache", cache, "--json", *more)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def launched(
    model: Path, cache: Path, tp: int, *, graphs: bool, starts: bool = False
) -> tuple[int, int, list[str]]:
    """What a server's warm-up needs: launches, kernels from the cache, and compiled ones by name.

    With `starts`, its start compiles them in threads first.
    """
    script = cache.with_suffix(".py")
    script.write_text(SERVE)
    command = [sys.executable, "-P", str(script), str(model), str(tp)]
    done = subprocess.run(
        [*command, json.dumps(graphs), json.dumps(starts)],
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    launches, found, *missed = done.stdout.split()
    return int(launches), int(found), missed


@pytest.mark.parametrize(
    ("family", "tp", "graphs"),
    [
        ("llama", 1, False),
        ("qwen3_moe", 2, False),
        pytest.param("qwen3_moe", 1, True, marks=pytest.mark.slow),
        pytest.param("llama", 2, True, marks=pytest.mark.slow),
    ],
)
def test_a_server_compiles_nothing_after_it(
    family: str, tp: int, graphs: bool, tmp_path: Path
) -> None:
    model = make_checkpoint(tmp_path / "model", family, dtype="bfloat16")
    flags = ("--tp", tp, "--cuda-graphs" if graphs else "--no-cuda-graphs")
    cache = tmp_path / "cache"
    report = compiled(model, cache, *flags)
    assert report["kernels"] == report["compiled"] > 5
    assert (report["target"], report["cache"]) == ("sm_80", str(cache))
    assert report["cache_bytes"] > 1 << 16
    launches, found, missed = launched(model, cache, tp, graphs=graphs)
    assert not missed
    assert 5 < found <= report["kernels"] < launches
    again = compiled(model, cache, *flags)
    assert (again["kernels"], again["compiled"]) == (report["kernels"], 0)


def test_a_start_compiles_in_threads_what_the_warm_up_launches(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "llama", dtype="bfloat16")
    cache = tmp_path / "cache"
    launches, found, missed = launched(model, cache, 2, graphs=False, starts=True)
    assert launches > 20
    assert (found, missed) == (0, [])  # all are in Triton's cache in memory
    launches, found, missed = launched(model, cache, 2, graphs=True)
    assert found
    assert not missed  # graphs launch no other kernels than steps of these sizes


def test_a_model_that_does_not_fit_is_refused_with_what_fits(tmp_path: Path) -> None:
    config = LLAMA_8B | {"num_hidden_layers": 400}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = weft_compile(tmp_path, "--for", "a100:8", "--tp", 1)
    assert done.returncode == 2
    assert "on A100:8: the model does not fit in memory: weights 164.46 GiB" in done.stderr
    assert "on A100:8, with --tp 1, each device lacks" in done.stderr
    assert done.stderr.rstrip().endswith("it fits over 4")


@pytest.mark.parametrize(
    ("topology", "settings", "message"),
    [
        ("h1000", {}, "--for is 'h1000'; the device is unknown. It must be GPUs, such as h100:8"),
        ("cpu:8", {}, "--for is 'cpu:8'; CPUs need none compiled"),
        ("h100", {"device": "cpu"}, "--device is cpu; with --for h100 it must be auto or cuda"),
        ("h100:8", {"backend": "jax"}, "--backend is jax; with --for h100:8 it must be auto or "),
    ],
)
def test_what_has_no_kernels_is_refused(
    topology: str, settings: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        run(EngineConfig(model="m", **settings), topology)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("h100:2", "--tp", 4), "4 ranks; H100:2 has 2"),
        (("h100:9",), "a node has 1 to 8 H100, not 9"),
        (
            ("h100:2x1", "--tp", 2, "--kernels", "overlapped"),
            "2 ranks share each layer, and a node of H100:2x1 has 1. --kernels plain",
        ),
    ],
)
def test_gpus_that_the_ranks_cannot_use_are_refused(
    options: tuple[object, ...], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    done = weft_compile(tmp_path, "--for", *options)
    assert done.returncode == 2
    assert message in done.stderr
