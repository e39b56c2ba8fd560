"""Compiles an op for a TPU that is not here, with the compiler that a TPU's host runs (libtpu).

What it refuses, a TPU would: blocks that do not fit VMEM, slices and DMAs off the tiles, casts that
there are none of, arrays that do not fit HBM. `memory_analysis` says what HBM a chip needs. What
`cost_analysis` says of time is not used: with collectives it is negative.
"""

from __future__ import annotations

import re
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding

from weft.kernels.check.tpu.case import Case
from weft.kernels.check.tpu.entry import missing_barriers

CALL = re.compile(
    r'custom_call_target="tpu_custom_call".*?"used_scoped_memory_configs":\[(.*?)\]', re.DOTALL
)
"""A Mosaic kernel in HLO, and the memories that it needs while it runs."""

VMEM = re.compile(r'"memory_space":"1","offset":"\d+","size":"(\d+)"')


def compile_for(case: Case, topology: str) -> dict[str, Any]:
    """What the compiler says of an op.

    Args:
        case: whose mesh has as many devices as the topology.
        topology: "v5e:2x4".

    Returns:
        findings: why it does not compile, barriers that are missing (entry.py), no Mosaic kernel.
        kernels: Mosaic kernels in the program.
        vmem_bytes: of the one that needs most.
        temporary_bytes: of HBM, beyond arguments and results.
        flops, bytes_accessed: what the kernels' cost estimates and XLA's own say.
    """
    description = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    shape = tuple(case.axes.values())
    mesh = topologies.make_mesh(description, shape, tuple(case.axes))
    arguments = [
        jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=NamedSharding(mesh, each.spec))
        for each in case.inputs
    ]
    try:
        traced = case.mapped(case.kernel, mesh, case.donated).trace(*arguments)
        findings = missing_barriers(traced.jaxpr)
        compiled = traced.lower().compile()
    except Exception as error:  # noqa: BLE001 - whatever the compiler refuses is what was found
        return {"findings": [f"refused: {_reason(error)}"]}
    kernels = CALL.findall(compiled.as_text())
    vmem = [int(size) for memories in kernels for size in VMEM.findall(memories)]
    cost = compiled.cost_analysis() or {}
    memory = compiled.memory_analysis()
    return {
        "findings": findings if kernels else [*findings, "no kernel: XLA's own code runs"],
        "kernels": len(kernels),
        "vmem_bytes": max(vmem, default=0),
        "temporary_bytes": memory.temp_size_in_bytes,
        "flops": cost.get("flops", 0.0),
        "bytes_accessed": cost.get("bytes accessed", 0.0),
    }


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])[:500]}"
