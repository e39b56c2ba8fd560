"""Symmetric memory for GPUs in one NVLink domain, through torch's own.

`torch.distributed._symmetric_memory` allocates with the driver's virtual memory management, maps
the peers' allocations, and binds a multicast object if the switch supports it. This file adds
weft's interface and checks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from weft.kernels.symmetric.memory import Home, exchange_through, number_of_home


class P2pHome(Home):
    """One rank: a process with one GPU.

    Args:
        group: an initialised torch.distributed group in which all GPUs reach each other.
        store: the group's store, for comparing the ranks' requests.
    """

    def __init__(self, group: torch.distributed.ProcessGroup, store: Store) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(group.rank(), group.size(), device)
        self._group = group
        self._store = store
        name = f"weft/{group.group_name}"
        self._key = f"{name}/{number_of_home(store, name, self.rank)}"
        self._handles: list[tuple[Tensor, Any]] = []
        # Drivers tell what GPUs could do; only an allocation shows what the fabric does.
        tried = self.empty("multicast", (1,), torch.int32)
        self._has_multicast = all(map(int, self.exchange(str(int(tried.multicast != 0)))))

    @property
    def has_multicast(self) -> bool:
        return self._has_multicast

    def _exchange(self, call: int, value: str) -> list[str]:
        return exchange_through(
            self._store, self.rank, self.world_size, f"{self._key}/{call}", value
        )

    def _allocate(self, nbytes: int) -> tuple[Tensor, list[int], int]:
        from torch.distributed import _symmetric_memory

        memory = _symmetric_memory.empty(nbytes, dtype=torch.uint8, device=self.device)
        handle = _symmetric_memory.rendezvous(memory, self._group)
        self._handles.append((memory, handle))
        offset = memory.data_ptr() - handle.buffer_ptrs[self.rank]
        multicast = handle.multicast_ptr + offset if handle.multicast_ptr else 0
        return memory, [address + offset for address in handle.buffer_ptrs], multicast

    def _peers(self, addresses: list[int]) -> list[Tensor]:
        memory, handle = self._handles[-1]
        return [
            handle.get_buffer(
                rank, memory.shape, memory.dtype, addresses[rank] - handle.buffer_ptrs[rank]
            )
            for rank in range(self.world_size)
        ]

    def _release(self) -> None:
        self._handles.clear()
