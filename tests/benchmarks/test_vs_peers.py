"""benchmarks/vs_peers.py as it is run: a small race from start to page, and its end by a signal."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from peers.report import Run
from support.checkpoints import make_checkpoint

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "vs_peers.py"


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, str(SCRIPT), *map(str, arguments)]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=800)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dense")
    return make_checkpoint(path, "qwen2", dtype="bfloat16", max_position_embeddings=4096)


def test_a_document_is_rendered_without_measuring(tmp_path: Path) -> None:
    document = Run("python vs_peers.py", {}, "ttft=1", repetitions=1)
    document.add("dense", "weft", {"decode_rate": 40.0})
    document.add("dense", "vLLM", {"decode_rate": 25.0})
    document.save(tmp_path / "run.json")
    done = run("--render", tmp_path / "run.json", "--output", tmp_path / "docs")
    assert done.returncode == 0, done.stderr
    assert "1.60 (1.60-1.60) | at least 1.4 | yes" in done.stdout
    assert "1.60 (1.60-1.60) | at least 1.4 | yes" in (tmp_path / "docs/cpu.md").read_text()
    assert (tmp_path / "docs/cpu.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--only", "sglang"], "sglang"), (["--shapes", "dense,70b"], "70b")],
)
def test_unknown_names_are_refused(arguments: list[str], named: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert f"names '{named}'" in done.stderr


@pytest.mark.slow
def test_a_small_race_from_start_to_page(checkpoint: Path, tmp_path: Path) -> None:
    done = run(
        "--quick", "--only", "llama.cpp,transformers", "--llama-server", tmp_path / "none",
        "--dense", checkpoint, "--cache", str(64 << 20),
        "--json", tmp_path / "run.json", "--output", tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    samples = json.loads((tmp_path / "run.json").read_text())["samples"]["dense"]
    assert samples["weft"].keys() == {
        "ready", "decode_rate", "batch_rate", "batch_itl_p99", "goodput",
        "first_ttft", "again_ttft", "resident",
    }  # fmt: skip
    assert samples["transformers"].keys() == {
        "ready", "decode_rate", "batch_rate", "batch_itl_p99", "first_ttft", "resident",
    }  # fmt: skip
    assert all(value > 0 for figure in samples["weft"].values() for value in figure)
    assert len(samples["weft"]["ready"]) == 3
    page = (tmp_path / "cpu.md").read_text()
    assert "not measured: llama.cpp" in page
    assert f"`{Path(sys.executable).name} -m weft serve {checkpoint.name}" in page
    limits = samples["memory limit"]["decode_rate"]
    assert len(samples["weft"]["decode_rate"]) == len(limits) > 1


@pytest.mark.slow
def test_an_interrupted_race_leaves_no_server(checkpoint: Path, tmp_path: Path) -> None:
    arguments = ("--quick", "--only", "", "--dense", checkpoint, "--json", tmp_path / "run.json")
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command(*arguments), stderr=log)
    deadline = time.monotonic() + 120
    while "limits" not in (tmp_path / "log").read_text():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    servers = psutil.Process(process.pid).children(recursive=True)
    assert len(servers) >= 2  # API and engine
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert not [server for server in servers if server.is_running()]
