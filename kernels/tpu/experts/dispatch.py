"""Sends tokens to their experts' devices, and results back: each row by one DMA, once per device.

    moe_dispatch(x [T, K], expert ids [T, k]) -> rows by expert, routing
    moe_combine(outputs by expert, weights [T, k], routing) -> [T, K]

Each device has E / W consecutive experts. Expert ids are small, so XLA's all-gather sends all of
them to all devices. Each device then computes who sends which rows to whom, in which order.
Messages are thus rows and nothing else, and nobody asks for counts.

Protocol of `_exchange`. Device d sends its j-th row for device p straight from its place in x to
row [d, j] of p's buffer: one DMA per row, all in flight at once. Rows in step i, to the device i
steps further, use send and receive semaphores i. These count bytes, and the receiver waits for the
computed number of rows. Each buffer row is written once, so no credits are needed. Unsent rows are
neither written nor read. The barrier is with all devices, because all of them write here. A device
that receives nothing from some devices would not know that they have passed the barrier, as the
rule in topology.py requires. Each device therefore signals all others after the barrier, and waits
for all such signals at the end.

In `moe_combine`, each device weights and adds its own experts' outputs for a token. It sends one
row back for each received row, by the same kernel in reverse. The token's device adds the rows from
at most min(k, W) devices, in float32.

A row is [K / 128, 128] here, because a DMA of single rows in a [T, K] array would cut its tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from weft.kernels.tpu.collectives.all_to_all import device
from weft.kernels.tpu.runtime.topology import Axes, barrier, collective_id, names, signal, size

LANES = 128


class Routing(NamedTuple):
    """Routing of one `moe_dispatch` call, with T tokens on each of W devices.

    Attributes:
        order: int32 [W, T]; this device's tokens, in sending order for each device.
        sent: int32 [W]; number of rows sent to each device.
        received: int32 [W]; number of rows received from each device.
        row: int32 [W, T, k]; row of the result, by expert, for choice k of the T rows received from
            each device; beyond the last row if the expert is on another device.
        token: int32 [W, T]; the sender's token for each received row.
        offsets: int32 [E / W + 1].
    """

    order: jax.Array
    sent: jax.Array
    received: jax.Array
    row: jax.Array
    token: jax.Array
    offsets: jax.Array


def moe_dispatch(
    x: jax.Array, expert_ids: jax.Array, experts: int, axes: Axes
) -> tuple[jax.Array, Routing]:
    """Send tokens to their experts' devices.

    Args:
        x: [T, K], in `shard_map`; K is a multiple of 128.
        expert_ids: int32 [T, k], without duplicates in a row; ids outside [0, experts) go nowhere.
        experts: E, a multiple of the number of devices W.
        axes: mesh axes; later ones are minor in the devices' order.

    Returns:
        [R, K] with R = W T min(k, E / W), the maximum: this device's experts have the rows
            offsets[e]:offsets[e + 1], ordered by device and token, followed by zeros;
        and the routing for `moe_combine` and `grouped_matmul`.

    Raises:
        ValueError: shapes or `experts` do not match.
    """
    tokens, k = expert_ids.shape
    devices = size(axes)
    if x.shape[0] != tokens or x.shape[1] % LANES:
        raise ValueError(
            f"x is {list(x.shape)} and expert_ids {list(expert_ids.shape)}; they must be [T, K] "
            f"and [T, k], K a multiple of {LANES}"
        )
    if experts % devices:
        raise ValueError(f"experts is {experts}; it must be a multiple of {devices} devices")
    routing = _routing(expert_ids, experts, axes)
    rows = _exchange(x, routing.order, routing.sent, routing.received, axes)
    limit = devices * tokens * min(k, experts // devices)
    source = jnp.arange(devices * tokens, dtype=jnp.int32)[:, None]
    inverse = jnp.zeros(limit, jnp.int32)
    inverse = inverse.at[routing.row.reshape(-1, k)].set(
        jnp.broadcast_to(source, (devices * tokens, k)), mode="drop"
    )
    real = jnp.arange(limit) < routing.offsets[-1]
    by_expert = rows.reshape(devices * tokens, -1)[inverse]
    return jnp.where(real[:, None], by_expert, 0), routing


def moe_combine(y: jax.Array, weights: jax.Array, routing: Routing, axes: Axes) -> jax.Array:
    """Sum the experts' outputs times the router's weights, for each token.

    Args:
        y: [R, K]; outputs for the rows from `moe_dispatch`; later rows are ignored.
        weights: float [T, k].
        routing: from the same call.
        axes: of the same call.

    Returns:
        [T, K] in y's dtype, which rows travel in; added in float32.
    """
    devices, tokens, k = routing.row.shape
    gathered = lax.all_gather(weights.astype(jnp.float32), names(axes)).reshape(devices, tokens, k)
    row_weights = jnp.take_along_axis(
        gathered, routing.token[..., None], axis=1
    )  # for received rows
    here = routing.row < y.shape[0]
    sums = jnp.zeros((devices, tokens, y.shape[1]), jnp.float32)
    for choice in range(k):  # all at once would need k times the memory
        picked = y.at[routing.row[..., choice]].get(mode="clip").astype(jnp.float32)
        weighted = row_weights[..., choice, None] * picked
        sums += jnp.where(here[..., choice, None], weighted, 0.0)
    sums = sums.astype(y.dtype)
    index = jnp.arange(devices * tokens, dtype=jnp.int32).reshape(devices, tokens)
    back = _exchange(
        sums.reshape(devices * tokens, -1), index, routing.received, routing.sent, axes
    ).reshape(devices, tokens, -1)
    real = jnp.arange(tokens)[None] < routing.sent[:, None]
    total = jnp.zeros((tokens, y.shape[1]), jnp.float32)
    for peer in range(devices):
        row = jnp.where(real[peer][:, None], back[peer].astype(jnp.float32), 0.0)
        total = total.at[routing.order[peer]].add(row)
    return total.astype(y.dtype)


def _routing(expert_ids: jax.Array, experts: int, axes: Axes) -> Routing:
    tokens, k = expert_ids.shape
    devices, me = size(axes), lax.axis_index(names(axes))
    local = experts // devices
    gathered = lax.all_gather(expert_ids, names(axes)).reshape(devices, tokens, k)
    goes = (gathered[..., None] // local == jnp.arange(devices)).any(axis=2)  # [from, token, to]
    order = jnp.argsort(~goes, axis=1, stable=True).astype(jnp.int32)  # [from, place, to]
    count = goes.sum(axis=1, dtype=jnp.int32)  # [from, to]
    token, received = order[:, :, me], count[:, me]
    ids = jnp.take_along_axis(gathered, token[..., None], axis=1) - me * local
    real = (jnp.arange(tokens)[None] < received[:, None])[..., None]
    expert = jnp.where(real & (ids >= 0) & (ids < local), ids, local).reshape(-1)
    sizes = jnp.bincount(expert, length=local + 1)[:local]
    offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(sizes).astype(jnp.int32)])
    sort = jnp.argsort(expert, stable=True)
    limit = devices * tokens * min(k, local)
    rank = jnp.zeros(expert.size, jnp.int32).at[sort].set(jnp.arange(expert.size, dtype=jnp.int32))
    row = jnp.where(expert < local, rank, limit).reshape(devices, tokens, k)
    return Routing(order[me].T, count[me], received, row, token, offsets)


def _exchange(
    x: jax.Array, index: jax.Array, sent: jax.Array, received: jax.Array, axes: Axes
) -> jax.Array:
    """Send rows of x to every device.

    Args:
        x: [R, K].
        index: int32 [W, T]; rows of x for each device.
        sent: int32 [W]; number of rows to send to each device.
        received: int32 [W]; number of rows to receive from each device.
        axes: mesh axes.

    Returns:
        [W, T, K]; row [p, j] is the j-th row from device p; arbitrary from received[p] on.
    """
    order = names(axes)
    devices, tokens = index.shape
    rows = x.reshape(x.shape[0], -1, LANES)
    out = pl.pallas_call(
        lambda *refs: _kernel(*refs, axes=order),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                pltpu.SemaphoreType.DMA((devices,)),
                pltpu.SemaphoreType.DMA((devices,)),
                pltpu.SemaphoreType.REGULAR,
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((devices, tokens, *rows.shape[1:]), x.dtype),
        compiler_params=pltpu.CompilerParams(
            collective_id=collective_id(order) if devices > 1 else None
        ),
        cost_estimate=pl.CostEstimate(  # if every token goes to every device
            flops=0,
            bytes_accessed=2 * devices * tokens * x.shape[1] * x.dtype.itemsize,
            transcendentals=0,
            remote_bytes_transferred=(devices - 1) * tokens * x.shape[1] * x.dtype.itemsize,
        ),
        name="moe_exchange",
    )(index.reshape(-1), sent, received, rows)
    return out.reshape(devices, tokens, x.shape[1])


def _kernel(
    index: jax.Ref,  # int32 [W * T]
    sent: jax.Ref,  # int32 [W]
    received: jax.Ref,  # int32 [W]
    x: jax.Ref,  # [R, K / 128, 128]
    out: jax.Ref,  # [W, T, K / 128, 128]
    send: jax.Ref,  # DMA semaphores [W]; step 0 is this device itself
    receive: jax.Ref,  # [W]
    passed: jax.Ref,  # a regular semaphore; counts devices that have passed the barrier
    *,
    axes: tuple[str, ...],
) -> None:
    devices, tokens = out.shape[:2]
    me = lax.axis_index(axes)
    peers = [lax.rem(me + step, devices) for step in range(devices)]
    sources = [lax.rem(me + devices - step, devices) for step in range(devices)]
    if devices > 1:
        barrier([device(axes, peer) for peer in peers[1:]])
        for peer in peers[1:]:
            signal(passed, device(axes, peer))

    def row(step: int, number: jax.Array) -> pltpu.AsyncCopyDescriptor:
        source = x.at[index[peers[step] * tokens + number]]
        target = out.at[me, number]
        if step == 0:
            return pltpu.make_async_copy(source, target, receive.at[0])
        return pltpu.make_async_remote_copy(
            source,
            target,
            send.at[step],
            receive.at[step],
            device_id=device(axes, peers[step]),
            device_id_type=pl.DeviceIdType.MESH,
        )

    for step in range(devices):
        pl.loop(0, sent[peers[step]])(lambda number, step=step: row(step, number).start())
    for step in range(devices):
        if step:
            pl.loop(0, sent[peers[step]])(lambda number, step=step: row(step, number).wait_send())
        pl.loop(0, received[sources[step]])(lambda number, step=step: row(step, 0).wait_recv())
    if devices > 1:
        pl.semaphore_wait(passed, devices - 1)
