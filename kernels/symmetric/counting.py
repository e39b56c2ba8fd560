"""How much symmetric memory workspaces take, before there is any: a home that counts it.

Nothing may be launched on it. What it gives is on the CPU and, but for signals, not touched,
so that the system does not have to find it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels.symmetric.memory import Home


class CountingHome(Home):
    """The first of so many ranks, none of which has to come.

    Args:
        world_size: ranks.
        device_name: of the device that it is counted for, as the driver calls it.

    Attributes:
        nbytes: that one rank has been given.
    """

    def __init__(self, world_size: int, device_name: str = "CPU") -> None:
        super().__init__(0, world_size, torch.device("cpu"))
        self.nbytes = 0
        self._device_name = device_name

    @property
    def device_name(self) -> str:
        """As given: what was tuned for it may decide how large a buffer is."""
        return self._device_name

    def _exchange(self, call: int, value: str) -> list[str]:
        return [value] * self.world_size

    def _allocate(self, nbytes: int) -> tuple[Tensor, list[int], int]:
        self.nbytes += nbytes
        memory = torch.empty(nbytes, dtype=torch.uint8)
        return memory, [memory.data_ptr()] * self.world_size, 0

    def _release(self) -> None:
        """What there is goes with its last user."""
