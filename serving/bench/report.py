"""From the times of requests to numbers, a table, JSON and a picture.

Rates are given twice. `total`: all output tokens over the whole run, start-up
and tail included. `steady`: those of the middle, while as many requests were
running as ever ran at once (a batch that drains at the end says nothing of a
server that is never idle).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from weft.errors import ConfigError
from weft.serving.bench.client import Result

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Target:
    """A latency target; a request that meets all that are set counts as good. Seconds."""

    ttft: float | None = None
    tpot: float | None = None
    latency: float | None = None

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read "ttft=1.0,tpot=0.1"."""
        values: dict[str, float] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            try:
                values[name.strip()] = float(value)
            except ValueError:
                raise ConfigError(f"--target has {part!r}; write it as ttft=1.0,tpot=0.1") from None
        unknown = values.keys() - {"ttft", "tpot", "latency"}
        if unknown:
            raise ConfigError(
                f"--target names {sorted(unknown)[0]!r}; it knows ttft, tpot and latency"
            )
        return cls(**values)

    def met(self, result: Result) -> bool:
        """Whether a request was good."""
        return all(
            limit is None or getattr(result, name) <= limit for name, limit in asdict(self).items()
        )


@dataclass(frozen=True, slots=True)
class Report:
    """A run in numbers; times in seconds, rates per second.

    Attributes:
        load: "16 users" or "2.0/s".
        requests, failed: how many were made, and how many of them failed.
        seconds: from the first start to the last end.
        total_rate, steady_rate: output tokens per second; see the module's text.
        request_rate: finished requests per second.
        goodput: finished requests per second that met the target.
        ttft, itl, tpot, latency: percentile -> seconds.
    """

    load: str
    requests: int
    failed: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    total_rate: float
    steady_rate: float
    request_rate: float
    goodput: float
    ttft: dict[str, float]
    itl: dict[str, float]
    tpot: dict[str, float]
    latency: dict[str, float]
    first_error: str | None


def summarize(load: str, results: Sequence[Result], target: Target) -> Report:
    """Turn the results of one run into a report."""
    good = [result for result in results if result.error is None]
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
        steady_rate=_steady_rate(good),
        request_rate=len(good) / seconds,
        goodput=sum(map(target.met, good)) / seconds,
        ttft=_percentiles([result.ttft for result in good]),
        itl=_percentiles([gap for result in good for gap in result.itl]),
        tpot=_percentiles([result.tpot for result in good if result.output_tokens > 1]),
        latency=_percentiles([result.latency for result in good]),
        first_error=next((result.error for result in results if result.error), None),
    )


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {f"p{p}": float("nan") for p in PERCENTILES}
    return {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}


def _steady_rate(results: Sequence[Result]) -> float:
    """Output tokens per second while at least 0.9 of the most requests ever seen are decoding."""
    if not results:
        return 0.0
    # +1 when a request shows its first token, -1 when it shows its last.
    edges = sorted(edge for r in results for edge in ((r.arrivals[0], 1), (r.arrivals[-1], -1)))
    running = np.cumsum([change for _, change in edges])
    times = np.array([moment for moment, _ in edges])
    full = running[:-1] >= 0.9 * running.max()
    lengths = np.diff(times)[full]
    starts = times[:-1][full]
    arrivals = np.sort(np.concatenate([_token_times(r) for r in results]))
    counts = np.searchsorted(arrivals, starts + lengths) - np.searchsorted(arrivals, starts)
    return float(counts.sum() / lengths.sum()) if lengths.sum() > 0 else 0.0


def _token_times(result: Result) -> np.ndarray:
    """When each token came, taking a piece's arrival for all tokens that it may hold."""
    shares = np.linspace(0, len(result.arrivals) - 1, max(result.output_tokens, 1)).round()
    return np.asarray(result.arrivals)[shares.astype(int)]


def render(reports: Sequence[Report]) -> str:
    """A table with one row per load; times in milliseconds."""
    head = (
        f"{'load':>12} {'done':>6} {'failed':>6} {'tok/s':>8} {'steady':>8} {'req/s':>7} "
        f"{'good/s':>7}  {'TTFT p50/p99':>15} {'ITL p50/p99':>13} {'e2e p50/p99':>15}"
    )
    rows = [head]
    for r in reports:
        rows.append(
            f"{r.load:>12} {r.requests - r.failed:>6} {r.failed:>6} {r.total_rate:>8.1f} "
            f"{r.steady_rate:>8.1f} {r.request_rate:>7.2f} {r.goodput:>7.2f}  "
            f"{_ms(r.ttft):>15} {_ms(r.itl):>13} {_ms(r.latency):>15}"
        )
        if r.first_error:
            rows.append(f"{'':>12} first error: {r.first_error}")
    return "\n".join(rows)


def _ms(percentiles: dict[str, float]) -> str:
    return f"{1e3 * percentiles['p50']:.0f}/{1e3 * percentiles['p99']:.0f} ms"


def plot(reports: Sequence[Report], path: Path, title: str) -> None:
    """Draw latency against rate: TTFT and ITL percentiles over output tokens per second."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    rates = [report.total_rate for report in reports]
    for axis, name, label in zip(
        axes, ("ttft", "itl"), ("time to first token", "time between tokens"), strict=True
    ):
        for percentile in (f"p{p}" for p in PERCENTILES):
            values = [1e3 * getattr(report, name)[percentile] for report in reports]
            axis.plot(rates, values, marker="o", label=percentile)
        for report in reports:
            high = 1e3 * getattr(report, name)[f"p{PERCENTILES[-1]}"]
            axis.annotate(
                report.load, (report.total_rate, high), textcoords="offset points",
                xytext=(0, 6), ha="center", fontsize=8,
            )  # fmt: skip
        axis.set(xlabel="output tokens/s", ylabel=f"{label}, ms", yscale="log")
        axis.grid(visible=True, alpha=0.3)
        axis.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
