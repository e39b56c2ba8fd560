"""Control over every kernel launch of a thread: run it, only compile or load it, or skip it.

Compiling and loading must not happen beside a kernel that waits. Compiling takes long, and the
driver may delay a module or its memory until the device is idle. A waiting kernel never lets it
become idle if it waits for the very kernel that is loading. On one GPU (symmetric/virtual.py)
every rank therefore loads its kernels before any rank runs one. Skipping kernels serves to time
the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from weft.errors import WeftError

Action = Literal["run", "load", "compile", "skip"]

_thread = threading.local()
_lock = threading.Lock()
_users = 0
_originals: dict[Any, Callable[..., Any]] = {
    JITFunction: JITFunction.run,
    InterpretedFunction: InterpretedFunction.run,
}


@contextmanager
def decided(decide: Callable[[str], Action]) -> Iterator[None]:
    """Within, let `decide` choose the action of each launch of this thread, given the kernel's
    name.

    Triton's interpreter has nothing to load. Other threads are not affected.
    """
    before = getattr(_thread, "decide", None)
    _thread.decide = decide
    _change_users(1)
    try:
        yield
    finally:
        _change_users(-1)
        _thread.decide = before


@contextmanager
def loaded() -> Iterator[None]:
    """Within, compile and load this thread's kernels, without running them.

    Ops are not collective then, because no rank waits for another.
    """
    before = is_loading()
    _thread.loading = True
    try:
        with decided(lambda name: "load"):
            yield
    finally:
        _thread.loading = before


def is_loading() -> bool:
    """Return whether this thread is within `loaded`."""
    return getattr(_thread, "loading", False)


def is_refusal(error: Exception) -> bool:
    """Return whether the configuration caused an error: the op refused it, or Triton could not
    compile it.
    """
    return isinstance(error, WeftError | CompilationError | OutOfResources | PTXASError)


def _change_users(by: int) -> None:
    global _users
    with _lock:
        _users += by
        for function, original in _originals.items():
            function.run = _run_as_decided(original) if _users else original


def _run_as_decided(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        decide = getattr(_thread, "decide", None)
        action = "run" if decide is None else decide(self.__name__)
        if action == "skip":
            return None
        kernel = original(self, *args, grid=grid, warmup=warmup or action != "run", **kwargs)
        if action == "load" and kernel is not None:
            _ = kernel.run  # the property loads the module
        return kernel

    return run
