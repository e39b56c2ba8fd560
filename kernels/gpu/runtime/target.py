"""The GPU that Triton compiles for."""

from __future__ import annotations

import triton
from triton.runtime.driver import driver


def target() -> tuple[str, int]:
    """Return Triton's target: ("cuda", 90) for sm_90, ("hip", 0), ("", 0) in the interpreter."""
    if triton.knobs.runtime.interpret:
        return ("", 0)
    found = driver.active.get_current_target()
    return (found.backend, int(found.arch) if found.backend == "cuda" else 0)
