"""Sums that go round a ring: what reduce-scatters and all-reduces are made of.

The chunks of all devices are dealt out to lanes (ring.py). In a lane that goes up, the sum of chunk
c begins at device c + 1 and goes once round, to end at device c:

    message 0       x[c], of the device after c
    message s > 0   what message s - 1 brought, to which the device has added its own x[c]: in the
                    slot where it came, which is then the source of the DMA
    the end         what message W - 2 brought, plus the own x[c], is the result

A slot's credit is given when the DMA out of it is complete (`wait_send`); until then nobody writes
to it. A lane takes message s, and before it adds, waits until message s is out of its hands and
gives the credit of s - 1: so it waits for a credit only of devices that wait for none of a later
message, and with at least two slots there is no ring of waits.

What is added is in HBM, and goes through VMEM in a nested pipeline, while the messages of the other
lanes travel.
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

LANES = (4, 2, 1)
"""To choose from; two in each direction, so that one adds while another one's message travels."""


def reduce_chunks(x: jax.Ref, out: jax.Ref, buffer: jax.Ref, lanes: Lanes) -> None:
    """All that is behind the barrier.

    Args:
        x: [W, lanes, h, C] in HBM.
        out: [lanes, h, C].
        buffer: [slots, lanes, h, C], into which the neighbours write.
    """
    ring = reduce(
        buffer,
        lanes,
        out,
        begin=lambda lane, chunk: x.at[chunk, lane.index],
        accumulate=lambda lane, chunk, came, total: add(came, x.at[chunk, lane.index], total),
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
    """Send sums round the ring, as far as one hop for each `next`.

    Args:
        buffer: [slots, lanes, h, C], into which the neighbours write.
        out: [lanes, h, C], where the sums go; a lane's is written last.
        begin: where this device's part of a chunk is, which begins the sum.
        accumulate: (lane, chunk, came, total): total = came + this device's part of the chunk.
            `total` is `came` or the lane's of `out`.
        unrolled: stop after each hop, so that another ring takes turns; else after the first.
    """
    slots = buffer.shape[0]
    hops = int(lax.axis_size(lanes.axis)) - 1

    def slot(lane: Lane, hop: Index) -> jax.Ref:
        return buffer.at[lax.rem(hop, slots), lane.index]

    def message(lane: Lane, hop: Index) -> pltpu.AsyncCopyDescriptor:
        return lane.message(hop, slot(lane, hop + slots - 1), slot(lane, hop))

    @lanes.each
    def _(lane: Lane) -> None:
        lane.message(0, begin(lane, lane.behind(1)), slot(lane, 0)).start()

    def step(hop: Index) -> None:
        @lanes.each
        def _(lane: Lane) -> None:
            message(lane, hop - 1).wait()
            lane.give_credit(hop - 2)
            came = slot(lane, hop - 1)
            accumulate(lane, lane.behind(hop + 1), came, came)
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
