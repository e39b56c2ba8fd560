"""Bodies that are too large, or not JSON, are refused before they are read."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.serving.api.errors import error_response

MAX_BODY = 32 * 1024 * 1024  # bytes; a prompt of a million tokens takes about five


class BodyLimits:
    """ASGI middleware: 413 for a body above `MAX_BODY`, 415 for one that is not JSON."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        kind = headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":
            message = f"the content type is {kind!r}; send application/json"
            await error_response(415, message)(scope, receive, send)
            return
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MAX_BODY:
            await _too_large(scope, receive, send)
            return
        await self._app(scope, _counted(receive), send)


async def _too_large(scope: Scope, receive: Receive, send: Send) -> None:
    # Closing spares reading the rest.
    response = error_response(413, _MESSAGE, headers={"connection": "close"})
    await response(scope, receive, send)


def _counted(receive: Receive) -> Receive:
    """The same channel, which raises once a body without a length gets too large."""
    size = 0

    async def counting() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > MAX_BODY:
            raise HTTPException(413, _MESSAGE, headers={"connection": "close"})
        return message

    return counting


_MESSAGE = f"the body is too large; at most {MAX_BODY} bytes"
