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
from collections.abc import Callable, Sequence
from zlib import crc32

from weft.errors import ConfigError
from weft.models.plan.arrivals import Arrival
from weft.serving.engine.simulator.virtual_engine import VirtualEngine

BOUND = 1.25

Choose = Callable[[Arrival, int], VirtualEngine]
"""Chooses an engine for a request, given the number of live requests on all engines."""


def router(policy: str, engines: Sequence[VirtualEngine], seed: int) -> Choose:
    """Return the function for a policy.

    Args:
        policy: see the module's text.
        engines: at least one; each is at its own place in the sequence.
        seed: for random choices.

    Raises:
        ConfigError: there is no such policy.
    """
    rng = random.Random(seed)
    latest = [0] * len(engines)  # number of requests before the engine's newest one

    def by_chance(asked: Arrival, live: int) -> VirtualEngine:
        return rng.choice(engines)

    def least_loaded(asked: Arrival, live: int) -> VirtualEngine:
        chosen = min(engines, key=lambda engine: (engine.live, latest[engine.number]))
        latest[chosen.number] = max(latest) + 1
        return chosen

    def by_prefix(asked: Arrival, live: int) -> VirtualEngine:
        if not asked.prefix:
            return least_loaded(asked, live)
        bound = math.ceil(BOUND * (live + 1) / len(engines))
        home = crc32(str(asked.group).encode()) % len(engines)
        order = (engines[(home + i) % len(engines)] for i in range(len(engines)))
        return next(engine for engine in order if engine.live < bound)

    policies = {"random": by_chance, "least-loaded": least_loaded, "prefix": by_prefix}
    if policy not in policies:
        raise ConfigError(f"routing is {policy!r}; it must be one of {', '.join(policies)}")
    return policies[policy]
