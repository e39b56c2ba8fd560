"""Server-sent events: one `data:` line of JSON for each piece of an answer.

Sources: the HTML standard, section 9.2; OpenAI's API for the last event, `data: [DONE]`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from weft.errors import EngineError, RequestError
from weft.serving.api.errors import INTERNAL_ERROR, error_body

T = TypeVar("T")

_DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def event(content: msgspec.Struct) -> bytes:
    """Encode an event."""
    return b"data: " + _encode(content) + b"\n\n"


def typed_event(content: msgspec.Struct) -> bytes:
    """Encode an event with a name, which is the tag of its struct."""
    name = str(content.__struct_config__.tag).encode()
    return b"event: " + name + b"\ndata: " + _encode(content) + b"\n\n"


Failure = Callable[[RequestError | EngineError], bytes]


def _failure(error: RequestError | EngineError) -> bytes:
    return event(error_body(error))


class EventStream(Response):
    """Sends events as they come, then `done`; closes the generator when the client disconnects.

    An error after the first event becomes an event, because the status has been sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self, first: bytes, rest: AsyncGenerator[bytes, None], failure: Failure, done: bytes
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._failure = failure
        self._done = done

    @classmethod
    async def start(
        cls,
        request: Request,
        events: AsyncGenerator[bytes, None],
        *,
        failure: Failure = _failure,
        done: bytes = _DONE,
    ) -> EventStream:
        """Wait for the first event, and return a response that begins with it.

        A request that fails before any output therefore gets the right status: 429 when the queue
        is full, 503 when the engine has died.

        Args:
            request: the client's request; its disconnection ends the generator.
            events: encoded events.
            failure: encodes the event for a later error.
            done: ends the stream.
        """
        return cls(
            await cancel_on_disconnect(request.receive, anext(events)), events, failure, done
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            try:
                await cancel_on_disconnect(receive, self._send(send))
            except ClientDisconnect:
                return

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        try:
            async for data in self._rest:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except (RequestError, EngineError) as error:
            failure = self._failure(error)
            await send({"type": "http.response.body", "body": failure, "more_body": True})
        except Exception:  # a bug: the client gets an event, and the server logs the exception
            failure = self._failure(INTERNAL_ERROR)
            await send({"type": "http.response.body", "body": failure + self._done})
            raise
        await send({"type": "http.response.body", "body": self._done})


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run work to its result, and cancel the work when the client disconnects.

    Args:
        receive: the request's ASGI channel, after the body has been read.
        work: the work.

    Raises:
        ClientDisconnect: the client disconnected first.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
