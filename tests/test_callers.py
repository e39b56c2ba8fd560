"""Each kernel is reached from a model, a route or a command, or has a reason why it is not yet.
Each setting is read.

The walk follows names: from every function in models/ and serving/, through the functions, classes
and constants that each one uses. The checks (`weft check`), the interpreters and the oracles use
every kernel, so they do not count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path

from weft.serving.config.settings import EngineConfig, ServerConfig

ROOT = Path(__file__).parent.parent
APART = ("weft.kernels.check", "weft.kernels.interpreter", "weft.kernels.reference")

LATENT = "models with latent attention are not loaded yet"
NO_SIGNAL = "ops put with a signal; the checker's tests plant this one as a fault"
TUNED = "for a machine with GPUs: writes the tuning file, which serving reads"
WAITING = {
    "weft.kernels.gpu.attention.mla": LATENT,
    "weft.kernels.gpu.attention.sequence_parallel": "with --cp, prefill gathers the queries",
    "weft.kernels.gpu.collectives.all_reduce_norm": "no GPU has shown that it beats two kernels",
    "weft.kernels.gpu.matmul.decomposed": "compared with fused products on a machine with GPUs",
    "weft.kernels.gpu.rowwise.activation": "fp8 products are not served yet",
    "weft.kernels.gpu.runtime.launches": "records launches for the checks and for tuning",
    "weft.kernels.gpu.runtime.nvshmem.put": NO_SIGNAL,
    "weft.kernels.gpu.runtime.nvshmem._put": NO_SIGNAL,
    "weft.kernels.gpu.tuning.clock": TUNED,
    "weft.kernels.gpu.tuning.ops": TUNED,
    "weft.kernels.gpu.tuning.search": TUNED,
    "weft.kernels.gpu.tuning.table": TUNED,
    "weft.kernels.tpu.attention.distributed_decode": "--cp is refused with --backend jax",
    "weft.kernels.tpu.collectives.all_gather": "products gather; XLA gathers the rest",
    "weft.kernels.tpu.collectives.all_reduce": "XLA reduces decodes",
    "weft.kernels.tpu.collectives.all_to_all": "XLA exchanges tokens with experts",
    "weft.kernels.tpu.collectives.permute": "the smallest example of a remote copy",
}
"""Modules, or functions, that serving does not reach in whole, and why."""

Place = tuple[str, str]
"""A module, and a name in it."""


class Code:
    """The source below some folders, and what each definition uses.

    Args:
        root: the folder of the packages.
        folders: packages in it; a module's name begins with "weft.".
    """

    def __init__(self, root: Path, folders: tuple[str, ...]) -> None:
        trees = {}
        for folder in folders:
            for path in (root / folder).rglob("*.py"):
                parts = path.relative_to(root).with_suffix("").parts
                trees[".".join(("weft", *parts)).removesuffix(".__init__")] = ast.parse(
                    path.read_text()
                )
        self.modules = set(trees)
        self.definitions = {name: dict(_definitions(tree)) for name, tree in trees.items()}
        self._imports = {name: dict(self._imported(tree)) for name, tree in trees.items()}

    def _imported(self, tree: ast.Module) -> Iterator[tuple[str, tuple[str, str | None]]]:
        """Yield each local name of an import, also within functions, with its module and name."""
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    found = (whole, None) if whole in self.modules else (node.module, alias.name)
                    yield alias.asname or alias.name, found

    def _resolve(self, module: str, name: str) -> tuple[str, str | None] | None:
        if name in self.definitions.get(module, ()):
            return module, name
        found = self._imports.get(module, {}).get(name)
        if found is None or found[1] is None:
            return found
        return self._resolve(found[0], found[1]) if found != (module, name) else None

    def uses(self, place: Place) -> Iterator[Place]:
        """Yield the definitions that one uses."""
        module, name = place
        for node in ast.walk(self.definitions[module][name]):
            found = None
            if isinstance(node, ast.Name):
                found = self._resolve(module, node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                of = self._resolve(module, node.value.id)
                found = self._resolve(of[0], node.attr) if of and of[1] is None else None
            if found and found[1] is not None:
                yield found[0], found[1]

    def reached(self, roots: tuple[str, ...]) -> set[Place]:
        """Return all definitions that those in some packages use, directly or not."""
        todo = [
            (module, name)
            for module, names in self.definitions.items()
            for name in names
            if module.startswith(roots)
        ]
        seen = set(todo)
        while todo:
            for place in self.uses(todo.pop()):
                if place not in seen and not place[0].startswith(APART):
                    seen.add(place)
                    todo.append(place)
        return seen


def _definitions(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield from ((each.id, node) for each in ast.walk(target)
                            if isinstance(each, ast.Name))  # fmt: skip


def unreached(root: Path, waiting: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return kernels that nothing reaches and nobody excuses, and excuses that nothing needs."""
    code = Code(root, ("kernels", "models", "serving"))
    reached = code.reached(("weft.models", "weft.serving"))
    missed, needed = [], set()
    for module, names in code.definitions.items():
        if not module.startswith("weft.kernels") or module.startswith(APART):
            continue
        for name, node in names.items():
            if isinstance(node, ast.Assign | ast.AnnAssign) or (module, name) in reached:
                continue
            excuse = {module, f"{module}.{name}"} & waiting.keys()
            needed |= excuse
            if not excuse:
                missed.append(f"{module}.{name}")
    return missed, sorted(waiting.keys() - needed)


def test_each_kernel_has_a_caller_or_a_reason() -> None:
    missed, needless = unreached(ROOT, WAITING)
    assert missed == [], "call it, delete it, or add it to WAITING with a reason"
    assert needless == [], "serving reaches all of it: take it out of WAITING"


def test_a_kernel_without_a_caller_is_found(tmp_path: Path) -> None:
    """Used, used through another module, used by a check only, and not used."""
    for name, text in {
        "kernels/ops.py": "def used(): inner()\ndef inner(): 1\ndef alone(): inner()\n",
        "kernels/more.py": "def through(): 1\ndef checked(): 1\n",
        "kernels/check/ops.py": "from weft.kernels.more import checked\ndef check(): checked()\n",
        "models/model.py": "from weft.kernels import more\ndef step():\n"
        "    from weft.kernels.ops import used as run\n    run(); more.through()\n",
        "serving/api.py": "from weft.kernels.check.ops import check\ndef main(): check()\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    alone = ["weft.kernels.more.checked", "weft.kernels.ops.alone"]
    assert sorted(unreached(tmp_path, {})[0]) == alone
    excused = {alone[0]: "a reason", "weft.kernels.ops": "another", "weft.kernels.gone": "none"}
    assert unreached(tmp_path, excused) == ([], ["weft.kernels.gone"])


def test_each_setting_has_a_reader() -> None:
    """A setting without effect would be a lie in --help. Properties of the settings read some."""

    def attributes(tree: ast.AST) -> set[str]:
        return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}

    trees = {path: ast.parse(path.read_text()) for path in (ROOT / "serving").rglob("*.py")}
    read = set().union(
        *(
            attributes(tree)
            for path, tree in trees.items()
            if "config" not in path.relative_to(ROOT).parts
        )
    )
    for node in ast.walk(trees[ROOT / "serving/config/settings.py"]):
        if isinstance(node, ast.FunctionDef) and node.name in read:
            read |= attributes(node)
    settings = {each.name for kind in (EngineConfig, ServerConfig) for each in fields(kind)}
    assert len(settings) > 50
    assert settings - read == set()
