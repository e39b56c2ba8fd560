"""A home to count how much symmetric memory workspaces need, without having any.

Never launch kernels on it. Its tensors are on the CPU and, except for signals, never touched, so
the system need not provide the memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels.devices import MIB
from weft.kernels.symmetric.memory import Home


class CountingHome(Home):
    """Rank 0 in a world without other processes.

    Args:
        world_size: number of ranks.
        device_name: name of the target device, as its driver reports it.
        ranks_per_node: number of consecutive ranks with addresses for each other; all if 0.

    Attributes:
        nbytes: bytes allocated for one rank so far.
        segments: bytes that they take on a GPU.
    """

    def __init__(self, world_size: int, device_name: str = "CPU", ranks_per_node: int = 0) -> None:
        super().__init__(0, world_size, torch.device("cpu"))
        self._ranks_per_node = ranks_per_node or world_size
        self.nbytes = self.segments = 0
        self._device_name = device_name

    @property
    def ranks_per_node(self) -> int:
        """See Home."""
        return self._ranks_per_node

    @property
    def device_name(self) -> str:
        """The given name; tuned configurations for it can decide a buffer's size."""
        return self._device_name

    def _exchange(self, call: int, value: str) -> list[str]:
        return [value] * self.world_size

    def _allocate(self, nbytes: int) -> tuple[Tensor, list[int], int]:
        self.nbytes += nbytes
        self.segments += _segment(nbytes)
        memory = torch.empty(nbytes, dtype=torch.uint8)
        far = self.world_size - self._ranks_per_node
        return memory, [memory.data_ptr()] * self._ranks_per_node + [0] * far, 0

    def _release(self) -> None:
        """Do nothing: each tensor is freed with its last user."""


def _segment(nbytes: int) -> int:
    """Return the bytes that torch's allocator takes for a tensor with a segment of its own.

    torch 2.11 gives each symmetric tensor one (c10/cuda/CUDACachingAllocator.cpp).
    """
    if nbytes <= MIB:
        return 2 * MIB
    if nbytes < 10 * MIB:
        return 20 * MIB
    return -(-nbytes // (2 * MIB)) * 2 * MIB
