"""Copies of kernel modules with a fault in them: what a checker must find."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def planted(module: ModuleType, folder: Path, *changes: tuple[str, str]) -> ModuleType:
    """A copy of a module in which each `old` text, found once or more, is `new`.

    Args:
        module: to copy; its own stays as it is.
        folder: to write the copy to, for Triton reads a kernel's source from its file.
        changes: (old, new).
    """
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    for old, new in changes:
        assert old in source, f"{old!r} is not in {module.__name__}"
        source = source.replace(old, new)
    name = f"planted_{module.__name__.rsplit('.', 1)[1]}_{len(sys.modules)}"
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy
