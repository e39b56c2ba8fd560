"""Kernels for GPUs, in Triton."""

from __future__ import annotations

OLDEST_TRITON_FOR_AMD = (3, 8)
"""Triton 3.6 and 3.7 do not compile all kernels for AMD: a choice between an argument's pointer and
one from memory ends in a failed assertion."""


def lacks_triton_for_amd() -> str:
    """Return what is wrong with the installed Triton for AMD's GPUs; empty if nothing is."""
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) >= OLDEST_TRITON_FOR_AMD:
        return ""
    oldest = ".".join(map(str, OLDEST_TRITON_FOR_AMD))
    return f"AMD's GPUs need Triton {oldest} or newer; {triton.__version__} is installed"
