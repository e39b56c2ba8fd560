"""A run as a document (JSON), a page (markdown) and a picture (ratios as bars).

The document holds every sample; page and picture are made from it alone, so
that no figure is ever copied by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from peers.table import FIGURES, MEMORY_LIMIT, Figure, Verdict, shown, verdicts

_COLUMNS = ("weft", "vLLM", "llama.cpp", "transformers", MEMORY_LIMIT)


@dataclass(slots=True)
class Run:
    """All that a run found out.

    Attributes:
        command: that made it.
        machine: label -> text.
        contestants: one per program and shape: name, version, shape, command, environment, remark.
        missing: name -> how to get it.
        target: what goodput counts.
        repetitions: that are in the samples.
        bandwidth, gemm: the machine's limits, one per round of one user; bytes/s and FLOP/s.
        samples: shape -> name -> figure -> one value per round, in base units.
    """

    command: str
    machine: dict[str, str]
    target: str
    contestants: list[dict[str, str]] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    repetitions: int = 0
    bandwidth: list[float] = field(default_factory=list)
    gemm: list[float] = field(default_factory=list)
    samples: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)

    def add(self, shape: str, name: str, figures: dict[str, float]) -> None:
        """Add one sample of each figure."""
        of_name = self.samples.setdefault(shape, {}).setdefault(name, {})
        for key, value in figures.items():
            of_name.setdefault(key, []).append(value)

    def save(self, file: Path) -> None:
        """Write the document; `load` reads it."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, file: Path) -> Run:
        """Read a document."""
        fields: dict[str, Any] = json.loads(file.read_text())
        return cls(**fields)


def markdown(run: Run, picture: str | None = None) -> str:
    """The page: goals, figures, limits, how it was measured."""
    parts = [
        "# Speed on a CPU",
        "`benchmarks/vs_peers.py` wrote this page. To measure again, run `make bench-peers`.",
        "## Goals",
        "A ratio is weft's figure divided by the other's in the same round. There were "
        f"{run.repetitions} repetitions; in each, one user and the long prompt had several "
        "rounds. The table gives the median, with the lowest and highest in parentheses.",
        goals_table(run),
        *([f"![Ratio over goal]({picture})"] if picture else []),
        "## Figures",
        "Medians, with the lowest and highest in parentheses.",
        figures_table(run),
        "## Limits",
        f"Measured in the same run: memory is read at {_range(run.bandwidth, 1e-9)} GB/s, and "
        f"bf16 matrix products run at {_range(run.gemm, 1e-9)} GFLOP/s. For each token, decoding "
        "reads the weights and the cache. The memory limit is the bandwidth divided by these "
        "bytes, with the weights as the checkpoint stores them. weft reads only three quarters of "
        "the bytes in bfloat16 weights.",
        "## How",
        _how(run),
    ]
    return "\n\n".join(parts) + "\n"


def goals_table(run: Run) -> str:
    """One row per goal whose both sides were measured, then those that could not be."""
    rows = [
        (
            v.figure.title,
            v.goal.against,
            f"{v.ratio:.2f} ({v.low:.2f}-{v.high:.2f})",
            f"at {'least' if v.goal.is_least else 'most'} {v.goal.ratio:g}",
            "yes" if v.is_reached else "**no**",
        )
        for v in verdicts(run.samples)
    ]
    rows += [(f"not measured: {name}", name, "-", "-", how) for name, how in run.missing.items()]
    return table(("", "weft over", "ratio", "goal", "reached"), rows)


def figures_table(run: Run) -> str:
    """Medians and spreads of every contestant."""
    rows = []
    for figure in FIGURES:
        samples = run.samples.get(figure.shape, {})
        cells = [_cell(samples.get(name, {}).get(figure.key, ()), figure) for name in _COLUMNS]
        if any(cell != "-" for cell in cells):
            rows.append((f"{figure.title}, {figure.unit}", *cells))
    return table(("", *_COLUMNS), rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table, padded so that it reads as text too."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(text)


def _cell(samples: Sequence[float], figure: Figure) -> str:
    if not samples:
        return "-"
    middle, low, high = (shown(f(samples), figure.unit) for f in (median, min, max))
    return middle if len(samples) == 1 else f"{middle} ({low}-{high})"


def _range(values: Sequence[float], scale: float) -> str:
    if not values:
        return "an unknown number of"
    low, high = min(values) * scale, max(values) * scale
    return f"{median(values) * scale:.1f} ({low:.1f}-{high:.1f})"


def _how(run: Run) -> str:
    lines = [f"- {label}: {text}" for label, text in run.machine.items()]
    lines += [
        f"- command: `{_without_folders(run.command)}`",
        f"- goodput counts requests that meet {run.target}",
        "- Contestants take turns at every load, and the others are stopped meanwhile (SIGSTOP). "
        "Prompts are random token ids, new in each round and the same for all contestants. "
        "Decoding is greedy, and answers have a fixed length. The load generator runs on the same "
        "cores.",
        "- Resident memory: the proportional set size of a server's processes, added up.",
        "- Ready: the time from the start of the process to the first answered token.",
    ]
    for c in run.contestants:
        remark = f" ({c['remark']})" if c["remark"] else ""
        command = _without_folders(c["command"])
        lines.append(f"- {c['name']} {c['version']}, {c['shape']}{remark}: `{command}`")
    return "\n".join(lines)


def plot(run: Run, file: Path) -> None:
    """Bars of ratio over goal, turned so that 1 and above is reached."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    found = list(verdicts(run.samples))[::-1]
    figure, axis = pyplot.subplots(figsize=(9, 0.36 * len(found) + 1.2), layout="constrained")
    names = [f"{v.figure.title} / {v.goal.against}" for v in found]
    colors = ["#2a7f62" if v.is_reached else "#b5482f" for v in found]
    axis.barh(names, [margin(v) for v in found], color=colors)
    axis.axvline(1.0, color="black", linewidth=1)
    axis.set(xscale="log", xlabel="ratio over goal (1 and more: reached)")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def margin(verdict: Verdict) -> float:
    """How far beyond its goal a ratio is; 1 is the goal itself, more is better."""
    over = verdict.ratio / verdict.goal.ratio
    return over if verdict.goal.is_least else 1 / over


def _without_folders(command: str) -> str:
    """A command with the last part of each absolute path: folders say nothing elsewhere."""
    return re.sub(r"(?<![^\s='\"])/(?:[^\s/'\"]+/)*([^\s/'\"]+)", r"\1", command)
