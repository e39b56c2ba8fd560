"""All-reduce over a ring: each device gets the sum over all devices.

    all_reduce(x [M, ...]) -> [M, ...]        lax.psum(x, axis)

Protocol. First the sums of sums.py, written to their final positions in the result; then the
all-gather of all_gather.py, from there. Both run in one kernel, behind one barrier. A lane starts
its second part once its own sum is done, whatever the other devices do. That is safe. The first
part writes to the neighbours' buffer and to the own position in the result. The second part writes
to the other positions, each once. Each part has its own semaphores.

Over several axes: reduce_scatter, then all_gather, which both use all axes' links at once.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from weft.kernels.tpu.collectives.all_gather import all_gather
from weft.kernels.tpu.collectives.reduce_scatter import reduce_scatter
from weft.kernels.tpu.collectives.ring import Lane, Lanes, choose_lanes, grid, semaphores, this_core
from weft.kernels.tpu.collectives.sums import LANE_COUNTS, reduce_chunks
from weft.kernels.tpu.runtime.topology import Axes, Index, collective_id, names, size


def all_reduce(x: jax.Array, axes: Axes, *, slots: int = 2) -> jax.Array:
    """Sum x over the devices along the axes.

    Args:
        x: any shape, in `shard_map`. Its elements are split over the devices; zeros pad them to a
            multiple.
        axes: mesh axes.
        slots: maximum number of messages by which a device may be ahead of the next one, at least
            2.

    Returns:
        x's shape and dtype: added in float32, rounded at each hop.

    Raises:
        ValueError: `slots` is less than 2.
    """
    if slots < 2:
        raise ValueError(f"slots is {slots}; it must be at least 2")
    order = [axis for axis in names(axes) if size(axis) > 1]
    if not order:
        return x
    rows = _rows(x, size(order))
    if len(order) == 1:
        total = _over_one(rows, order[0], slots)
    else:
        total = all_gather(reduce_scatter(rows, order, slots=slots), order)
    return total.reshape(-1)[: x.size].reshape(x.shape)


def _rows(x: jax.Array, devices: int) -> jax.Array:
    """Reshape x to [M, C] with rows that can be split: unchanged if possible, else rows of 128."""
    unit = devices * LANE_COUNTS[0]
    if x.ndim > 1 and x.shape[0] % unit == 0:
        return x.reshape(x.shape[0], -1)
    flat = x.reshape(-1)
    return jnp.pad(flat, (0, -flat.size % (unit * 128))).reshape(-1, 128)


def _over_one(x: jax.Array, axis: str, slots: int) -> jax.Array:
    devices = size(axis)
    m = x.shape[0] // devices
    lanes = choose_lanes(m, LANE_COUNTS)
    chunks = x.reshape(devices, lanes, m // lanes, -1)
    hops = devices - 1
    slots = min(slots, hops)
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    out, _ = pl.pallas_call(
        lambda *refs: _kernel(*refs, axis=axis),
        grid=grid(lanes),
        in_specs=[hbm],
        out_specs=[hbm, hbm],
        out_shape=[
            jax.ShapeDtypeStruct(chunks.shape, x.dtype),
            jax.ShapeDtypeStruct((slots, *chunks.shape[1:]), x.dtype),
        ],
        scratch_shapes=[
            *semaphores(lanes, slots),
            pltpu.SemaphoreType.DMA((lanes, hops)),
            pltpu.SemaphoreType.DMA((lanes, hops)),
        ],
        compiler_params=pltpu.CompilerParams(
            collective_id=collective_id(axis), dimension_semantics=("parallel",)
        ),
        cost_estimate=pl.CostEstimate(
            flops=hops * x.size // devices,
            bytes_accessed=7 * hops * x.nbytes // devices,
            transcendentals=0,
            remote_bytes_transferred=2 * hops * x.nbytes // devices,
        ),
        name="all_reduce",
    )(chunks)
    return out.reshape(x.shape)


def _kernel(
    x: jax.Ref,  # [W, lanes, h, C]
    out: jax.Ref,  # [W, lanes, h, C]
    buffer: jax.Ref,  # [slots, lanes, h, C]
    send: jax.Ref,  # [lanes, slots]
    receive: jax.Ref,  # [lanes, slots]
    credit: jax.Ref,  # [lanes]
    gather_send: jax.Ref,  # [lanes, hops]
    gather_receive: jax.Ref,  # [lanes, hops]
    *,
    axis: str,
) -> None:
    lanes = Lanes(axis, this_core(), send, receive, credit)
    lanes.barrier()
    reduce_chunks(x, out.at[lax.axis_index(axis)], buffer, lanes)

    def message(lane: Lane, hop: Index) -> pltpu.AsyncCopyDescriptor:
        position = out.at[lane.source(hop), lane.index]
        return pltpu.make_async_remote_copy(
            position,
            position,
            gather_send.at[lane.index, hop],
            gather_receive.at[lane.index, hop],
            device_id=lane.next,
            device_id_type=pl.DeviceIdType.MESH,
        )

    lanes.each(lambda lane: message(lane, 0).start())

    @pl.loop(1, gather_send.shape[1])
    def _(hop: jax.Array) -> None:
        @lanes.each
        def _(lane: Lane) -> None:
            message(lane, hop - 1).wait()
            message(lane, hop).start()

    lanes.each(lambda lane: message(lane, gather_send.shape[1] - 1).wait())
