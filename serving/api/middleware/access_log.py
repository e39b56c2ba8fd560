"""The outermost middleware: it gives requests an id, and counts, logs and traces them."""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.serving.api.middleware.request_context import RequestContext, current
from weft.serving.config import logs
from weft.serving.config.logs import FIELDS
from weft.serving.engine.metrics import Metrics

if TYPE_CHECKING:
    from weft.serving.api.middleware.tracing import Tracer

_ID = re.compile(r"[!-~]{1,128}")  # visible ASCII, which is safe in headers and logs

logger = logging.getLogger("weft.requests")


class AccessLog:
    """ASGI middleware around all others.

    Args:
        app: the next application.
        metrics: counts the requests.
        tracer: makes spans of the requests; None for no spans.
        log: write a line for each request.
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, tracer: Tracer | None = None, *, log: bool = False
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._tracer = tracer
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = RequestContext(request_id(Headers(scope=scope).get("x-request-id")))
        current.set(context)  # in the request's own task, so it need not be reset
        logs.request_id.set(context.id)

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = context.id
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            # The declared path, such as /v1/models/{model}, because clients can invent others.
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.count_http(route, scope["method"], context.status, context.error)
            # An answer without a reason was refused before it ran, for example by a full queue.
            context.answers = [answer for answer in context.answers if answer.reason]
            if self._log:
                _write_line(scope, context)
            if self._tracer is not None and route not in _NOT_TRACED:
                self._tracer.record(scope, route, context)


_NOT_TRACED = frozenset({"/health", "/ready", "/metrics"})  # polled by probes and scrapers


def _write_line(scope: Scope, context: RequestContext) -> None:
    seconds = time.monotonic() - context.arrival
    fields: dict[str, Any] = {
        "method": scope["method"],
        "path": scope["path"],
        "status": context.status,
        "seconds": round(seconds, 4),
        "prompt_tokens": sum(answer.prompt_tokens for answer in context.answers),
        "output_tokens": sum(answer.output_tokens for answer in context.answers),
        "finish_reasons": [answer.reason for answer in context.answers],
        "key": None if context.key is None else context.key.name,
        "error": context.error,
    }
    if context.prompts is not None:
        fields["prompts"] = context.prompts
    shown = [f"{name}={value!r}" for name, value in list(fields.items())[2:] if value]
    line = f"{scope['method']} {scope['path']!a} {' '.join(shown)}"
    logger.info("%s", line, extra={FIELDS: fields})


def request_id(given: str | None) -> str:
    """Return the client's id if it is valid, else a new one."""
    if given is not None and _ID.fullmatch(given):
        return given
    return f"req-{uuid.uuid4().hex}"
