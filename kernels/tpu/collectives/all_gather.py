"""All-gather over the rings of a torus: every device gets all devices' rows.

    all_gather(x [m, ...]) -> [W m, ...]        lax.all_gather(x, axes, tiled=True)

Protocol. A lane (ring.py) carries a part of each device's rows. In one ring, hop s forwards the
data received in hop s - 1; hop 0 sends the device's own rows. A message is written to its final
position in the result:

    4 devices, a lane that goes up, device 2:    hop 0 sends 2, hop 1 sends 1, hop 2 sends 0

No position is written twice, so no credits are needed, and a device may run ahead without limit.
Each hop has its own receive semaphore, because two messages in flight must not be mistaken for each
other. Received data is forwarded from its final position, and is never overwritten.

Over several axes, a lane goes round one ring after another, and carries in the second ring the data
gathered in the first. Each axis begins two lanes, up and down. At every moment, all axes' links
have traffic in both directions (bucket algorithm: Jain and Sabharwal 2010; "How to Scale Your
Model", Austin et al. 2025, part 3).

One core issues DMAs from HBM to HBM, of any size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from weft.kernels.tpu.collectives.ring import Lane, choose_lanes, ring_barrier
from weft.kernels.tpu.runtime.topology import Axes, Index, collective_id, names, size

Position: TypeAlias = tuple[Index | pl.Slice, ...]
"""Index in [*sizes, lanes]; a slice over axes that are already gathered."""


def all_gather(x: jax.Array, axes: Axes) -> jax.Array:
    """Gather every device's rows, in device order.

    Args:
        x: [m, ...], in `shard_map`.
        axes: mesh axes; later ones are minor.

    Returns:
        [W m, ...] for W devices.
    """
    devices = size(axes)
    if devices == 1:
        return x
    order = tuple(name for name in names(axes) if size(name) > 1)
    lanes = choose_lanes(x.shape[0], lane_counts(order))
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
    """List possible lane counts, best first: both ways on each axis, one way, one lane."""
    return (2 * len(axes), len(axes), 1)


def semaphores(lanes: int, axes: tuple[str, ...]) -> list[pltpu.SemaphoreType]:
    """Return `Gather`'s semaphores: for own rows, and per hop and lane to send and to receive."""
    hops = sum(size(axis) - 1 for axis in axes)
    return [
        pltpu.SemaphoreType.DMA((lanes,)),
        pltpu.SemaphoreType.DMA((lanes, hops)),
        pltpu.SemaphoreType.DMA((lanes, hops)),
    ]


@dataclass(frozen=True, slots=True)
class Route:
    """A lane's route round the axes.

    Attributes:
        lane: the lane's index.
        first_axis: index of its first axis.
        down: 0 goes up the axes, 1 down.
    """

    lane: Index
    first_axis: int
    down: Index


@dataclass(frozen=True, slots=True)
class Gather:
    """The all-gather inside a kernel.

    Attributes:
        axes: axes with more than one device.
        core: this core, if each core has the lanes in one direction.
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
        on_own: Callable[[Route], None] | None = None,
        on_received: Callable[[Route, Position], None] | None = None,
    ) -> None:
        """Gather, and run callbacks meanwhile.

        Args:
            on_own: called with a route for a lane's own rows, during its first message.
            on_received: called with a route and an index in `out` for received rows, during the
                next message.
        """
        hops = self.send.shape[1]
        self._each(lambda route: self._copy_own(route).start())
        ring_barrier(self.axes, self.core)
        self._each(lambda route: self._message(route, 0).start())
        self._each(lambda route: self._copy_own(route).wait())  # a second ring sends it on, too
        if on_own:
            self._each(on_own)

        def step(hop: Index) -> None:
            @self._each
            def _(route: Route) -> None:
                self._message(route, hop - 1).wait_recv()
                self._message(route, hop).start()

            @self._each
            def _(route: Route) -> None:
                if on_received:
                    on_received(route, self._position(route, hop - 1, received=True))
                self._message(route, hop - 1).wait_send()

        if len(self.axes) == 1:
            pl.loop(1, hops)(step)
        else:
            for hop in range(1, hops):
                step(hop)

        @self._each
        def _(route: Route) -> None:
            self._message(route, hops - 1).wait()
            if on_received:
                on_received(route, self._position(route, hops - 1, received=True))

    def _each(self, action: Callable[[Route], None]) -> None:
        """Call `action` for each lane's route."""
        lanes = self.x.shape[0]
        both = lanes == 2 * len(self.axes)
        for first_axis in range(lanes // 2 if both else lanes):
            if not both:
                action(Route(first_axis, first_axis, 0))
            elif self.core is not None:
                action(Route(2 * first_axis + self.core, first_axis, self.core))
            else:
                pl.loop(0, 2)(
                    lambda down, first_axis=first_axis: action(
                        Route(2 * first_axis + down, first_axis, down)
                    )
                )

    def _copy_own(self, route: Route) -> pltpu.AsyncCopyDescriptor:
        position = self.out.at[(*own_position(self.axes), route.lane)]
        return pltpu.make_async_copy(self.x.at[route.lane], position, self.local.at[route.lane])

    def _message(self, route: Route, hop: Index) -> pltpu.AsyncCopyDescriptor:
        """Return a hop's DMA. Waiting for its receipt waits for the data that arrives in the same
        hop.
        """
        position = self.out.at[self._position(route, hop, received=False)]
        first = isinstance(hop, int) and hop == 0
        return pltpu.make_async_remote_copy(
            self.x.at[route.lane] if first else position,
            position,
            self.send.at[route.lane, hop],
            self.receive.at[route.lane, hop],
            device_id=Lane(self._hop_axis(route, hop)[0], route.down, None).next,
            device_id_type=pl.DeviceIdType.MESH,
        )

    def _hop_axis(self, route: Route, hop: Index) -> tuple[str, Index, set[str]]:
        """Return a hop's axis, its number on that axis, and the axes gathered before."""
        order = self.axes[route.first_axis :] + self.axes[: route.first_axis]
        if len(order) == 1:
            return order[0], hop, set()
        assert isinstance(hop, int)
        for number, axis in enumerate(order):
            if hop < size(axis) - 1:
                return axis, hop, set(order[:number])
            hop -= size(axis) - 1
        raise AssertionError("there is no such hop")

    def _position(self, route: Route, hop: Index, *, received: bool) -> Position:
        """Return the index in `out` of the rows sent in a hop, or received in it."""
        axis, number, done = self._hop_axis(route, hop)
        index: list[Index | pl.Slice] = []
        for name in self.axes:
            if name == axis:
                index.append(Lane(axis, route.down, None).source(number + int(received)))
            else:
                index.append(pl.ds(0, size(name)) if name in done else lax.axis_index(name))
        return (*index, route.lane)


def own_position(axes: tuple[str, ...]) -> tuple[Index, ...]:
    """Return this device's index along each axis."""
    return tuple(lax.axis_index(axis) for axis in axes)
