"""Rings in a TPU mesh: neighbours, the barrier at a kernel's start, and a chip's cores.

A mesh axis is a ring of chips over the inter-chip links (ICI). Kernels run inside `jax.shard_map`
over the whole mesh and name axes as `jax.lax` collectives do. Devices are addressed by the axes
that differ, `{"x": 3}`.

Barrier. Another chip's memory may be written only after that chip has entered the kernel; until
then, XLA may use it otherwise. A device signals the devices that may write to it, and waits for the
devices that it writes to. In a ring, those are its neighbours. The barrier semaphore outlives the
kernel, so the next kernel's signal must not be mistaken for this one's. Kernels that share a
semaphore (`collective_id`) therefore follow a rule: a device exits only after all devices in its
group have passed the barrier. A collective whose result needs every device's data follows it
automatically, because nobody sends before the barrier. One semaphore per set of axes is therefore
enough. `permute` does not follow the rule and has its own semaphores.

Megacore. A v4 or v5p chip has two cores that share memory and form one device. A kernel has a grid
of (cores,), `parallel`. Semaphores belong to a core, and a DMA or signal from core c reaches core c
on the other device. Rings are assigned so that each core drives its own from barrier to end, and
neither core waits for the other.
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
"""First semaphore for permutes; smaller ones serve the sets of up to 4 mesh axes."""


def names(axes: Axes) -> tuple[str, ...]:
    """Return the axes as a tuple; later ones are minor, as in `jax.lax`."""
    return (axes,) if isinstance(axes, str) else tuple(axes)


def size(axes: Axes) -> int:
    """Return the number of devices along the axes."""
    return prod(int(lax.axis_size(name)) for name in names(axes))


def along(axis: str, step: Index) -> jax.Array:
    """Return the device index `step` places further round the ring, `step` in (-size, size]."""
    n = lax.axis_size(axis)
    return lax.rem(lax.axis_index(axis) + n + step, n)


def collective_id(axes: Axes) -> int:
    """Return the barrier semaphore for collectives over these axes.

    Raises:
        NotImplementedError: the mesh has more than 4 axes.
    """
    mesh = jax.sharding.get_abstract_mesh().axis_names
    if len(mesh) > 4:
        raise NotImplementedError(f"the mesh has the axes {mesh}; there are semaphores for 4")
    return sum(1 << mesh.index(name) for name in names(axes))


def cores() -> int:
    """Return the number of cores in a device: 2 with megacore."""
    return int(pltpu.get_tpu_info().num_cores)


def signal(semaphore: jax.Ref, device: dict[str, Index], core: Index | None = None) -> None:
    """Add 1 to a semaphore for this core on another device."""
    pl.semaphore_signal(
        semaphore, 1, device_id=device, device_id_type=pl.DeviceIdType.MESH, core_index=core
    )


def barrier(writers: Sequence[dict[str, Index]], core: Index | None = None) -> None:
    """Signal the devices that may write to this one; wait for equally many signals.

    Args:
        writers: devices. Rings and groups are symmetric, so each of them also signals this device.
        core: core number on this device and the others.
    """
    semaphore = pltpu.get_barrier_semaphore()
    for device in writers:
        signal(semaphore, device, core)
    pl.semaphore_wait(semaphore, len(writers))
