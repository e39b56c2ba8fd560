"""Matrix product and reduce-scatter in one: sums travel during the products that extend them.

    matmul_reduce_scatter(x [M, K], w [K, N]) -> [M / W, N]     lax.psum_scatter(x @ w, tiled=True)

Protocol. The sums of sums.py, with chunks computed when they are needed. A device multiplies chunk
c's rows by its weight, adds message s - 1 for c in the same pipeline, and sends the sum as message
s, from the slot where it arrived. Message 0 is computed in the result's memory, which is written
last, after that message has left.

Each direction has two lanes, and each lane is a ring with a quarter of the rows. While a lane's
message travels, the other three lanes' products run. Each hop therefore has the time of three
quarters of a chunk's product, for half of its bytes on a link.

Data travels in x's dtype: each hop adds in float32 and rounds once. With megacore, each core has
the lanes in one direction. Two axes are used at once (torus.py).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from weft.kernels.tpu.collectives import torus
from weft.kernels.tpu.collectives.reduce_scatter import reduce_scatter
from weft.kernels.tpu.collectives.ring import Lane, Lanes, choose_lanes, grid, semaphores, this_core
from weft.kernels.tpu.collectives.sums import LANE_COUNTS, reduce
from weft.kernels.tpu.runtime.pipeline import SUBLANES, dot, multiply, tiles
from weft.kernels.tpu.runtime.topology import Axes, collective_id, names, size


def matmul_reduce_scatter(x: jax.Array, w: jax.Array, axes: Axes, *, slots: int = 2) -> jax.Array:
    """Sum all devices' products; each gets its rows.

    If a lane would have less than a tile of rows, XLA's product and reduce-scatter run instead;
    they are as fast for so little data.

    Args:
        x: [M, K], in `shard_map`; the number of devices W divides M.
        w: [K, N].
        axes: mesh axes; later ones are minor in the rows' order.
        slots: maximum number of messages by which a device may be ahead of the next one, at least
            2.

    Returns:
        [M / W, N] in x's dtype.

    Raises:
        ValueError: x and w do not match, W does not divide M, or `slots` is less than 2.
    """
    order = [axis for axis in names(axes) if size(axis) > 1]
    devices = size(axes)
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0]:
        raise ValueError(
            f"x is {list(x.shape)} and w is {list(w.shape)}; they must be [M, K], [K, N]"
        )
    if x.shape[0] % devices:
        raise ValueError(f"x has {x.shape[0]} rows; they must be a multiple of {devices} devices")
    if slots < 2:
        raise ValueError(f"slots is {slots}; it must be at least 2")
    lanes = choose_lanes(x.shape[0] // size(order[0]), LANE_COUNTS) if order else 1
    if not order or x.shape[0] // size(order[0]) // lanes < SUBLANES:
        return lax.psum_scatter(dot(x, w), names(axes), tiled=True).astype(x.dtype)
    if len(order) == 2 and x.shape[0] // devices % torus.NUM_LANES == 0:
        return torus.over_two(x, order, w, slots=slots)
    return reduce_scatter(_ring(x, w, order[0], lanes, slots), order[1:], slots=slots)


def _ring(x: jax.Array, w: jax.Array, axis: str, lanes: int, slots: int) -> jax.Array:
    devices = size(axis)
    (rows, k), n = x.shape, w.shape[1]
    m = rows // devices
    h = m // lanes
    hops = devices - 1
    slots = min(slots, hops)
    tall, wide, _ = tiles(h, n, k)
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    message = m * n * x.dtype.itemsize
    out, _ = pl.pallas_call(
        lambda *refs: _kernel(*refs, axis=axis),
        grid=grid(lanes),
        in_specs=[hbm, hbm],
        out_specs=[hbm, hbm],
        out_shape=[
            jax.ShapeDtypeStruct((lanes, h, n), x.dtype),
            jax.ShapeDtypeStruct((slots, lanes, h, n), x.dtype),
        ],
        scratch_shapes=[
            pltpu.VMEM((tall, wide), jnp.float32),
            *semaphores(lanes, slots),
        ],
        compiler_params=pltpu.CompilerParams(
            collective_id=collective_id(axis), dimension_semantics=("parallel",)
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * n * k + hops * m * n,
            bytes_accessed=x.nbytes + devices * lanes * w.nbytes + (2 * devices + hops) * message,
            transcendentals=0,
            remote_bytes_transferred=hops * message,
        ),
        name="matmul_reduce_scatter",
    )(x.reshape(devices, lanes, h, k), w)
    return out.reshape(m, n)


def _kernel(
    x: jax.Ref,  # [W, lanes, h, K]
    w: jax.Ref,  # [K, N]
    out: jax.Ref,  # [lanes, h, N]
    buffer: jax.Ref,  # [slots, lanes, h, N]
    accumulator: jax.Ref,  # float32 [tall, wide]
    *refs: jax.Ref,  # semaphores
    axis: str,
) -> None:
    lanes = Lanes(axis, this_core(), *refs)
    lanes.barrier()

    def begin(lane: Lane, chunk: jax.Array) -> jax.Ref:
        partial = out.at[lane.index]
        multiply(x.at[chunk, lane.index], w, partial, accumulator)
        return partial

    def accumulate(lane: Lane, chunk: jax.Array, received: jax.Ref, total: jax.Ref) -> None:
        multiply(x.at[chunk, lane.index], w, total, accumulator, plus=received)

    for _ in reduce(buffer, lanes, out, begin=begin, accumulate=accumulate):
        pass
