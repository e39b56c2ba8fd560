"""Figures from the times of requests, as a table, a JSON document and a plot.

There are two rates. `total` counts all output tokens over the whole run, with its start and end.
`steady` counts only times with at least 0.9 of the maximum number of decoding requests; a request
decodes from its first token to its last. It leaves out the first wave of prompts and the final
drain, which a busy server does not have, but keeps prompts that are processed during others'
decoding. For one user, `steady` is the decode rate alone. Only closed loops have it: at a fixed
rate, the maximum is a matter of chance.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from weft.errors import ConfigError
from weft.serving.cli.bench.client import Result
from weft.version import __version__

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from weft.serving.cli.bench.run import Benchmark

PERCENTILES = (50, 90, 99)
FULL = 0.9  # fraction of the maximum number of decoding requests
MAX_REASONS = 10  # number of error messages to keep, most common first

Percentiles = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Target:
    """Latency limits in seconds; a good request meets all limits that are set."""

    ttft: float | None = None
    tpot: float | None = None
    latency: float | None = None

    @classmethod
    def parse(cls, text: str) -> Target:
        """Parse "ttft=1.0,tpot=0.1"; raises ConfigError."""
        values: dict[str, float] = {}
        names = [field.name for field in fields(cls)]
        for part in text.split(","):
            name, _, number = (word.strip() for word in part.partition("="))
            if name not in names:
                raise ConfigError(
                    f"--target has {name!r}; it can have {', '.join(names)} (ttft=1.0,tpot=0.1)"
                )
            if name in values:
                raise ConfigError(f"--target has {name} twice")
            values[name] = positive(number, f"{name} of --target")
        return cls(**values)

    def met(self, result: Result) -> bool:
        """Return whether a request is good."""
        return all(
            limit is None or getattr(result, name) <= limit for name, limit in asdict(self).items()
        )


def positive(text: str, name: str) -> float:
    """Parse a finite number above 0; the ConfigError for other text names `name`."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise ConfigError(f"{name} is {text!r}; it must be a number above 0")
    return number


@dataclass(frozen=True, slots=True)
class Report:
    """The figures for one run; times in seconds, rates per second.

    Attributes:
        load: "16 users" or "2/s".
        requests, failed: counts of all requests, and of failed ones.
        seconds: time from the first start to the last end.
        prompt_tokens, output_tokens: tokens in successful requests.
        total_rate, steady_rate: output tokens per second; see the module's text.
        request_rate: successful requests per second.
        goodput: good requests per second; without a target all successful ones are good.
        ttft, itl, tpot, latency: "p50", "p90" and "p99" -> seconds, or None without data. ttft and
            latency start when a request is due; itl has the times between all events with tokens;
            tpot has each request's mean time per token.
        errors: error message -> number of requests.
        cached_tokens: prompt tokens from the server's cache, as it reports them.
        short: answers that are shorter than requested.
        interrupted: whether the run was interrupted; the figures then cover finished requests.
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
        """The most common error message."""
        return next(iter(self.errors), None)


def summarize(
    load: str,
    results: Sequence[Result],
    target: Target,
    *,
    steady: bool = True,
    interrupted: bool = False,
) -> Report:
    """Turn one run's results into a report; set `steady` for closed loops."""
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
    """Return the rate, or None if no request has two tokens with different times."""
    decoding = [r for r in results if r.arrivals[-1] > r.arrivals[0]]
    if not decoding:
        return None
    # The number of decoding requests rises at a first token, and falls at a last one.
    edges = sorted(edge for r in decoding for edge in ((r.arrivals[0], 1), (r.arrivals[-1], -1)))
    times = np.array([moment for moment, _ in edges])
    running = np.cumsum([change for _, change in edges])
    full = running[:-1] >= FULL * running.max()
    starts, ends = times[:-1][full], times[1:][full]
    tokens = np.sort(np.concatenate([_token_times(r) for r in results]))
    count = (np.searchsorted(tokens, ends) - np.searchsorted(tokens, starts)).sum()
    return float(count / (ends - starts).sum())


def _token_times(result: Result) -> np.ndarray:
    """Return each token's arrival: its event's, or evenly spaced if there are fewer events."""
    arrivals = np.array(result.arrivals)
    if len(arrivals) == result.output_tokens:
        return arrivals
    return np.linspace(arrivals[0], arrivals[-1], result.output_tokens)


def document(benchmark: Benchmark, reports: Sequence[Report]) -> str:
    """Return all parameters and figures as JSON; times in seconds."""
    workload = benchmark.workload
    content = {
        "weft": __version__,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "url": benchmark.base_url,
        "model": benchmark.model,
        "chat": benchmark.chat,
        "fields": benchmark.extra,
        "prompt": str(workload.prompt),
        "prompt_is": "token ids" if workload.token_ids else "words",
        "output_tokens": str(workload.output),
        "turns": workload.turns,
        "shared_prefix": workload.shared_prefix,
        "prefix_groups": workload.prefix_groups,
        "seed": workload.seed,
        "target": asdict(benchmark.target),
        "runs": [asdict(report) for report in reports],
    }
    return json.dumps(content, indent=2, allow_nan=False)


def table(reports: Sequence[Report]) -> str:
    """Return a table with one row per load, times in milliseconds, and notes below the rows."""
    lines = [
        f"{'':>12} {'requests':>9} {'tokens/s':>18} {'requests/s':>16} "
        f"{'TTFT ms':>18} {'ITL ms':>18} {'end to end ms':>20}",
        f"{'load':>12} {'done':>9} {'total':>9} {'steady':>8} {'all':>8} {'good':>7} "
        f"{'p50/p90/p99':>18} {'p50/p90/p99':>18} {'p50/p90/p99':>20}",
    ]
    for r in reports:
        steady = "-" if r.steady_rate is None else f"{r.steady_rate:.1f}"
        lines.append(
            f"{r.load:>12} {r.requests - r.failed:>9} {r.total_rate:>9.1f} {steady:>8} "
            f"{r.request_rate:>8.2f} {r.goodput:>7.2f} "
            f"{_ms(r.ttft):>18} {_ms(r.itl):>18} {_ms(r.latency):>20}"
        )
        lines += [f"{'':>12} {remark}" for remark in _remarks(r)]
    return "\n".join(lines)


def _remarks(report: Report) -> list[str]:
    remarks = [f"{count} failed: {reason}" for reason, count in report.errors.items()]
    if report.interrupted:
        remarks.append("interrupted: only finished requests count")
    if report.short:
        remarks.append(f"{report.short} answers are shorter than requested")
    if report.cached_tokens:
        share = 100 * report.cached_tokens / max(report.prompt_tokens, 1)
        remarks.append(f"{share:.0f}% of the prompts' tokens came from the server's prefix cache")
    return remarks


def _ms(percentiles: Percentiles) -> str:
    values = [None if p is None else 1e3 * p for p in percentiles.values()]
    return "/".join("-" if v is None else f"{v:.1f}" if v < 10 else f"{v:.0f}" for v in values)


def plot(reports: Sequence[Report], path: Path, title: str) -> None:
    """Plot latency against rate: percentiles of TTFT and ITL over output tokens per second."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _curves(left, reports, "ttft", "time to first token, ms")
    _curves(right, reports, "itl", "time between tokens, ms")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def _curves(axis: Axes, reports: Sequence[Report], name: str, label: str) -> None:
    from matplotlib.ticker import LogFormatter

    axis.set(xlabel="output tokens/s", ylabel=label)
    for percentile in (f"p{p}" for p in PERCENTILES):
        points = [
            (report.total_rate, 1e3 * getattr(report, name)[percentile], report.load)
            for report in reports
            if getattr(report, name)[percentile] is not None
        ]
        axis.plot([x for x, _, _ in points], [y for _, y, _ in points], "o-", label=percentile)
    for x, y, load in points:  # from the highest percentile
        axis.annotate(load, (x, y), (0, 6), textcoords="offset points", ha="center", fontsize=8)
    if points:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(LogFormatter())
        axis.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    axis.margins(0.1, 0.15)
    axis.grid(visible=True, alpha=0.3)
    axis.legend()
