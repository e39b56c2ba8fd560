"""Reduce-scatter over two torus axes at once, for sums or for products.

    over_two(x [M, K], axes) -> [M / W, K]                lax.psum_scatter(x, axes, tiled=True)
    over_two(x [M, K], axes, w [K, N]) -> [M / W, N]      lax.psum_scatter(x @ w, axes, tiled=True)

Protocol. One half of each chunk's rows is summed round the first axis's rings, and the result round
the second's rings; the other half uses them in reverse order. A chip's four links therefore always
carry traffic, and there are (Wx - 1) + (Wy - 1) hops: the latency variant.

Each half has two lanes, up and down, in each of its two rings, and goes round as in sums.py. In the
first ring, a chunk is all devices' rows on the other axis; in the second, one device's rows:

    first half     ring of x: messages [Wy, h, N]     ring of y: messages [h, N]
    second half    ring of y: messages [Wx, h, N]     ring of x: messages [h, N]

Every ring has its own buffers and semaphores, so a half may start its second ring while neighbours
are still in their first. The halves' hops alternate. With megacore, each core has the lanes in one
direction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from weft.kernels.tpu.collectives.ring import Lane, Lanes, grid, ring_barrier, semaphores, this_core
from weft.kernels.tpu.collectives.sums import reduce
from weft.kernels.tpu.runtime.pipeline import SUBLANES, add, multiply, tiles
from weft.kernels.tpu.runtime.topology import Index, collective_id, size

NUM_LANES = 4
"""Two lanes for each half."""


def over_two(
    x: jax.Array, axes: Sequence[str], w: jax.Array | None = None, *, slots: int = 2
) -> jax.Array:
    """Sum x, or x @ w, over the devices on two axes; each gets its rows.

    Args:
        x: [M, K], in `shard_map`; 4 W divides M, for W devices.
        axes: two axes with more than one device each; the second one is minor in the rows' order.
        w: [K, N], or None.
        slots: maximum number of messages by which a device may be ahead of the next one, at least
            2.

    Returns:
        [M / W, N] in x's dtype.
    """
    sizes = [size(axis) for axis in axes]
    devices = sizes[0] * sizes[1]
    weights = () if w is None else (w,)
    (rows, k), n = x.shape, x.shape[1] if w is None else w.shape[1]
    m = rows // devices
    h = m // NUM_LANES
    free = [min(slots, count - 1) for count in sizes]
    shapes: list[tuple[int, ...]] = [(2, 2, h, n)]
    for first, second in ((0, 1), (1, 0)):  # axes of a half's rings
        shapes.append((2, sizes[second], h, n))
        shapes.append((free[first], 2, sizes[second], h, n))
        shapes.append((free[second], 2, h, n))
    hops = devices - 1  # each with m rows, over all lanes
    sent = hops * m * n * x.dtype.itemsize
    tall, wide, _ = tiles(h, n, k) if weights else (SUBLANES, 128, 0)
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    out, *_ = pl.pallas_call(
        lambda *refs: _kernel(*refs, axes=tuple(axes), product=bool(weights)),
        grid=grid(NUM_LANES),
        in_specs=[hbm] * (1 + len(weights)),
        out_specs=[hbm] * len(shapes),
        out_shape=[jax.ShapeDtypeStruct(shape, x.dtype) for shape in shapes],
        scratch_shapes=[
            pltpu.VMEM((tall, wide), jnp.float32),
            *(each for axis in (0, 1, 1, 0) for each in semaphores(2, free[axis])),
        ],
        compiler_params=pltpu.CompilerParams(
            collective_id=collective_id(axes), dimension_semantics=("parallel",)
        ),
        cost_estimate=pl.CostEstimate(
            flops=(2 * rows * n * k if weights else 0) + hops * m * n,
            bytes_accessed=x.nbytes
            + 5 * sent
            + sum(NUM_LANES * devices * w.nbytes for w in weights),
            transcendentals=0,
            remote_bytes_transferred=sent,
        ),
        name="matmul_reduce_scatter_torus" if weights else "reduce_scatter_torus",
    )(x.reshape(*sizes, NUM_LANES, h, k), *weights)
    return out.reshape(m, n)


def _kernel(*refs: jax.Ref, axes: tuple[str, ...], product: bool) -> None:
    """Run one program per core.

    Args:
        refs: x [Wx, Wy, 4, h, K]; w [K, N] for products; out [2, 2, h, N], by half; for each half
            its partial sums [2, W', h, N] (W' devices in its second ring) and its rings' buffers,
            [slots, 2, W', h, N] and [slots, 2, h, N]; a float32 product tile; and for each half's
            rings the `Lanes` semaphores.
        axes: the two axes.
        product: whether there is a w.
    """
    x, *rest = refs
    w = rest.pop(0) if product else None
    out, halves, accumulator = rest[0], (rest[1:4], rest[4:7]), rest[7]
    core = this_core()
    lanes = [
        Lanes(axes[axis], core, *rest[8 + 3 * i : 11 + 3 * i])
        for i, axis in enumerate((0, 1, 1, 0))
    ]
    ring_barrier(axes, core)

    def run(half: int) -> Iterator[None]:
        parts, first_buffer, second_buffer = halves[half]

        def rows(lane: Lane, chunk: Index) -> jax.Ref:
            every = pl.ds(0, parts.shape[1])
            index = (chunk, every) if half == 0 else (every, chunk)
            return x.at[(*index, 2 * half + lane.index)]

        def begin(lane: Lane, chunk: jax.Array) -> jax.Ref:
            if w is None:
                return rows(lane, chunk)
            partial = parts.at[lane.index]  # written again only at the end
            multiply(rows(lane, chunk), w, partial, accumulator)
            return partial

        def accumulate(lane: Lane, chunk: jax.Array, received: jax.Ref, total: jax.Ref) -> None:
            if w is None:
                add(received, rows(lane, chunk), total)
            else:
                multiply(rows(lane, chunk), w, total, accumulator, plus=received)

        yield from reduce(
            first_buffer,
            lanes[2 * half],
            parts,
            begin=begin,
            accumulate=accumulate,
            unrolled=True,
        )
        yield from reduce(
            second_buffer,
            lanes[2 * half + 1],
            out.at[half],
            begin=lambda lane, chunk: parts.at[lane.index, chunk],
            accumulate=lambda lane, chunk, received, total: add(
                received, parts.at[lane.index, chunk], total
            ),
            unrolled=True,
        )

    for _ in zip_longest(run(0), run(1)):
        pass
