"""Counts of times in bins that are 0.5% wide, so that a day of them takes little memory."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

BINS = 200  # in a factor of e


@dataclass(slots=True)
class Histogram:
    """Counts of times in seconds, above 0."""

    _counts: Counter[int] = field(default_factory=Counter)

    def add(self, seconds: float, times: int = 1) -> None:
        """Count a time."""
        self._counts[round(math.log(seconds) * BINS)] += times

    def merge(self, other: Histogram) -> None:
        """Add another histogram's counts."""
        self._counts.update(other._counts)

    @property
    def total(self) -> int:
        """Number of times."""
        return self._counts.total()

    def quantile(self, share: float) -> float:
        """Return a time that this share of the times does not exceed, within 0.25%; 0 if empty."""
        left = math.ceil(share * self.total)
        for index in sorted(self._counts):
            left -= self._counts[index]
            if left <= 0:
                return math.exp(index / BINS)
        return 0.0
