"""The in-process executor: one thread, steps in order, and failures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

import numpy as np
import pytest

from weft.models.interface import Result, StepInput, StepOutput
from weft.serving.executor.in_process import InProcessExecutor
from weft.serving.executor.loading import LoadedModel, ModelInfo

EMPTY = np.empty(0, np.int32)


class Runner:
    """Runner that notes its calls; each step waits for `go`."""

    bytes_per_block = 1

    def __init__(self) -> None:
        self.go = threading.Event()
        self.began = threading.Event()
        self.loaded_in = threading.current_thread()
        self.calls: list[tuple[int, threading.Thread]] = []
        self.closed = False

    def allocate_kv_cache(self, num_blocks: int) -> None: ...

    def warm_up(self) -> None: ...

    def step(self, batch: StepInput) -> StepOutput:
        self.began.set()
        self.go.wait(60)
        self.calls.append((batch.step, threading.current_thread()))
        if batch.step == 3:
            raise ValueError("step 3")
        return StepOutput(batch.step, EMPTY, EMPTY)

    def close(self) -> None:
        self.closed = True


class DispatchingRunner(Runner):
    """Dispatching runner; each step waits for `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.dispatched = threading.Semaphore(0)

    def dispatch(self, batch: StepInput) -> Callable[[], StepOutput]:
        self.dispatched.release()
        return lambda: self.step(batch)


def batch(step: int) -> StepInput:
    fields = dict.fromkeys(
        ["token_ids", "positions", "query_start", "context_len", "block_table", "slot"], EMPTY
    )
    return StepInput(step, **fields, sample_index=EMPTY, sample_slot=EMPTY, output_index=EMPTY)


def start(kind: type[Runner] = Runner) -> tuple[InProcessExecutor, Runner]:
    runners: list[Runner] = []

    def load() -> LoadedModel:
        runners.append(kind())
        return LoadedModel(runners[0], ModelInfo(1, 16, 1, 1, "none", 1))

    return InProcessExecutor(load), runners[0]


def test_steps_run_in_order_in_the_thread_that_loaded_the_model() -> None:
    executor, runner = start()
    steps = [executor.submit((batch(i),)) for i in range(3)]
    assert not any(step.done() for step in steps), "submit does not wait"
    runner.go.set()
    assert [step.result(60)[0].step for step in steps] == [0, 1, 2]
    assert runner.calls == [(i, runner.loaded_in) for i in range(3)]
    assert runner.loaded_in is not threading.current_thread()
    executor.close()
    assert runner.closed


def test_steps_begin_before_the_first_is_read_where_devices_work_on_their_own() -> None:
    executor, runner = start(DispatchingRunner)
    assert isinstance(runner, DispatchingRunner)
    steps = [executor.submit((batch(i),)) for i in range(3)]
    for _ in steps:
        assert runner.dispatched.acquire(timeout=60)
    assert not any(step.done() for step in steps)
    runner.go.set()
    assert [step.result(60)[0].step for step in steps] == [0, 1, 2]
    executor.close()


@pytest.mark.parametrize("kind", [Runner, DispatchingRunner])
def test_what_the_runner_raises_is_in_the_future(kind: type[Runner]) -> None:
    executor, runner = start(kind)
    runner.go.set()
    with pytest.raises(ValueError, match="step 3"):
        executor.submit((batch(3),)).result(60)
    assert executor.submit((batch(4),)).result(60)[0].step == 4
    executor.close()


@pytest.mark.parametrize("kind", [Runner, DispatchingRunner])
def test_close_drops_what_has_not_begun(kind: type[Runner]) -> None:
    executor, runner = start(kind)
    steps: list[Future[Result]] = [executor.submit((batch(i),)) for i in range(2)]
    assert runner.began.wait(60)
    threading.Timer(0.05, runner.go.set).start()
    executor.close()
    assert steps[0].result(0)[0].step == 0
    with pytest.raises(CancelledError):
        steps[1].result(0)


def test_what_loading_raises_is_raised() -> None:
    def load() -> LoadedModel:
        raise ValueError("no weights")

    with pytest.raises(ValueError, match="no weights"):
        InProcessExecutor(load)
