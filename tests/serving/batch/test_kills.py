"""`weft batch` that is killed, stopped and short of room: each row is in the output once."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.batches import check_output, start, write_rows
from support.disks import small_disk
from support.tokenizers import write_byte_level

ROWS = 600


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_byte_level(tmp_path / "mock")


@pytest.mark.parametrize(
    ("seed", "kills"), [(1, 3), pytest.param(2, 100, marks=pytest.mark.slow)], ids=["3", "100"]
)
def test_killed_at_random_moments(model: Path, tmp_path: Path, seed: int, kills: int) -> None:
    """Anew when it has come to its end. Every other kill is near the moment when answers are
    written: the output grows, the state follows.
    """
    rng = random.Random(seed)
    source = write_rows(tmp_path / "in.jsonl", ROWS)
    killed = finished = 0
    while killed < kills:
        output = tmp_path / f"out-{finished}.jsonl"
        process = start(model, [source], output, resume=True)
        if rng.random() < 0.5:
            delay = rng.uniform(0, 5)
        else:
            for _ in range(rng.randrange(1, 5)):
                _wait_until_it_grows(process, output)
            delay = rng.uniform(0, 0.03)
        try:
            process.wait(delay)
        except subprocess.TimeoutExpired:
            process.kill()
            killed += 1
        _, log = process.communicate()
        if process.returncode == 0:
            check_output(output, ROWS)
            finished += 1
        else:
            assert process.returncode == -signal.SIGKILL, log
    _finish(model, source, output)
    print(f"{killed} kills, {finished} runs came to their end between them")


def _wait_until_it_grows(process: subprocess.Popen[str], output: Path) -> None:
    before = _size(output)
    while process.poll() is None and _size(output) <= before:
        time.sleep(0.001)


def _size(output: Path) -> int:
    return output.stat().st_size if output.exists() else 0


def _finish(model: Path, source: Path, output: Path) -> None:
    process = start(model, [source], output, resume=True)
    _, log = process.communicate()
    assert process.returncode == 0, log
    check_output(output, ROWS)


def test_a_signal_ends_it_with_what_is_answered(model: Path, tmp_path: Path) -> None:
    source, output = write_rows(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    before = 0
    for number in (signal.SIGINT, signal.SIGTERM):
        process = start(model, [source], output, resume=before > 0)
        _wait_until_it_grows(process, output)
        process.send_signal(number)
        _, log = process.communicate()
        assert process.returncode == 128 + number, log
        lines = len(output.read_text().splitlines())
        assert before < lines < ROWS
        ends = f"{lines} of {ROWS} rows are done; to continue, run the same command with --resume\n"
        assert log.endswith(ends)
        assert f"ends by {number.name}" in log
        before = lines
    _finish(model, source, output)


def test_a_signal_while_it_loads(model: Path, tmp_path: Path) -> None:
    source, output = write_rows(tmp_path / "in.jsonl", 5), tmp_path / "out.jsonl"
    loader = "support.server:load_when_told"
    process = start(model, [source], output, runner_factory=loader)
    while not (model / "loads").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, log
    assert not output.exists()


@pytest.fixture
def disk() -> Iterator[Path]:
    with small_disk(128 * 1024) as path:
        yield path


def test_a_full_disk_stops_it_and_resume_goes_on(model: Path, tmp_path: Path, disk: Path) -> None:
    source, output = write_rows(tmp_path / "in.jsonl", ROWS), disk / "out.jsonl"
    process = start(model, [source], output)
    _, log = process.communicate()
    assert process.returncode == 1, log
    assert "No space left on device" in log or "disk is full" in log
    assert "run the same command with --resume" in log
    lines = output.read_bytes().splitlines(keepends=True)
    assert 0 < len(lines) < ROWS
    assert all(line.endswith(b"}\n") for line in lines)
    subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
    _finish(model, source, output)
    assert output.read_bytes().startswith(b"".join(lines))
