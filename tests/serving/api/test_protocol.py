"""Clients that send slowly: a request has to arrive in time, an answer may take its time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from weft.serving.api import protocol

HEAD = b"POST / HTTP/1.1\r\nhost: a\r\n"


async def slow_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the body, then takes longer than a request may take to arrive."""
    with contextlib.suppress(ClientDisconnect):
        await Request(scope, receive).body()
        await asyncio.sleep(0.6)
        await PlainTextResponse("done")(scope, receive, send)


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(protocol, "ARRIVAL_TIMEOUT", 0.3)
    bounded: Any = partial(protocol.BoundedProtocol, write_timeout=60.0)
    config = uvicorn.Config(
        slow_app, port=0, http=bounded, ws="none", lifespan="off", log_config=None
    )
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await running


async def ask(port: int, *parts: bytes) -> bytes:
    """What comes back until the server hangs up; the parts are sent a moment apart."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
        await asyncio.sleep(0.01)
    answer = await asyncio.wait_for(reader.read(), timeout=5)
    writer.close()
    return answer


@pytest.mark.parametrize(
    "sent",
    [b"PO", HEAD, HEAD + b"content-length: 10\r\n\r\nabc"],
    ids=["a letter", "half a head", "half a body"],
)
async def test_a_request_that_does_not_arrive_is_408(port: int, sent: bytes) -> None:
    answer = await ask(port, sent)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_timeout"' in answer


async def test_an_idle_connection_is_closed_without_a_word(port: int) -> None:
    assert await ask(port, b"") == b""


async def test_a_slow_answer_is_no_fault(port: int) -> None:
    head = HEAD + b"connection: close\r\ncontent-length: 3\r\n\r\n"
    answer = await ask(port, head[:20], head[20:], b"a", b"bc")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"done")
