"""Barriers beside signals: all paths are searched, and each missing barrier is found."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from weft.errors import WeftError
from weft.kernels import gpu
from weft.kernels.check.barriers import Fences, OwnStores, Signals, count_releases

STORE = "\t@%p1 st.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };\n"
BARRIER = "\tbar.sync \t0;\n"
RELEASE = "\t@%p2 atom.global.sys.release.exch.b32 %r5, [ %rd2 + 0 ], %r6;\n"
ACQUIRE = "\t@%p2 atom.global.sys.acquire.add.u32 %r5, [ %rd2 + 0 ], %r6;\n"
AMD_RELEASE = "\tbuffer_wbl2 sc0 sc1\n\ts_waitcnt vmcnt(0)\n\tglobal_atomic_swap v0, v1, s[0:1]\n"


@pytest.mark.parametrize(
    ("assembly", "counted"),
    [
        (STORE + BARRIER + RELEASE, (1, 0)),
        (STORE + RELEASE, (1, 1)),
        (BARRIER + STORE + RELEASE, (1, 1)),
        (STORE + BARRIER + RELEASE + STORE + RELEASE, (2, 1)),
        (STORE + BARRIER + "\tst.shared.b32 [ %r1 ], %r2;\n" + RELEASE, (1, 0)),
        # jumps: past the barrier, from after it, back to after a store, from a table
        (STORE + "\t@%p3 bra $L__BB0_2;\n" + BARRIER + "$L__BB0_2:\n" + RELEASE, (1, 1)),
        (STORE + BARRIER + "\t@%p3 bra $L__BB0_2;\n$L__BB0_2:\n" + RELEASE, (1, 0)),
        (BARRIER + "$L__BB0_2:\n" + RELEASE + STORE + "\t@%p3 bra $L__BB0_2;\n", (1, 1)),
        (BARRIER + "$L__BB0_2:\n" + RELEASE + "\t@%p3 bra $L__BB0_2;\n" + STORE, (1, 0)),
        (
            BARRIER + "\tbra.uni $L__BB0_3;\n$L__BB0_2:\n" + STORE + "$L__BB0_3:\n" + RELEASE,
            (1, 0),  # nobody jumps to the store
        ),
        (
            BARRIER + "$L_brx_0: .branchtargets $L__BB0_2;\n$L__BB0_2:\n" + RELEASE,
            (1, 1),  # from anywhere
        ),
        (BARRIER + "\tret;\n}\n.func other()\n{\n" + RELEASE, (1, 1)),  # another function
        ("\ts_barrier\n\ts_cbranch_execz .LBB0_2\n.LBB0_2:\n" + AMD_RELEASE, (1, 0)),
        ("\ts_cbranch_execz .LBB0_2\n\ts_barrier\n.LBB0_2:\n" + AMD_RELEASE, (1, 1)),
        (STORE + "\t// bar.sync 0;\n" + RELEASE, (1, 1)),
        (STORE + ACQUIRE, (0, 0)),
        (STORE + RELEASE.replace(".sys", ".gpu"), (0, 0)),
        (STORE + RELEASE.replace("atom.global", "red.global"), (1, 1)),
        (STORE + "\tst.release.sys.global.u32 [ %rd2 ], %r6;\n", (1, 1)),
        (STORE + "\tfence.acq_rel.sys;\n\tst.relaxed.sys.global.u32 [ %rd2 ], %r6;\n", (1, 1)),
        ("\tglobal_store_dwordx4 v0, v[2:5], s[0:1]\n" + AMD_RELEASE, (1, 1)),
        ("\tglobal_store_dwordx4 v0, v[2:5], s[0:1]\n\ts_barrier\n" + AMD_RELEASE, (1, 0)),
        ("\tbuffer_store_dword v0, v1, s[0:3], 0 offen\n" + AMD_RELEASE, (1, 1)),
    ],
)
def test_barriers_before_releases_are_counted(assembly: str, counted: tuple[int, int]) -> None:
    assert count_releases(assembly) == counted


TTIR = """
#loc = loc("a.py":1:0)
module {
  tt.func public @kernel(%x: !tt.ptr<f32> loc("x"(#loc)), %n: i32 loc("n"(#loc))) {
BODY
    tt.return loc(#loc)
  } loc(#loc)
} loc(#loc)
"""
OPERATIONS = {
    "store": "tt.store %p, %v : tensor<8x!tt.ptr<f32>> loc(#loc)",
    "fault": "tt.store %p, %v : !tt.ptr<i32> loc(#loc)",
    "load": "%v = tt.load %p : tensor<8x!tt.ptr<f32>> loc(#loc)",
    "asm store": '%v = tt.elementwise_inline_asm "multimem.st.relaxed.sys.global [$1]" loc(#loc)',
    "asm sum": '%v = tt.elementwise_inline_asm "multimem.ld_reduce.relaxed.sys.add" loc(#loc)',
    "fence": '%f = tt.elementwise_inline_asm "{ fence.proxy.alias; }" loc(#loc)',
    "barrier": "ttg.barrier all loc(#loc)",
    "old barrier": "gpu.barrier loc(#loc)",
    "release": "%r = tt.atomic_rmw exch, release, sys, %s, %c, %t : (i32) -> i32 loc(#loc)",
    "asm release": '%r = tt.elementwise_inline_asm "st.release.sys.global.u32 [$1], 1;" loc(#loc)',
    "gpu release": "%r = tt.atomic_rmw exch, release, gpu, %s, %c, %t : (i32) -> i32 loc(#loc)",
    "put": '%r = tt.extern_elementwise %a {symbol = "nvshmemx_putmem_block"} : i32 loc(#loc)',
    "acquire": "%r = tt.atomic_rmw add, acquire, sys, %s, %c, %t : (i32) -> i32 loc(#loc)",
    "for": "scf.for %i = %a to %b step %c : i32 {",
    "while": "%r:2 = scf.while (%a = %b) : (i32) -> (i32) {",
    "if": "scf.if %c {",
    "else": "} else {",
    "do": "} do {",
    "reduce": '%r = "tt.reduce"(%v) <{axis = 0 : i32}> ({',
    "reduced": "}) : (tensor<8xf32>) -> f32 loc(#loc)",
    "end": "} loc(#loc)",
}


@pytest.mark.parametrize(
    ("body", "releases", "acquires"),
    [
        ("store, barrier, release", (1, 0), (0, 0)),
        ("store, old barrier, release", (1, 0), (0, 0)),
        ("store, barrier, release, release", (2, 0), (0, 0)),
        ("store, release", (1, 1), (0, 0)),
        ("release", (1, 1), (0, 0)),
        ("barrier, store, release", (1, 1), (0, 0)),
        ("barrier, asm store, release", (1, 1), (0, 0)),
        ("store, asm release", (1, 1), (0, 0)),
        ("store, gpu release", (0, 0), (0, 0)),
        ("store, put", (1, 1), (0, 0)),
        ("store, barrier, if, release, end", (1, 0), (0, 0)),
        ("store, if, barrier, end, release", (1, 1), (0, 0)),
        ("store, if, barrier, else, barrier, end, release", (1, 0), (0, 0)),
        ("store, if, barrier, else, load, end, release", (1, 1), (0, 0)),
        ("barrier, for, store, end, release", (1, 1), (0, 0)),
        ("barrier, for, release, store, end", (1, 1), (0, 0)),
        ("barrier, for, release, store, barrier, end", (1, 0), (0, 0)),
        ("for, store, barrier, release, end", (1, 0), (0, 0)),
        ("store, barrier, reduce, reduced, release", (1, 0), (0, 0)),
        ("acquire, barrier, load", (0, 0), (1, 0)),
        ("acquire, load", (0, 0), (1, 1)),
        ("acquire, store", (0, 0), (1, 1)),
        ("acquire, if, fault, end, barrier, load", (0, 0), (1, 0)),
        ("acquire", (0, 0), (1, 0)),
        ("acquire, while, do, acquire, end, barrier, load", (0, 0), (2, 0)),
        ("acquire, barrier, while, do, acquire, end, load", (0, 0), (2, 1)),
        ("for, load, acquire, end", (0, 0), (1, 1)),
        ("if, acquire, end, load", (0, 0), (1, 1)),
        ("acquire, if, barrier, end, load", (0, 0), (1, 1)),
    ],
)
def test_barriers_are_looked_for_on_all_ways(
    body: str, releases: tuple[int, int], acquires: tuple[int, int]
) -> None:
    code = "\n".join(f"    {OPERATIONS[name]}" for name in body.split(", "))
    found = Signals(TTIR.replace("BODY", code))
    assert (len(found.releases), len(found.bare_releases)) == releases
    assert (len(found.acquires), len(found.bare_acquires)) == acquires


def code_of(body: str) -> str:
    return TTIR.replace("BODY", "\n".join(f"    {OPERATIONS[name]}" for name in body.split(", ")))


@pytest.mark.parametrize(
    ("body", "bare"),
    [
        ("asm store, fence, barrier, release", 0),
        ("asm store, barrier, release", 1),
        ("for, asm store, end, fence, release", 0),
        ("for, asm store, fence, release, asm store, end, release", 1),
        ("for, release, asm store, end", 1),
        ("asm store, if, fence, end, release", 1),
        ("store, barrier, release", 0),
        ("asm sum, barrier, release", 0),
        ("acquire, barrier, fence, asm sum", 0),
        ("acquire, barrier, asm sum", 1),
        ("acquire, barrier, asm store, fence, release", 1),
        ("for, acquire, fence, asm sum, end", 0),
        ("for, asm sum, acquire, end", 1),
        ("acquire, barrier, load", 0),
    ],
)
def test_fences_beside_multicast_accesses(body: str, bare: int) -> None:
    assert len(Fences(code_of(body)).bare) == bare


@pytest.mark.parametrize(
    ("body", "bare"),
    [
        ("store, barrier, load", 0),
        ("store, load", 1),
        ("store, store", 0),
        ("store, store, barrier, load", 1),
        ("store, barrier, store, load", 1),
        ("store, if, barrier, end, load", 1),
        ("for, load, store, end", 0),
        ("for, store, load, end", 1),
        ("for, store, barrier, load, end", 0),
        ("fault, load", 0),
    ],
)
def test_own_stores_that_other_threads_use(body: str, bare: int) -> None:
    """Where a kernel has barriers, the order of stores matters, too."""
    assert len(OwnStores(code_of(body)).bare) == bare


def test_what_is_not_understood_is_an_error() -> None:
    with pytest.raises(WeftError, match="'} loc"):
        Signals("module {\n}\n} loc(#x) again")


def barriers() -> list[tuple[str, str, int]]:
    """Module, function and line of each tl.debug_barrier in the kernels."""
    return [
        (path.stem, kernel.name, call.lineno)
        for path in sorted(Path(gpu.__path__[0]).rglob("*.py"))
        for kernel in ast.walk(ast.parse(path.read_text()))
        if isinstance(kernel, ast.FunctionDef)
        for call in ast.walk(kernel)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "tl.debug_barrier"
    ]


WITHOUT_A_BARRIER = """
import importlib, json, os, pkgutil, sys
from pathlib import Path

import torch
import triton
import triton.language as tl

from weft.kernels import gpu
from weft.kernels.check.aot import cases, compiling, describe, launches_of
from weft.kernels.check.ops.table import named
from weft.kernels.gpu.runtime import nvshmem
from weft.kernels.gpu.runtime.peers import Peers

folder = Path(sys.argv[1])
found = pkgutil.walk_packages(gpu.__path__, "weft.kernels.gpu.")
modules = {
    name.rpartition(".")[2]: importlib.import_module(name)
    for _, name, is_folder in found
    if not is_folder
}


def drop(module, function, line):
    source = Path(modules[module].__file__).read_text().splitlines()
    assert source[line - 1].strip().startswith("tl.debug_barrier()")
    source[line - 1] = source[line - 1].replace("tl.debug_barrier()", "pass")
    (folder / f"planted_{line}.py").write_text("\\n".join(source))
    sys.path.insert(0, str(folder))
    right = getattr(modules[module], function)
    wrong = getattr(importlib.import_module(f"planted_{line}"), function)
    for one in modules.values():
        if vars(one).get(function) is right:
            setattr(one, function, wrong)


@triton.jit
def send_and_wait(x, signal, peers, numel, rank, call):
    # Ops launch these only where NVSHMEM is installed.
    at = tl.arange(0, 128)
    tl.store(x + at, 1.0)
    nvshmem.put(x.to(tl.int64), x.to(tl.int64), tl.cast(numel, tl.int64), rank)
    tl.store(x + at, 2.0)
    address = signal.to(tl.int64)
    nvshmem.put_signal(
        x.to(tl.int64), x.to(tl.int64), tl.cast(numel, tl.int64), address, call.to(tl.int64), rank
    )
    nvshmem.quiet()
    tl.store(x + at, 3.0)
    nvshmem.wait(address, call.to(tl.int64), peers, rank, 0)
    tl.store(x + at, tl.load(x + 128 + at))


STUBS = {
    "nvshmemx_putmem_block": "i32 (i64, i64, i64, i32)",
    "nvshmem_quiet": "i32 ()",
    "nvshmemx_putmem_signal_nbi_block": "i32 (i64, i64, i64, i64, i64, i32, i32)",
    "nvshmem_signal_fetch": "i64 (i64)",
    "nvshmem_signal_wait_until": "i64 (i64, i32, i64)",
}
library = folder / "stubs.ll"
with library.open("w") as text:
    for name, kind in STUBS.items():
        result, types = kind.split(" ", 1)
        print(f"define {result} @{name}{types} {{ ret {result} 0 }}", file=text)
x, signal = torch.empty(1 << 8), torch.empty(8, dtype=torch.int64)
calls, fault = torch.empty(1, dtype=torch.int64), torch.empty(4, dtype=torch.int32)
peers = Peers(
    buffers=signal, slot_numel=256, signals=signal, calls=calls, fault=fault, max_polls=1000
)


def problems():
    # Of kernels that between them use all that has a barrier.
    with compiling("sm_90") as launches:
        libraries = {"libnvshmem_device": str(library)}
        send_and_wait[(1,)](x, signal, peers, numel=512, rank=3, call=7, extern_libs=libraries)
    rows = [describe("nvshmem", "sm_90", launch) for launch in launches]
    for op in named(
        ["all_gather", "all_gather_grouped_matmul", "all_reduce_rms_norm", "draw", "edit"]
    ):
        (case, *_) = cases(op, "sm_90")
        rows += [describe(op.name, "sm_90", launch) for launch in launches_of(op, "sm_90", case)]
    return [problem for row in rows for problem in row.problems]


for barrier in [None, *json.load(sys.stdin)]:
    if not (child := os.fork()):  # for Triton remembers what it has compiled
        if barrier:
            drop(*barrier)
        print(json.dumps([barrier, problems()]), flush=True)
        os._exit(0)
    assert not os.waitpid(child, 0)[1]
"""

Barrier = tuple[str, str, int]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Barrier | None, list[str]]:
    """Problems after removing one barrier; with key None, after removing none."""
    folder = tmp_path_factory.mktemp("planted")
    path = folder / "without.py"
    path.write_text(WITHOUT_A_BARRIER)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(path), str(folder)],
        input=json.dumps(barriers()),
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "0"},
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    return {barrier and tuple(barrier): problems for barrier, problems in told}


@pytest.mark.sweep
@pytest.mark.parametrize("barrier", barriers(), ids=lambda barrier: "-".join(map(str, barrier)))
def test_each_barrier_that_is_dropped_is_found(
    barrier: Barrier, found: dict[Barrier | None, list[str]]
) -> None:
    """Also if the compiler would have inserted one itself; Triton 3.6 does not, for a release."""
    assert any("without tl.debug_barrier" in problem for problem in found[barrier])
    assert all(re.search("without (tl.debug_|a )barrier", problem) for problem in found[barrier])


def test_no_barrier_is_missing(found: dict[Barrier | None, list[str]]) -> None:
    assert {("signals", "notify"), ("signals", "wait"), ("nvshmem", "put_signal")} <= {
        (module, function) for module, function, _ in barriers()
    }
    assert found[None] == []
