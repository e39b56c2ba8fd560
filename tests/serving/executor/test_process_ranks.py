"""Ranks as processes: all run the same steps in order, and a failure names its rank."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.checkpoints import make_checkpoint
from support.clock import Clock
from support.mock_ranks import (
    PARTS,
    batch,
    failure_of,
    load,
    load_and_babble,
    load_and_die,
    load_in_parts,
    load_late,
)
from support.processes import wait_until_gone

from weft.errors import ConfigError, EngineError
from weft.models.interface import SlotSampling, Step
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.core import start_executor
from weft.serving.executor import ranks as processes
from weft.serving.executor import step_ring
from weft.serving.executor.base import Pending
from weft.serving.executor.loading import ModelInfo, load_model
from weft.serving.executor.node import LocalNode
from weft.serving.executor.rank_messages import decode_step, encode_step
from weft.serving.executor.ranks import ProcessExecutor
from weft.serving.executor.step_ring import ENTRIES


@pytest.fixture(autouse=True)
def mocks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rank processes import the mocks."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


@contextmanager
def started(
    path: Path, ranks: int, fault: str = "none", **settings: Any
) -> Iterator[ProcessExecutor]:
    config = EngineConfig(model=fault, tokenizer=str(path), **settings)
    executor = ProcessExecutor(config, load, ranks)
    try:
        yield executor
    finally:
        executor.close()
        wait_until_gone(pids(executor))


def pids(executor: ProcessExecutor) -> list[int]:
    return [pid for node in executor._nodes for pid in node.pids]


def steps_of(pending: Pending) -> list[int | None]:
    """Return the step number in each attention group's output."""
    return [output and output.step for output in pending.result(10)]


def notes(path: Path, rank: int) -> list[str]:
    return (path / f"rank{rank}").read_text().splitlines()


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_run_the_same_steps_in_order(ranks: int, tmp_path: Path) -> None:
    with started(tmp_path, ranks) as executor:
        assert executor.model.num_blocks == 8
        pending = [executor.submit((batch(step, tokens=10 + step),)) for step in range(20)]
        for step, each in enumerate(pending):
            (output,) = each.result(10)
            assert output is not None
            assert output.step == step
            assert output.token_ids.tolist() == [100 * step, 100 * step + 1]
    ran = [f"{step} {batch(step, tokens=10 + step).token_ids.sum()}" for step in range(20)]
    for rank in range(ranks):
        assert notes(tmp_path, rank) == [*ran, "closed"]


def test_a_gpus_only_rank_has_a_process_of_its_own(tmp_path: Path) -> None:
    config = EngineConfig(model="none", tokenizer=str(tmp_path), device="cuda", backend="torch")
    executor = start_executor(config, load, lambda port: None)
    try:
        assert isinstance(executor, ProcessExecutor)
        (output,) = executor.submit((batch(3),)).result(60)
        assert output is not None
        assert output.step == 3
    finally:
        executor.close()


def test_a_rank_that_lags_is_waited_for_before_its_steps_are_written_over(tmp_path: Path) -> None:
    count = 5 * ENTRIES
    with started(tmp_path, 2, "1 lags in 0") as executor:
        for step in range(count):  # only rank 0 answers, and it is far ahead
            executor.submit((batch(step),)).result(10)
            done = executor._counters()[1]
            assert done.max() - done.min() <= ENTRIES + 1
    assert notes(tmp_path, 1) == notes(tmp_path, 0)
    assert len(notes(tmp_path, 1)) == count + 1


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    ("fault", "how"),
    [
        ("raises", r"rank {rank} failed in step 4: ValueError\('a bad step'\)"),
        ("dies", r"rank {rank} \(process \d+\) was killed by SIGKILL in step 4"),
    ],
)
def test_a_rank_that_fails_is_named_and_ends_all(
    rank: int, fault: str, how: str, tmp_path: Path
) -> None:
    with started(tmp_path, 3, f"{rank} {fault} in 3") as executor:
        pending = [executor.submit((batch(step),)) for step in range(3)]
        assert [steps_of(each) for each in pending] == [[0], [1], [2]]
        failed: list[Pending] = []
        while not failed or failed[-1].exception(60) is None:  # rank 0 may answer step 3
            failed.append(executor.submit((batch(3 + len(failed)),)))
        with pytest.raises(EngineError, match=how.format(rank=rank)):
            failed[-1].result(0)
        with pytest.raises(EngineError, match=how.format(rank=rank)):
            executor.submit((batch(9),)).result(0)
        wait_until_gone(pids(executor))


def test_a_rank_that_dies_before_its_first_step_is_named(tmp_path: Path) -> None:
    with started(tmp_path, 2) as executor:
        os.kill(pids(executor)[1], signal.SIGKILL)
        died = "was killed by SIGKILL before its first step"
        assert died in str(failure_of(executor))
        with pytest.raises(EngineError, match=died):
            executor.submit((batch(0),)).result(0)


COPIES = {"tp": 2, "ep": 4}
"""Four ranks: two attention groups with two ranks each."""


def test_copies_of_attention_have_inputs_of_their_own(tmp_path: Path) -> None:
    steps: list[Step] = []
    for step in range(12):
        both = batch(step, tokens=3), batch(step, tokens=5 + step)
        idle = both[0] if step % 3 else None, both[1] if step % 4 else None
        steps.append(both if idle == (None, None) else idle)
    with started(tmp_path, 4, **COPIES) as executor:
        pending = [executor.submit(step) for step in steps]
        for number, (step, each) in enumerate(zip(steps, pending, strict=True)):
            assert steps_of(each) == [None if own is None else number for own in step]
    for rank in range(4):
        own = [step[rank // 2] for step in steps]
        ran = [f"{i.step} {i.token_ids.sum()}" if i else "0 0" for i in own]
        assert notes(tmp_path, rank) == [*ran, "closed"]


def test_the_outputs_of_a_slow_copy_are_those_of_its_steps(tmp_path: Path) -> None:
    with started(tmp_path, 4, "2 lags in 0", **COPIES) as executor:
        pending = [executor.submit((batch(i), batch(i))) for i in range(3 * ENTRIES)]
        assert [steps_of(each) for each in pending] == [[i, i] for i in range(3 * ENTRIES)]


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_fails_in_one_copy_ends_all(rank: int, tmp_path: Path) -> None:
    with started(tmp_path, 4, f"{rank} dies in 1", **COPIES) as executor:
        assert steps_of(executor.submit((batch(0), batch(0)))) == [0, 0]
        named = rf"rank {rank} \(process \d+\) was killed by SIGKILL in step 2"
        failed: list[Pending] = []
        while not failed or failed[-1].exception(60) is None:  # the others may answer step 1
            failed.append(executor.submit((batch(1 + len(failed)),) * 2))
        with pytest.raises(EngineError, match=named):
            failed[-1].result(0)


@pytest.mark.parametrize("rank", [1, 2])
def test_the_rank_that_others_wait_for_is_named_in_any_copy(rank: int, tmp_path: Path) -> None:
    """Exchanges within a copy do not show which rank is behind."""
    config = EngineConfig(
        model=f"{rank} strands in 1", tokenizer=str(tmp_path), stall_timeout=1.6, **COPIES
    )
    executor = ProcessExecutor(config, load, 4)
    assert steps_of(executor.submit((batch(0), batch(0)))) == [0, 0]
    named = rf"rank {rank} \(process \d+\) is stuck in step 2: .* is at exchange 0 .* are at 1"
    with pytest.raises(EngineError, match=named):
        executor.submit((batch(1), batch(1))).result(60)
    executor.close()
    wait_until_gone(pids(executor))


@pytest.mark.parametrize("rank", [0, 2])
def test_without_progress_the_rank_behind_is_named(
    rank: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = EngineConfig(model=f"{rank} hangs in 1", tokenizer=str(tmp_path), stall_timeout=1.6)
    executor = ProcessExecutor(config, load, 3)
    assert steps_of(executor.submit((batch(0),))) == [0]
    pending = [executor.submit((batch(step),)) for step in range(1, 9)]  # the last waits for room
    with pytest.raises(EngineError, match=rf"rank {rank} \(process \d+\) is stuck in step 2: "):
        pending[-1].result(60)
    executor.close()
    wait_until_gone(pids(executor))
    assert "mock_ranks.py" in capfd.readouterr().err  # where it hangs


@pytest.mark.parametrize("rank", [1, 2])
def test_the_rank_behind_is_named_among_waiting_stages(rank: int, tmp_path: Path) -> None:
    config = EngineConfig(
        model=f"{rank} stalls in 1", tokenizer=str(tmp_path), tp=2, pp=2, stall_timeout=1.6
    )
    executor = ProcessExecutor(config, load, 4)
    pending = [executor.submit((batch(step),)) for step in range(3)]
    with pytest.raises(EngineError, match=rf"rank {rank} \(process \d+\) is stuck in step 2: "):
        pending[-1].result(60)
    executor.close()
    wait_until_gone(pids(executor))


@pytest.mark.parametrize("rank", [1, 2])
def test_the_last_stage_answers(rank: int, tmp_path: Path) -> None:
    with started(tmp_path, 4, f"{rank} lags in 0", tp=2, pp=2) as executor:
        pending = [executor.submit((batch(step),)) for step in range(12)]
        assert [steps_of(each) for each in pending] == [[step] for step in range(12)]
    for each in range(4):
        assert notes(tmp_path, each) == notes(tmp_path, 0)
        assert len(notes(tmp_path, each)) == 13


def test_invalid_outputs_from_earlier_stages_are_ignored(tmp_path: Path) -> None:
    """Outputs from earlier stages are ignored."""
    with started(tmp_path, 2, "0 babbles in 1", pp=2) as executor:
        pending = [executor.submit((batch(step),)) for step in range(3)]
        assert [steps_of(each) for each in pending] == [[0], [1], [2]]


def test_a_rank_that_is_stopped_is_named(tmp_path: Path) -> None:
    config = EngineConfig(model="none", tokenizer=str(tmp_path), stall_timeout=1.6)
    executor = ProcessExecutor(config, load, 3)
    assert steps_of(executor.submit((batch(0),))) == [0]
    os.kill(pids(executor)[1], signal.SIGSTOP)
    pending = [executor.submit((batch(step),)) for step in range(1, 9)]  # the last waits for room
    with pytest.raises(EngineError, match=r"rank 1 \(process \d+\) is stopped "):
        pending[-1].result(60)
    executor.close()
    wait_until_gone(pids(executor))


def test_a_rank_that_hangs_is_killed_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "CLOSE_GRACE", 0.2)
    executor = ProcessExecutor(EngineConfig(model="1 hangs in 0", tokenizer=str(tmp_path)), load, 2)
    assert steps_of(executor.submit((batch(0),))) == [0]
    executor.close()
    wait_until_gone(pids(executor))


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_rank_refuses_is_raised(rank: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--model is not to my liking"):
        ProcessExecutor(
            EngineConfig(model=f"{rank} refuses in 0", tokenizer=str(tmp_path)), load, 2
        )


def test_a_rank_that_dies_before_the_rendezvous_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hear = ProcessExecutor._load

    def hear_late(executor: ProcessExecutor) -> ModelInfo:
        node = executor._nodes[0]
        assert isinstance(node, LocalNode)
        node._process(1).wait(60)
        return hear(executor)

    monkeypatch.setattr(ProcessExecutor, "_load", hear_late)
    died = r"rank 1 \(process \d+\) was killed by SIGKILL while loading"
    with pytest.raises(EngineError, match=died):
        ProcessExecutor(EngineConfig(tokenizer=str(tmp_path)), load_and_die, 2)


def test_a_rank_may_load_for_longer_than_a_step_may_take(tmp_path: Path) -> None:
    model = str(make_checkpoint(tmp_path / "model", "llama"))
    config = EngineConfig(model=model, tp=2, threads=2, kv_cache_memory=2**20, stall_timeout=0.2)
    executor = ProcessExecutor(config, load_late, 2)
    assert executor.model.max_model_len == 512
    executor.close()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)


LOADING = {"model": "none", "stall_timeout": 0.4, "load_stall_timeout": 0.2}
"""Checks every 0.05 s; ranks are stuck after five without progress."""


def test_a_rank_that_is_stuck_while_it_loads_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hear = ProcessExecutor._load

    def hear_late(executor: ProcessExecutor) -> ModelInfo:
        for name in ("rank0 has 4", "rank1 has 2", "rank2 has 4"):
            wait_for(tmp_path / name)
        return hear(executor)

    monkeypatch.setattr(ProcessExecutor, "_load", hear_late)
    for part in (1, 2):
        (tmp_path / f"part{part}").touch()
    stuck = r"rank 1 \(process \d+\) is stuck while loading, with 50% of its weights read: .* 0.2 s"
    with pytest.raises(EngineError, match=stuck):
        ProcessExecutor(EngineConfig(tokenizer=str(tmp_path), **LOADING), load_in_parts, 3)
    assert "mock_ranks.py" in capfd.readouterr().err  # where it hangs


def test_a_rank_that_loads_slowly_is_not_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads each part late, but before the last progress check."""
    check, looks, reads = ProcessExecutor._check_progress, 0, 0

    def check_and_go_on(executor: ProcessExecutor) -> None:
        nonlocal looks, reads
        if reads == PARTS or not (tmp_path / "rank0 has 4").exists():
            return  # it is about to be ready; the processes are being started
        looks += 1
        if looks % 4 == 0 and reads < PARTS:
            reads += 1
            (tmp_path / f"part{reads}").touch()
            wait_for(tmp_path / f"rank1 has {reads}")
        check(executor)

    monkeypatch.setattr(ProcessExecutor, "_check_progress", check_and_go_on)
    executor = ProcessExecutor(EngineConfig(tokenizer=str(tmp_path), **LOADING), load_in_parts, 2)
    assert executor.model.num_blocks == 8
    assert looks >= 4 * PARTS
    executor.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_that_dies_is_named(rank: int, tmp_path: Path) -> None:
    """In a real model, the other stage then fails, too."""
    model = str(make_checkpoint(tmp_path / "model", "llama"))
    config = EngineConfig(model=model, pp=2, threads=2, kv_cache_memory=2**20)
    executor = ProcessExecutor(config, load_model, 2)
    one = np.zeros(1, np.int32)
    prompt = replace(batch(0), sample_slot=one, sample_index=one + 2, output_index=one)
    (output,) = executor.submit((prompt,)).result(30)
    assert output is not None
    assert len(output.token_ids) == 1
    os.kill(pids(executor)[rank], signal.SIGKILL)
    while (error := executor.submit((prompt,)).exception(30)) is None:
        pass
    assert re.match(rf"rank {rank} \(process \d+\) was killed by SIGKILL", str(error))
    executor.close()
    wait_until_gone(pids(executor))


def test_an_invalid_message_fails_all_pending_steps(tmp_path: Path) -> None:
    nonsense = "rank {} failed {}: it sent an invalid message: Expected `int`, got `str`"
    with started(tmp_path, 2, "0 babbles in 1") as executor:
        assert steps_of(executor.submit((batch(0),))) == [0]
        with pytest.raises(EngineError, match=nonsense.format(0, "after step 2")):
            executor.submit((batch(1),)).result(10)
    with pytest.raises(EngineError, match=nonsense.format(1, "while loading")):
        ProcessExecutor(EngineConfig(model="none", tokenizer=str(tmp_path)), load_and_babble, 2)


def test_a_step_that_is_too_large_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(tmp_path, 2) as executor:
        with monkeypatch.context() as patched:
            patched.setattr(step_ring, "ENTRY_BYTES", 1000)
            with pytest.raises(EngineError, match=r"step 1 takes \d+ bytes; at most 992 fit"):
                executor.submit((batch(0, tokens=300),)).result(0)
        assert steps_of(executor.submit((batch(0),))) == [0]


def test_a_paused_machine_has_no_stuck_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(processes, "time", clock)
    with started(tmp_path, 2, "0 works in 0", stall_timeout=300.0) as executor:
        pending = executor.submit((batch(0),))
        for pause in (0.0, 1000.0, 1000.0):  # more than ranks may do nothing
            clock.paused += pause
            with pytest.raises(TimeoutError):
                pending.result(0.01)
        (tmp_path / "worked").touch()
        assert steps_of(pending) == [0]


def test_a_rank_that_does_nothing_by_the_same_clock_is_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(processes, "time", clock)
    with started(tmp_path, 2, "0 works in 0", stall_timeout=300.0) as executor:
        pending = executor.submit((batch(0),))
        stuck: BaseException | None = None
        while stuck is None and clock.paused < 3000.0:
            clock.paused += 300.0 * processes.STUCK_FRACTION / processes.PROGRESS_CHECKS
            with suppress(TimeoutError):
                stuck = pending.exception(0.01)
        assert re.match(r"rank 0 \(process \d+\) is stuck in step 1: ", str(stuck))


CONTROLLER = """
import sys
from support.mock_ranks import load
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.core import start_executor
from weft.serving.executor.ranks import ProcessExecutor
executor = ProcessExecutor(EngineConfig(model="none"), load, 2)
print(*executor._nodes[0].pids, flush=True)
sys.stdin.read()
"""


def test_ranks_end_with_their_controller_however_it_ends() -> None:
    controller = subprocess.Popen(
        [sys.executable, "-P", "-c", CONTROLLER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert controller.stdout is not None
    ranks = [int(pid) for pid in controller.stdout.readline().split()]
    assert len(ranks) == 2
    controller.send_signal(signal.SIGKILL)
    controller.communicate()
    wait_until_gone(ranks)


@given(
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40),
    st.integers(0, 2**63),
    st.dictionaries(st.integers(0, 999), st.floats(-100, 100), max_size=4),
)
def test_steps_are_decoded_as_they_were(
    tokens: list[int], seed: int, bias: dict[int, float]
) -> None:
    ids = np.array(tokens, np.int32)
    sampling = SlotSampling(
        slot=3,
        seed=seed,
        logit_bias=bias,
        prompt_token_ids=tuple(tokens),
        end_token_ids=(1, 2),
    )
    sent = replace(batch(5), token_ids=ids, new_slots=(sampling,))
    got = decode_step(encode_step((sent,)), 0)
    assert got.token_ids.dtype == np.int32
    assert got.token_ids.tolist() == tokens
    assert got.token_ids.flags.writeable
    assert got.block_table.shape == (1, 4)
    (told,) = got.new_slots
    assert (told.slot, told.seed, told.logit_bias) == (3, seed, bias)
    assert list(told.prompt_token_ids) == tokens
    assert told.end_token_ids == (1, 2)
    with pytest.raises(ValueError, match="must be of int32"):
        decode_step(encode_step((replace(sent, slot=np.arange(3)),)), 0)
