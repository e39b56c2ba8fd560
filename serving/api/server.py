"""`weft serve`: the HTTP server and its engine, from start to end.

The engine process starts first. It imports torch while this process imports its HTTP server, so
/health responds long before the model is loaded. If the model must be downloaded, the HTTP server
starts first and responds during the download.

At SIGTERM or SIGINT the server is no longer ready but still responds. Running requests get
`drain_timeout` seconds to finish, and the exit status is 0. A second signal ends them at once; if
it cuts off a request, the status is 1.
SIGHUP reads API keys and the certificate again. If the engine fails, the server exits with an
error; with `restart`, only if the engine cannot be restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import signal
import socket
import ssl
import sys
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import uvloop

from weft.errors import ConfigError, EngineError
from weft.serving.api.middleware.keys import Keyring
from weft.serving.config import logs
from weft.serving.config.settings import EngineConfig, ServerConfig
from weft.serving.engine.engine import LOAD_MODEL, AsyncEngine
from weft.serving.engine.model_files import check_model
from weft.serving.engine.throughput_log import ThroughputLog
from weft.serving.executor import child_process, fetch

if TYPE_CHECKING:
    from weft.serving.api.http import HttpServer
    from weft.serving.api.middleware.tracing import Tracer
    from weft.serving.api.state import ServerState

_HEALTH_PERIOD = 0.2
_SWITCH_INTERVAL = 0.001
"""Seconds that a thread keeps the GIL while the event loop wants it; Python's default is 0.005. The
loop waits this long for each event, while a thread reads a large body."""

logger = logging.getLogger(__name__)


def serve(
    engine_config: EngineConfig, server_config: ServerConfig, *, runner_factory: str = LOAD_MODEL
) -> int:
    """Serve until a signal comes; returns the exit status.

    Args:
        engine_config: settings of the engine.
        server_config: settings of the HTTP server.
        runner_factory: see `AsyncEngine.start`.

    Raises:
        ConfigError: the address is not available, or a file of keys or certificates is wrong.
        ModelError: the model cannot be loaded.
        EngineError: the engine has failed.
    """
    if server_config.otlp_endpoint is not None and find_spec("opentelemetry.exporter") is None:
        raise ConfigError(
            "--otlp-endpoint needs OpenTelemetry: pip install opentelemetry-sdk "
            "opentelemetry-exporter-otlp-proto-http"
        )
    listener = _bind(server_config)
    sys.setswitchinterval(_SWITCH_INTERVAL)
    with contextlib.closing(listener):
        keys, tls = Keyring(server_config), tls_context(server_config)
        server = _Server(engine_config, server_config, runner_factory, listener, keys, tls)
        return uvloop.run(server.run())


def _bind(config: ServerConfig) -> socket.socket:
    """Open the listening socket before the model loads, so that a port conflict shows at once."""
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


class _Server:
    """One run of the server; see the module's docstring."""

    def __init__(
        self,
        engine_config: EngineConfig,
        server_config: ServerConfig,
        runner_factory: str,
        listener: socket.socket,
        keys: Keyring,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._engine_config = engine_config
        self._runner_factory = runner_factory
        self._server_config = server_config
        self._listener = listener
        self._keys = keys
        self._tls = tls
        self._tracer: Tracer | None = None
        self._state: ServerState | None = None
        self._stop = asyncio.Event()
        self._abort = asyncio.Event()
        self._cut_off = 0  # requests ended by a second signal

    async def run(self) -> int:
        """Start, serve and shut down; returns the exit status."""
        config = self._engine_config
        is_here = self._runner_factory != LOAD_MODEL or fetch.is_here(config)
        if is_here and self._runner_factory == LOAD_MODEL:
            check_model(config)
        logs.say(
            f"weft {'loads' if is_here else 'downloads'} {config.model}, and will answer on "
            f"{self._url()}"
        )
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, self._on_signal)
        spawned = asyncio.Event()
        # No fork while a thread imports modules: the first start ends before the other begins.
        if is_here:
            loading = asyncio.create_task(self._start_engine(spawned))
            await _first(loading, spawned)
            state, server = await asyncio.to_thread(self._build_http)
        else:
            state, server = await asyncio.to_thread(self._build_http)
            loading = asyncio.create_task(self._start_engine(spawned))
        self._state = state
        state.downloading = not (is_here or spawned.is_set())
        self._warn_if_open_to_all()
        if self._server_config.api_key_file is not None or self._tls is not None:
            loop.add_signal_handler(signal.SIGHUP, self._reload)
        state.draining = self._stop.is_set()
        http = asyncio.create_task(server.serve(sockets=[self._listener]))
        try:
            if await self._loaded(loading):
                state.engine = engine = loading.result()
                child_process.settle_garbage_collector()  # else it stops all requests for longer
                state.batches.start(engine)
                logs.say(f"weft serves {state.model} at {self._url()}")
                await self._watch(engine)
                state.batches.drain()
                await self._drain(engine)
        finally:
            await state.batches.close()
            server.should_exit = True
            server.force_exit = self._abort.is_set()
            await http
            if self._tracer is not None:
                await asyncio.to_thread(self._tracer.close)
        return 1 if self._cut_off else 0

    async def _start_engine(self, spawned: asyncio.Event) -> AsyncEngine:
        return await AsyncEngine.start(
            self._engine_config,
            runner_factory=self._runner_factory,
            restart=self._server_config.restart,
            on_spawned=partial(self._on_spawned, spawned),
        )

    def _on_spawned(self, spawned: asyncio.Event) -> None:
        spawned.set()
        if self._state is not None:
            self._state.downloading = False

    def _build_http(self) -> tuple[ServerState, HttpServer]:
        from weft.serving.api.http import HttpServer
        from weft.serving.api.state import ServerState

        state = ServerState.of(self._engine_config, self._server_config)
        state.batches.open()
        if (endpoint := self._server_config.otlp_endpoint) is not None:
            from weft.serving.api.middleware.tracing import Tracer

            self._tracer = Tracer(endpoint, state.model)
        config, tracer = self._server_config, self._tracer
        return state, HttpServer(state, config, self._keys, self._tls, tracer)

    def _on_signal(self) -> None:
        state = self._state
        engine = None if state is None else state.engine
        running = 0 if engine is None else engine.live
        if self._stop.is_set():
            if not self._abort.is_set():
                self._cut_off = running
                cut_off = f"; {running} under way are cut off" if running else ""
                logs.say(f"weft ends at once, by a second signal{cut_off}")
            self._abort.set()
        elif running:
            logs.say(
                f"weft ends; {running} under way get {self._server_config.drain_timeout:g} s "
                "to finish, a second signal ends them"
            )
        if state is not None:
            state.draining = True
        self._stop.set()

    def _warn_if_open_to_all(self) -> None:
        host = self._listener.getsockname()[0]
        if not self._keys and not ipaddress.ip_address(host).is_loopback:
            logger.warning(
                "%s has no API keys, so anyone on its network can use it: set --api-key or "
                "--api-key-file",
                self._url(),
            )

    def _reload(self) -> None:
        """Read keys and certificate again; after an error, the old ones stay in use."""
        try:
            self._keys.reload()
            if self._tls is not None:
                reload_certificate(self._tls, self._server_config)
        except ConfigError as error:
            logger.error("%s; the previous keys and certificate stay in use", error)
        else:
            logger.info("API keys and certificate have been read again")

    async def _loaded(self, loading: asyncio.Task[AsyncEngine]) -> bool:
        """Wait for the engine; False if a signal comes first."""
        if await _first(loading, self._stop):
            return True
        loading.cancel()
        await asyncio.wait((loading,))
        return False

    async def _watch(self, engine: AsyncEngine) -> None:
        """Return at the first signal; raise EngineError when the engine ends."""
        throughput = ThroughputLog(engine) if self._server_config.log_stats else None
        while not self._stop.is_set():
            if throughput is not None:
                throughput.tick()
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
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


async def _first(task: asyncio.Task[object], event: asyncio.Event) -> bool:
    """Wait for the task or the event; returns whether the task is done."""
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    return task.done()


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Return the TLS settings for connections; None without --ssl-certfile.

    Raises:
        ConfigError: a file cannot be read, or is no certificate or key.
    """
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificate(context, config)
    if config.ssl_ca_certs is not None:
        flag = f"--ssl-ca-certs {config.ssl_ca_certs}"
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except OSError as error:  # also ssl.SSLError
            raise ConfigError(f"{flag}: {error.strerror or error}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def load_certificate(context: ssl.SSLContext, config: ServerConfig) -> None:
    """Load the current certificate from the disk; raises as `tls_context`."""
    assert config.ssl_certfile is not None
    # Without a password OpenSSL would ask on the terminal.
    password = config.ssl_keyfile_password or ""
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, lambda: password)
    except OSError as error:  # also ssl.SSLError
        flags = f"--ssl-certfile {config.ssl_certfile}"
        if config.ssl_keyfile is not None:
            flags += f" --ssl-keyfile {config.ssl_keyfile}"
        raise ConfigError(f"{flags}: {error.strerror or error}") from None


def reload_certificate(context: ssl.SSLContext, config: ServerConfig) -> None:
    """Load the current certificate from the disk; after a ConfigError the old one stays in use.

    It is tried in another context first, because a wrong key would remove the previous key.
    """
    load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), config)
    load_certificate(context, config)
