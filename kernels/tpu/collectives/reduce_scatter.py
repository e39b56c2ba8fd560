"""Reduce-scatter over a ring: the devices' data is summed, and each device keeps its part.

    reduce_scatter(x [M, ...]) -> [M / W, ...]        lax.psum_scatter(x, axis, tiled=True)

Protocol. The rows of x are W chunks, and their sums go round a ring as in sums.py. Data travels in
x's dtype: each hop adds in float32 and rounds once.

Two axes are used at once (torus.py). With three, the first axis comes before the other two.
"""

from __future__ import annotations

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from weft.kernels.tpu.collectives import torus
from weft.kernels.tpu.collectives.ring import Lanes, choose_lanes, grid, semaphores, this_core
from weft.kernels.tpu.collectives.sums import LANE_COUNTS, reduce_chunks
from weft.kernels.tpu.runtime.topology import Axes, collective_id, names, size


def reduce_scatter(x: jax.Array, axes: Axes, *, slots: int = 2) -> jax.Array:
    """Sum x over the devices along the axes; each gets its rows.

    Args:
        x: [M, ...], in `shard_map`; the number of devices W divides M.
        axes: mesh axes; later ones are minor in the rows' order.
        slots: maximum number of messages by which a device may be ahead of the next one, at least
            2.

    Returns:
        [M / W, ...].

    Raises:
        ValueError: W does not divide M, or `slots` is less than 2.
    """
    devices = size(axes)
    if x.shape[0] % devices:
        raise ValueError(f"x has {x.shape[0]} rows; they must be a multiple of {devices} devices")
    if slots < 2:
        raise ValueError(f"slots is {slots}; it must be at least 2")
    order = [axis for axis in names(axes) if size(axis) > 1]
    if len(order) == 2 and x.shape[0] // devices % torus.NUM_LANES == 0:
        part = torus.over_two(x.reshape(x.shape[0], -1), order, slots=slots)
        return part.reshape(-1, *x.shape[1:])
    if not order:
        return x
    return reduce_scatter(_over_one(x, order[0], slots), order[1:], slots=slots)


def _over_one(x: jax.Array, axis: str, slots: int) -> jax.Array:
    devices = size(axis)
    m = x.shape[0] // devices
    lanes = choose_lanes(m, LANE_COUNTS)
    chunks = x.reshape(devices, lanes, m // lanes, -1)
    hops = devices - 1
    slots = min(slots, hops)
    shard = chunks.shape[1:]
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    out, _ = pl.pallas_call(
        lambda *refs: _kernel(*refs, axis=axis),
        grid=grid(lanes),
        in_specs=[hbm],
        out_specs=[hbm, hbm],
        out_shape=[
            jax.ShapeDtypeStruct(shard, x.dtype),
            jax.ShapeDtypeStruct((slots, *shard), x.dtype),
        ],
        scratch_shapes=semaphores(lanes, slots),
        compiler_params=pltpu.CompilerParams(
            collective_id=collective_id(axis), dimension_semantics=("parallel",)
        ),
        cost_estimate=pl.CostEstimate(
            flops=hops * chunks.size // devices,
            bytes_accessed=5 * hops * chunks.nbytes // devices,
            transcendentals=0,
            remote_bytes_transferred=hops * chunks.nbytes // devices,
        ),
        name="reduce_scatter",
    )(chunks)
    return out.reshape(m, *x.shape[1:])


def _kernel(
    x: jax.Ref,  # [W, lanes, h, C]
    out: jax.Ref,  # [lanes, h, C]
    buffer: jax.Ref,  # [slots, lanes, h, C]
    *refs: jax.Ref,  # semaphores
    axis: str,
) -> None:
    lanes = Lanes(axis, this_core(), *refs)
    lanes.barrier()
    reduce_chunks(x, out, buffer, lanes)
