"""A compiled kernel's resources: registers, stack, and spilled registers.

A thread's stack is slow memory, with three uses. First, surplus registers are spilled to it; this
must not happen in multiplying loops. Second, the compiler may choose to spill a few idle values,
such as addresses for the end of a tile, so that more programs fit on a processor. This has no
measurable cost. Third, library functions (NVSHMEM) keep local variables there if they need their
address, such as requests to the network card. ptxas reports the shares.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import WeftError

_STACK_ACCESS = re.compile(r"\b(?:STL|LDL)\b")
_PRODUCT = re.compile(r"\b(?:HMMA|QMMA|HGMMA|QGMMA|UTC\w*MMA)\b")
"""NVIDIA's tensor-core instructions, from sm_80 to sm_100."""


@dataclass(frozen=True, slots=True)
class MachineCode:
    """A kernel compiled for a target.

    Attributes:
        registers: registers per thread.
        stack: bytes of stack per thread.
        spills: bytes of stack with spilled registers.
        looped_spills: stack loads and stores in the innermost multiplying loops.
        assembly: PTX, or AMD's.
    """

    registers: int
    stack: int
    spills: int
    looped_spills: int
    assembly: str


def read_nvidia(binary: Any, target: str, *, linked: bool) -> MachineCode:
    """Read Triton's compiled kernel.

    Args:
        binary: the compiled kernel.
        target: such as sm_90.
        linked: whether it is linked with a library, which has local variables.
    """
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = _output([str(tools / "cuobjdump"), "--dump-resource-usage", file.name])
        found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
        if found is None:
            raise WeftError(f"cuobjdump says nothing of resources:\n{usage[:500]}")
        stack = int(found[2]) + int(found[3])
        # Disassembling takes longer than compiling, so it is done only if needed.
        listing = _output([str(tools / "nvdisasm"), "-c", "-ndf", file.name]) if stack else ""
    # A kernel may have an unused stack: spilled registers are stored and loaded.
    if not _STACK_ACCESS.search(listing):
        stack = 0
    spills = _spills_beside_variables(binary, target, stack) if stack and linked else stack
    return MachineCode(
        registers=int(found[1]),
        stack=stack,
        spills=spills,
        looped_spills=count_in_loops(listing) if spills else 0,
        assembly=binary.asm["ptx"],
    )


def read_amd(binary: Any) -> MachineCode:
    """Read AMD's compiled kernel; where it uses its scratch memory is not examined."""
    assembly = binary.asm["amdgcn"]

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", assembly)
        if found is None:
            raise WeftError(f"the assembly says nothing of {name}")
        return int(found[1])

    scratch = number("private_segment_fixed_size")
    return MachineCode(number("vgpr_count"), scratch, scratch, scratch, assembly)


def count_in_loops(listing: str) -> int:
    """Count stack loads and stores in innermost loops with a tensor-core instruction.

    A loop reaches from a label to the last branch back to it.
    """
    lines = listing.splitlines()
    labels = {line.strip(" :"): at for at, line in enumerate(lines) if line.startswith(".L")}
    loops: dict[int, int] = {}
    for at, line in enumerate(lines):
        branch = re.search(r"\bBRA\b.*`\((\.L\w+)\)", line)
        if branch and labels.get(branch[1], at) < at:
            loops[labels[branch[1]]] = at
    products = [at for at, line in enumerate(lines) if _PRODUCT.search(line)]
    multiplying = [
        (first, last)
        for first, last in loops.items()
        if any(first <= at <= last for at in products)
    ]
    innermost = [
        (first, last)
        for first, last in multiplying
        if not any(first < start and end < last for start, end in multiplying)
    ]
    places = [at for at, line in enumerate(lines) if _STACK_ACCESS.search(line)]
    return sum(any(first <= at <= last for first, last in innermost) for at in places)


def _spills_beside_variables(binary: Any, target: str, stack: int) -> int:
    """Return the bytes of spilled registers, from another run of ptxas with Triton's options.

    If this run has another stack size, the whole stack counts.
    """
    from triton.backends.nvidia import compiler

    arch = int(target.removeprefix("sm_"))
    flags = re.findall(r"--regAllocOptLevel=\d", Path(compiler.__file__).read_text())[:1]
    if not binary.metadata.enable_fp_fusion:
        flags.append("--fmad=false")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(binary.asm["ptx"])
        file.flush()
        command = [compiler.get_ptxas(arch).path, "-lineinfo", "-v", *flags]
        command += [f"--gpu-name={compiler.sm_arch_from_capability(arch)}", file.name]
        done = subprocess.run(
            [*command, "-o", "/dev/null"], capture_output=True, text=True, check=True
        )
    again = re.search(r"(\d+) bytes cumulative stack size", done.stderr)
    if again is None or int(again[1]) != stack:
        return stack
    return sum(map(int, re.findall(r"(\d+) bytes spill stores", done.stderr)))


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
