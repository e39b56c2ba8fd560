"""The HTTP server: uvicorn around the application."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvicorn

from weft.serving.api.app import build_app
from weft.serving.api.protocol import BoundedProtocol
from weft.serving.api.state import ServerState

_KEEP_ALIVE = 75  # seconds; longer than load balancers keep idle connections, so that they close
_BACKLOG = 2048
_LAST_RESPONSES = 5  # seconds that readers get for answers that are complete


class HttpServer(uvicorn.Server):
    """uvicorn with the application, its handling of signals left to server.py."""

    def __init__(self, state: ServerState) -> None:
        super().__init__(
            uvicorn.Config(
                build_app(state),
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

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone."""
        yield
