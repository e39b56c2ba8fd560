"""A device ring, and its messages in one direction: slots, and credits for them.

    hop s    this device ── message s ──►  the next one, slot s mod S
             ◄── credit ──  the next one no longer needs the slot of message s - S

Protocol. Message s is written into slot s mod S of the next device's buffer; its DMA increments
that slot's receive semaphore there. The first S messages find their slots empty. Message s >= S
takes a credit first. The next device gives this credit when it has read message s - S and has
forwarded its own result. A device therefore runs up to S messages ahead of the next one, and no
slot is written while it is read. Credits given equal credits taken: one for each message S ... hops
- 1. All semaphores end at 0.

Several lanes run at once; each is a ring with its own buffers and semaphores. Lane l goes up the
axis if l is even and down if it is odd. Every link thus carries traffic both ways, and a
lane's message travels while the core works for another lane. On a chip with two cores, core c has
the lanes with l mod 2 = c.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from weft.kernels.tpu.runtime.topology import Index, along, barrier, cores, signal


@dataclass(frozen=True, slots=True)
class Lane:
    """One lane in a ring over a mesh axis.

    Attributes:
        axis: the mesh axis.
        index: the lane's index: an int, or the program's if each core has its own lanes.
        core: the core that drives it; None on a device with one core.
        slots: S.
        send, receive: DMA semaphores [slots]; None in kernels with their own.
        credit: a regular semaphore.
    """

    axis: str
    index: Index
    core: Index | None
    slots: int = 0
    send: jax.Ref | None = None
    receive: jax.Ref | None = None
    credit: jax.Ref | None = None

    @property
    def hops(self) -> int:
        """Number of messages that go round: one less than the devices."""
        return int(lax.axis_size(self.axis)) - 1

    @property
    def direction(self) -> Index:
        """1 up the axis, -1 down."""
        return 1 - 2 * (self.index % 2)

    @property
    def next(self) -> dict[str, Index]:
        """The device that this one sends to."""
        return {self.axis: along(self.axis, self.direction)}

    @property
    def previous(self) -> dict[str, Index]:
        """The device that this one receives from."""
        return {self.axis: along(self.axis, -self.direction)}

    def source(self, hops: Index) -> jax.Array:
        """Return the device index whose messages arrive after `hops` hops."""
        return along(self.axis, -self.direction * hops)

    def message(self, hop: Index, source: jax.Ref, target: jax.Ref) -> pltpu.AsyncCopyDescriptor:
        """Return a hop's DMA.

        Both refs are named as on this device. Waiting for its receipt waits for the previous
        device's message in the same hop.
        """
        assert self.send is not None
        assert self.receive is not None
        slot = lax.rem(hop, self.slots)
        return pltpu.make_async_remote_copy(
            source,
            target,
            self.send.at[slot],
            self.receive.at[slot],
            device_id=self.next,
            device_id_type=pl.DeviceIdType.MESH,
        )

    def take_credit(self, hop: Index) -> None:
        """Wait until the slot for message `hop` is free, before sending it."""
        if self.hops > self.slots:
            full = jnp.asarray(hop >= self.slots)
            pl.when(full)(lambda: pl.semaphore_wait(self.credit, 1))

    def give_credit(self, hop: Index) -> None:
        """Free the slot of message `hop`, for message `hop` + slots if there is one."""
        if self.hops > self.slots:
            free = jnp.logical_and(hop >= 0, hop + self.slots < self.hops)
            pl.when(free)(lambda: signal(self.credit, self.previous, self.core))


@dataclass(frozen=True, slots=True)
class Lanes:
    """A core's lanes in a ring.

    Attributes:
        axis: the mesh axis.
        core: this core, if each core has the lanes in one direction.
        send, receive: DMA semaphores [lanes, slots].
        credit: regular semaphores [lanes].
    """

    axis: str
    core: Index | None
    send: jax.Ref
    receive: jax.Ref
    credit: jax.Ref

    def each(self, action: Callable[[Lane], None]) -> None:
        """Call `action` for each lane in turn."""
        count, slots = self.send.shape

        def step(i: jax.Array) -> None:
            at = i if self.core is None else self.core + 2 * i
            refs = (self.send.at[at], self.receive.at[at], self.credit.at[at])
            action(Lane(self.axis, at, self.core, slots, *refs))

        pl.loop(0, count if self.core is None else count // 2)(step)

    def barrier(self) -> None:
        """Run the barrier with the neighbours in these lanes' directions."""
        ring_barrier([self.axis], self.core, both=self.send.shape[0] > 1)


def ring_barrier(axes: Sequence[str], core: Index | None, *, both: bool = True) -> None:
    """Run the barrier: the previous devices on all axes write to this one.

    Args:
        axes: the rings' axes.
        core: a core with lanes in one direction, up if it is 0; None for a core with all lanes.
        both: whether such a core has lanes in both directions; otherwise up only.
    """
    directions = [core] if core is not None else [0, 1] if both else [0]
    barrier(
        [Lane(axis, direction, core).previous for axis in axes for direction in directions], core
    )


def semaphores(lanes: int, slots: int) -> list[pltpu.SemaphoreType]:
    """Return `Lanes`' semaphores: to send, to receive, credits."""
    return [
        pltpu.SemaphoreType.DMA((lanes, slots)),
        pltpu.SemaphoreType.DMA((lanes, slots)),
        pltpu.SemaphoreType.REGULAR((lanes,)),
    ]


def choose_lanes(count: int, lanes: Sequence[int]) -> int:
    """Return the first of the lane counts that divides `count` rows; 1 if none does."""
    return next((n for n in lanes if count % n == 0), 1)


def grid(lanes: int) -> tuple[int]:
    """Return the grid: a program for each core with lanes; all cores if lanes go both ways."""
    return (cores() if lanes > 1 else 1,)


def this_core() -> Index | None:
    """Return this core, in a kernel with several programs; otherwise None."""
    return pl.program_id(0) if pl.num_programs(0) > 1 else None
