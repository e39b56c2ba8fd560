"""Server-sent events: one `data:` line of JSON for each piece of an answer.

Source: the HTML standard, section 9.2, and OpenAI's closing `data: [DONE]`.
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
from weft.serving.api.errors import FAULT, told

T = TypeVar("T")

_DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def event(content: msgspec.Struct) -> bytes:
    """One event, as it goes over the wire."""
    return b"data: " + _encode(content) + b"\n\n"


def typed_event(content: msgspec.Struct) -> bytes:
    """One event that is named by the tag of its struct, as it goes over the wire."""
    name = str(content.__struct_config__.tag).encode()
    return b"event: " + name + b"\ndata: " + _encode(content) + b"\n\n"


Failure = Callable[[RequestError | EngineError], bytes]


def _failure(error: RequestError | EngineError) -> bytes:
    return event(told(error))


class EventStream(Response):
    """Sends events as they come, then `done`; closes the generator when the client goes.

    An error after the first event is itself an event, because the status has been sent.
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
        """A response that begins with the first event.

        `failure` makes the event for an error after that, and `done` ends the stream.

        It is awaited here, so that a request that fails before any output gets the status that
        says so: 429 when the queue is full, 503 when the engine has died.
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
        except Exception:  # a fault of ours: the client is told, and the log by who gets it next
            failure = self._failure(FAULT)
            await send({"type": "http.response.body", "body": failure + self._done})
            raise
        await send({"type": "http.response.body", "body": self._done})


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, which is cancelled when the client disconnects.

    Args:
        receive: the request's ASGI channel, its body already read.

    Raises:
        ClientDisconnect: the client went first.
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
