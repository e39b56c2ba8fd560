"""HTTP/1.1 over httptools, with bounds on what a client may make the server wait for or keep.

uvicorn's protocol bounds neither the size of a request's head nor the time
that a request takes to arrive: a few clients that send a byte now and then
would hold all sockets. Nor does it bound the time that a client takes to read: the application
waits once 64 KiB are unread, for ever, and with it a request that holds blocks of the KV cache.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from weft.errors import RequestError
from weft.serving.api.errors import describe

MAX_HEAD = 64 * 1024  # bytes of request line and headers, up to one read of the socket more
ARRIVAL_TIMEOUT = 60.0  # seconds for a request to arrive whole
ARRIVAL_BYTES = 1024 * 1024  # of a body that, come in that time, give it as long again


class BoundedProtocol(HttpToolsProtocol):
    """431 for a head that is too large, 408 for a request that does not arrive.

    Args:
        write_timeout: seconds in which a client must read 64 KiB that wait for it; then the
            connection is cut, which ends its request as if the client had gone.
        arguments: uvicorn's.
    """

    _head_bytes = 0
    _new_bytes = 0  # since the time to arrive was last given
    _arrival: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, write_timeout: float, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._write_timeout = write_timeout

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_arrival()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        self._read()
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
        self._head_bytes += len(data)
        self._new_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD and not self.transport.is_closing():
            self._refuse(431, f"the request's head is too large; at most {MAX_HEAD} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_arrival()

    def on_headers_complete(self) -> None:
        self._head_bytes = -(2**63)  # the rest is body
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        self._arrived()
        super().on_message_complete()

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
        elif not self.transport.is_closing():
            self._refuse(408, f"the request did not arrive within {ARRIVAL_TIMEOUT:g} seconds")

    def _refuse(self, status: int, message: str) -> None:
        """Hang up, with an answer unless the application has begun one."""
        if self._head_bytes < 0 and self.cycle.response_started:
            self.transport.close()
            return
        body = msgspec.json.encode(describe(RequestError(message, status=status))[1])
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
