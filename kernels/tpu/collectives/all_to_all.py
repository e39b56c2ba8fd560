"""All-to-all: every device sends one part to every device.

    all_to_all(x [W, ...]) -> [W, ...]        lax.all_to_all(x, axes, 0, 0)

Protocol. Device d sends x[p] to device p, as row d. All W - 1 DMAs are in flight at once. Every
device starts with the device 1 step further, then 2 steps, and so on, so that no device is
everybody's first target; ICI routes them over the torus. Each row is written once. The DMA in step
i uses send and receive semaphores i, and the data received in step i comes from i steps before. The
barrier is with all devices, because all of them write here.
"""

from __future__ import annotations

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from weft.kernels.tpu.runtime.topology import Axes, Index, barrier, collective_id, names, size


def all_to_all(x: jax.Array, axes: Axes) -> jax.Array:
    """Send x[p] to device p, for all p.

    Args:
        x: [W, ...] for W devices, in `shard_map`.
        axes: mesh axes; later ones are minor in the devices' order.

    Returns:
        [W, ...]; row p is from device p.

    Raises:
        ValueError: x does not have W parts.
    """
    order = names(axes)
    devices = size(order)
    if x.shape[0] != devices:
        raise ValueError(
            f"x has {x.shape[0]} parts; it must have one for each of {devices} devices"
        )
    if devices == 1:
        return x
    # [W, rows, columns], because DMAs move whole tiles of the last two dimensions.
    parts = x.reshape(devices, x.shape[1] if x.ndim > 2 else 1, -1)
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    out = pl.pallas_call(
        lambda *refs: _kernel(*refs, axes=order),
        in_specs=[hbm],
        out_specs=hbm,
        out_shape=jax.ShapeDtypeStruct(parts.shape, x.dtype),
        scratch_shapes=[
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA((devices,)),
            pltpu.SemaphoreType.DMA((devices,)),
        ],
        compiler_params=pltpu.CompilerParams(collective_id=collective_id(order)),
        cost_estimate=pl.CostEstimate(
            flops=0,
            bytes_accessed=2 * x.nbytes,
            transcendentals=0,
            remote_bytes_transferred=(devices - 1) * x.nbytes // devices,
        ),
        name="all_to_all",
    )(parts)
    return out.reshape(x.shape)


def device(axes: tuple[str, ...], number: Index) -> dict[str, Index]:
    """Return a device's coordinates on the axes."""
    where: dict[str, Index] = {}
    for axis in reversed(axes):
        where[axis] = lax.rem(number, size(axis))
        number = lax.div(number, size(axis))
    return where


def number(axes: tuple[str, ...]) -> jax.Array:
    """Return this device's number."""
    return lax.axis_index(axes)


def _kernel(
    x: jax.Ref,  # [W, r, C]
    out: jax.Ref,  # [W, r, C]
    local: jax.Ref,  # a DMA semaphore
    send: jax.Ref,  # [W]
    receive: jax.Ref,  # [W]
    *,
    axes: tuple[str, ...],
) -> None:
    devices, me = x.shape[0], number(axes)
    keep = pltpu.make_async_copy(x.at[me], out.at[me], local)
    keep.start()
    peers = [lax.rem(me + i, devices) for i in range(1, devices)]
    barrier([device(axes, peer) for peer in peers])
    copies = [
        pltpu.make_async_remote_copy(
            x.at[peer],
            out.at[me],
            send.at[i],
            receive.at[i],
            device_id=device(axes, peer),
            device_id_type=pl.DeviceIdType.MESH,
        )
        for i, peer in enumerate(peers, start=1)
    ]
    for copy in copies:
        copy.start()
    keep.wait()
    for copy in copies:
        copy.wait()
