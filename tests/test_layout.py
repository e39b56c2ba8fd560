"""The rules that keep the layout readable: imports run one way, without cycles, and lightly."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Imports run down this list only. `weft` itself (errors, version) is a leaf.
LAYERS = (
    "serving.cli",
    "serving.llm",
    "serving.api",
    "serving.batch",
    "serving.engine",
    "serving.executor",
    "serving.config",
    "models",
    "kernels",
)
HEAVY = {"torch", "transformers", "fastapi", "pydantic", "uvicorn", "zmq", "numpy", "jax", "rich"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts if parts[0] == "weft" else ("weft", *parts))
    return name.removesuffix(".__init__")


MODULES = {
    module_name(path): path
    for folder in ("weft", "serving", "models", "kernels")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports(tree: ast.AST, *, top_level: bool) -> Iterator[str]:
    """Names of the weft modules that a module imports.

    With `top_level`, only what is imported when the module itself is: no function bodies and
    nothing under TYPE_CHECKING.
    """
    for node in ast.iter_child_nodes(tree):
        if top_level and (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_type_checking(node)
        ):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("weft"))
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("weft"):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module
        yield from imports(node, top_level=top_level)


def layer(module: str) -> int | None:
    """The place of a module's layer in `LAYERS`; None for `weft` itself and empty packages."""
    inside = module.removeprefix("weft.") + "."
    return next((i for i, name in enumerate(LAYERS) if inside.startswith(f"{name}.")), None)


def upward_imports(modules: Mapping[str, str]) -> list[str]:
    """Each import that runs up the layers, of modules by name and source."""
    return [
        f"{name} imports {imported}"
        for name, source in modules.items()
        for imported in imports(ast.parse(source), top_level=False)
        for above, here in [(layer(imported), layer(name))]
        if above is not None and here is not None and above < here
    ]


def test_every_module_is_in_a_layer() -> None:
    outside = [name for name in MODULES if layer(name) is None]
    own = {"weft", "weft.__main__", "weft.errors", "weft.version", "weft.serving"}
    assert set(outside) == own


def test_imports_run_down_the_layers() -> None:
    assert upward_imports({name: path.read_text() for name, path in MODULES.items()}) == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("weft.kernels.cpu.native", "from weft.models.interface import StepInput"),
        ("weft.serving.config.logs", "def f():\n    import weft.serving.executor.loading"),
        ("weft.serving.batch.job", "from weft.serving.api import state"),
        ("weft.serving.engine.core", "from weft.serving import cli"),
    ],
)
def test_an_upward_import_is_found(name: str, source: str) -> None:
    assert len(upward_imports({name: source})) == 1


def test_no_import_cycles() -> None:
    graph = {
        name: set(imports(ast.parse(path.read_text()), top_level=True)) - {name, "weft"}
        for name, path in MODULES.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("import cycle: " + " -> ".join(error.args[1]))


@pytest.mark.parametrize("statement", ["import weft", "import weft.serving.cli.main"])
def test_import_is_light(statement: str) -> None:
    """Heavy libraries load where they are used, so that `weft --version` answers at once."""
    code = f"import sys; {statement}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert loaded.returncode == 0, loaded.stderr
    assert HEAVY.isdisjoint(loaded.stdout.split())


def test_the_engine_is_started_before_http_is_imported() -> None:
    """Which takes as long as half of the engine's own imports."""
    code = "import sys; import weft.serving.api.server; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert loaded.returncode == 0, loaded.stderr
    assert (HEAVY - {"zmq"}).isdisjoint(loaded.stdout.split())


def test_each_module_can_be_imported() -> None:
    names = [name for name in MODULES if not name.endswith(".__main__")]
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    environment = os.environ | {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "ignore", "-c", code, *names]
    loaded = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert loaded.returncode == 0, loaded.stderr
