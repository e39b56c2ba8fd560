"""benchmarks/gpu/step.py: launches of a real step, recorded without a GPU, and their prices."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


def step(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script.with_name("step.py")), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=600, env={**os.environ}, check=False
    )


def rows_of(page: str) -> list[dict[str, str]]:
    header, _, *lines = [line for line in page.splitlines() if line.startswith("|")]
    names = [cell.strip() for cell in header.strip("|").split("|")]
    return [
        dict(zip(names, (cell.strip() for cell in line.strip("|").split("|")), strict=True))
        for line in lines
    ]


def test_a_dense_layers_launches_are_recorded_and_priced(script: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    arguments = ("--model", "llama-3-8b", "--users", "1,64", "--launches", "--output", str(page))
    done = step(script, *arguments)
    assert done.returncode == 0, done.stderr
    listed = dict(re.findall(r"(\w+) x (\d+)", done.stderr.splitlines()[0]))
    assert listed["attend"] == "1"
    one, many = rows_of(page.read_text())
    assert rows_of(done.stdout) == [one, many]
    layer, whole = int(one["launches: layer"]), int(one["step"])
    assert sum(map(int, listed.values())) == layer
    assert 0 < whole - 32 * layer < 40
    # Weights: all but the embedding, in 2 bytes each. A cache of 1,024 tokens for each user.
    weights = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128256 * 4096
    cache = 32 * 2 * 8 * 128 * 1024
    for row, users in ((one, 1), (many, 64)):
        expected = 1e3 * 2 * (weights + users * cache) / 3.35e12
        assert float(row["floor"]) == pytest.approx(expected, rel=0.02)
        parts = ("products", "attention", "exchange", "other", "gaps")
        assert float(row["step, ms"]) == pytest.approx(sum(float(row[p]) for p in parts), abs=0.05)
        assert float(row["step, ms"]) > float(row["floor"])
        assert row["exposed"] == "0.00"
    assert float(many["attention"]) > float(one["attention"])


def test_ranks_exchange(script: Path) -> None:
    """With --tp inside the products, with --ep beside them. Without a graph, Python counts."""
    arguments = ("--model", "llama-3-70b", "--tp", "8", "--users", "1,128", "--launches")
    done = step(script, *arguments)
    assert done.returncode == 0, done.stderr
    few, medium = done.stderr.splitlines()
    assert "multiply_all_reduce x 2" in few
    assert "linear x 4, " in medium
    assert "multiply_all_reduce" not in medium
    for row in rows_of(done.stdout):
        assert float(row["exposed"]) > 0
        # One launch for a step counts its calls, not one for each.
        assert int(row["step"]) < 80 * int(row["launches: layer"]) + 30
    done = step(script, "--model", "qwen3-30b-a3b", "--ep", "8", "--users", "16")
    assert done.returncode == 0, done.stderr
    (row,) = rows_of(done.stdout)
    assert float(row["exchange"]) > 0
    assert (row["graph"] == "yes") == (float(row["host"]) == 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "tpu"), "--device is 'tpu'; the cost model has A100, H100, H200"),
        (
            ("--model", "llama-3-8b", "--users", "0"),
            "--users is '0'; it must be numbers of at least 1",
        ),
    ],
)
def test_bad_arguments_are_refused(script: Path, arguments: tuple[str, ...], message: str) -> None:
    done = step(script, *arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_layer_is_what_two_layers_have_more_than_one(
    module: object, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(script.parent))
    from model.recorded import Launch, _repeated

    def launches(names: str) -> list[Launch]:
        return [Launch(name, 1, {}) for name in names]

    for one, two in (("pabas", "pababas"), ("abz", "ababz"), ("ppxq", "ppxxq")):
        layer = _repeated(list(one), launches(two))
        more = sorted(two)
        for name in one:
            more.remove(name)
        assert sorted(launch.name for launch in layer) == more
