"""What an overlapped op keeps between its calls: symmetric buffers, signals, a count of calls.

A workspace is made once, for the largest shape that will come, by all ranks
together; the home releases its memory. Buffers have two slots, for even and odd
calls. That is enough, and no rank has to say that it is done reading:

    A rank that is in call n + 2 has finished call n + 1, and so has seen the
    signals that every other rank sent in its call n + 1. A rank sends those
    after its own call n, reading included. So nobody reads slot n mod 2 any
    more when call n + 2 writes to it.

It holds for every op in which each rank waits for a signal of every other one.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from weft.errors import WeftError
from weft.kernels.gpu import signals
from weft.kernels.symmetric.memory import Home, SymmetricTensor

SLOTS = 2


TRITON_TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv,
}


def triton_type(dtype: torch.dtype) -> tl.dtype:
    """Triton's name of a torch dtype."""
    return TRITON_TYPES[dtype]


class KernelError(WeftError):
    """An op was called with what it cannot take, or a wait inside one ran out."""


class Workspace:
    """Of one op, on one rank. Made by all ranks together.

    Args:
        home: of this rank.
        name: of the op; in messages.
        numel: of one slot of the buffer.
        dtype: of its elements.
        num_signals: of this rank.

    Attributes:
        processors, beside, rejoin: the home's.
    """

    def __init__(
        self, home: Home, name: str, numel: int, dtype: torch.dtype, num_signals: int
    ) -> None:
        if dtype not in TRITON_TYPES:
            allowed = ", ".join(str(allowed) for allowed in TRITON_TYPES)
            raise KernelError(f"{name}: dtype is {dtype}; it must be one of {allowed}")
        self.name = name
        self.rank = home.rank
        self.world_size = home.world_size
        self.numel = numel
        self.dtype = dtype
        self.buffer: SymmetricTensor = home.empty(f"{name}.buffer", (SLOTS, numel), dtype)
        addresses = self.buffer.addresses.tolist()
        self.require(
            "a peer without an address (beyond NVLink: symmetric/nvshmem.py)",
            f"rank {addresses.index(0)}" if 0 in addresses else "none",
            0 not in addresses,
            "be none: the op stores to all ranks by their addresses",
        )
        self.signals: SymmetricTensor = home.zeros(f"{name}.signals", (num_signals,), torch.int32)
        self.calls = torch.zeros(1, dtype=torch.int32, device=home.device)
        self.fault = torch.full((4,), -1, dtype=torch.int32, device=home.device)
        self.device = home.device
        self.num_signals = num_signals
        self.processors = home.processors
        self.beside = home.beside
        self.rejoin = home.rejoin

    def begin(self) -> None:
        """Count a call; the op's kernels come next."""
        signals.begin_call[(1,)](self.calls)

    def check(self) -> None:
        """Synchronise with the device, and raise if a wait has run out since the last check.

        Raises:
            KernelError: naming the rank, the signal and what it was.
        """
        rank, index, wanted, seen = self.fault.tolist()
        if rank >= 0:
            self.fault.fill_(-1)
            raise KernelError(
                f"{self.name}: rank {rank} gave up waiting for its signal {index} to reach "
                f"{wanted}; it is {seen}. The rank that sends it has failed or is stuck"
            )

    def require_tensor(self, argument: str, tensor: Tensor) -> None:
        """Refuse a tensor of another dtype or device, or one that is not contiguous."""
        dtype, device = tensor.dtype, tensor.device
        self.require(f"{argument}'s dtype", dtype, dtype == self.dtype, f"be {self.dtype}")
        self.require(f"{argument}'s device", device, device == self.device, f"be {self.device}")
        self.require(
            f"{argument}'s stride", tensor.stride(), tensor.is_contiguous(), "be contiguous"
        )

    def require_room(self, argument: str, numel: int) -> None:
        """Refuse what is larger than a slot of the buffer."""
        self.require(
            f"what {argument} needs of the workspace",
            f"{numel} numbers",
            numel <= self.numel,
            f"be at most {self.numel}, which it was made for",
        )

    def require_signals(self, count: int) -> None:
        """Refuse what takes more signals than there are."""
        self.require(
            "what this call needs of the workspace",
            f"{count} signals",
            count <= self.num_signals,
            f"be at most {self.num_signals}: make it for as many rows, with the same blocks",
        )

    def require(self, argument: str, value: object, allowed: bool, must: str) -> None:
        """Refuse an argument before anything is launched.

        Raises:
            KernelError: naming op, argument, value and what is allowed.
        """
        if not allowed:
            raise KernelError(f"{self.name}: {argument} is {value}; it must {must}")
