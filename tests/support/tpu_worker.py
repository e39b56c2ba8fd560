"""A worker of kernels/check/tpu whose kernels have faults: `tpu_worker.py '[["module", "old",
"new"]]'`.

The modules are given from the imported ones to those that import them.
"""

from __future__ import annotations

import importlib.util
import json
import sys


def plant(name: str, old: str, new: str) -> None:
    """Load a module with each `old` text in its source `new`."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    loader = spec.loader
    module = sys.modules.get(name) or importlib.util.module_from_spec(spec)
    source = getattr(module, "planted_source", None) or loader.get_source(name)  # type: ignore[union-attr]
    assert old in source, f"{old!r} is not in {name}"
    module.planted_source = source.replace(old, new)  # type: ignore[attr-defined]
    sys.modules[name] = module
    exec(compile(module.planted_source, spec.origin, "exec"), module.__dict__)


if __name__ == "__main__":
    for name, old, new in json.loads(sys.argv[1]):
        plant(name, old, new)
    from weft.kernels.check.tpu.worker import main

    main()
