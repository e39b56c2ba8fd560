"""A ring of devices, and the messages of one direction round it: slots, and credits for them.

    hop s    this device ── message s ──►  the next one, slot s mod S
             ◄── credit ──  the next one has done with the slot of message s - S

Message s is written into slot s mod S of the next device's buffer, and the DMA counts up that
slot's receive semaphore there. The first S messages find their slots empty. Message s >= S takes a
credit first, which the next device gives when it has read message s - S and has sent on what it
made of it. So a device runs up to S messages ahead of the next one, and no slot is written while it
is read. As many credits are given as are taken: for messages S ... hops - 1. All semaphores end at
0.

Several lanes run at once, each a ring with buffers and semaphores of its own. Lane l goes up the
axis if l is even and down if it is odd, so that both directions of every link carry traffic, and a
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
    """One lane of a ring over a mesh axis.

    Attributes:
        index: of the lane: an int, or the program's if each core has its own lanes.
        core: that drives it; None where a device has one.
        send, receive: DMA semaphores [slots]; None in kernels that have their own.
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
        """Messages that go round: all devices but one."""
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
        """The device that this one hears from."""
        return {self.axis: along(self.axis, -self.direction)}

    def behind(self, steps: Index) -> jax.Array:
        """The index of the device whose messages arrive after so many hops."""
        return along(self.axis, -self.direction * steps)

    def message(self, hop: Index, source: jax.Ref, target: jax.Ref) -> pltpu.AsyncCopyDescriptor:
        """The DMA of a hop. Both refs are named as on this device; waiting for it to be received is
        waiting for what the previous device sends in the same hop."""
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
        """Before message `hop` is sent: wait until its slot is free."""
        if self.hops > self.slots:
            full = jnp.asarray(hop >= self.slots)
            pl.when(full)(lambda: pl.semaphore_wait(self.credit, 1))

    def give_credit(self, hop: Index) -> None:
        """The slot of message `hop` is free, for message `hop` + slots if there is one."""
        if self.hops > self.slots:
            free = jnp.logical_and(hop >= 0, hop + self.slots < self.hops)
            pl.when(free)(lambda: signal(self.credit, self.previous, self.core))


@dataclass(frozen=True, slots=True)
class Lanes:
    """The lanes of a ring that a core drives.

    Attributes:
        core: that runs this, where each core has the lanes of one direction.
        send, receive: DMA semaphores [lanes, slots].
        credit: regular semaphores [lanes].
    """

    axis: str
    core: Index | None
    send: jax.Ref
    receive: jax.Ref
    credit: jax.Ref

    def each(self, act: Callable[[Lane], None]) -> None:
        """Do something for each lane, one after the other."""
        count, slots = self.send.shape

        def step(i: jax.Array) -> None:
            at = i if self.core is None else self.core + 2 * i
            refs = (self.send.at[at], self.receive.at[at], self.credit.at[at])
            act(Lane(self.axis, at, self.core, slots, *refs))

        pl.loop(0, count if self.core is None else count // 2)(step)

    def meet(self) -> None:
        """The barrier with the neighbours in the directions of these lanes."""
        meet([self.axis], self.core, both=self.send.shape[0] > 1)


def meet(axes: Sequence[str], core: Index | None, *, both: bool = True) -> None:
    """The barrier: this device is written to by the previous ones on all axes.

    Args:
        core: whose lanes go in one direction, up if it is 0; None for a core that has all.
        both: that one has lanes in both directions; else up.
    """
    ways = [core] if core is not None else [0, 1] if both else [0]
    barrier([Lane(axis, way, core).previous for axis in axes for way in ways], core)


def semaphores(lanes: int, slots: int) -> list[pltpu.SemaphoreType]:
    """What `Lanes` has: to send, to receive, credits."""
    return [
        pltpu.SemaphoreType.DMA((lanes, slots)),
        pltpu.SemaphoreType.DMA((lanes, slots)),
        pltpu.SemaphoreType.REGULAR((lanes,)),
    ]


def split(count: int, lanes: Sequence[int]) -> int:
    """The first of the numbers of lanes that so many rows can be dealt out to; 1 if none."""
    return next((n for n in lanes if count % n == 0), 1)


def grid(lanes: int) -> tuple[int]:
    """A program for each core that has lanes: with both directions, for all cores of a chip."""
    return (cores() if lanes > 1 else 1,)


def this_core() -> Index | None:
    """The core that runs this, in a kernel of several programs; None in one of one."""
    return pl.program_id(0) if pl.num_programs(0) > 1 else None
