"""An engine core without a model: the real scheduler, on a virtual clock.

It follows the loop in core.py: up to `DEPTH` steps are in flight, the device runs one at a time,
and the core reads new requests when a step has finished, or at once if none is in flight. The
scheduler and its caller take no time: the predicted seconds of a step must include the host's work.

Not simulated: data-parallel attention, pipeline stages, grammars, and steps longer than the core's
heartbeat, during which the real core may read new requests earlier.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, count, islice, repeat
from struct import pack
from typing import NamedTuple

import numpy as np

from weft.models.interface import StepInput, StepOutput
from weft.models.plan.arrivals import Arrival
from weft.models.plan.batch import Batch
from weft.serving.engine.core import DEPTH
from weft.serving.engine.prefix_keys import TOKEN_BYTES, Prompt
from weft.serving.engine.protocol import Add
from weft.serving.engine.sampling_params import SamplingParams
from weft.serving.engine.scheduler.scheduler import Scheduler
from weft.serving.engine.scheduler.steady_run import advance, steady_steps
from weft.serving.engine.simulator.histogram import Histogram

MOST_AHEAD = 256
"""Maximum number of steady steps that pass at once."""

StepSeconds = Callable[[Batch], float]


@dataclass(slots=True)
class Served:
    """A request's times, in seconds on the virtual clock.

    Attributes:
        asked: the request.
        engine: number of the engine that served it.
        arrival: time of its arrival; in a closed loop, the user's previous answer ended then.
        first: time of the first token.
        last: time of the newest token; the end of the answer, once it has ended.
        tokens: number of tokens in the answer so far.
        cached: number of prompt tokens that the prefix cache served.
    """

    asked: Arrival
    engine: int
    arrival: float
    first: float = math.inf
    last: float = math.inf
    tokens: int = 0
    cached: int = 0

    @property
    def ttft(self) -> float:
        """Seconds from the arrival to the first token."""
        return self.first - self.arrival


class _Step(NamedTuple):
    batch: StepInput
    begin: float
    end: float


class VirtualEngine:
    """One engine; its caller calls `turn` at the time `next_turn`.

    Args:
        number: the engine's number.
        scheduler: nothing else may use it.
        step_seconds: predicted seconds for a step, above 0.
        prefix_caching: whether the scheduler shares blocks between prompts.
        leap: let steady decode steps pass at once; the results are the same.

    Attributes:
        next_turn: time of the next call to `turn`; infinite while there is no work.
        busy: seconds during which finished steps ran.
        steps: number of finished steps.
        gaps: times between the tokens of an answer.
    """

    def __init__(
        self,
        number: int,
        scheduler: Scheduler,
        step_seconds: StepSeconds,
        prefix_caching: bool,
        *,
        leap: bool = True,
    ) -> None:
        self.number = number
        self.next_turn = math.inf
        self.busy = 0.0
        self.steps = 0
        self.gaps = Histogram()
        self._scheduler = scheduler
        self._step_seconds = step_seconds
        self._prefix_caching = prefix_caching
        self._leap = leap
        self._ids = count()
        self._inbox: list[Served] = []
        self._served: dict[str, Served] = {}  # that have not ended, by the scheduler's id
        self._flight: deque[_Step] = deque()
        self._latest_end = -math.inf  # of a finished step
        # Ends of steady steps that pass at once, and of the two in flight after them; and the same
        # steps as (seconds, how many) in order.
        self._ends: list[float] = []
        self._spans: list[tuple[float, int]] = []

    def add(self, asked: Arrival, now: float) -> None:
        """Let a request arrive now; no turn may be due before.

        Raises:
            RequestError: the request can never run.
        """
        served = Served(asked, self.number, now)
        self._inbox.append(served)
        if self._ends:  # read it after the step that runs now, as without a leap
            passed = min(bisect_left(self._ends, now), len(self._ends) - 2)
            del self._ends[passed + 2 :]
            self.next_turn = self._ends[passed]
        elif not self._flight:
            self.next_turn = now

    def turn(self) -> list[Served]:
        """Finish the step that ends now, read new requests and submit steps.

        Returns:
            The requests that have ended.

        Raises:
            RequestError: a new request can never run.
        """
        now = self.next_turn
        if self._ends:
            self._pass()
        ended = self._finish() if self._flight else []
        for served in self._inbox:
            id = next(self._ids)
            size = self._scheduler.kv.block_size if self._prefix_caching else None
            self._scheduler.add(_message(id, served.asked, size))
            self._served[str(id)] = served
        self._inbox.clear()
        while len(self._flight) < DEPTH and (batch := self._scheduler.schedule()) is not None:
            begin = self._flight[-1].end if self._flight else now
            end = begin + self._step_seconds(batch_of(batch, self._scheduler.kv.block_size))
            self._flight.append(_Step(batch, begin, end))
        self.next_turn = self._flight[0].end if self._flight else math.inf
        if self._leap and (steps := steady_steps(self._scheduler, MOST_AHEAD)) > 1:
            self._look_ahead(steps)
        return ended

    def _finish(self) -> list[Served]:
        """Finish the oldest step; returns ended requests."""
        step = self._flight.popleft()
        tokens = np.zeros(len(step.batch.sample_slot), np.int32)
        output = StepOutput(step.batch.step, tokens, tokens, seconds=step.end - step.begin)
        self.steps += 1
        self.busy += output.seconds
        ended = []
        usual, usual_gaps = self._latest_end, 0
        for token in self._scheduler.finish(output):
            served = self._served[token.request_id]
            if served.last == usual:
                usual_gaps += 1
            elif served.tokens:
                self.gaps.add(step.end - served.last)
            else:
                served.first = step.end
                served.cached = token.cached_tokens
            served.tokens += 1
            served.last = step.end
            if token.finish_reason is not None:
                ended.append(self._served.pop(token.request_id))
        if usual_gaps:
            self.gaps.add(step.end - usual, usual_gaps)
        self._latest_end = step.end
        return ended

    def _look_ahead(self, steps: int) -> None:
        """Predict the ends of steady steps; the next turn is after them."""
        context_len = self._flight[1].batch.context_len
        decodes, context = len(context_len), int(context_len.sum())
        size = self._scheduler.kv.block_size
        end = self._flight[1].end
        self._ends = [self._flight[0].end, end]
        self._spans = [(end - self._ends[0], 1)]
        while len(self._ends) < steps + 2:
            context += decodes
            blocks = -(-context // (decodes * size))
            equal = (blocks * size * decodes - context) // decodes + 1  # mean context in one block
            equal = min(equal, steps + 2 - len(self._ends))
            seconds = self._step_seconds(Batch(decodes, blocks * size))
            self._ends += islice(
                accumulate(repeat(seconds, equal), initial=self._ends[-1]), 1, None
            )
            self._spans.append((seconds, equal))
            context += (equal - 1) * decodes
        self.next_turn = self._ends[steps]

    def _pass(self) -> None:
        """Let the steady steps pass."""
        ends, self._ends = self._ends, []
        steps = len(ends) - 2
        if steps == 0:
            return
        names = advance(self._scheduler, steps)
        self.steps += steps
        self.busy += ends[steps - 1] - self._flight[0].begin
        for name in names:
            served = self._served[name]
            self.gaps.add(ends[0] - served.last)
            served.tokens += steps
            served.last = ends[steps - 1]
        left = steps - 1  # the first step's gap is counted above
        for seconds, times in self._spans:
            times = min(times, left)
            if times:
                self.gaps.add(seconds, times * len(names))
            left -= times
        self._latest_end = ends[steps - 1]
        self._flight.clear()
        for begin, end in ((ends[-3], ends[-2]), (ends[-2], ends[-1])):
            batch = self._scheduler.schedule()
            assert batch is not None, "a steady run goes on"
            self._flight.append(_Step(batch, begin, end))


def batch_of(step: StepInput, block_size: int) -> Batch:
    """Return the work in a step; a prompt with a single token left counts as a decode.

    Args:
        step: a step with tokens.
        block_size: number of tokens in a block; the mean context of decodes is rounded up to one.
    """
    counts = np.diff(step.query_start)
    many = counts > 1
    decodes = len(counts) - int(many.sum())
    context = int(step.context_len[~many].sum())
    decode_context = -(-context // (decodes * block_size)) * block_size if decodes else 0
    if decodes == len(counts):
        return Batch(decodes, decode_context)
    tokens = counts[many].astype(np.int64)
    # A chunk's tokens attend to context_len - tokens + 1, ..., context_len tokens.
    attended = int((tokens * (2 * step.context_len[many] - tokens + 1)).sum()) / 2
    total = int(tokens.sum())
    return Batch(decodes, decode_context, len(tokens), total, attended / total)


def _message(id: int, asked: Arrival, block_size: int | None) -> Add:
    """Return the message for a request.

    Its tokens mean nothing. Block keys name the group in the shared prefix, and the request after
    it, so that the prefix cache finds the former only.

    Args:
        id: number of requests before.
        asked: the request.
        block_size: number of tokens in a block; None without a prefix cache.
    """
    # The last token differs, so that answers never share blocks.
    tokens = bytes(TOKEN_BYTES * (asked.prompt - 1)) + pack("i", id % 2**31)
    keys = b""
    if block_size is not None:
        blocks = asked.prompt // block_size
        names = np.empty((blocks, 2), np.int64)
        names[:, 0] = id
        names[: asked.prefix // block_size, 0] = -1 - asked.group
        names[:, 1] = np.arange(blocks)
        keys = names.tobytes()
    return Add(
        request_id=str(id),
        prompt=Prompt(tokens, keys, root=pack("qq", id, -1)),
        params=SamplingParams(seed=0, max_tokens=asked.answer),
        end_token_ids=(),
    )
