"""The server's life: loading, clients that leave, full queue, signals, an engine that dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.mock_runner import CRASH_TOKEN, HANG_TOKEN, NOT_FINITE_TOKEN, expected
from support.server import TESTS, Server, free_port, start_server
from support.tokenizers import write_byte_level

SLOW_MOCK = "support.mock_runner:load_slowly"
PROMPT = [1, 2, 3]
# Takes 20 seconds at least, if nobody ends it.
LONG = {"model": "mock", "prompt": PROMPT, "max_tokens": 4000, "stream": True}
FIRST_LINE = re.compile(r"weft loads \S+, and will answer on http://127\.0\.0\.1:\d+\n")
"""What is said at once, long before it serves."""


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Server]:
    """A server of the test's own, to be ended by it."""
    with start_mock(tmp_path) as server:
        yield server


def start_mock(path: Path, **settings: Any) -> contextlib.AbstractContextManager[Server]:
    model = write_byte_level(path / "mock")
    return start_server(model, path, loader=SLOW_MOCK, max_model_len=4096, **settings)


async def events(client: httpx.AsyncClient, body: dict[str, Any]) -> list[str]:
    async with client.stream("POST", "/v1/completions", json=body) as response:
        return [line async for line in response.aiter_lines() if line]


def aborted(server: Server) -> int:
    """Answers that were aborted so far."""
    text = server.http.get("/metrics").text
    found = re.search(r'^weft_answers_total\{finish_reason="abort",.*\} (\S+)$', text, re.MULTILINE)
    return int(float(found[1])) if found else 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_aborts_its_request(mock: Server, stream: bool, n: int) -> None:
    """The engine is paused until the server has told it, so that its steps from then on count."""
    before = aborted(mock)
    connection = mock.ask(LONG | {"stream": stream, "n": n})
    mock.wait_until("requests_running", n)
    if stream:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    (engine,) = psutil.Process(mock.process.pid).children()
    engine.suspend()
    try:
        connection.close()
        while aborted(mock) < before + n:
            time.sleep(0.01)
        generated = mock.metric("generation_tokens_total")
    finally:
        engine.resume()
    mock.wait_until("requests_running", 0)
    assert mock.metric("kv_cache_usage_ratio") == 0
    # One step is taken in; a few more if the engine's socket is slow to read.
    assert mock.metric("generation_tokens_total") - generated <= 10 * n


def test_a_client_that_leaves_the_queue(mock: Server) -> None:
    """Twelve requests on eight places; the waiting ones leave before they have begun."""
    running = [mock.ask(LONG) for _ in range(8)]
    mock.wait_until("requests_running", 8)
    waiting = [mock.ask(LONG | {"stream": i % 2 == 0}) for i in range(4)]
    mock.wait_until("requests_waiting", 4)
    for connection in waiting:
        connection.close()
    mock.wait_until("requests_waiting", 0)
    assert mock.metric("requests_running") == 8
    for connection in running:
        connection.close()
    mock.wait_until("requests_running", 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_full_queue_is_429_with_retry_after(mock: Server, stream: bool) -> None:
    connections = [mock.ask(LONG) for _ in range(12)]
    mock.wait_until("requests_waiting", 4)
    response = mock.http.post("/v1/completions", json=LONG | {"stream": stream})
    assert response.status_code == 429
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert int(response.headers["retry-after"]) >= 1
    for connection in connections:
        connection.close()
    mock.wait_until("requests_running", 0)


def test_a_request_that_fails_hurts_no_other(mock: Server) -> None:
    async def run() -> tuple[httpx.Response, list[str], list[str]]:
        async with httpx.AsyncClient(base_url=mock.url, timeout=60) as client:
            bad = {"model": "mock", "prompt": [5, NOT_FINITE_TOKEN], "max_tokens": 50}
            good = LONG | {"max_tokens": 100}
            return await asyncio.gather(
                client.post("/v1/completions", json=bad),
                events(client, bad | {"stream": True}),
                events(client, good),
            )

    whole, streamed, good = asyncio.run(run())
    assert whole.status_code == 500
    assert whole.json()["error"]["code"] == "generation_failed"
    assert "generation_failed" in streamed[0]
    assert len(good) > 50
    assert good[-1] == "data: [DONE]"


def test_many_at_once_get_their_own_answers(mock: Server) -> None:
    prompts = [[i, i + 1] for i in range(12)]

    async def run() -> list[list[str]]:
        async with httpx.AsyncClient(base_url=mock.url, timeout=60) as client:
            bodies = [LONG | {"prompt": p, "seed": 0, "max_tokens": 40} for p in prompts]
            return await asyncio.gather(*(events(client, body) for body in bodies))

    for prompt, lines in zip(prompts, asyncio.run(run()), strict=True):
        pieces = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        text = "".join(piece["choices"][0]["text"] for piece in pieces)
        tokens = expected(prompt, 40, ends=())
        assert text == "".join(chr(33 + token) for token in tokens)


def test_while_loading_it_is_alive_but_not_ready(tmp_path: Path) -> None:
    settings = {"loader": "support.server:load_when_told", "port": free_port()}
    model = write_byte_level(tmp_path / "mock")
    with start_server(model, tmp_path, until="healthy", **settings) as server:
        client = server.http
        assert client.get("/ready").status_code == 503
        assert client.get("/ready").json() == {"status": "loading"}
        assert client.get("/health").status_code == 200
        assert client.get("/metrics").status_code == 200
        assert client.get("/v1/models").json()["data"][0]["id"] == "mock"
        response = client.post("/v1/completions", json=LONG)
        assert response.status_code == 503
        assert "loading" in response.json()["error"]["message"]
        (model / "go").touch()
        while client.get("/ready").status_code != 200:
            time.sleep(0.02)


def test_while_no_step_gets_done_it_is_alive_but_not_ready(tmp_path: Path) -> None:
    with start_mock(tmp_path, stall_timeout=20.0) as server:
        (engine,) = psutil.Process(server.process.pid).children()
        with server.ask(LONG) as asked:
            assert asked.recv(100).startswith(b"HTTP/1.1 200")
            engine.suspend()
            try:
                while server.http.get("/ready").status_code == 200:
                    time.sleep(0.02)
                assert server.http.get("/ready").json() == {"status": "stalling"}
                health = server.http.get("/health")
                assert health.status_code == 200
                assert health.json()["progressing"] is False
                assert health.json()["seconds_without_step"] >= 5
            finally:
                engine.resume()
            while server.http.get("/ready").status_code != 200:
                time.sleep(0.02)
            assert server.http.get("/health").json()["progressing"] is True


def test_a_signal_while_loading_ends_it(tmp_path: Path) -> None:
    settings = {"loader": "support.server:load_when_told", "port": free_port()}
    model = write_byte_level(tmp_path / "mock")
    with start_server(model, tmp_path, until="healthy", **settings) as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0


# `weft serve` as serve.py calls it, whose HTTP server is imported once there is a line on stdin.
# argv is the model and the loader's name.
_HTTP_WAITS = """
import sys
from weft.errors import WeftError
from weft.serving.api import server
from weft.serving.config.settings import EngineConfig, ServerConfig

def build(self):
    print("importing", flush=True)
    if sys.stdin.readline() == "fail\\n":
        raise ImportError("there is no HTTP")
    return build_http(self)

build_http, server._Server._build_http = server._Server._build_http, build
config = EngineConfig(sys.argv[1], threads=1)
try:
    sys.exit(server.serve(config, ServerConfig(port=0), runner_factory=sys.argv[2]))
except WeftError as error:
    sys.exit(f"weft: error: {error}")
"""


@contextlib.contextmanager
def before_http(path: Path, loader: str) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A server that has started its engine, and waits before it imports HTTP; and the engine."""
    model = write_byte_level(path / "mock")
    with subprocess.Popen(
        [sys.executable, "-c", _HTTP_WAITS, str(model), loader],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(TESTS)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "importing\n"
            (engine,) = psutil.Process(process.pid).children()
            yield process, engine
        finally:
            process.kill()


def wait_until_handled(pid: int) -> None:
    """Wait until a process has taken its signals and waits for something else again."""
    while True:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = dict(line.split(":\t", 1) for line in lines)
        pending = int(fields["SigPnd"], 16) | int(fields["ShdPnd"], 16)
        if not pending and fields["State"].startswith("S"):
            return
        time.sleep(0.01)


@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_while_http_is_imported_ends_it(tmp_path: Path, signals: int) -> None:
    with before_http(tmp_path, "support.server:load_when_told") as (process, engine):
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
            wait_until_handled(process.pid)  # else they would be one
        _, log = process.communicate("go\n", timeout=60)
        assert process.returncode == 0
        first, *rest = log.splitlines(keepends=True)
        assert FIRST_LINE.fullmatch(first)
        assert rest == ["weft ends at once, by a second signal\n"] * (signals - 1)
        engine.wait(timeout=60)


def test_an_engine_that_fails_before_http_is_there_ends_the_server(tmp_path: Path) -> None:
    with before_http(tmp_path, "support.mock_runner:miss") as (process, engine):
        engine.wait(timeout=60)
        _, log = process.communicate("go\n", timeout=60)
        assert process.returncode == 1
        assert log.splitlines()[1:] == ["weft: error: no weights in model.safetensors"]


def test_no_engine_is_left_without_http(tmp_path: Path) -> None:
    with before_http(tmp_path, "support.server:load_when_told") as (process, engine):
        _, log = process.communicate("fail\n", timeout=60)
        assert process.returncode == 1
        assert log.splitlines()[-1] == "ImportError: there is no HTTP"
        engine.wait(timeout=60)


@pytest.mark.sweep
@pytest.mark.parametrize("moment", range(6))
def test_a_signal_at_any_moment_of_the_start_ends_it(tmp_path: Path, moment: int) -> None:
    """By itself from when the engine's process is there, by the signal before; and no orphan."""
    delay = random.Random(moment).uniform(0, 1.0)
    model = write_byte_level(tmp_path / "mock")
    settings = {"loader": "support.server:load_when_told", "until": "started"}
    with start_server(model, tmp_path, **settings) as server:
        time.sleep(delay)
        seen = psutil.Process(server.process.pid).children()
        server.process.send_signal(signal.SIGTERM)
        status = server.process.wait(timeout=60)
        assert status == 0 if seen else status in (0, -signal.SIGTERM)
        assert FIRST_LINE.fullmatch(server.log.read_text()) or not seen
    deadline = time.monotonic() + 60
    while any(cwd(process) == tmp_path for process in psutil.process_iter()):
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.05)


def cwd(process: psutil.Process) -> Path | None:
    try:
        return Path(process.cwd())
    except psutil.Error:
        return None


def test_sigterm_drains(own: Server) -> None:
    """Not ready and nothing new, but what runs gets to its end; then exit 0."""

    async def run() -> list[str]:
        async with httpx.AsyncClient(base_url=own.url, timeout=60) as client:
            running = asyncio.create_task(events(client, LONG | {"max_tokens": 200}))
            while own.metric("requests_running") != 1:
                await asyncio.sleep(0.01)
            engine.suspend()  # the request ends when the checks have
            own.process.send_signal(signal.SIGTERM)
            while (ready := await client.get("/ready")).status_code == 200:
                assert "connection" not in ready.headers
                await asyncio.sleep(0.01)
            assert (await client.get("/ready")).json() == {"status": "draining"}
            assert (await client.get("/health")).status_code == 200
            refused = await client.post("/v1/completions", json=LONG)
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert refused.headers["connection"] == "close", "another server may be reached instead"
            engine.resume()
            return await running

    (engine,) = psutil.Process(own.process.pid).children()
    lines = asyncio.run(run())
    assert lines[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in lines[-2]
    assert own.process.wait(timeout=60) == 0
    loads, serves, ends = own.log.read_text().splitlines()
    assert FIRST_LINE.fullmatch(f"{loads}\n")
    assert loads.endswith(f", and will answer on {own.url}")
    assert serves == f"weft serves mock at {own.url}"
    assert ends == "weft ends; 1 under way get 30 s to finish, a second signal ends them"


def test_the_drain_has_an_end(tmp_path: Path) -> None:
    with start_mock(tmp_path, drain_timeout=0.2) as server:
        connection = server.ask(LONG)
        server.wait_until("requests_running", 1)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0
        text = read_all(connection)
        assert "requests cut off after 0.2 s: 1" in server.log.read_text()
    assert b'"error"' in text
    assert b"[DONE]" in text


def test_an_engine_that_dies_while_draining_is_a_failure(own: Server) -> None:
    connection = own.ask(LONG)
    own.wait_until("requests_running", 1)
    (engine,) = psutil.Process(own.process.pid).children()
    own.process.send_signal(signal.SIGTERM)
    while own.http.get("/ready").status_code != 503:
        time.sleep(0.01)
    engine.kill()
    assert b"SIGKILL" in read_all(connection)
    assert own.process.wait(timeout=60) == 1
    last = own.log.read_text().splitlines()[-1]
    assert last == "weft: error: the engine was killed by SIGKILL"


def test_a_second_signal_does_not_wait(own: Server) -> None:
    connection = own.ask(LONG)
    own.wait_until("requests_running", 1)
    own.process.send_signal(signal.SIGTERM)
    while own.http.get("/ready").status_code != 503:
        time.sleep(0.01)
    own.process.send_signal(signal.SIGTERM)
    assert own.process.wait(timeout=60) == 1
    assert b'"error"' in read_all(connection)
    said = "weft ends at once, by a second signal; 1 under way are cut off"
    assert said in own.log.read_text().splitlines()


def test_a_second_signal_that_cuts_nothing_off_is_no_failure(own: Server) -> None:
    own.process.send_signal(signal.SIGTERM)
    with contextlib.suppress(httpx.HTTPError):
        while own.http.get("/ready").status_code != 503:
            time.sleep(0.01)
    own.process.send_signal(signal.SIGTERM)
    # Python handles no more signals when it has left the event loop.
    assert own.process.wait(timeout=60) in (0, -signal.SIGTERM)


@pytest.mark.parametrize("logged", [True, False])
def test_the_throughput_is_logged_while_there_is_work(tmp_path: Path, logged: bool) -> None:
    with start_mock(tmp_path, log_stats=logged) as server:
        connection = server.ask(LONG)
        line = re.compile(
            r"throughput_log: \d+\.\d prompt and (\d+\.\d) output tokens/s; 1 running, 0 waiting; "
            r"KV cache \d+% in use, prefix cache hit rate 0%"
        )
        found: list[str] = []
        while not found and server.metric("generation_tokens_total") < 3900:
            time.sleep(0.1)
            found = line.findall(server.log.read_text())
        assert bool(found) == logged
        assert all(float(rate) > 0 for rate in found)
        connection.close()


@pytest.mark.parametrize(
    ("token", "why"),
    [
        (CRASH_TOKEN, "the model runner failed: AssertionError: the runner crashed"),
        (HANG_TOKEN, "the engine is stuck: no step in 1 s"),
    ],
    ids=["crash", "hang"],
)
def test_an_engine_that_fails_ends_the_server(tmp_path: Path, token: int, why: str) -> None:
    with start_mock(tmp_path, stall_timeout=1.0) as server:
        body = {"model": "mock", "prompt": [1, token], "max_tokens": 5}
        response = server.http.post("/v1/completions", json=body)
        assert response.status_code == 503
        assert response.json()["error"]["message"]
        assert server.process.wait(timeout=60) == 1
        assert server.log.read_text().splitlines()[-1] == f"weft: error: {why}"


def test_a_killed_engine_ends_the_server(own: Server) -> None:
    connection = own.ask(LONG)
    own.wait_until("requests_running", 1)
    (engine,) = psutil.Process(own.process.pid).children()
    engine.kill()
    text = read_all(connection)
    assert b"SIGKILL" in text
    assert own.process.wait(timeout=60) == 1


def test_a_port_that_is_taken_is_one_line(own: Server, tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match=r"weft: error: .*--port \d+: Address already in use"),
        start_mock(tmp_path, port=own.port),
    ):
        pass


def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError) as caught,
        start_server(tmp_path, tmp_path, loader="support.mock_runner:miss"),
    ):
        pass
    assert "weft: error: " in str(caught.value)
    assert "Traceback" not in str(caught.value)


def read_all(connection: socket.socket) -> bytes:
    """What is left on a socket."""
    data = b""
    with connection, contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(65536):
            data += chunk
    return data
