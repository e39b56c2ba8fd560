"""An engine under a constant load: latency, throughput, and the largest rate.

The formulas are approximations from queueing theory. docs/plan.md has their error against
simulations of the real scheduler.

- Decoding requests are a queue with processor sharing: N requests get one token each in a step. The
  distribution of N needs only mean lengths (Kelly 1979, section 3.3):
  P(N + 1) = P(N) * (arrivals per second) / (ends per second). By Little's law, there are
  N * (steps per second) / (tokens after the first) ends per second.
- Steps per second, with N decodes: prompts that arrive during a step share a later one, up to the
  step's token budget. The remaining time goes to steps with decodes alone.
- The KV cache and `max_num_seqs` bound N. Further requests wait, as in M/G/c (Allen and Cunneen).
- A request finds N as time does (Wolff 1982). The core reads it when the running step ends. The
  next step is already submitted then, so the request waits for both. Its prompt is computed with
  those from the same step, after prompts without room before.
- Preemption is not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

from weft.errors import ConfigError
from weft.models.plan.flow import Flow, distribution
from weft.models.plan.load import MOST, Latency, Load, Objective
from weft.models.plan.step_table import StepSeconds, StepTable

CLOSE = 1e-3  # relative error of a rate
NEGLIGIBLE = 1e-5  # probability
PARTS = 4  # points for the rest of a step
MANY = 10  # prompts in a step

Weighted = list[tuple[float, float]]
"""Pairs of a value and its weight."""
SHARES: Weighted = [
    *((0.1, 0.2), (0.3, 0.2), (0.5, 0.2), (0.7, 0.2)),
    *((0.87, 0.14), (0.955, 0.03), (0.98, 0.02), (0.995, 0.01)),
]
"""Quantiles for a distribution, denser at its tail: (share, weight)."""
EXPONENTIAL: Weighted = [(-math.log1p(-share), part) for share, part in SHARES]
"""The same for an exponential distribution with mean 1."""


@dataclass(frozen=True, slots=True)
class Steady:
    """An engine in a steady state.

    Attributes:
        rate: requests per second.
        tokens_per_second: tokens of answers per second.
        utilisation: share of time in which a step runs.
        mean_decodes: mean number of decodes in a step.
        latency: percentiles, in seconds.
    """

    rate: float
    tokens_per_second: float
    utilisation: float
    mean_decodes: float
    latency: Latency


@dataclass(frozen=True, slots=True)
class _State:
    """Steps in a share of the time.

    Attributes:
        flow: the steps.
        weight: share of time, and of arriving requests.
        wait: seconds that these requests wait for a place.
    """

    flow: Flow
    weight: float
    wait: float = 0.0


def steady_state(
    load: Load,
    step_seconds: StepSeconds,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    kv_tokens: int,
) -> Steady:
    """Return the steady state of one engine.

    Args:
        load: the engine's own load; a replica of several gets a part of the rate or users.
        step_seconds: predicted seconds for a step, above 0.
        max_num_seqs: maximum number of running requests.
        max_num_batched_tokens: maximum number of tokens in a step.
        kv_tokens: the KV cache's size in tokens.

    Raises:
        ConfigError: the rate is too high, or the KV cache does not hold a request.
    """
    table = StepTable(
        load,
        step_seconds,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_tokens=kv_tokens,
    )
    if load.users is not None:
        return _closed(table, load, load.users)
    assert load.rate is not None, "a load has a rate or users"
    if not _keeps_up(table, load.rate):
        raise ConfigError(
            f"rate of --load is {load.rate:g} requests/s; one engine serves at most "
            f"{_largest(lambda rate: _keeps_up(table, rate)):.3g}: lower the rate or add replicas"
        )
    return _open(table, load, load.rate)


def largest_rate(
    load: Load,
    step_seconds: StepSeconds,
    objective: Objective,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    kv_tokens: int,
) -> float:
    """Return the largest rate in requests per second that meets an objective; 0 if none does.

    Args:
        load: lengths and prefix hits; its rate or users do not count.
        objective: limits on latency; without limits, capacity is the only one.
        step_seconds, max_num_seqs, max_num_batched_tokens, kv_tokens: see `steady_state`.

    Raises:
        ConfigError: the KV cache does not hold a request.
    """
    table = StepTable(
        load,
        step_seconds,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_tokens=kv_tokens,
    )

    def good(rate: float) -> bool:
        if not _keeps_up(table, rate):
            return False
        return not objective.limits or objective.met(_open(table, load, rate).latency)

    return _largest(good)


def _largest(good: Callable[[float], bool]) -> float:
    """Return the largest rate for which a condition holds, if it holds for all lower ones."""
    low, high = 0.0, 1.0
    while good(high) and high < MOST:
        low, high = high, 2 * high
    while high - low > CLOSE * high and high > 1 / MOST:
        middle = (low + high) / 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def _keeps_up(table: StepTable, rate: float) -> bool:
    """Return whether some number of decodes ends requests as fast as they arrive."""
    flows = (Flow.of(table, index, rate) for index in range(len(table.decodes)))
    return any(flow.share < 1 and flow.ends > rate for flow in flows)


def _open(table: StepTable, load: Load, rate: float) -> Steady:
    """Return the steady state at a rate below capacity."""
    flows = [Flow.of(table, index, rate) for index in range(len(table.decodes))]
    weights, taken = distribution(flows)
    states = [_State(flow, weight) for flow, weight in zip(flows, weights, strict=True)]
    last = flows[-1]
    if taken:
        # As in M/M/c, times the factor for M/G/c by Allen and Cunneen (Allen 1990).
        answer = load.answer
        spread = answer.mean_square / answer.mean**2 / 2
        wait = spread / max(last.ends - last.entering, CLOSE * rate)
        states += [_State(last, taken * part, each * wait) for each, part in EXPONENTIAL]
    return _figures(table, load, rate, states)


def _closed(table: StepTable, load: Load, users: int) -> Steady:
    """Return the steady state with a fixed number of users, each with one request at all times."""

    def users_at(rate: float) -> float:
        states = _between(table, rate)
        first = sum(
            seconds * part * state.weight
            for state in states
            for seconds, part in _first_tokens(table, load, state.flow, rate)
        )
        return rate * first + sum(state.flow.decodes * state.weight for state in states)

    rate = _largest(lambda rate: _keeps_up(table, rate) and users_at(rate) <= users)
    wait = max(0.0, users - users_at(rate)) / rate if users > table.decodes[-1] else 0.0
    states = [replace(state, wait=wait) for state in _between(table, rate)]
    return _figures(table, load, rate, states)


def _between(table: StepTable, rate: float) -> list[_State]:
    """Return the one or two flows between which requests end as fast as they arrive."""
    flows = [Flow.of(table, index, rate) for index in range(len(table.decodes))]
    for low, high in pairwise(flows):
        if low.ends <= rate <= high.ends:
            part = (rate - low.ends) / (high.ends - low.ends)
            return [_State(low, 1 - part), _State(high, part)]
    return [_State(flows[-1], 1.0)]


def _figures(table: StepTable, load: Load, rate: float, states: Sequence[_State]) -> Steady:
    """Return the figures for states; their weights add up to 1."""
    first: Weighted = []
    gaps: Weighted = []
    steps = sum(state.weight * state.flow.steps for state in states)
    decodes = sum(state.weight * state.flow.steps * state.flow.decodes for state in states)
    idle = sum(state.weight * (1 - state.flow.share) for state in states if not state.flow.decodes)
    decoding = sum(state.weight for state in states if state.flow.decodes)
    for state in states:
        if state.weight >= NEGLIGIBLE:
            first += (
                (state.wait + seconds, part * state.weight)
                for seconds, part in _first_tokens(table, load, state.flow, rate)
            )
        if state.flow.decodes and state.weight >= NEGLIGIBLE * decoding:
            gaps += (
                (seconds, part * state.weight * state.flow.decodes)
                for seconds, part in _steps(table, load, state.flow)
            )
    return Steady(
        rate=rate,
        tokens_per_second=rate * load.answer.mean,
        utilisation=1 - idle,
        mean_decodes=decodes / steps,
        latency=Latency(
            ttft_p50=_quantile(first, 0.5),
            ttft_p99=_quantile(first, 0.99),
            itl_p50=_quantile(gaps, 0.5),
            itl_p99=_quantile(gaps, 0.99),
        ),
    )


def _first_tokens(
    table: StepTable, load: Load, flow: Flow, rate: float
) -> Iterator[tuple[float, float]]:
    """Yield times to the first token, with their probabilities."""
    alone, mixed = table.seconds(flow.index, 0), table.seconds(flow.index, flow.tokens)
    if flow.decodes:
        now = [(mixed, flow.share), (alone, 1 - flow.share)]
        next_mixed = flow.mixed / flow.steps
        following = [(mixed, next_mixed), (alone, 1 - next_mixed)]
    else:  # after its prompt, a request decodes alone
        now = [(mixed, flow.share), (0.0, 1 - flow.share)]
        following = [(table.seconds(1, 0) if table.follow else 0.0, 1.0)]
    prompts = _prompts(load)
    before = _before(table, load, flow, rate)
    for running, part in now:
        others = rate * running  # that share the step, in the mean
        none = math.exp(-others)
        shared = [(0.0, none)]
        if others > NEGLIGIBLE:
            shared.append((table.prompt * others / (1 - none), 1 - none))
        computed = [
            (table.chunks(flow.index, own + more + earlier), q * r * s)
            for (more, q), (earlier, r), (own, s) in product(shared, before, prompts)
        ]
        for left in range(PARTS) if running else [0]:
            rest = running * (left + 0.5) / PARTS
            for after, p in following if running else [(0.0, 1.0)]:
                start, weight = rest + after, part * p / (PARTS if running else 1)
                for seconds, q in computed:
                    yield start + seconds, weight * q


def _before(table: StepTable, load: Load, flow: Flow, rate: float) -> Weighted:
    """Return prompt tokens without room in earlier steps, with their probabilities.

    If steps were always full, the backlog would be that of M/G/1 (Pollaczek-Khinchine). It is empty
    if all prompts from one step fit in the next, so its probability falls with their number.
    """
    room = table.room(flow.index)
    busy = min(0.99, rate * table.prompt / room * table.seconds(flow.index, room))
    square = load.prompt.mean_square * (1 - load.hit) ** 2
    likely = busy ** (1 + room * table.prompt / square)
    if likely < NEGLIGIBLE:
        return [(0.0, 1.0)]
    mean = square / (2 * table.prompt * (1 - busy))
    return [(0.0, 1 - likely), *((each * mean, part * likely) for each, part in EXPONENTIAL)]


def _steps(table: StepTable, load: Load, flow: Flow) -> Iterator[tuple[float, float]]:
    """Yield the seconds of steps, with their number per second."""
    if flow.share < 1:
        alone = table.seconds(flow.index, 0)
        yield alone, (1 - flow.share) / alone
    if flow.together > MANY / 2:  # their number varies little
        yield table.seconds(flow.index, flow.tokens), flow.mixed
        return
    room = table.room(flow.index)
    several = -math.expm1(-flow.together)
    for count in range(1, MANY + 1):
        likely = math.exp(-flow.together) * flow.together**count / math.factorial(count) / several
        for own, part in _prompts(load):
            tokens = own + (count - 1) * table.prompt
            full = int(tokens / room)
            rest = tokens - full * room
            number = flow.mixed * likely * part
            if full:
                yield table.seconds(flow.index, room), full * number
            if rest >= 1:
                yield table.seconds(flow.index, rest), number


def _prompts(load: Load) -> Weighted:
    """Return numbers of prompt tokens to compute, with their probabilities."""
    if load.prompt.low == load.prompt.high and not load.prompt.exponential:
        return [(load.prompt.low * (1 - load.hit), 1.0)]
    return [(load.prompt.quantile(share) * (1 - load.hit), part) for share, part in SHARES]


def _quantile(values: Weighted, share: float) -> float:
    """Return the value that this share of the weight does not exceed; 0 without values."""
    left = share * sum(weight for _, weight in values)
    for value, weight in sorted(values):
        left -= weight
        if left <= 0:
            return value
    return 0.0
