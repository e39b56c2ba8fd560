"""The best ways to serve a model under a load: latency, throughput, price, and what limits them.

choices (choices.py) ──► steady state of each (steady_state.py) ──► rows that no other beats
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from weft.errors import ConfigError
from weft.models.plan.batch import Batch
from weft.models.plan.choices import Choice, formats
from weft.models.plan.load import Latency, Load, Objective
from weft.models.plan.steady_state import Steady, largest_rate, steady_state
from weft.models.plan.times import Part

HOUR = 3600.0
NOTHING = 1e-3  # requests per second; below it, an engine cannot be said to serve
CURVE = (0.02, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.94, 0.97, 0.99)
"""Points of a load curve, as shares of the capacity."""
REMEDIES = {
    "arithmetic": "more devices for each replica",
    "memory": "more devices for each replica",
    "exchange": "fewer ranks and more replicas, or faster links",
    "launch": "fewer, larger kernels: CUDA graphs, or a larger batch",
    "host": "a larger batch: the host's work is the same for each step",
}
"""What relieves each resource of a step."""


@dataclass(frozen=True, slots=True)
class Row:
    """One choice under the load.

    Attributes:
        choice: how the model is served.
        steady: one replica's steady state; None if it cannot keep up with its part of the load.
        rate: requests per second under the load, over all replicas; 0 if they cannot keep up.
        batch: a replica's decode step under the load; if it cannot keep up, its largest.
        capacity: the largest rate of requests within the objective, over all replicas.
        tokens_per_second: tokens of answers per second at this rate.
        price: US dollars for a million tokens of answers at this rate; infinite at rate 0.
        shares: each resource's share of a step's time under the load.
    """

    choice: Choice
    steady: Steady | None
    rate: float
    batch: Batch
    capacity: float
    tokens_per_second: float
    price: float
    shares: dict[str, float]

    @property
    def limit(self) -> str:
        """The resource that takes the largest share of a step."""
        return max(self.shares, key=lambda name: self.shares[name])

    @property
    def remedy(self) -> str:
        """Way to relieve this resource."""
        choice, remedy = self.choice, REMEDIES[self.limit]
        others = [each for each in formats(choice.place) if each != "none"]
        if self.limit in ("arithmetic", "memory") and choice.quantization == "none" and others:
            remedy += f", or --quantization {' or '.join(others)}"
        return remedy

    @property
    def hourly(self) -> float:
        """US dollars for an hour of the slice."""
        return self.choice.place.device.price * self.choice.place.devices

    def keeps(self, objective: Objective) -> bool:
        """Return whether the load is served within the objective."""
        return self.steady is not None and objective.met(self.steady.latency)

    @property
    def goals(self) -> tuple[float, ...]:
        """Figures of which less is better; rounding the weights is one, for it costs accuracy."""
        ttft = itl = math.inf
        if self.steady is not None:
            ttft, itl = self.steady.latency.ttft_p99, self.steady.latency.itl_p99
        return (self.hourly, self.choice.rounding, self.price, ttft, itl, -self.tokens_per_second)


def plan(found: Iterable[Choice], load: Load, objective: Objective) -> list[Row]:
    """Return the rows that no other row beats in all figures, the cheapest first.

    Rows that serve the load within the objective come before the others. A slice whose rows are all
    beaten has its first one.

    Args:
        found: the choices, on one slice or several.
        load: all requests.
        objective: limits on latency.

    Raises:
        ConfigError: the model's context is too short for the load, or no choice can hold a request.
    """
    rows, refused = [], None
    for choice in _worth_a_look(found):
        load.check_context(choice.limits.max_model_len)
        try:
            rows.append(_row(choice, load, objective))
        except ConfigError as error:
            refused = error
    if not rows:
        assert refused is not None, "there are choices"
        raise refused
    rows.sort(key=lambda row: (not row.keeps(objective), row.goals))
    best = [row for row in rows if not any(_beats(other.goals, row.goals) for other in rows)]
    first = {row.choice.place: row for row in reversed(rows)}
    for row in best:
        first.pop(row.choice.place, None)
    return [row for row in rows if row in best or row is first.get(row.choice.place)]


def load_curve(choice: Choice, load: Load) -> list[tuple[float, Latency]]:
    """Return latency at rising rates, up to the capacity, with the load's lengths and hits.

    Args:
        choice: how the model is served.
        load: all requests; with users, requests at random times take their place.

    Returns:
        pairs of requests per second over all replicas, and their latency.

    Raises:
        ConfigError: the choice cannot hold a request.
    """
    seconds, settings = _remembered(choice.engine.seconds), _settings(choice)
    own = replace(load, users=None, rate=1.0)
    most = largest_rate(own, seconds, Objective(), **settings)
    found = []
    for share in CURVE:
        steady = steady_state(replace(own, rate=share * most), seconds, **settings)
        found.append((share * most * choice.replicas, steady.latency))
    return found


def _settings(choice: Choice) -> dict[str, int]:
    """Return a replica's limits; each attention group has a scheduler and a KV cache."""
    groups, limits = choice.layout.dp_size, choice.limits
    return {
        "max_num_seqs": groups * limits.max_num_seqs,
        "max_num_batched_tokens": groups * limits.max_num_batched_tokens,
        "kv_tokens": groups * choice.ledger.tokens,
    }


def _row(choice: Choice, load: Load, objective: Objective) -> Row:
    own, seconds = _share(load, choice.replicas), _remembered(choice.engine.seconds)
    settings = _settings(choice)
    one = largest_rate(own, seconds, objective, **settings)
    unbounded = one if not objective.limits else largest_rate(own, seconds, Objective(), **settings)
    steady = None
    if own.users is not None or (own.rate is not None and own.rate <= unbounded):
        steady = steady_state(own, seconds, **settings)
    capacity = one * choice.replicas if one > NOTHING else 0.0
    tokens = capacity * load.answer.mean
    hourly = choice.place.device.price * choice.place.devices
    price = hourly / HOUR / tokens * 1e6 if tokens else math.inf
    decodes = max(1, round(steady.mean_decodes)) if steady else settings["max_num_seqs"]
    batch = Batch(decodes, load.decode_context)
    rate = steady.rate * _parts(load, own) if steady else 0.0
    return Row(choice, steady, rate, batch, capacity, tokens, price, shares(choice, batch))


def shares(choice: Choice, batch: Batch) -> dict[str, float]:
    """Return each resource's share of the seconds of a step, for the slowest stage."""
    slowest = max(choice.engine.parts(batch), key=lambda parts: sum(p.seconds for p in parts))
    seconds = dict.fromkeys(REMEDIES, 0.0)
    for part in slowest:
        seconds[_roof(part)] += part.roof
        seconds["exchange"] += part.exchange
        seconds["launch"] += part.launch
    seconds["host"] = choice.engine.host / choice.layout.pp  # once for all stages
    total = sum(seconds.values())
    return {name: each / total for name, each in seconds.items()}


def _roof(part: Part) -> str:
    return "arithmetic" if part.arithmetic > part.memory else "memory"


def _share(load: Load, replicas: int) -> Load:
    """Return one replica's part of a load."""
    if load.users is not None:
        return replace(load, users=-(-load.users // replicas))
    assert load.rate is not None, "a load has a rate or users"
    return replace(load, rate=load.rate / replicas)


def _parts(load: Load, own: Load) -> float:
    """Return how many times one replica's part a load is."""
    if load.users is not None and own.users is not None:
        return load.users / own.users
    assert load.rate is not None, "a load has a rate or users"
    assert own.rate is not None, "a part is of the same kind"
    return load.rate / own.rate


def _worth_a_look(found: Iterable[Choice]) -> list[Choice]:
    """Leave out choices that another one with as many replicas beats at three different steps."""
    steps = (Batch(1, 1000.0), Batch(64, 1000.0), Batch(0, 0.0, 1, 2048, 1024.0))
    measured = [
        (
            choice,
            (
                choice.rounding,
                *(choice.engine.seconds(step) for step in steps),
                -choice.layout.dp_size * choice.ledger.tokens,
                -choice.layout.dp_size,  # as many times the limits of one scheduler
            ),
        )
        for choice in found
    ]
    return [
        choice
        for choice, figures in measured
        if not any(
            other.place == choice.place
            and other.replicas >= choice.replicas
            and _beats(theirs, figures)
            for other, theirs in measured
        )
    ]


def _beats(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether one is as good in all figures, and better in some; less is better."""
    return tuple(one) != tuple(other) and all(a <= b for a, b in zip(one, other, strict=True))


def _remembered(seconds: Callable[[Batch], float]) -> Callable[[Batch], float]:
    """Return the function with a memory for its results."""
    known: dict[Batch, float] = {}

    def remembering(batch: Batch) -> float:
        if batch not in known:
            known[batch] = seconds(batch)
        return known[batch]

    return remembering
