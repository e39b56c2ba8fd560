"""The network between nodes, for the interpreter: puts that come late and in any order.

NVSHMEM's device functions (gpu/nvshmem.py) as OpenSHMEM 1.5 specifies them, and
with nothing that it does not promise:

- put with signal, nonblocking (section 9.8): the data is read from its source at
  any time until a quiet, not when the put is issued; the signal is set at any
  time after the data has come. Puts overtake each other.
- put (9.6): the same without a signal, but the source is read at once.
- quiet (9.11): what its rank has put has come, signals too.
- signal_fetch (9.8), signal_wait_until (9.10): the first orders nothing, the
  second makes what came before the signal visible.

A put is two threads of the RaceDetector: one reads the source, and only a quiet
comes after it; the other stores the data, and the signal and a quiet come after
it. So a source that is used again because the other rank has answered is a race.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from weft.errors import WeftError
from weft.kernels.check.races import RaceDetector
from weft.kernels.interpreter.gpu import Array, Atomic

DELIVERY_PROBABILITY = 0.05
"""That something comes before a memory operation."""


class NetworkError(WeftError):
    """A put from or to memory that is not symmetric."""


class Memory(Protocol):
    """What is needed of ranks.Memory."""

    def of_peer(self, rank: int, address: int, nbytes: int, peer: int) -> int:
        """Where a peer has what is at this address of a rank; 0 if it is not symmetric."""

    def name(self, address: int) -> str: ...


@dataclass(slots=True)
class Put:
    """One that has not come yet.

    Attributes:
        number: of the RaceDetector.
        to, signal: of the peer; the signal is 0 for none.
        source: where the data is, or the data itself.
    """

    number: int
    rank: int
    to: int
    source: int | bytes
    nbytes: int
    signal: int
    value: int
    has_come: bool = False


class Network:
    """What has been put and has not come.

    Args:
        chance: of the order in which it comes.
        memory: of all ranks.
        races: told of what the network reads and stores.
        changed: called when memory has.
        has_set: told which rank's put has set which signals.
    """

    def __init__(
        self,
        chance: random.Random,
        memory: Memory,
        races: RaceDetector | None,
        changed: Callable[[], None],
        has_set: Callable[[int, Sequence[int]], None],
    ) -> None:
        self._random = chance
        self._memory = memory
        self._races = races
        self._changed = changed
        self._has_set = has_set
        self.puts: list[Put] = []

    def put(
        self, rank: int, to: int, source: int, nbytes: int, signal: int, value: int, peer: int
    ) -> None:
        """Begin one. All addresses are the rank's own; a signal of 0: a blocking put without one.

        Raises:
            NetworkError: an address of them is not in symmetric memory.
        """
        self._on(rank, source, nbytes, rank)
        there = self._on(rank, to, nbytes, peer)
        signal_there = self._on(rank, signal, 8, peer) if signal else 0
        number = NO_NUMBER
        if self._races is not None:
            number = self._races.put(rank, _each_byte(there, nbytes), signal_there)
        data = source if signal else ctypes.string_at(source, nbytes)
        self.puts.append(Put(number, rank, there, data, nbytes, signal_there, value))

    def step(self) -> None:
        """Something may come."""
        if self.puts and self._random.random() < DELIVERY_PROBABILITY:
            self.deliver()

    def deliver(self) -> None:
        """The data of a put comes, or the signal of one whose data has."""
        put = self._random.choice(self.puts)
        if put.has_come or not put.signal:
            self.puts.remove(put)
        if put.has_come:
            word = ctypes.c_uint64.from_address(put.signal)
            atomic = Atomic(put.signal, 8, "release", "system", word.value, put.value, sets=True)
            word.value = put.value
            self._has_set(put.rank, [put.signal])
            if self._races is not None:
                self._races.signalled(put.number, atomic)
        else:
            data = put.source
            if isinstance(data, int):
                if self._races is not None:
                    self._races.left(put.number, _each_byte(data, put.nbytes))
                data = ctypes.string_at(data, put.nbytes)
            ctypes.memmove(put.to, data, put.nbytes)
            if self._races is not None:
                self._races.came(put.number, _each_byte(put.to, put.nbytes))
            put.has_come = True
        self._changed()

    def quiet(self, rank: int) -> None:
        """All that the rank has put comes now, and what others have put may."""
        while any(put.rank == rank for put in self.puts):
            self.deliver()
        if self._races is not None:
            self._races.quiet(rank)

    def _on(self, rank: int, address: int, nbytes: int, peer: int) -> int:
        there = self._memory.of_peer(rank, address, nbytes, peer)
        if not there:
            raise NetworkError(
                f"rank {rank} puts {nbytes} bytes at {self._memory.name(address)}; they must be in "
                "one of its symmetric tensors"
            )
        return there


NO_NUMBER = -1


def _each_byte(start: int, nbytes: int) -> Array:
    """Every byte's address: so that elements of any size are found."""
    return np.arange(start, start + nbytes, dtype=np.uint64)
