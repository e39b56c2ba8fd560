"""A fault of ours in queueing, reading or writing one request fails that request alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from starlette.requests import Request
from support.engine import FAST, collect, idle, params, started, tokens
from support.mock_runner import expected

from weft.errors import EngineError, RequestError
from weft.serving.api.openai.replies import Status
from weft.serving.api.streaming import EventStream, event
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.engine import AsyncEngine
from weft.serving.engine.prefix_keys import pack_prompt
from weft.serving.engine.protocol import Add, TokenOutput
from weft.serving.engine.request_stream import RequestStream
from weft.serving.engine.scheduler.scheduler import Scheduler

VICTIM = [7, 7, 7]
OTHERS = [[1, 2], [3, 4, 5], [6]]


@pytest.fixture
async def engine(config: EngineConfig) -> AsyncIterator[AsyncEngine]:
    """With its core in a thread, where a test can break it."""
    async with started(config, in_process=True, runner_factory=FAST) as engine:
        yield engine


async def check_the_others(engine: AsyncEngine, **victims: Any) -> BaseException | list[Any]:
    """The victim's answer, or what was raised for it; the others get theirs, now and later."""
    for _ in range(2):
        answers = await asyncio.gather(
            collect(engine, VICTIM, params(**victims)),
            *(collect(engine, prompt, params()) for prompt in OTHERS),
            return_exceptions=True,
        )
        for prompt, deltas in zip(OTHERS, answers[1:], strict=True):
            assert isinstance(deltas, list)
            assert tokens(deltas) == expected(prompt, 20)
        await idle(engine)
    assert engine.status == "ready"
    return answers[0]


async def test_a_fault_in_queueing_a_request(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add = Scheduler.add

    def broken(self: Scheduler, request: Add, *more: Any) -> None:
        if request.prompt.tokens == pack_prompt(VICTIM, None).tokens:
            raise ZeroDivisionError("in the scheduler")
        add(self, request, *more)

    monkeypatch.setattr(Scheduler, "add", broken)
    deltas = await check_the_others(engine)
    assert isinstance(deltas, list)
    assert deltas[-1].finish_reason == "error"
    assert "could not be queued" in deltas[-1].error
    assert "in the scheduler" in caplog.text


@pytest.mark.parametrize("fails_at", [1, 5])
async def test_a_fault_in_reading_its_output(
    engine: AsyncEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fails_at: int,
) -> None:
    push = RequestStream.push

    def broken(self: RequestStream, output: TokenOutput) -> bool:
        complete = push(self, output)
        if self._count == fails_at and self._min_tokens == 2:
            raise ZeroDivisionError("in the detokenizer")
        return complete

    monkeypatch.setattr(RequestStream, "push", broken)
    error = await check_the_others(engine, min_tokens=2)
    assert isinstance(error, RequestError)
    assert (error.status, error.code) == (500, "generation_failed")
    assert "in the detokenizer" in caplog.text


@pytest.mark.parametrize("failure", [ZeroDivisionError("in a writer"), EngineError("it died")])
async def test_a_fault_in_writing_a_stream_is_its_last_event(failure: Exception) -> None:
    """Of an error that is ours the client hears only that it was."""

    async def events() -> AsyncIterator[bytes]:
        yield event(Status("one"))
        raise failure

    async def receive() -> dict[str, Any]:
        return await asyncio.Future()

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    stream = await EventStream.start(Request(scope, receive), events())
    if isinstance(failure, EngineError):
        await stream(scope, receive, send)
    else:
        with pytest.raises(ZeroDivisionError):  # for the log
            await stream(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in sent)
    first, last, done, _ = body.split(b"\n\n")
    assert msgspec.json.decode(first.removeprefix(b"data: ")) == {"status": "one"}
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert error["type"] == "server_error"
    assert "in a writer" not in error["message"]
    assert done == b"data: [DONE]"
    assert not sent[-1].get("more_body")
