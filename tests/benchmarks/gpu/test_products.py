"""The parts with overlapped products: their logic in the interpreter, and the failures they see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from weft.kernels.check.ops.table import OPS

Module = Callable[[str], Any]


@pytest.mark.parametrize(
    "parts",
    [
        ("product", "few_rows", "waiting", "overlap"),
        pytest.param(("correct",), marks=pytest.mark.slow),
    ],
)
def test_every_part_runs_and_is_written(
    rows_of: Callable[..., list[dict[str, Any]]], parts: tuple[str, ...]
) -> None:
    rows = rows_of(*parts, without_figure=True)
    if "correct" in parts:
        assert [row["case"] for row in rows] == [f"{op.name}, 3 ranks" for op in OPS]
    for row in rows:
        if row["figure"] is not None:
            assert row["figure"]["good"] is (True if row["part"] == "correct" else None)


def test_a_wrong_result_is_seen(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    correct: ModuleType = module("products.correct")
    tiny = module("products.scale").TINY
    op = next(op for op in OPS if op.name == "all_gather")
    assert correct.check(tiny, op, 2).good is True

    def wrong(*arguments: Any, **options: Any) -> torch.Tensor:
        result = op.function(*arguments, **options)
        result[3, 1] += 1
        return result

    from dataclasses import replace

    figure = correct.check(tiny, replace(op, function=wrong), 2)
    assert figure.good is False
    assert figure.value > 0.1

    def missing(*arguments: Any, **options: Any) -> torch.Tensor:
        return op.function(*arguments, **options) * float("nan")

    assert correct.check(tiny, replace(op, function=missing), 2).value == float("inf")


def test_the_product_alone_is_the_product(module: Module) -> None:
    """It computes the same, and neither counts the call nor sends anything."""
    timing: ModuleType = module("harness.timing")
    ranks: ModuleType = module("harness.ranks")
    from weft.kernels.gpu.matmul.all_gather_matmul import (
        all_gather_matmul,
        all_gather_matmul_workspace,
    )

    def work(home: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
        workspace = all_gather_matmul_workspace(home, 4, 4, torch.float32, 16)
        ranks.receive_all(workspace, 4)
        x, w = torch.arange(16.0).view(4, 4), torch.ones(4, 4)

        def call() -> torch.Tensor:
            return all_gather_matmul(x, w, workspace, blocks=(16, 16, 16), programs=1)

        return call(), timing.only_product(call)(), int(workspace.calls)

    whole, product, calls = ranks.run(work, 1, tiny=True)[0]
    assert torch.equal(whole, product)
    assert whole[3, 0] == 54
    assert calls == 1


def test_a_copy_without_waits_does_not_wait(module: Module) -> None:
    timing: ModuleType = module("harness.timing")
    ranks: ModuleType = module("harness.ranks")
    from weft.kernels.check.ranks import HangError
    from weft.kernels.gpu.matmul.all_gather_matmul import (
        all_gather_matmul,
        all_gather_matmul_workspace,
    )

    def work(home: Any, function: Any) -> None:
        workspace = all_gather_matmul_workspace(home, 4, 4, torch.float32, 16)
        if home.rank == 0:  # and nobody else
            function(torch.ones(4, 4), torch.ones(4, 4), workspace, blocks=(16, 16, 16), programs=1)
        home.exchange("done")

    with pytest.raises(HangError):
        ranks.run(lambda home: work(home, all_gather_matmul), 2, tiny=True)
    ranks.run(lambda home: work(home, timing.without_waits(all_gather_matmul)), 2, tiny=True)


def test_times_add_and_compare_repetition_by_repetition(module: Module) -> None:
    timing: ModuleType = module("harness.timing")
    a, b = timing.Times((1.0, 2.0, 9.0)), timing.Times((2.0, 4.0, 3.0))
    assert (a + b).values == (3.0, 6.0, 12.0)
    assert a.median == 2.0
    assert timing.ratio(a, b) == (0.5, "", 0.5, 3.0)


def test_calls_take_turns(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    timing: ModuleType = module("harness.timing")
    order: list[str] = []
    monkeypatch.setattr(timing, "host_clock", lambda call, calls: float(bool(call()) or 1.0))
    calls = {name: (lambda name=name: order.append(name)) for name in ("a", "b")}
    timing.interleaved(calls, 3, tiny=True)
    assert order[-6:] == ["a", "b"] * 3


COMPILE = """
import json
import sys
from dataclasses import replace

import torch

sys.path.insert(0, sys.argv[1])
from products.scale import TILINGS, TINY, Shape
from products.speed import OVERLAPPED, matmul
from harness.timing import without_waits
from weft.kernels.check import aot

scale = replace(TINY, dtype=torch.bfloat16, tilings=TILINGS)
home = aot.LoneRank(3, 8, "sm_90")
with aot.compiling("sm_90") as launches:
    for name, op in OVERLAPPED.items():
        rows = 64 if name == "matmul_all_reduce" else 128 * home.world_size
        workspace = op.workspace(home, scale, Shape("", name, rows, 256, 128))
        x, w = (torch.zeros(*shape, dtype=scale.dtype) for shape in ((rows, 128), (128, 256)))
        shard = x[: rows // home.world_size] if op.gathers else x
        for tiling in TILINGS:
            matmul(x, w, **tiling.options)
            op.function(shard, w, workspace, **tiling.options)
        if op.gathers:
            without_waits(op.function)(shard, w, workspace, **TILINGS[0].options)
for launch in launches:
    compiled = aot.describe("", "sm_90", launch)
    acquires = launch.result.asm["ptx"].count("acquire")
    print(json.dumps([launch.kernel.__module__, compiled.kernel, compiled.spills, acquires]))
"""


@pytest.mark.slow
def test_what_runs_on_a_gpu_compiles_for_it(script: Path, tmp_path: Path) -> None:
    """Every tiling, without spills; and where waits are dropped, nothing acquires."""
    code = tmp_path / "compile.py"
    code.write_text(COMPILE)
    done = subprocess.run(
        [sys.executable, str(code), str(script.parent)],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel for _, kernel, _, _ in rows} >= {"multiply", "multiply_gathered", "push_rows"}
    assert [row for row in rows if row[2]] == []
    products = [row for row in rows if row[1] == "multiply_gathered"]
    for module, _, _, acquires in products:
        assert (acquires == 0) == module.endswith("_without_waits")
    assert len({module for module, *_ in products}) == 2
