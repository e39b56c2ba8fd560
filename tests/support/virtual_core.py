"""The real engine core on a virtual clock: its channel and its executor say what time it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from weft.models.interface import Result, Step, StepOutput
from weft.models.plan.arrivals import Arrival
from weft.models.plan.batch import Batch
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.core import EngineCore
from weft.serving.engine.grammar.matcher import GrammarMatchers
from weft.serving.engine.protocol import Add, Outputs, Shutdown
from weft.serving.engine.scheduler.block_manager import BlockManager
from weft.serving.engine.scheduler.dp_attention import DpAttentionScheduler
from weft.serving.engine.scheduler.scheduler import Scheduler
from weft.serving.engine.simulator.fleet import EngineLimits
from weft.serving.engine.simulator.virtual_engine import _message, batch_of


class _Clock:
    now = 0.0


class _Channel:
    """Delivers each request at its time, then a shutdown."""

    def __init__(self, clock: _Clock, adds: list[tuple[float, Add]]) -> None:
        self._clock = clock
        self._adds = adds
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}

    def receive(self, timeout: float) -> list[Add | Shutdown]:
        if timeout and self._adds:
            self._clock.now = max(self._clock.now, self._adds[0][0])
        elif timeout:
            return [Shutdown(drain=True)]
        here = [add for time, add in self._adds if time <= self._clock.now]
        del self._adds[: len(here)]
        return list(here)

    def send(self, message: Outputs) -> None:
        for output in message.outputs:
            assert output.error is None
            self.first.setdefault(output.request_id, self._clock.now)
            self.last[output.request_id] = self._clock.now


class _Pending:
    def __init__(self, clock: _Clock, end: float, output: Result) -> None:
        self._clock, self._end, self._output = clock, end, output

    def exception(self, timeout: float | None = None) -> None:
        self._clock.now = max(self._clock.now, self._end)

    def result(self, timeout: float | None = None) -> Result:
        return self._output


class _Executor:
    """Runs steps one at a time; each takes the predicted seconds."""

    def __init__(self, clock: _Clock, seconds: Callable[[Batch], float], block_size: int) -> None:
        self._clock, self._seconds, self._block_size = clock, seconds, block_size
        self._free = 0.0

    def submit(self, step: Step) -> _Pending:
        (batch,) = step
        assert batch is not None
        self._free = max(self._free, self._clock.now) + self._seconds(
            batch_of(batch, self._block_size)
        )
        zeros = np.zeros(len(batch.sample_slot), np.int32)
        return _Pending(self._clock, self._free, (StepOutput(batch.step, zeros, zeros),))

    def check(self) -> None:
        return None

    def rank_seconds(self) -> tuple[float, ...]:
        return ()


def run_core(
    arrivals: Sequence[Arrival], limits: EngineLimits, seconds: Callable[[Batch], float]
) -> dict[float, tuple[float, float]]:
    """Serve requests; returns the times of the first and last token, by the time of arrival."""
    clock = _Clock()
    adds = [
        (asked.time, _message(number, asked, limits.block_size))
        for number, asked in enumerate(arrivals)
    ]
    channel = _Channel(clock, adds)
    kv = BlockManager(
        limits.num_blocks, limits.block_size, limits.max_num_seqs, limits.max_model_len
    )
    scheduler = Scheduler(
        kv,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
    )
    core = EngineCore(
        channel,  # type: ignore[arg-type]
        _Executor(clock, seconds, limits.block_size),  # type: ignore[arg-type]
        DpAttentionScheduler([scheduler]),
        GrammarMatchers(EngineConfig(model="none"), 1),
        heartbeat=math.inf,
    )
    core.run()
    return {
        asked.time: (channel.first[str(number)], channel.last[str(number)])
        for number, asked in enumerate(arrivals)
    }
