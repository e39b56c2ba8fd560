"""What it costs that ranks are processes: from a step's submission to its output, on mock runners.

One step at a time, of 128 requests that decode, in microseconds beyond those of
a runner in this process. The median of the steps of a repetition. Beside it, what it takes the
machine alone to wake so many processes by a byte each, and to hear from the first of them: below
that no executor can come.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from engine_parts.measure import Case
from engine_parts.mock import load_instant
from weft.models.interface import StepInput
from weft.serving.config.settings import EngineConfig
from weft.serving.executor.base import Executor
from weft.serving.executor.in_process import InProcessExecutor
from weft.serving.executor.ranks import ProcessExecutor

CONFIG = EngineConfig(max_model_len=4096)
REQUESTS = 128
BLOCKS = 64  # of each request
RANKS = (2, 4)
GOAL = 100.0
WOKEN = """
import socket, sys
with socket.socket(fileno=int(sys.argv[1])) as channel:
    while channel.recv(1):
        if sys.argv[2] == "answers":
            channel.send(b"\\0")
"""


@contextmanager
def cases() -> Iterator[list[Case]]:
    """See the module's text."""
    path = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{Path(__file__).parents[1]}{os.pathsep}{path}"
    with ExitStack() as stack:
        alone = InProcessExecutor(lambda: load_instant(CONFIG, lambda done, total: None))
        stack.callback(alone.close)
        made = []
        for ranks in RANKS:
            executor = ProcessExecutor(CONFIG, load_instant, ranks)
            stack.callback(executor.close)
            goal = GOAL if ranks == max(RANKS) else None
            made.append(Case(f"{ranks} ranks", "us/step", _overhead(executor, alone), at_most=goal))
            channels = [stack.enter_context(_woken(answers=rank == 0)) for rank in range(ranks)]
            name = f"{ranks} processes that are woken, and no more"
            made.append(Case(name, "us/step", partial(_us_per_wake, channels)))
        yield made


@contextmanager
def _woken(answers: bool) -> Iterator[socket.socket]:
    """A process that waits for bytes; a socket to it."""
    own, other = socket.socketpair()
    with own:
        with other:
            descriptor = other.fileno()
            what = "answers" if answers else "is silent"
            process = subprocess.Popen(
                [sys.executable, "-S", "-c", WOKEN, str(descriptor), what], pass_fds=(descriptor,)
            )
        yield own
    process.wait()


def _us_per_wake(channels: list[socket.socket], seconds: float) -> float:
    taken, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        for channel in channels:
            channel.send(b"\0")
        channels[0].recv(1)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken) * 1e6


def _overhead(executor: Executor, alone: Executor) -> Callable[[float], float]:
    return lambda seconds: _us_per_step(executor, seconds / 2) - _us_per_step(alone, seconds / 2)


def _us_per_step(executor: Executor, seconds: float) -> float:
    taken, step, end = [], 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        batch = _decodes(step)
        begin = time.perf_counter()
        executor.submit((batch,)).result()
        taken.append(time.perf_counter() - begin)
        step += 1
    return statistics.median(taken) * 1e6


def _decodes(step: int) -> StepInput:
    rows = np.arange(REQUESTS, dtype=np.int32)
    return StepInput(
        step,
        token_ids=-1 - rows,
        positions=rows,
        query_start=np.arange(REQUESTS + 1, dtype=np.int32),
        context_len=rows + 1,
        block_table=np.zeros((REQUESTS, BLOCKS), np.int32),
        slot=rows,
        sample_index=rows,
        sample_slot=rows,
        output_index=rows,
    )
