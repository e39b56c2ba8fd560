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
from weft.kernels.check.aot import TENSOR_CORES, Compiled, compile_all, count_releases
from weft.kernels.check.ops import named

QUICK = ("sm_90", "gfx942")
FINE = Compiled("op", "kernel", "sm_90", {}, multiplies=True, tensor_core_instructions=8)


@pytest.fixture(scope="module")
def rows() -> list[Compiled]:
    """Every kernel, for one GPU of NVIDIA and one of AMD."""
    return list(compile_all(QUICK))


def problems(rows: list[Compiled]) -> list[str]:
    return [f"{row.kernel} of {row.op} on {row.target}: {p}" for row in rows for p in row.problems]


def test_nothing_is_wrong_with_the_kernels(rows: list[Compiled]) -> None:
    assert problems(rows) == []
    assert {row.target for row in rows} == set(QUICK)
    for target in QUICK:
        of_target = [row for row in rows if row.target == target]
        assert any(row.multiplies for row in of_target)
        assert any(row.releases for row in of_target)
        assert all(row.registers for row in of_target)


@pytest.mark.slow
@pytest.mark.parametrize("target", sorted(set(TENSOR_CORES) - set(QUICK)))
def test_nothing_is_wrong_on_the_other_targets(target: str) -> None:
    assert problems(list(compile_all([target]))) == []


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
        missing = launched - for_others - {row.kernel for row in rows if row.target == target}
        assert not missing, f"add the op that launches {sorted(missing)} to check/ops.py"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"spills": 8}, "8 bytes of registers are spilled"),
        ({"tensor_core_instructions": 0}, "no tensor-core instruction"),
        ({"releases": 2, "unordered_releases": 1}, "1 releases without a barrier before them"),
        ({"error": "ValueError: no"}, "does not compile: ValueError: no"),
    ],
)
def test_problems_are_named(changes: dict[str, object], problem: str) -> None:
    assert FINE.problems == []
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
    assert unordered == ["1 releases without a barrier before them"]
    assert ordered == []
    assert len(broken) == 1
    assert "as planted" in broken[0]


def test_what_cannot_be_compiled_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="target is 'sm_12'; it must be one of sm_80, sm_90"):
        list(compile_all(["sm_12"]))
    with pytest.raises(WeftError, match=r"compiler for sm_90 ended with 1 before its first kernel"):
        list(compile_all(["sm_90"], ["no such op"]))
