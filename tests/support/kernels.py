"""Both ways that a CPU kernel can run: compiled, and with torch's operators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from weft.kernels.cpu import native


def int4_rows(x: Tensor) -> Tensor:
    """Return bfloat16 rows [..., K] as compiled products with int4 read them, in float64.

    With AVX2, 32 numbers are integers times a scale, as in llama.cpp's Q8_0.
    """
    if native.BUILD != "_native_avx2":
        return x.double()
    groups = pad(x.float(), (0, -x.shape[-1] % native.GROUP)).unflatten(-1, (-1, native.GROUP))
    largest = groups.abs().amax(dim=-1, keepdim=True)
    integers = torch.where(largest > 0, groups * (127 / largest), 0).round()
    return (integers.double() * (largest / 127)).flatten(-2)[..., : x.shape[-1]]


@contextmanager
def compiled_kernels(use: bool) -> Iterator[None]:
    """Within, the compiled kernels are used or not; skips the test where there are none."""
    if use and not native.supports(torch.bfloat16):
        pytest.skip("no compiled kernels for this CPU")
    with pytest.MonkeyPatch.context() as patch:
        if not use:
            patch.setattr(native, "library", lambda: None)
        yield
