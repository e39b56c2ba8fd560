"""What is measured on the stream of an answer, and what is not."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from weft.errors import EngineError, RequestError, WeftError
from weft.serving.engine.engine import Delta
from weft.serving.engine.metrics import Metrics, Phases


async def answer(failure: WeftError | None, *deltas: Delta) -> AsyncGenerator[Delta, None]:
    for delta in deltas:
        yield delta
    if failure is not None:
        raise failure


def count(metrics: Metrics, reason: str | None = None) -> int:
    """Answers that have ended, by what is rendered."""
    name = "weft_answers_total{" if reason else "weft_e2e_request_latency_seconds_count{"
    lines = metrics.render().decode().splitlines()
    found = [x for x in lines if x.startswith(name) and (not reason or f'"{reason}"' in x)]
    return sum(int(float(line.split()[-1])) for line in found)


@pytest.mark.parametrize(
    "failure", [RequestError("the queue is full", status=429), EngineError("it is draining")]
)
async def test_a_refused_request_says_nothing_of_the_engine(failure: WeftError) -> None:
    metrics = Metrics(lambda: None, "m")
    with pytest.raises(WeftError):
        async for _ in metrics.observe(answer(failure), Phases(3)):
            pass
    assert count(metrics) == 0
    assert count(metrics, "abort") == count(metrics, "error") == 0


async def test_ends_are_counted_by_their_reason() -> None:
    metrics = Metrics(lambda: None, "m")
    first, last = Delta("a", (1,)), Delta("b", (2,), "length")
    async for _ in metrics.observe(answer(None, first, last), Phases(3)):
        pass
    with pytest.raises(EngineError):
        async for _ in metrics.observe(answer(EngineError("it died"), first), Phases(3)):
            pass
    left = metrics.observe(answer(None, first, last), Phases(3))
    await anext(left)
    await left.aclose()
    assert [count(metrics, reason) for reason in ("length", "error", "abort")] == [1, 1, 1]
    assert count(metrics) == 3


async def test_tokens_that_come_together_count_each() -> None:
    metrics = Metrics(lambda: None, "m")
    async for _ in metrics.observe(
        answer(None, Delta("a", (1, 2, 3)), Delta("b", (4, 5))), Phases(3)
    ):
        pass
    text = metrics.render().decode()
    assert 'weft_time_to_first_token_seconds_count{model="m"} 1.0' in text
    assert 'weft_inter_token_latency_seconds_count{model="m"} 4.0' in text
