"""Common parts of the child processes: engine cores, ranks and the grammar compiler.

A child reads its orders as one line of JSON from stdin. The pipe then stays open. When it closes,
the parent has gone, for whatever reason, and the child exits, so that no orphan remains.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import site
import socket
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
    """Set up this process as a child: read its orders, and exit when the parent exits."""
    ignore_signals()
    faulthandler.enable()  # on SIGABRT, write the stack of every thread to stderr
    logs.configure()
    received = msgspec.json.decode(sys.stdin.buffer.readline(), type=orders)
    logs.configure(received.config.log_format)
    threading.Thread(target=_exit_with_parent, name="weft-parent", daemon=True).start()
    return received


def ignore_signals() -> None:
    """Ignore signals that go to the whole process group: the parent decides when a child ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _exit_with_parent() -> None:
    # Avoids sys.stdin: a clean exit of the main thread would need its lock.
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


def settle_garbage_collector() -> None:
    """Make garbage collection rare, and exclude all existing objects from it.

    A step creates a few objects per request. It drops them without reference cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)
    gc.enable()


def find(path: str) -> Any:
    """Import the object named by "module:name"."""
    module, name = path.split(":")
    return getattr(import_module(module), name)


def read(sock: socket.socket, count: int) -> bytes:
    """Read exactly `count` bytes; return b"" if the connection ends or times out first."""
    parts: list[bytes] = []
    while count:
        try:
            part = sock.recv(min(count, 1 << 20))
        except OSError:  # reset, timed out, no route
            part = b""
        if not part:
            return b""
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def how_it_ended(code: int) -> str | None:
    """Describe a process's exit status as a verb phrase; None after a successful exit."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with status {code}" if code else None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Core -> API process, rank -> core: the sender ends with an error.

    Attributes:
        kind: name of a class in weft.errors.
        message: text of the error.
    """

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        """Build the message for an exception."""
        if isinstance(error, WeftError):
            return cls(type(error).__name__, str(error))
        return cls(EngineError.__name__, repr(error))

    @property
    def error(self) -> WeftError:
        """The exception to raise on the receiving side."""
        kinds: dict[str, type[WeftError]] = {k.__name__: k for k in (ConfigError, ModelError)}
        return kinds.get(self.kind, EngineError)(self.message)
