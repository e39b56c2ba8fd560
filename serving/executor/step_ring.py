"""Ring buffer in shared memory: the controller gives steps to the ranks on one node.

    controller                                  rank r
    writes step n to entry n mod entries        wakes up by one byte on its socket
    wakes each rank                             begun[r] = n
    ...                                         reads the entry, runs the step
    before it reuses an entry, waits until      done[r] = n
      done[r] >= n - entries for all ranks

Counters in the same memory show each rank's progress: its step, its loaded weights, and its
exchanges with other ranks. They identify a stuck rank. The
memory is anonymous (memfd), so nothing remains when the processes end, for whatever reason.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt

ENTRIES = 4
"""Entries with one pipeline stage. Each further stage adds one, since more steps are running."""
ENTRY_BYTES = 1 << 30
"""Address space per entry. Physical memory grows only to the largest step so far."""

COUNTERS = 6
"""Number of counters per rank."""

MET = 1
READ = 1_000_000
"""`loaded` is MET once a rank has reached the rendezvous, then rises to MET + READ."""

Int64 = npt.NDArray[np.int64]


def ring_entries(stages: int) -> int:
    """Return the number of ring entries for a number of pipeline stages."""
    return ENTRIES + stages - 1


def how_loaded(counter: int) -> str:
    """Describe a rank's `loaded` counter in words."""
    if counter < MET:
        return "before it met the others"
    return f"with {(counter - MET) / READ:.0%} of its weights read"


def check_size(step: int, data: bytes) -> None:
    """Check that an encoded step fits into an entry.

    Raises:
        ValueError: the step is too large.
    """
    if len(data) > ENTRY_BYTES - 8:
        raise ValueError(f"step {step} takes {len(data)} bytes; at most {ENTRY_BYTES - 8} fit")


class StepRing:
    """The shared memory. Other processes can map it through `fd`.

    Args:
        ranks: number of ranks on this node.
        fd: descriptor of an existing ring; None creates a new ring.
        stages: number of pipeline stages.

    Attributes:
        counters: int64 [COUNTERS, ranks]; its rows are the following attributes.
        begun, done: int64 [ranks]; last step that each rank has begun and finished, from 1.
        exchanges: int64 [ranks]; number of exchanges with other ranks that each has entered.
        rounds: int64 [ranks]; number of those exchanges in which all ranks take part.
        loaded: int64 [ranks]; loading progress: 0, MET at the rendezvous, then up to MET + READ
            in proportion to the weights read.
        busy: int64 [ranks]; microseconds that each rank has spent in steps.
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
        """Close the descriptor. The kernel frees the memory with its last mapping."""
        os.close(self.fd)

    def has_room(self, step: int) -> bool:
        """Return whether all ranks have finished the step to be overwritten by `step`."""
        # numpy's min takes five times as long.
        return bool(min(self.done.tolist()) >= step - self.entries)

    def write(self, step: int, data: bytes) -> None:
        """Write an encoded step, after `check_size`."""
        at = step % self.entries * ENTRY_BYTES
        self._memory[at : at + 8] = len(data).to_bytes(8, "little")
        self._memory[at + 8 : at + 8 + len(data)] = data

    def read(self, step: int) -> memoryview:
        """Return an encoded step. The view stays valid until the step is done."""
        at = step % self.entries * ENTRY_BYTES
        length = int.from_bytes(self._memory[at : at + 8], "little")
        return self._memory[at + 8 : at + 8 + length]
