"""What reaches memory by other ways than the interpreter's: assembly, and copies by the host.

Triton's interpreter knows no inline assembly. What each instruction that the
kernels use means is in INSTRUCTIONS (gpu/multimem.py). A multicast address is
one that no memory has; the Observer knows which addresses it stands for.

Copies that the host queues (torch's `copy_`) do not go through the interpreter
at all: `HostCopies` tells the Observer of them, each as a launch of its own,
which is what it is on a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton._C.libtriton import interpreter as memory

Array = npt.NDArray[Any]

MULTICAST = 1 << 62
"""Added to an address of rank 0 it is that of all ranks."""


class Observer(Protocol):
    """What is needed of interpreter.Observer."""

    def launched(self) -> None: ...

    def finished(self) -> None: ...

    def program(self, index: tuple[int, int, int]) -> None: ...

    def access(self, kind: Literal["load", "store"], addresses: Array, itemsize: int) -> None: ...

    def on_all_ranks(self, addresses: Array) -> Sequence[Array]:
        """For multicast addresses, uint64 [n]: those that they stand for, of each rank."""


def run(assembly: str, values: Sequence[Array], observer: Observer) -> list[Array]:
    """Do what inline assembly says.

    Args:
        assembly: as the kernel gives it.
        values: of its inputs, [n] each.
        observer: of this thread.

    Returns:
        its outputs, [n] each.

    Raises:
        NotImplementedError: it has no instruction of INSTRUCTIONS.
    """
    for name, instruction in INSTRUCTIONS.items():
        if name in assembly:
            return instruction(observer, *values)
    raise NotImplementedError(
        f"the interpreter knows no inline assembly but {', '.join(INSTRUCTIONS)}: {assembly}"
    )


def _multimem_store(observer: Observer, address: Array, *rest: Array) -> list[Array]:
    *words, mask = rest
    inside = mask.astype(bool)
    for place in observer.on_all_ranks(address[inside].astype(np.uint64)):
        observer.access("store", _every_two_bytes(place), 2)
        for i, word in enumerate(words):
            memory.store(place + np.uint64(4 * i), word[inside], np.ones(len(place), bool))
    return [np.zeros(address.shape, np.int32)]


def _multimem_sum(
    dtype: torch.dtype, observer: Observer, address: Array, mask: Array
) -> list[Array]:
    inside = mask.astype(bool)
    count = int(inside.sum())
    numbers = torch.zeros(count, 16 // dtype.itemsize)
    for place in observer.on_all_ranks(address[inside].astype(np.uint64)):
        observer.access("load", _every_two_bytes(place), 2)
        words = place[:, None] + np.arange(0, 16, 4, dtype=np.uint64)
        none = np.zeros(words.shape, np.int32)
        loaded = memory.load(words, np.ones(words.shape, bool), none, np.dtype(np.int32))
        numbers += torch.from_numpy(loaded).view(dtype).float()
    bits = numbers.to(dtype).view(torch.int32).numpy()
    out = np.zeros((4, *address.shape), np.int32)
    out[:, inside] = bits.T
    return list(out)


def _every_two_bytes(addresses: Array) -> Array:
    """Of 16 bytes at each address: so that elements of any size are found."""
    return (addresses[:, None] + np.arange(0, 16, 2, dtype=np.uint64)).ravel()


_SUM = "multimem.ld_reduce.relaxed.sys.global.add"
INSTRUCTIONS: dict[str, Callable[..., list[Array]]] = {
    "multimem.st.relaxed.sys.global.v4.f32": _multimem_store,
    f"{_SUM}.v4.f32": partial(_multimem_sum, torch.float32),
    f"{_SUM}.acc::f32.v4.f16x2": partial(_multimem_sum, torch.float16),
    f"{_SUM}.acc::f32.v4.bf16x2": partial(_multimem_sum, torch.bfloat16),
}


class HostCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within, the observer is told of this thread's `copy_` from one place to another.

    Args:
        observer: of this thread.
    """

    def __init__(self, observer: Observer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observer = observer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].data_ptr() != args[1].data_ptr():
            to, source = args[:2]
            self._observer.launched()
            self._observer.program((0, 0, 0))
            self._observer.access("load", _places(source), source.itemsize)
            self._observer.access("store", _places(to), to.itemsize)
            func(*args, **(kwargs or {}))
            self._observer.finished()
            return to
        return func(*args, **(kwargs or {}))


def _places(tensor: torch.Tensor) -> Array:
    """Addresses of a contiguous tensor's elements."""
    start = tensor.data_ptr()
    return np.arange(start, start + tensor.nbytes, tensor.itemsize, dtype=np.uint64)
