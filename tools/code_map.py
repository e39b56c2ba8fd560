"""Writes docs/code-map.md: one line for each module, taken from the module's docstring.

python tools/code_map.py          # write the file
python tools/code_map.py --check  # exit with 1 if the file is out of date
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/code-map.md"

FOLDERS = {
    "weft": "the package: version, errors, and the links to the other folders",
    "serving/cli": "the commands",
    "serving": "the Python class",
    "serving/api": "HTTP",
    "serving/batch": "files of requests",
    "serving/engine": "scheduling, and text in and out",
    "serving/executor": "ranks, on one node or several",
    "serving/config": "settings and logs",
    "models": "what a model is, and running it",
    "kernels": "the arithmetic and the communication",
    "tools": "programs for people who work on weft",
}
"""The sections, in the order that data takes. A folder's modules go to its longest match."""

INTRODUCTION = """# Code map

One line for each module, in the order that the data takes: from the command line to the kernels.
Imports run down this page only. The lines come from the modules themselves: after you add or move a
module, run `make code-map`.

[Architecture](architecture.md) follows one request through these files. `tests/` mirrors
the folders; `benchmarks/`, `deploy/` and `helm/` stand beside them.
"""


def modules(root: Path = ROOT) -> Iterator[Path]:
    """Every module with a docstring or code, relative to `root`, in order of its name."""
    for top in ("weft", "serving", "models", "kernels", "tools"):
        # Links are not followed: weft/serving is serving.
        yield from sorted(
            path.relative_to(root) for path in (root / top).rglob("*.py") if path.stat().st_size
        )


def first_line(source: str) -> str:
    """The first line of a module's docstring, without its last mark."""
    text = ast.get_docstring(ast.parse(source)) or ""
    return text.partition("\n")[0].rstrip(".:")


def section(path: Path) -> str:
    """The key of `FOLDERS` that a module belongs to."""
    return max((name for name in FOLDERS if path.is_relative_to(name)), key=len)


def page(root: Path = ROOT) -> str:
    """The whole document."""
    lines: dict[str, list[str]] = {name: [] for name in FOLDERS}
    for path in modules(root):
        name = section(path)
        shown = path.relative_to(name).as_posix()
        line = first_line((root / path).read_text())
        lines[name].append(f"| [{shown}](../{path.as_posix()}) | {line} |")
    parts = [INTRODUCTION]
    for name, about in FOLDERS.items():
        head = f"## {name}/: {about}\n\n| file | |\n| --- | --- |"
        parts.append("\n".join([head, *lines[name]]) + "\n")
    return "\n".join(parts)


def main(arguments: list[str]) -> int:
    """Write the page, or with `--check` compare it; the exit status."""
    if arguments == ["--check"]:
        return int(not PAGE.exists() or PAGE.read_text() != page())
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
