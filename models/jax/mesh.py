"""The device mesh, and the mesh axis along which each logical axis is cut.

One process owns all devices on a node; the mesh spans all processes (distributed.py). It is [ep, tp
/ ep] with the axes "expert" and "width". Experts are assigned along the first axis, and each
expert's width is cut along the second. Everything else is cut along both, taken as one axis
("tensor"). Device i in the mesh is rank i in a `Layout` (models/spec/layout.py), so a weight's part
is found in the same way as on torch's ranks.

Not handled: context parallel, pipeline stages, data-parallel attention (ep above tp).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from weft.kernels.devices import DEVICES, Device
from weft.models.plan.hardware import Slice, read_slice
from weft.models.spec.spec import Axis, WeightSpec

EXPERT, WIDTH = "expert", "width"
TENSOR = (EXPERT, WIDTH)
"""Both mesh axes as one; all weights except the experts are cut along it."""

MESH_AXES: dict[Axis, str | tuple[str, str] | None] = {
    "vocab": TENSOR,
    "hidden": None,
    "q_heads": TENSOR,
    "kv_heads": TENSOR,
    "head_dim": None,
    "intermediate": TENSOR,
    "choice": None,
    "expert": EXPERT,
    "moe_intermediate": WIDTH,
}

REPLICATED = PartitionSpec()

KINDS = {
    "TPU v4": "v4",
    "TPU v5": "v5p",
    "TPU v5 lite": "v5e",
    "TPU v6 lite": "v6e",
    "TPU7x": "tpu7x",
}
"""The planner's name for each kind of device that jax names."""

INTERPRETED = "v5e"
"""What a CPU stands for."""


def make_mesh(devices: Sequence[Any], tp: int, ep: int) -> Mesh:
    """Make the mesh [ep, tp / ep] from the first `tp` devices; neighbouring TPUs are linked."""
    return Mesh(create_device_mesh((ep, tp // ep), devices[:tp]), TENSOR)


def device_of(device: Any) -> Device:
    """Return the planner's figures for a jax device: of a TPU, or of a CPU."""
    if device.platform == "cpu":
        return DEVICES["cpu"]
    return DEVICES[KINDS.get(device.device_kind, INTERPRETED)]


def slice_of(mesh: Mesh) -> Slice:
    """Return the part of a slice that a mesh covers, for the planner.

    CPUs, unknown chips and devices that fill no block of the slice count as the smallest slice with
    as many devices, or as a line.
    """
    devices = list(mesh.devices.flat)
    device = DEVICES[KINDS.get(devices[0].device_kind, INTERPRETED)]
    if devices[0].platform == "tpu":
        along = zip(*(each.coords for each in devices), strict=True)
        sides = [max(axis) - min(axis) + 1 for axis in along][: len(device.shapes[0].split("x"))]
        block = Slice(device, tuple(sides))
        if block.devices == len(devices):
            return block
    known = (read_slice(f"{device.name}:{shape}") for shape in device.shapes)
    line = (1,) * device.shapes[0].count("x") + (-(-len(devices) // device.per_chip),)
    return next((each for each in known if each.devices == len(devices)), Slice(device, line))


def partition(weight: WeightSpec) -> PartitionSpec:
    """Return the mesh axis along which each dimension of a weight is cut."""
    return PartitionSpec(*(MESH_AXES[axis] for axis in weight.axes))


def global_shape(mesh: Mesh, shape: tuple[int, ...], spec: PartitionSpec) -> tuple[int, ...]:
    """Return the shape of an array with `shape` on each device."""
    cuts = (*spec, *(None,) * (len(shape) - len(spec)))
    return tuple(size * _parts(mesh, axis) for size, axis in zip(shape, cuts, strict=True))


def described(
    mesh: Mesh, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec = REPLICATED
) -> jax.ShapeDtypeStruct:
    """Describe an array with `shape` on each device, without data."""
    sharding = NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(global_shape(mesh, shape, spec), dtype, sharding=sharding)


def _parts(mesh: Mesh, axis: str | tuple[str, ...] | None) -> int:
    names = (axis,) if isinstance(axis, str) else axis or ()
    parts = 1
    for name in names:
        parts *= mesh.shape[name]
    return parts
