"""Symmetric memory of N ranks that are threads of one process, on one CPU or one GPU.

Each rank's tensor is an ordinary one, and the others use its address. For tests
in Triton's interpreter (check/ranks.py), and for kernels on a single GPU.

Ranks may be made to be on several nodes: then those of other nodes have no
address, as beyond NVLink, and only check/network.py reaches them.
"""

from __future__ import annotations

import threading
from typing import Protocol

import torch
from torch import Tensor

from weft.kernels.symmetric.memory import ALIGNMENT, Home, SymmetricMemoryError

POISON = 0xFF
"""In every byte: not a number, in floats of any size."""


class Meeting(Protocol):
    """Where the ranks of a VirtualWorld wait for each other."""

    def meet(self, rank: int) -> None:
        """Return once every rank has called this equally often.

        Raises:
            SymmetricMemoryError: one of them does not come.
        """


class ThreadMeeting:
    """Ranks that run at the same time.

    Args:
        world_size: of the world.
        timeout: seconds that a rank waits.
    """

    def __init__(self, world_size: int, timeout: float = 60.0) -> None:
        self._barrier = threading.Barrier(world_size, timeout=timeout)

    def meet(self, rank: int) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise SymmetricMemoryError(
                f"rank {rank} waited for ranks that did not come; see their errors"
            ) from error


class VirtualWorld:
    """What the ranks of one process share; each makes its VirtualHome of it.

    Args:
        world_size: ranks.
        meeting: where they wait for each other.
        device: of all of them.
        guard: bytes before and after each allocation that belong to nobody: what is accessed
            there by mistake is no other allocation. A multiple of ALIGNMENT. With it, memory
            begins as POISON.
        ranks_per_node: a rank has addresses only of as many, its node's; of all if None.
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
    """One rank of a VirtualWorld."""

    def __init__(self, world: VirtualWorld, rank: int) -> None:
        super().__init__(rank, world.world_size, world.device)
        self._world = world
        self._addresses: list[int] = []

    @property
    def processors(self) -> int:
        """Its share of the device: kernels of all ranks must be able to run at once."""
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
