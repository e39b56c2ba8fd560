"""A plan as a picture: price and latency, the time of each row's step, and load curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weft.models.plan.load import Latency, Load
from weft.models.plan.plan import REMEDIES, Row, load_curve
from weft.serving.cli.plan.report import Asked

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVES = 6
"""Maximum number of rows with a load curve: the first ones."""


def draw(rows: Sequence[Row], asked: Asked, load: Load, path: Path) -> None:
    """Draw the rows in four panels; load curves come from formulas, not from a simulation."""
    from matplotlib.figure import Figure  # an extra

    figure = Figure(figsize=(12, 0.35 * len(rows) + 8), layout="constrained")
    (prices, steps), (first, between) = figure.subplots(2, 2)
    _draw_prices(prices, rows)
    _draw_steps(steps, rows)
    curves = [(row, load_curve(row.choice, load)) for row in rows[:CURVES]]
    _draw_curves(first, curves, "first token", lambda each: (each.ttft_p50, each.ttft_p99))
    _draw_curves(between, curves, "time between tokens", lambda each: (each.itl_p50, each.itl_p99))
    if load.rate is not None:
        for panel in (first, between):
            panel.axvline(load.rate, color="gray", linestyle=":", label="this load")
    first.legend(fontsize=8)
    figure.suptitle(f"{asked.model} for {asked.load}")
    figure.savefig(path)


def _draw_prices(panel: Axes, rows: Sequence[Row]) -> None:
    for row in rows:
        if row.steady is None:  # it does not serve the load
            continue
        x, y = row.price, 1000 * row.steady.latency.itl_p99
        panel.plot([x], [y], "o")
        panel.annotate(_name(row), (x, y), (5, 4), textcoords="offset points", fontsize=8)
    panel.set(xlabel="US dollars for a million tokens", ylabel="time between tokens, p99, ms")
    panel.margins(0.2, 0.2)
    panel.grid(visible=True, alpha=0.3)


def _draw_steps(panel: Axes, rows: Sequence[Row]) -> None:
    names = [_name(row) for row in rows]
    start = [0.0] * len(rows)
    for resource in REMEDIES:
        widths = [100 * row.shares[resource] for row in rows]
        panel.barh(names, widths, left=start, label=resource)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    panel.set(xlabel="share of a step, %")
    panel.invert_yaxis()
    panel.legend(loc="upper center", bbox_to_anchor=(0.5, 1.1), ncols=len(REMEDIES), fontsize=8)


def _draw_curves(
    panel: Axes,
    curves: Sequence[tuple[Row, list[tuple[float, Latency]]]],
    what: str,
    figures: Callable[[Latency], tuple[float, float]],
) -> None:
    """Draw a median (solid) and a 99th percentile (dashed) for each row, up to its capacity."""
    for row, curve in curves:
        rates = [rate for rate, _ in curve]
        medians, tails = zip(*(figures(latency) for _, latency in curve), strict=True)
        (line,) = panel.plot(rates, [1000 * value for value in medians], label=_name(row))
        panel.plot(rates, [1000 * value for value in tails], "--", color=line.get_color())
    panel.set(xlabel="requests per second", ylabel=f"{what}, p50 and p99 (dashed), ms")
    panel.set_yscale("log")
    panel.grid(visible=True, alpha=0.3)


def _name(row: Row) -> str:
    return f"{row.choice.place} {row.choice.flags}"
