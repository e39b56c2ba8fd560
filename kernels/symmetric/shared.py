"""Symmetric memory for CPU processes of one user on one node.

Each rank's memory is an anonymous file (memfd), mapped by the others through /proc. It has no name,
so it disappears when the last process that maps it ends, however that happens: a killed rank leaves
nothing behind in /dev/shm.
"""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from weft.kernels.symmetric.memory import (
    Home,
    SymmetricMemoryError,
    exchange_through,
    number_of_home,
)


class SharedHome(Home):
    """One rank: a process.

    Args:
        store: the ranks' rendezvous: torch's TCPStore or FileStore. A rank waits for others up to
            the store's timeout.
        rank, world_size: this rank, and the number of ranks.
        name: this group's name in the store, if there are several.
    """

    def __init__(self, store: Store, rank: int, world_size: int, name: str = "weft") -> None:
        super().__init__(rank, world_size, torch.device("cpu"))
        self._store = store
        self._name = name
        self._key = f"{name}/{number_of_home(store, name, rank)}"
        self._files: list[int] = []
        self._mapped: list[Tensor] = []

    def _exchange(self, call: int, value: str) -> list[str]:
        key = f"{self._key}/{call}"
        return exchange_through(self._store, self.rank, self.world_size, key, value)

    def _allocate(self, nbytes: int) -> tuple[Tensor, list[int], int]:
        file = os.memfd_create(f"{self._name}-{self.rank}")
        os.ftruncate(file, nbytes)
        self._files.append(file)
        paths = self.exchange(f"/proc/{os.getpid()}/fd/{file}")
        mapped = [self._map(path, nbytes) for path in paths]
        self._mapped += mapped
        self.exchange("mapped")  # the file may be closed only after all ranks have mapped it
        return mapped[self.rank], [tensor.data_ptr() for tensor in mapped], 0

    def _peers(self, addresses: list[int]) -> list[Tensor]:
        return self._mapped[-self.world_size :]

    def _map(self, path: str, nbytes: int) -> Tensor:
        try:
            file = os.open(path, os.O_RDWR)
        except OSError as error:
            raise SymmetricMemoryError(
                f"rank {self.rank} cannot map {path}: {error.strerror}; ranks must be processes "
                "of one user on one node, in one PID namespace"
            ) from error
        try:
            return torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8)
        finally:
            os.close(file)

    def _release(self) -> None:
        # A mapping disappears with its last tensor.
        self._mapped.clear()
        for file in self._files:
            os.close(file)
        self._files.clear()
