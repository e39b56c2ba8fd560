"""Both ways that a CPU kernel can run: compiled, and with torch's operators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from weft.kernels.cpu import native


@contextmanager
def compiled_kernels(use: bool) -> Iterator[None]:
    """Within, the compiled kernels are used or not; skips the test where there are none."""
    if use and not native.supports(torch.bfloat16):
        pytest.skip("no compiled kernels for this CPU")
    with pytest.MonkeyPatch.context() as patch:
        if not use:
            patch.setattr(native, "library", lambda: None)
        yield
