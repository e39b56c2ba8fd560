"""Copies of weights to a GPU, through pinned host memory.

A GPU copies asynchronously only from pinned memory. From a mapped file, the driver would copy each
piece into a buffer of its own and then wait for the device. Here two buffers take turns: the host
fills one, which also reads the file, while the device copies from the other one. An event for each
buffer says when the device has read it. One stream is enough, because a link to a GPU is faster
than the host's copy.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

STAGE_BYTES = 32 * 2**20
"""Size of a buffer."""


class Staging:
    """Two pinned buffers for one device.

    Args:
        device: a GPU. On a CPU, the same copies run one after the other.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [self._new_buffer(STAGE_BYTES) for _ in range(2)]
        self._turn = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """Copy a tensor on the CPU, of any shape and strides, to the device.

        The current stream has the result; the tensor itself is not needed after the call.
        """
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        # Pieces of whole rows. A row may be larger than a buffer, which then grows.
        rows = tensor if tensor.dim() else tensor.view(1)
        places = out if out.dim() else out.view(1)
        row_bytes = max(1, math.prod(rows.shape[1:]) * tensor.itemsize)
        step = max(1, STAGE_BYTES // row_bytes)
        for piece, place in zip(torch.split(rows, step), torch.split(places, step), strict=True):
            self._turn = 1 - self._turn
            self._buffers[self._turn].wait()
            if piece.nbytes > self._buffers[self._turn].size:
                self._buffers[self._turn] = self._new_buffer(piece.nbytes)
            self._buffers[self._turn].send(piece, place)
        return out

    def _new_buffer(self, size: int) -> Buffer:
        return Buffer(size, is_pinned=self._device.type == "cuda")


class Buffer:
    """Host memory, and an event after the last copy out of it.

    Args:
        size: bytes.
        is_pinned: the device is a GPU.
    """

    def __init__(self, size: int, *, is_pinned: bool) -> None:
        self.size = size
        self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)
        self._is_read: torch.cuda.Event | None = None
        if is_pinned:
            self._is_read = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def send(self, piece: Tensor, place: Tensor) -> None:
        """Copy a piece here, and begin to copy it to its place on the device."""
        host = self.memory[: piece.nbytes].view(piece.dtype).view(piece.shape)
        place.copy_(host.copy_(piece), non_blocking=True)
        if self._is_read is not None:
            self._is_read.record()

    def wait(self) -> None:
        """Wait until the device has read what was sent last."""
        if self._is_read is not None:
            self._is_read.synchronize()
