"""How fast requests finish, and so when a client that was turned away should come again."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

_LAST = 64  # requests whose ends are looked at


class FinishRate:
    """The rate at which requests finish while there are any.

    Each client that is turned away is told of a time of its own, one after the other at that rate:
    they come back as places come free, and not all at once.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=_LAST)  # the first may be when the work began
        self._live = 0
        self._promised = 0.0  # when the client that was turned away last is to come

    def began(self) -> None:
        """A request begins."""
        if self._live == 0:  # time without work says nothing
            self._ends.clear()
            self._ends.append(self._clock())
        self._live += 1

    def ended(self) -> None:
        """A request has ended, in whatever way."""
        self._live -= 1
        self._ends.append(self._clock())

    def retry_after(self) -> int:
        """Seconds, at least 1, and no more than it takes all that are here to finish.

        Before any has finished, all are taken to be so after as long again as they have run.
        """
        now = self._clock()
        ended = len(self._ends) - 1 or self._live  # none yet: all that are here, after as long
        each = (now - self._ends[0]) / max(1, ended) if self._ends else 0.0
        self._promised = min(max(self._promised, now) + each, now + each * max(1, self._live))
        return max(1, math.ceil(self._promised - now))
