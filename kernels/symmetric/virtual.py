"""Symmetric memory for N ranks that are threads in one process, on one CPU or one GPU.

Each rank's tensor is an ordinary tensor, and the others use its address. This serves tests in
Triton's interpreter (check/ranks.py), and kernels on a single GPU.

Ranks can be placed on several virtual nodes. Ranks on other nodes then have no address, as beyond
NVLink, and only check/network.py reaches them.
"""

from __future__ import annotations

import threading
from typing import Protocol

import torch
from torch import Tensor

from weft.kernels.symmetric.memory import ALIGNMENT, Home, SymmetricMemoryError

POISON = 0xFF
"""Value of every byte; floats of any size are then NaN."""


class Meeting(Protocol):
    """A barrier for the ranks in a VirtualWorld."""

    def meet(self, rank: int) -> None:
        """Return once every rank has called this equally often.

        Raises:
            SymmetricMemoryError: a rank does not arrive.
        """


class ThreadMeeting:
    """A barrier for ranks that run concurrently.

    Args:
        world_size: number of ranks.
        timeout: seconds that a rank waits.
    """

    def __init__(self, world_size: int, timeout: float = 60.0) -> None:
        self._barrier = threading.Barrier(world_size, timeout=timeout)

    def meet(self, rank: int) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise SymmetricMemoryError(
                f"rank {rank} waited for ranks that did not arrive; see their errors"
            ) from error


class VirtualWorld:
    """State shared by the ranks in one process; each makes its VirtualHome from it.

    Args:
        world_size: number of ranks.
        meeting: the ranks' barrier.
        device: device of all ranks.
        guard: bytes before and after each allocation that belong to nobody, so that a wrong access
            there hits no other allocation. A multiple of ALIGNMENT. If set, memory begins as
            POISON.
        ranks_per_node: a rank has addresses only for ranks on its node; None puts all on one node.
    """

    def __init__(
        self,
        world_size: int,
        meeting: Meeting | None = None,
        device: str = "cpu",
        *,
        guard: int = 0,
        ranks_per_node: int | None = None,
    ) -> None:
        self.world_size = world_size
        self.device = torch.device(device)
        self.guard = guard
        self.meeting = meeting or ThreadMeeting(world_size)
        self.ranks_per_node = ranks_per_node or world_size
        self.values: list[str] = [""] * world_size
        self.memory: dict[int, Tensor] = {}  # by address


class VirtualHome(Home):
    """One rank in a VirtualWorld."""

    def __init__(self, world: VirtualWorld, rank: int) -> None:
        super().__init__(rank, world.world_size, world.device)
        self._world = world
        self._addresses: list[int] = []

    @property
    def ranks_per_node(self) -> int:
        """See Home."""
        return self._world.ranks_per_node or self.world_size

    @property
    def processors(self) -> int:
        """The rank's share of the device: all ranks' kernels must be able to run at once."""
        return max(1, super().processors // self.world_size)

    def _exchange(self, call: int, value: str) -> list[str]:
        self._world.values[self.rank] = value
        self._world.meeting.meet(self.rank)
        values = list(self._world.values)
        self._world.meeting.meet(self.rank)  # nobody writes the next value before all have read
        return values

    def _allocate(self, nbytes: int) -> tuple[Tensor, list[int], int]:
        guard = self._world.guard
        memory = torch.empty(nbytes + ALIGNMENT + 2 * guard, dtype=torch.uint8, device=self.device)
        if guard:
            memory.fill_(POISON)
        memory = memory[guard + -memory.data_ptr() % ALIGNMENT :][:nbytes]
        self._addresses.append(memory.data_ptr())
        self._world.memory[memory.data_ptr()] = memory
        addresses = [int(address) for address in self.exchange(str(memory.data_ptr()))]
        node = self._world.ranks_per_node
        near = [rank // node == self.rank // node for rank in range(self.world_size)]
        return memory, [near[rank] * address for rank, address in enumerate(addresses)], 0

    def _peers(self, addresses: list[int]) -> list[Tensor]:
        return [self._world.memory[address] for address in addresses] if all(addresses) else []

    def _release(self) -> None:
        for address in self._addresses:
            del self._world.memory[address]
        self._addresses.clear()
