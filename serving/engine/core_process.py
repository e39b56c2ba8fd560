"""Starts engine cores as child processes or threads, and notices their end.

A child process reads its settings from one line on stdin. The pipe then stays open. When it
closes, this process is gone and the child ends too, so no orphan is left. Threads are for the `LLM`
class and for tests; they cannot be killed.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import msgspec

from weft.errors import ConfigError, WeftError
from weft.serving.config.settings import EngineConfig, Replica
from weft.serving.engine.protocol import Orders
from weft.serving.executor.child_process import how_it_ended, python_module
from weft.serving.executor.placement import Inventory, decided, map_slices

if TYPE_CHECKING:
    import zmq.asyncio

ABORT_GRACE = 2.0  # seconds for the stacks of a stuck core to be written


def share_out(config: EngineConfig, offers: Sequence[Inventory]) -> list[EngineConfig]:
    """Return the settings of each of the `dp` cores, with its devices and its share of memory.

    The share is based on the memory now free. After a restart, a core takes no more.

    Args:
        config: settings of the whole engine.
        offers: devices and memory of the nodes, this one first.

    Raises:
        ConfigError: there are not enough devices, or they do not suit the kernels.
    """
    config = decided(config, offers)
    slices = map_slices(config, offers)
    apart = config.device != "tpu" and any(len(each) > 1 for each in slices)
    if config.kernels == "overlapped" and apart:
        raise ConfigError(
            f"--nodes is {config.nodes}; with --kernels overlapped all ranks of an engine must be "
            "on one node, because they share its memory"
        )
    cores = []
    for number, each in enumerate(slices):
        engines = max([1, *(part.engines for part in each if part.node == 0)])
        memory = offers[0].memory // engines if engines > 1 else None
        cores.append(replace(config, replica=Replica(number, memory, engines, each)))
    return cores


class Core(Protocol):
    """A running core.

    Attributes:
        pid: its process id; None for a thread.
        ended: done once the core is gone. The result is None after a normal end, else a phrase
            that follows "the engine".
    """

    pid: int | None
    ended: asyncio.Future[str | None]

    async def kill(self, *, dump: bool = False) -> None:
        """Kill the core now; with `dump`, write its threads' stacks to stderr first."""


class CoreProcess:
    """A core in a child process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid: int | None = process.pid
        self.ended: asyncio.Future[str | None] = asyncio.ensure_future(self._wait())

    @classmethod
    async def start(cls, config: EngineConfig, load_model: str, address: str) -> CoreProcess:
        """Start the process; it connects to `address` by itself."""
        command, environment = python_module("weft.serving.engine.core")
        process = await asyncio.create_subprocess_exec(
            *command,
            env=environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=2,  # stdout is for the parent's output; stray prints go to stderr
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(Orders(config, address, load_model)) + b"\n")
        return cls(process)

    async def _wait(self) -> str | None:
        return how_it_ended(await self._process.wait())

    async def kill(self, *, dump: bool = False) -> None:
        if dump and not self.ended.done():
            self._process.send_signal(signal.SIGABRT)
            await asyncio.wait((self.ended,), timeout=ABORT_GRACE)
        if not self.ended.done():
            self._process.kill()
            await self.ended


class CoreThread:
    """A core in a thread of this process."""

    pid: int | None = None

    def __init__(
        self,
        config: EngineConfig,
        load_model: str,
        address: str,
        context: zmq.asyncio.Context,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str | None] = loop.create_future()
        left = self._left = threading.Event()

        # Imported here, so that an API process that starts a child does not wait for numpy.
        import zmq

        from weft.serving.engine.core import serve
        from weft.serving.executor.child_process import find

        def run() -> None:
            how: str | None = "failed; see the log"
            try:
                serve(config, find(load_model), zmq.Context(context), address)
                how = None
            except WeftError as error:
                how = f"failed: {error}"
            finally:
                with suppress(RuntimeError):  # the loop is closed, so nobody waits
                    loop.call_soon_threadsafe(self._set_ended, how)
                left.wait()  # the API side may still have messages to read
                context.term()

        threading.Thread(target=run, name="weft-core", daemon=True).start()

    def _set_ended(self, how: str | None) -> None:
        if not self.ended.done():
            self.ended.set_result(how)

    async def kill(self, *, dump: bool = False) -> None:
        """Do nothing: a thread cannot be killed and is left behind."""

    def leave(self) -> None:
        """Let the thread end its ZeroMQ context, after this side has closed its sockets."""
        self._left.set()
