"""A simulated day: engines behind a router, each with the real scheduler, on one virtual clock."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import islice

import numpy as np

from weft.errors import ConfigError
from weft.models.plan.arrivals import Arrival
from weft.models.plan.load import Latency
from weft.serving.engine.scheduler.block_manager import BlockManager
from weft.serving.engine.scheduler.scheduler import Scheduler
from weft.serving.engine.simulator.histogram import Histogram
from weft.serving.engine.simulator.routing import Choose, router
from weft.serving.engine.simulator.virtual_engine import Served, StepSeconds, VirtualEngine


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of one engine, as in `EngineConfig`.

    Attributes:
        max_num_seqs: maximum number of running requests.
        max_num_batched_tokens: maximum number of tokens in a step.
        max_model_len: maximum number of tokens in a request.
        num_blocks: number of blocks in the KV cache.
        block_size: number of tokens in a block.
        prefix_caching: share blocks between prompts that start alike. If none do, and none is
            preempted, the simulation is faster without and has the same result.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int = 16
    prefix_caching: bool = True


@dataclass(frozen=True, slots=True)
class Simulated:
    """The result of a simulation.

    Attributes:
        requests: all requests, by the ends of their answers.
        gaps: times between the tokens of an answer.
        seconds: virtual time from 0 to the last end.
        busy: share of this time in which an engine runs a step, mean over all engines.
        steps: number of steps, on all engines.
    """

    requests: list[Served]
    gaps: Histogram
    seconds: float
    busy: float
    steps: int

    @property
    def tokens(self) -> int:
        """Number of tokens in all answers."""
        return sum(request.tokens for request in self.requests)

    @property
    def cached(self) -> float:
        """Share of prompt tokens that the prefix cache served."""
        prompts = sum(request.asked.prompt for request in self.requests)
        return sum(request.cached for request in self.requests) / prompts

    @property
    def mean_live(self) -> float:
        """Mean number of requests that have arrived and have not ended."""
        return sum(request.last - request.arrival for request in self.requests) / self.seconds

    @property
    def mean_decodes(self) -> float:
        """Mean number of decodes in a step."""
        return (self.tokens - len(self.requests)) / self.steps

    @property
    def latency(self) -> Latency:
        """Percentiles over all requests and tokens."""
        first = sorted(request.ttft for request in self.requests)
        return Latency(
            ttft_p50=first[math.ceil(0.5 * len(first)) - 1],
            ttft_p99=first[math.ceil(0.99 * len(first)) - 1],
            itl_p50=self.gaps.quantile(0.5),
            itl_p99=self.gaps.quantile(0.99),
        )


def simulate(
    arrivals: Iterable[Arrival],
    limits: EngineLimits,
    step_seconds: StepSeconds,
    *,
    replicas: int = 1,
    routing: str = "least-loaded",
    users: int | None = None,
    seed: int = 0,
    leap: bool = True,
) -> Simulated:
    """Serve requests on a virtual clock, until all have ended.

    Args:
        arrivals: at least one request, by time, such as the first ones of `Load.arrivals`.
        limits: limits of each engine.
        step_seconds: predicted seconds for a step, above 0.
        replicas: number of engines.
        routing: see routing.py.
        users: in a closed loop, their number: each asks again when its answer ends, and the times
            of `arrivals` do not count.
        seed: the same seed gives the same result.
        leap: see `VirtualEngine`; only tests turn it off.

    Raises:
        ConfigError: there is no such policy, or no engine.
        RequestError: a request can never run.
    """
    if replicas < 1:
        raise ConfigError(f"replicas is {replicas}; it must be at least 1")
    step_seconds = lru_cache(maxsize=2**16)(step_seconds)
    engines = [
        VirtualEngine(number, _scheduler(limits), step_seconds, limits.prefix_caching, leap=leap)
        for number in range(replicas)
    ]
    fleet = _Fleet(engines, router(routing, replicas, seed))
    if users is None:
        for asked in arrivals:
            fleet.run_until(asked.time)
            fleet.send(asked, asked.time)
        fleet.run_until(math.inf)
    else:
        following = iter(arrivals)
        for asked in islice(following, users):
            fleet.send(asked, 0.0)
        fleet.run_until(math.inf, following)
    assert not fleet.loads.any(), "every request ends"
    gaps = Histogram()
    for engine in engines:
        gaps.merge(engine.gaps)
    seconds = fleet.ended[-1].last
    busy = sum(engine.busy for engine in engines) / seconds / replicas
    return Simulated(fleet.ended, gaps, seconds, busy, sum(engine.steps for engine in engines))


class _Fleet:
    """Engines, and the times of their next turns."""

    def __init__(self, engines: list[VirtualEngine], choose: Choose) -> None:
        self.loads = np.zeros(len(engines), np.int64)  # live requests of each engine
        self.ended: list[Served] = []
        self._engines = engines
        self._choose = choose
        self._turns: list[tuple[float, int]] = []  # a heap; engines may have other times by now

    def send(self, asked: Arrival, now: float) -> None:
        """Route a request."""
        engine = self._engines[self._choose(asked, self.loads)]
        self.loads[engine.number] += 1
        engine.add(asked, now)
        heappush(self._turns, (engine.next_turn, engine.number))

    def run_until(self, time: float, following: Iterable[Arrival] = ()) -> None:
        """Take all turns before a time; each request that ends sends the following one."""
        following = iter(following)
        while self._turns and (now := self._turns[0][0]) < time:
            free = 0
            while self._turns and self._turns[0][0] == now:
                free += self._turn(*heappop(self._turns))
            # After all turns of this time, so that the order of the engines does not matter.
            for asked in islice(following, free):
                self.send(asked, math.nextafter(now, math.inf))

    def _turn(self, now: float, number: int) -> int:
        """Take an engine's turn, if it is due now; returns the number of ended requests."""
        engine = self._engines[number]
        if engine.next_turn != now:
            return 0
        ended = engine.turn()
        if engine.next_turn < math.inf:
            heappush(self._turns, (engine.next_turn, number))
        self.loads[number] -= len(ended)
        self.ended += ended
        return len(ended)


def _scheduler(limits: EngineLimits) -> Scheduler:
    return Scheduler(
        BlockManager(
            limits.num_blocks, limits.block_size, limits.max_num_seqs, limits.max_model_len
        ),
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        prefix_caching=limits.prefix_caching,
    )
