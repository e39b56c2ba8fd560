"""Signals and puts to ranks beyond NVLink: NVSHMEM's device functions in stock Triton.

NVIDIA ships these functions as bitcode (symmetric/nvshmem.py finds it). To call them, launch a
kernel with

    kernel[grid](..., extern_libs=link_options())

NVSHMEM must know the kernel's module before it runs (`register_modules`). All addresses, sources
included, are this rank's own addresses of symmetric memory; NVSHMEM translates them to the other
rank's. Signals are uint64 here, as NVSHMEM requires, and count calls like all signals
(signals.py).

The order is that of OpenSHMEM 1.5 (sections 9.8 on put-with-signal, 9.10 on waiting, 9.11 on
quiet), and no more:

- The data of a `put_signal` arrives before its signal, for a rank after its `wait`.
- Puts do not order each other, not even from one program to one rank.
- A source may be overwritten only after a `quiet` of this rank, after the put. An answer from the
  other rank is not enough.

All threads of a program call each function together. Triton passes pointers and sizes as int64.
Void functions are declared with an unused int32 result; LLVM's linker reconciles both with the
bitcode.

LLVM reads bitcode of its own version and of older ones. Triton 3.6 links NVSHMEM 3.4's bitcode but
cannot parse NVSHMEM 3.8's; Triton 3.9 links 3.8.

In the interpreter, check/network.py implements these functions: puts arrive late and in any
order.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import triton
import triton.language as tl
from triton.language import core

from weft.kernels.gpu.runtime import signals
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
    return _call("nvshmemx_putmem_signal_nbi_block", arguments, types, _I32, _semantic)


@core.extern
def _quiet(_semantic=None):
    return _call("nvshmem_quiet", [], (), _I32, _semantic)


@core.extern
def _signal_fetch(signal, _semantic=None):
    return _call("nvshmem_signal_fetch", [signal], (_I64,), _I64, _semantic)


@core.extern
def _signal_wait_until(signal, compare, value, _semantic=None):
    types = (_I64, _I32, _I64)
    return _call("nvshmem_signal_wait_until", [signal, compare, value], types, _I64, _semantic)


@triton.jit
def put(to, source, nbytes, rank):
    """Copy this rank's memory to another rank. The source may be overwritten when this returns.

    Like OpenSHMEM's putmem by a block of threads. The barrier orders all threads' stores to the
    source before the copy. The other rank is not notified: see put_signal.

    Args:
        to, source: int64, symmetric addresses as this rank sees its own memory.
        nbytes: int64.
        rank: int32, the rank to write to.
    """
    tl.debug_barrier()
    _put(to, source, nbytes, rank)


@triton.jit
def put_signal(to, source, nbytes, signal, value, rank):
    """Start such a copy, and set a signal of the other rank after the data has arrived.

    Like OpenSHMEM's putmem_signal_nbi by a block of threads, with SIGNAL_SET: a rank that waits for
    the value sees the data. The program continues. The source must not change until a `quiet`.

    Args:
        to, source, nbytes, rank: as for put.
        signal: int64, the symmetric address of a uint64 as this rank sees its own memory.
        value: int64, larger than all values before.
    """
    tl.debug_barrier()
    _put_signal(to, source, nbytes, signal, value, SIGNAL_SET, rank)


@triton.jit
def quiet():
    """Wait until all puts of this rank have arrived. Grid: (1,).

    Like OpenSHMEM's quiet. Launch it as a kernel of its own, before kernels that overwrite the
    sources of earlier calls. Inside another kernel it would also wait for this call's puts.
    """
    _quiet()
    tl.debug_barrier()


@triton.jit
def wait(signal, value, peers, rank, index):
    """Wait until one of this rank's own signals reaches a value, or the polls run out.

    Like OpenSHMEM's signal_wait_until with CMP_GE, which would wait forever. It is called only when
    the value is there, to make the data before it visible.

    Args:
        signal: int64, address of a uint64.
        value: int64, the value to wait for.
        peers: Peers.
        rank: this rank.
        index: the signal's number, for the message.
    """
    seen = _signal_fetch(signal)
    if seen < value:
        left = signals.polls_left(peers)
        while (seen < value) & (left > 0):
            seen = _signal_fetch(signal)
            left -= 1
        if seen < value:
            signals.report(peers, rank, index, tl.cast(value, tl.int32), tl.cast(seen, tl.int32))
    if seen >= value:
        _signal_wait_until(signal, GREATER_OR_EQUAL, value)
    tl.debug_barrier()


@triton.jit
def wait_across(
    addresses,  # int64 [W]; where the sender stores, 0 for ranks beyond NVLink
    sender,
    peers,
    index,  # the signal set by a rank with an address
    across,  # int64 [W]; addresses of int64 signals, set by ranks without an address
    across_index,
    rank,
    call,
    FAR: tl.constexpr,  # there are ranks without an address
):
    """Wait for a rank of another node, which sends by address or, without one, by a put."""
    address = tl.load(addresses + sender)
    if FAR:
        signal = tl.load(across + rank) + 8 * across_index
        if address == 0:
            wait(signal, call.to(tl.int64), peers, rank, index)
    if address != 0:
        signals.wait(peers, rank, index, call)


def link_options() -> dict[str, str] | None:
    """Return the launch option `extern_libs` that links the bitcode for the present GPU.

    Raises:
        SymmetricMemoryError: NVSHMEM is not installed, or has no bitcode for this GPU.
    """
    if triton.knobs.runtime.interpret:
        return None
    from triton.runtime.driver import driver

    return extern_libs(*divmod(driver.active.get_current_target().arch, 10))


def extern_libs(major: int, minor: int) -> dict[str, str]:
    """Return the launch option that links the bitcode for a GPU of this compute capability.

    Raises:
        SymmetricMemoryError: NVSHMEM is not installed, or has no bitcode for it.
    """
    return {"libnvshmem_device": str(bitcode(major, minor))}


STATE = b"nvshmemi_device_state_d"
"""A global variable of every module that the bitcode is linked into."""


@cache
def register_modules() -> None:
    """Register with NVSHMEM every module that contains its code, when Triton loads it.

    Call it after NvshmemHome has initialised the library. Further calls in a process do nothing.
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
