"""benchmarks/gpu/overlap.py: its logic in the interpreter, and what it says of failures."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from weft.kernels.check.ops.table import OPS

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "overlap.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, timeout=800, env=environment)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports one of its modules."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module


@pytest.mark.parametrize(
    "parts",
    [
        "product,waiting,overlap",
        pytest.param("correct,product,waiting,overlap", marks=pytest.mark.slow),
    ],
)
def test_every_part_runs_and_is_written(tmp_path: Path, parts: str) -> None:
    options = ("--tiny", "--repetitions", "2", "--parts", parts)
    done = run(*options, "--output", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "overlap.json").read_text())
    rows = report["rows"]
    checked = [row["case"] for row in rows if row["part"] == "correct"]
    assert checked == [f"{op.name}, 3 ranks" for op in OPS if "correct" in parts]
    assert {row["part"] for row in rows} == set(parts.split(","))
    for row in rows:
        assert row["state"] in ("done", "left out"), row
        assert (row["figure"] is None) == (row["state"] == "left out")
        assert (row["reason"] == "") == (row["state"] == "done")
        if row["figure"] is not None:
            figure = row["figure"]
            assert 0 <= figure["low"] <= figure["value"] <= figure["high"] < float("inf")
            assert figure["good"] is (True if row["part"] == "correct" else None)
    assert set(report["versions"]) == {"weft", "torch", "cuda", "triton", "python"}
    assert report["command"].endswith(f"{' '.join(options)} --output {tmp_path / 'out'}")
    page = (tmp_path / "out" / "overlap.md").read_text()
    for row in rows:
        assert f"| {row['part']} | {row['case']} |" in page
        assert row["case"] in done.stdout


def test_without_a_gpu_it_says_so() -> None:
    done = run()
    assert done.returncode == 2
    assert "there is no GPU; --tiny runs the same without one" in done.stderr


def test_an_unknown_part_is_refused() -> None:
    done = run("--tiny", "--parts", "correct,corect")
    assert done.returncode == 2
    assert "there is no part 'corect'; there are correct, product, waiting, overlap" in done.stderr


def test_no_case_begins_after_the_time(tmp_path: Path) -> None:
    done = run("--tiny", "--seconds", "0", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "overlap.json").read_text())["rows"]
    assert len(rows) > 10
    assert {row["reason"] for row in rows} == {"0 s are over"}


def test_a_wrong_result_is_seen(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    correct: ModuleType = parts("overlap_parts.correct")
    tiny = parts("overlap_parts.scale").TINY
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


def test_the_product_alone_is_the_product(parts: Any) -> None:
    """It computes the same, and neither counts the call nor sends anything."""
    timing: ModuleType = parts("harness.timing")
    ranks: ModuleType = parts("harness.ranks")
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


def test_a_copy_without_waits_does_not_wait(parts: Any) -> None:
    timing: ModuleType = parts("harness.timing")
    ranks: ModuleType = parts("harness.ranks")
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


def figure(parts: Any, value: float, good: bool | None) -> Any:
    return parts("harness.report").Figure(value, "", value, value, "at most 1", good)


def test_a_case_that_fails_does_not_end_the_others(parts: Any, tmp_path: Path) -> None:
    module: ModuleType = parts("harness.report")
    report = module.Report("overlap", "Heading", tmp_path, ["--tiny"], tiny=True)

    def fail() -> Any:
        raise ZeroDivisionError("in a kernel")

    def leave_out() -> Any:
        raise module.LeftOut("no such op")

    report.add("a", module.Case("fails", fail))
    assert not report.good
    report.add("a", module.Case("is left out", leave_out))
    report.add("a", module.Case("works", lambda: figure(parts, 0.5, True)))
    rows = json.loads((tmp_path / "overlap.json").read_text())["rows"]
    assert [row["state"] for row in rows] == ["failed", "left out", "done"]
    assert rows[0]["reason"] == "ZeroDivisionError: in a kernel"
    assert rows[1]["reason"] == "no such op"


@pytest.mark.parametrize(("good", "status"), [(True, True), (None, True), (False, False)])
def test_a_missed_goal_is_told(parts: Any, good: bool | None, status: bool) -> None:
    module: ModuleType = parts("harness.report")
    report = module.Report("overlap", "Heading", None, [], tiny=True)
    report.add("a", module.Case("x", lambda: figure(parts, 2.0, good)))
    assert report.good is status


def test_a_hang_is_reported_with_what_was_being_done(
    parts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module: ModuleType = parts("harness.report")
    report = module.Report("overlap", "Heading", tmp_path, [], tiny=True)
    report.begin("correct", "all_gather, 8 ranks")
    report.hung()
    assert not report.good
    assert "all_gather, 8 ranks" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "overlap.json").read_text())["rows"]
    assert (row["state"], row["case"]) == ("hung", "all_gather, 8 ranks")


def test_the_watchdog_ends_the_process(tmp_path: Path) -> None:
    code = f"""
import sys, threading, time
sys.path.insert(0, {str(SCRIPT.parent)!r})
from harness.command import watchdog
class Report:
    def hung(self): print("told", flush=True)
watchdog(Report(), 0.2)
threading.Event().wait()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, done.stderr
    assert done.stdout == "told\n"


def test_times_add_and_compare_repetition_by_repetition(parts: Any) -> None:
    timing: ModuleType = parts("harness.timing")
    a, b = timing.Times((1.0, 2.0, 9.0)), timing.Times((2.0, 4.0, 3.0))
    assert (a + b).values == (3.0, 6.0, 12.0)
    assert a.median == 2.0
    assert timing.ratio(a, b) == (0.5, "", 0.5, 3.0)


def test_calls_take_turns(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    timing: ModuleType = parts("harness.timing")
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
from overlap_parts.scale import TILINGS, TINY, Shape
from overlap_parts.speed import OVERLAPPED, matmul
from harness.timing import without_waits
from weft.kernels.check import aot

scale = replace(TINY, dtype=torch.bfloat16, tilings=TILINGS)
home = aot._Alone(3, 8, "sm_90")
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
def test_what_runs_on_a_gpu_compiles_for_it(tmp_path: Path) -> None:
    """Every tiling, without spills; and where waits are dropped, nothing acquires."""
    script = tmp_path / "compile.py"
    script.write_text(COMPILE)
    done = subprocess.run(
        [sys.executable, str(script), str(SCRIPT.parent)],
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
