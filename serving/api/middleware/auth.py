"""What stands before the application: API keys on every route, and who may ask from a browser."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.errors import RequestError
from weft.serving.api.admin import playground
from weft.serving.api.errors import error_response, refused
from weft.serving.api.middleware.keys import Keyring
from weft.serving.api.middleware.request_context import current
from weft.serving.config.settings import ServerConfig

_FOR_PROBES = frozenset({"/health", "/ready"})  # which have no keys


def open_paths(config: ServerConfig) -> frozenset[str] | None:
    """The paths that need no key; None where none does."""
    if config.api_key is None and config.api_key_file is None:
        return None
    paths = _FOR_PROBES | playground.PATHS  # which ask for a key, and send it
    return paths | {"/metrics"} if config.open_metrics else paths


class KeyGuard:
    """ASGI middleware: 401 without a right key, 429 beyond what the key may have.

    Args:
        app: what is behind it.
        keys: all of them, at least one.
        open_paths: for everybody.
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
        # A body is not read, but for what has come: the connection ends with the answer.
        close = {} if scope["method"] == "GET" else {"connection": "close"}
        if key is None:
            response = error_response(
                401,
                "no API key, or not one of this server's; send Authorization: Bearer KEY",
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
            await refused(error, close)(scope, receive, send)
            return
        key.running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            key.running -= 1


def _presented(headers: Headers) -> str:
    """The key in `Authorization: Bearer`, or in Anthropic's `x-api-key`."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return (key if scheme.lower() == "bearer" else headers.get("x-api-key", "")).strip()
