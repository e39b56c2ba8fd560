"""The tables of request fields in docs/api.md."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "api.md"


@dataclass(frozen=True)
class Row:
    """A field in a table.

    Attributes:
        field: its name.
        origin: the API that it comes from.
        says: route -> "yes", "no effect", "refused" or "-".
    """

    field: str
    origin: str
    says: dict[str, str]


def field_table(heading: str, *routes: str) -> list[Row]:
    """Read the table below a heading, with a column for each route."""
    section = DOCUMENT.read_text().partition(f"### {heading}\n")[2].partition("\n### ")[0]
    found = []
    for line in section.splitlines():
        if line.startswith("| `"):
            names, origin, *cells = (cell.strip() for cell in line[2:].split(" |"))
            says = dict(zip(routes, cells[: len(routes)], strict=True))
            found += [Row(name, origin, says) for name in re.findall(r"`(\w+)`", names)]
    return found
