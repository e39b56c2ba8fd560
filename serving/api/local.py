"""Calls to the routes of the HTTP API without a socket, for rows of batches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec

from weft.errors import EngineError
from weft.serving.api.middleware.request_context import admit

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message

logger = logging.getLogger(__name__)

WAITS = 0.1, 1.0  # seconds until a refused row is tried again: the first and the longest wait


class LocalApi:
    """Calls the routes of an ASGI application in this process."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def post(
        self, path: str, body: bytes, admitted: Callable[[], Awaitable[None]] | None = None
    ) -> tuple[int, bytes]:
        """Post a JSON body, and wait while the server has no room for it (429).

        Args:
            path: the route's path.
            body: JSON.
            admitted: each answer to this body awaits it before it is queued.

        Returns:
            The status and the body of the response.

        Raises:
            EngineError: the engine can no longer serve, or failed while it had this request.
        """
        admit.set(admitted)  # in this task and in the tasks that it starts
        wait, most = WAITS
        while True:
            status, answer = await self._post(path, body)
            if status == HTTPStatus.SERVICE_UNAVAILABLE:
                raise EngineError(msgspec.json.decode(answer)["error"]["message"])
            if status != HTTPStatus.TOO_MANY_REQUESTS:
                return status, answer
            await asyncio.sleep(wait)
            wait = min(2 * wait, most)

    async def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        request: list[Message] = [{"type": "http.request", "body": body}]
        response: list[Message] = []

        async def receive() -> Message:
            if request:
                return request.pop()
            return await asyncio.Future()  # this client never disconnects

        async def send(message: Message) -> None:
            response.append(message)

        try:
            await self._app(scope, receive, send)
        except Exception:
            if not response:
                raise
            # The response is a 500. As in a server, the exception is logged and others go on.
            logger.exception("a row failed unexpectedly")
        return response[0]["status"], b"".join(part.get("body", b"") for part in response)
