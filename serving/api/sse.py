"""Server-sent events: one `data:` line of JSON for each piece of an answer.

Source: the HTML standard, section 9.2, and OpenAI's closing `data: [DONE]`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from fastapi import Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from weft.errors import EngineError, RequestError
from weft.serving.api.connection import unless_gone
from weft.serving.api.errors import FAULT, told

_DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def event(content: msgspec.Struct) -> bytes:
    """One event, as it goes over the wire."""
    return b"data: " + _encode(content) + b"\n\n"


class EventStream(Response):
    """Sends events as they come, then `[DONE]`; closes the generator when the client goes.

    An error after the first event is itself an event, because the status has been sent.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest

    @classmethod
    async def start(cls, request: Request, events: AsyncGenerator[bytes, None]) -> EventStream:
        """A response that begins with the first event.

        It is awaited here, so that a request that fails before any output gets the status that
        says so: 429 when the queue is full, 503 when the engine has died.
        """
        return cls(await unless_gone(request.receive, anext(events)), events)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            try:
                await unless_gone(receive, self._send(send))
            except ClientDisconnect:
                return

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        try:
            async for data in self._rest:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except (RequestError, EngineError) as error:
            failure = event(told(error))
            await send({"type": "http.response.body", "body": failure, "more_body": True})
        except Exception:  # a fault of ours: the client is told, and the log by who gets it next
            failure = event(told(FAULT))
            await send({"type": "http.response.body", "body": failure + _DONE})
            raise
        await send({"type": "http.response.body", "body": _DONE})
