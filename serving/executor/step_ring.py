"""Shared memory in which a controller tells the ranks of one node what to do.

    controller                                  rank r
    writes step n to slot n mod slots           is woken by a byte on its socket
    wakes each rank                             begun[r] = n
    ...                                         reads the slot, runs the step
    waits before it writes to a slot            done[r] = n
      until all ranks have done[r] >= n - slots

The counters also tell which rank is stuck, in which step or how far with loading, and before which
of the exchanges with other ranks, which each counts as it comes to them. The memory has no name
(memfd), so that nothing of it is left behind however the processes end.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt

ENTRIES = 4
"""Of a model of one stage; each further stage takes one more, as more steps are under way."""
ENTRY_BYTES = 1 << 30
"""Of address space; memory is what the largest step has taken."""

COUNTERS = 6
"""Of each rank."""

MET = 1
READ = 1_000_000
"""What `loaded` is of a rank that has come to where all meet, and by how much it then grows."""

Int64 = npt.NDArray[np.int64]


def ring_entries(stages: int) -> int:
    """Of the ring of a model of so many stages."""
    return ENTRIES + stages - 1


def how_loaded(counter: int) -> str:
    """What a rank's counter `loaded` says, in words."""
    if counter < MET:
        return "before it met the others"
    return f"with {(counter - MET) / READ:.0%} of its weights read"


def check_size(step: int, data: bytes) -> None:
    """Refuse a step that is larger than a slot.

    Raises:
        ValueError: it is.
    """
    if len(data) > ENTRY_BYTES - 8:
        raise ValueError(f"step {step} takes {len(data)} bytes; at most {ENTRY_BYTES - 8} fit")


class StepRing:
    """The memory, of which `fd` may be given to other processes.

    Args:
        ranks: how many.
        fd: of a ring that another process has made.
        stages: of the model that they share.

    Attributes:
        counters: int64 [COUNTERS, ranks]; those that follow.
        begun, done: int64 [ranks]; the last step that each has begun and done, from 1.
        exchanges: int64 [ranks]; how many each has come to.
        rounds: int64 [ranks]; of these, how many are of all ranks.
        loaded: int64 [ranks]; how far each has loaded: 0, MET, and then up to MET + READ, by the
            part of its weights that it has read.
        busy: int64 [ranks]; microseconds that each has spent in steps.
    """

    def __init__(self, ranks: int, fd: int | None = None, *, stages: int = 1) -> None:
        header = COUNTERS * 8 * ranks
        self.entries = ring_entries(stages)
        size = self.entries * ENTRY_BYTES + header
        if fd is None:
            fd = os.memfd_create("weft-steps", os.MFD_CLOEXEC)
            os.ftruncate(fd, size)
        self.fd = fd
        self._memory = memoryview(mmap.mmap(fd, size))
        counters = np.frombuffer(
            self._memory, np.int64, COUNTERS * ranks, self.entries * ENTRY_BYTES
        )
        self.counters: Int64 = counters.reshape(COUNTERS, ranks)
        self.begun: Int64
        self.done: Int64
        self.exchanges: Int64
        self.rounds: Int64
        self.loaded: Int64
        self.busy: Int64
        self.begun, self.done, self.exchanges, self.rounds, self.loaded, self.busy = self.counters

    def close(self) -> None:
        """Give the descriptor back; the memory goes with the last process that has it."""
        os.close(self.fd)

    def has_room(self, step: int) -> bool:
        """Whether all ranks have read what step `step` would write over."""
        # numpy's min takes five times as long.
        return bool(min(self.done.tolist()) >= step - self.entries)

    def write(self, step: int, data: bytes) -> None:
        """Put a step up, of which `check_size` has been asked."""
        at = step % self.entries * ENTRY_BYTES
        self._memory[at : at + 8] = len(data).to_bytes(8, "little")
        self._memory[at + 8 : at + 8 + len(data)] = data

    def read(self, step: int) -> memoryview:
        """What `write` was given, to be used before the step is done."""
        at = step % self.entries * ENTRY_BYTES
        length = int.from_bytes(self._memory[at : at + 8], "little")
        return self._memory[at + 8 : at + 8 + length]
