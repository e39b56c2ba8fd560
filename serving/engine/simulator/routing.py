"""Policies that choose an engine for each request.

    random          any engine, with equal chances
    least-loaded    an engine with the fewest requests; of equals, the least recently used
    prefix          the engine for the prompt's shared beginning, unless it has many requests

`weft serve` uses least-loaded between its own replicas (engine.py). The policy `prefix` is
consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2018): an engine with 1.25
times its share of the requests passes a new one on to the next engine. Requests without a shared
beginning go to the least loaded engine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from zlib import crc32

import numpy as np
import numpy.typing as npt

from weft.errors import ConfigError
from weft.models.plan.arrivals import Arrival

BOUND = 1.25

Loads = npt.NDArray[np.int64]
Choose = Callable[[Arrival, Loads], int]
"""Chooses an engine for a request, given each engine's number of live requests, int64[engines]."""


def router(policy: str, engines: int, seed: int) -> Choose:
    """Return the function for a policy.

    Args:
        policy: see the module's text.
        engines: number of engines, at least 1.
        seed: for random choices.

    Raises:
        ConfigError: there is no such policy.
    """
    rng = random.Random(seed)
    latest = np.zeros(engines, np.int64)  # number of choices up to the engine's newest one

    def by_chance(asked: Arrival, loads: Loads) -> int:
        return rng.randrange(engines)

    def least_loaded(asked: Arrival, loads: Loads) -> int:
        fewest = np.flatnonzero(loads == loads.min())
        chosen = int(fewest[latest[fewest].argmin()])
        latest[chosen] = latest.max() + 1
        return chosen

    def by_prefix(asked: Arrival, loads: Loads) -> int:
        if not asked.prefix:
            return least_loaded(asked, loads)
        bound = math.ceil(BOUND * (int(loads.sum()) + 1) / engines)
        home = crc32(str(asked.group).encode()) % engines
        after = int((np.roll(loads, -home) < bound).argmax())
        return (home + after) % engines

    policies = {"random": by_chance, "least-loaded": least_loaded, "prefix": by_prefix}
    if policy not in policies:
        raise ConfigError(f"routing is {policy!r}; it must be one of {', '.join(policies)}")
    return policies[policy]
