"""Symmetric memory: a tensor on every rank, and the addresses of all of them.

A home is where the ranks and their memory are: GPUs in one NVLink domain (p2p.py), CPU processes
over shared memory (shared.py), or threads in one process (virtual.py). Kernels see a table of
addresses and never learn which home it is.

Allocation is collective: all ranks call `empty` in the same order with the same shape and dtype.
The ranks first exchange their requests, and every rank compares them before any allocates. A
disagreement is therefore the same error everywhere, not a hang.
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
"""Bytes; every allocation begins at a multiple, so that vector stores never cross its end."""


class SymmetricMemoryError(WeftError):
    """Ranks disagree, a rank did not arrive, or memory was used after its release."""


@dataclass(frozen=True, slots=True)
class SymmetricTensor:
    """One rank's view of a tensor that exists on all ranks.

    Attributes:
        name: name for messages.
        local: this rank's tensor.
        addresses: int64 [W], on local's device; each rank's address, as this rank sees it.
        multicast: an address that stores to all ranks and reduces over them; 0 without one.
        peers: each rank's tensor, for copies queued by the host; empty if the home has none.
    """

    name: str
    local: Tensor
    addresses: Tensor
    multicast: int = 0
    peers: tuple[Tensor, ...] = ()


class Home(ABC):
    """This rank's device, two streams on it, and the memory that other ranks reach.

    Args:
        rank, world_size: this rank, and the number of ranks.
        device: device of its tensors.
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
        if device.type == "cuda":  # high priority, because other ranks wait for its results
            self._second = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    @property
    def processors(self) -> int:
        """Number of the device's processors that this rank's kernels may fill."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_properties(self.device).multi_processor_count
        return 4

    @property
    def has_multicast(self) -> bool:
        """True if tensors have a multicast address, on all ranks."""
        return False

    @property
    def ranks_per_node(self) -> int:
        """Number of consecutive ranks with addresses for each other; all without an override."""
        return self.world_size

    @property
    def device_name(self) -> str:
        """The device's name, as its driver reports it."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Launch kernels on a second stream, after all earlier launches.

        The CPU has one stream, because a launch returns when it is done.
        """
        if self._second is None:
            yield
            return
        self._second.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._second):
            yield

    def rejoin(self) -> None:
        """Let the first stream wait for all launches on the second one."""
        if self._second is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._second)

    def record_event(self) -> object:
        """Return an event for `wait_event`: all launches so far on the current stream."""
        if self._second is None:
            return None
        return torch.cuda.current_stream(self.device).record_event()

    def wait_event(self, event: object) -> None:
        """Let the next launches on the current stream wait for an event."""
        if isinstance(event, torch.cuda.Event):
            torch.cuda.current_stream(self.device).wait_event(event)

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> SymmetricTensor:
        """Allocate a tensor with the same shape and dtype on all ranks, uninitialised. Collective.

        Raises:
            SymmetricMemoryError: the ranks' requests differ (raised on each rank), or a rank makes
                none.
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
        """Allocate zeros; no rank continues before all are zero: for signals. Collective."""
        tensor = self.empty(name, shape, dtype)
        tensor.local.zero_()
        self.barrier()
        return tensor

    def barrier(self) -> None:
        """Wait until all ranks are here and their GPU launches are done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.exchange("barrier")

    def close(self) -> None:
        """Release everything, once all ranks have arrived: none may be reading. Collective."""
        if not self._closed:
            self.barrier()
            self._closed = True
            self._release()

    def exchange(self, value: str) -> list[str]:
        """Return every rank's value, by rank. Collective.

        Raises:
            SymmetricMemoryError: a rank did not arrive in time, or the home is closed.
        """
        if self._closed:
            raise SymmetricMemoryError(f"rank {self.rank} uses symmetric memory after its release")
        self._calls += 1
        return self._exchange(self._calls, value)

    def compare(self, value: str) -> list[str]:
        """Return every rank's value, to check that ranks call an op with the same arguments.
        Collective.
        """
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
        elif not self._closed:  # the others may never arrive
            self._closed = True
            self._release()

    def _agree(self, request: str) -> None:
        requests = self.exchange(request)
        if len(set(requests)) > 1:
            common = max(requests, key=requests.count)
            others = "; ".join(
                f"rank {rank} requests {other}"
                for rank, other in enumerate(requests)
                if other != common
            )
            raise SymmetricMemoryError(
                f"ranks disagree about an allocation: {others}; the others request {common}"
            )

    @abstractmethod
    def _exchange(self, call: int, value: str) -> list[str]:
        """Return every rank's value in its `call`-th exchange."""

    @abstractmethod
    def _allocate(self, nbytes: int) -> tuple[Tensor, list[int], int]:
        """Return this rank's uint8 [nbytes], all ranks' addresses, and the multicast one or 0."""

    def _peers(self, addresses: list[int]) -> Sequence[Tensor]:
        """Return each rank's uint8 [nbytes] for the latest allocation; empty if unsupported."""
        return ()

    @abstractmethod
    def _release(self) -> None:
        """Free the memory."""


def number_of_home(store: Store, name: str, rank: int) -> int:
    """Return how many homes with this name the rank has made through the store, including this one.

    Ranks make homes together, so the number is the same on all. It keeps homes from reading each
    other's values.
    """
    return int(store.add(f"{name}/homes/{rank}", 1))


def exchange_through(store: Store, rank: int, world_size: int, key: str, value: str) -> list[str]:
    """Put this rank's value into a store and wait for the others' values.

    Raises:
        SymmetricMemoryError: a rank's value is missing after the store's timeout.
    """
    store.set(f"{key}/{rank}", json.dumps(value))
    values = []
    for other in range(world_size):
        try:
            values.append(json.loads(store.get(f"{key}/{other}")))
        except RuntimeError as error:
            raise SymmetricMemoryError(
                f"rank {rank} waited for rank {other} at {key}, which did not arrive within "
                f"{store.timeout.total_seconds():.0f} s"  # type: ignore[attr-defined]
            ) from error
    return values
