"""Permute: every device sends its data to a neighbour on a ring.

    permute(x, axis, 1)        lax.ppermute(x, axis, [(i, (i + 1) % W) for i in range(W)])

Protocol. DMAs from HBM to HBM, of any size, in a few parts in flight at once.

Barrier. Only the sender to this device must know that it is ready. So a device signals the device
before it, and waits for the device after it. It may exit before others have met. The rule in
topology.py therefore does not hold, and each axis and direction has its own barrier semaphore. With
it, the count is never mistaken. The device after this one signals again only in its next call. It
enters that call after receiving this call's data, and this data is sent after this call's wait.
"""

from __future__ import annotations

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from weft.kernels.tpu.collectives.ring import choose_lanes
from weft.kernels.tpu.runtime.topology import PERMUTES, along, barrier, size

PARTS = (4, 2, 1)


def permute(x: jax.Array, axis: str, direction: int = 1) -> jax.Array:
    """Return the data of the device before this one on the axis.

    Args:
        x: any shape, in `shard_map`.
        axis: mesh axis.
        direction: 1 sends to the device after, -1 to the device before.

    Returns:
        x's shape and dtype.

    Raises:
        ValueError: the direction is neither.
    """
    if direction not in (1, -1):
        raise ValueError(f"direction is {direction}; it must be 1 or -1")
    if size(axis) == 1:
        return x
    rows = x.reshape(x.shape[0] if x.ndim else 1, -1)
    parts = choose_lanes(rows.shape[0], PARTS)
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    mesh = jax.sharding.get_abstract_mesh().axis_names
    out = pl.pallas_call(
        lambda *refs: _kernel(*refs, axis=axis, direction=direction),
        in_specs=[hbm],
        out_specs=hbm,
        out_shape=jax.ShapeDtypeStruct((parts, rows.shape[0] // parts, rows.shape[1]), x.dtype),
        scratch_shapes=[pltpu.SemaphoreType.DMA((parts,)) for _ in range(2)],
        compiler_params=pltpu.CompilerParams(
            collective_id=PERMUTES + 2 * mesh.index(axis) + (direction < 0)
        ),
        cost_estimate=pl.CostEstimate(
            flops=0,
            bytes_accessed=2 * x.nbytes,
            transcendentals=0,
            remote_bytes_transferred=x.nbytes,
        ),
        name="permute",
    )(rows.reshape(parts, rows.shape[0] // parts, rows.shape[1]))
    return out.reshape(x.shape)


def _kernel(
    x: jax.Ref,  # [parts, h, C]
    out: jax.Ref,  # [parts, h, C]
    send: jax.Ref,  # [parts]
    receive: jax.Ref,  # [parts]
    *,
    axis: str,
    direction: int,
) -> None:
    barrier([{axis: along(axis, -direction)}])
    copies = [
        pltpu.make_async_remote_copy(
            x.at[i],
            out.at[i],
            send.at[i],
            receive.at[i],
            device_id={axis: along(axis, direction)},
            device_id_type=pl.DeviceIdType.MESH,
        )
        for i in range(x.shape[0])
    ]
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.wait()
