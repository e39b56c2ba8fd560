"""Tokens to the devices of their experts, and back: rows by DMA, each once to a device.

    moe_dispatch(x [T, K], expert ids [T, k]) -> rows by expert, routing
    moe_combine(outputs by expert, weights [T, k], routing) -> [T, K]

Devices have E / W experts each, in order. Expert ids are few: all devices get all of them from
XLA's all-gather, and work out for themselves who sends what to whom, in which order, so that
messages are rows and nothing else, and nobody asks how many will come.

Protocol of `exchange`. Device d sends its j-th row for device p straight from where it lies to row
[d, j] of p's buffer: a DMA for each row, all under way at once. Rows of step i, to the device i
further, have send and receive semaphores i, which count bytes: the receiver waits for as many rows
as it has worked out. Each place is written once, so there are no credits; rows that nobody sends
are not written and not read. The barrier is with all devices, for all of them write here. A device
to which some send nothing would not know that they have passed it, as the rule of topology.py
wants; so each tells all, behind the barrier, and waits for all at the end.

`moe_combine` weighs and adds, on each device, what its own experts have made of a token, and so
sends one row back for each that came, by the same kernel the other way about. The token's device
adds the rows of at most min(k, W) devices, in float32.

A row is [K / 128, 128] here: a DMA of part of the rows of a [T, K] array would cut its tiles.
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
    """Who sends what, for one call of `moe_dispatch`; of `T` tokens on each of W devices.

    Attributes:
        order: int32 [W, T]; this device's tokens in the order in which they are sent to each
            device.
        sent: int32 [W]; how many of them are.
        came: int32 [W]; how many rows have come from each device.
        place: int32 [W, T, k]; the row of the result, by expert, of choice k of the T rows that
            came from each device; beyond the rows where the choice is another device's expert.
        choice: int32 [W, T]; which token of the sender each row that came is.
        offsets: int32 [E / W + 1].
    """

    order: jax.Array
    sent: jax.Array
    came: jax.Array
    place: jax.Array
    choice: jax.Array
    offsets: jax.Array


def moe_dispatch(
    x: jax.Array, expert_ids: jax.Array, experts: int, axes: Axes
) -> tuple[jax.Array, Routing]:
    """Tokens at the devices of their experts.

    Args:
        x: [T, K], in `shard_map`; K is a multiple of 128.
        expert_ids: int32 [T, k], no two alike in a row; those not in [0, experts) go nowhere.
        experts: E, a multiple of the number of devices W.
        axes: of the mesh; later ones are minor in the numbers of devices.

    Returns:
        [R, K] with R = W T min(k, E / W), all that could come: this device's experts have the rows
        offsets[e]:offsets[e + 1], in the order of the devices and their tokens, and 0 follows; and
        what `moe_combine` and `grouped_matmul` need.

    Raises:
        ValueError: shapes or `experts` do not fit.
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
    rows = _exchange(x, routing.order, routing.sent, routing.came, axes)
    limit = devices * tokens * min(k, experts // devices)
    source = jnp.arange(devices * tokens, dtype=jnp.int32)[:, None]
    inverse = jnp.zeros(limit, jnp.int32)
    inverse = inverse.at[routing.place.reshape(-1, k)].set(
        jnp.broadcast_to(source, (devices * tokens, k)), mode="drop"
    )
    real = jnp.arange(limit) < routing.offsets[-1]
    by_expert = rows.reshape(devices * tokens, -1)[inverse]
    return jnp.where(real[:, None], by_expert, 0), routing


def moe_combine(y: jax.Array, weights: jax.Array, routing: Routing, axes: Axes) -> jax.Array:
    """The experts' outputs times the router's weights, added by token.

    Args:
        y: [R, K]; of the rows that `moe_dispatch` has given. What is behind them is not looked at.
        weights: float [T, k].
        routing: of that call.
        axes: of that call.

    Returns:
        [T, K] in y's dtype, in which rows travel; added in float32.
    """
    devices, tokens, k = routing.place.shape
    everyone = lax.all_gather(weights.astype(jnp.float32), names(axes)).reshape(devices, tokens, k)
    mine = jnp.take_along_axis(everyone, routing.choice[..., None], axis=1)  # of the rows that came
    here = routing.place < y.shape[0]
    sums = jnp.zeros((devices, tokens, y.shape[1]), jnp.float32)
    for choice in range(k):  # all at once would be k times the memory
        picked = y.at[routing.place[..., choice]].get(mode="clip").astype(jnp.float32)
        weighed = mine[..., choice, None] * picked
        sums += jnp.where(here[..., choice, None], weighed, 0.0)
    sums = sums.astype(y.dtype)
    index = jnp.arange(devices * tokens, dtype=jnp.int32).reshape(devices, tokens)
    back = _exchange(
        sums.reshape(devices * tokens, -1), index, routing.came, routing.sent, axes
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
    everyone = lax.all_gather(expert_ids, names(axes)).reshape(devices, tokens, k)
    goes = (everyone[..., None] // local == jnp.arange(devices)).any(axis=2)  # [from, token, to]
    order = jnp.argsort(~goes, axis=1, stable=True).astype(jnp.int32)  # [from, place, to]
    count = goes.sum(axis=1, dtype=jnp.int32)  # [from, to]
    choice, came = order[:, :, me], count[:, me]
    ids = jnp.take_along_axis(everyone, choice[..., None], axis=1) - me * local
    real = (jnp.arange(tokens)[None] < came[:, None])[..., None]
    expert = jnp.where(real & (ids >= 0) & (ids < local), ids, local).reshape(-1)
    sizes = jnp.bincount(expert, length=local + 1)[:local]
    offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(sizes).astype(jnp.int32)])
    sort = jnp.argsort(expert, stable=True)
    limit = devices * tokens * min(k, local)
    rank = jnp.zeros(expert.size, jnp.int32).at[sort].set(jnp.arange(expert.size, dtype=jnp.int32))
    place = jnp.where(expert < local, rank, limit).reshape(devices, tokens, k)
    return Routing(order[me].T, count[me], came, place, choice, offsets)


def _exchange(
    x: jax.Array, index: jax.Array, sent: jax.Array, came: jax.Array, axes: Axes
) -> jax.Array:
    """Send rows of x to every device.

    Args:
        x: [R, K].
        index: int32 [W, T]; rows of x for each device.
        sent: int32 [W]; how many of them there are.
        came: int32 [W]; how many each device sends here.

    Returns:
        [W, T, K]; row [p, j] is the j-th that device p has sent. Beyond came[p] there is anything.
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
    )(index.reshape(-1), sent, came, rows)
    return out.reshape(devices, tokens, x.shape[1])


def _kernel(
    index: jax.Ref,  # int32 [W * T]
    sent: jax.Ref,  # int32 [W]
    came: jax.Ref,  # int32 [W]
    x: jax.Ref,  # [R, K / 128, 128]
    out: jax.Ref,  # [W, T, K / 128, 128]
    send: jax.Ref,  # DMA semaphores [W]; step 0 is this device itself
    receive: jax.Ref,  # [W]
    passed: jax.Ref,  # a regular semaphore; devices that are behind the barrier
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
        pl.loop(0, came[sources[step]])(lambda number, step=step: row(step, 0).wait_recv())
    if devices > 1:
        pl.semaphore_wait(passed, devices - 1)
