"""Symmetric memory of GPUs of several nodes, through NVSHMEM (nvshmem4py).

NVSHMEM is two libraries: one on the host, which is loaded when it is first
used and may be any that the system finds, and device code, which is linked into
kernels from the bitcode in NVIDIA's wheel. They share structures, so a kernel
of one version on a host library of another reads garbage. Their versions are
compared before anything is initialised.

In the address table a peer that NVLink does not reach is 0. Kernels send to it
with the puts of gpu/nvshmem.py, to the address that they have themselves.

Not handled: more than one home in a process, for NVSHMEM is one per process.
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

PACKAGES = "pip install 'weft[cuda]' brings nvshmem4py and NVIDIA's library"


class NvshmemHome(Home):
    """One rank, a process with one GPU.

    Args:
        store: where the ranks find each other: torch's TCPStore.
        rank, world_size: of this rank.
        device: this rank's GPU; the current one if None.

    Raises:
        SymmetricMemoryError: NVSHMEM is not there, or its versions do not go together; on every
            rank if on any.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(
            rank, world_size, device or torch.device("cuda", torch.cuda.current_device())
        )
        self._store = store
        self._key = f"nvshmem/{number_of_home(store, 'nvshmem', rank)}"
        self._buffers: list[Any] = []
        self._start()

    def _start(self) -> None:
        try:
            answer = check_versions()
        except SymmetricMemoryError as error:
            answer = f"error: {error}"
        answers = self.exchange(answer)
        if len(set(answers)) > 1 or answer.startswith("error: "):
            by_rank = "; ".join(f"rank {rank}: {answer}" for rank, answer in enumerate(answers))
            raise SymmetricMemoryError(f"NVSHMEM must be of one version on all ranks; {by_rank}")

        import nvshmem.core
        from cuda.core import Device

        unique = nvshmem.core.get_unique_id(empty=self.rank > 0)
        raw = unique._data.view("uint8")
        text = base64.b64encode(raw.tobytes()).decode() if self.rank == 0 else ""
        bits = base64.b64decode(self.exchange(text)[0])
        raw[...] = torch.frombuffer(bytearray(bits), dtype=torch.uint8).numpy().reshape(raw.shape)
        nvshmem.core.init(
            device=Device(self.device.index),
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
        else:  # freeing is collective, and the others may never come: it goes with the process
            self._closed = True


def check_versions() -> str:
    """The version that host library and device code both have.

    Raises:
        SymmetricMemoryError: one of them is not there, or they differ.
    """
    if find_spec("nvshmem") is None:
        raise SymmetricMemoryError(f"nvshmem4py is not installed; {PACKAGES}")
    device = device_version()

    import nvshmem.core

    host = str(nvshmem.core.get_version().libnvshmem_version)
    if host != device:
        raise SymmetricMemoryError(
            f"NVSHMEM's host library is {host} and its device code is {device}; they must be the "
            f"same. The device code is that of {library_folder()}: let the host library be found "
            "there, too, or install the wheel of the host library's version"
        )
    return host


def library_folder() -> Path:
    """Where NVIDIA's wheel is.

    Raises:
        SymmetricMemoryError: it is not installed.
    """
    spec = find_spec("nvidia.nvshmem") if find_spec("nvidia") else None
    if spec is None or not spec.submodule_search_locations:
        raise SymmetricMemoryError(f"NVIDIA's wheel of NVSHMEM is not installed; {PACKAGES}")
    return Path(next(iter(spec.submodule_search_locations)))


def device_version() -> str:
    """The version of the bitcode: that of the headers which it was built and is shipped with.

    Raises:
        SymmetricMemoryError: the wheel is not installed, or has no headers.
    """
    header = library_folder() / "include/non_abi/nvshmem_version.h"
    try:
        text = header.read_text()
    except OSError as error:
        raise SymmetricMemoryError(
            f"the version of NVSHMEM's device code is not known: {header}: {error.strerror}"
        ) from error
    numbers = []
    for part in ("MAJOR", "MINOR", "PATCH"):
        found = re.search(rf"define NVSHMEM_VENDOR_{part}_VERSION (\d+)", text)
        if found is None:
            raise SymmetricMemoryError(f"{header} does not say NVSHMEM_VENDOR_{part}_VERSION")
        numbers.append(found[1])
    return ".".join(numbers)


def bitcode(major: int, minor: int) -> Path:
    """The device code for GPUs of this compute capability.

    Raises:
        SymmetricMemoryError: the wheel is not installed, or has none.
    """
    folder = library_folder() / "lib"
    for name in (f"libnvshmem_device_sm_{major}{minor}.bc", "libnvshmem_device.bc"):
        if (folder / name).exists():  # NVSHMEM 3.4 has one for all
            return folder / name
    files = folder.glob("libnvshmem_device_sm_*.bc")
    there = sorted(int(file.stem.rsplit("_", 1)[1]) for file in files)
    raise SymmetricMemoryError(
        f"NVSHMEM's device code is not there for sm_{major}{minor}; it is for "
        f"{', '.join(f'sm_{each}' for each in there) or 'none'}"
    )
