"""Time in which a machine was paused."""

from __future__ import annotations

import time


class Clock:
    """Stands in for the module `time` in another one.

    Attributes:
        paused: seconds that have passed while nothing ran.
    """

    sleep = staticmethod(time.sleep)

    def __init__(self) -> None:
        self.paused = 0.0

    def monotonic(self) -> float:
        """As time.monotonic."""
        return time.monotonic() + self.paused
