"""Errors in Anthropic's shape, and the header `request-id`, for Anthropic's routes.

Source of the types: Anthropic's API reference, "Errors".
"""

from __future__ import annotations

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.serving.api.anthropic.events import AnthropicError, AnthropicErrorDetail, ErrorDetails
from weft.serving.api.errors import Error, ErrorResponse
from weft.serving.api.middleware.request_context import current

_PATH = "/v1/messages"
_error = msgspec.json.Decoder(ErrorResponse)
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_anthropics(path: str) -> bool:
    """Return whether a path belongs to Anthropic's API."""
    return path == _PATH or path.startswith(_PATH + "/")


def anthropic_error(status: int, error: Error) -> AnthropicError:
    """Return the body for an error status. Batch rows have no `request_id`."""
    kind = _TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    detail = AnthropicErrorDetail(kind, error.message)
    if error.code is not None:
        detail.details = ErrorDetails(error.code)
    context = current.get()
    return AnthropicError(detail, None if context is None else context.id)


class AnthropicErrors:
    """ASGI middleware to rewrite errors from OpenAI's shape; it must wrap every sender of errors.

    It also adds the header `request-id` for Anthropic's SDK.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_anthropics(scope["path"]):
            await self._app(scope, receive, send)
            return
        start: Message | None = None
        body = b""

        async def rewriting(message: Message) -> None:
            nonlocal start, body
            context = current.get()
            if message["type"] == "http.response.start" and context is not None:
                MutableHeaders(scope=message)["request-id"] = context.id
            if message["type"] == "http.response.start" and message["status"] >= 400:
                start = message
                return
            if start is None:
                await send(message)
                return
            body += message.get("body", b"")
            if not message.get("more_body", False):
                body = _rewritten(start["status"], body)
                MutableHeaders(scope=start)["content-length"] = str(len(body))
                await send(start)
                await send({"type": "http.response.body", "body": body})

        await self._app(scope, receive, rewriting)


def _rewritten(status: int, body: bytes) -> bytes:
    if not body:  # the client has disconnected
        return body
    error = _error.decode(body).error
    return msgspec.json.encode(anthropic_error(status, error))
