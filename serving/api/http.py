"""The HTTP server: uvicorn around the application.

HTTP/1.1 over httptools, with bounds on what a client may make the server wait for or keep.

uvicorn's protocol bounds neither the size of a request's head nor the time
that a request takes to arrive: a few clients that send a byte now and then
would hold all sockets. Nor does it bound the time that a client takes to read: the application
waits once 64 KiB are unread, for ever, and with it a request that holds blocks of the KV cache.
Nor the requests that a client sends ahead (pipelining, RFC 9112, section 9.3.2), all of which it
keeps, while it tells the last of them alone that the client has gone.

A request that is refused here is refused in its turn: those ahead of it on the connection get
their answers, and the connection ends with the last of these.

Once the server is about to end, each answer is the last of its connection. A client that is told to
try again later would else do so on the same one, which leads here also through a load balancer that
has other servers by now.
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

MAX_HEAD = 64 * 1024  # bytes of request line and headers, up to one read of the socket more
ARRIVAL_TIMEOUT = 60.0  # seconds for a request to arrive whole
ARRIVAL_BYTES = 1024 * 1024  # of a body that, come in that time, give it as long again
MAX_UNANSWERED = 8  # requests of one connection, that which is being answered among them
_KEEP_ALIVE = 75  # seconds; longer than load balancers keep idle connections, so that they close
_BACKLOG = 2048
_LAST_RESPONSES = 5  # seconds that readers get for answers that are complete


class BoundedProtocol(HttpToolsProtocol):
    """431 for a head that is too large, 408 for a request that does not arrive, 400 for no HTTP.

    What comes beyond MAX_UNANSWERED requests is not taken; clients have to expect that, and ask
    again on another connection.

    Args:
        write_timeout: seconds in which a client must read 64 KiB that wait for it; then the
            connection is cut, which ends its request as if the client had gone.
        draining: whether the server is about to end.
        arguments: uvicorn's.
    """

    url = b""  # until a request has begun
    _head_bytes = 0
    _new_bytes = 0  # since the time to arrive was last given
    _arrival: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def __init__(
        self, *arguments: Any, write_timeout: float, draining: Callable[[], bool], **named: Any
    ) -> None:
        super().__init__(*arguments, **named)
        self._write_timeout = write_timeout
        self._draining = draining
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._ending = False  # nothing more is taken

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
        if self.transport.get_write_buffer_size():  # closing would wait for it to be read
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def data_received(self, data: bytes) -> None:
        if self._ending:  # it is still read, so that a client that hangs up is noticed
            return
        self._head_bytes += len(data)
        self._new_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD:
            self._refuse(431, f"the request's head is too large; at most {MAX_HEAD} bytes")

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is not a request of HTTP/1.1")

    def on_message_begin(self) -> None:
        if len(self._unanswered) == MAX_UNANSWERED:
            raise BufferError("too many requests ahead")  # ends the parser: see send_400_response
        super().on_message_begin()
        self._head_bytes = self._head_bytes or 1  # it came with the end of the last request
        self._await_arrival()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._unanswered.append(self.cycle)
        if self._draining():
            self.cycle.keep_alive = False
        self._head_bytes = -(2**63)  # the rest is body
        if self.pipeline:  # uvicorn has stopped to read, and would not notice a client that goes
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
        elif self._head_bytes == 0:  # an idle connection: nobody waits for an answer
            self.transport.close()
        else:
            self._refuse(408, f"the request did not arrive within {ARRIVAL_TIMEOUT:g} seconds")

    def _refuse(self, status: int, message: str) -> None:
        """Answer the request that arrives with an error, unless its answer has begun; hang up."""
        if self._ending or self.transport.is_closing():
            return
        self._ending = True
        self._arrived()
        in_body = self._head_bytes < 0
        ahead = len(self._unanswered) - in_body  # -1: its own answer is complete
        if ahead > 0:
            self._unanswered[ahead - 1].keep_alive = False
        elif in_body and self.cycle.response_started:
            self.transport.close()
        else:
            self._answer(status, message)

    def _answer(self, status: int, message: str) -> None:
        path = self.url.partition(b"?")[0].decode("latin-1")
        content: msgspec.Struct = describe(RequestError(message, status=status))[1]
        if is_anthropics(path):
            content = anthropic_error(status, message)
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
