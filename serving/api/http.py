"""The HTTP server: uvicorn around the application, with limits on each connection.

`BoundedProtocol` adds some limits to uvicorn's protocol for HTTP/1.1 (httptools):

    size of a request's head        a client could fill the memory
    connections without a request   clients could take all file descriptors in this process
    time for a request to arrive    a few clients that send a byte now and then would hold all
                                    sockets
    time for a client to read       the application waits at 64 KiB of unread data, and meanwhile
                                    its request holds blocks of the KV cache
    requests sent ahead             uvicorn queues all of them (pipelining, RFC 9112, section
                                    9.3.2), and reports a disconnection only to the last

It also refuses other HTTP versions and requests without one `Host`, and it never sends a chunked
body to an HTTP/1.0 client.

Refusals keep the order of a connection: earlier requests get their responses first, and then the
connection ends.

While the server shuts down, each response ends its connection. Otherwise a client that retries
would use the same connection, and stay on this server even behind a load balancer.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import ssl
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NoReturn, cast

import msgspec
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
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

MAX_HEAD = 64 * 1024  # bytes in the URL and the headers
MAX_URL = 8 * 1024  # bytes, as in nginx; no route needs a tenth
MAX_WAITING = 4096  # connections without a complete request, each with at most MAX_HEAD in memory
ARRIVAL_TIMEOUT = 60.0  # seconds for a whole request to arrive
ARRIVAL_BYTES = 1024 * 1024  # a body that brings this many bytes in time gets as long again
MAX_UNANSWERED = 8  # requests on one connection, including the current one
_KEEP_ALIVE = 75  # seconds; longer than in load balancers, so that they close the connection
_BACKLOG = 2048
_LAST_RESPONSES = 5  # seconds for clients to read complete responses at shutdown
_MAX_FILES = 65536  # file descriptors for this process


class Waiting:
    """The connections without a complete request, up to a maximum number.

    One more connection closes the longest-waiting one. So clients with no request, or an incomplete
    request, keep nobody out. Connections with a complete request are not counted: the queue of
    requests is bounded.

    Args:
        most: maximum number of connections.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._connections: dict[BoundedProtocol, None] = {}  # ordered

    def add(self, connection: BoundedProtocol) -> None:
        """Add a connection, and close another one if there are too many."""
        self._connections[connection] = None
        if len(self._connections) > self._most:
            oldest = next(iter(self._connections))
            self.remove(oldest)
            oldest.make_room()

    def remove(self, connection: BoundedProtocol) -> None:
        """Remove a connection; it may be absent."""
        self._connections.pop(connection, None)


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits: 431 for a large head, 408 for a late request, and others.

    Requests beyond MAX_UNANSWERED are dropped. Clients that send requests ahead must expect that,
    and repeat them on another connection.

    Args:
        write_timeout: seconds for a client to read 64 KiB of waiting data. Then the connection is
            cut, which ends its request as if the client had disconnected.
        draining: returns whether the server is shutting down.
        waiting: the server's connections without a complete request.
        arguments, named: arguments for uvicorn's protocol.
    """

    url = b""  # until a request has begun
    _fault = 400, "this is not an HTTP/1.1 request"  # why the parser stops
    _head_bytes = 0
    _new_bytes = 0  # since the arrival timer started
    _arrival: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def __init__(
        self,
        *arguments: Any,
        write_timeout: float,
        draining: Callable[[], bool],
        waiting: Waiting,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        self._write_timeout = write_timeout
        self._draining = draining
        self._waiting = waiting
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._ending = False  # no more requests are accepted

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waiting.add(self)
        self._await_arrival()

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.remove(self)
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
            self._refuse(*_LARGE_HEAD)

    def send_400_response(self, msg: str) -> None:
        self._refuse(*self._fault)

    def on_message_begin(self) -> None:
        if len(self._unanswered) == MAX_UNANSWERED:
            self._stop(400, "too many requests ahead")  # the client does not see it
        super().on_message_begin()
        self._head_bytes = self._head_bytes or 1  # it arrived with the end of the last request
        self._await_arrival()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_URL:
            self._stop(414, f"the URL is too long; the maximum is {MAX_URL} bytes")

    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            self._stop(505, f"the version of HTTP is {version}; send HTTP/1.1")
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and version == "1.1"):
            self._stop(400, f"the request has {hosts} Host headers; send one")
        size = sum(len(name) + len(value) + 4 for name, value in self.headers)  # ": " and "\r\n"
        if size + len(self.url) > MAX_HEAD:
            self._stop(*_LARGE_HEAD)
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
        if self._unanswered:
            self._waiting.remove(self)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        if all(cycle.more_body for cycle in self._unanswered) and not self.transport.is_closing():
            self._waiting.add(self)
        super().on_response_complete()

    def make_room(self) -> None:
        """Close this connection, because others need its place."""
        if self._head_bytes == 0:  # no request has begun
            self.transport.close()
        else:
            self._refuse(503, "too many connections send a part of a request; try again")

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0":
            app = _unchunked(app, cycle)
        super()._start_asgi_task(cycle, app)

    def _stop(self, status: int, message: str) -> NoReturn:
        """End the parser; it then calls `send_400_response`."""
        self._fault = status, message
        raise BufferError(message)

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
        head = [
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            *(["retry-after: 1"] if status == HTTPStatus.SERVICE_UNAVAILABLE else []),
            "connection: close",
        ]
        self.transport.write("\r\n".join([*head, "", ""]).encode() + body)
        self.transport.close()


_LARGE_HEAD = 431, f"the request's head is too large; the maximum is {MAX_HEAD} bytes"


def _unchunked(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """Wrap the application for an HTTP/1.0 client without support for chunked bodies.

    A body with unknown length ends with the connection (RFC 9112, sections 6.1 and 6.3).
    """

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        until_close = False

        async def sending(message: Message) -> None:
            nonlocal until_close
            if message["type"] == "http.response.start":
                until_close = b"content-length" not in dict(message["headers"])
                if until_close:
                    cycle.chunked_encoding = False  # uvicorn then expects a length
            elif until_close:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, sending)

    return wrapped


def _raise_file_limit() -> int:
    """Raise the limit for file descriptors (often 1024) as far as allowed; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_FILES if hard == resource.RLIM_INFINITY else min(_MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


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
            waiting=Waiting(min(MAX_WAITING, _raise_file_limit() // 2)),
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
