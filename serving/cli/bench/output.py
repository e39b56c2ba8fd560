"""What a benchmark leaves behind: a table, a JSON document, a picture."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from weft.errors import ConfigError, WeftError
from weft.serving.cli.bench.report import PERCENTILES, Percentiles, Report
from weft.version import __version__

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from weft.serving.cli.bench.run import Benchmark

PICTURES = (".png", ".svg", ".pdf")


def check_file(path: Path, flag: str) -> None:
    """Raise ConfigError if a file could not be written, before a run takes its minutes."""
    if path.is_dir():
        raise ConfigError(f"{flag} is {path}, which is a directory; name a file")
    if not path.parent.is_dir():
        raise ConfigError(f"{flag} is {path}; there is no directory {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{flag} is {path}; {path.parent} may not be written to")


def check_plot(path: Path) -> None:
    """Raise ConfigError if a picture could not be drawn or written."""
    if path.suffix not in PICTURES:
        raise ConfigError(f"--plot is {path}; its name must end in {', '.join(PICTURES)}")
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'weft[bench]'")
    check_file(path, "--plot")


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` fill a file beside `path`, and move it there once it is complete.

    Raises:
        WeftError: the file cannot be written; what was there before is untouched.
    """
    partial = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        write(partial)
        partial.replace(path)
    except OSError as error:
        raise WeftError(f"cannot write {path}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)


def document(benchmark: Benchmark, reports: Sequence[Report]) -> str:
    """All that was asked for and all that came out, as JSON; times in seconds."""
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
    """One row per load, times in milliseconds, and below it what a reader should know."""
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
        remarks.append("interrupted: this is what had finished")
    if report.short:
        remarks.append(f"{report.short} answers ended before the length that was asked for")
    if report.cached_tokens:
        share = 100 * report.cached_tokens / max(report.prompt_tokens, 1)
        remarks.append(f"{share:.0f}% of the prompts' tokens came from the server's prefix cache")
    return remarks


def _ms(percentiles: Percentiles) -> str:
    values = [None if p is None else 1e3 * p for p in percentiles.values()]
    return "/".join("-" if v is None else f"{v:.1f}" if v < 10 else f"{v:.0f}" for v in values)


def plot(reports: Sequence[Report], path: Path, title: str) -> None:
    """Draw latency against rate: percentiles of TTFT and ITL over output tokens per second."""
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
    for x, y, load in points:  # of the highest percentile
        axis.annotate(load, (x, y), (0, 6), textcoords="offset points", ha="center", fontsize=8)
    if points:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(LogFormatter())
        axis.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    axis.margins(0.1, 0.15)
    axis.grid(visible=True, alpha=0.3)
    axis.legend()
