"""A scheduler for each copy of attention, seen as one.

Where experts are dealt out to more ranks than attention is split over, there are several
copies of attention (models/spec/layout.py). Each has requests, slots and a KV cache of its own, and
all of them run their part of a step at one time.

A request goes to the copy that has the fewest. Among those it goes to the one whose prefix
cache has most of its prompt, then to the one that has been given the fewest tokens of prompts
so far. It stays there: keys and values do not move.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from weft.models.interface import Result, Step
from weft.serving.engine.grammar.matcher import GrammarMatcher
from weft.serving.engine.protocol import Add, EngineStats, Move, TokenOutput
from weft.serving.engine.scheduler.scheduler import Scheduler


class DpAttentionScheduler:
    """Requests in, steps out; results of steps in, tokens out. Runs in one thread.

    Args:
        schedulers: of each copy, at least one; nothing else may use them.
    """

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self._schedulers = schedulers
        self._given = [0] * len(schedulers)  # tokens of prompts
        self._steps = 0
        self._seconds = 0.0

    def add(self, add: Add, matcher: GrammarMatcher | None = None) -> None:
        """Queue a request; see `Scheduler.add`."""
        copy = self._choose(add) if len(self._schedulers) > 1 else 0
        self._schedulers[copy].add(add, matcher)
        self._given[copy] += len(add.prompt)

    def _choose(self, add: Add) -> int:
        """The copy for a request."""
        schedulers = self._schedulers
        for copy, scheduler in enumerate(schedulers):
            if scheduler.has(add.request_id):
                return copy  # which refuses it
        fewest = min(scheduler.count for scheduler in schedulers)
        idle = [copy for copy, s in enumerate(schedulers) if s.count == fewest]
        if len(idle) == 1:
            return idle[0]
        return min(idle, key=lambda i: (-schedulers[i].cached_tokens(add), self._given[i]))

    def abort(self, request_ids: Iterable[str]) -> list[TokenOutput]:
        """End these requests; unknown ones are ignored."""
        ids = tuple(request_ids)
        return [output for s in self._schedulers for output in s.abort(ids)]

    @property
    def count(self) -> int:
        """How many have not ended."""
        return sum(scheduler.count for scheduler in self._schedulers)

    @property
    def live(self) -> tuple[str, ...]:
        """Requests that have not ended."""
        return tuple(name for s in self._schedulers for name in s.live)

    def take_moves(self) -> list[Move]:
        """Which requests were admitted or preempted since the last call."""
        return [move for s in self._schedulers for move in s.take_moves()]

    def schedule(self) -> Step | None:
        """The next step, or None when there is nothing to compute now."""
        step = tuple(scheduler.schedule() for scheduler in self._schedulers)
        return None if all(batch is None for batch in step) else step

    def finish(self, result: Result) -> list[TokenOutput]:
        """Take in the result of the oldest step under way; new tokens and ends of requests."""
        outputs: list[TokenOutput] = []
        self._steps += 1
        self._seconds += max(output.seconds for output in result if output is not None)
        for scheduler, output in zip(self._schedulers, result, strict=True):
            if output is not None:
                outputs += scheduler.finish(output)
        return outputs

    def stats(self) -> EngineStats:
        """How things stand, in all of them."""
        if len(self._schedulers) == 1:
            return self._schedulers[0].stats()
        parts = [scheduler.stats() for scheduler in self._schedulers]
        total = sum(parts, EngineStats())
        return replace(total, steps=self._steps, step_seconds=self._seconds)
