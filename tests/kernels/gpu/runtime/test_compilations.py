"""Kernels that are compiled while a server serves are counted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

COUNT = """
import torch
import triton
import triton.language as tl
from weft.kernels.check.aot import compiling
from weft.kernels.gpu.runtime.compilations import Compilations

@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)

x = torch.empty(64)
with compiling("sm_90") as launches:
    double[(1,)](x=x, n=16, BLOCK=64)
    counter = Compilations()
    found = []
    for n, block in ((16, 64), (32, 64), (17, 64), (17, 32), (17, 32)):
        double[(1,)](x=x, n=n, BLOCK=block)
        found.append(counter.count)
    counter.close()
    double[(1,)](x=x, n=17, BLOCK=16)
    assert not [each.result for each in launches if isinstance(each.result, Exception)]
print(*found, counter.count)
"""


def count(cache: Path) -> list[int]:
    """The count after each launch, in a process of its own."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    file = cache.with_suffix(".py")
    file.write_text(COUNT)  # Triton reads a kernel's source from its file
    command = [sys.executable, "-P", str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [int(each) for each in done.stdout.split()]


def test_each_new_variant_counts_once_and_a_cached_one_never(tmp_path: Path) -> None:
    """A number divisible by 16 is a variant of its own, and so is each constant."""
    assert count(tmp_path / "cache") == [0, 0, 1, 2, 2, 2]
    assert count(tmp_path / "cache") == [0, 0, 0, 0, 0, 0]
