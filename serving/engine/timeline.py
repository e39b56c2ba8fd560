"""Records when each request waited and when it ran, for the admin API's engine view.

    queued ──► prefill ──► decode ──► ended
      ▲           │          │
      └───────────┴──────────┘  preempted

A timeline is a handful of numbers, written when the request changes its phase, so recording costs
almost nothing. It contains no text from a request.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Literal

import msgspec

Phase = Literal["queued", "prefill", "decode"]

MAX_LIVE = 128  # live requests shown at once, the oldest
MAX_ENDED = 256  # ended requests to remember, the latest


class Timeline(msgspec.Struct):
    """One request's phases. Times are time.monotonic().

    Attributes:
        id: unique during a server's life.
        prompt_tokens, output_tokens: number of tokens; the output's so far.
        phases: each phase with the time at which it began; the last one is the current one.
        ended: time of the end; None before.
    """

    id: str
    prompt_tokens: int
    phases: list[tuple[Phase, float]]
    output_tokens: int = 0
    ended: float | None = None

    def moved(self, running: bool, at: float) -> None:
        """Record an admission or a preemption."""
        self.phases.append(("prefill" if running else "queued", at))

    def got(self, tokens: int) -> None:
        """Record sampled tokens."""
        self.output_tokens += tokens
        # A preempted request may still get a token from a step in flight.
        if tokens and self.phases[-1][0] == "prefill":
            self.phases.append(("decode", time.monotonic()))

    def end(self) -> None:
        """Record the request's end; further calls change nothing."""
        if self.ended is None:
            self.ended = time.monotonic()


class Timelines:
    """Timelines for all live requests and the latest ended ones."""

    def __init__(self) -> None:
        self._live: dict[str, Timeline] = {}
        self._past: deque[tuple[float, Timeline]] = deque(maxlen=MAX_ENDED)

    def begin(self, request_id: str, prompt_tokens: int) -> Timeline:
        """Start a new request's timeline."""
        timeline = Timeline(request_id, prompt_tokens, [("queued", time.monotonic())])
        self._live[request_id] = timeline
        return timeline

    def close(self, request_id: str) -> None:
        """End a request's timeline when nobody waits for it any more."""
        timeline = self._live.pop(request_id)
        timeline.end()
        self._past.append((time.monotonic(), timeline))

    def since(self, moment: float) -> list[Timeline]:
        """Return timelines closed after a time.monotonic(), then the live ones, oldest first."""
        return [*self._closed_after(moment), *islice(self._live.values(), MAX_LIVE)]

    def _closed_after(self, moment: float) -> Iterator[Timeline]:
        return (timeline for closed, timeline in self._past if closed > moment)
