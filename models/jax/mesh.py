"""The mesh that a model is split over, and which of its axes each logical axis is cut along.

One process has all devices of a machine, and the mesh those of all processes (distributed.py). It
is [ep, tp / ep], with the axes "expert" and "width": experts are dealt out along the first and each
one's width is cut along the second; everything else is cut along both, taken as one ("tensor").
Device i of the mesh is rank i of a `Layout` (models/spec/layout.py), so that a weight's part is
found in the same way as on torch's ranks.

Not here: context parallel, pipeline stages, copies of attention (ep above tp).
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
"""Both axes of the mesh, as one: what is not an expert is cut along it."""

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
    """[ep, tp / ep] of the first `tp` devices; of TPUs in an order whose neighbours are linked."""
    return Mesh(create_device_mesh((ep, tp // ep), devices[:tp]), TENSOR)


def partition(weight: WeightSpec) -> PartitionSpec:
    """Which axis of the mesh each dimension of a weight is cut along."""
    return PartitionSpec(*(MESH_AXES[axis] for axis in weight.axes))


def global_shape(mesh: Mesh, shape: tuple[int, ...], spec: PartitionSpec) -> tuple[int, ...]:
    """The shape of an array of which each device has `shape`."""
    cuts = (*spec, *(None,) * (len(shape) - len(spec)))
    return tuple(size * _parts(mesh, axis) for size, axis in zip(shape, cuts, strict=True))


def described(
    mesh: Mesh, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec = REPLICATED
) -> jax.ShapeDtypeStruct:
    """An array of which each device has `shape`, without its numbers."""
    sharding = NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(global_shape(mesh, shape, spec), dtype, sharding=sharding)


def _parts(mesh: Mesh, axis: str | tuple[str, ...] | None) -> int:
    names = (axis,) if isinstance(axis, str) else axis or ()
    parts = 1
    for name in names:
        parts *= mesh.shape[name]
    return parts
