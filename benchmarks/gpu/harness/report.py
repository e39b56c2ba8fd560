"""Rows as they come: printed, and written as JSON and markdown after each."""

from __future__ import annotations

import json
import platform
import sys
import time
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


class Report:
    """All rows.

    Args:
        name: of the script, and of the files that are written.
        heading: of the page.
        folder: where NAME.json and NAME.md are written; nowhere if None.
        arguments: of the command.
    """

    def __init__(
        self,
        name: str,
        heading: str,
        folder: Path | None,
        arguments: Sequence[str],
        *,
        tiny: bool,
    ) -> None:
        self.rows: list[Row] = []
        self._name = name
        self._heading = heading
        self._folder = folder
        self._about = {
            "command": " ".join([f"python benchmarks/gpu/{name}.py", *arguments]),
            **environment(tiny=tiny),
        }
        self._now = ("", "")
        self._begin = time.monotonic()

    @property
    def good(self) -> bool:
        """Whether no case failed and no goal was missed."""
        return all(
            row.state in ("done", "left out")
            and (row.figure is None or row.figure.good is not False)
            for row in self.rows
        )

    def begin(self, part: str, case: str) -> None:
        """Say what is done now; `hung` names it."""
        self._now = (part, case)
        self._begin = time.monotonic()
        print(f"{part}: {case}", file=sys.stderr, flush=True)

    def add(self, part: str, case: Case) -> None:
        """Run a case; what it raises is its row."""
        try:
            row = Row(part, case.name, "done", case.run())
        except LeftOut as reason:
            row = Row(part, case.name, "left out", reason=str(reason))
        except Exception as error:  # noqa: BLE001 - the other cases are still worth running
            message = f"{type(error).__name__}: {error}"
            row = Row(part, case.name, "failed", reason=message[:2000])
        self._append(row)

    def leave_out(self, part: str, case: str, reason: str) -> None:
        """A row without a figure."""
        self._begin = time.monotonic()
        self._append(Row(part, case, "left out", reason=reason))

    def hung(self) -> None:
        """The last row, from the watchdog."""
        self._append(Row(*self._now, "hung", reason="too long; the watchdog ended the process"))
        self.finish()

    def finish(self) -> None:
        """Print the table."""
        print(render(self.rows), flush=True)
        if self._folder is not None:
            path = self._folder / f"{self._name}.json"
            print(f"written: {path} and {self._name}.md", file=sys.stderr)

    def _append(self, row: Row) -> None:
        taken = time.monotonic() - self._begin
        row = Row(row.part, row.case, row.state, row.figure, row.reason, round(taken, 2))
        self.rows.append(row)
        if row.reason:
            print(f"  {row.state}: {row.reason}", file=sys.stderr, flush=True)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            content = {**self._about, "rows": [asdict(row) for row in self.rows]}
            (self._folder / f"{self._name}.json").write_text(json.dumps(content, indent=1) + "\n")
            page = markdown(self._heading, self._about, self.rows)
            (self._folder / f"{self._name}.md").write_text(page)


def environment(*, tiny: bool) -> dict[str, Any]:
    """What the figures depend on."""
    import torch
    import triton

    from weft.version import __version__

    if tiny:
        device = "Triton's interpreter on a CPU: the times mean nothing"
    else:
        properties = torch.cuda.get_device_properties(0)
        device = f"{properties.name}, {properties.multi_processor_count} processors"
    return {
        "device": device,
        "versions": {
            "weft": __version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": triton.__version__,
            "python": platform.python_version(),
        },
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


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


def markdown(heading: str, about: dict[str, Any], rows: Sequence[Row]) -> str:
    """The report as a page."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    lines = [
        f"# {heading}",
        "",
        f"{about['device']}; {versions}; {about['date']}.",
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
