"""Arriving bodies share a room: huge bodies are refused before they take the others' share."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import psutil
import pytest
from support.server import TIMEOUT, Server, start_server
from support.tokenizers import write_byte_level

from weft.errors import RequestError
from weft.serving.api.body_room import LARGE, ROOM, ArrivingBody, BodyRoom

MIB = 2**20
BODY = 32 * MIB


def fill(body: ArrivingBody, size: int) -> None:
    """Add parts with 32 KiB each."""
    for _ in range(size // LARGE):
        body.add(bytes(LARGE))


def test_the_largest_arriving_body_gives_way() -> None:
    room = BodyRoom(10 * LARGE)
    with room.place() as large, room.place() as other:
        fill(large, 6 * LARGE)
        fill(other, 5 * LARGE)
        assert (large.chunks, large.size, room.left) == ([], 0, 5 * LARGE)
        with pytest.raises(RequestError) as error:
            large.add(b"more")
        assert (error.value.status, error.value.retry_after) == (429, 1)
        with room.place() as larger, pytest.raises(RequestError):
            fill(larger, 6 * LARGE)
        assert other.size == 5 * LARGE
    assert room.left == 10 * LARGE


def test_a_complete_body_stays_until_it_has_been_read() -> None:
    room = BodyRoom(10 * LARGE)
    with room.place() as complete:
        fill(complete, 9 * LARGE)
        room.arrived(complete)
        with room.place() as other, pytest.raises(RequestError):
            fill(other, 2 * LARGE)
        assert complete.size == 9 * LARGE
    with room.place() as other:
        fill(other, 2 * LARGE)
    assert room.left == 10 * LARGE


def test_a_small_body_always_has_room() -> None:
    room = BodyRoom(10 * LARGE)
    with ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(room.place()).add(bytes(LARGE))
    assert room.left == 10 * LARGE


@pytest.fixture(scope="module")
def mock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("room")
    model = write_byte_level(path / "mock")
    with start_server(model, path, loader="support.mock_runner:load_slowly") as server:
        yield server


HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n"
)


def test_held_bodies_do_not_fill_the_memory(mock: Server) -> None:
    """Thirty clients send most of their body, and keep the rest. Others are served meanwhile."""
    process = psutil.Process(mock.process.pid)
    before = process.memory_info().rss
    with ExitStack() as stack:
        clients = []
        for _ in range(30):
            client = socket.create_connection(("127.0.0.1", mock.port), timeout=TIMEOUT)
            clients.append(stack.enter_context(client))
            client.sendall(HEAD % BODY + b" " * (BODY - MIB))
        assert process.memory_info().rss - before < ROOM + 128 * MIB
        for size in (0, 2 * MIB):
            assert complete(mock, size) == 200
        assert mock.http.get("/health").status_code == 200
        for client in clients:
            client.sendall(b" " * MIB)
        statuses = [client.recv(1000)[9:12] for client in clients]
        assert set(statuses) == {b"400", b"429"}
        assert statuses.count(b"429") >= 30 - ROOM // (BODY - MIB)
    deadline = time.monotonic() + TIMEOUT
    while complete(mock, BODY - MIB) == 429:  # until the server notices their end
        assert time.monotonic() < deadline


def complete(server: Server, size: int) -> int:
    """The status for a completion, in a body with so much white space."""
    content = json.dumps({"model": "mock", "prompt": [1], "max_tokens": 1}).encode() + b" " * size
    headers = {"content-type": "application/json"}
    return server.http.post("/v1/completions", content=content, headers=headers).status_code
