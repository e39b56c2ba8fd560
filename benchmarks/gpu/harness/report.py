"""Rows as they come: printed, and written as JSON and markdown after each."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Figure:
    """What came of a case.

    Attributes:
        value: the median, or the one there is.
        low, high: over the repetitions.
        good: whether it meets the goal; None without one.
        details: other figures, by name.
    """

    value: float
    unit: str
    low: float
    high: float
    goal: str = ""
    good: bool | None = None
    details: dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to find out; `run` may raise LeftOut."""

    name: str
    run: Callable[[], Figure]


class LeftOut(Exception):  # noqa: N818 - no error
    """A case that cannot be run here; the message says why."""


State = Literal["done", "left out", "failed", "hung"]


@dataclass(frozen=True, slots=True)
class Row:
    """A case's figure, or why there is none."""

    part: str
    case: str
    state: State
    figure: Figure | None = None
    reason: str = ""
    seconds: float = 0.0

    @classmethod
    def of(cls, content: dict[str, Any]) -> Row:
        """Return a row from its content as JSON."""
        figure = content["figure"]
        return cls(**content | {"figure": None if figure is None else Figure(**figure)})


class Report:
    """All rows, printed and written as they come.

    Args:
        folder: for day.json and day.md; nothing is written if None.
        arguments: of the command.
    """

    def __init__(self, folder: Path | None, arguments: Sequence[str]) -> None:
        self.rows: list[Row] = []
        self._folder = folder
        command = " ".join(["python benchmarks/gpu/day.py", *arguments])
        self._about: dict[str, Any] = {"command": command}

    @property
    def good(self) -> bool:
        """Whether no case failed or hung, and no goal was missed."""
        return all(
            row.state in ("done", "left out")
            and (row.figure is None or row.figure.good is not False)
            for row in self.rows
        )

    def describe(self, about: dict[str, Any]) -> None:
        """Note the device, the versions and the date."""
        self._about |= about

    def add(self, row: Row) -> None:
        """Add a row, and write everything so far."""
        self.rows.append(row)
        if row.reason:
            print(f"  {row.state}: {row.reason}", file=sys.stderr, flush=True)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            content = {**self._about, "rows": [asdict(row) for row in self.rows]}
            (self._folder / "day.json").write_text(json.dumps(content, indent=1) + "\n")
            (self._folder / "day.md").write_text(markdown(self._about, self.rows))

    def finish(self) -> None:
        """Print the table."""
        print(render(self.rows), flush=True)
        if self._folder is not None:
            print(f"written: {self._folder / 'day.json'} and day.md", file=sys.stderr)


def _cells(row: Row) -> tuple[str, ...]:
    if row.figure is None:
        return (row.part, row.case, "", "", "", row.state, row.reason.splitlines()[0])
    figure = row.figure
    verdict = "" if figure.good is None else "reached" if figure.good else "missed"
    details = ", ".join(f"{name} {_short(value)}" for name, value in (figure.details or {}).items())
    spread = f"{_short(figure.low)} to {_short(figure.high)}"
    value = f"{_short(figure.value)} {figure.unit}".strip()
    return (row.part, row.case, value, spread, figure.goal, verdict, details)


def _short(value: float) -> str:
    return f"{value:.3g}"


HEADINGS = ("part", "case", "median", "spread", "goal", "", "details")


def render(rows: Sequence[Row]) -> str:
    """The table as text."""
    lines = [HEADINGS, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def markdown(about: dict[str, Any], rows: Sequence[Row]) -> str:
    """Return the report as a page."""
    versions = ", ".join(f"{k} {v}" for k, v in about.get("versions", {}).items())
    lines = [
        "# A day with a GPU",
        "",
        f"{about.get('device', 'no device')}; {versions}; {about.get('date', '')}.",
        "",
        f"    {about['command']}",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|" + " --- |" * len(HEADINGS),
    ]
    lines += [
        "| " + " | ".join(cell.replace("|", "/") for cell in _cells(row)) + " |" for row in rows
    ]
    return "\n".join(lines) + "\n"
