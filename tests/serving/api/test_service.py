"""The routes for those who run the server: models, health, metrics, version, OpenAPI."""

from __future__ import annotations

import httpx
import pytest
from support.server import Server

from weft.version import __version__


def test_models(http: httpx.Client) -> None:
    (model,) = http.get("/v1/models").json()["data"]
    assert model["id"] == "tiny"
    assert model["max_model_len"] == 512
    assert http.get("/v1/models/tiny").json() == model
    missing = http.get("/v1/models/org/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_health_ready_version(http: httpx.Client) -> None:
    health = http.get("/health").json()
    assert (health["status"], health["engine"], health["progressing"]) == ("ok", "ready", True)
    assert http.get("/ready").json() == {"status": "ready"}
    assert http.get("/version").json() == {"version": __version__}


@pytest.mark.parametrize("path", ["/", "/health", "/ready"])
def test_monitors_may_ask_for_the_head_alone(http: httpx.Client, path: str) -> None:
    head, whole = http.head(path), http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(whole.content))


def test_load_generators_may_look_for_metrics(http: httpx.Client) -> None:
    head = http.head("/metrics")
    assert (head.status_code, head.content) == (200, b"")


def test_metrics(server: Server, http: httpx.Client) -> None:
    def count(name: str) -> float:
        return server.metric(name)

    names = (
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count",
        "e2e_request_latency_seconds_count",
        "request_prompt_tokens_sum",
        "request_output_tokens_sum",
    )
    before = {name: count(name) for name in names}
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 10, "ignore_eos": True}
    assert http.post("/v1/completions", json=body).status_code == 200
    grown = {name: count(name) - before[name] for name in names}
    assert grown == dict(zip(names, (1, 9, 1, 3, 10), strict=True))
    text = http.get("/metrics").text
    assert 'weft_answers_total{finish_reason="length",model="tiny"}' in text
    for name in (
        "requests_waiting",
        "kv_cache_usage_ratio",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "preemptions_total",
        "engine_steps_total",
        "engine_step_seconds_total",
        "engine_compilations_total",
        "busiest_rank_expert_rows_total",
        "mean_rank_expert_rows_total",
        "prompt_tokens_total",
        "generation_tokens_total",
    ):
        assert count(name) >= 0


def test_the_openapi_document_is_whole(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    references = {
        part.split('"')[0] for part in http.get("/openapi.json").text.split("#/components/schemas/")
    }
    assert {name for name in references if name.isidentifier()} <= schemas.keys()
    assert {"CompletionRequest", "ChatRequest", "ChatCompletion", "ErrorResponse"} <= schemas.keys()
    assert "422" not in document["paths"]["/v1/completions"]["post"]["responses"]
    assert "security" not in document
    seed, _ = schemas["CompletionRequest"]["properties"]["seed"]["anyOf"]
    assert (seed["minimum"], seed["maximum"]) == (-(2**63), 2**63 - 1)
