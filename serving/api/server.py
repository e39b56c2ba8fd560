"""`weft serve`: the HTTP server and the engine behind it, from start to end.

HTTP is up first, so that /health answers while the model loads. At SIGTERM or
SIGINT the server stops being ready but keeps answering, running requests get
`drain_timeout` seconds to finish, and it exits with 0. A second signal
does not wait. When the engine ends by itself, so does the server, with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn
import uvloop

from weft.errors import ConfigError, EngineError
from weft.serving.api.app import build_app
from weft.serving.api.protocol import BoundedProtocol
from weft.serving.api.state import ServerState
from weft.serving.config import EngineConfig, ServerConfig
from weft.serving.engine import LOAD_MODEL, AsyncEngine

_KEEP_ALIVE = 75  # seconds; longer than load balancers keep idle connections, so that they close
_BACKLOG = 2048
_LAST_RESPONSES = 5  # seconds that readers get for answers that are complete
_HEALTH_PERIOD = 0.2


def serve(
    engine_config: EngineConfig, server_config: ServerConfig, *, runner_factory: str = LOAD_MODEL
) -> int:
    """Serve until a signal comes; returns the exit status.

    Args:
        engine_config: of the engine.
        server_config: of the HTTP server.
        runner_factory: see `AsyncEngine.start`.

    Raises:
        ConfigError: the address is not to be had.
        ModelError: the model cannot be loaded.
        EngineError: the engine has ended by itself.
    """
    listener = _bind(server_config)
    with contextlib.closing(listener):
        server = _Server(engine_config, server_config, runner_factory, listener)
        return uvloop.run(server.run())


def _bind(config: ServerConfig) -> socket.socket:
    """A listening socket; taken before the model loads, so that a clash shows at once."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        address = f"--host {config.host} --port {config.port}"
        advice = "--port 0 takes a free one"
        if error.errno == errno.EADDRNOTAVAIL:
            advice = "--host 0.0.0.0 listens on all addresses of this machine"
        raise ConfigError(f"{address}: {error.strerror}; {advice}") from error
    listener.setblocking(False)
    return listener


class _Http(uvicorn.Server):
    """uvicorn, with its handling of signals left to `_Server`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server:
    """One run of the server; see the module's text."""

    def __init__(
        self,
        engine_config: EngineConfig,
        server_config: ServerConfig,
        runner_factory: str,
        listener: socket.socket,
    ) -> None:
        self._engine_config = engine_config
        self._runner_factory = runner_factory
        self._server_config = server_config
        self._listener = listener
        self._state = ServerState.of(engine_config, server_config)
        self._stop = asyncio.Event()
        self._abort = asyncio.Event()
        self._http = _Http(
            uvicorn.Config(
                build_app(self._state),
                http=BoundedProtocol,
                ws="none",
                lifespan="off",
                backlog=_BACKLOG,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE,
                timeout_graceful_shutdown=_LAST_RESPONSES,
            )
        )

    async def run(self) -> int:
        """Everything, in its order; returns the exit status."""
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, self._on_signal)
        http = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        try:
            await self._load()
            if self._state.engine is not None:
                print(f"weft serves {self._state.model} at {self._url()}", file=sys.stderr)
                await self._watch(self._state.engine)
                await self._drain(self._state.engine)
        finally:
            self._http.should_exit = True
            self._http.force_exit = self._abort.is_set()
            await http
        return 1 if self._abort.is_set() else 0

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._abort.set()
        elif self._state.engine is not None and (running := self._state.engine.live):
            print(
                f"weft ends; {running} under way get {self._server_config.drain_timeout:g} s "
                "to finish, a second signal ends them",
                file=sys.stderr,
            )
        self._state.draining = True
        self._stop.set()

    async def _load(self) -> None:
        """Start the engine, unless a signal comes first."""
        loading = asyncio.create_task(
            AsyncEngine.start(self._engine_config, runner_factory=self._runner_factory)
        )
        if await _first(loading, self._stop):
            self._state.engine = loading.result()
        else:
            loading.cancel()
            await asyncio.wait((loading,))

    async def _watch(self, engine: AsyncEngine) -> None:
        """Return at the first signal; raise EngineError when the engine ends."""
        while not self._stop.is_set():
            if engine.status in ("dead", "stalled"):
                await engine.shutdown(drain=False)
                raise engine.failure or EngineError(f"the engine is {engine.status}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _HEALTH_PERIOD)

    async def _drain(self, engine: AsyncEngine) -> None:
        """Let running requests finish; at the second signal, end them."""
        timeout = self._server_config.drain_timeout
        ending = asyncio.create_task(engine.shutdown(drain=True, timeout=timeout))
        if not await _first(ending, self._abort):
            await engine.shutdown(drain=False, timeout=1.0)
        await ending
        if engine.failure is not None:
            raise engine.failure

    def _url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _first(task: asyncio.Task[object], event: asyncio.Event) -> bool:
    """Wait for either; returns whether the task is done."""
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    return task.done()
