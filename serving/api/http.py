"""The HTTP server: uvicorn around the application."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, cast

import uvicorn

from weft.serving.api.app import build_app
from weft.serving.api.middleware.keys import Keyring
from weft.serving.api.protocol import BoundedProtocol
from weft.serving.api.state import ServerState
from weft.serving.config.settings import ServerConfig

if TYPE_CHECKING:
    from weft.serving.api.middleware.tracing import Tracer

_KEEP_ALIVE = 75  # seconds; longer than load balancers keep idle connections, so that they close
_BACKLOG = 2048
_LAST_RESPONSES = 5  # seconds that readers get for answers that are complete


class HttpServer(uvicorn.Server):
    """uvicorn with the application, its handling of signals left to server.py.

    Args:
        state: of the server.
        config: how to listen, and whom to let in.
        keys: API keys, or none.
        tls: what HTTPS is made with; None is HTTP.
        tracer: makes spans of requests.
    """

    def __init__(
        self,
        state: ServerState,
        config: ServerConfig,
        keys: Keyring,
        tls: ssl.SSLContext | None,
        tracer: Tracer | None,
    ) -> None:
        protocol = partial(
            BoundedProtocol,
            write_timeout=config.write_timeout,
            draining=lambda: state.draining,
        )
        super().__init__(
            uvicorn.Config(
                build_app(state, config, keys, tracer),
                http=cast(type[BoundedProtocol], protocol),
                ssl_context_factory=None if tls is None else lambda *_: tls,
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

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone."""
        yield
