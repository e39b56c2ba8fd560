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


def make_mesh(devices: Sequence[Any], tp: int, ep: int) -> Mesh:
    """Make the mesh [ep, tp / ep] from the first `tp` devices; neighbouring TPUs are linked."""
    return Mesh(create_device_mesh((ep, tp // ep), devices[:tp]), TENSOR)


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
