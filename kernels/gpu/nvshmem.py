"""Signals and puts to ranks beyond NVLink: NVSHMEM's device functions in stock Triton.

The bitcode that NVIDIA ships (symmetric/nvshmem.py finds it) is linked into the
kernel, which is launched with

    kernel[grid](..., extern_libs=extern_libs(major, minor))

and whose module NVSHMEM must know before it runs (`register_modules`, once a
process). Addresses are this rank's own, of symmetric memory: NVSHMEM adds where
the other rank's is. Signals are uint64 here, which is what NVSHMEM has, and
count calls as all signals do (signals.py).

Each function is called by all threads of a program together. Triton passes
pointers and sizes to them as int64, and void functions are declared to return
an int32 that nobody reads: LLVM's linker reconciles both with the bitcode.

LLVM reads bitcode of its own version and older ones: Triton 3.6 links that of
NVSHMEM 3.4 and fails to parse that of 3.8, which Triton 3.9 links.

Not handled: Triton's interpreter, which has no extern functions. Kernels take
these paths only between nodes.
"""

from __future__ import annotations

import ctypes
from typing import Any

import triton
import triton.language as tl
from triton.language import core

from weft.kernels.symmetric.nvshmem import bitcode

SIGNAL_SET = tl.constexpr(9)  # NVSHMEM_SIGNAL_SET (nvshmemx_signal_op_t)
GREATER_OR_EQUAL = tl.constexpr(5)  # NVSHMEM_CMP_GE (nvshmemx_cmp_type_t)

_I32, _I64 = core.dtype("int32"), core.dtype("int64")


def _call(
    name: str, arguments: list[Any], types: tuple[Any, ...], result: Any, _semantic: Any
) -> Any:
    functions = {types: (name, result)}
    return core.extern_elementwise("", "", arguments, functions, is_pure=False, _semantic=_semantic)


@core.extern
def _put(to, source, nbytes, rank, _semantic=None):
    name = "nvshmemx_putmem_block"
    return _call(name, [to, source, nbytes, rank], (_I64, _I64, _I64, _I32), _I32, _semantic)


@core.extern
def _put_signal(to, source, nbytes, signal, value, operation, rank, _semantic=None):
    arguments = [to, source, nbytes, signal, value, operation, rank]
    types = (_I64, _I64, _I64, _I64, _I64, _I32, _I32)
    return _call("nvshmemx_putmem_signal_block", arguments, types, _I32, _semantic)


@core.extern
def _signal_fetch(signal, _semantic=None):
    return _call("nvshmem_signal_fetch", [signal], (_I64,), _I64, _semantic)


@core.extern
def _signal_wait_until(signal, compare, value, _semantic=None):
    types = (_I64, _I32, _I64)
    return _call("nvshmem_signal_wait_until", [signal, compare, value], types, _I64, _semantic)


@triton.jit
def put(to, source, nbytes, rank):
    """Copy this rank's memory to another rank's; the source may be written again on return.

    As OpenSHMEM's putmem by a block of threads. The barrier makes what all threads have stored to
    the source come before the copy. The other rank is not told: see put_signal.

    Args:
        to, source: int64, symmetric addresses as this rank sees its own.
        nbytes: int64.
        rank: int32, whose memory is written.
    """
    tl.debug_barrier()
    _put(to, source, nbytes, rank)


@triton.jit
def put_signal(to, source, nbytes, signal, value, rank):
    """The same, and set a signal of the other rank after the data has come.

    As OpenSHMEM's putmem_signal with SIGNAL_SET: whoever waits for the value sees the data.

    Args:
        signal: int64, the symmetric address of a uint64, as this rank sees its own.
        value: int64, larger than all before.
    """
    tl.debug_barrier()
    _put_signal(to, source, nbytes, signal, value, SIGNAL_SET, rank)


@triton.jit
def wait(signal, value, rank, index, fault, MAX_POLLS: tl.constexpr):
    """Wait until one of this rank's own signals has reached a value, a bounded number of polls.

    As OpenSHMEM's signal_wait_until with CMP_GE, which itself would wait for ever: it is called
    once the value is there, and makes the data before it visible.

    Args:
        signal: int64, address of a uint64.
        value: int64, to wait for.
        rank: this one.
        index: the signal's, for the message.
        fault: int32 [4], of this rank; (rank, index, wanted, seen) if the polls run out.
        MAX_POLLS: to give up after.
    """
    seen = _signal_fetch(signal)
    polls = 0
    while (seen < value) & (polls < MAX_POLLS):
        seen = _signal_fetch(signal)
        polls += 1
    if seen < value:
        tl.store(fault, rank)
        tl.store(fault + 1, index)
        tl.store(fault + 2, tl.cast(value, tl.int32))
        tl.store(fault + 3, seen.to(tl.int32))
    else:
        _signal_wait_until(signal, GREATER_OR_EQUAL, value)
    tl.debug_barrier()


def extern_libs(major: int, minor: int) -> dict[str, str]:
    """The launch option that links the bitcode for a GPU of this compute capability.

    Raises:
        SymmetricMemoryError: NVSHMEM is not installed, or has none for it.
    """
    return {"libnvshmem_device": str(bitcode(major, minor))}


STATE = b"nvshmemi_device_state_d"
"""A global of every module that the bitcode was linked into."""


def register_modules() -> None:
    """Make Triton tell NVSHMEM of every module with NVSHMEM in it, when it is loaded.

    Once a process, after NvshmemHome has initialised the library.
    """
    from nvshmem import bindings
    from triton import knobs

    driver = ctypes.CDLL("libcuda.so.1")

    def loaded(module: int, function: int, name: str, group: object, kernel_hash: str) -> None:
        address, size = ctypes.c_void_p(), ctypes.c_size_t()
        missing = driver.cuModuleGetGlobal_v2(
            ctypes.byref(address), ctypes.byref(size), ctypes.c_void_p(module), STATE
        )
        if missing:
            return  # a kernel without NVSHMEM in it
        status = bindings.cumodule_init(module)
        if status:
            raise RuntimeError(f"NVSHMEM refuses the module of kernel {name}: status {status}")

    knobs.runtime.kernel_load_end_hook.add(loaded)
