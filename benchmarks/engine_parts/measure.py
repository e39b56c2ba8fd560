"""Cases, their repetition, and the table of what came out."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to measure.

    Attributes:
        name: what is done.
        unit: of the figure.
        run: measures for about so many seconds, and returns the figure.
        at_most, at_least: the goal, where there is one.
    """

    name: str
    unit: str
    run: Callable[[float], float]
    at_most: float | None = None
    at_least: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """What came of a case.

    Attributes:
        values: one per repetition.
        goal: in words, or None.
        reached: whether the median meets the goal; None without one.
    """

    part: str
    case: str
    unit: str
    median: float
    low: float
    high: float
    values: list[float]
    goal: str | None
    reached: bool | None


def measure(part: str, cases: Sequence[Case], repetitions: int, seconds: float) -> list[Row]:
    """Every case so often, in turns."""
    values: list[list[float]] = [[] for _ in cases]
    for _ in range(repetitions):
        for case, seen in zip(cases, values, strict=True):
            seen.append(case.run(seconds))
    return [_row(part, case, seen) for case, seen in zip(cases, values, strict=True)]


def _row(part: str, case: Case, values: list[float]) -> Row:
    median = statistics.median(values)
    goal = reached = None
    if case.at_most is not None:
        goal, reached = f"at most {case.at_most:,g}", median <= case.at_most
    elif case.at_least is not None:
        goal, reached = f"at least {case.at_least:,g}", median >= case.at_least
    return Row(part, case.name, case.unit, median, min(values), max(values), values, goal, reached)


def per_call(call: Callable[[], object], seconds: float) -> float:
    """Seconds that a call takes, over calls that take `seconds` together."""
    calls = 0
    begin = time.perf_counter()
    while (taken := time.perf_counter() - begin) < seconds or not calls:
        call()
        calls += 1
    return taken / calls


def render(rows: Sequence[Row]) -> str:
    """The table."""
    lines: list[tuple[str, ...]] = [
        ("part", "case", "median", "low", "high", "unit", "goal", "reached")
    ]
    for row in rows:
        figures = (f"{value:,.{_digits(row.median)}f}" for value in (row.median, row.low, row.high))
        reached = "" if row.reached is None else "yes" if row.reached else "no"
        lines.append((row.part, row.case, *figures, row.unit, row.goal or "", reached))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            text.rjust(width) if 2 <= i <= 4 else text.ljust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _digits(value: float) -> int:
    """Decimals that leave about three figures."""
    return 0 if value >= 100 else 1 if value >= 10 else 2
