"""The HTTP server: uvicorn around the application, with limits on each connection.

uvicorn's protocol for HTTP/1.1 (httptools) lacks four limits, which `BoundedProtocol` adds:

    size of a request's head        a client could fill the memory
    time for a request to arrive    a few clients that send a byte now and then would hold all
                                    sockets
    time for a client to read       the application waits at 64 KiB of unread data, and meanwhile
                                    its request holds blocks of the KV cache
    requests sent ahead             uvicorn queues all of them (pipelining, RFC 9112, section
                                    9.3.2), and reports a disconnection only to the last

Refusals keep the order of a connection: earlier requests get their responses first, and then the
connection ends.

While the server shuts down, each response ends its connection. Otherwise a client that retries
would use the same connection, and stay on this server even behind a load balancer.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from weft.errors import RequestError
from weft.serving.api.anthropic.errors import anthropic_error, is_anthropics
from weft.serving.api.app import build_app
from weft.serving.api.errors import describe
from weft.serving.api.middleware.keys import Keyring
from weft.serving.api.state import ServerState
from weft.serving.config.settings import ServerConfig

if TYPE_CHECKING:
    from weft.serving.api.middleware.tracing import Tracer

MAX_HEAD = 64 * 1024  # bytes in request line and headers; one read of the socket may exceed it
ARRIVAL_TIMEOUT = 60.0  # seconds for a whole request to arrive
ARRIVAL_BYTES = 1024 * 1024  # a body that brings this many bytes in time gets as long again
MAX_UNANSWERED = 8  # requests on one connection, including the current one
_KEEP_ALIVE = 75  # seconds; longer than in load balancers, so that they close the connection
_BACKLOG = 2048
_LAST_RESPONSES = 5  # seconds for clients to read complete responses at shutdown


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits: 431 for a large head, 408 for a late request, 400 for others.

    Requests beyond MAX_UNANSWERED are dropped. Clients that send requests ahead must expect that,
    and repeat them on another connection.

    Args:
        write_timeout: seconds for a client to read 64 KiB of waiting data. Then the connection is
            cut, which ends its request as if the client had disconnected.
        draining: returns whether the server is shutting down.
        arguments, named: arguments for uvicorn's protocol.
    """

    url = b""  # until a request has begun
    _head_bytes = 0
    _new_bytes = 0  # since the arrival timer started
    _arrival: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def __init__(
        self, *arguments: Any, write_timeout: float, draining: Callable[[], bool], **named: Any
    ) -> None:
        super().__init__(*arguments, **named)
        self._write_timeout = write_timeout
        self._draining = draining
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._ending = False  # no more requests are accepted

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_arrival()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        self._read()
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self._write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        self._read()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():  # closing would wait until the client reads
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def data_received(self, data: bytes) -> None:
        if self._ending:  # data is still read, to notice when the client disconnects
            return
        self._head_bytes += len(data)
        self._new_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD:
            self._refuse(431, f"the request's head is too large; the maximum is {MAX_HEAD} bytes")

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is not an HTTP/1.1 request")

    def on_message_begin(self) -> None:
        if len(self._unanswered) == MAX_UNANSWERED:
            raise BufferError("too many requests ahead")  # ends the parser: see send_400_response
        super().on_message_begin()
        self._head_bytes = self._head_bytes or 1  # it arrived with the end of the last request
        self._await_arrival()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._unanswered.append(self.cycle)
        if self._draining():
            self.cycle.keep_alive = False
        self._head_bytes = -(2**63)  # the rest is body
        if self.pipeline:  # uvicorn has stopped reading, and would miss a disconnection
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        self._arrived()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()

    def _await_arrival(self) -> None:
        self._arrived()
        self._new_bytes = 0
        self._arrival = self.loop.call_later(ARRIVAL_TIMEOUT, self._too_slow)

    def _arrived(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _too_slow(self) -> None:
        if self._head_bytes < 0 and self._new_bytes >= ARRIVAL_BYTES:
            self._await_arrival()  # a large file
        elif self._head_bytes == 0:  # an idle connection: no request waits
            self.transport.close()
        else:
            self._refuse(408, f"the request did not arrive within {ARRIVAL_TIMEOUT:g} seconds")

    def _refuse(self, status: int, message: str) -> None:
        """Send an error for the arriving request, unless its response has begun; disconnect."""
        if self._ending or self.transport.is_closing():
            return
        self._ending = True
        self._arrived()
        in_body = self._head_bytes < 0
        ahead = len(self._unanswered) - in_body  # -1: its own response is complete
        if ahead > 0:
            self._unanswered[ahead - 1].keep_alive = False
        elif in_body and self.cycle.response_started:
            self.transport.close()
        else:
            self._answer(status, message)

    def _answer(self, status: int, message: str) -> None:
        path = self.url.partition(b"?")[0].decode("latin-1")
        _, error = describe(RequestError(message, status=status))
        content = anthropic_error(status, error.error) if is_anthropics(path) else error
        body = msgspec.json.encode(content)
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


class HttpServer(uvicorn.Server):
    """uvicorn with the application; server.py handles the signals.

    Args:
        state: the server's state.
        config: the server's settings.
        keys: API keys, or none.
        tls: for HTTPS; None is HTTP.
        tracer: makes spans for requests; None for no spans.
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
        """Do nothing: server.py handles the signals."""
        yield
