"""The prose of the repository: documents, docstrings, comments, help texts and error messages."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

RELATIVE = {"that", "which", "what", "whose", "who", "whom"}

BANNED = (
    *("manieth", "to be had", "gone on with", "goes on with", "dealt out", "be it", "is told"),
    *("are told", "one after the other", "of its own accord", "is all one"),
    *("in the place of", "what is not", "what there is", "as it comes", "said at once"),
    *("of one's own", "that which", "those that", "so many"),
)
"""Phrases that make a reader stop: CONTRIBUTING.md says what to write."""

_BANNED = re.compile(
    rf"\b({'|'.join(map(re.escape, BANNED))})\b(?! (more|fewer|times))|\b(has|have) not(?=[.,;:])",
    re.IGNORECASE,
)

OPENINGS = ("Of", "As", "What", "Which", "That", "Those", "Whether", "By", "Who", "Whose", "So")
"""Words that no docstring begins with: it begins with a verb or a noun."""

_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")


@dataclass(frozen=True)
class Prose:
    """A text for people.

    Attributes:
        where: file, and line where one is known.
        text: without code, tables and links.
    """

    where: str
    text: str


def plain(text: str) -> str:
    """A Markdown text without code, tables, headings and the targets of links."""
    text = re.sub(r"```.*?```", " ", text, flags=re.DOTALL)
    text = re.sub(r"^\s*\|.*$|^\s*#.*$|^    .*$", " ", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "X", text)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def documents() -> list[Path]:
    """Every Markdown file that readers of the repository get."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def modules(*folders: str) -> Iterator[Path]:
    """Every Python file of these folders at the top of the repository."""
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def docstrings(path: Path) -> Iterator[Prose]:
    """The docstrings of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                line = node.body[0].lineno
                yield Prose(f"{path.relative_to(ROOT)}:{line}", text)


def comments(path: Path) -> Iterator[Prose]:
    """The comments of a file."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("# ")
            yield Prose(f"{path.relative_to(ROOT)}:{token.start[0]}", text)


def messages(path: Path) -> Iterator[Prose]:
    """The texts of the errors that a file raises."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            parts = [
                part.value
                for part in ast.walk(node.exc)
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            ]
            yield Prose(f"{path.relative_to(ROOT)}:{node.lineno}", " ".join(parts))


def banned(prose: Iterable[Prose]) -> list[str]:
    """Each banned phrase, and where it is."""
    return [
        f"{each.where}: {found[0]!r}"
        for each in prose
        for found in _BANNED.finditer(re.sub(r"\s+", " ", plain(each.text)))
    ]


def rates(text: str) -> tuple[float, float]:
    """Relative words, and the word "of", per 1,000 words of a text."""
    words = [word.lower() for word in _WORD.findall(plain(text))]
    count = max(1, len(words))
    relative = sum(word in RELATIVE for word in words)
    return 1000 * relative / count, 1000 * words.count("of") / count
