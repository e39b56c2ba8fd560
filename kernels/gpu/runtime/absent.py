"""A Triton driver without a device: kernels are compiled as for the device, and never run."""

from __future__ import annotations

from typing import Any


class NoDevice:
    """A Triton driver for an absent target. It can only compile."""

    def __init__(self, target: str) -> None:
        from triton.backends.compiler import GPUTarget

        nvidia = target.startswith("sm_")
        self._target = (
            GPUTarget("cuda", int(target[3:]), 32) if nvidia else GPUTarget("hip", target, 64)
        )

    def get_current_device(self) -> str:
        return str(self._target.arch)

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target
