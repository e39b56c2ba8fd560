"""The kernels as the real targets will have them; and that the checks of that can fail."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
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
    cases,
    compile_all,
    has_bitcode,
    supported_targets,
    waits_for_all,
)
from weft.kernels.check.ops.op import CONVERTS, HOPPER, NVIDIA
from weft.kernels.check.ops.table import OPS, named
from weft.kernels.gpu import lacks_triton_for_amd
from weft.kernels.gpu.tuning import table as tuned
from weft.kernels.gpu.tuning.costs import TILES, Config, Problem, device_for, space
from weft.kernels.gpu.tuning.table import Entry

TESTS = Path(__file__).parents[2]
QUICK = ("sm_90",)
VARIANTS = re.compile("_fp8|gate_up|_far|_zigzag")
SAMPLE = ("all_gather_matmul_fp8", *(op.name for op in OPS if not VARIANTS.search(op.name)))
"""Ops that launch every kernel."""
WHOLE = ("all_gather", "all_gather_matmul", "matmul_reduce_scatter", "matmul")
"""Ops of which `rows` has all variants."""
FINE = Compiled("op", "kernel", "sm_90", {}, multiplies=True, tensor_core_instructions=8)


@pytest.fixture(scope="module")
def rows() -> list[Compiled]:
    """Every kernel, for one kind of GPU; of most ops in one variant."""
    others = [name for name in SAMPLE if name not in WHOLE]
    return [*compile_all(QUICK, others, extent="quick"), *compile_all(QUICK, WHOLE)]


def problems(rows: list[Compiled]) -> list[str]:
    return [f"{row.kernel} of {row.op} on {row.target}: {p}" for row in rows for p in row.problems]


def test_nothing_is_wrong_with_the_kernels(rows: list[Compiled]) -> None:
    assert {row.target for row in rows} == set(QUICK)
    for target in QUICK:
        check_target(target, [row for row in rows if row.target == target])


@pytest.mark.skipif(bool(lacks_triton_for_amd()), reason=lacks_triton_for_amd())
def test_an_overlapped_product_compiles_for_amd() -> None:
    rows = list(compile_all(["gfx942"], ["all_gather_matmul"]))
    assert any(row.multiplies for row in rows)
    assert problems(rows) == []


def test_a_triton_that_is_too_old_for_amd_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.__version__", "3.7.1")
    assert supported_targets() == NVIDIA
    message = "target is 'gfx942'; AMD's GPUs need Triton 3.8 or newer; 3.7.1 is installed"
    with pytest.raises(ConfigError, match=f"^{message}$"):
        next(compile_all(["gfx942"]))
    monkeypatch.setattr("triton.__version__", "3.10.0+git12")
    assert supported_targets() == tuple(TENSOR_CORES)


@pytest.mark.slow
@pytest.mark.parametrize("target", supported_targets())
def test_nothing_is_wrong_in_any_op_on_any_target(target: str) -> None:
    rows = list(compile_all([target]))
    check_target(target, rows)
    products = [row.constants for row in rows if row.multiplies]
    assert set(TILES) <= {(int(each["BLOCK_M"]), int(each["BLOCK_N"])) for each in products}


def check_target(target: str, rows: list[Compiled]) -> None:
    """Registers, spills, shared memory and tensor cores."""
    assert problems(rows) == []
    device = device_for(target)
    assert all(0 < row.registers <= (512 if target == "gfx942" else 255) for row in rows)
    assert all(row.shared <= device.shared for row in rows)
    assert any(row.releases for row in rows)
    products = [row for row in rows if row.multiplies]
    assert all(row.tensor_core_instructions for row in products)
    dtypes = {row.constants.get("dtype") for row in rows}
    assert {"bf16", "fp16", "fp32"} <= dtypes
    assert target in CONVERTS or "fp8e4nv" not in dtypes
    assert target not in HOPPER or "fp8e4nv" in dtypes
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
        for case in cases(op, target, "all")
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
        for path in Path(gpu.__path__[0]).rglob("*.py")
        for kernel in ast.walk(ast.parse(path.read_text()))
        if is_kernel(kernel) and isinstance(kernel, ast.FunctionDef)
        if {argument.arg for argument in kernel.args.args} & {"rank", "peer"}
        and "do_not_specialize" not in ast.unparse(kernel.decorator_list[0])
    }
    assert "notify" in specialised
    assert not specialised & launched_kernels() - {"put"}  # nvshmem's put is no kernel


FAR = ("all_gather_two_level_far", "reduce_scatter_two_level_far", "moe_two_level_far")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", NVIDIA)
def test_kernels_that_put_are_linked_with_nvshmem(target: str) -> None:
    if not has_bitcode(target):
        pytest.skip(f"NVSHMEM's bitcode for {target} is not installed")
    rows = list(compile_all([target], FAR))
    assert problems(rows) == []
    linked = {row.kernel for row in rows if row.linked}
    of_experts = {"cross_nodes", "pass_on", "cross_back", "sum_nodes"}
    of_shards = {"push_across", "fan_out", "reduce_local", "reduce_nodes"}
    assert linked == {"quiet"} | of_shards | of_experts
    # Variables of NVSHMEM's functions, and of registers less than fit a request to a network card.
    assert all(row.spills < row.stack for row in rows if row.linked and row.stack)
    assert all(row.spills <= 128 for row in rows)


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
    assert {"push_chunks", "multiply_gathered", "count_calls"} <= launched
    assert "peer_pointer" not in launched
    for target in QUICK:
        for_others = {
            row.kernel
            for row in rows
            if (targets := named([row.op])[0].targets) and target not in targets
        }
        for_others |= {"quiet"}  # before puts, only in ops between nodes, which SAMPLE leaves out
        missing = launched - for_others - {row.kernel for row in rows if row.target == target}
        assert not missing, f"add the op that launches {sorted(missing)} to check/ops"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"spills": 8, "multiplies": False}, "8 bytes of registers are spilled"),
        (
            {"spills": 8, "looped_spills": 2},
            "8 bytes of registers are spilled, some in the loop that multiplies",
        ),
        ({"tensor_core_instructions": 0}, "no tensor-core instruction"),
        ({"releases": 2, "unordered_releases": 1}, "1 releases without a barrier before them"),
        ({"bare_releases": 1}, "1 releases without tl.debug_barrier before them"),
        ({"bare_acquires": 2}, "2 acquires without tl.debug_barrier after them"),
        (
            {"waits_for_all": True, "stages": 3},
            "3 stages, but no copy is on its way during a product",
        ),
        ({"error": "ValueError: no"}, "does not compile: ValueError: no"),
    ],
)
def test_problems_are_named(changes: dict[str, object], problem: str) -> None:
    assert FINE.problems == replace(FINE, stack=64, spills=8).problems == []
    assert replace(FINE, multiplies=False, stack=64, spills=8, linked=True).problems == []
    assert replace(FINE, **changes).problems == [problem]


@pytest.mark.parametrize(("left", "waits"), [((0, 0), True), ((2, 0), False), ((), False)])
def test_a_loop_that_waits_for_every_copy_is_noticed(left: tuple[int, ...], waits: bool) -> None:
    """As in Triton's code for a loop that loads addresses and, in the same iteration, data."""
    copy = "%c = ttg.async_copy_global_to_local %p, %m : tensor<64x!tt.ptr<i32>, #b> -> <64xi32>"
    lines = [f"%w = ttg.async_wait %t {{num = {number} : i32}}" for number in left]
    assert waits_for_all("\n".join([copy, *lines])) == waits
    assert not waits_for_all("\n".join(lines))


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


def compiled_by(script: str, folder: Path) -> list[Compiled]:
    """The rows that a script prints; kernels are compiled in it, and not interpreted."""
    path = folder / "planted.py"
    path.write_text(script)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(path), str(folder)],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(TESTS)},
    )
    assert done.returncode == 0, done.stderr
    return [Compiled(**json.loads(line)) for line in done.stdout.splitlines()]


def test_faults_that_are_planted_in_kernels_are_problems(tmp_path: Path) -> None:
    """The release is in assembly: before tl.atomic_*, Triton 3.9 puts a barrier by itself."""
    rows = compiled_by(PLANTED, tmp_path)
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


PLANTED_LOOP = """
import json
import sys
from dataclasses import asdict
from pathlib import Path

from support.faults import planted

from weft.kernels.check.aot import cases, describe, launches_of
from weft.kernels.check.ops import attention
from weft.kernels.check.ops.table import named
from weft.kernels.gpu.attention import kernel, paged

early = "following = load_pages(table, {} * BLOCK_N,"
late = "page = load_pages(table, block * BLOCK_N,"
changes = [(early.format("(block + 1)"), late), (early.format("next_block"), late)]
changes.append(("        page = following\\n", ""))
(op,) = named(["paged_attention"])
for module in (paged, planted(paged, Path(sys.argv[1]), *changes, parts=[kernel])):
    attention.paged_attention = module.paged_attention
    (launch,) = launches_of(op, "sm_90", next(cases(op, "sm_90")))
    print(json.dumps(asdict(describe(op.name, "sm_90", launch))))
"""


def test_attention_that_looks_pages_up_as_it_needs_them_has_no_copy_on_its_way(
    tmp_path: Path,
) -> None:
    """Then Triton spends its stages on the pages; the real kernel looks them up one block early."""
    real, late = compiled_by(PLANTED_LOOP, tmp_path)
    assert (real.kernel, real.stages, real.problems) == ("attend", 3, [])
    assert late.problems == ["3 stages, but no copy is on its way during a product"]


def test_what_cannot_be_compiled_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="target is 'sm_12'; it must be one of sm_80, sm_90"):
        list(compile_all(["sm_12"]))
    with pytest.raises(WeftError, match=r"compiler for sm_90 ended with 1 before its first kernel"):
        list(compile_all(["sm_90"], ["no such op"]))
