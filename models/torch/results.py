"""A step's results on their way to the host, while the host and the device go on.

A GPU copies asynchronously only to pinned host memory. An event says when all copies are done.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Results:
    """The results of one step.

    Args:
        device: the results' device.
    """

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def fetch(self, tensor: Tensor) -> Tensor:
        """Begin to copy a tensor; the copy is complete after `wait`. A CPU's need not move."""
        if self._event is None:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def end(self) -> None:
        """Mark the end of the step, after all copies."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Wait for the device to reach the end of the step; any thread may."""
        if self._event is not None:
            self._event.synchronize()
