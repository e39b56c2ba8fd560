"""The choice of kernels for a step, at its limits; and the demo models' output with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
from support.steps import Driver
from support.switches import shard_tokens

from weft.models.checkpoint.locate import locate, read_spec
from weft.models.jax.kernels import Kernels, choose_kernels
from weft.models.jax.runner import JaxRunner
from weft.models.plan.sizes import TABLE_BYTES
from weft.models.spec.layout import Layout
from weft.models.spec.spec import ModelSpec

ALL = Kernels(attention=True, experts=True, products=True, exchange=True)
STEP: dict[str, Any] = {
    "on_tpu": True,
    "block_size": 16,
    "tokens": 256,
    "sharded": True,
    "table_entries": 4096,
}


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return replace(read_spec(Path(locate("weft-demo-moe"))), hidden_size=256)


@pytest.mark.parametrize(
    ("choice", "step", "layout", "expected"),
    [
        ("overlapped", {}, Layout(4, 4), ALL),
        ("overlapped", {"on_tpu": False}, Layout(4, 4), ALL),
        ("overlapped", {}, Layout(4, 2), replace(ALL, exchange=False)),
        ("overlapped", {"sharded": False}, Layout(4, 4), Kernels(attention=True, experts=True)),
        ("overlapped", {"tokens": 144}, Layout(4, 4), Kernels(attention=True, experts=True)),
        ("overlapped", {"sharded": False}, Layout(), Kernels(attention=True, experts=True)),
        ("overlapped", {"block_size": 8}, Layout(4, 4), replace(ALL, attention=False)),
        ("auto", {}, Layout(4, 4), Kernels(attention=True, experts=True)),
        ("auto", {"on_tpu": False}, Layout(4, 4), Kernels()),
        ("plain", {}, Layout(4, 4), Kernels()),
    ],
)
def test_the_rule(
    spec: ModelSpec, choice: Any, step: dict[str, Any], layout: Layout, expected: Kernels
) -> None:
    assert choose_kernels(choice, spec, layout, **(STEP | step)) == expected


def test_the_rule_for_models_and_long_tables(spec: ModelSpec) -> None:
    def chosen(spec: ModelSpec, entries: int = 4096) -> Kernels:
        step = STEP | {"table_entries": entries}
        return choose_kernels("overlapped", spec, Layout(4, 4), **step)

    assert chosen(replace(spec, head_dim=80)) == replace(ALL, attention=False)
    assert chosen(replace(spec, hidden_size=192)) == replace(ALL, exchange=False)
    assert chosen(spec, TABLE_BYTES // 4) == ALL
    assert chosen(spec, TABLE_BYTES // 4 + 1) == replace(ALL, attention=False)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ["weft-demo", "weft-demo-moe"])
def test_demo_models_say_the_same_with_kernels(
    monkeypatch: pytest.MonkeyPatch, name: str, tp: int
) -> None:
    """The first 16 tokens, after a prompt that is sharded if there are several devices."""
    shard_tokens(monkeypatch)
    path = Path(locate(name))
    outputs = []
    for kernels in ("plain", "overlapped"):
        runner = JaxRunner.load(
            *(path, read_spec(path)),
            devices=jax.devices()[:tp],
            layout=Layout(tp, tp if "moe" in name else 1),
            dtype="float32",
            block_size=16,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=128,
            kernels=kernels,
        )
        runner.allocate_kv_cache(16)
        runner.warm_up()
        driver = Driver(runner, 16, 16)
        request = driver.add(list(range(100, 160)), 96)
        driver.step((request, 60))
        for _ in range(15):
            driver.step((request, 1))
        outputs.append(request.output)
        runner.close()
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0])) > 1
