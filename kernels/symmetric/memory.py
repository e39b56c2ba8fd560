"""Symmetric memory: a tensor that every rank has, and the addresses of all of them.

A home is where ranks and their memory are: GPUs of one NVLink domain (p2p.py),
CPU processes over shared memory (shared.py), threads of one process
(virtual.py). Kernels see a table of addresses and never learn which it is.

Allocation is collective: all ranks call `empty` in the same order with the same
shape and dtype. What each of them asked for is exchanged first, and compared on
every rank before any has allocated, so that a disagreement is the same error
everywhere and not a hang.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from weft.errors import WeftError

ALIGNMENT = 256
"""Bytes; every allocation begins at a multiple of it, so that vector stores never straddle one."""


class SymmetricMemoryError(WeftError):
    """Ranks disagree, one of them did not come, or memory was used after its release."""


@dataclass(frozen=True, slots=True)
class SymmetricTensor:
    """One rank's view of a tensor that exists on all of them.

    Attributes:
        name: what it is called in messages.
        local: this rank's.
        addresses: int64 [W], on local's device; where each rank's begins, as this rank sees it.
        multicast: an address that stores to all ranks and reduces over them, 0 without one.
        peers: each rank's, for copies that the host queues; empty where the home has none.
    """

    name: str
    local: Tensor
    addresses: Tensor
    multicast: int = 0
    peers: tuple[Tensor, ...] = ()


class Home(ABC):
    """Where this rank is: its device, two streams of it, and the memory that others reach.

    Args:
        rank, world_size: of this rank; among how many.
        device: of its tensors.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        if not 0 <= rank < world_size:
            raise SymmetricMemoryError(
                f"rank is {rank}; it must be in [0, {world_size}), the world size"
            )
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._calls = 0
        self._closed = False
        self._second: torch.cuda.Stream | None = None
        if device.type == "cuda":  # what others wait for goes first
            self._second = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    @property
    def processors(self) -> int:
        """Of the device, how many this rank's kernels may fill."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_properties(self.device).multi_processor_count
        return 4

    @property
    def device_name(self) -> str:
        """What the driver calls the device."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Within, kernels are launched on a second stream, after those launched before.

        On the CPU, where a launch returns when it is done, there is one stream.
        """
        if self._second is None:
            yield
            return
        self._second.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._second):
            yield

    def rejoin(self) -> None:
        """What comes next on the first stream comes after what was launched beside it."""
        if self._second is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._second)

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> SymmetricTensor:
        """A tensor of the same shape and dtype on all ranks, uninitialised. Collective.

        Raises:
            SymmetricMemoryError: the ranks ask for different things, on each of them; or one of
                them does not ask at all.
        """
        self._agree(f"{name} {str(dtype).removeprefix('torch.')} {list(shape)}")
        nbytes = max(1, math.prod(shape)) * dtype.itemsize
        local, addresses, multicast = self._allocate(-(-nbytes // ALIGNMENT) * ALIGNMENT)
        tensor, *peers = (
            memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
            for memory in (local, *self._peers(addresses))
        )
        table = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        return SymmetricTensor(name, tensor, table, multicast, tuple(peers))

    def zeros(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> SymmetricTensor:
        """The same, of zeros on every rank before any rank goes on: for signals. Collective."""
        tensor = self.empty(name, shape, dtype)
        tensor.local.zero_()
        self.barrier()
        return tensor

    def barrier(self) -> None:
        """Returns once all ranks are here, and what they have launched on their GPUs is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.exchange("barrier")

    def close(self) -> None:
        """Release everything, after all ranks are here: none may be reading. Collective."""
        if not self._closed:
            self.barrier()
            self._closed = True
            self._release()

    def exchange(self, value: str) -> list[str]:
        """Every rank's value, by rank. Collective.

        Raises:
            SymmetricMemoryError: a rank did not come in time, or the home is closed.
        """
        if self._closed:
            raise SymmetricMemoryError(f"rank {self.rank} uses symmetric memory after its release")
        self._calls += 1
        return self._exchange(self._calls, value)

    def compare(self, value: str) -> list[str]:
        """Every rank's value, to see whether ranks that call an op mean the same. Collective."""
        return self.exchange(value)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        elif not self._closed:  # the others may never come
            self._closed = True
            self._release()

    def _agree(self, asked: str) -> None:
        all_asked = self.exchange(asked)
        if len(set(all_asked)) > 1:
            common = max(all_asked, key=all_asked.count)
            others = "; ".join(
                f"rank {rank} asks for {other}"
                for rank, other in enumerate(all_asked)
                if other != common
            )
            raise SymmetricMemoryError(
                f"ranks disagree about an allocation: {others}; the others for {common}"
            )

    @abstractmethod
    def _exchange(self, call: int, value: str) -> list[str]:
        """Every rank's value of its `call`-th exchange."""

    @abstractmethod
    def _allocate(self, nbytes: int) -> tuple[Tensor, list[int], int]:
        """uint8 [nbytes] of this rank; where each rank's begins; the multicast address or 0."""

    def _peers(self, addresses: list[int]) -> Sequence[Tensor]:
        """Each rank's uint8 [nbytes] of the allocation that was just made; empty without them."""
        return ()

    @abstractmethod
    def _release(self) -> None:
        """Give the memory back."""


def number_of_home(store: Store, name: str, rank: int) -> int:
    """How many homes of this name the rank has made through the store, this one included.

    Ranks make homes together, so it is the same on all; with it no home reads what was said in
    another one.
    """
    return int(store.add(f"{name}/homes/{rank}", 1))


def exchange_through(store: Store, rank: int, world_size: int, key: str, value: str) -> list[str]:
    """Put this rank's value in a store and wait for the others'.

    Raises:
        SymmetricMemoryError: a rank's is not there within the store's timeout.
    """
    store.set(f"{key}/{rank}", json.dumps(value))
    values = []
    for other in range(world_size):
        try:
            values.append(json.loads(store.get(f"{key}/{other}")))
        except RuntimeError as error:
            raise SymmetricMemoryError(
                f"rank {rank} waited for rank {other} at {key}, which did not come within "
                f"{store.timeout.total_seconds():.0f} s"  # type: ignore[attr-defined]
            ) from error
    return values
