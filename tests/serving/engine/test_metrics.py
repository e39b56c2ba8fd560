"""Measurements on an answer's stream, and vLLM's names for metrics."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from support.server import Server, start_server
from support.tokenizers import write_byte_level

from weft.serving.engine.metrics import Metrics, Phases
from weft.serving.engine.request_stream import Delta


def run(metrics: Metrics, *deltas: Delta, failed: bool = False) -> None:
    """Report an answer as `AsyncEngine.generate` does."""
    observer = metrics.observer(Phases(3))
    for delta in deltas:
        observer.on_delta(delta)
    if failed:
        observer.on_error()
    observer.on_end()


def count(metrics: Metrics, reason: str | None = None) -> int:
    """Answers that have ended, by what is rendered."""
    name = "weft_answers_total{" if reason else "weft_e2e_request_latency_seconds_count{"
    lines = metrics.render().decode().splitlines()
    found = [x for x in lines if x.startswith(name) and (not reason or f'"{reason}"' in x)]
    return sum(int(float(line.split()[-1])) for line in found)


def test_a_refused_request_says_nothing_of_the_engine() -> None:
    metrics = Metrics(lambda: None, "m")
    run(metrics, failed=True)
    assert count(metrics) == 0
    assert count(metrics, "abort") == count(metrics, "error") == 0


def test_ends_are_counted_by_their_reason() -> None:
    metrics = Metrics(lambda: None, "m")
    first, last = Delta("a", (1,)), Delta("b", (2,), "length")
    run(metrics, first, last)
    run(metrics, first, failed=True)
    run(metrics, first)
    run(metrics)  # its client went while it waited
    assert [count(metrics, reason) for reason in ("length", "error", "abort")] == [1, 1, 2]
    assert count(metrics) == 4


def test_tokens_that_come_together_count_each() -> None:
    metrics = Metrics(lambda: None, "m")
    run(metrics, Delta("a", (1, 2, 3)), Delta("b", (4, 5)))
    text = metrics.render().decode()
    assert 'weft_time_to_first_token_seconds_count{model="m"} 1.0' in text
    assert 'weft_inter_token_latency_seconds_count{model="m"} 4.0' in text


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("metrics")
    model, loader = write_byte_level(path / "mock"), "support.mock_runner:load"
    with start_server(model, path, loader=loader, vllm_metrics=True) as server:
        for prompt in ([1, 2], [3, 4, 5], list(range(1, 40)), list(range(1, 40))):
            body = {"model": "mock", "prompt": prompt, "max_tokens": 4}
            assert server.http.post("/v1/completions", json=body).status_code == 200
        yield server


def scrape(server: Server) -> dict[str, Metric]:
    """Families by name."""
    text = server.http.get("/metrics").text
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    return {family.name: family for family in families}


@pytest.mark.parametrize(
    ("weft", "vllm", "kind"),
    [
        ("requests_running", "num_requests_running", "gauge"),
        ("requests_waiting", "num_requests_waiting", "gauge"),
        ("kv_cache_usage_ratio", "kv_cache_usage_perc", "gauge"),
        ("kv_cache_usage_ratio", "gpu_cache_usage_perc", "gauge"),
        ("prefix_cache_queries", "prefix_cache_queries", "counter"),
        ("prefix_cache_hits", "prefix_cache_hits", "counter"),
        ("preemptions", "num_preemptions", "counter"),
        ("prompt_tokens", "prompt_tokens", "counter"),
        ("generation_tokens", "generation_tokens", "counter"),
        ("answers", "request_success", "counter"),
        ("time_to_first_token_seconds", "time_to_first_token_seconds", "histogram"),
        ("inter_token_latency_seconds", "inter_token_latency_seconds", "histogram"),
        ("inter_token_latency_seconds", "time_per_output_token_seconds", "histogram"),
        ("e2e_request_latency_seconds", "e2e_request_latency_seconds", "histogram"),
        ("queue_time_seconds", "request_queue_time_seconds", "histogram"),
        ("request_prompt_tokens", "request_prompt_tokens", "histogram"),
        ("request_output_tokens", "request_generation_tokens", "histogram"),
    ],
)
def test_vllms_names_have_the_same_values(server: Server, weft: str, vllm: str, kind: str) -> None:
    families = scrape(server)
    own, alias = families[f"weft_{weft}"], families[f"vllm:{vllm}"]
    assert alias.type == kind
    assert [s.value for s in alias.samples] == [s.value for s in own.samples]
    for sample in alias.samples:
        assert sample.name.startswith(f"vllm:{vllm}")
        assert sample.labels.pop("engine") == "0"
        assert sample.labels.pop("model_name") == "mock"
        assert sample.labels.keys() <= {"le", "finished_reason"}


def test_endpoint_pickers_find_the_size_of_the_cache(server: Server) -> None:
    families = scrape(server)
    (info,) = families["vllm:cache_config_info"].samples
    (blocks,) = families["weft_kv_cache_blocks"].samples
    assert info.value == 1
    assert int(info.labels["num_gpu_blocks"]) == blocks.value > 0
    assert info.labels["block_size"] == "16"


def test_vllms_names_are_off_by_default() -> None:
    assert b"vllm:" not in Metrics(lambda: None, "m").render()
