"""What is seen of requests from outside: logs with ids, and traces."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from support.server import Server, free_port, start_server
from support.tokenizers import write_byte_level

SLOW_MOCK = "support.mock_runner:load_slowly"
BODY = {"model": "mock", "prompt": "HELLO", "max_tokens": 20, "ignore_eos": True}
KEY = "sk-alice-0123456789"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@dataclass
class Collector:
    """An OTLP collector.

    Attributes:
        url: its endpoint.
        spans: that it was sent.
        services: their `service.name`.
    """

    url: str
    spans: list[Span] = field(default_factory=list)
    services: set[str] = field(default_factory=set)

    def take(self, data: bytes) -> None:
        """Keep what an exporter has sent."""
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            for attribute in resource.resource.attributes:
                if attribute.key == "service.name":
                    self.services.add(attribute.value.string_value)
            for scope in resource.scope_spans:
                self.spans += scope.spans


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            data = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                data = gzip.decompress(data)
            collector.take(data)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield collector
        server.shutdown()


@dataclass
class Seen:
    """What a server has left behind: its log's lines, and the answers that it gave."""

    log: list[dict[str, Any]]
    ids: dict[str, str]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Seen:
    """Of a server with JSON logs and traces, that has ended."""
    path = tmp_path_factory.mktemp("seen")
    keys = path / "keys"
    keys.write_text(f"{KEY} alice\n")
    settings = {"log_format": "json", "log_requests": True, "otlp_endpoint": collector.url}
    model = write_byte_level(path / "mock")
    with start_server(
        *(model, path),
        loader=SLOW_MOCK,
        api_key_file=str(keys),
        max_model_len=4096,
        max_num_seqs=4,
        max_queue=4,
        open_metrics=True,
        **settings,
    ) as server:
        kinds = ("good", "bad", "streamed", "traced", "several")
        ids = {kind: ask(server, kind) for kind in kinds}
        with ExitStack() as asked:
            long = BODY | {"max_tokens": 4000, "stream": True}
            for _ in range(8):
                asked.enter_context(server.ask(long, authorization=f"Bearer {KEY}"))
            server.wait_until("requests_waiting", 4)
            ids["full"] = ask(server, "full")
        server.http.get("/v1/models")  # without a key
        server.http.get("/ready")
    return Seen([json.loads(line) for line in server.log.read_text().splitlines()], ids)


def ask(server: Server, what: str) -> str:
    """Make a request, and give the id that it got."""
    headers = {"authorization": f"Bearer {KEY}"}
    body: dict[str, Any] = dict(BODY)
    match what:
        case "bad":
            body["n"] = 0
        case "streamed":
            body["stream"] = True
            headers["x-request-id"] = "my-own"
        case "traced":
            headers["traceparent"] = f"00-{TRACE}-{PARENT}-01"
        case "several":
            body["n"] = 3
            headers["traceparent"] = f"00-{TRACE}-{PARENT}-00"  # the client does not record it
    response = server.http.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == {"bad": 400, "full": 429}.get(what, 200)
    return response.headers["x-request-id"]


def test_each_line_is_json(seen: Seen) -> None:
    """Those of the engine's process, too."""
    for line in seen.log:
        assert {"time", "level", "logger", "message"} <= line.keys()
    assert any(line["message"].startswith("weft serves mock at ") for line in seen.log)


def of_requests(seen: Seen) -> dict[str, dict[str, Any]]:
    """The lines of requests, by their ids."""
    return {line["request_id"]: line for line in seen.log if line["logger"] == "weft.requests"}


def test_each_request_has_a_line_with_its_id(seen: Seen) -> None:
    lines = of_requests(seen)
    assert seen.ids["streamed"] == "my-own"
    for what in ("good", "streamed"):
        line = lines[seen.ids[what]]
        assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
        assert (line["prompt_tokens"], line["output_tokens"]) == (5, 20)
        assert line["finish_reasons"] == ["length"]
        assert line["key"] == "alice"
        assert 0.05 < line["seconds"] < 100
    assert lines[seen.ids["several"]]["output_tokens"] == 60
    bad = lines[seen.ids["bad"]]
    assert (bad["status"], bad["error"]) == (400, "invalid_request_error")
    (refused,) = [line for line in lines.values() if line["status"] == 401]
    assert (refused["key"], refused["error"]) == (None, "invalid_api_key")


def test_prompts_and_keys_are_in_no_log(seen: Seen) -> None:
    text = json.dumps(seen.log)
    assert "HELLO" not in text
    assert KEY not in text


def attributes(span: Span) -> dict[str, Any]:
    found = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        found[each.key] = getattr(each.value, kind)
    return found


def spans_of(collector: Collector, request_id: str) -> tuple[Span, list[Span]]:
    """A request's span, and its children in their order."""
    (span,) = [x for x in collector.spans if attributes(x).get("weft.request_id") == request_id]
    children = [each for each in collector.spans if each.parent_span_id == span.span_id]
    return span, sorted(children, key=lambda each: each.start_time_unix_nano)


def test_a_request_is_a_span_with_its_phases(seen: Seen, collector: Collector) -> None:
    span, phases = spans_of(collector, seen.ids["good"])
    assert collector.services == {"weft"}
    assert span.name == "POST /v1/completions"
    assert span.kind == Span.SPAN_KIND_SERVER
    assert span.parent_span_id == b""
    seen_attributes = attributes(span)
    assert seen_attributes["http.response.status_code"] == 200
    assert seen_attributes["gen_ai.usage.input_tokens"] == 5
    assert seen_attributes["gen_ai.usage.output_tokens"] == 20
    assert [phase.name for phase in phases] == ["queue", "prefill", "decode"]
    assert {phase.trace_id for phase in phases} == {span.trace_id}
    for first, second in pairwise(phases):
        assert first.end_time_unix_nano == second.start_time_unix_nano
    assert span.start_time_unix_nano <= phases[0].start_time_unix_nano
    assert phases[-1].end_time_unix_nano <= span.end_time_unix_nano
    # Twenty steps of 5 ms each; when the first token is seen, others may have been made.
    assert phases[-1].end_time_unix_nano - phases[0].start_time_unix_nano >= 20 * 0.005e9


def test_a_clients_trace_goes_on(seen: Seen, collector: Collector) -> None:
    span, phases = spans_of(collector, seen.ids["traced"])
    assert span.trace_id.hex() == TRACE
    assert span.parent_span_id.hex() == PARENT
    assert {phase.trace_id for phase in phases} == {span.trace_id}


def test_what_the_client_does_not_record_is_not_sent(seen: Seen, collector: Collector) -> None:
    found = {attributes(span).get("weft.request_id") for span in collector.spans}
    assert seen.ids["several"] not in found
    names = {span.name for span in collector.spans}
    assert "GET /ready" not in names


def test_a_refused_request_is_a_span_without_phases(seen: Seen, collector: Collector) -> None:
    span, phases = spans_of(collector, seen.ids["bad"])
    assert attributes(span)["error.type"] == "invalid_request_error"
    assert not phases


def test_a_full_queue_leaves_no_phases_of_answers_that_never_ran(
    seen: Seen, collector: Collector
) -> None:
    span, phases = spans_of(collector, seen.ids["full"])
    assert attributes(span)["error.type"] == "queue_full"
    assert attributes(span)["gen_ai.usage.input_tokens"] == 0
    assert not phases
    lines = [line for line in seen.log if line.get("request_id") == seen.ids["full"]]
    (reasons,) = [line["finish_reasons"] for line in lines if "finish_reasons" in line]
    assert reasons == []


def test_prompts_are_logged_when_asked_for_and_no_collector_is_no_fault(tmp_path: Path) -> None:
    model = write_byte_level(tmp_path / "mock")
    settings = {"log_prompts": True, "otlp_endpoint": f"http://127.0.0.1:{free_port()}"}
    with start_server(model, tmp_path, loader=SLOW_MOCK, **settings) as server:
        response = server.http.post("/v1/completions", json=BODY)
        assert response.status_code == 200
        server.wait_until_said("prompts=['HELLO']")
    assert server.process.returncode == 0
    (line,) = [x for x in server.log.read_text().splitlines() if "weft.requests" in x]
    assert line.endswith(f" [{response.headers['x-request-id']}]")
