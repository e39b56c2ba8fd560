"""Middleware to refuse bodies with a wrong size, type or encoding before they are read."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.serving.api.errors import error_response

MAX_BODY = 32 * 1024 * 1024  # bytes; a prompt with a million tokens takes about 5 MB
MAX_UPLOAD = 2 * 1024 * 1024 * 1024  # bytes; uploads are written to the disk
_JSON = "application/json"


class BodyLimits:
    """ASGI middleware: 413 for a too large body, 415 for a wrong type or encoding.

    Bodies are JSON of up to `MAX_BODY`, and for /v1/files a form of up to `MAX_UPLOAD`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        upload = scope["path"] == "/v1/files"
        wanted, most = ("multipart/form-data", MAX_UPLOAD) if upload else (_JSON, MAX_BODY)
        kind, length = headers.get("content-type", ""), headers.get("content-length", "0")
        empty = length == "0" and "transfer-encoding" not in headers
        if not (kind or empty or upload):  # without a type it is JSON
            kind = _JSON
            scope = {**scope, "headers": [*scope["headers"], (b"content-type", kind.encode())]}
        if kind.partition(";")[0].strip().lower() != wanted and (kind or not empty):
            message = f"the content type is {kind!r}; send {wanted}"
            await error_response(415, message)(scope, receive, send)
            return
        coding = headers.get("content-encoding", "identity").strip().lower()
        if coding != "identity":
            message = f"the content encoding is {coding!r}; send the body as it is, uncompressed"
            accepted = {"accept-encoding": "identity"}
            await error_response(415, message, headers=accepted)(scope, receive, send)
            return
        if not length.isdecimal() or int(length) > most:
            # The connection is closed, so the body need not be read.
            response = error_response(413, _too_large(most), headers={"connection": "close"})
            await response(scope, receive, send)
            return
        await self._app(scope, _counted(receive, most), send)


def _counted(receive: Receive, most: int) -> Receive:
    """Wrap the channel to raise an error once a body without a length is too large."""
    size = 0

    async def counting() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > most:
            raise HTTPException(413, _too_large(most), headers={"connection": "close"})
        return message

    return counting


def _too_large(most: int) -> str:
    return f"the body is too large; the maximum is {most} bytes"
