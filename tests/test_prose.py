"""The English stays plain: no banned phrases, docstrings that begin well, few relative clauses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.prose import (
    OPENINGS,
    ROOT,
    Prose,
    banned,
    comments,
    docstrings,
    documents,
    messages,
    modules,
    plain,
    rates,
)

SOURCES = ("weft", "serving", "models", "kernels", "tools")


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_document_is_plain(path: Path) -> None:
    text = path.read_text()
    assert banned([Prose(path.name, text)]) == []
    relative, of = rates(text)
    assert relative <= 20, f"{relative:.1f} relative words per 1,000"
    assert of <= 22, f"'of' {of:.1f} times per 1,000 words"


GENERATED = ROOT / "docs/benchmarks/cpu.md"  # benchmarks/vs_peers.py writes it, commands and all


@pytest.mark.parametrize(
    "path",
    [path for path in documents() if path != GENERATED],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_lines_of_a_document_fit(path: Path) -> None:
    text = path.read_text()
    prose = re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL)
    long = [
        f"{path.name}:{number}"
        for number, line in enumerate(prose.splitlines(), 1)
        if len(line) > 100 and not line.lstrip().startswith(("|", "![", "[")) and "](" not in line
    ]
    assert long == []


def test_code_has_no_banned_phrases() -> None:
    found = [
        phrase
        for path in modules(*SOURCES)
        for phrase in banned([*docstrings(path), *comments(path), *messages(path)])
    ]
    assert found == []


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    opening = re.compile(rf"({'|'.join(OPENINGS)})\b")
    found = [
        f"{each.where}: {each.text.splitlines()[0]}"
        for path in modules(*SOURCES)
        for each in docstrings(path)
        if opening.match(each.text)
    ]
    assert found == []


@pytest.mark.parametrize("folder", SOURCES)
def test_docstrings_of_a_folder_are_plain(folder: str) -> None:
    text = "\n\n".join(each.text for path in modules(folder) for each in docstrings(path))
    relative, of = rates(text)
    assert relative <= 20, f"{relative:.1f} relative words per 1,000"
    assert of <= 28, f"'of' {of:.1f} times per 1,000 words"


@pytest.mark.parametrize(
    "text",
    ["What is not to be had is refused.", "A step is dealt\nout.", "It takes so many tokens."],
)
def test_a_banned_phrase_is_found(text: str) -> None:
    assert banned([Prose("here", text)])


def test_code_and_tables_are_not_prose() -> None:
    text = "A sentence.\n\n| so many |\n\n```\nso many\n```\n`so many`"
    assert banned([Prose("here", text)]) == []
    assert "so many" not in plain(text)
