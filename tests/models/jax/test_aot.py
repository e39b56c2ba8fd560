"""Steps compiled for detached TPU slices; in a separate process, because of libtpu."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
import tpu_steps
from tpu_steps import LLAMA_8B, TARGETS

from weft.errors import ConfigError
from weft.models.checkpoint.locate import read_spec
from weft.models.jax.aot import chip_of
from weft.models.jax.mesh import make_mesh, slice_of
from weft.models.plan.batch import Batch
from weft.models.plan.step import Operator, Precision, stages
from weft.models.spec.layout import Layout

SMALL = ("--max-num-seqs", "8", "--max-num-batched-tokens", "256", "--max-model-len", "2048")

STEPS = Path(tpu_steps.__file__)


def compile_for(
    folder: Path, config: dict[str, Any], topology: str, *flags: str
) -> subprocess.CompletedProcess[str]:
    """Run `weft compile` on a model that has only a config.json."""
    (folder / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "weft", "compile", str(folder), "--for", topology]
    return subprocess.run(
        [*command, "--json", "--compile-cache", str(folder / "cache"), *flags],
        capture_output=True,
        text=True,
    )


STEP_CASES = [
    ("small-llama", "v5e:2x2"),
    *(
        pytest.param(model, topology, marks=pytest.mark.slow)
        for model in ("llama", "qwen3_moe")
        for topology in TARGETS
    ),
]


def compile_largest(model: str, topology: str, kernels: str, *flags: str) -> dict[str, Any]:
    """Return the report of benchmarks/tpu_steps.py for a step."""
    command = [sys.executable, str(STEPS), "--model", model, "--target", topology, "--json"]
    done = subprocess.run([*command, "--kernels", kernels, *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    step: dict[str, Any] = json.loads(done.stdout)
    return step


@pytest.mark.parametrize(("model", "topology"), STEP_CASES)
@pytest.mark.timeout(1800)
def test_a_step_compiles_and_hides_its_traffic(model: str, topology: str, tmp_path: Path) -> None:
    """In Llama's layers, at least 90% of the bytes between chips travel beside products."""
    step = compile_largest(model, topology, "auto")
    found = step["collectives"]
    assert found
    layers = tpu_steps.MODELS[model][0]["num_hidden_layers"]
    assert step["kernels"]["write_pages"] == step["kernels"]["ragged_paged_attention"] == layers
    if model != "qwen3_moe":  # each layer has four rings, of two directions
        of_layers = [one for one in found if one["kind"] == "collective-permute"]
        assert len(of_layers) == layers * 4 * 2 * (step["devices"] - 1)
        assert len(found) == len(of_layers) + 2  # the embedding, and the rows that are sampled
        moved = sum(one["bytes"] for one in of_layers)
        assert sum(one["bytes"] for one in of_layers if one["products"]) >= 0.9 * moved
        operators = planned(model, step["devices"], tmp_path, overlapped=True)
        assert moved == sum(each.sent * each.times for each in operators if each.overlapped)
        (rows,) = (each.exchanges[0] for each in operators if each.what == "rows")
        assert ("all-reduce", rows.payload) in {(one["kind"], one["bytes"]) for one in found}


def planned(model: str, devices: int, folder: Path, *, overlapped: bool) -> list[Operator]:
    """The planner's operators that exchange bytes in such a step."""
    config, ep = tpu_steps.MODELS[model]
    (folder / "config.json").write_text(json.dumps(config))
    layout = Layout(devices, ep)
    (rank,) = stages(
        *(read_spec(folder), layout, Precision()), overlapped=overlapped, backend="jax"
    )
    prompt = tpu_steps.TOKENS - tpu_steps.ROWS + 1
    batch = Batch(tpu_steps.ROWS - 1, 1.0, 1, prompt, prompt / 2)
    return [operator for operator in rank.operators(batch) if operator.exchanges]


@pytest.mark.parametrize(("model", "topology"), [*STEP_CASES, ("small-minimax", "v5e:2x2")])
@pytest.mark.timeout(1800)
def test_the_planner_counts_the_bytes_of_the_compiled_step(
    model: str, topology: str, tmp_path: Path
) -> None:
    """All but the LM head's: logits are exchanged in another program, which samples."""
    step = compile_largest(model, topology, "auto", "--replicated")
    operators = planned(model, step["devices"], tmp_path, overlapped=False)
    compiled = sorted((one["kind"], one["bytes"]) for one in step["collectives"])
    assert compiled == sorted(
        (exchange.kind.replace("_", "-"), exchange.payload)
        for operator in operators
        for exchange in operator.exchanges * operator.times
        if operator.what != "lm head"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("model", "topology"), STEP_CASES)
@pytest.mark.timeout(1800)
def test_a_step_compiles_with_overlapped_kernels(model: str, topology: str) -> None:
    """In Llama, all traffic is in kernels, except for the embedding and the sampled rows."""
    step = compile_largest(model, topology, "overlapped")
    config, ep = tpu_steps.MODELS[model]
    layers = config["num_hidden_layers"]
    expected = {"write_pages": layers, "ragged_paged_attention": layers}
    if model == "qwen3_moe":
        expected |= {"grouped_gate_up": layers, "gmm": layers}
        if ep == step["devices"]:
            expected["moe_exchange"] = 2 * layers
    assert {name: step["kernels"].get(name) for name in expected} == expected
    rings = (1 if model == "qwen3_moe" else 2) * layers
    assert step["kernels"]["all_gather_matmul"] == rings
    scatters = ("matmul_reduce_scatter", "matmul_reduce_scatter_torus")
    assert sum(step["kernels"].get(name, 0) for name in scatters) == rings
    if model != "qwen3_moe":
        moved = sum(one["bytes"] for one in step["collectives"])
        assert sum(one["bytes"] for one in step["collectives"] if one["products"]) >= 0.9 * moved


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_programs_are_compiled_kept_and_told_of(tmp_path: Path) -> None:
    done = compile_for(tmp_path, LLAMA_8B, "v5e:2x2", "--tp", "4", *SMALL)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["memory"]["left"] > 0
    assert told["memory"]["temporaries"] > 0
    largest = told["programs"][0]
    assert largest["arguments"] >= told["memory"]["weights"] + told["memory"]["KV cache"]
    assert largest["kernels"] == {"write_pages": 2, "ragged_paged_attention": 2}
    kept = list((tmp_path / "cache").glob("*-cache"))
    assert len(kept) == len(told["programs"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
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


def test_the_slice_says_how_many_ranks_there_are(tmp_path: Path) -> None:
    done = compile_for(
        tmp_path, LLAMA_8B | {"num_attention_heads": 4, "num_key_value_heads": 4}, "v5e:2x4"
    )
    assert done.returncode == 2
    assert "--tp is 8; it must divide the model's 4 heads" in done.stderr


SLICE = """
import sys
from weft.models.jax.platform import described_devices
devices = described_devices(sys.argv[1])
from weft.models.jax.mesh import make_mesh, slice_of
sizes = [len(devices), len(devices) // 2]
print(*(slice_of(make_mesh(devices, size, 1)) for size in sizes))
"""


@pytest.mark.parametrize(
    ("topology", "slices"),
    [("v5e:2x4", "v5e:2x4 v5e:2x2"), ("tpu7x:2x2x1", "tpu7x:2x2x1 tpu7x:2x1x1")],
)
def test_a_mesh_knows_its_slice(topology: str, slices: str) -> None:
    command = [sys.executable, "-c", SLICE, topology]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == slices, done.stderr


@pytest.mark.parametrize(("count", "place"), [(1, "v5e:1x1"), (3, "v5e:1x3"), (4, "v5e:2x2")])
def test_cpus_stand_for_v5e(count: int, place: str) -> None:
    assert str(slice_of(make_mesh(jax.devices(), count, 1))) == place


def test_what_is_no_tpu() -> None:
    with pytest.raises(ConfigError, match="--for is 'h100:8'; it must be a slice such as v5e:2x4"):
        chip_of("h100:8")
