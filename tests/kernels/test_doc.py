"""The op that docs/kernels.md writes is run and raced; so is the fault that it plants."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOC = (Path(__file__).parents[2] / "docs/kernels.md").read_text()
FILES = dict(re.findall(r"<!-- test: (\S+) -->\n```python\n(.*?)```", DOC, flags=re.DOTALL))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The doc's files, side by side."""
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
    return tmp_path


def found(folder: Path) -> str:
    """What `python check_all_to_all.py` prints."""
    done = subprocess.run(
        [sys.executable, "check_all_to_all.py"],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_call_of_the_doc_works(folder: Path) -> None:
    # The two ranks share one pipe: unbuffered, a line's end is written apart from the line.
    done = subprocess.run(
        [sys.executable, "call_all_gather_matmul.py"],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONUNBUFFERED": ""},
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0: [12, 16]", "rank 1: [12, 16]"]


def test_the_op_of_the_doc_is_right_and_free_of_races(folder: Path) -> None:
    assert found(folder) == ""


def test_the_fault_of_the_doc_is_found(folder: Path) -> None:
    path = folder / "all_to_all.py"
    lines = path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if not line.strip().startswith("wait(")]
    assert len(kept) == len(lines) - 1
    path.write_text("".join(kept))
    findings = found(folder)
    assert "all_to_all.buffer[" in findings
    assert "no order between" in findings
    assert "numbers differ from the oracle's" in findings


def test_the_op_of_the_doc_is_about_fifty_lines() -> None:
    """What is not the docstring or blank."""
    code = FILES["all_to_all.py"].split('"""', 2)[2]
    assert len([line for line in code.splitlines() if line.strip()]) <= 60


def test_the_doc_names_files_and_commands_that_are_there() -> None:
    root = Path(__file__).parents[2]
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)\)", DOC)
    assert links
    for link in links:
        assert (root / "docs" / link).exists(), link
