"""OpenTelemetry spans for requests, sent to a collector by OTLP over HTTP (`--otlp-endpoint`).

A request's span has one child for each phase of each answer: "queue" until its first step,
"prefill" until its first token, "decode" until its last token. The spans are made after the request
has ended, from times that are measured anyway, so they never delay a step. A `traceparent` header
(W3C Trace Context) makes the span part of the client's trace, and decides whether it is recorded.
"""

from __future__ import annotations

import time

from opentelemetry.context import Context as SpanContext
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import Scope

from weft.serving.api.middleware.request_context import RequestContext
from weft.serving.engine.metrics import Phases
from weft.version import __version__

_TIMEOUT = 3.0  # seconds to send spans to the collector, retries included


class Tracer:
    """Makes spans, and sends them from its own thread.

    Args:
        endpoint: the collector's address, such as http://127.0.0.1:4318.
        model: the model's name in the API.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        resource = Resource.create({"service.name": "weft", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint.rstrip("/") + "/v1/traces", timeout=_TIMEOUT)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("weft")
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    def record(self, scope: Scope, route: str, context: RequestContext) -> None:
        """Make the spans for a request that has ended."""
        now, epoch = time.monotonic(), time.time() - time.monotonic()
        span = self._tracer.start_span(
            f"{scope['method']} {route}",
            self._propagator.extract(dict(Headers(scope=scope))),
            SpanKind.SERVER,
            {
                "http.request.method": scope["method"],
                "http.route": route,
                "http.response.status_code": context.status,
                "gen_ai.request.model": self._model,
                "gen_ai.usage.input_tokens": sum(each.prompt_tokens for each in context.answers),
                "gen_ai.usage.output_tokens": sum(each.output_tokens for each in context.answers),
                "gen_ai.response.finish_reasons": [each.reason for each in context.answers],
                "weft.request_id": context.id,
            },
            start_time=_nanoseconds(epoch + context.arrival),
        )
        if context.error is not None:
            span.set_attribute("error.type", context.error)
        if context.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        parent = set_span_in_context(span)
        for index, answer in enumerate(context.answers):
            self._record_phases(parent, index, answer, epoch)
        span.end(_nanoseconds(epoch + now))

    def _record_phases(self, parent: SpanContext, index: int, answer: Phases, epoch: float) -> None:
        begin = answer.arrival
        for name, end in (
            ("queue", None if answer.queued is None else answer.arrival + answer.queued),
            ("prefill", answer.first_token),
            ("decode", answer.end),
        ):
            end = end or answer.end  # the answer ended in this phase
            span = self._tracer.start_span(
                name,
                parent,
                attributes={"weft.answer": index},
                start_time=_nanoseconds(epoch + begin),
            )
            span.end(_nanoseconds(epoch + end))
            if end >= answer.end:
                break
            begin = end

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
