"""Workers of kernels/check/tpu whose kernels have faults.

    {"faults": [["module", "old", "new"]], "case": "all_gather x=4", "mode": "eager"}

A job is done by a process of its own, forked from one that has imported jax. Modules are given from
the imported ones to those that import them.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import sys

from jax.experimental.pallas import tpu as _  # noqa: F401 - takes long


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


def work(line: str) -> None:
    """Do a job, and answer it."""
    for name, old, new in json.loads(line)["faults"]:
        plant(name, old, new)
    from weft.kernels.check.tpu.worker import main

    sys.stdin = io.StringIO(line)
    main()


if __name__ == "__main__":
    for line in sys.stdin:
        if not (child := os.fork()):
            try:
                work(line)
            finally:
                os._exit(0)  # whatever threads a deadlock has left
        os.waitpid(child, 0)
