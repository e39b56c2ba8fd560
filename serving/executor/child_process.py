"""What the engine's process and the processes of ranks have in common.

Each is told what to do in one line on its stdin, as JSON. That pipe then stays
open: its end tells the child that its parent is gone, however it went, so no
orphan is left.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import site
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

import weft
from weft.errors import ConfigError, EngineError, ModelError, WeftError
from weft.serving.config import logs
from weft.serving.config.settings import EngineConfig


class _Orders(Protocol):
    @property
    def config(self) -> EngineConfig: ...


Orders = TypeVar("Orders", bound=_Orders)


def python_module(name: str) -> tuple[list[str], dict[str, str]]:
    """Build the command line and the environment for a child process that runs a module of weft.

    The child imports the same weft as this process. `-P` keeps the working directory off the
    child's sys.path, so that no file there replaces a library. If this weft was imported from
    somewhere other than site-packages, PYTHONPATH names that folder.

    Args:
        name: the module, such as "weft.serving.engine.core".
    """
    command = [sys.executable, "-P", "-m", name]
    environment = dict(os.environ)
    root = str(Path(weft.__file__).absolute().parent.parent)
    # PYTHONPATH comes before the standard library, so site-packages must not be in it.
    if root not in (*site.getsitepackages(), site.getusersitepackages()):
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{inherited}" if inherited else root
    return command, environment


def begin(orders: type[Orders]) -> Orders:
    """Become a child: read what to do, and end with the parent from now on."""
    ignore_signals()
    faulthandler.enable()  # on SIGABRT, every thread's stack goes to stderr
    logs.configure()
    told = msgspec.json.decode(sys.stdin.buffer.readline(), type=orders)
    logs.configure(told.config.log_format)
    threading.Thread(target=_end_with_parent, name="weft-parent", daemon=True).start()
    return told


def ignore_signals() -> None:
    """What a terminal or a service manager sends to all: the parent decides when this one ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _end_with_parent() -> None:
    # Not through sys.stdin, whose lock a clean exit of the main thread would need.
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


def settle_garbage_collector() -> None:
    """Look for garbage cycles rarely, and never among what is there now, which stays.

    A step makes some objects for each request, and drops them without a cycle.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)
    gc.enable()


def find(path: str) -> Any:
    """The object that "module:name" names."""
    module, name = path.split(":")
    return getattr(import_module(module), name)


def how_it_ended(code: int) -> str | None:
    """A process's exit status, in words that follow its name; None if it ended as it should."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with status {code}" if code else None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Core -> API process, rank -> core: it ends. `kind` is the name of a class in weft.errors."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        """What to say of an error."""
        if isinstance(error, WeftError):
            return cls(type(error).__name__, str(error))
        return cls(EngineError.__name__, repr(error))

    @property
    def error(self) -> WeftError:
        """What to raise for it."""
        kinds: dict[str, type[WeftError]] = {k.__name__: k for k in (ConfigError, ModelError)}
        return kinds.get(self.kind, EngineError)(self.message)
