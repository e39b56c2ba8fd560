"""The kernels as the real targets will have them; and that the checks of that can fail."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from weft.errors import ConfigError, WeftError
from weft.kernels import gpu
from weft.kernels.check.aot import (
    PREFILL,
    TENSOR_CORES,
    Compiled,
    Signals,
    cases,
    compile_all,
    count_releases,
    has_bitcode,
)
from weft.kernels.check.ops import NVIDIA, named
from weft.kernels.gpu import tuned
from weft.kernels.gpu.costs import TILES, Config, Problem, device_for, space
from weft.kernels.gpu.tuned import Entry

QUICK = ("sm_90", "gfx942")
FINE = Compiled("op", "kernel", "sm_90", {}, multiplies=True, tensor_core_instructions=8)


@pytest.fixture(scope="module")
def rows() -> list[Compiled]:
    """Every kernel, for one GPU of NVIDIA and one of AMD."""
    return list(compile_all(QUICK))


def problems(rows: list[Compiled]) -> list[str]:
    return [f"{row.kernel} of {row.op} on {row.target}: {p}" for row in rows for p in row.problems]


def test_nothing_is_wrong_with_the_kernels(rows: list[Compiled]) -> None:
    assert {row.target for row in rows} == set(QUICK)
    for target in QUICK:
        check_target(target, [row for row in rows if row.target == target])


@pytest.mark.slow
@pytest.mark.parametrize("target", sorted(set(TENSOR_CORES) - set(QUICK)))
def test_nothing_is_wrong_on_the_other_targets(target: str) -> None:
    check_target(target, list(compile_all([target])))


def check_target(target: str, rows: list[Compiled]) -> None:
    """Registers, spills, shared memory and tensor cores, of defaults and of tiles to choose."""
    assert problems(rows) == []
    device = device_for(target)
    assert all(0 < row.registers <= (512 if target == "gfx942" else 255) for row in rows)
    assert all(row.shared <= device.shared for row in rows)
    assert any(row.releases for row in rows)
    products = [row for row in rows if row.multiplies]
    assert all(row.tensor_core_instructions for row in products)
    tiles = {(int(row.constants["BLOCK_M"]), int(row.constants["BLOCK_N"])) for row in products}
    assert set(TILES) <= tiles
    dtypes = {row.constants.get("dtype") for row in rows}
    assert {"bf16", "fp16", "fp32"} <= dtypes
    assert ("fp8e4nv" in dtypes) == (target in ("sm_90", "sm_100"))
    assert {row.constants.get("WORLD") for row in rows} >= {"1", "2", "8"}


def test_what_ops_choose_for_prefill_on_hopper_is_wide(rows: list[Compiled]) -> None:
    for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul"):
        (row,) = [
            row
            for row in rows
            if (row.target, row.op, row.multiplies) == ("sm_90", op, True)
            and row.case.startswith(f"rank 3 of 8, m {PREFILL[0]}, ")
        ]
        tile = [row.constants[f"BLOCK_{side}"] for side in "MNK"]
        assert (tile, row.warps, row.stages) == (["128", "256", "64"], 8, 3)


@pytest.mark.parametrize("target", TENSOR_CORES)
def test_everything_is_all_that_tuning_may_choose(target: str) -> None:
    (op,) = named(["matmul_all_reduce"])
    everything = {
        (*case.options["blocks"], case.options["stages"], case.options["warps"])
        for case in cases(op, target, everything=True)
        if "stages" in case.options
    }
    configs = space(Problem(op.name, 8, 8192, 8192, 1024), device_for(target), ["one_shot"])
    assert everything == {(c.block_m, c.block_n, c.block_k, c.stages, c.warps) for c in configs}
    some = [case for case in cases(op, target) if "stages" in case.options]
    assert 0 < len(some) < len(TILES)


@pytest.mark.parametrize(
    ("op", "dtype", "name", "target", "m"),
    [
        ("matmul_reduce_scatter", "bfloat16", "NVIDIA H200", "sm_90", 128),
        ("all_gather_matmul", "float8_e4m3fn", "NVIDIA H100 80GB HBM3", "sm_90", 128),
        ("matmul_all_reduce", "float16", "AMD Instinct MI300X", "gfx942", 512),
    ],
)
def test_what_was_tuned_is_compiled(
    op: str,
    dtype: str,
    name: str,
    target: str,
    m: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    problem = Problem(op, 4, 512, 768, 320, dtype)
    key = tuned.key_of(problem, name)
    fields = {field: getattr(key, field) for field in key.__struct_fields__}
    method = "one_shot" if op == "matmul_all_reduce" else "push"
    config = Config(method, 32, 64, 64, stages=5, warps=4)
    entry = Entry(**fields, config=config, microseconds=1.0)
    tuned.record(tuned.default_path(), {key: entry})
    fp8 = dtype.startswith("float8")
    (entry_of_op,) = named([f"{op}_fp8" if fp8 else op])
    found = [case for case in cases(entry_of_op, target) if case.sizes.k == 320]
    assert [(c.sizes.world, c.sizes.m, c.sizes.n) for c in found] == [(4, m, 768)]
    assert found[0].options["blocks"] == (32, 64, 64)
    assert (found[0].options["stages"], found[0].options["warps"]) == (5, 4)
    assert not [case for case in cases(entry_of_op, "sm_80") if case.sizes.k == 320]


def test_one_binary_serves_all_ranks() -> None:
    """Triton would compile anew for rank 1, and for those that 16 divides."""
    specialised = {
        kernel.name
        for path in Path(gpu.__path__[0]).glob("*.py")
        for kernel in ast.walk(ast.parse(path.read_text()))
        if is_kernel(kernel) and isinstance(kernel, ast.FunctionDef)
        if {argument.arg for argument in kernel.args.args} & {"rank", "peer"}
        and "do_not_specialize" not in ast.unparse(kernel.decorator_list[0])
    }
    assert "notify" in specialised
    assert not specialised & launched_kernels() - {"put"}  # nvshmem's put is no kernel


FAR = ("all_gather_two_level_far", "reduce_scatter_two_level_far")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", NVIDIA)
def test_kernels_that_put_are_linked_with_nvshmem(target: str) -> None:
    if not has_bitcode(target):
        pytest.skip(f"NVSHMEM's bitcode for {target} is not installed")
    rows = list(compile_all([target], FAR))
    assert problems(rows) == []
    linked = {row.kernel for row in rows if row.linked}
    assert linked == {"quiet", "push_across", "fan_out", "reduce_local", "reduce_nodes"}


def test_an_op_that_puts_says_what_it_lacks() -> None:
    if has_bitcode("sm_90"):
        pytest.skip("NVSHMEM is installed")
    with pytest.raises(WeftError, match="NVSHMEM"):
        list(compile_all(["sm_90"], FAR[:1]))


def is_kernel(node: ast.AST) -> bool:
    """Whether it is a function with @triton.jit."""
    return isinstance(node, ast.FunctionDef) and any(
        ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list
    )


def host_code(node: ast.AST) -> Iterator[ast.AST]:
    """All of a module but its kernels."""
    for child in ast.iter_child_nodes(node):
        if not is_kernel(child):
            yield child
            yield from host_code(child)


def launched_kernels() -> set[str]:
    """Kernels that host code launches, or names, if no other kernel calls them."""
    kernels, launched, named_on_host, called = set(), set(), set(), set()
    for path in Path(gpu.__path__[0]).rglob("*.py"):
        module = ast.parse(path.read_text())
        for kernel in filter(is_kernel, ast.walk(module)):
            assert isinstance(kernel, ast.FunctionDef)
            kernels.add(kernel.name)
            called |= {last_name(n.func) for n in ast.walk(kernel) if isinstance(n, ast.Call)}
        for node in host_code(module):
            named_on_host.add(last_name(node))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                launched.add(last_name(node.func.value))
    return kernels & (launched | named_on_host - called)


def last_name(node: ast.AST) -> str:
    """b of a.b, and of b."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def test_every_kernel_that_is_launched_is_compiled(rows: list[Compiled]) -> None:
    launched = launched_kernels()
    assert {"push_chunks", "multiply_gathered", "begin_call"} <= launched
    assert "peer_pointer" not in launched
    for target in QUICK:
        for_others = {
            row.kernel
            for row in rows
            if (targets := named([row.op])[0].targets) and target not in targets
        }
        if target not in NVIDIA or not has_bitcode(target):
            for_others |= {"quiet"}  # before puts, which only ops between nodes have
        missing = launched - for_others - {row.kernel for row in rows if row.target == target}
        assert not missing, f"add the op that launches {sorted(missing)} to check/ops.py"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"spills": 8}, "8 bytes of registers are spilled"),
        ({"tensor_core_instructions": 0}, "no tensor-core instruction"),
        ({"releases": 2, "unordered_releases": 1}, "1 releases without a barrier before them"),
        ({"bare_releases": 1}, "1 releases without tl.debug_barrier before them"),
        ({"bare_acquires": 2}, "2 acquires without tl.debug_barrier after them"),
        ({"error": "ValueError: no"}, "does not compile: ValueError: no"),
    ],
)
def test_problems_are_named(changes: dict[str, object], problem: str) -> None:
    assert FINE.problems == replace(FINE, spills=8, linked=True).problems == []
    assert replace(FINE, **changes).problems == [problem]


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
        (STORE + BARRIER + "$L__BB0_2:\n" + RELEASE, (1, 1)),  # one may jump past the barrier
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


def test_what_is_not_understood_is_an_error() -> None:
    with pytest.raises(WeftError, match="'} loc"):
        Signals("module {\n}\n} loc(#x) again")


PLANTED = """
import json
from dataclasses import asdict

import torch
import triton
import triton.language as tl

from weft.kernels.check.aot import compiling, describe


@triton.jit
def product(out, a, b, SIZE: tl.constexpr):
    m, n = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    left, right = tl.load(a + m * SIZE + n), tl.load(b + m * SIZE + n)
    tl.store(out + m * SIZE + n, tl.dot(left, right, input_precision="ieee"))


@triton.jit
def normalise(out, x, SIZE: tl.constexpr):
    numbers = tl.load(x + tl.arange(0, SIZE))
    tl.store(out + tl.arange(0, SIZE), numbers / tl.sum(numbers))


@triton.jit
def announce(x, signal, ORDERED: tl.constexpr):
    tl.store(x + tl.arange(0, 1024), 1.0)
    if ORDERED:
        tl.debug_barrier()
    tl.inline_asm_elementwise(
        "st.release.sys.global.u32 [$1], 1; mov.u32 $0, 0;", "=r,l", [signal],
        dtype=tl.int32, is_pure=False, pack=1,
    )


@triton.jit
def broken(x):
    tl.static_assert(False, "as planted")


x, signal = torch.empty(1 << 16), torch.empty(1, dtype=torch.int32)
with compiling("sm_90") as launches:
    product[(1,)](x, x, x, SIZE=16, num_warps=1)
    normalise[(1,)](x, x, SIZE=1 << 14, num_warps=1)
    announce[(1,)](x, signal, ORDERED=False)
    announce[(1,)](x, signal, ORDERED=True)
    broken[(1,)](x)
for launch in launches:
    print(json.dumps(asdict(describe("planted", "sm_90", launch))))
"""


def test_faults_that_are_planted_in_kernels_are_problems(tmp_path: Path) -> None:
    """The release is in assembly: before tl.atomic_*, Triton 3.9 puts a barrier by itself."""
    path = tmp_path / "planted.py"
    path.write_text(textwrap.dedent(PLANTED))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(path)],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "0"},
    )
    assert done.returncode == 0, done.stderr
    rows = [Compiled(**json.loads(line)) for line in done.stdout.splitlines()]
    product, normalise, unordered, ordered, broken = (row.problems for row in rows)
    assert product == ["no tensor-core instruction"]
    assert len(normalise) == 1
    assert normalise[0].endswith("bytes of registers are spilled")
    assert unordered == [
        "1 releases without a barrier before them",
        "1 releases without tl.debug_barrier before them",
    ]
    assert ordered == []
    assert len(broken) == 1
    assert "as planted" in broken[0]


def test_what_cannot_be_compiled_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="target is 'sm_12'; it must be one of sm_80, sm_90"):
        list(compile_all(["sm_12"]))
    with pytest.raises(WeftError, match=r"compiler for sm_90 ended with 1 before its first kernel"):
        list(compile_all(["sm_90"], ["no such op"]))


def barriers() -> list[tuple[str, str, int]]:
    """Module, function and line of each tl.debug_barrier of the kernels."""
    return [
        (path.stem, kernel.name, call.lineno)
        for path in sorted(Path(gpu.__path__[0]).glob("*.py"))
        for kernel in ast.walk(ast.parse(path.read_text()))
        if is_kernel(kernel) and isinstance(kernel, ast.FunctionDef)
        for call in ast.walk(kernel)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "tl.debug_barrier"
    ]


WITHOUT_A_BARRIER = """
import importlib, pkgutil, re, sys
from pathlib import Path

import torch
import triton
import triton.language as tl

from weft.kernels import gpu
from weft.kernels.check.aot import cases, compiling, describe, launches_of
from weft.kernels.check.ops import OPS
from weft.kernels.gpu import nvshmem

module, function, line, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
names = [name for _, name, _ in pkgutil.iter_modules(gpu.__path__)]
modules = {name: importlib.import_module("weft.kernels.gpu." + name) for name in names}
right = getattr(modules[module], function)
if line:
    source = Path(modules[module].__file__).read_text().splitlines()
    assert source[line - 1].strip() == "tl.debug_barrier()"
    source[line - 1] = source[line - 1].replace("tl.debug_barrier()", "pass")
    (folder / "planted.py").write_text("\\n".join(source))
    sys.path.insert(0, str(folder))
    wrong = getattr(importlib.import_module("planted"), function)
    for one in modules.values():
        if vars(one).get(function) is right:
            setattr(one, function, wrong)


@triton.jit
def send_and_wait(x, signal, fault, numel, rank, call):
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
    nvshmem.wait(address, call.to(tl.int64), rank, 0, fault, 1000)
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
x, signal, fault = torch.empty(1 << 8), torch.empty(8, dtype=torch.int64), torch.empty(
    4, dtype=torch.int32
)
with compiling("sm_90") as launches:
    libraries = {"libnvshmem_device": str(library)}
    send_and_wait[(1,)](x, signal, fault, 512, 3, 7, extern_libs=libraries)
rows = [describe("nvshmem", "sm_90", launch) for launch in launches]
for op in OPS:
    if op.far:
        continue
    found = [problem for row in rows for problem in row.problems]
    if found or (not line and rows[1:]):
        break
    (case, *_) = cases(op, "sm_90")
    rows += [describe(op.name, "sm_90", launch) for launch in launches_of(op, "sm_90", case)]
for problem in found:
    print(problem)
"""


def without_a_barrier(folder: Path, module: str, function: str, line: int) -> list[str]:
    """Problems, if a line of a module were not there; none is missing if it is 0."""
    path = folder / "without.py"
    path.write_text(WITHOUT_A_BARRIER)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(path), module, function, str(line), str(folder)],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "0"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("module", "function", "line"), barriers(), ids=lambda value: str(value).removeprefix("0")
)
def test_each_barrier_that_is_dropped_is_found(
    module: str, function: str, line: int, tmp_path: Path
) -> None:
    """Also where the compiler would have put one by itself."""
    found = without_a_barrier(tmp_path, module, function, line)
    assert found
    assert all("without tl.debug_barrier" in problem for problem in found)


def test_no_barrier_is_missing(tmp_path: Path) -> None:
    assert {("signals", "notify"), ("signals", "wait"), ("nvshmem", "put_signal")} <= {
        (module, function) for module, function, _ in barriers()
    }
    assert without_a_barrier(tmp_path, "signals", "notify", 0) == []
