"""Clients that send slowly, wrongly or ahead: what each request of a connection gets."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from weft.serving.api import http
from weft.serving.api.streaming import cancel_on_disconnect

HEAD = b"POST / HTTP/1.1\r\nhost: a\r\n"


class App:
    """Reads a request's body, then takes longer than one may take to arrive.

    /stream answers in pieces in that time; /hasty at once, and reads nothing.

    Attributes:
        asked: paths, as they came.
        gone: paths whose client went before its answer.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.gone: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        self.asked.append(path)
        if path == "/hasty":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"has", "more_body": True})
        try:
            await Request(scope, receive).body()
            if path == "/stream":
                pieces = StreamingResponse(_pieces())
                await pieces(scope, receive, send)
            else:
                await cancel_on_disconnect(receive, asyncio.sleep(0.8))
                await PlainTextResponse(f"done {path};")(scope, receive, send)
        except ClientDisconnect:
            self.gone.append(path)


async def _pieces() -> AsyncIterator[bytes]:
    for piece in (b"one ", b"two ", b"three"):
        yield piece
        await asyncio.sleep(0.3)


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(http, "ARRIVAL_TIMEOUT", 0.5)
    return monkeypatch


@pytest.fixture
async def port(limits: pytest.MonkeyPatch, app: App) -> AsyncIterator[int]:
    bounded: Any = partial(
        http.BoundedProtocol,
        write_timeout=60.0,
        draining=lambda: False,
        waiting=http.Waiting(http.MAX_WAITING),
    )
    config = uvicorn.Config(app, port=0, http=bounded, ws="none", lifespan="off", log_config=None)
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
    answer = await asyncio.wait_for(reader.read(), timeout=60)
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
    assert answer.endswith(b"done /;")


def get(path: str) -> bytes:
    return b"GET %b HTTP/1.1\r\nhost: a\r\n\r\n" % path.encode()


# Requests that are sent ahead.


async def test_requests_sent_ahead_are_answered_in_their_order(app: App, port: int) -> None:
    last = HEAD.replace(b"/", b"/c", 1) + b"connection: close\r\ncontent-length: 3\r\n\r\nabc"
    answer = await ask(port, get("/a") + get("/stream") + last)
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    said = re.findall(rb"done /.;|one|two|three", answer)
    assert said == [b"done /a;", b"one", b"two", b"three", b"done /c;"]
    assert app.asked == ["/a", "/stream", "/c"]


@pytest.mark.parametrize("parts", [1, 40], ids=["at once", "in pieces"])
async def test_so_many_may_be_sent_ahead(
    monkeypatch: pytest.MonkeyPatch, app: App, port: int, parts: int
) -> None:
    """The others are not taken, and the client is told so."""
    monkeypatch.setattr(http, "MAX_UNANSWERED", 3)
    sent = [b"".join(get(f"/{i}") for i in range(1000))] if parts == 1 else []
    answer = await ask(port, *(sent or [get(f"/{i}") for i in range(parts)]))
    assert app.asked == ["/0", "/1", "/2"]
    assert re.findall(rb"done /\d+;", answer) == [b"done /0;", b"done /1;", b"done /2;"]
    assert answer.count(b"HTTP/1.1 ") == 3
    *_, last = answer.split(b"HTTP/1.1 ")
    assert b"connection: close\r\n" in last


AHEAD = {
    "no HTTP": b"\x80\x02cposix\nsystem\n",
    "a head too large": b"GET / HTTP/1.1\r\nx: " + b"a" * 2 * http.MAX_HEAD,
    "half a head": HEAD,
    "a letter": b"P",
    "half a body": HEAD + b"content-length: 10\r\n\r\nabc",
    "no chunk": HEAD + b"transfer-encoding: chunked\r\n\r\nxyz\r\n",
}


@pytest.mark.parametrize("path", ["/a", "/stream"])
@pytest.mark.parametrize("apart", [False, True], ids=["at once", "apart"])
async def test_a_fault_does_not_hurt_the_request_ahead_of_it(
    app: App, port: int, path: str, apart: bool
) -> None:
    """It gets all of its answer, and nothing but that; then the connection ends."""
    sent = [[get(path), fault] if apart else [get(path) + fault] for fault in AHEAD.values()]
    answers = await asyncio.gather(*(ask(port, *parts) for parts in sent))
    for name, answer in zip(AHEAD, answers, strict=True):
        assert answer.count(b"HTTP/1.1 ") == 1, name
        assert answer.startswith(b"HTTP/1.1 200 "), name
        assert answer.endswith(b"done /a;" if path == "/a" else b"0\r\n\r\n"), name
    assert app.asked == [path] * len(AHEAD)


async def test_a_fault_behind_a_complete_answer_is_told(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(get("/a"))
    await reader.readuntil(b"done /a;")
    writer.write(b"\x80\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
    writer.close()


async def test_an_answer_that_has_begun_gets_no_other_inside(port: int) -> None:
    """Its request does not arrive; the connection ends."""
    sent = HEAD.replace(b"/", b"/hasty", 1) + b"content-length: 10\r\n\r\nabc"
    answer = await ask(port, sent)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"3\r\nhas\r\n")


async def test_a_client_that_goes_is_noticed_by_all_its_requests(app: App, port: int) -> None:
    """That which is being answered ends; the others do not begin."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(get("/a") + get("/b") + get("/c"))
    while not app.asked:
        await asyncio.sleep(0.01)
    writer.close()
    while not app.gone:
        await asyncio.sleep(0.01)
    assert app.gone == ["/a"]
    assert app.asked == ["/a"]


# Requests that every server must refuse.


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /a HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /a HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", b"400"),
        (b"GET /a HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n", b"400"),
        (b"GET /a HTTP/2.0\r\nhost: a\r\n\r\n", b"505"),
        (b"GET /" + b"a" * http.MAX_URL + b" HTTP/1.1\r\nhost: a\r\n\r\n", b"414"),
        (b"GET /" + b"a" * 100_000, b"414"),
        (b"GET /a HTTP/1.1\r\nhost: a\r\nx: " + b"a" * http.MAX_HEAD + b"\r\n\r\n", b"431"),
        (b"GET /a HTTP/1.1\r\nhost: a\r\n" + b"x: a\r\n" * 12_000 + b"\r\n", b"431"),
    ],
    ids=["no host", "hosts", "hosts of 1.0", "2.0", "URL", "long URL", "header", "headers"],
)
@pytest.mark.parametrize("ahead", [False, True])
async def test_a_head_that_is_refused(
    app: App, port: int, sent: bytes, status: bytes, ahead: bool
) -> None:
    """With its own status; behind another request, it only ends the connection."""
    answer = await ask(port, get("/b") + sent if ahead else sent)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.startswith(b"HTTP/1.1 " + (b"200" if ahead else status))
    assert ahead or len(answer) < 500
    assert app.asked == ["/b"] * ahead


async def test_a_head_of_just_the_limits_is_taken(app: App, port: int) -> None:
    path = "/" + "a" * (http.MAX_URL - 1)
    more = b"a" * (http.MAX_HEAD - http.MAX_URL - 100)
    head = b"GET %b HTTP/1.1\r\nhost: a\r\nconnection: close\r\nx: %b\r\n\r\n"
    answer = await ask(port, head % (path.encode(), more))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert app.asked == [path]


# HTTP/1.0.


@pytest.mark.parametrize("path", ["/stream", "/hasty", "/a"])
async def test_a_client_of_http_1_0_gets_no_chunks(port: int, path: str) -> None:
    sent = b"POST %b HTTP/1.0\r\nconnection: keep-alive\r\ncontent-length: 0\r\n\r\n"
    head, _, body = (await ask(port, sent % path.encode())).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    whole = {"/stream": b"one two three", "/hasty": b"has", "/a": b"done /a;"}
    assert body == whole[path]
    assert (b"content-length" in head) == (path == "/a")


async def test_a_client_of_http_1_0_may_ask_for_the_head(port: int) -> None:
    answer = await ask(port, b"HEAD /stream HTTP/1.0\r\n\r\n")
    assert answer.endswith(b"\r\n\r\n")
    assert b"transfer-encoding" not in answer


# More connections than there is room for.


@pytest.fixture
def two_wait(limits: pytest.MonkeyPatch) -> None:
    """At most two connections wait for a request, for as long as it takes."""
    limits.setattr(http, "MAX_WAITING", 2)
    limits.setattr(http, "ARRIVAL_TIMEOUT", 600.0)


WAITING = {"nothing": b"", "a head": HEAD, "a body": HEAD + b"content-length: 10\r\n\r\nabc"}


@pytest.mark.parametrize("first", WAITING)
async def test_the_connection_that_waits_longest_makes_room(
    two_wait: None, port: int, first: str
) -> None:
    """It is told so if it has begun a request. The others get their answers."""
    oldest = asyncio.create_task(ask(port, WAITING[first]))
    await asyncio.sleep(0.1)
    others = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
    said = await oldest
    assert said.startswith(b"HTTP/1.1 503 ") if first != "nothing" else said == b""
    assert (b"retry-after: " in said) == (first != "nothing")
    for reader, writer in others:
        writer.write(get("/a"))
        assert await reader.readuntil(b"done /a;")
        writer.close()


async def test_requests_under_way_need_no_room(app: App, two_wait: None, port: int) -> None:
    """With any number of requests; after its answer, a connection waits again."""
    under_way = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
    for _ in range(3):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get("/a"))
        under_way.append((reader, writer))
        while len(app.asked) < len(under_way) - 2:
            await asyncio.sleep(0.01)
    answers = [reader.readuntil(b"done /a;") for reader, _ in under_way[2:]]
    assert len(await asyncio.gather(*answers)) == 3
    # Now five wait: the first two, and one other, must go.
    gone = [await asyncio.wait_for(reader.read(), 60) for reader, _ in under_way[:3]]
    assert gone == [b"", b"", b""]
    reader, writer = under_way[-1]
    writer.write(get("/b"))
    assert await reader.readuntil(b"done /b;")
    for _, writer in under_way:
        writer.close()
