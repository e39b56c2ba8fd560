"""The rules that keep the layout readable: imports run one way, without cycles, and lightly."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Which layers each layer may import. `weft` itself (errors, version) is a leaf.
ALLOWED = {
    "kernels": {"kernels"},
    "models": {"kernels", "models"},
    "serving": {"kernels", "models", "serving"},
}
HEAVY = {"torch", "transformers", "fastapi", "pydantic", "uvicorn", "zmq", "numpy", "jax", "rich"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts if parts[0] == "weft" else ("weft", *parts))
    return name.removesuffix(".__init__")


MODULES = {
    module_name(path): path
    for folder in ("weft", *ALLOWED)
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


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_run_from_serving_to_models_to_kernels(name: str) -> None:
    layer = name.split(".")[1] if "." in name else ""
    if layer not in ALLOWED:
        return
    for imported in imports(ast.parse(MODULES[name].read_text()), top_level=False):
        target = imported.split(".")[1] if "." in imported else ""
        assert target not in ALLOWED or target in ALLOWED[layer], f"{name} imports {imported}"


def test_no_import_cycles() -> None:
    graph = {
        name: set(imports(ast.parse(path.read_text()), top_level=True)) - {name, "weft"}
        for name, path in MODULES.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("import cycle: " + " -> ".join(error.args[1]))


def test_every_package_is_installed() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    present = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    assert listed == present


@pytest.mark.parametrize("statement", ["import weft", "import weft.serving.cli"])
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
