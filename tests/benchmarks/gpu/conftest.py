"""Scripts of benchmarks/gpu: their modules, and how to run them without a GPU."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu" / "day.py"

Run = Callable[..., subprocess.CompletedProcess[str]]
Rows = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def script() -> Path:
    """The command of the GPU's day."""
    return SCRIPT


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module of the benchmark."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module


@pytest.fixture
def run() -> Run:
    """Runs the command without a GPU."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(SCRIPT), *arguments]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.run(
            command, capture_output=True, text=True, timeout=1800, env=environment
        )

    return run


@pytest.fixture
def rows_of(run: Run, tmp_path: Path) -> Rows:
    """Runs tiny parts twice each, checks their rows, and returns them."""

    def rows_of(*parts: str, without_figure: bool = False) -> list[dict[str, Any]]:
        output = tmp_path / "out"
        options = ("--tiny", "--repetitions", "2", "--seconds", "1700", "--part", ",".join(parts))
        done = run(*options, "--output", str(output))
        assert done.returncode == 0, done.stdout + done.stderr
        report = json.loads((output / "day.json").read_text())
        rows: list[dict[str, Any]] = report["rows"]
        assert list(dict.fromkeys(row["part"] for row in rows)) == list(parts)
        for row in rows:
            if row["state"] == "left out" and without_figure:
                assert row["reason"]
                continue
            assert (row["state"], row["reason"]) == ("done", ""), row
            figure = row["figure"]
            assert 0 <= figure["low"] <= figure["value"] <= figure["high"] < float("inf")
            details = figure["details"] or {}
            assert all(0 <= value < float("inf") for value in details.values())
        assert report["command"].endswith(f"{' '.join(options)} --output {output}")
        assert set(report["versions"]) == {"weft", "torch", "cuda", "triton", "python"}
        page = (output / "day.md").read_text()
        assert page.startswith("# A day with a GPU")
        for row in rows:
            assert f"| {row['part']} | {row['case']} |" in page
            assert row["case"] in done.stdout
        return rows

    return rows_of
