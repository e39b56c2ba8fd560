"""What is measured on the stream of an answer, and what is not."""

from __future__ import annotations

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
