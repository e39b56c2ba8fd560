"""All-gather over the rings of a torus: every device gets what each one has.

    all_gather(x [m, ...]) -> [W m, ...]        lax.all_gather(x, axes, tiled=True)

Protocol. A lane (ring.py) has part of the rows of every device's x. In one ring, hop s sends on
what hop s - 1 brought, hop 0 the own part; a message is written to its place in the result:

    4 devices, a lane that goes up, device 2:    hop 0 sends 2, hop 1 sends 1, hop 2 sends 0

No place is written twice, so there are no credits, and a device runs as far ahead as it likes. Each
hop has a receive semaphore of its own, for two messages that are under way must not be taken for
each other; what has come is sent on from where it lies, and is never written again.

Over several axes a lane goes round one ring after the other, and takes along in the second ring
what it has gathered in the first one. There are two lanes, up and down, for each axis to begin
with, so that at every moment both directions of all axes' links have traffic (bucket algorithm:
Jain and Sabharwal 2010; "How to Scale Your Model", Austin et al. 2025, part 3).

All is DMA from HBM to HBM by one core, of any size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from weft.kernels.tpu.collectives.ring import Lane, meet, split
from weft.kernels.tpu.runtime.topology import Axes, Index, collective_id, names, size

Place: TypeAlias = tuple[Index | pl.Slice, ...]
"""Where in [*sizes, lanes] something lies: along axes that are done, everywhere."""


def all_gather(x: jax.Array, axes: Axes) -> jax.Array:
    """Every device's rows, in the order of the devices.

    Args:
        x: [m, ...], in `shard_map`.
        axes: of the mesh; later ones are minor.

    Returns:
        [W m, ...] for W devices.
    """
    devices = size(axes)
    if devices == 1:
        return x
    order = tuple(name for name in names(axes) if size(name) > 1)
    lanes = split(x.shape[0], lane_counts(order))
    shard = x.reshape(lanes, x.shape[0] // lanes, -1)
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    out = pl.pallas_call(
        lambda *refs: Gather(order, None, *refs).run(),
        in_specs=[hbm],
        out_specs=hbm,
        out_shape=jax.ShapeDtypeStruct((*map(size, order), *shard.shape), x.dtype),
        scratch_shapes=semaphores(lanes, order),
        compiler_params=pltpu.CompilerParams(collective_id=collective_id(order)),
        cost_estimate=pl.CostEstimate(
            flops=0,
            bytes_accessed=2 * devices * x.nbytes,
            transcendentals=0,
            remote_bytes_transferred=(devices - 1) * x.nbytes,
        ),
        name="all_gather",
    )(shard)
    return out.reshape(devices * x.shape[0], *x.shape[1:])


def lane_counts(axes: tuple[str, ...]) -> tuple[int, ...]:
    """How many lanes there may be, best first: both ways of each axis, one way, one."""
    return (2 * len(axes), len(axes), 1)


def semaphores(lanes: int, axes: tuple[str, ...]) -> list[pltpu.SemaphoreType]:
    """What `Gather` has: for own rows; to send and to receive, one for each hop of each lane."""
    hops = sum(size(axis) - 1 for axis in axes)
    return [
        pltpu.SemaphoreType.DMA((lanes,)),
        pltpu.SemaphoreType.DMA((lanes, hops)),
        pltpu.SemaphoreType.DMA((lanes, hops)),
    ]


@dataclass(frozen=True, slots=True)
class Way:
    """How a lane goes round the axes.

    Attributes:
        begin: the number of the axis that it begins with.
        up: 0 up the axes, 1 down.
    """

    lane: Index
    begin: int
    up: Index


@dataclass(frozen=True, slots=True)
class Gather:
    """The all-gather inside a kernel.

    Attributes:
        axes: each of more than one device.
        core: that runs this, where each core has the lanes of one direction.
        x: [lanes, h, C]; this device's rows.
        out: [*sizes, lanes, h, C].
        local: DMA semaphores [lanes].
        send, receive: DMA semaphores [lanes, hops].
    """

    axes: tuple[str, ...]
    core: Index | None
    x: jax.Ref
    out: jax.Ref
    local: jax.Ref
    send: jax.Ref
    receive: jax.Ref

    def run(
        self,
        own: Callable[[Way], None] | None = None,
        work: Callable[[Way, Place], None] | None = None,
    ) -> None:
        """Gather, and work meanwhile.

        Args:
            own: what is done for the own rows of a lane, under its first message.
            work: what is done with what has come, under the next message: where it is in `out`.
        """
        hops = self.send.shape[1]
        self._each(lambda way: self._keep(way).start())
        meet(self.axes, self.core)
        self._each(lambda way: self._message(way, 0).start())
        self._each(lambda way: self._keep(way).wait())  # a second ring sends it on, too
        if own:
            self._each(own)

        def step(hop: Index) -> None:
            @self._each
            def _(way: Way) -> None:
                self._message(way, hop - 1).wait_recv()
                self._message(way, hop).start()

            @self._each
            def _(way: Way) -> None:
                if work:
                    work(way, self._place(way, hop - 1, came=True))
                self._message(way, hop - 1).wait_send()

        if len(self.axes) == 1:
            pl.loop(1, hops)(step)
        else:
            for hop in range(1, hops):
                step(hop)

        @self._each
        def _(way: Way) -> None:
            self._message(way, hops - 1).wait()
            if work:
                work(way, self._place(way, hops - 1, came=True))

    def _each(self, act: Callable[[Way], None]) -> None:
        """Do something for each lane: both ways round, or one if the lanes are too few for that."""
        lanes = self.x.shape[0]
        both = lanes == 2 * len(self.axes)
        for begin in range(lanes // 2 if both else lanes):
            if not both:
                act(Way(begin, begin, 0))
            elif self.core is not None:
                act(Way(2 * begin + self.core, begin, self.core))
            else:
                pl.loop(0, 2)(lambda up, begin=begin: act(Way(2 * begin + up, begin, up)))

    def _keep(self, way: Way) -> pltpu.AsyncCopyDescriptor:
        place = self.out.at[(*own_place(self.axes), way.lane)]
        return pltpu.make_async_copy(self.x.at[way.lane], place, self.local.at[way.lane])

    def _message(self, way: Way, hop: Index) -> pltpu.AsyncCopyDescriptor:
        """The DMA of a hop. To wait for it to be received is to wait for what comes meanwhile."""
        place = self.out.at[self._place(way, hop, came=False)]
        first = isinstance(hop, int) and hop == 0
        return pltpu.make_async_remote_copy(
            self.x.at[way.lane] if first else place,
            place,
            self.send.at[way.lane, hop],
            self.receive.at[way.lane, hop],
            device_id=Lane(self._at(way, hop)[0], way.up, None).next,
            device_id_type=pl.DeviceIdType.MESH,
        )

    def _at(self, way: Way, hop: Index) -> tuple[str, Index, set[str]]:
        """Of a hop: its axis, its number on that, and the axes that are done."""
        order = self.axes[way.begin :] + self.axes[: way.begin]
        if len(order) == 1:
            return order[0], hop, set()
        assert isinstance(hop, int)
        for number, axis in enumerate(order):
            if hop < size(axis) - 1:
                return axis, hop, set(order[:number])
            hop -= size(axis) - 1
        raise AssertionError("there is no such hop")

    def _place(self, way: Way, hop: Index, *, came: bool) -> Place:
        """Where in `out` the message of a hop lies that is sent, or that comes meanwhile."""
        axis, number, done = self._at(way, hop)
        where: list[Index | pl.Slice] = []
        for name in self.axes:
            if name == axis:
                where.append(Lane(axis, way.up, None).behind(number + int(came)))
            else:
                where.append(pl.ds(0, size(name)) if name in done else lax.axis_index(name))
        return (*where, way.lane)


def own_place(axes: tuple[str, ...]) -> tuple[Index, ...]:
    """This device's place among the devices of the axes."""
    return tuple(lax.axis_index(axis) for axis in axes)
