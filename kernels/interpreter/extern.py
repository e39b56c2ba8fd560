"""Memory accesses that bypass the interpreter: assembly, library functions, torch.

Triton's interpreter supports no inline assembly. INSTRUCTIONS implements the kernels' instructions
(gpu/runtime/multimem.py). A multicast address belongs to no real memory; the Observer resolves it
to each rank's address.

It supports no library functions either. FUNCTIONS implements the kernels' NVSHMEM functions
(gpu/runtime/nvshmem.py); puts go to the Observer's network (network.py).

The host's torch operators (copies, products, sums) bypass the interpreter entirely.
`HostOperators` reports them to the Observer. Each operator on symmetric memory, or on a tensor that
a kernel was given before, counts as its own launch, as it is on a stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton._C.libtriton import interpreter as memory

from weft.kernels.interpreter.recording import note

Array = npt.NDArray[Any]

MULTICAST = 1 << 62
"""Offset from rank 0's address to the multicast address."""


class Observer(Protocol):
    """The part of gpu.Observer needed here."""

    def launched(self, tensors: Mapping[str, torch.Tensor]) -> None: ...

    def finished(self) -> None: ...

    def program(self, index: tuple[int, int, int]) -> None: ...

    def access(
        self, kind: Literal["load", "store", "atomic"], addresses: Array, itemsize: int
    ) -> None: ...

    def on_all_ranks(self, addresses: Array) -> Sequence[Array]:
        """Resolve multicast addresses, uint64 [n], to each rank's addresses."""

    def watches(self, storage: int) -> bool:
        """True if a torch storage, given by its address, is symmetric, or a kernel had it."""

    def put(self, to: int, source: int, nbytes: int, signal: int, value: int, peer: int) -> None:
        """Memory is put to a peer; signal 0 means a blocking put without a signal."""

    def fetched(self, signal: int, value: int) -> None:
        """A signal of 8 bytes was read without ordering."""

    def waited(self, signal: int, value: int) -> None:
        """A signal of 8 bytes has its awaited value, and is acquired."""

    def quiet(self) -> None:
        """Return once all the rank's puts have arrived."""


def run(assembly: str, values: Sequence[Array], observer: Observer) -> list[Array]:
    """Execute inline assembly.

    Args:
        assembly: the kernel's text.
        values: its inputs, [n] each.
        observer: this thread's observer.

    Returns:
        its outputs, [n] each.

    Raises:
        NotImplementedError: it is none of INSTRUCTIONS.
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
    for addresses in observer.on_all_ranks(address[inside].astype(np.uint64)):
        observer.access("store", _every_two_bytes(addresses), 2)
        for i, word in enumerate(words):
            memory.store(addresses + np.uint64(4 * i), word[inside], np.ones(len(addresses), bool))
    return [np.zeros(address.shape, np.int32)]


def _multimem_sum(
    dtype: torch.dtype, observer: Observer, address: Array, mask: Array
) -> list[Array]:
    inside = mask.astype(bool)
    count = int(inside.sum())
    numbers = torch.zeros(count, 16 // dtype.itemsize)
    for addresses in observer.on_all_ranks(address[inside].astype(np.uint64)):
        observer.access("load", _every_two_bytes(addresses), 2)
        words = addresses[:, None] + np.arange(0, 16, 4, dtype=np.uint64)
        none = np.zeros(words.shape, np.int32)
        loaded = memory.load(words, np.ones(words.shape, bool), none, np.dtype(np.int32))
        numbers += torch.from_numpy(loaded).view(dtype).float()
    bits = numbers.to(dtype).view(torch.int32).numpy()
    out = np.zeros((4, *address.shape), np.int32)
    out[:, inside] = bits.T
    return list(out)


def _every_two_bytes(addresses: Array) -> Array:
    """Return every second byte's address in 16 bytes, so that elements of any size are found."""
    return (addresses[:, None] + np.arange(0, 16, 2, dtype=np.uint64)).ravel()


_SUM = "multimem.ld_reduce.relaxed.sys.global.add"
INSTRUCTIONS: dict[str, Callable[..., list[Array]]] = {
    "fence.proxy.alias": lambda observer, value: [value],  # check/barriers.py looks for it
    "multimem.st.relaxed.sys.global.v4.f32": _multimem_store,
    f"{_SUM}.v4.f32": partial(_multimem_sum, torch.float32),
    f"{_SUM}.acc::f32.v4.f16x2": partial(_multimem_sum, torch.float16),
    f"{_SUM}.acc::f32.v4.bf16x2": partial(_multimem_sum, torch.bfloat16),
}


def call(name: str, values: Sequence[Array], observer: Observer) -> int:
    """Execute a library function.

    Args:
        name: the function's name in the kernel.
        values: its arguments, a number each.
        observer: this thread's observer.

    Returns:
        its result; 0 for none.

    Raises:
        NotImplementedError: it is none of FUNCTIONS.
    """
    if name not in FUNCTIONS:
        raise NotImplementedError(
            f"the interpreter knows no function {name} of a library; only {', '.join(FUNCTIONS)}"
        )
    return FUNCTIONS[name](observer, *(int(value.item()) for value in values))


SIGNAL_SET, GREATER_OR_EQUAL = 9, 5


def _put(observer: Observer, to: int, source: int, nbytes: int, peer: int) -> int:
    observer.put(to, source, nbytes, 0, 0, peer)
    return 0


def _put_signal(
    observer: Observer,
    to: int,
    source: int,
    nbytes: int,
    signal: int,
    value: int,
    operation: int,
    peer: int,
) -> int:
    if operation != SIGNAL_SET:
        raise NotImplementedError(f"signal operation is {operation}; it must be {SIGNAL_SET}, set")
    observer.put(to, source, nbytes, signal, value, peer)
    return 0


def _quiet(observer: Observer) -> int:
    observer.quiet()
    return 0


def _signal_fetch(observer: Observer, signal: int) -> int:
    observer.access("atomic", np.array([signal], np.uint64), 8)
    value = ctypes.c_uint64.from_address(signal).value
    observer.fetched(signal, value)
    return value


def _signal_wait_until(observer: Observer, signal: int, compare: int, wanted: int) -> int:
    if compare != GREATER_OR_EQUAL:
        raise NotImplementedError(f"comparison is {compare}; it must be {GREATER_OR_EQUAL}, >=")
    while (value := ctypes.c_uint64.from_address(signal).value) < wanted:
        _signal_fetch(observer, signal)
    observer.waited(signal, value)
    return value


FUNCTIONS: dict[str, Callable[..., int]] = {
    "nvshmemx_putmem_block": _put,
    "nvshmemx_putmem_signal_nbi_block": _put_signal,
    "nvshmem_quiet": _quiet,
    "nvshmem_signal_fetch": _signal_fetch,
    "nvshmem_signal_wait_until": _signal_wait_until,
}


class HostOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports this thread's torch operators on watched memory to the observer.

    Operands are loaded as a whole, unless they are overwritten. An operator's changed tensors are
    stored. Views, and templates for shape and dtype, are neither.

    Args:
        observer: this thread's observer.
    """

    def __init__(self, observer: Observer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observer = observer

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing torch.compile, which takes seconds, for the first operator."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = self._call(func, args, kwargs)
        made = func.is_view or "empty" in func._schema.name  # without a launch
        # Entries draw plans on the host, from a generator that moves on.
        if not made and torch.Tag.nondeterministic_seeded not in func.tags:
            note(lambda: self._repeat(func, args, kwargs, out))
        return out

    def _repeat(self, func: Any, args: tuple[Any, ...], kwargs: Any, out: Any) -> None:
        """Repeat an operator. Its results go to the memory of the earlier ones."""
        for old, new in zip(_tensors(out), _tensors(func(*args, **kwargs)), strict=True):
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        loaded, stored = self._operands(func, args, kwargs)
        if not loaded and not stored:
            return func(*args, **kwargs)
        self._observer.launched({})
        self._observer.program((0, 0, 0))
        for tensor in loaded:
            self._observer.access("load", _element_addresses(tensor), tensor.itemsize)
        for tensor in stored:
            self._observer.access("store", _element_addresses(tensor), tensor.itemsize)
        out = func(*args, **kwargs)
        self._observer.finished()
        return out

    def _operands(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return an operator's watched tensors: those it loads, and those it stores."""
        name = func._schema.name.removeprefix("aten::")
        if func.is_view or torch.Tag.inplace_view in func.tags or name in TEMPLATES:
            return [], []
        if name == "copy_" and args[0].data_ptr() == args[1].data_ptr():
            return [], []  # Triton's interpreter returning a kernel's arguments
        loaded, stored = [], []
        for number, argument in enumerate(func._schema.arguments):
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            changes = argument.alias_info is not None and argument.alias_info.is_write
            overwrites = argument.is_out or (changes and name in OVERWRITES)
            for tensor in _tensors(value):
                if self._observer.watches(tensor.untyped_storage().data_ptr()):
                    loaded += [] if overwrites else [tensor]
                    stored += [tensor] if changes else []
        return loaded, stored


OVERWRITES = ("copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_")
"""Operators that overwrite tensors without loading them."""

TEMPLATES = (
    *(f"new_{prefix}" for prefix in ("empty", "empty_strided", "zeros", "ones", "full")),
    *(f"{prefix}_like" for prefix in ("empty", "zeros", "ones", "full", "rand", "randn")),
)
"""Operators with a tensor argument only for its shape, dtype and device."""


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield an argument's tensors: one, a list of them, or none."""
    for item in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(item, torch.Tensor):
            yield item


def _element_addresses(tensor: torch.Tensor) -> Array:
    """Return the addresses of a tensor's elements, uint64 [numel], for any strides."""
    addresses = np.array(tensor.data_ptr(), np.uint64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        steps = np.arange(size, dtype=np.uint64) * np.uint64(stride * tensor.itemsize)
        addresses = addresses[..., None] + steps
    return addresses.ravel()
