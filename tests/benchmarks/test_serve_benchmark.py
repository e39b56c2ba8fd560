"""benchmarks/gpu/serve.py: its logic in the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "serve.py"


@pytest.mark.slow
def test_every_part_runs_and_is_written(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--tiny", "--repetitions", "2"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=800,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "serve.json").read_text())["rows"]
    assert {row["part"] for row in rows} == {"decode", "peer", "graphs", "shard", "together"}
    for row in rows:
        assert (row["state"], row["reason"]) == ("done", ""), row
        figure = row["figure"]
        assert 0 < figure["low"] <= figure["value"] <= figure["high"] < float("inf")
        assert all(0 < value < float("inf") for value in figure["details"].values())
        if row["part"] == "together":
            assert figure["good"]
            assert figure["details"]["its tokens"] == 1
    page = (tmp_path / "serve.md").read_text()
    assert page.startswith("# What one GPU can show of a model that is served")
