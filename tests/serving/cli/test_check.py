"""`weft check` as its users run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import run_each

Run = Callable[..., subprocess.CompletedProcess[str]]

FAULTY = """
import os
os.environ["TRITON_INTERPRET"] = "1"
from dataclasses import replace
from weft.kernels.check.ops import table
from weft.kernels.gpu.collectives.all_gather import all_gather
table.OPS = (replace(table.OPS[0], function=lambda x, workspace: all_gather(x, workspace) + 1),)
"""
PROBLEM = """
from weft.kernels.check import aot
row = aot.Compiled("all_gather", "push_chunks", "sm_90", {"WORLD": "8"}, stack=4, spills=4)
aot.compile_all = lambda targets, ops, extent: iter([row])
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run `weft check ARGUMENTS` to its end; `before` is Python that runs ahead of it."""

    def run(
        *arguments: object, before: str = "", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        code = f"import sys\n{before}\nfrom weft.serving.cli.main import main\nmain()"
        return subprocess.run(
            [sys.executable, "-c", code, "check", *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            timeout=400,
        )

    return run


def test_kernels_are_checked(tmp_path: Path) -> None:
    arguments = ["check", "kernels", "--only", "all_gather", "--world-size", "1,2", "--seeds", "2"]
    done, in_json = run_each([arguments, [*arguments, "--json"]], tmp_path)
    assert (done.returncode, in_json.returncode) == (0, 0), done.stderr
    assert done.stderr == ""
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["op", "ranks", "checks", "findings"],
        ["all_gather", "1", "2", "0"],
        ["all_gather", "2", "2", "0"],
        ["4", "checks,", "0", "findings"],
    ]
    outcomes = json.loads(in_json.stdout)
    assert [(o["world_size"], o["seed"]) for o in outcomes] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert all(o["findings"] == [] for o in outcomes)


def test_what_is_found_is_told_and_is_the_exit_status(tmp_path: Path) -> None:
    arguments = ["check", "kernels", "--world-size", "2", "--seeds", "4-4"]
    done, in_json = run_each([arguments, [*arguments, "--json"]], tmp_path, before=FAULTY)
    assert (done.returncode, in_json.returncode) == (1, 1), done.stderr
    assert "all_gather, 2 ranks, seed 4: m " in done.stdout
    assert "- call 0, rank 0: " in done.stdout
    (outcome,) = json.loads(in_json.stdout)
    assert "numbers differ from the oracle's" in outcome["findings"][0]


def test_kernels_are_compiled(run: Run) -> None:
    done = run("aot", "--target", "sm_90", "--only", "all_gather")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(set(lines)) == len(lines)
    header, *rows, last = [line.split() for line in lines]
    assert last[1:] == ["compilations,", "0", "problems"]
    assert int(last[0]) >= len(rows)
    assert header[:5] == ["target", "op", "kernel", "dtype", "tile"]
    push = next(row for row in rows if row[2] == "push_chunks")
    quick = run("aot", "--quick", "--target", "sm_90", "--only", "all_gather")
    assert quick.returncode == 0, quick.stderr
    assert 0 < int(quick.stdout.split()[-4]) < int(last[0])
    assert push[:2] == ["sm_90", "all_gather"]
    assert push[header.index("releases")] == "1"
    assert push[header.index("mma")] == "-"
    assert push[header.index("dtype")] == "bf16"


def test_tpu_kernels_are_interpreted_and_compiled(run: Run) -> None:
    done = run("tpu", "--only", "grouped_matmul", "--target", "v5e:2x4")
    assert done.returncode == 0, done.stderr
    header, *rows, last = done.stdout.splitlines()
    assert header.startswith("op, mesh ")
    assert len(rows) == 5
    assert sum("interpreter, eager" in row for row in rows) == 2
    assert sum("v5e:2x4" in row for row in rows) == 1
    assert last == "5 checks, 0 findings"


def test_problems_of_compiled_kernels_are_told_and_are_the_exit_status(tmp_path: Path) -> None:
    lines = [["check", "aot"], ["check", "aot", "--json"]]
    done, in_json = run_each(lines, tmp_path, before=PROBLEM)
    assert (done.returncode, in_json.returncode) == (1, 1), done.stderr
    told = "push_chunks of all_gather on sm_90 (WORLD=8): 4 bytes of registers are spilled"
    assert done.stdout.splitlines()[-1] == told
    assert json.loads(in_json.stdout)[0]["problems"] == ["4 bytes of registers are spilled"]


USAGE_ERRORS = [
    (["kernels", "--only", "gather"], "op is 'gather' (did you mean all_gather?); it must be"),
    (["kernels", "--only", "frob"], "op is 'frob'; it must be one of all_gather, "),
    (["kernels", "--world-size", "0"], "world size is 0; it must be in [1, 16]"),
    (["kernels", "--world-size", "two"], "--world-size is 'two'; it must be whole numbers"),
    (["kernels", "--seeds", "9-5"], "--seeds is '9-5'; it must be a count, such as 3, or a range"),
    (["kernels", "--seeds", "0"], "--seeds is '0'; it must be a count, such as 3, or a range"),
    (["aot", "--target", "sm_12"], "target is 'sm_12'; it must be one of sm_80, "),
    (["aot", "--quick", "--all"], "--quick and --all were both given; give one of them"),
    (["aot", "--only", "gather"], "op is 'gather' (did you mean all_gather?); it must be"),
    (["tpu", "--only", "gather"], "op is 'gather'; it must be one of permute, all_gather, "),
    (["tpu", "--target", "v4"], "target is 'v4'; it must be one of v5e:2x4, "),
    (["frobnicate"], "frobnicate"),
]


def test_usage_errors_are_one_line_and_exit_2(tmp_path: Path) -> None:
    lines = [["check", *arguments] for arguments, _ in USAGE_ERRORS]
    for done, (_, message) in zip(run_each(lines, tmp_path), USAGE_ERRORS, strict=True):
        assert (done.returncode, done.stdout) == (2, ""), done
        assert message in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["kernels", "aot"])
def test_without_triton_it_says_what_to_install(run: Run, command: str) -> None:
    done = run(command, before="sys.modules['triton'] = None")
    assert done.returncode == 2
    assert done.stderr == (
        "weft: error: weft check needs triton, which runs and compiles the kernels: "
        "pip install 'triton>=3.6'\n"
    )


def test_without_jax_tpu_says_what_to_install(run: Run) -> None:
    done = run("tpu", before="sys.modules['jax'] = None")
    assert done.returncode == 2
    assert done.stderr == (
        "weft: error: weft check tpu needs jax and libtpu: pip install 'jax[tpu]>=0.10.2'\n"
    )


def test_help_has_examples(tmp_path: Path) -> None:
    commands = ("kernels", "aot", "tpu")
    lines = [[], ["--help"], *([command, "--help"] for command in commands)]
    bare, asked, *each = run_each([["check", *line] for line in lines], tmp_path)
    assert bare.returncode == 0
    assert bare.stdout == asked.stdout
    for command, done in zip(commands, each, strict=True):
        assert f"\n  {command} " in bare.stdout
        assert f"weft check {command}" in done.stdout


def test_timelines_are_written(tmp_path: Path) -> None:
    arguments = ["check", "timeline", "all_gather_matmul", "--world-size", "2", "-o"]
    lines = [[*arguments, "overlap.svg"], [*arguments, "overlap.png"]]
    done, refused = run_each(lines, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("all_gather_matmul on 2 ranks: ")
    assert done.stdout.endswith("of the communication is hidden; written to overlap.svg\n")
    assert (tmp_path / "overlap.svg").read_text().startswith("<svg")
    assert refused.returncode == 2
    assert "output is 'overlap.png'; it must end in .svg or .json" in refused.stderr


def test_a_timeline_for_no_directory_is_refused_at_once(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "none" / "timeline.svg"
    done = run("timeline", "all_gather", "--output", str(output))
    assert done.returncode == 2
    assert f"--output is {output}; there is no directory {output.parent}" in done.stderr
