"""Compiles every kernel for the real targets, without one, and says what came out.

The ops of check/ops.py are called once, as rank 3 of 8, with Triton's driver
replaced by one that has no device: each launch is specialised and compiled as
on the target, with the warps, stages and tiles that the op passes, and then not
launched. So what is compiled is what is launched, and nothing is listed twice.

For each kernel and target: registers, spills, shared memory, tensor-core
instructions, and whether a barrier stands directly before each release of a
signal (one thread releases; the others' stores must come first, and Triton 3.6
does not see to it by itself). `problems` names what would be wrong on a device.

Triton's jit is either interpreted or compiled for a whole process, and a kernel
that a target cannot take may end the process: each target is compiled in a
process of its own, which writes a line of JSON for each kernel. Triton keeps
what it has compiled on disk, by the kernel's source; the second run is quick.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.errors import ConfigError, WeftError
from weft.kernels.symmetric.memory import Home

TENSOR_CORES = {
    "sm_80": r"\bHMMA",
    "sm_90": r"\b[HQ]GMMA",
    "sm_100": r"\bUTC\w*MMA",
    "gfx942": r"\bv_mfma",
}
"""What a matrix product is made of in each target's machine code: the targets there are."""

RANK, WORLD_SIZE = 3, 8
"""Who the kernels are compiled for. (Triton compiles anew for arguments that are 1 or n x 16.)"""

M, N, K = 128, 256, 256
"""Sizes of a rank's part; only their divisibility matters to the compiler."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a kernel became for a target.

    Attributes:
        op: that launches it; the first one, if several launch the same.
        constants: its constexpr arguments.
        spills: bytes of registers of a thread that are kept in memory.
        shared: bytes of a program.
        multiplies: it has a tl.dot.
        releases: of signals, in its code; how many have no barrier directly before them.
        error: why it does not compile.
    """

    op: str
    kernel: str
    target: str
    constants: dict[str, str]
    warps: int = 0
    stages: int = 0
    registers: int = 0
    spills: int = 0
    shared: int = 0
    multiplies: bool = False
    tensor_core_instructions: int = 0
    releases: int = 0
    unordered_releases: int = 0
    error: str = ""

    @property
    def problems(self) -> list[str]:
        """What would be wrong, or slow beyond use, on the device."""
        found = []
        if self.error:
            found.append(f"does not compile: {self.error}")
        if self.spills:
            found.append(f"{self.spills} bytes of registers are spilled")
        if self.multiplies and not self.tensor_core_instructions:
            found.append("no tensor-core instruction")
        if self.unordered_releases:
            found.append(f"{self.unordered_releases} releases without a barrier before them")
        return found


def compile_all(
    targets: Sequence[str] = tuple(TENSOR_CORES), ops: Sequence[str] = ()
) -> Iterator[Compiled]:
    """Every kernel of the ops (all, if none is named) for every target, which run side by side.

    Raises:
        ConfigError: there is no such target.
        WeftError: the compiler has ended its process.
    """
    for target in targets:
        if target not in TENSOR_CORES:
            raise ConfigError(f"target is {target!r}; it must be one of {', '.join(TENSOR_CORES)}")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for rows in pool.map(lambda target: _in_process(target, ops), targets):
            yield from rows


def _in_process(target: str, ops: Sequence[str]) -> list[Compiled]:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    # -P: the folder one is in may have a `weft` in it that is not the installed one.
    command = [sys.executable, "-P", "-m", "weft.kernels.check.aot", target, *ops]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    rows = [Compiled(**json.loads(line)) for line in result.stdout.splitlines()]
    if result.returncode:
        after = f"after {rows[-1].kernel} of {rows[-1].op}" if rows else "before its first kernel"
        last = "\n".join(result.stderr.strip().splitlines()[-12:])
        raise WeftError(
            f"the compiler for {target} ended with {result.returncode} {after}:\n{last}"
        )
    return rows


class _Alone(Home):
    """One rank whose peers' memory is its own: enough to launch from."""

    def __init__(self) -> None:
        super().__init__(RANK, WORLD_SIZE, torch.device("cpu"))
        self._tensors: list[Tensor] = []

    def _exchange(self, call: int, value: str) -> list[str]:
        return [value] * self.world_size

    def _allocate(self, nbytes: int) -> tuple[Tensor, list[int], int]:
        memory = torch.empty(nbytes, dtype=torch.uint8)
        self._tensors.append(memory)
        return memory, [memory.data_ptr()] * self.world_size, memory.data_ptr()

    def _peers(self, addresses: list[int]) -> list[Tensor]:
        return self._tensors[-1:] * self.world_size

    def _release(self) -> None:
        self._tensors.clear()


class _NoDevice:
    """A driver of Triton for a target that is not here: enough to compile for it."""

    def __init__(self, target: str) -> None:
        from triton.backends.compiler import GPUTarget

        nvidia = target.startswith("sm_")
        self._target = (
            GPUTarget("cuda", int(target[3:]), 32) if nvidia else GPUTarget("hip", target, 64)
        )

    def get_current_device(self) -> str:
        return str(self._target.arch)

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, its keyword arguments, and Triton's compiled kernel or an exception."""

    kernel: Any
    kwargs: dict[str, Any]
    result: Any


@contextmanager
def compiling(target: str) -> Iterator[list[Launch]]:
    """Within, launches compile for a target of TENSOR_CORES, and are listed instead of run."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        try:
            result = run(kernel, *args, grid=grid, warmup=True, **kwargs)
        except Exception as error:  # noqa: BLE001 - the compiler raises anything; it is a finding
            result = error
        launches.append(Launch(kernel, kwargs, result))

    driver.set_active(_NoDevice(target))
    JITFunction.run = compile_only
    try:
        yield launches
    finally:
        JITFunction.run = run


def compile_ops(target: str, names: Sequence[str] = ()) -> Iterator[Compiled]:
    """Every kernel that the ops of these names launch, once; all ops for none.

    Kernels must have been imported with TRITON_INTERPRET=0.
    """
    from weft.kernels.check.ops import Sizes, named

    sizes = Sizes(WORLD_SIZE, M, N, K, torch.bfloat16)
    seen: list[Any] = []  # Triton compiles the same launch once
    for op in named(names):
        if op.targets and target not in op.targets:
            continue
        with compiling(target) as launches, _Alone() as home:
            workspace = op.workspace(home, sizes)
            tensors = [torch.empty(shape, dtype=sizes.dtype) for shape in op.shapes(sizes)]
            op.call(tensors, workspace, sizes)
        for launch in launches:
            if not any(launch.result is other for other in seen):
                seen.append(launch.result)
                yield describe(op.name, target, launch)


def describe(op: str, target: str, launch: Launch) -> Compiled:
    """What became of a launch."""
    constants = {
        parameter.name: str(launch.kwargs[parameter.name])
        for parameter in launch.kernel.params
        if parameter.is_constexpr and parameter.name in launch.kwargs
    }
    name, result = launch.kernel.fn.__name__, launch.result
    if isinstance(result, Exception):
        cause = result.__cause__ or result
        error = f"{type(cause).__name__}: {str(cause).strip().splitlines()[-1]}"
        return Compiled(op, name, target, constants, error=error)
    read = _read_nvidia if target.startswith("sm_") else _read_amd
    registers, spills, listing, assembly = read(result)
    releases, unordered = count_releases(assembly)
    return Compiled(
        op=op,
        kernel=name,
        target=target,
        constants=constants,
        warps=result.metadata.num_warps,
        stages=result.metadata.num_stages,
        registers=registers,
        spills=spills,
        shared=result.metadata.shared,
        multiplies="tt.dot" in result.asm["ttir"],
        tensor_core_instructions=len(re.findall(TENSOR_CORES[target], listing)),
        releases=releases,
        unordered_releases=unordered,
    )


def _read_nvidia(binary: Any) -> tuple[int, int, str, str]:
    """Registers, bytes of them that are spilled, machine code as text, PTX."""
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = _output([str(tools / "cuobjdump"), "--dump-resource-usage", file.name])
        listing = _output([str(tools / "nvdisasm"), "-c", file.name])
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    if found is None:
        raise WeftError(f"cuobjdump says nothing of resources:\n{usage[:500]}")
    # A kernel may have a stack that it makes no use of: what is spilled is stored and loaded.
    spills = int(found[2]) + int(found[3]) if re.search(r"\b(?:STL|LDL)\b", listing) else 0
    return int(found[1]), spills, listing, binary.asm["ptx"]


def _read_amd(binary: Any) -> tuple[int, int, str, str]:
    """Vector registers, bytes of a lane's scratch memory, assembly, and that again."""
    listing = binary.asm["amdgcn"]

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", listing)
        if found is None:
            raise WeftError(f"the assembly says nothing of {name}")
        return int(found[1])

    return number("vgpr_count"), number("private_segment_fixed_size"), listing, listing


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


_BARRIER = re.compile(r"\b(?:bar|barrier)(?:\.cta)?\.sync\b|\bs_barrier\b")
_STORE = re.compile(r"\bst\.(?!shared|local|async)|\bglobal_store|\bbuffer_store|\bflat_store")
_LABEL = re.compile(r"^(?:\$L__BB|\.LBB)\w+:")  # others are for debuggers
# At system scope. PTX: an atomic, reduction or store with release semantics, or a fence. AMD: what
# the memory model puts before each of them, a write-back of the L2 cache.
_RELEASE = re.compile(
    r"\b(?:atom|red|st|multimem|fence)\.(?=\S*\bsys\b)\S*(?:release|acq_rel)"
    r"|\bbuffer_wbl2 sc0 sc1\b"
)


def count_releases(assembly: str) -> tuple[int, int]:
    """Releases at system scope, and how many have no barrier directly before them.

    Directly: neither a store to global memory nor a place that is jumped to stands between, so
    that there is no way to the release around the barrier.
    """
    releases, unordered, ordered = 0, 0, False
    for line in assembly.splitlines():
        code = line.split("//")[0].split(";;")[0].strip()
        if _BARRIER.search(code):
            ordered = True
        elif _RELEASE.search(code):
            releases += 1
            unordered += not ordered
        elif _STORE.search(code) or _LABEL.match(code):
            ordered = False
    return releases, unordered


def main(target: str, *ops: str) -> None:
    """Compile for one target; a line of JSON for each kernel."""
    for row in compile_ops(target, ops):
        print(json.dumps(asdict(row)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
