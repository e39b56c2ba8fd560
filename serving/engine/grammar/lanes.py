"""Lanes for grammars that wait for compilation: short ones do not wait for long ones.

Nobody knows in advance how long a grammar takes. Each grammar therefore begins in the first lane,
with little processor time. If it needs more, it starts over in the next lane. Each lane compiles
one grammar at a time, and its grammars' owners take turns.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import msgspec

from weft.errors import EngineError
from weft.serving.engine.protocol import Compiled
from weft.serving.engine.sampling_params import Grammar

PLACE = "{field}"
"""Placeholder for the request's field in cached errors."""


class Job:
    """A grammar with waiting requests.

    Args:
        key: names the grammar.
        grammar: the grammar.
        owner: the first request's API key; "" without keys.

    Attributes:
        lane: its lane's number.
        number: names the current attempt.
        waiting: number of waiting callers.
        deaths: number of processes that died while compiling it.
        done: the result; a text is the reason for a rejection, with PLACE as the field.
    """

    def __init__(self, key: bytes, grammar: Grammar, owner: str) -> None:
        self.key = key
        self.grammar = msgspec.structs.replace(grammar, param=PLACE)
        self.owner = owner
        self.lane = 0
        self.number = 0
        self.waiting = 0
        self.deaths = 0
        self.done: asyncio.Future[Compiled | str | EngineError] = asyncio.Future()


class Lane:
    """Grammars with the same limit.

    Args:
        seconds: processor time for a grammar in this lane.

    Attributes:
        job: the grammar that is being compiled.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.job: Job | None = None
        self._waiting: OrderedDict[str, dict[bytes, Job]] = OrderedDict()  # by owner, in turn

    def put(self, job: Job) -> None:
        """Add a job behind its owner's others."""
        self._waiting.setdefault(job.owner, {})[job.key] = job

    def take(self) -> Job | None:
        """Return the next job if the lane is free and has one; it is then being compiled."""
        if self.job is not None or not self._waiting:
            return None
        owner, jobs = self._waiting.popitem(last=False)
        self.job = jobs.pop(next(iter(jobs)))
        if jobs:
            self._waiting[owner] = jobs  # behind the other owners
        return self.job

    def discard(self, job: Job) -> None:
        """Remove a waiting job."""
        jobs = self._waiting[job.owner]
        del jobs[job.key]
        if not jobs:
            del self._waiting[job.owner]
