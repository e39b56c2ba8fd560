"""Kernels are compiled in threads, as their launches would compile them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

COMPILE = """
import threading
import torch
import triton
import triton.language as tl
from triton.runtime.driver import driver
from weft.kernels.gpu.runtime.absent import NoDevice
from weft.kernels.gpu.runtime.ahead import compile_ahead
from weft.kernels.gpu.runtime.compilations import Compilations
from weft.kernels.gpu.runtime.launches import decided

@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)

@triton.jit
def broken(x, BLOCK: tl.constexpr):
    tl.store(x, tl.arange(0, 3 * BLOCK))

def launch(device="meta"):
    x = torch.empty(64, device=device)
    for n, block in ((16, 64), (32, 64), (17, 64), (17, 32), (17, 32)):
        double[(1,)](x=x, n=n, BLOCK=block)

def both():
    broken[(1,)](x=torch.empty(64, device="meta"), BLOCK=8)
    launch()

driver.set_active(NoDevice("sm_90"))
threads, told = set(), []
listener = triton.knobs.compilation.listener

def note(**details):
    threads.add(threading.current_thread().name)

triton.knobs.compilation.listener = note
done = compile_ahead(both, threads=2, progress=lambda *it: told.append(it), share=(1, 2))
triton.knobs.compilation.listener = listener
print(done.kernels, done.compiled, *done.failed, told[-1][0], told[-1][1], len(told))

counter = Compilations(quiet=True)
with decided(lambda name: "compile"):
    launch("cpu")
print(counter.count)
print(threading.current_thread().name in threads)

def stops():
    double[(1,)](x=torch.empty(64, device="meta"), n=17, BLOCK=16)
    raise ValueError("an op refuses its arguments")

try:
    compile_ahead(stops, threads=2)
except ValueError as error:
    print(error)
print(counter.count)
"""


def compiled(cache: Path) -> list[str]:
    """The lines of the script, in a process of its own."""
    file = cache.with_suffix(".py")
    file.write_text(COMPILE)  # Triton reads a kernel's source from its file
    done = subprocess.run(
        [sys.executable, "-P", str(file)],
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_launches_find_what_was_compiled_and_a_failure_stops_nothing(tmp_path: Path) -> None:
    """A launch that raises leaves nothing behind that anybody waits for."""
    launched = ["0", "False", "an op refuses its arguments", "0"]
    assert compiled(tmp_path / "cache") == ["4 3 broken 4 4 4", *launched]
    assert compiled(tmp_path / "cache") == ["4 0 broken 4 4 4", *launched]
