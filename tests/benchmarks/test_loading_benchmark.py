"""benchmarks/loading.py reads all of a checkpoint's bytes, and prints a row for each case."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import loading
import pytest
from support.checkpoints import make_checkpoint

SCRIPT = Path(loading.__file__)


def test_a_round_has_a_row_for_cold_and_warm(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama", max_shard_size="100KB")
    command = [sys.executable, str(SCRIPT), str(path), "--repeat", "1", "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    title, header, _, cold, warm, memory = done.stdout.splitlines()
    assert title.endswith("MiB, 1 threads")
    assert header.split(" | ")[1:] == [
        *("read", "imports", "config", "load", "warm-up", "rate / read", "CPU s of load |")
    ]
    assert [row.split()[1] for row in (cold, warm)] == ["cold", "warm"]
    assert [row.count("|") for row in (cold, warm)] == [header.count("|")] * 2
    assert memory.endswith("times the model")


def test_plain_reads_have_all_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint(tmp_path, "llama", max_shard_size="100KB")
    files = loading.files_of(path)
    assert len(files) > 2
    monkeypatch.setattr(loading, "BLOCK", 1000)
    loading.drop(files)
    assert loading.read(files) == sum(file.stat().st_size for file in files)
    assert loading.files_of(files[0]) == [files[0]]
