"""Sums that go round a ring: the basis of reduce-scatter and all-reduce.

Protocol. Each device's chunks are split over lanes (ring.py). In a lane that goes up, the sum of
chunk c begins at device c + 1, goes round once, and ends at device c:

    message 0       x[c] on the device after c
    message s > 0   message s - 1 plus the device's own x[c], added in the slot where it arrived;
                    that slot is then the DMA's source
    the end         message W - 2 plus the own x[c] is the result

A slot's credit is given when the DMA out of it is complete (`wait_send`); until then, nobody writes
to it. Before a lane adds to message s, it waits until it has received it and has sent its own, and
gives the credit of s - 1. It therefore waits for a credit only from devices that wait for no later
message. With at least two slots, waits never form a cycle.

The terms are in HBM and go through VMEM in a nested pipeline, while the other lanes' messages
travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from weft.kernels.tpu.collectives.ring import Lane, Lanes
from weft.kernels.tpu.runtime.pipeline import add
from weft.kernels.tpu.runtime.topology import Index

LANE_COUNTS = (4, 2, 1)
"""Possible lane counts; with two lanes per direction, one adds while the other's message travels.
"""


def reduce_chunks(x: jax.Ref, out: jax.Ref, buffer: jax.Ref, lanes: Lanes) -> None:
    """Run the whole reduction after the barrier.

    Args:
        x: [W, lanes, h, C] in HBM.
        out: [lanes, h, C].
        buffer: [slots, lanes, h, C], written by the neighbours.
        lanes: the ring.
    """
    ring = reduce(
        buffer,
        lanes,
        out,
        begin=lambda lane, chunk: x.at[chunk, lane.index],
        accumulate=lambda lane, chunk, received, total: add(
            received, x.at[chunk, lane.index], total
        ),
    )
    for _ in ring:
        pass


def reduce(
    buffer: jax.Ref,
    lanes: Lanes,
    out: jax.Ref,
    *,
    begin: Callable[[Lane, jax.Array], jax.Ref],
    accumulate: Callable[[Lane, jax.Array, jax.Ref, jax.Ref], None],
    unrolled: bool = False,
) -> Iterator[None]:
    """Send sums round the ring, one hop for each `next`.

    Args:
        buffer: [slots, lanes, h, C], written by the neighbours.
        lanes: the ring.
        out: [lanes, h, C], the final sums; a lane's part is written last.
        begin: returns this device's part of a chunk, which begins the sum.
        accumulate: (lane, chunk, received, total): total = received + this device's part of the
            chunk. `total` is `received` or the lane's part of `out`.
        unrolled: pause after each hop, so that rings alternate; otherwise only after the first.
    """
    slots = buffer.shape[0]
    hops = int(lax.axis_size(lanes.axis)) - 1

    def slot(lane: Lane, hop: Index) -> jax.Ref:
        return buffer.at[lax.rem(hop, slots), lane.index]

    def message(lane: Lane, hop: Index) -> pltpu.AsyncCopyDescriptor:
        return lane.message(hop, slot(lane, hop + slots - 1), slot(lane, hop))

    @lanes.each
    def _(lane: Lane) -> None:
        lane.message(0, begin(lane, lane.source(1)), slot(lane, 0)).start()

    def step(hop: Index) -> None:
        @lanes.each
        def _(lane: Lane) -> None:
            message(lane, hop - 1).wait()
            lane.give_credit(hop - 2)
            received = slot(lane, hop - 1)
            accumulate(lane, lane.source(hop + 1), received, received)
            lane.take_credit(hop)
            message(lane, hop).start()

    yield
    if unrolled:
        for hop in range(1, hops):
            step(hop)
            yield
    else:
        pl.loop(1, hops)(step)

    @lanes.each
    def _(lane: Lane) -> None:
        message(lane, hops - 1).wait()
        own = lax.axis_index(lane.axis)
        accumulate(lane, own, slot(lane, hops - 1), out.at[lane.index])
