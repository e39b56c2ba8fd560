"""From the times of requests to numbers.

Rates are given twice. `total`: all output tokens over the whole run, start-up
and tail included. `steady`: those of the middle, while at least 0.9 of the
most requests that ever decoded at once were decoding; a request decodes from
its first token to its last. So the prompts of a first wave and a batch that
drains at the end, which say nothing of a server that is never idle, are left
out, and prompts that are worked in between others' tokens count. For one user
it is the rate of decoding alone. It is for closed loops: at a rate, the most
that ever ran at once is a chance moment, and steady is not given.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np

from weft.errors import ConfigError
from weft.serving.cli.bench.client import Result

PERCENTILES = (50, 90, 99)
FULL = 0.9  # share of the most requests that ever decoded at once
MAX_REASONS = 10  # of failures, the most common

Percentiles = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Target:
    """A latency target; a request that meets all that are set counts as good. Seconds."""

    ttft: float | None = None
    tpot: float | None = None
    latency: float | None = None

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read "ttft=1.0,tpot=0.1"; raises ConfigError."""
        values: dict[str, float] = {}
        names = [field.name for field in fields(cls)]
        for part in text.split(","):
            name, _, number = (word.strip() for word in part.partition("="))
            if name not in names:
                raise ConfigError(
                    f"--target names {name!r}; it knows {', '.join(names)} (ttft=1.0,tpot=0.1)"
                )
            if name in values:
                raise ConfigError(f"--target names {name} twice")
            values[name] = positive(number, f"{name} of --target")
        return cls(**values)

    def met(self, result: Result) -> bool:
        """Whether a request was good."""
        return all(
            limit is None or getattr(result, name) <= limit for name, limit in asdict(self).items()
        )


def positive(text: str, name: str) -> float:
    """A finite number above 0; ConfigError says what `name` is instead."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise ConfigError(f"{name} is {text!r}; it must be a number above 0")
    return number


@dataclass(frozen=True, slots=True)
class Report:
    """A run in numbers; times in seconds, rates per second.

    Attributes:
        load: "16 users" or "2/s".
        requests, failed: how many were made, and how many of them failed.
        seconds: from the first start to the last end.
        prompt_tokens, output_tokens: of the requests that did not fail.
        total_rate, steady_rate: output tokens per second; see the module's text.
        request_rate: finished requests per second.
        goodput: finished requests per second that met the target; without one, all do.
        ttft, itl, tpot, latency: "p50", "p90" and "p99" -> seconds; None when there are no times.
            ttft and latency count from when a request was due, itl are the times between events
            with tokens of all requests, tpot is each request's mean time per token.
        errors: reason -> number of requests that failed for it.
        cached_tokens: of prompt_tokens, those that the server says it had cached.
        short: answers that ended before they were as long as asked for.
        interrupted: the run was cut short; this is of what had finished.
    """

    load: str
    requests: int
    failed: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    total_rate: float
    steady_rate: float | None
    request_rate: float
    goodput: float
    ttft: Percentiles
    itl: Percentiles
    tpot: Percentiles
    latency: Percentiles
    errors: dict[str, int]
    cached_tokens: int
    short: int
    interrupted: bool

    @property
    def first_error(self) -> str | None:
        """The most common reason of a failure."""
        return next(iter(self.errors), None)


def summarize(
    load: str,
    results: Sequence[Result],
    target: Target,
    *,
    steady: bool = True,
    interrupted: bool = False,
) -> Report:
    """Turn the results of one run into a report; `steady` is for closed loops."""
    good = [result for result in results if result.error is None]
    reasons = Counter(result.error for result in results if result.error is not None)
    start = min((result.start for result in results), default=0.0)
    seconds = max(max((result.end for result in results), default=0.0) - start, 1e-9)
    output_tokens = sum(result.output_tokens for result in good)
    return Report(
        load=load,
        requests=len(results),
        failed=len(results) - len(good),
        seconds=seconds,
        prompt_tokens=sum(result.prompt_tokens for result in good),
        output_tokens=output_tokens,
        total_rate=output_tokens / seconds,
        steady_rate=_steady_rate(good) if steady else None,
        request_rate=len(good) / seconds,
        goodput=sum(map(target.met, good)) / seconds,
        ttft=_percentiles([result.ttft for result in good]),
        itl=_percentiles([gap for result in good for gap in result.itl]),
        tpot=_percentiles([result.tpot for result in good if result.output_tokens > 1]),
        latency=_percentiles([result.latency for result in good]),
        errors=dict(reasons.most_common(MAX_REASONS)),
        cached_tokens=sum(result.cached_tokens for result in good),
        short=sum(result.output_tokens < result.asked_tokens for result in good),
        interrupted=interrupted,
    )


def _percentiles(values: Sequence[float]) -> Percentiles:
    numbers = np.percentile(values, PERCENTILES).tolist() if values else [None] * len(PERCENTILES)
    return {f"p{p}": number for p, number in zip(PERCENTILES, numbers, strict=True)}


def _steady_rate(results: Sequence[Result]) -> float | None:
    """See the module's text; None when no two tokens of a request came at different times."""
    decoding = [r for r in results if r.arrivals[-1] > r.arrivals[0]]
    if not decoding:
        return None
    # One more decodes from its first token on, one less from its last.
    edges = sorted(edge for r in decoding for edge in ((r.arrivals[0], 1), (r.arrivals[-1], -1)))
    times = np.array([moment for moment, _ in edges])
    running = np.cumsum([change for _, change in edges])
    full = running[:-1] >= FULL * running.max()
    starts, ends = times[:-1][full], times[1:][full]
    tokens = np.sort(np.concatenate([_token_times(r) for r in results]))
    count = (np.searchsorted(tokens, ends) - np.searchsorted(tokens, starts)).sum()
    return float(count / (ends - starts).sum())


def _token_times(result: Result) -> np.ndarray:
    """When each token came: with its event, or evenly spread if there are not as many events."""
    arrivals = np.array(result.arrivals)
    if len(arrivals) == result.output_tokens:
        return arrivals
    return np.linspace(arrivals[0], arrivals[-1], result.output_tokens)
