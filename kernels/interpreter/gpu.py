"""Triton's interpreter, extended to several ranks in one process.

Stock Triton runs kernels on NumPy with TRITON_INTERPRET=1. Overlapped kernels need more, so
`installed` replaces its builder. The new builder

- computes fused multiply-adds with one rounding;
- computes bfloat16, which Triton 3.6 to 3.9 store as uint16 and add as such, and rounds to fp8 as
  GPUs do;
- sums int32 in 32 bits, where Triton switches to 64 and writes 64 bits to an int32;
- keeps the running program's index per thread, so that ranks can be threads;
- reports every load, store and atomic to an Observer, with the addresses, before it happens
  (atomics also afterwards). There, ranks take turns (ranks.py) and races are detected (races.py).

Triton's files stay unchanged, and the original builder returns at the end. The interpreter runs a
launch's programs in sequence and ignores warps. A check may choose the programs' order, but a
missing barrier inside a program cannot show; aot.py looks for that in the assembly.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from triton.language import core as core  # seen by _probe
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.kernels.gpu.runtime import nvshmem
from weft.kernels.interpreter import extern
from weft.kernels.interpreter.recording import note, unrecorded

Array = npt.NDArray[Any]
Program = tuple[int, int, int]
Kind = Literal["load", "store", "atomic"]
Handle: TypeAlias = interpreter.TensorHandle


@dataclass(frozen=True, slots=True)
class Atomic:
    """A completed atomic operation.

    Attributes:
        address, itemsize: its target.
        sem: relaxed, acquire, release or acquire_release.
        scope: cta, gpu or system.
        was, now: the value before and after.
        sets: whether it exchanges the value instead of adding to it.
    """

    address: int
    itemsize: int
    sem: str
    scope: str
    was: float
    now: float
    sets: bool

    @property
    def changed(self) -> bool:
        """True if it changed the value."""
        return self.was != self.now


class Observer(Protocol):
    """Receives every memory operation in its thread."""

    def launched(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """A kernel is about to run all its programs, on these tensors by their names."""

    def finished(self) -> None:
        """All the kernel's programs have run."""

    def program(self, index: Program) -> None:
        """The next operations belong to this program."""

    def access(self, kind: Kind, addresses: Array, itemsize: int) -> None:
        """Memory is about to be loaded or stored: uint64 addresses [n]."""

    def atomics(self, atomics: Sequence[Atomic]) -> None:
        """An operation's atomics were completed."""

    def words(self, kind: Kind, addresses: Array, itemsize: int) -> None:
        """Words with their own signal were loaded, or are about to be stored."""

    def arrive_first(self, count: int) -> Array:
        """Choose the first among `count` unordered stores: bool [count]."""

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


_state = threading.local()


Order = Callable[[int], Sequence[int]]
"""Chooses the order of a launch's programs, given their number."""


def observe(observer: Observer | None, order: Order | None = None) -> None:
    """Report this thread's operations to `observer` from now on.

    Args:
        observer: the observer.
        order: of the programs in launches whose programs never wait for each other. Otherwise, and
            if None, they run by number.
    """
    _state.observer, _state.order = observer, order


_NOT_KERNELS = (
    "<frozen",
    os.path.dirname(__file__) + os.sep,
    os.path.join(os.path.dirname(os.path.dirname(__file__)), "check") + os.sep,
    *(os.path.dirname(str(module.__file__)) + os.sep for module in (np, torch, triton)),
)


def where() -> str:
    """Return file and line of this thread's running kernel code."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_KERNELS):
        frame = frame.f_back  # type: ignore[assignment]
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def to_float32(bits: Array) -> Array:
    """Convert bfloat16 as uint16 to float32."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(numbers: Array) -> Array:
    """Convert float32 to bfloat16 as uint16, rounded to nearest, ties to even."""
    numbers = np.ascontiguousarray(numbers, dtype=np.float32)
    bits = numbers.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), rounded)


def to_float8(numbers: Array) -> Array:
    """Convert floats to float8e4nv as uint8, as GPUs do: to nearest, ties to even, at most 448.

    Triton's interpreter rounds ties up, and loses the carry into the exponent.
    """
    bounded = torch.from_numpy(np.clip(np.asarray(numbers, np.float32), -448.0, 448.0))
    return bounded.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def fused_multiply_add(x: Array, y: Array, z: Array) -> Array:
    """Compute x * y + z of float32 with one rounding; Triton 3.6 rounds twice.

    float64 holds the product exactly. Where it rounds the sum, the last bit is set to odd, so that
    the second rounding is right (Boldo and Melquiond 2008).
    """
    product, addend = x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)  # Knuth's exact sum
    even = (np.atleast_1d(total).view(np.int64).reshape(total.shape) & 1) == 0
    toward = np.where(error > 0, np.inf, -np.inf)
    inexact = (error != 0) & np.isfinite(error)
    odd = np.where(inexact & even, np.nextafter(total, toward), total)
    return odd.astype(np.float32)


def _is_bfloat16(handle: Handle) -> bool:
    return bool(handle.dtype.scalar == tl.bfloat16 and handle.data.dtype == np.uint16)


def _widened(handle: Handle) -> Handle:
    return Handle(to_float32(handle.data), tl.float32) if _is_bfloat16(handle) else handle


class RankBuilder(interpreter.InterpreterBuilder):  # type: ignore[misc]
    """The builder that `installed` uses; see the module's text."""

    def __init__(self) -> None:
        super().__init__()
        # By default, Triton checks each operator for overflow. That takes half of the time, and it
        # reports overflows only with `debug`.
        self.options: Any = interpreter.InterpreterOptions(sanitize_overflow=False)

    # The grid, separate for each thread.
    @property
    def grid_idx(self) -> Program:
        return _state.grid_idx  # type: ignore[no-any-return]

    @grid_idx.setter
    def grid_idx(self, index: Program) -> None:
        if (places := getattr(_state, "places", None)) is not None:
            place = places[int(np.ravel_multi_index(index, self.grid_dim))]
            x, y, z = np.unravel_index(place, self.grid_dim)
            index = int(x), int(y), int(z)
        _state.grid_idx = index
        if observer := _observer():
            observer.program(index)

    @property
    def grid_dim(self) -> Program:
        return _state.grid_dim  # type: ignore[no-any-return]

    @grid_dim.setter
    def grid_dim(self, size: Program) -> None:
        _state.grid_dim = size
        if (order := getattr(_state, "order_now", None)) is not None:
            _state.places = order(math.prod(size))

    # Memory.
    def get_cache_policy(self, cache_modifier: Any, eviction_policy: Any) -> Any:
        return cache_modifier

    def create_masked_load(self, ptrs: Handle, mask: Handle, *rest: Any, **named: Any) -> Handle:
        if (
            named["is_volatile"] if "is_volatile" in named else rest[-1]
        ):  # gpu/runtime/low_latency.py
            _notify("atomic", ptrs, mask)
            loaded = super().create_masked_load(ptrs, mask, *rest, **named)
            _notify_words("load", ptrs, mask)
            return loaded
        _notify("load", ptrs, mask)
        return super().create_masked_load(ptrs, mask, *rest, **named)

    def create_masked_store(
        self, ptrs: Handle, value: Handle, mask: Handle, *rest: Any, **named: Any
    ) -> Any:
        if "wt" in str(rest).lower():  # write through: gpu/runtime/low_latency.py
            for part in _arrivals(mask):
                _notify("atomic", ptrs, part)
                _notify_words("store", ptrs, part)
                super().create_masked_store(ptrs, value, part, *rest, **named)
            return None
        _notify("store", ptrs, mask)
        return super().create_masked_store(ptrs, value, mask, *rest, **named)

    def create_atomic_cas(self, ptr: Handle, cmp: Handle, val: Handle, sem: Any, scope: Any) -> Any:
        _notify("atomic", ptr, None)
        old = super().create_atomic_cas(ptr, cmp, val, sem, scope)
        new = np.where(old.data == cmp.data, val.data, old.data)
        _notify_atomic(ptr, old, new, None, sem, scope, sets=True)
        return old

    def create_atomic_rmw(
        self, op: Any, ptr: Handle, val: Handle, mask: Handle, sem: Any, scope: Any
    ) -> Handle:
        sets = op.name == "XCHG"
        # Several signals at once arrive in any order: gpu/runtime/signals.py's notify_all.
        parts = _arrivals(mask) if sets and ptr.data.size > 1 else [mask]
        old = None
        for part in parts:
            _notify("atomic", ptr, part)
            was = super().create_atomic_rmw(op, ptr, val, part, sem, scope)
            old = was if old is None else Handle(np.where(part.data, was.data, old.data), was.dtype)
            new = _UPDATES[op.name](old.data, val.data)
            if _observer() is None and np.array_equal(old.data, new):
                os.sched_yield()  # a poll: the awaited rank may need this processor
            _notify_atomic(ptr, old, new, part, sem, scope, sets=sets)
        return old

    def create_inline_asm(self, assembly: str, _: str, values: list[Handle], *rest: Any) -> Any:
        observer = _observer()
        assert observer is not None
        return _Results(extern.run(assembly, [value.data for value in values], observer))

    def create_extern_elementwise(
        self, library: str, path: str, name: str, values: list[Handle], result: Any, pure: bool
    ) -> Handle:
        observer = _observer()
        assert observer is not None
        out = extern.call(name, [value.data for value in values], observer)
        return Handle(np.array([out], np.int64 if result == tl.int64 else np.int32), result)

    # bfloat16.
    def binary_op(self, lhs: Handle, rhs: Handle, op: Callable[..., Array]) -> Handle:
        if not _is_bfloat16(lhs) or op in (np.bitwise_and, np.bitwise_or, np.bitwise_xor):
            return super().binary_op(lhs, rhs, op)
        out = op(_widened(lhs).data, _widened(rhs).data)
        return Handle(out, tl.int1) if out.dtype == np.bool_ else _bfloat16(out)

    def unary_op(self, arg: Handle, op: Callable[..., Array]) -> Handle:
        if not _is_bfloat16(arg):
            return super().unary_op(arg, op)
        return _bfloat16(op(_widened(arg).data))

    def cast_impl(self, src: Handle, dst_type: Any) -> Handle:
        to_bf16 = dst_type.scalar == tl.bfloat16
        if _is_bfloat16(src) and to_bf16:
            return src
        wide = _widened(src)
        if to_bf16:
            return _bfloat16(wide.data.astype(np.float32))
        return (
            wide
            if dst_type.scalar == tl.float32 and wide is not src
            else super().cast_impl(wide, dst_type)
        )

    def create_fp_to_fp(self, src: Handle, dst_type: Any, rounding_mode: Any) -> Handle:
        if dst_type.scalar == tl.float8e4nv:
            return Handle(to_float8(_widened(src).data), tl.float8e4nv)
        if _is_bfloat16(src) or (dst_type.scalar == tl.bfloat16 and src.dtype == tl.float32):
            return self.cast_impl(src, dst_type)
        return super().create_fp_to_fp(src, dst_type, rounding_mode)

    def create_fma(self, x: Handle, y: Handle, z: Handle) -> Handle:
        if x.data.dtype != np.float32:
            return super().create_fma(x, y, z)
        return Handle(fused_multiply_add(x.data, y.data, z.data), tl.float32)

    def create_dot(self, a: Handle, b: Handle, d: Handle, *rest: Any) -> Handle:
        return super().create_dot(_widened(a), _widened(b), d, *rest)


_UPDATES: dict[str, Callable[[Array, Array], Array]] = {
    "XCHG": lambda _, new: new,
    "ADD": np.add,
    "FADD": np.add,
    "AND": np.bitwise_and,
    "OR": np.bitwise_or,
    "XOR": np.bitwise_xor,
    "MAX": np.maximum,
    "MIN": np.minimum,
    "UMAX": np.maximum,
    "UMIN": np.minimum,
}
"""Results of atomics, by Triton's names."""


def _bfloat16(numbers: Array) -> Handle:
    return Handle(to_bfloat16(numbers), tl.bfloat16)


def _observer() -> Observer | None:
    return getattr(_state, "observer", None)


def _notify(kind: Kind, ptrs: Handle, mask: Handle | None) -> None:
    if observer := _observer():
        addresses = np.atleast_1d(ptrs.data)
        if mask is not None:
            addresses = addresses[np.broadcast_to(mask.data, addresses.shape)]
        bits = ptrs.get_element_ty().primitive_bitwidth
        observer.access(kind, addresses.ravel(), max(1, bits // 8))


def _notify_words(kind: Kind, ptrs: Handle, mask: Handle) -> None:
    if observer := _observer():
        bits = ptrs.get_element_ty().primitive_bitwidth
        observer.words(kind, ptrs.data[mask.data].ravel(), bits // 8)


def _arrivals(mask: Handle) -> list[Handle]:
    """Split a store's elements into two parts that arrive separately.

    Rows of 16 words are lines of 128 bytes, which arrive as a whole.
    """
    observer = _observer()
    if observer is None:
        return [mask]
    lines = mask.data if mask.data.shape[1:] == (16,) else mask.data.reshape(-1, 1)
    first = observer.arrive_first(len(lines))[:, None]
    return [Handle((lines & part).reshape(mask.data.shape), tl.int1) for part in (first, ~first)]


def _notify_atomic(
    ptr: Handle, old: Handle, new: Array, mask: Handle | None, sem: Any, scope: Any, *, sets: bool
) -> None:
    if observer := _observer():
        active = np.ones(ptr.data.shape, bool) if mask is None else mask.data
        bits = ptr.get_element_ty().primitive_bitwidth
        how = (sem.name.lower(), scope.name.lower())
        values = zip(
            ptr.data[active].ravel(),
            old.data[active].ravel(),
            np.broadcast_to(new, old.data.shape)[active].ravel(),
            strict=True,
        )
        observer.atomics(
            [
                Atomic(int(address), bits // 8, *how, was.item(), now.item(), sets=sets)
                for address, was, now in values
            ]
        )


class _Results:
    """Outputs of inline assembly, in the builder's format."""

    def __init__(self, outputs: list[Array]) -> None:
        self._outputs = outputs

    def get_result(self, index: int) -> Handle:
        return Handle(self._outputs[index], tl.int32)


def _sum(operation: Any, x: Any) -> Any:
    """Sum in the operand's dtype, as on a GPU; NumPy widens integers."""
    data = x.handle.data
    total = np.sum(data, axis=operation.axis, keepdims=operation.keep_dims, dtype=data.dtype)
    return operation.to_tensor(total, x.dtype)


def _cumsum(operation: Any, x: Any) -> Any:
    data = x.handle.data
    return [operation.to_tensor(np.cumsum(data, axis=operation.axis, dtype=data.dtype), x.dtype)]


_original_call = interpreter.GridExecutor.__call__


def _call(executor: Any, *args: Any, **kwargs: Any) -> None:
    note(lambda: _call(executor, *args, **kwargs))
    observer = _observer()
    if observer is not None:
        given = {**dict(zip(executor.arg_names, args, strict=False)), **kwargs}
        kernel = executor.fn.__name__
        tensors = (_tensors(f"{kernel}.{name}", value) for name, value in given.items())
        observer.launched(dict(chain.from_iterable(tensors)))
    order = getattr(_state, "order", None)
    _state.order_now = None if order is None or may_wait(executor.fn) else order
    try:
        with np.errstate(all="ignore"), unrecorded():  # numbers may overflow, as on a GPU
            _original_call(executor, *args, **kwargs)
    finally:
        _state.order_now = _state.places = None
    if observer is not None:
        observer.finished()


def _tensors(name: str, argument: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a kernel's tensors in an argument: itself, a group's fields, or a descriptor's."""
    if isinstance(argument, torch.Tensor):
        yield name, argument
    elif isinstance(argument, TensorDescriptor):
        yield name, argument.base
    elif isinstance(argument, tuple):
        fields = getattr(argument, "_fields", range(len(argument)))
        for field, value in zip(fields, argument, strict=True):
            yield from _tensors(f"{name}.{field}", value)


def may_wait(function: Any) -> bool:
    """Return whether a kernel may wait for another program: whether it calls a function that
    waits for signals, or for words with their own.
    """
    names = function.__code__.co_names
    if any(name.startswith(("wait", "get_ll")) for name in names):
        return True
    called = (function.__globals__.get(name) for name in names)
    return any(may_wait(c.fn) for c in called if isinstance(c, interpreter.InterpretedFunction))


_stock_np_dtype = interpreter._get_np_dtype
_np_dtypes: dict[str, np.dtype[Any]] = {}


def _np_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the same as Triton's own function, which builds a table of all types in each call."""
    name = dtype.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _stock_np_dtype(dtype)
    return _np_dtypes[name]


@contextmanager
def installed() -> Iterator[None]:
    """Run kernels imported with TRITON_INTERPRET=1 on a RankBuilder, within the context."""
    module: Any = interpreter
    before = (module.interpreter_builder, module.interpreter_semantic, module._patch_lang)
    sums = (module.ReduceOps.sum, module.ScanOps.cumsum)
    module.interpreter_builder = RankBuilder()
    module.interpreter_semantic = TritonSemantic(module.interpreter_builder)
    module._get_np_dtype = _np_dtype
    # Patch once for all threads; otherwise each launch would patch the language and undo it at its
    # end.
    scope = before[2](_probe)
    module._patch_builtin(nvshmem, module.interpreter_builder, scope)
    module._patch_lang = lambda fn: module._LangPatchScope()
    module.GridExecutor.__call__ = _call
    module.ReduceOps.sum, module.ScanOps.cumsum = _sum, _cumsum
    try:
        yield
    finally:
        module.GridExecutor.__call__ = _original_call
        module.ReduceOps.sum, module.ScanOps.cumsum = sums
        module.interpreter_builder, module.interpreter_semantic, module._patch_lang = before
        module._get_np_dtype = _stock_np_dtype
        scope.restore()


_core = tl.core  # Triton's own jitted functions use it: tl.zeros


def _probe() -> None:
    """A function with `tl` and `core` in its globals, where Triton looks for them."""
