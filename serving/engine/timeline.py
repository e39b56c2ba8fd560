"""When each request waited and when it ran, for whoever looks at the engine (api/engine.py).

    queued ──► prefill ──► decode ──► ended
      ▲           │          │
      └───────────┴──────────┘  preempted

A handful of numbers for each request, written when it changes its phase: looking costs those who
look. Nothing here says what a request is about.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Literal

import msgspec

Phase = Literal["queued", "prefill", "decode"]

MAX_LIVE = 128  # that are shown at once, the oldest
MAX_ENDED = 256  # that are remembered, the latest


class Timeline(msgspec.Struct):
    """One request. Times are of time.monotonic().

    Attributes:
        id: unique in a server's life.
        prompt_tokens, output_tokens: how many; of the output, so far.
        phases: each with the time at which it began; the last one lasts.
        ended: when it ended; None before.
    """

    id: str
    prompt_tokens: int
    phases: list[tuple[Phase, float]]
    output_tokens: int = 0
    ended: float | None = None

    def moved(self, running: bool, at: float) -> None:
        """It has been taken into the batch, or preempted from it."""
        self.phases.append(("prefill" if running else "queued", at))

    def got(self, tokens: int) -> None:
        """So many tokens have been sampled for it."""
        self.output_tokens += tokens
        # A preempted request may still get the token of a step that was under way.
        if tokens and self.phases[-1][0] == "prefill":
            self.phases.append(("decode", time.monotonic()))

    def end(self) -> None:
        """Nothing more is computed for it; once is enough."""
        if self.ended is None:
            self.ended = time.monotonic()


class Timelines:
    """Those of all live requests, and of the last that ended."""

    def __init__(self) -> None:
        self._live: dict[str, Timeline] = {}
        self._past: deque[tuple[float, Timeline]] = deque(maxlen=MAX_ENDED)

    def begin(self, request_id: str, prompt_tokens: int) -> Timeline:
        """A request has come."""
        timeline = Timeline(request_id, prompt_tokens, [("queued", time.monotonic())])
        self._live[request_id] = timeline
        return timeline

    def close(self, request_id: str) -> None:
        """Nobody waits for it any more."""
        timeline = self._live.pop(request_id)
        timeline.end()
        self._past.append((time.monotonic(), timeline))

    def since(self, moment: float) -> list[Timeline]:
        """Those closed after a moment of time.monotonic(), then the live ones, oldest first."""
        return [*self._closed_after(moment), *islice(self._live.values(), MAX_LIVE)]

    def _closed_after(self, moment: float) -> Iterator[Timeline]:
        return (timeline for closed, timeline in self._past if closed > moment)
