"""Metrics of a server, in Prometheus' text format.

They have two sources. A scrape reads the engine's last snapshot, summed over its cores: queue, KV
cache, and counters since the start. Latencies are measured on the stream of each answer, as users
see them.

Autoscalers and endpoint pickers look for vLLM's names. With `--vllm-metrics`, a scrape repeats
some metrics under those names, with vLLM's labels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, Sample
from prometheus_client.registry import Collector

from weft.serving.engine.request_stream import Delta, StreamObserver

if TYPE_CHECKING:
    from weft.serving.engine.engine import AsyncEngine

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_SECONDS_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"})
_TOKENS = tuple(float(2**i) for i in range(21))


_VLLM_NAMES = {
    "weft_requests_running": ("num_requests_running",),
    "weft_requests_waiting": ("num_requests_waiting",),
    "weft_kv_cache_usage_ratio": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "weft_prefix_cache_queries": ("prefix_cache_queries",),
    "weft_prefix_cache_hits": ("prefix_cache_hits",),
    "weft_preemptions": ("num_preemptions",),
    "weft_prompt_tokens": ("prompt_tokens",),
    "weft_generation_tokens": ("generation_tokens",),
    "weft_time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "weft_inter_token_latency_seconds": (
        "inter_token_latency_seconds",
        "time_per_output_token_seconds",
    ),
    "weft_e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
    "weft_queue_time_seconds": ("request_queue_time_seconds",),
    "weft_request_prompt_tokens": ("request_prompt_tokens",),
    "weft_request_output_tokens": ("request_generation_tokens",),
    "weft_answers": ("request_success",),
}
_VLLM_LABELS = {"model": "model_name", "finish_reason": "finished_reason"}


@dataclass
class Phases:
    """Token counts and times of one answer.

    Attributes:
        prompt_tokens, output_tokens: number of tokens.
        arrival, first_token, end: time.monotonic() of the event; 0 before it.
        queued: seconds from arrival to the first step; None before.
        reason: why the answer ended, as `Delta.finish_reason`; "" for a refused request.
    """

    prompt_tokens: int
    output_tokens: int = 0
    arrival: float = field(default_factory=time.monotonic)
    queued: float | None = None
    first_token: float = 0.0
    end: float = 0.0
    reason: str = ""


class Metrics:
    """The metrics of one server.

    Args:
        engine: returns the engine, or None while it loads.
        model: the model's name in the API; a label on every metric here.
        vllm: repeat metrics under vLLM's names.
    """

    def __init__(
        self, engine: Callable[[], AsyncEngine | None], model: str, *, vllm: bool = False
    ) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, model))
        self._vllm = CollectorRegistry()
        if vllm:
            self._vllm.register(_VllmCollector(self._registry, engine))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(
                f"weft_{name}", text, ["model"], buckets=buckets, registry=self._registry
            )
            return metric.labels(model)

        self._first_token = histogram(
            "time_to_first_token_seconds", "From arrival to the first token", _SECONDS
        )
        self._queued = histogram(
            "queue_time_seconds", "From arrival to the answer's first step", _SECONDS
        )
        self._between_tokens = histogram(
            "inter_token_latency_seconds", "From one token to the next", _SECONDS_PER_TOKEN
        )
        self._end_to_end = histogram(
            "e2e_request_latency_seconds", "From arrival to the last token", _SECONDS
        )
        self._prompt_tokens = histogram("request_prompt_tokens", "Tokens per prompt", _TOKENS)
        self._output_tokens = histogram("request_output_tokens", "Tokens per answer", _TOKENS)
        self._answers = Counter(
            "weft_answers",
            "Finished answers, by reason: stop, length, abort or error",
            ["model", "finish_reason"],
            registry=self._registry,
        )
        self._http = Counter(
            "weft_http_requests",
            "Finished HTTP requests",
            ["route", "method", "status"],
            registry=self._registry,
        )
        self._refused = Counter(
            "weft_requests_refused",
            "HTTP requests answered with an error, by error code",
            ["reason"],
            registry=self._registry,
        )
        self._model = model

    def count_http(self, route: str, method: str, status: int, error: str | None) -> None:
        """Count an HTTP request that has ended, and the code of its error, if it failed."""
        self._http.labels(route, method if method in _METHODS else "other", status).inc()
        if error is not None:
            self._refused.labels(error).inc()

    def render(self) -> bytes:
        """Write all metrics in Prometheus' text format."""
        return generate_latest(self._registry) + generate_latest(self._vllm)

    def observer(self, phases: Phases) -> StreamObserver:
        """Return callbacks for `AsyncEngine.generate` that measure one answer."""
        return _AnswerObserver(self, phases)

    def count_answer(self, phases: Phases) -> None:
        """Count an answer that has ended."""
        self._prompt_tokens.observe(phases.prompt_tokens)
        self._output_tokens.observe(phases.output_tokens)
        self._end_to_end.observe(phases.end - phases.arrival)
        if phases.queued is not None:
            self._queued.observe(phases.queued)
        self._answers.labels(self._model, phases.reason).inc()

    def count_tokens(self, seconds: float, count: int, *, first: bool) -> None:
        """Measure `count` tokens that came together, `seconds` after the tokens before."""
        if first:
            self._first_token.observe(seconds)
            seconds, count = 0.0, count - 1  # the other tokens came at the same time
        for _ in range(count):
            self._between_tokens.observe(seconds / count)


class _AnswerObserver(StreamObserver):
    """Measures one answer as its reader gets it."""

    def __init__(self, metrics: Metrics, phases: Phases) -> None:
        self._metrics = metrics
        self._phases = phases
        self._last = phases.arrival
        self._reason: str | None = "abort"  # unless the answer gets to its end

    def on_delta(self, delta: Delta) -> None:
        phases = self._phases
        if delta.queued is not None:
            phases.queued = delta.queued
        if delta.token_ids:
            now, count = time.monotonic(), len(delta.token_ids)
            self._metrics.count_tokens(now - self._last, count, first=phases.output_tokens == 0)
            phases.first_token = phases.first_token or now
            phases.output_tokens += count
            self._last = now
        if delta.finish_reason is not None:
            self._reason = delta.finish_reason

    def on_error(self) -> None:
        # A refused request says nothing about the engine, so it is not counted.
        self._reason = "error" if self._phases.output_tokens else None

    def on_end(self) -> None:
        if self._reason is not None:
            self._phases.end, self._phases.reason = time.monotonic(), self._reason
            self._metrics.count_answer(self._phases)


class _EngineCollector(Collector):
    """Reads the engine's snapshot at each scrape."""

    def __init__(self, engine: Callable[[], AsyncEngine | None], model: str) -> None:
        self._engine = engine
        self._model = model

    def collect(self) -> Iterator[Metric]:
        engine = self._engine()
        if engine is None:
            return
        stats = engine.stats
        used, total = stats.kv_blocks_used, stats.kv_blocks_total
        gauges = {
            "requests_running": ("Requests in the batch", stats.running),
            "requests_waiting": ("Requests in the queue", stats.waiting),
            "kv_cache_usage_ratio": ("Share of blocks in use", used / total if total else 0.0),
            "kv_cache_blocks": ("Total KV cache blocks", total),
            "engine_cores": ("Engine cores that serve", engine.serving),
        }
        counters = {
            "engine_restarts": ("Engine core restarts", engine.restarts),
            "prefix_cache_queries": ("Prompt tokens looked up in the cache", stats.prefix_queries),
            "prefix_cache_hits": ("Prompt tokens found in the cache", stats.prefix_hits),
            "preemptions": ("Requests preempted to free their blocks", stats.preemptions),
            "engine_steps": ("Model steps", stats.steps),
            "engine_step_seconds": ("Time spent in steps", stats.step_seconds),
            "engine_compilations": (
                "Kernels or programs compiled while a step waited",
                stats.compilations,
            ),
            "busiest_rank_expert_rows": (
                "Rows for experts on the rank with the most, with --redundant-experts",
                stats.busiest_expert_rows,
            ),
            "mean_rank_expert_rows": (
                "Rows for experts on a rank on average, with --redundant-experts",
                stats.mean_expert_rows,
            ),
            "prompt_tokens": ("Prompt tokens computed or cached", stats.prompt_tokens),
            "generation_tokens": ("Generated tokens", stats.generation_tokens),
        }
        step_seconds = CounterMetricFamily(
            "weft_rank_step_seconds", "Time spent in steps by each rank", labels=["model", "rank"]
        )
        for rank, seconds in enumerate(stats.rank_seconds or (stats.step_seconds,)):
            step_seconds.add_metric([self._model, str(rank)], seconds)
        yield step_seconds
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"weft_{name}", text, labels=["model"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(f"weft_{name}", text, labels=["model"])
            counter.add_metric([self._model], value)
            yield counter


class _VllmCollector(Collector):
    """Repeats a registry's metrics under vLLM's names. Buckets stay weft's."""

    def __init__(
        self, registry: CollectorRegistry, engine: Callable[[], AsyncEngine | None]
    ) -> None:
        self._registry = registry
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            for name in _VLLM_NAMES.get(family.name, ()):
                yield _renamed(family, f"vllm:{name}")
        if (engine := self._engine()) is not None:
            labels = {
                "engine": "0",
                "block_size": str(engine.info.block_size),
                "num_gpu_blocks": str(engine.stats.kv_blocks_total),
                "enable_prefix_caching": str(engine.config.prefix_caching),
                "gpu_memory_utilization": str(engine.info.memory_fraction),
            }
            info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache", labels=list(labels))
            info.add_metric(list(labels.values()), 1)
            yield info


def _renamed(family: Metric, name: str) -> Metric:
    """Return a metric's copy with another name, and with vLLM's labels."""
    renamed = Metric(name, family.documentation, family.type)
    for sample in family.samples:
        labels = {_VLLM_LABELS.get(key, key): value for key, value in sample.labels.items()}
        labels["engine"] = "0"
        suffix = sample.name.removeprefix(family.name)
        renamed.samples.append(Sample(name + suffix, labels, sample.value, sample.timestamp))
    return renamed
