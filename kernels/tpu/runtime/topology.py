"""Rings of a mesh of TPUs: neighbours, the barrier at a kernel's start, and cores of a chip.

A mesh axis is a ring of chips over the inter-chip links (ICI); kernels run inside `jax.shard_map`
over the whole mesh and name axes as `jax.lax` collectives do. Devices are addressed by the axes
that differ, `{"x": 3}`.

Barrier. Memory of another chip may be written only after that chip has entered the kernel: until
then XLA may use it for something else. A device signals those that may write to it, and waits for
those that it writes to; in a ring those are its neighbours. The barrier semaphore outlives the
kernel, so a signal of the next kernel's barrier must not be taken for one of this. Kernels that
share a semaphore (`collective_id`) therefore keep this rule: a device leaves one only after all
devices of its group have passed the barrier. In a collective whose result needs every device's data
that holds by itself, for nobody sends before the barrier. So there is one semaphore for each set of
axes. `permute` does not keep the rule and has semaphores of its own.

Megacore. A v4 or v5p chip has two cores that share memory and are one device. A kernel has a grid
of (cores,), `parallel`; semaphores are a core's, and a DMA or a signal of core c reaches core c of
the other device. Rings are dealt out so that each core drives its own, from barrier to end, and
no core waits for the other one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TypeAlias

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

Axes: TypeAlias = str | Sequence[str]
Index: TypeAlias = int | jax.Array

PERMUTES = 16
"""The first semaphore of permutes; those below are for 4 mesh axes, a set each."""


def names(axes: Axes) -> tuple[str, ...]:
    """The axes as a tuple; later ones are minor, as in `jax.lax`."""
    return (axes,) if isinstance(axes, str) else tuple(axes)


def size(axes: Axes) -> int:
    """Devices of the axes."""
    return prod(int(lax.axis_size(name)) for name in names(axes))


def along(axis: str, step: Index) -> jax.Array:
    """The index of the device so many steps further round the ring; `step` is in (-size, size]."""
    n = lax.axis_size(axis)
    return lax.rem(lax.axis_index(axis) + n + step, n)


def collective_id(axes: Axes) -> int:
    """The barrier semaphore of collectives over these axes.

    Raises:
        NotImplementedError: the mesh has more than 4 axes.
    """
    mesh = jax.sharding.get_abstract_mesh().axis_names
    if len(mesh) > 4:
        raise NotImplementedError(f"the mesh has the axes {mesh}; there are semaphores for 4")
    return sum(1 << mesh.index(name) for name in names(axes))


def cores() -> int:
    """Cores of a device: 2 with megacore."""
    return int(pltpu.get_tpu_info().num_cores)


def signal(semaphore: jax.Ref, device: dict[str, Index], core: Index | None = None) -> None:
    """Add 1 to a semaphore of this core on another device."""
    pl.semaphore_signal(
        semaphore, 1, device_id=device, device_id_type=pl.DeviceIdType.MESH, core_index=core
    )


def barrier(writers: Sequence[dict[str, Index]], core: Index | None = None) -> None:
    """Tell those who may write to this device that it is here; wait for as many.

    Args:
        writers: devices. In each of them this one must be among those that hear from it, the same
            number of times: rings and groups are symmetric.
        core: of this device and of the others.
    """
    semaphore = pltpu.get_barrier_semaphore()
    for device in writers:
        signal(semaphore, device, core)
    pl.semaphore_wait(semaphore, len(writers))
