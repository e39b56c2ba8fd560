"""Copies of kernel modules with a fault in them: what a checker must find."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from unittest import mock


def planted(
    module: ModuleType,
    folder: Path,
    *changes: tuple[str, str],
    parts: Sequence[ModuleType] = (),
) -> ModuleType:
    """A copy of a module in which each `old` text, found once or more, is `new`.

    Args:
        module: to copy; its own stays as it is.
        folder: to write the copy to, for Triton reads a kernel's source from its file.
        changes: (old, new).
        parts: modules that it imports from, which are copied and changed, too; each comes after
            those of them that it imports from itself.
    """
    sources = []
    for each in (*parts, module):
        assert each.__file__ is not None
        sources.append(Path(each.__file__).read_text())
    copies: dict[str, ModuleType] = {}
    for old, _ in changes:
        assert any(old in source for source in sources), f"{old!r} is not in {module.__name__}"
    with mock.patch.dict(sys.modules):
        for each, source in zip((*parts, module), sources, strict=True):
            for old, new in changes:
                source = source.replace(old, new)
            for name, copy in copies.items():
                source = source.replace(f"from {name} import", f"from {copy.__name__} import")
            copies[each.__name__] = _loaded(each, source, folder)
    return copies[module.__name__]


def _loaded(module: ModuleType, source: str, folder: Path) -> ModuleType:
    name = f"planted_{module.__name__.rsplit('.', 1)[1]}_{len(sys.modules)}"
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    sys.modules[name] = copy
    spec.loader.exec_module(copy)
    return copy
