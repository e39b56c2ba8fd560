"""What vs_peers.py is made of: processes that always end, honest ratios, complete pages."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from peers import contestants, report, table
from peers.checkpoint import Checkpoint
from peers.process import PeerError, free_port, start
from peers.report import Run
from peers.table import FIGURES, MEMORY_LIMIT, Figure, Goal, compare
from support.checkpoints import make_checkpoint

# Starts a child that ignores SIGTERM, says its pid, and waits.
FAMILY = """
import os, signal, sys, time
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ballast = bytearray(os.urandom(1)) * (64 << 20)
    print(os.getpid(), file=sys.stderr, flush=True)
time.sleep(600)
"""
RATE = Figure("dense", "decode_rate", "rate", "tok/s", ())


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def family(tmp_path: Path) -> Any:
    command = [sys.executable, "-c", FAMILY]
    return start("peer", command, environment={}, log=tmp_path / "peer.log")


def child_of(log: Path) -> psutil.Process:
    until(lambda: log.read_text().endswith("\n"))
    return psutil.Process(int(log.read_text()))


def test_nothing_of_a_process_group_outlives_its_block(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), family(tmp_path) as contender:  # noqa: PT012
        child = child_of(contender.log)
        contender.freeze()  # as most are when a run is interrupted
        raise KeyboardInterrupt
    assert contender.process.returncode is not None
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_freezing_stops_the_whole_group(tmp_path: Path) -> None:
    with family(tmp_path) as contender:
        both = [child_of(contender.log), psutil.Process(contender.process.pid)]
        contender.freeze()
        until(lambda: all(one.status() == psutil.STATUS_STOPPED for one in both))
        contender.thaw()
        until(lambda: all(one.status() == psutil.STATUS_SLEEPING for one in both))


def test_memory_of_descendants_counts(tmp_path: Path) -> None:
    with family(tmp_path) as contender:
        child_of(contender.log)
        assert contender.resident() > 64 << 20


def test_a_process_that_ends_early_shows_the_end_of_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with (
        start("peer", command, environment={}, log=tmp_path / "log") as contender,
        pytest.raises(PeerError, match=r"status 1 before it was ready(?s:.*)no such model"),
    ):
        contender.wait_ready(f"http://127.0.0.1:{free_port()}", {}, timeout=60)


def test_ratio_is_of_medians_and_its_spread_of_repetitions() -> None:
    verdict = compare(RATE, Goal("vLLM", 1.4), [30.0, 60.0, 45.0], [30.0, 20.0, 25.0])
    assert (verdict.ratio, verdict.low, verdict.high) == (1.8, 1.0, 3.0)
    assert verdict.is_reached


@pytest.mark.parametrize(
    ("ratio", "is_least", "reached"),
    [(1.4, True, True), (1.39, True, False), (1.0, False, True), (1.01, False, False)],
)
def test_a_goal_is_reached_at_its_bound(ratio: float, is_least: bool, reached: bool) -> None:
    bound = 1.4 if is_least else 1.0
    verdict = compare(RATE, Goal("vLLM", bound, is_least), [ratio], [1.0])
    assert verdict.is_reached is reached
    assert (report.margin(verdict) >= 1) is reached


def test_one_sample_stands_for_every_repetition() -> None:
    verdict = compare(RATE, Goal("3 s", 1.0, is_least=False), [2.0, 4.0, 3.0], [3.0])
    assert verdict.low == pytest.approx(2 / 3)
    assert verdict.high == pytest.approx(4 / 3)


def test_a_rival_that_did_nothing_is_beaten_without_bound() -> None:
    assert compare(RATE, Goal("vLLM", 1.3), [2.0], [0.0]).ratio == float("inf")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0726, "ms", "72.6"),
        (45.678, "tok/s", "45.7"),
        (1.5e9, "MB", "1,500"),
        (3.204, "s", "3.2"),
    ],
)
def test_values_are_shown_in_the_unit_of_their_row(value: float, unit: str, text: str) -> None:
    assert table.shown(value, unit) == text


def full_run() -> Run:
    """Every figure of every name, each with another value."""
    run = Run("python vs_peers.py", {"cores": "2"}, "ttft=10", repetitions=2)
    value = 1.0
    for figure in FIGURES:
        for name in {"weft", *(goal.against for goal in figure.goals)}:
            for _ in range(2):
                run.add(figure.shape, name, {figure.key: (value := value + 1)})
    run.bandwidth, run.gemm = [50e9], [700e9]
    run.missing = {"vLLM": "not found: install it"}
    run.contestants = [
        {
            "name": "weft",
            "version": "1",
            "shape": "dense",
            "command": "/opt/bin/weft serve /data/m --config=/a/b",
            "remark": "r",
        }
    ]
    return run


def test_page_has_every_goal_and_figure_and_whom_it_lacks(tmp_path: Path) -> None:
    run = full_run()
    run.save(tmp_path / "run.json")
    page = report.markdown(Run.load(tmp_path / "run.json"), "cpu.png")
    assert page == report.markdown(run, "cpu.png")
    for figure in FIGURES:
        assert page.count(f"| {figure.title} ") == len(figure.goals)
        assert f"| {figure.title}, {figure.unit} " in page
    assert "not found: install it" in page
    assert "50.0 (50.0-50.0) GB/s" in page
    assert "`weft serve m --config=b`" in page


def test_picture_is_drawn(tmp_path: Path) -> None:
    report.plot(full_run(), tmp_path / "cpu.png")
    assert (tmp_path / "cpu.png").read_bytes().startswith(b"\x89PNG")


def test_unmeasured_goals_are_left_out() -> None:
    run = Run("", {}, "")
    run.add("dense", "weft", {"decode_rate": 10.0})
    run.add("dense", MEMORY_LIMIT, {"decode_rate": 20.0})
    (verdict,) = table.verdicts(run.samples)
    assert verdict.ratio == 0.5


@pytest.mark.parametrize("tied", [False, True])
def test_bytes_of_a_token_of_a_dense_model(tmp_path: Path, tied: bool) -> None:
    path = make_checkpoint(tmp_path, "qwen2", dtype="bfloat16", tie_word_embeddings=tied)
    checkpoint = Checkpoint.read(path)
    embedding = 2 * 320 * 64
    unread = 0 if tied else embedding  # rows of it are looked up; as output layer it is read
    assert checkpoint.weights_per_token == checkpoint.weights - unread
    assert checkpoint.cache_per_token == 2 * 2 * 2 * 2 * 16  # K and V, bytes, layers, heads, width
    assert checkpoint.bytes_read(10) == checkpoint.weights_per_token + 10 * 256


def test_a_token_reads_only_the_experts_it_is_sent_to(tmp_path: Path) -> None:
    checkpoint = Checkpoint.read(make_checkpoint(tmp_path, "qwen3_moe", dtype="bfloat16"))
    experts = 2 * 2 * 8 * 3 * 64 * 48  # bytes, layers, experts, matrices
    read = checkpoint.weights - 2 * 320 * 64 - experts * 6 // 8
    assert checkpoint.weights_per_token == read


def test_missing_contestants_say_how_to_get_them(tmp_path: Path) -> None:
    vllm = contestants.vllm(tmp_path / "python", 1, [0])
    llama = contestants.llama_cpp(str(tmp_path / "llama-server"), [0], tmp_path)
    assert isinstance(vllm, contestants.Missing)
    assert "make bench-peers" in vllm.remedy
    assert isinstance(llama, contestants.Missing)
    assert "llama-server" in llama.remedy


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_gguf_holds_every_weight_of_the_checkpoint(tmp_path: Path, family: str) -> None:
    import gguf
    from peers.gguf_file import convert

    path = make_checkpoint(tmp_path / "m", family, dtype="bfloat16")
    reader = gguf.GGUFReader(convert(path, tmp_path / "m.gguf"))
    weights = Checkpoint.read(path).weights
    elements = sum(int(tensor.n_elements) for tensor in reader.tensors)
    assert elements == weights // 2
    tokens = reader.get_field("tokenizer.ggml.tokens")
    assert tokens is not None
    assert len(tokens.data) == 320
