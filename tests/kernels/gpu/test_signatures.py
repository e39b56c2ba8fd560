"""Signatures that a human can check: few parameters, and launches that name every argument."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from weft.kernels import gpu

MOST = 24
"""Parameters of a kernel, or of a function that kernels call."""

RESERVED = {"values", "type"}
"""Attributes of Triton's own tuples: a member of that name cannot be read in a kernel."""

SPECIALIZED = {"rank", "peer"}
"""Numbers that must not be in a tuple, whose members Triton always specialises: peers.py."""

FOLDER = Path(gpu.__path__[0])
SOURCES = {str(path.relative_to(FOLDER)): path.read_text() for path in FOLDER.rglob("*.py")}


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """The functions of a module with @triton.jit."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(
            ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list
        ):
            yield node


def launches(tree: ast.Module, kernels: set[str]) -> Iterator[ast.Call]:
    """Calls `kernel[grid](...)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            called = node.func.value
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in kernels:
                yield node


def tuples(tree: ast.Module) -> Iterator[ast.ClassDef]:
    """NamedTuples of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and "NamedTuple" in map(ast.unparse, node.bases):
            yield node


def findings(sources: Mapping[str, str]) -> list[str]:
    """What a reader could not check, in modules by their names."""
    trees = {name: ast.parse(source) for name, source in sources.items()}
    kernels = {function.name for tree in trees.values() for function in functions(tree)}
    found = []
    for name, tree in trees.items():
        for function in functions(tree):
            arguments = function.args
            count = len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs])
            if count > MOST:
                found.append(f"{name}: {function.name} takes {count} arguments; at most {MOST}")
        for launch in launches(tree, kernels):
            where = f"{name}:{launch.lineno}: {ast.unparse(launch.func)}"
            if launch.args:
                found.append(f"{where} is launched with positional arguments")
            if any(keyword.arg is None for keyword in launch.keywords):
                found.append(f"{where} is launched with **")
        for group in tuples(tree):
            members = {
                member.target.id
                for member in group.body
                if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name)
            }
            found += [
                f"{name}: {group.name} has a member {member}"
                for member in sorted(members & (RESERVED | SPECIALIZED))
            ]
    return found


def test_kernels_have_few_parameters_and_are_launched_by_keywords() -> None:
    assert findings(SOURCES) == []


def test_kernels_and_launches_are_found() -> None:
    trees = [ast.parse(source) for source in SOURCES.values()]
    kernels = {function.name for tree in trees for function in functions(tree)}
    assert kernels >= {"multiply_gathered", "push_chunks", "count_calls", "quiet"}
    launched = [ast.unparse(launch.func) for tree in trees for launch in launches(tree, kernels)]
    assert len(launched) > 60
    assert "signals.count_calls[1,]" in launched


KERNEL = "@triton.jit\ndef kernel({}):\n    pass\n"
LAUNCH = KERNEL.format("x, y") + "kernel[(1,)]({})\n"


@pytest.mark.parametrize(
    ("source", "finding"),
    [
        (
            KERNEL.format(", ".join(f"x{i}" for i in range(MOST + 1))),
            f"a.py: kernel takes {MOST + 1} arguments; at most {MOST}",
        ),
        (LAUNCH.format("1, y=2"), "a.py:4: kernel[1,] is launched with positional arguments"),
        (LAUNCH.format("*(1, 2)"), "a.py:4: kernel[1,] is launched with positional arguments"),
        (LAUNCH.format("**{'x': 1}, y=2"), "a.py:4: kernel[1,] is launched with **"),
        ("class Cache(NamedTuple):\n    values: int\n", "a.py: Cache has a member values"),
        ("class Peers(NamedTuple):\n    rank: int\n", "a.py: Peers has a member rank"),
    ],
)
def test_a_planted_fault_is_found(source: str, finding: str) -> None:
    assert findings({"a.py": LAUNCH.format("x=1, y=2")}) == []
    assert findings({"a.py": source}) == [finding]
