"""What a compiled kernel takes of a GPU: registers, stack, and what of it is spilled.

A thread's stack is memory, and slow. There are two uses of it. Registers that did
not fit are spilled to it: nowhere do we want that where a product multiplies, over
and over. The compiler may choose to spill a few more of what lies idle meanwhile,
addresses for the end of a tile, so that more programs fit on a processor: that costs
nothing one can measure. And functions of a library (NVSHMEM) have local variables
there that they take the address of: requests to the network card, as they are filled
in. ptxas tells how much is which.
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
"""Tensor-core instructions of NVIDIA's machine code, from sm_80 to sm_100."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A kernel as a target has it.

    Attributes:
        registers: of a thread.
        stack: bytes of memory of a thread.
        spills: how many of them are for registers.
        looped_spills: loads and stores of the stack in the innermost loop that multiplies.
        assembly: PTX, or AMD's.
    """

    registers: int
    stack: int
    spills: int
    looped_spills: int
    assembly: str


def read_nvidia(binary: Any, target: str, *, linked: bool) -> Machine:
    """Of Triton's compiled kernel.

    Args:
        target: sm_90, or another.
        linked: with a library, that has local variables.
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
        # To take the machine code apart takes longer than to compile it.
        listing = _output([str(tools / "nvdisasm"), "-c", "-ndf", file.name]) if stack else ""
    # A kernel may have a stack that it makes no use of: what is spilled is stored and loaded.
    if not _STACK_ACCESS.search(listing):
        stack = 0
    spills = _spills_beside_variables(binary, target, stack) if stack and linked else stack
    return Machine(
        registers=int(found[1]),
        stack=stack,
        spills=spills,
        looped_spills=count_in_loops(listing) if spills else 0,
        assembly=binary.asm["ptx"],
    )


def read_amd(binary: Any) -> Machine:
    """The same; where its scratch memory is used is not looked at."""
    assembly = binary.asm["amdgcn"]

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", assembly)
        if found is None:
            raise WeftError(f"the assembly says nothing of {name}")
        return int(found[1])

    scratch = number("private_segment_fixed_size")
    return Machine(number("vgpr_count"), scratch, scratch, scratch, assembly)


def count_in_loops(listing: str) -> int:
    """Loads and stores of the stack in those innermost loops that have a tensor-core instruction.

    A loop is from a label to the last branch back to it.
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
    """Bytes that ptxas, asked again as Triton asked it, says are of spilled registers.

    All of the stack, if it should come out with another one.
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
