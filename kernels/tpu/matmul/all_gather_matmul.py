"""All-gather and matrix product in one: each hop's messages travel during a product.

    all_gather_matmul(x [m, K], w [K, N]) -> [W m, N]        lax.all_gather(x, tiled=True) @ w

Protocol. The all-gather of all_gather.py writes into a buffer in HBM. During each hop, the core
multiplies the rows received in the hop before:

    hop 0        own rows out                     own rows @ w
    hop s > 0    rows received in hop s - 1 out   the same rows @ w
    the end                                       the last hop's rows @ w

A DMA only reads rows that the product reads, too, and writes to parts of the buffer that nobody has
read. No row is written twice, so no credits are needed, and a device may be any number of hops
ahead. The operands are in HBM; a nested pipeline moves them through VMEM in tiles.

Over two axes at once, one half's lanes go round the first axis and then the
second; the other half's lanes use them in reverse order. A chip's four links carry traffic,
and there are (Wx - 1) + (Wy - 1) hops instead of Wx Wy - 1: the latency variant, for few rows on
many chips.

With megacore, each core has the lanes in one direction and their rows' products.
"""

from __future__ import annotations

from typing import Literal, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from weft.kernels.tpu.collectives.all_gather import (
    Gather,
    Position,
    Route,
    lane_counts,
    own_position,
    semaphores,
)
from weft.kernels.tpu.collectives.ring import choose_lanes, this_core
from weft.kernels.tpu.runtime.pipeline import SUBLANES, dot, multiply, tiles
from weft.kernels.tpu.runtime.topology import Axes, collective_id, cores, names, size


@overload
def all_gather_matmul(
    x: jax.Array, w: jax.Array, axes: Axes, *, gathered: Literal[False] = False
) -> jax.Array: ...


@overload
def all_gather_matmul(
    x: jax.Array, w: jax.Array, axes: Axes, *, gathered: Literal[True]
) -> tuple[jax.Array, jax.Array]: ...


def all_gather_matmul(
    x: jax.Array, w: jax.Array, axes: Axes, *, gathered: bool = False
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Multiply all devices' rows by this device's weight.

    If a lane would have less than a tile of rows, or with one device, XLA's all-gather and product
    run instead: hops are then too short to hide anything.

    Args:
        x: [m, K], in `shard_map`.
        w: [K, N].
        axes: one or two mesh axes; later ones are minor in the rows' order.
        gathered: also return all rows, for another product.

    Returns:
        [W m, N] in x's dtype, for W devices; and [W m, K] if `gathered`.

    Raises:
        ValueError: x and w do not match.
    """
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0]:
        raise ValueError(
            f"x is {list(x.shape)} and w is {list(w.shape)}; they must be [m, K], [K, N]"
        )
    order = tuple(name for name in names(axes) if size(name) > 1)
    lanes = choose_lanes(x.shape[0], lane_counts(order)) if order else 1
    if not order or x.shape[0] // lanes < SUBLANES:
        rows = lax.all_gather(x, names(axes), tiled=True)
        product = dot(rows, w).astype(x.dtype)
    else:
        product, rows = _ring(x, w, order, lanes)
    return (product, rows) if gathered else product


def _ring(
    x: jax.Array, w: jax.Array, axes: tuple[str, ...], lanes: int
) -> tuple[jax.Array, jax.Array]:
    (m, k), n = x.shape, w.shape[1]
    devices = size(axes)
    sizes = tuple(map(size, axes))
    h = m // lanes
    tall, wide, _ = tiles(h, n, k)
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    both = lanes == 2 * len(axes)
    out, rows = pl.pallas_call(
        lambda *refs: _kernel(*refs, axes=axes),
        grid=(cores() if both else 1,),
        in_specs=[hbm, hbm],
        out_specs=[hbm, hbm],
        out_shape=[
            jax.ShapeDtypeStruct((*sizes, lanes, h, n), x.dtype),
            jax.ShapeDtypeStruct((*sizes, lanes, h, k), x.dtype),
        ],
        scratch_shapes=[
            pltpu.VMEM((tall, wide), jnp.float32),
            *semaphores(lanes, axes),
        ],
        compiler_params=pltpu.CompilerParams(
            collective_id=collective_id(axes), dimension_semantics=("parallel",)
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * devices * m * n * k,
            bytes_accessed=devices * (3 * x.nbytes + lanes * w.nbytes + m * n * x.dtype.itemsize),
            transcendentals=0,
            remote_bytes_transferred=(devices - 1) * x.nbytes,
        ),
        name="all_gather_matmul",
    )(x.reshape(lanes, h, k), w)
    return out.reshape(devices * m, n), rows.reshape(devices * m, k)


def _kernel(
    x: jax.Ref,  # [lanes, h, K]
    w: jax.Ref,  # [K, N]
    out: jax.Ref,  # [*sizes, lanes, h, N]
    rows: jax.Ref,  # [*sizes, lanes, h, K]
    accumulator: jax.Ref,  # float32 [tall, wide]
    *refs: jax.Ref,  # semaphores
    axes: tuple[str, ...],
) -> None:
    def on_own(route: Route) -> None:
        position = out.at[(*own_position(axes), route.lane)]
        multiply(x.at[route.lane], w, position, accumulator)

    def on_received(route: Route, position: Position) -> None:
        multiply(rows.at[position], w, out.at[position], accumulator)

    Gather(axes, this_core(), x, rows, *refs).run(on_own, on_received)
