"""Symmetric memory for GPUs on several nodes, through NVSHMEM (nvshmem4py).

NVSHMEM has two libraries. The host library is loaded at first use, from wherever the system finds
it. The device code is bitcode in NVIDIA's wheel and is linked into kernels. They share structures,
so a kernel with one version reads garbage from a host library with another. Their versions are
compared before anything is initialised.

In the address table, a peer that NVLink does not reach is 0. Kernels send to such a peer with the
puts in gpu/runtime/nvshmem.py, to their own address.

Not handled: more than one home in a process, because NVSHMEM has one world per process.
"""

from __future__ import annotations

import base64
import re
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from weft.kernels.symmetric.memory import (
    Home,
    SymmetricMemoryError,
    exchange_through,
    number_of_home,
)

PACKAGES = "pip install 'nvshmem4py-cu13>=0.4' brings nvshmem4py and NVIDIA's library"


class NvshmemHome(Home):
    """One rank: a process with one GPU.

    Args:
        store: the ranks' rendezvous: torch's TCPStore.
        rank, world_size: this rank, and the number of ranks.
        device: this rank's GPU; None takes the current one.
        ranks_per_node: number of consecutive ranks that NVLink connects; all if None.

    Raises:
        SymmetricMemoryError: NVSHMEM is missing, or its versions differ; raised on every rank if on
            any.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        device: torch.device | None = None,
        ranks_per_node: int | None = None,
    ) -> None:
        super().__init__(
            rank, world_size, device or torch.device("cuda", torch.cuda.current_device())
        )
        self._store = store
        self._ranks_per_node = ranks_per_node or world_size
        self._key = f"nvshmem/{number_of_home(store, 'nvshmem', rank)}"
        self._buffers: list[Any] = []
        self._start()

    @property
    def ranks_per_node(self) -> int:
        """See Home."""
        return self._ranks_per_node

    def _start(self) -> None:
        try:
            answer = check_versions()
        except SymmetricMemoryError as error:
            answer = f"error: {error}"
        answers = self.exchange(answer)
        if len(set(answers)) > 1 or answer.startswith("error: "):
            by_rank = "; ".join(f"rank {rank}: {answer}" for rank, answer in enumerate(answers))
            raise SymmetricMemoryError(
                f"NVSHMEM must have the same version on all ranks; {by_rank}"
            )

        import nvshmem.core
        from cuda.core import Device

        unique = nvshmem.core.get_unique_id(empty=self.rank > 0)
        raw = unique._data.view("uint8")
        text = base64.b64encode(raw.tobytes()).decode() if self.rank == 0 else ""
        bits = base64.b64decode(self.exchange(text)[0])
        raw[...] = torch.frombuffer(bytearray(bits), dtype=torch.uint8).numpy().reshape(raw.shape)
        device = Device(self.device.index)
        device.set_current()  # init asks for a current device
        nvshmem.core.init(
            device=device,
            uid=unique,
            rank=self.rank,
            nranks=self.world_size,
            initializer_method="uid",
        )

    def _exchange(self, call: int, value: str) -> list[str]:
        return exchange_through(
            self._store, self.rank, self.world_size, f"{self._key}/{call}", value
        )

    def _allocate(self, nbytes: int) -> tuple[Tensor, list[int], int]:
        import nvshmem.core
        from nvshmem import bindings

        buffer = nvshmem.core.buffer(nbytes)
        self._buffers.append(buffer)
        memory = torch.utils.dlpack.from_dlpack(buffer).view(torch.uint8)
        address = memory.data_ptr()
        peers = [int(bindings.ptr(address, rank)) for rank in range(self.world_size)]
        return memory, peers, int(bindings.mc_ptr(nvshmem.core.Teams.TEAM_WORLD, address))

    def _release(self) -> None:
        import nvshmem.core

        for buffer in self._buffers:
            nvshmem.core.free(buffer)
        self._buffers.clear()
        nvshmem.core.finalize()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:  # freeing is collective, but the others may never arrive; the process's end frees it
            self._closed = True


def check_versions() -> str:
    """Return the version of host library and device code.

    Raises:
        SymmetricMemoryError: one is missing, or they differ.
    """
    if find_spec("nvshmem") is None:
        raise SymmetricMemoryError(f"nvshmem4py is not installed; {PACKAGES}")
    device = device_version()

    import nvshmem.core

    host = str(nvshmem.core.get_version().libnvshmem_version)
    if host != device:
        raise SymmetricMemoryError(
            f"NVSHMEM's host library is {host} and its device code is {device}; they must be the "
            f"same. The device code comes from {library_folder()}: load the host library from "
            "there, too, or install the wheel with the host library's version"
        )
    return host


def library_folder() -> Path:
    """Return the folder of NVIDIA's wheel.

    Raises:
        SymmetricMemoryError: it is not installed.
    """
    spec = find_spec("nvidia.nvshmem") if find_spec("nvidia") else None
    if spec is None or not spec.submodule_search_locations:
        raise SymmetricMemoryError(f"NVIDIA's NVSHMEM wheel is not installed; {PACKAGES}")
    return Path(next(iter(spec.submodule_search_locations)))


def device_version() -> str:
    """Return the bitcode's version, from the headers in the same wheel.

    Raises:
        SymmetricMemoryError: the wheel is not installed, or has no headers.
    """
    header = library_folder() / "include/non_abi/nvshmem_version.h"
    try:
        text = header.read_text()
    except OSError as error:
        raise SymmetricMemoryError(
            f"cannot find the version of NVSHMEM's device code: {header}: {error.strerror}"
        ) from error
    numbers = []
    for part in ("MAJOR", "MINOR", "PATCH"):
        found = re.search(rf"define NVSHMEM_VENDOR_{part}_VERSION (\d+)", text)
        if found is None:
            raise SymmetricMemoryError(f"{header} does not say NVSHMEM_VENDOR_{part}_VERSION")
        numbers.append(found[1])
    return ".".join(numbers)


def bitcode(major: int, minor: int) -> Path:
    """Return the device code for GPUs with this compute capability.

    Raises:
        SymmetricMemoryError: the wheel is not installed, or has none.
    """
    folder = library_folder() / "lib"
    for name in (f"libnvshmem_device_sm_{major}{minor}.bc", "libnvshmem_device.bc"):
        if (folder / name).exists():  # NVSHMEM 3.4 has one file for all GPUs
            return folder / name
    files = folder.glob("libnvshmem_device_sm_*.bc")
    supported = sorted(int(file.stem.rsplit("_", 1)[1]) for file in files)
    raise SymmetricMemoryError(
        f"NVSHMEM has no device code for sm_{major}{minor}; it supports "
        f"{', '.join(f'sm_{each}' for each in supported) or 'none'}"
    )
