"""Middleware that asks for API keys."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.errors import RequestError
from weft.serving.api.admin import playground
from weft.serving.api.errors import error_reply, error_response
from weft.serving.api.middleware.keys import Keyring
from weft.serving.api.middleware.request_context import current
from weft.serving.config.settings import ServerConfig

_FOR_PROBES = frozenset({"/health", "/ready"})  # probes have no keys


def open_paths(config: ServerConfig) -> frozenset[str] | None:
    """Return the paths that need no key; None if the server has no keys."""
    if config.api_key is None and config.api_key_file is None:
        return None
    paths = _FOR_PROBES | playground.PATHS  # the page itself asks for a key, and sends it
    return paths | {"/metrics"} if config.open_metrics else paths


class KeyGuard:
    """ASGI middleware: 401 without a valid key, 429 above the key's limits.

    Args:
        app: the next application.
        keys: at least one.
        open_paths: paths that need no key.
    """

    def __init__(self, app: ASGIApp, keys: Keyring, open_paths: frozenset[str]) -> None:
        self._app = app
        self._keys = keys
        self._open = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in self._open:
            await self._app(scope, receive, send)
            return
        key = self._keys.find(_presented(Headers(scope=scope)))
        # The rest of the body is not read, so the connection ends with this response.
        close = {} if scope["method"] == "GET" else {"connection": "close"}
        if key is None:
            response = error_response(
                401,
                "the API key is missing or unknown; send Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"} | close,
            )
            await response(scope, receive, send)
            return
        if (context := current.get()) is not None:
            context.key = key
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            self._keys.check(key)
        except RequestError as error:
            await error_reply(error, close)(scope, receive, send)
            return
        key.running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            key.running -= 1


def _presented(headers: Headers) -> str:
    """Return the key in `Authorization: Bearer`, or in Anthropic's `x-api-key`."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return (key if scheme.lower() == "bearer" else headers.get("x-api-key", "")).strip()
