"""Data-parallel attention: one scheduler for each attention group, used like a single one.

If experts are spread over more ranks than attention is split over, the attention weights exist
several times (models/spec/layout.py). Each attention group has its own requests, slots and KV
cache, and all instances run a step at the same time.

A new request goes to an instance with the fewest requests. Among several, the longest cached
prefix decides, then the smallest number of prompt tokens received so far. The request stays there,
because keys and values do not move.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from weft.models.interface import Result, Step
from weft.serving.engine.grammar.matcher import Matcher
from weft.serving.engine.protocol import Add, EngineStats, Move, TokenOutput
from weft.serving.engine.scheduler.scheduler import Scheduler


class DpAttentionScheduler:
    """Takes requests and returns steps; takes results and returns outputs. Runs in one thread.

    Args:
        schedulers: one for each attention group; nothing else may use them.
    """

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self._schedulers = schedulers
        self._prompt_tokens = [0] * len(schedulers)  # received so far
        self._steps = 0
        self._seconds = 0.0

    def add(self, add: Add, matcher: Matcher | None = None) -> None:
        """Queue a request; see `Scheduler.add`."""
        instance = self._choose(add) if len(self._schedulers) > 1 else 0
        self._schedulers[instance].add(add, matcher)
        self._prompt_tokens[instance] += len(add.prompt)

    def _choose(self, add: Add) -> int:
        """Return the attention group's index for a request."""
        schedulers = self._schedulers
        for i, scheduler in enumerate(schedulers):
            if scheduler.has(add.request_id):
                return i  # this scheduler rejects it
        fewest = min(scheduler.count for scheduler in schedulers)
        idle = [i for i, scheduler in enumerate(schedulers) if scheduler.count == fewest]
        if len(idle) == 1:
            return idle[0]
        return min(idle, key=lambda i: (-schedulers[i].cached_tokens(add), self._prompt_tokens[i]))

    def abort(self, request_ids: Iterable[str]) -> list[TokenOutput]:
        """End these requests; unknown ones are ignored."""
        ids = tuple(request_ids)
        return [output for s in self._schedulers for output in s.abort(ids)]

    @property
    def count(self) -> int:
        """Number of live requests."""
        return sum(scheduler.count for scheduler in self._schedulers)

    @property
    def live(self) -> tuple[str, ...]:
        """Ids of the live requests."""
        return tuple(name for s in self._schedulers for name in s.live)

    def take_moves(self) -> list[Move]:
        """Return which requests were admitted or preempted since the last call."""
        return [move for s in self._schedulers for move in s.take_moves()]

    def schedule(self) -> Step | None:
        """Return the next step, or None when there is nothing to compute now."""
        step = tuple(scheduler.schedule() for scheduler in self._schedulers)
        return None if all(batch is None for batch in step) else step

    def finish(self, result: Result) -> list[TokenOutput]:
        """Take the result of the oldest step in flight; returns new tokens and ended requests."""
        outputs: list[TokenOutput] = []
        self._steps += 1
        self._seconds += max(output.seconds for output in result if output is not None)
        for scheduler, output in zip(self._schedulers, result, strict=True):
            if output is not None:
                outputs += scheduler.finish(output)
        return outputs

    def stats(self) -> EngineStats:
        """Return a snapshot of all instances together."""
        if len(self._schedulers) == 1:
            return self._schedulers[0].stats()
        parts = [scheduler.stats() for scheduler in self._schedulers]
        total = sum(parts, EngineStats())
        return replace(total, steps=self._steps, step_seconds=self._seconds)
