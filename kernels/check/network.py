"""The network between nodes, for the interpreter: puts arrive late and in any order.

It implements NVSHMEM's device functions (gpu/runtime/nvshmem.py) as in OpenSHMEM 1.5, and nothing
beyond its guarantees:

- Put with signal, nonblocking (section 9.8): the data is read from its source at any time until a
  quiet, not when the put is issued. The signal is set at any time after the data has arrived. Puts
  overtake each other.
- Put (9.6): the same without a signal, but the source is read at once.
- Quiet (9.11): the rank's puts have arrived, including signals.
- signal_fetch (9.8) orders nothing. signal_wait_until (9.10) makes everything before the signal
  visible.

For the RaceDetector, a put is two threads. One reads the source, and only a quiet comes after it.
The other stores the data; the signal and a quiet come after it. Reusing a source because the other
rank has answered is therefore a race.
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
"""Probability of a delivery before a memory operation."""


class NetworkError(WeftError):
    """A put from or to memory that is not symmetric."""


class Memory(Protocol):
    """The part of ranks.Memory needed here."""

    def of_peer(self, rank: int, address: int, nbytes: int, peer: int) -> int:
        """Return a peer's address for a rank's address; 0 if it is not symmetric."""

    def name(self, address: int) -> str: ...


@dataclass(slots=True)
class Put:
    """A put in flight.

    Attributes:
        number: its number in the RaceDetector.
        rank: the sender.
        to, signal: addresses on the peer; signal 0 means none.
        source: the data's address, or the data itself.
        nbytes: bytes of data.
        value: the signal's new value.
        has_arrived: whether the data has arrived.
    """

    number: int
    rank: int
    to: int
    source: int | bytes
    nbytes: int
    signal: int
    value: int
    has_arrived: bool = False


class Network:
    """Puts in flight.

    Args:
        chance: chooses their order.
        memory: memory of all ranks.
        races: receives the network's reads and stores.
        changed: called when memory has changed.
        has_set: called with a rank and the signals that its put has set.
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
        """Begin a put. All addresses are the rank's own; signal 0 means a blocking put without one.

        Raises:
            NetworkError: an address is not in symmetric memory.
        """
        self._resolve(rank, source, nbytes, rank)
        peer_address = self._resolve(rank, to, nbytes, peer)
        signal_there = self._resolve(rank, signal, 8, peer) if signal else 0
        number = NO_NUMBER
        if self._races is not None:
            number = self._races.put(rank, _each_byte(peer_address, nbytes), signal_there)
        data = source if signal else ctypes.string_at(source, nbytes)
        self.puts.append(Put(number, rank, peer_address, data, nbytes, signal_there, value))

    def step(self) -> None:
        """Perhaps deliver something."""
        if self.puts and self._random.random() < DELIVERY_PROBABILITY:
            self.deliver()

    def deliver(self) -> None:
        """Deliver a put's data, or the signal of a put whose data has arrived."""
        put = self._random.choice(self.puts)
        if put.has_arrived or not put.signal:
            self.puts.remove(put)
        if put.has_arrived:
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
                    self._races.source_read(put.number, _each_byte(data, put.nbytes))
                data = ctypes.string_at(data, put.nbytes)
            ctypes.memmove(put.to, data, put.nbytes)
            if self._races is not None:
                self._races.data_stored(put.number, _each_byte(put.to, put.nbytes))
            put.has_arrived = True
        self._changed()

    def quiet(self, rank: int) -> None:
        """Deliver all the rank's puts, and perhaps other ranks' puts."""
        while any(put.rank == rank for put in self.puts):
            self.deliver()
        if self._races is not None:
            self._races.quiet(rank)

    def _resolve(self, rank: int, address: int, nbytes: int, peer: int) -> int:
        peer_address = self._memory.of_peer(rank, address, nbytes, peer)
        if not peer_address:
            raise NetworkError(
                f"rank {rank} puts {nbytes} bytes at {self._memory.name(address)}; they must be in "
                "one of its symmetric tensors"
            )
        return peer_address


NO_NUMBER = -1


def _each_byte(start: int, nbytes: int) -> Array:
    """Return every byte's address, so that elements of any size are found."""
    return np.arange(start, start + nbytes, dtype=np.uint64)
