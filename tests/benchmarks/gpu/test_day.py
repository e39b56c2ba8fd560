"""benchmarks/gpu/day.py: stages as processes, whatever happens to them; and a model's parts."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

CHILD = """
import json, os, sys, time
told = json.loads(sys.argv[sys.argv.index("--child") + 1])
names = told["parts"]

def tell(**message):
    os.write(told["pipe"], json.dumps(message).encode() + b"\\n")

if "unable" in names:
    sys.exit(4)
tell(about={"device": "a device", "versions": {}, "date": "today"})
tell(cases=[("part", name) for name in names])
for number, name in enumerate(names[told["first"]:], told["first"]):
    tell(begin=number)
    if name == "hang":
        time.sleep(1000)
    if name == "crash":
        os.kill(os.getpid(), 11)
    figure = {"value": 1.0, "unit": "", "low": 1.0, "high": 1.0}
    row = {"part": "part", "case": name, "state": "done", "figure": figure}
    tell(row=row | {"reason": "", "seconds": 0.0})
    if name == "leave":
        sys.exit(3)
"""


@pytest.fixture
def states(module: Callable[[str], Any], tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Runs stages of named cases with a stand-in for the child; returns each case's state."""
    child = tmp_path / "child.py"
    child.write_text(CHILD)

    def states(*stages: Any, seconds: float = 600.0, patience: float = 600.0) -> dict[str, str]:
        report = module("harness.report").Report(tmp_path / "out", [])
        command = [sys.executable, "-I", "-S", str(child)]  # starts fast
        module("harness.stages").run_stages(report, stages, command, seconds, patience)
        written = json.loads((tmp_path / "out" / "day.json").read_text())["rows"]
        assert [row["case"] for row in written] == [row.case for row in report.rows]
        assert len({row.case for row in report.rows}) == len(report.rows)
        assert report.good == all(row.state in ("done", "left out") for row in report.rows)
        return {row.case: row.state for row in report.rows}

    return states


@pytest.fixture
def stage(module: Callable[[str], Any]) -> Callable[..., Any]:
    """Makes a stage with these cases."""

    def stage(*cases: str, seconds: float = 600.0) -> Any:
        return module("harness.stages").Stage("stage", cases, seconds)

    return stage


def test_a_hung_case_costs_only_itself(
    states: Callable[..., dict[str, str]], stage: Callable[..., Any]
) -> None:
    found = states(stage("a", "hang", "b"), stage("c"), patience=5.0)
    assert found == {"a": "done", "hang": "hung", "b": "done", "c": "done"}


def test_a_case_that_ends_the_process_costs_only_itself(
    states: Callable[..., dict[str, str]], stage: Callable[..., Any]
) -> None:
    found = states(stage("crash", "a", "leave", "b"))
    assert found == {"crash": "failed", "a": "done", "leave": "done", "b": "done"}


def test_a_stage_that_cannot_start_does_not_end_the_day(
    states: Callable[..., dict[str, str]], stage: Callable[..., Any]
) -> None:
    assert states(stage("unable"), stage("a")) == {"its process": "failed", "a": "done"}


def test_a_stage_ends_at_its_deadline_and_the_rest_is_left_out(
    states: Callable[..., dict[str, str]], stage: Callable[..., Any]
) -> None:
    found = states(stage("a", "hang", "b", "c", seconds=5.0), stage("d"))
    assert found == {"a": "done", "hang": "hung", "b": "left out", "c": "left out", "d": "done"}


def test_no_stage_outlives_the_day(
    states: Callable[..., dict[str, str]], stage: Callable[..., Any]
) -> None:
    found = states(stage("hang", "a"), stage("b"), seconds=5.0)
    assert found == {"hang": "hung", "a": "left out", "its process": "failed"}


def test_stages_run_side_by_side_beforehand_and_all_end(
    module: Callable[[str], Any],
    stage: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each notes its process and waits for the others, and only the one that hangs is ended.

    The clock stands still until the others have ended; then the time is over.
    """
    child = tmp_path / "child.py"
    child.write_text(
        "import glob, os, sys, time\n"
        f"folder = {str(tmp_path)!r}\n"
        "open(f'{folder}/{os.getpid()}.pid', 'w').close()\n"
        "while len(glob.glob(f'{folder}/*.pid')) < 3 or 'hang' in sys.argv[-1]:\n"
        "    time.sleep(0.01)\n"
        "open(f'{folder}/{os.getpid()}.end', 'w').close()\n"
    )

    def found(end: str) -> set[str]:
        return {path.stem for path in tmp_path.glob(f"*.{end}")}

    def clock() -> Iterator[float]:
        yield 0.0
        while len(found("end")) < 2:
            time.sleep(0.01)
        yield from itertools.repeat(10.0)

    stages = module("harness.stages")
    monkeypatch.setattr(stages, "time", SimpleNamespace(monotonic=clock().__next__))
    command = [sys.executable, "-I", "-S", str(child)]
    stages.compile_beforehand((stage("a"), stage("hang"), stage("b")), command, 10.0)
    assert (len(found("pid")), len(found("end"))) == (3, 2)
    assert not any(Path(f"/proc/{pid}").exists() for pid in found("pid"))


def test_all_stages_fit_into_the_day(module: Callable[[str], Any]) -> None:
    day, parts = module("day"), module("parts")
    assert day.BEFOREHAND + sum(stage.seconds for stage in day.DAY) <= day.SECONDS
    for stage in day.DAY:
        for part in stage.parts:
            assert part in parts.FAMILY


def test_stages_choose_existing_cases(module: Callable[[str], Any]) -> None:
    """Their expressions match cases of full size, and not all of them."""
    import torch

    day, parts = module("day"), module("parts")
    scales = {
        "products": module("products.scale").full,
        "layers": module("layers.scale").full,
    }
    counts = np.zeros(2)
    with pytest.MonkeyPatch.context() as patch:
        properties = type("Properties", (), {"multi_processor_count": 132})
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        for stage in day.DAY:
            for part in stage.parts if stage.cases else ():
                make, _ = parts.load(part, tiny=True)
                names = [case.name for case in make(scales[parts.FAMILY[part]](), 1)]
                chosen = [name for name in names if stage.has(name, tiny=False)]
                assert chosen, part
                counts += np.array([len(chosen), len(names)])
    assert counts[0] < counts[1]


def test_without_a_gpu_it_says_so(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = run("--part", "machine")
    assert done.returncode == 1
    assert "there is no GPU; --tiny runs the same without one" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--part", "step,stpe"), "--part names 'stpe'; the parts are machine, tokens, step"),
        (("--cases", "8B"), "--cases needs --part"),
        (("--repetitions", "0"), "--repetitions is 0; it must be at least 1"),
    ],
)
def test_bad_arguments_are_refused(
    run: Callable[..., subprocess.CompletedProcess[str]], arguments: tuple[str, ...], message: str
) -> None:
    done = run("--tiny", *arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_failing_case_is_a_row(module: Callable[[str], Any]) -> None:
    report, child = module("harness.report"), module("harness.child")

    def fail() -> Any:
        raise ZeroDivisionError("in a kernel")

    def leave_out() -> Any:
        raise report.LeftOut("no such op")

    row = child.run_case("a", report.Case("fails", fail))
    assert (row.state, row.reason) == ("failed", "ZeroDivisionError: in a kernel")
    row = child.run_case("a", report.Case("is left out", leave_out))
    assert (row.state, row.reason) == ("left out", "no such op")


@pytest.mark.parametrize(("good", "status"), [(True, True), (None, True), (False, False)])
def test_a_missed_goal_is_told(
    module: Callable[[str], Any], good: bool | None, status: bool
) -> None:
    report = module("harness.report")
    rows = report.Report(None, [])
    figure = report.Figure(2.0, "", 2.0, 2.0, "at most 1", good)
    rows.add(report.Row("a", "x", "done", figure))
    assert rows.good is status


def test_a_models_steps_are_timed_and_their_kernels_listed(
    rows_of: Callable[..., list[dict[str, Any]]],
) -> None:
    rows = rows_of("machine", "step")
    by_case = {row["case"]: row["figure"]["details"] for row in rows}
    assert by_case["1 users"]["tokens/s"] > 0
    assert by_case["3 users, kernels"]["launches"] > 10
    assert "ms top-k 50, top-p 0.95" in by_case["3 users, sampling"]


@pytest.mark.slow
def test_the_day_runs_from_end_to_end(
    run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = run("--tiny", "--repetitions", "1", "--seconds", "1700", "--output", str(tmp_path))
    rows = json.loads((tmp_path / "day.json").read_text())["rows"]
    assert {row["part"] for row in rows} >= {"machine", "tokens", "step", "few_rows", "correct"}
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_every_part_of_a_model_runs(rows_of: Callable[..., list[dict[str, Any]]]) -> None:
    rows = rows_of("tokens", "mixed", "peer", "graphs", "shard", "together")
    for row in rows:
        if row["part"] == "together":
            assert row["figure"]["good"]
            assert row["figure"]["details"]["its tokens"] == 1
