"""Compiles an op for a detached TPU, with libtpu, the compiler on TPU hosts.

It refuses the same as a TPU: blocks beyond VMEM, slices and DMAs off the tiles, unsupported
casts, arrays beyond HBM. `memory_analysis` reports a chip's HBM use. The times from `cost_analysis`
are not used, because they are negative with collectives.
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
"""A Mosaic kernel in HLO, and its memory needs at run time."""

VMEM = re.compile(r'"memory_space":"1","offset":"\d+","size":"(\d+)"')


def compile_for(case: Case, topology: str) -> dict[str, Any]:
    """Compile an op and return the compiler's report.

    Args:
        case: its mesh must have as many devices as the topology.
        topology: such as "v5e:2x4".

    Returns:
        findings: compile errors, missing barriers (entry.py), no Mosaic kernel.
        kernels: Mosaic kernels in the program.
        vmem_bytes: VMEM of the largest one.
        temporary_bytes: HBM beyond arguments and results.
        flops, bytes_accessed: from the kernels' cost estimates and XLA's own.
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
