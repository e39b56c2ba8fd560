"""A home on torch's meta device: ops launch as on GPUs that need not be here.

Its tensors have shapes and no memory, so a launch must not run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.kernels.symmetric.memory import Home, SymmetricTensor

MULTICAST = 1 << 40
"""Stands for a multicast address: aligned, and wider than 32 bits, as Triton's variants see it."""


@dataclass(frozen=True, slots=True)
class AbsentGpu:
    """GPUs that the meta device stands for.

    Attributes:
        name: their name, as their driver reports it, or part of it.
        processors: number of SMs or CUs of each.
        multicast: symmetric memory has a multicast address, which stores to all ranks.
    """

    name: str
    processors: int
    multicast: bool

    @classmethod
    def like(cls, home: Home) -> AbsentGpu:
        """Describe the GPUs of a home."""
        return cls(home.device_name, home.processors, home.has_multicast)


class AbsentHome(Home):
    """One rank; the others agree with it.

    Args:
        rank, world_size: this rank, and the number of ranks.
        gpu: each rank's GPU.
    """

    def __init__(self, rank: int, world_size: int, gpu: AbsentGpu) -> None:
        super().__init__(rank, world_size, torch.device("meta"))
        self._gpu = gpu
        self._last = torch.empty(0, device=self.device)

    @property
    def device_name(self) -> str:
        """The given name."""
        return self._gpu.name

    @property
    def processors(self) -> int:
        """The given number."""
        return self._gpu.processors

    @property
    def has_multicast(self) -> bool:
        """True if the GPUs have it."""
        return self._gpu.multicast

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> SymmetricTensor:
        """See Home. The addresses are on the CPU, since ops look for zeros in them."""
        tensor = super().empty(name, shape, dtype)
        return dataclasses.replace(tensor, addresses=torch.ones(self.world_size, dtype=torch.int64))

    def _exchange(self, call: int, value: str) -> list[str]:
        return [value] * self.world_size

    def _allocate(self, nbytes: int) -> tuple[Tensor, list[int], int]:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self._last = memory
        return memory, [0] * self.world_size, MULTICAST * self._gpu.multicast

    def _peers(self, addresses: list[int]) -> Sequence[Tensor]:
        return [self._last] * self.world_size

    def _release(self) -> None:
        """Do nothing: there is no memory."""
