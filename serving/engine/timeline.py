"""Records when each request waited and when it ran, for the engine view of the admin API.

    queued ──► prefill ──► decode ──► ended
      ▲           │          │
      └───────────┴──────────┘  preempted

A request's record is a handful of numbers, written when the request changes its phase. So only
readers of the view pay for it. Records contain no text of a request.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Literal

import msgspec

Phase = Literal["queued", "prefill", "decode"]

MAX_LIVE = 128  # live requests that are shown at once, the oldest
MAX_ENDED = 256  # ended requests that are remembered, the latest


class Timeline(msgspec.Struct):
    """Phases of one request. Times are time.monotonic().

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
        """Record that the request was admitted or preempted."""
        self.phases.append(("prefill" if running else "queued", at))

    def got(self, tokens: int) -> None:
        """Record that tokens were sampled for the request."""
        self.output_tokens += tokens
        # A preempted request may still get the token of a step that was in flight.
        if tokens and self.phases[-1][0] == "prefill":
            self.phases.append(("decode", time.monotonic()))

    def end(self) -> None:
        """Record that nothing more is computed for the request; may be called again."""
        if self.ended is None:
            self.ended = time.monotonic()


class Timelines:
    """Timelines of all live requests, and of the latest that ended."""

    def __init__(self) -> None:
        self._live: dict[str, Timeline] = {}
        self._past: deque[tuple[float, Timeline]] = deque(maxlen=MAX_ENDED)

    def begin(self, request_id: str, prompt_tokens: int) -> Timeline:
        """Start the timeline of a new request."""
        timeline = Timeline(request_id, prompt_tokens, [("queued", time.monotonic())])
        self._live[request_id] = timeline
        return timeline

    def close(self, request_id: str) -> None:
        """End the timeline of a request that nobody waits for any more."""
        timeline = self._live.pop(request_id)
        timeline.end()
        self._past.append((time.monotonic(), timeline))

    def since(self, moment: float) -> list[Timeline]:
        """Return timelines closed after a time.monotonic(), then the live ones, oldest first."""
        return [*self._closed_after(moment), *islice(self._live.values(), MAX_LIVE)]

    def _closed_after(self, moment: float) -> Iterator[Timeline]:
        return (timeline for closed, timeline in self._past if closed > moment)
