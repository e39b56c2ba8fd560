"""Ahead-of-time compilation of every kernel for the real targets, without a device.

The ops in check/ops are called, but Triton's driver is replaced by one without a device. Each
launch is specialised and compiled as on the target, with the op's warps, stages and tiles, and then
skipped. The check thus compiles exactly the kernels that the ops launch, and needs no second list
of kernels. `cases` chooses the rank, sizes, dtypes and tiles. Triton compiles a new variant for an
integer argument equal to 1, and for a multiple of 16. Ops do the same for sizes that are multiples
of their tiles.

For each kernel and target the check reports registers, spills (machine_code.py), shared memory and
tensor-core instructions. It also checks the barriers around signals (barriers.py), in the source
and in the compiled code. `problems` lists faults that would appear on a device.

Triton's jit is either interpreted or compiled for a whole process. A kernel that a target does not
support may end the process. Therefore each target is compiled in its own process, which prints a
line of JSON for each kernel. Triton caches compiled kernels on disk, by their source, so a second
run is quick.
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
from dataclasses import asdict, dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from msgspec.structs import replace
from torch import Tensor

from weft.errors import ConfigError, WeftError
from weft.kernels.check.barriers import Fences, OwnStores, Signals, count_releases
from weft.kernels.check.machine_code import read_amd, read_nvidia
from weft.kernels.gpu import lacks_triton_for_amd
from weft.kernels.gpu.runtime.absent import NoDevice
from weft.kernels.symmetric.memory import Home, SymmetricMemoryError
from weft.kernels.symmetric.nvshmem import bitcode

if TYPE_CHECKING:
    from weft.kernels.check.ops.op import Op, Sizes

Extent: TypeAlias = Literal["quick", "some", "all"]
"""How many calls of an op are compiled: see `cases`."""

TENSOR_CORES = {
    "sm_80": r"\bmma\.sync",
    "sm_90": r"\bwgmma\.mma_async",
    "sm_100": r"\btcgen05\.mma\b",
    "gfx942": r"\bv_mfma",
}
"""For each supported target, the instruction for a matrix product in its assembly."""

LOW_TILES = {"sm_90": r"\bmma\.sync", "sm_100": r"\bmma\.sync"}
"""The same for tiles with too few rows for WGMMA and tcgen05: the older instruction."""

LOWEST_TILE = 64
"""Minimum number of rows in a tile for WGMMA and tcgen05."""

PREFILL = (1000, 1024, 8192)
"""m, n, k for a product in prefill, about Llama 70B on 8 ranks with 8000 tokens. No tile divides
m."""

DECODE = (16, 8192, 1024)
"""m, n, k for a product in decode, with 16 tokens: the output projection of attention."""

TILED = (1024, 1024, 1024)
"""m, n, k for which every tile of a product is compiled. Every tile divides these sizes."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel compiled for a target, or the reason why it does not compile.

    Attributes:
        op: name of the first op that launches the kernel.
        constants: its constexpr arguments.
        case: the first call that launches it.
        stack: bytes of memory per thread, for spilled registers and for a library's variables.
        spills: bytes of the stack for spilled registers.
        looped_spills: loads and stores of spilled registers in the innermost loop with a product.
            Spills outside the loop happen once per tile and cost nothing.
        shared: bytes of shared memory per program.
        multiplies: the kernel has a tl.dot.
        releases: number of signal releases in the compiled code.
        unordered_releases: number of these releases without a barrier directly before them.
        bare_releases: number of releases in the source without a barrier before them.
        bare_acquires: number of waits in the source without a barrier between the wait and the
            first access to the data.
        bare_fences: number of releases after multicast stores, and of multicast accesses after
            acquires, without a fence between.
        bare_stores: number of accesses to what other threads of the program may have stored,
            without a barrier between. Not counted in kernels with signals, whose memory belongs to
            several ranks.
        waits_for_all: with three stages or more, the kernel waits for all its asynchronous copies
            before each product, so none is on its way meanwhile.
        linked: the kernel is linked with NVSHMEM's device code. Its spills are around a put, and
            their cost is too small to measure.
        error: why it does not compile.
    """

    op: str
    kernel: str
    target: str
    constants: dict[str, str]
    case: str = ""
    warps: int = 0
    stages: int = 0
    registers: int = 0
    stack: int = 0
    spills: int = 0
    looped_spills: int = 0
    shared: int = 0
    multiplies: bool = False
    tensor_core_instructions: int = 0
    releases: int = 0
    unordered_releases: int = 0
    bare_releases: int = 0
    bare_acquires: int = 0
    bare_fences: int = 0
    bare_stores: int = 0
    waits_for_all: bool = False
    linked: bool = False
    error: str = ""

    @property
    def problems(self) -> list[str]:
        """Faults that would make the kernel wrong, or far too slow, on the device."""
        found = []
        if self.error:
            found.append(f"does not compile: {self.error}")
        if self.spills and not self.linked and (self.looped_spills or not self.multiplies):
            where = ", some in the loop that multiplies" if self.looped_spills else ""
            found.append(f"{self.spills} bytes of registers are spilled{where}")
        if self.multiplies and not self.tensor_core_instructions:
            found.append("no tensor-core instruction")
        if self.unordered_releases:
            found.append(f"{self.unordered_releases} releases without a barrier before them")
        if self.bare_releases:
            found.append(f"{self.bare_releases} releases without tl.debug_barrier before them")
        if self.bare_acquires:
            found.append(f"{self.bare_acquires} acquires without tl.debug_barrier after them")
        if self.bare_fences:
            found.append(f"{self.bare_fences} signals or multicast accesses without multimem_fence")
        if self.bare_stores:
            found.append(f"{self.bare_stores} uses of own stores without tl.debug_barrier between")
        if self.waits_for_all:
            found.append(f"{self.stages} stages, but no copy is on its way during a product")
        return found


def supported_targets() -> tuple[str, ...]:
    """Return the targets that the installed Triton compiles for: keys in TENSOR_CORES."""
    amd = not lacks_triton_for_amd()
    return tuple(target for target in TENSOR_CORES if amd or not target.startswith("gfx"))


def compile_all(
    targets: Sequence[str] = tuple(TENSOR_CORES),
    ops: Sequence[str] = (),
    *,
    extent: Extent = "some",
) -> Iterator[Compiled]:
    """Compile every kernel of the ops for every target. Targets are compiled in parallel.

    Args:
        targets: keys in TENSOR_CORES.
        ops: names of ops; all ops if empty.
        extent: see `cases`.

    Yields:
        Each result as soon as it is ready; results for different targets are interleaved.

    Raises:
        ConfigError: a target is unknown, or the installed Triton does not compile for it.
        WeftError: the compiler ended its process.
    """
    for target in targets:
        if target not in TENSOR_CORES:
            raise ConfigError(f"target is {target!r}; it must be one of {', '.join(TENSOR_CORES)}")
        if target not in supported_targets():
            raise ConfigError(f"target is {target!r}; {lacks_triton_for_amd()}")
    came: SimpleQueue[Compiled | BaseException | None] = SimpleQueue()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for target in targets:
            pool.submit(_in_process, target, ops, extent, came)
        running = len(targets)
        while running:
            row = came.get()
            if isinstance(row, BaseException):
                pool.shutdown(cancel_futures=True)
                raise row
            if row is None:
                running -= 1
            else:
                yield row


def _in_process(
    target: str,
    ops: Sequence[str],
    extent: Extent,
    came: SimpleQueue[Compiled | BaseException | None],
) -> None:
    """Compile in a process; put its results into the queue, then None or an error."""
    try:
        # -P: the current folder may contain another `weft` than the installed one.
        command = [sys.executable, "-P", "-m", "weft.kernels.check.aot", target, extent, *ops]
        row = None
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "TRITON_INTERPRET": "0"},
            ) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                row = Compiled(**json.loads(line))
                came.put(row)
            if process.wait():
                after = f"after {row.kernel} of {row.op}" if row else "before its first kernel"
                errors.seek(0)
                last = "\n".join(errors.read().strip().splitlines()[-12:])
                raise WeftError(
                    f"the compiler for {target} ended with {process.returncode} {after}:\n{last}"
                )
        came.put(None)
    except BaseException as error:  # noqa: BLE001 - compile_all raises it again
        came.put(error)


@dataclass(frozen=True, slots=True)
class Case:
    """One call of an op: its rank, sizes and options."""

    rank: int
    sizes: Sizes
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        sizes = self.sizes
        dtype = str(sizes.dtype).removeprefix("torch.")
        return (
            f"rank {self.rank} of {sizes.world}, m {sizes.m}, n {sizes.n}, k {sizes.k}, {dtype}"
            + "".join(f", {name} {value}" for name, value in self.options.items())
        )


def cases(op: Op, target: str, extent: Extent = "some") -> Iterator[Case]:
    """Choose the calls of an op to compile.

    Args:
        op: to call.
        target: to compile for.
        extent: "quick" for one call; "some" for sizes that cover the compiler's variants, and some
            tiles; "all" for these sizes and every tile that tuning may choose.
    """
    from weft.kernels.check.ops.op import Sizes

    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    yield Case(3, Sizes(8, 128, 256, 256, bf16))
    if extent == "quick":
        return
    yield Case(0, Sizes(2, 1, 256, 256, fp16))  # decode; Triton makes 1 a constant
    yield Case(1, Sizes(2, 100, 200, 136, fp16 if op.tiled else fp32))  # no tile divides any size
    tile = (16, 16, 32)
    ones = Sizes(1, 1, 1, 8, bf16, tile)  # every size is 1 if it can be
    yield Case(0, ones, {"blocks": tile} if op.tiled else {})
    if op.tiled:
        yield Case(3, Sizes(8, *PREFILL, bf16))
        yield Case(3, Sizes(8, *DECODE, bf16))
        yield from _tuned_cases(op, target)
        yield from _tiled_cases(op, target, everything=extent == "all")


def _tuned_cases(op: Op, target: str) -> Iterator[Case]:
    """Choose the configurations that were tuned on this machine for the target's GPUs."""
    from weft.kernels.check.ops.op import Sizes
    from weft.kernels.gpu.tuning import table as tuned
    from weft.kernels.gpu.tuning.costs import DTYPES, GPUS, Problem
    from weft.kernels.gpu.tuning.search import options_of

    names = [gpu.name for gpu in GPUS if gpu.target == target]
    for key, entry in sorted(tuned.load(tuned.default_path()).items()):
        fp8 = "_fp8" if DTYPES[key.dtype].itemsize == 1 else ""
        if key.op + fp8 == op.name and any(name in key.device for name in names):
            problem = Problem(key.op, key.world_size, key.rows, key.n, key.k, key.dtype)
            together = problem.attends or key.op in ("matmul_all_reduce", "grouped_matmul")
            m = key.rows if together else key.rows // key.world_size // key.top_k
            dtype = torch.bfloat16 if fp8 else DTYPES[key.dtype]
            sizes = Sizes(key.world_size, max(1, m), key.n, key.k, dtype)
            yield Case(key.world_size - 1, sizes, options_of(problem, entry.config))


def _tiled_cases(op: Op, target: str, *, everything: bool) -> Iterator[Case]:
    """Choose all configurations that tuning may choose.

    Without `everything`, choose one configuration for each tile, and distribute the tiles over the
    products.
    """
    from weft.kernels.check.ops.op import Sizes
    from weft.kernels.gpu.tuning.costs import PAYLOADS, Problem, device_for, space
    from weft.kernels.gpu.tuning.ops import METHODS
    from weft.kernels.gpu.tuning.search import options_of

    name = op.name.removesuffix("_fp8")
    attends = "attention" in name
    if name not in PAYLOADS or (attends and not everything):
        return
    dtype = "bfloat16" if name == op.name else "float8_e4m3fn"
    m, n, k = (*TILED[:2], 128) if attends else TILED
    problem = Problem(name, 8, 8 * m, n, k, dtype)
    found: dict[tuple[int, ...], Case] = {}
    for config in space(problem, device_for(target), METHODS[name][:1]):
        options = options_of(problem, replace(config, senders=0))
        tile = (config.block_m, config.block_n, config.block_k)
        kind: tuple[int, ...] = (*tile, config.stages, config.warps) if everything else tile[:2]
        found.setdefault(kind, Case(3, Sizes(8, m, n, k, torch.bfloat16, tile), options))
    kinds = sorted(found)
    grouped = "grouped" in name
    products = [op for op in PAYLOADS if "matmul" in op and ("grouped" in op) == grouped]
    for kind in kinds if everything else kinds[products.index(name) :: len(products)]:
        yield found[kind]


class LoneRank(Home):
    """A single rank that uses its own memory as its peers' memory. It can only launch kernels.

    Args:
        rank: number of the rank.
        world_size: number of ranks.
        target: a key in TENSOR_CORES.
        reach: number of ranks in a node; all ranks if None. Ranks on other nodes have no address.
    """

    def __init__(self, rank: int, world_size: int, target: str, reach: int | None = None) -> None:
        from weft.kernels.gpu.tuning.costs import device_for

        super().__init__(rank, world_size, torch.device("cpu"))
        self._node = reach or world_size
        self._tensors: list[Tensor] = []
        self._device = device_for(target)

    @property
    def device_name(self) -> str:
        return self._device.name

    @property
    def processors(self) -> int:
        return self._device.processors

    def _exchange(self, call: int, value: str) -> list[str]:
        return [value] * self.world_size

    def _allocate(self, nbytes: int) -> tuple[Tensor, list[int], int]:
        memory = torch.empty(nbytes, dtype=torch.uint8)
        self._tensors.append(memory)
        near = [rank // self._node == self.rank // self._node for rank in range(self.world_size)]
        return memory, [is_near * memory.data_ptr() for is_near in near], memory.data_ptr()

    def _peers(self, addresses: list[int]) -> Sequence[Tensor]:
        return self._tensors[-1:] * self.world_size

    def _release(self) -> None:
        self._tensors.clear()


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, its keyword arguments, and Triton's compiled kernel or an exception."""

    kernel: Any
    kwargs: dict[str, Any]
    result: Any


@contextmanager
def compiling(target: str) -> Iterator[list[Launch]]:
    """Compile launches in this context for a target in TENSOR_CORES, and list them; run none."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        try:
            result = run(kernel, *args, grid=grid, warmup=True, **kwargs)
        except Exception as error:  # noqa: BLE001 - any compiler error is a finding
            result = error
        launches.append(Launch(kernel, kwargs, result))

    driver.set_active(NoDevice(target))
    JITFunction.run = compile_only
    try:
        yield launches
    finally:
        JITFunction.run = run


def compile_ops(
    target: str, names: Sequence[str] = (), extent: Extent = "some"
) -> Iterator[Compiled]:
    """Compile each kernel of the named ops once. An empty list means all ops.

    If NVSHMEM is not installed, "all" leaves out the ops that need it to reach other nodes.

    Kernels must have been imported with TRITON_INTERPRET=0.
    """
    from weft.kernels.check.ops.table import named

    seen: list[Any] = []  # Triton compiles the same launch once
    for op in named(names):
        if op.targets and target not in op.targets:
            continue
        if op.far and not names and not has_bitcode(target):
            continue
        for case in cases(op, target, extent):
            for launch in launches_of(op, target, case):
                if not any(launch.result is other for other in seen):
                    seen.append(launch.result)
                    yield describe(op.name, target, launch, str(case))


def launches_of(op: Op, target: str, case: Case) -> list[Launch]:
    """Return the launches of a call."""
    sizes = case.sizes
    with (
        compiling(target) as launches,
        LoneRank(case.rank, sizes.world, target, op.reach(sizes.world)) as home,
    ):
        workspace = op.workspace(home, sizes)
        tensors = [torch.empty(shape, dtype=sizes.dtype) for shape in op.shapes(sizes)]
        op.function(*tensors, workspace, **op.options | case.options)
    return launches


def has_bitcode(target: str) -> bool:
    """Tell if NVSHMEM's device code for this NVIDIA target is installed."""
    try:
        bitcode(*divmod(int(target.removeprefix("sm_")), 10))
    except SymmetricMemoryError:
        return False
    return True


def constants_of(launch: Launch) -> dict[str, str]:
    """Name the values of a launch's constexpr arguments. A group's values have its field names."""
    constants: dict[str, str] = {}
    for parameter in launch.kernel.params:
        if parameter.is_constexpr and parameter.name in launch.kwargs:
            value = launch.kwargs[parameter.name]
            if hasattr(value, "_asdict"):
                constants |= {name.upper(): str(x) for name, x in value._asdict().items()}
            else:
                constants[parameter.name] = str(value)
    return constants


def describe(op: str, target: str, launch: Launch, case: str = "") -> Compiled:
    """Describe a launch's compiled kernel."""
    constants = constants_of(launch)
    name, result = launch.kernel.fn.__name__, launch.result
    if isinstance(result, Exception):
        cause: BaseException = result
        while cause.__cause__ is not None:  # one for each function on the way
            cause = cause.__cause__
        told = [line.strip() for line in str(cause).splitlines() if re.search(r"\w", line)]
        error = f"{type(cause).__name__}: {' '.join(told[-1:])}"
        return Compiled(op, name, target, constants, case, error=error)
    signals, own = Signals(result.asm["ttir"]), OwnStores(result.asm["ttir"])
    low = int(constants.get("BLOCK_M", LOWEST_TILE)) < LOWEST_TILE
    cores = LOW_TILES.get(target, TENSOR_CORES[target]) if low else TENSOR_CORES[target]
    linked = bool(launch.kwargs.get("extern_libs"))
    if target.startswith("sm_"):
        machine = read_nvidia(result, target, linked=linked)
    else:
        machine = read_amd(result)
    releases, unordered = count_releases(machine.assembly)
    return Compiled(
        op=op,
        kernel=name,
        target=target,
        constants=constants,
        case=case,
        warps=result.metadata.num_warps,
        stages=result.metadata.num_stages,
        registers=machine.registers,
        stack=machine.stack,
        spills=machine.spills,
        looped_spills=machine.looped_spills,
        shared=result.metadata.shared,
        multiplies="tt.dot" in result.asm["ttir"],
        tensor_core_instructions=len(re.findall(cores, machine.assembly)),
        releases=releases,
        unordered_releases=unordered,
        bare_releases=len(signals.bare_releases),
        bare_acquires=len(signals.bare_acquires),
        bare_fences=len(Fences(result.asm["ttir"]).bare),
        bare_stores=0 if signals.releases or signals.acquires else len(own.bare),
        waits_for_all=result.metadata.num_stages > 2 and waits_for_all(result.asm.get("ttgir", "")),
        linked=linked,
    )


def waits_for_all(ttgir: str) -> bool:
    """Tell if a kernel with asynchronous copies always waits until none is on its way.

    Triton's pipeliner spends its stages on loads that determine an address. A loop that loads
    addresses and data in the same iteration is then left without a second buffer for the data.
    """
    left = re.findall(r"async_wait .*\{num = (\d+) : i32\}", ttgir)
    return "async_copy_global_to_local" in ttgir and bool(left) and not any(map(int, left))


def main(target: str, extent: Extent, *ops: str) -> None:
    """Compile for one target, and print a line of JSON for each kernel."""
    for row in compile_ops(target, ops, extent):
        print(json.dumps(asdict(row)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
