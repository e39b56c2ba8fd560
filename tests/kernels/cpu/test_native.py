"""The compiled kernels exist wherever they can, and share torch's threads."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from weft.kernels.cpu import native

CSRC = Path(native.__file__).parent / "csrc"


def test_they_are_built_where_there_is_a_compiler() -> None:
    if shutil.which("g++") is None or not torch.cpu._is_avx2_supported():
        pytest.skip("nothing to build them with, or for")
    assert native.library() is not None
    assert native.supports(torch.bfloat16)
    assert not native.supports(torch.float32)


def test_a_cpu_without_the_instructions_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: False)
    native.library.cache_clear()
    try:
        assert native.library() is None
        with pytest.raises(RuntimeError, match="compiled CPU kernels are not available"):
            native.kernels()
    finally:
        native.library.cache_clear()


def test_the_version_is_that_of_the_sources() -> None:
    (version,) = re.findall(r"WEFT_VERSION = (\d+);", (CSRC / "weft.h").read_text())
    assert int(version) == native.VERSION


@pytest.mark.parametrize(
    ("source", "has"),
    [
        ("void weft_pack() {}", "version 0, without weft_weight_rows, "),
        ("int weft_version() { return 999; }", "version 999, without weft_pack, "),
    ],
)
def test_a_library_of_other_sources_is_refused(
    source: str, has: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("gcc") is None or not torch.cpu._is_avx2_supported():
        pytest.skip("nothing to build it with, or for")
    old = tmp_path / "old.so"
    build = ["gcc", "-shared", "-fPIC", "-x", "c", "-o", str(old), "-"]
    subprocess.run(build, input=source, text=True, check=True)
    monkeypatch.setattr(native, "FILE", old)
    native.library.cache_clear()
    try:
        with pytest.raises(RuntimeError, match=f"old.so was built from other sources: .* {has}"):
            native.library()
    finally:
        native.library.cache_clear()


def test_they_run_in_the_threads_of_torch() -> None:
    """A second pool would compete with the first, with both spinning."""
    if not native.supports(torch.bfloat16):
        pytest.skip("no compiled kernels for this CPU")
    script = """
import os, torch
from weft.kernels.cpu.linear import NativeLinear
torch.set_num_threads(3)
a = torch.randn(512, 512)
a @ a
torch.relu(torch.randn(1 << 22))
before = len(os.listdir("/proc/self/task"))
layer = NativeLinear(torch.randn(512, 512).bfloat16())
layer(torch.randn(4, 512).bfloat16())
print(before, len(os.listdir("/proc/self/task")))
maps = open("/proc/self/maps").read()
print(len({line.split()[-1] for line in maps.splitlines() if "gomp" in line or "libomp" in line}))
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=400
    )
    before, after, runtimes = map(int, result.stdout.split())
    assert before == after
    assert runtimes == 1


@pytest.mark.parametrize(
    "structure",
    ["Matrix", "Norm", "Rows", "RopeStep", "AttentionStep", "Batch", "AttentionLayer", "MlpLayer"],
)
def test_structures_are_those_of_the_header(structure: str) -> None:
    """Same names, same order, same sizes: nothing else checks data that goes through ctypes."""
    header = (CSRC / "weft.h").read_text()
    match = re.search(rf"struct {structure} {{(.*?)\n}};", header, re.DOTALL)
    assert match is not None
    declared: list[tuple[str, int]] = []
    for line in match[1].splitlines():
        code = line.split("//")[0].strip().rstrip(";")
        if not code:
            continue
        kind, *names = re.split(r"[ ,]+", code.removeprefix("const ").replace("weft::", ""))
        for name in names:
            size = 8 if kind == "int64_t" else 4  # int32_t, float, Format
            if name.startswith("*") or kind.endswith("*"):
                size = 8
            elif kind == "Norm":
                size = ctypes.sizeof(native.Norm)
            declared.append((name.lstrip("*"), size))
    fields = getattr(native, structure)._fields_
    assert [(name, ctypes.sizeof(kind)) for name, kind in fields] == declared


def test_constants_are_those_of_the_sources() -> None:
    source = (CSRC / "vector.h").read_text() + (CSRC / "attention.cpp").read_text()
    for name, value in (
        ("COLUMNS", native.COLUMNS),
        ("CODES", native.EXPONENT_CODES),
        ("MAX_DIM", native.MAX_HEAD_DIM),
        ("TILE_ROWS", native.MAX_GROUP),
    ):
        assert f"constexpr int {name} = {value};" in source, name
