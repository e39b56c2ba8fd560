"""A plan as a picture: latency against price, and the time of each row's step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weft.models.plan.plan import REMEDIES, Row
from weft.serving.cli.plan.report import Asked


def draw(rows: Sequence[Row], asked: Asked, path: Path) -> None:
    """Draw the rows that serve the load, in two panels."""
    from matplotlib.figure import Figure  # an extra

    figure = Figure(figsize=(12, 0.35 * len(rows) + 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    served = [row for row in rows if row.steady is not None]
    for row in served:
        assert row.steady is not None
        x, y = row.price, 1000 * row.steady.latency.itl_p99
        left.plot([x], [y], "o")
        left.annotate(_name(row), (x, y), (5, 4), textcoords="offset points", fontsize=8)
    left.set(xlabel="US dollars for a million tokens", ylabel="time between tokens, p99, ms")
    left.margins(0.2, 0.2)
    left.grid(visible=True, alpha=0.3)
    names = [_name(row) for row in rows]
    start = [0.0] * len(rows)
    for resource in REMEDIES:
        widths = [100 * row.shares[resource] for row in rows]
        right.barh(names, widths, left=start, label=resource)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    right.set(xlabel="share of a step, %")
    right.invert_yaxis()
    right.legend(loc="upper center", bbox_to_anchor=(0.5, 1.1), ncols=len(REMEDIES), fontsize=8)
    figure.suptitle(f"{asked.model} for {asked.load}")
    figure.savefig(path)


def _name(row: Row) -> str:
    return f"{row.choice.place} {row.choice.flags}"
