"""Signals and puts to ranks beyond NVLink: NVSHMEM's device functions in stock Triton.

The bitcode that NVIDIA ships (symmetric/nvshmem.py finds it) is linked into the
kernel, which is launched with

    kernel[grid](..., extern_libs=link_options())

and whose module NVSHMEM must know before it runs (`register_modules`). Addresses
are this rank's own, of symmetric memory, sources too: NVSHMEM adds where the
other rank's is. Signals are uint64 here, which is what NVSHMEM has, and count
calls as all signals do (signals.py).

What is ordered is what OpenSHMEM 1.5 says (sections 9.8 on put-with-signal, 9.10
on waiting, 9.11 on quiet), and no more:

- the data of a `put_signal` is there before its signal is, for a rank that has
  waited for it with `wait`;
- puts do not order each other, not even from one program to one rank;
- its source may be stored to again after a `quiet` of this rank that comes after
  the put, and not because the other rank has answered.

Each function is called by all threads of a program together. Triton passes
pointers and sizes to them as int64, and void functions are declared to return
an int32 that nobody reads: LLVM's linker reconciles both with the bitcode.

LLVM reads bitcode of its own version and older ones: Triton 3.6 links that of
NVSHMEM 3.4 and fails to parse that of 3.8, which Triton 3.9 links.

In the interpreter these functions are what check/network.py makes of them: puts
that come late, in any order.
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
    """Begin the same, and set a signal of the other rank after the data has come.

    As OpenSHMEM's putmem_signal_nbi by a block of threads, with SIGNAL_SET: whoever waits for the
    value sees the data. The program goes on; the source must stay as it is until a `quiet`.

    Args:
        to, source, nbytes, rank: as of put.
        signal: int64, the symmetric address of a uint64, as this rank sees its own.
        value: int64, larger than all before.
    """
    tl.debug_barrier()
    _put_signal(to, source, nbytes, signal, value, SIGNAL_SET, rank)


@triton.jit
def quiet():
    """Wait until all that this rank has put is where it goes. Grid: (1,).

    As OpenSHMEM's quiet. A kernel of its own, launched before those that store to the sources of
    earlier calls again: inside another one it would wait for the puts of this call, too.
    """
    _quiet()
    tl.debug_barrier()


@triton.jit
def wait(signal, value, peers, rank, index):
    """Wait until one of this rank's own signals has reached a value, a bounded number of polls.

    As OpenSHMEM's signal_wait_until with CMP_GE, which itself would wait for ever: it is called
    once the value is there, and makes the data before it visible.

    Args:
        signal: int64, address of a uint64.
        value: int64, to wait for.
        peers: of this rank.
        rank: this one.
        index: the signal's, for the message.
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
    addresses,  # int64 [W]; of what the sender stores to, 0 for ranks that NVLink does not reach
    sender,
    peers,
    index,  # of the signal that a rank with an address sets
    across,  # int64 [W]; addresses of int64 signals, set by ranks without one
    across_index,
    rank,
    call,
    FAR: tl.constexpr,  # there are ranks without an address
):
    """Wait for a rank of another node, which sends by its address or, without one, by a put."""
    address = tl.load(addresses + sender)
    if FAR:
        signal = tl.load(across + rank) + 8 * across_index
        if address == 0:
            wait(signal, call.to(tl.int64), peers, rank, index)
    if address != 0:
        signals.wait(peers, rank, index, call)


def link_options() -> dict[str, str] | None:
    """The launch option `extern_libs` that links the bitcode for the GPU at hand.

    Raises:
        SymmetricMemoryError: NVSHMEM is not installed, or has no bitcode for it.
    """
    if triton.knobs.runtime.interpret:
        return None
    from triton.runtime.driver import driver

    return extern_libs(*divmod(driver.active.get_current_target().arch, 10))


def extern_libs(major: int, minor: int) -> dict[str, str]:
    """The launch option that links the bitcode for a GPU of this compute capability.

    Raises:
        SymmetricMemoryError: NVSHMEM is not installed, or has none for it.
    """
    return {"libnvshmem_device": str(bitcode(major, minor))}


STATE = b"nvshmemi_device_state_d"
"""A global of every module that the bitcode was linked into."""


@cache
def register_modules() -> None:
    """Make Triton tell NVSHMEM of every module with NVSHMEM in it, when it is loaded.

    After NvshmemHome has initialised the library; once a process, however often it is called.
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
