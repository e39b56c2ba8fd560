"""Estimates from the rate of finished requests when a rejected client should try again."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

_LAST = 64  # number of ends to remember


class FinishRate:
    """Measures how fast requests finish while there are any.

    Rejected clients get different times, spaced at this rate. So they return as room appears, and
    not all at once.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=_LAST)  # the first may be the time when work began
        self._live = 0
        self._promised = 0.0  # the last rejected client's time

    def began(self) -> None:
        """Count a new request."""
        if self._live == 0:  # idle time must not count
            self._ends.clear()
            self._ends.append(self._clock())
        self._live += 1

    def ended(self) -> None:
        """Count an ended request, whatever the reason."""
        self._live -= 1
        self._ends.append(self._clock())

    def retry_after(self) -> int:
        """Return seconds, at least 1 and at most the time until all present requests finish.

        If none has finished yet, assume all of them need as long again as they have run.
        """
        now = self._clock()
        ended = len(self._ends) - 1 or self._live  # if none has, assume all
        each = (now - self._ends[0]) / max(1, ended) if self._ends else 0.0
        self._promised = min(max(self._promised, now) + each, now + each * max(1, self._live))
        return max(1, math.ceil(self._promised - now))
