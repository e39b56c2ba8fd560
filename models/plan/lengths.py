"""A distribution of lengths in tokens.

    128         always 128
    64-256      uniform
    ~200        exponential with mean 200, at least 1 (long-tailed, like chat traffic)

Lengths of recorded requests are a distribution too: each of them is equally likely.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from weft.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens; the module's text explains the notation.

    Attributes:
        low, high: the shortest and the longest length; both are the mean of an exponential one.
        exponential: whether the distribution is exponential.
        recorded: lengths of recorded requests, in ascending order; empty for other distributions.
    """

    low: int
    high: int
    exponential: bool = False
    recorded: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str, flag: str) -> Lengths:
        """Parse "128", "64-256" or "~200"; the ConfigError for other text names `flag`."""
        if match := re.fullmatch(r"(~?)([0-9]{1,9})(?:-([0-9]{1,9}))?", text):
            tilde, low, high = match.groups()
            lengths = cls(int(low), int(high or low), bool(tilde))
            if lengths.low >= 1 and lengths.high >= lengths.low and not (tilde and high):
                return lengths
        raise ConfigError(
            f"{flag} is {text!r}; it must be a length (128), a range (64-256) "
            "or an exponential mean (~200)"
        )

    @classmethod
    def of(cls, recorded: Sequence[int]) -> Lengths:
        """Return the distribution of recorded lengths, at least one."""
        ordered = tuple(sorted(recorded))
        return cls(ordered[0], ordered[-1], recorded=ordered)

    def __str__(self) -> str:
        if self.exponential:
            return f"~{self.low}"
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"

    @property
    def mean(self) -> float:
        """Mean length."""
        if self.recorded:
            return sum(self.recorded) / len(self.recorded)
        return (self.low + self.high) / 2

    @property
    def mean_square(self) -> float:
        """Mean of the squared length."""
        if self.recorded:
            return sum(length * length for length in self.recorded) / len(self.recorded)
        if self.exponential:
            return 2.0 * self.low**2
        return self.mean**2 + ((self.high - self.low + 1) ** 2 - 1) / 12

    def quantile(self, share: float) -> float:
        """Return the length at a share of the distribution, 0 < share < 1."""
        if self.recorded:
            return self.recorded[int(share * len(self.recorded))]
        if self.exponential:
            return max(1.0, -self.low * math.log1p(-share))
        return self.low + share * (self.high - self.low)

    def draw(self, rng: random.Random) -> int:
        """Draw one length."""
        if self.recorded:
            return rng.choice(self.recorded)
        if self.exponential:
            return max(1, round(rng.expovariate(1 / self.low)))
        return rng.randint(self.low, self.high)
