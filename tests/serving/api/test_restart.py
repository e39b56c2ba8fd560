"""`weft serve --restart`: what a client and a probe see while an engine is started again."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.processes import wait_until_gone
from support.server import TIMEOUT, Server, start_server
from support.tokenizers import write_byte_level

PROMPT = [1, 2, 3]
BODY = {"model": "mock", "prompt": PROMPT, "max_tokens": 5}
LONG = BODY | {"max_tokens": 4000, "stream": True}  # 20 seconds at least


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    model = write_byte_level(tmp_path / "mock")
    loader = "support.mock_runner:load_as_told"
    settings = {"loader": loader, "restart": True, "max_model_len": 4096}
    with start_server(model, tmp_path, **settings) as server:
        yield server


def how(server: Server, told: str) -> None:
    """What an engine does when it is loaded from now on; see `load_as_told`."""
    (server.log.parent / "mock" / "how").write_text(told)


def engine_of(server: Server) -> psutil.Process:
    (engine,) = psutil.Process(server.process.pid).children()
    return engine


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_answers_503_until_it_serves_again(server: Server) -> None:
    http, killed = server.http, engine_of(server)
    before = http.post("/v1/completions", json=BODY | {"seed": 0}).json()["choices"]
    with http.stream("POST", "/v1/completions", json=LONG) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        how(server, "wait")
        killed.kill()
        *_, error, done = lines  # although the next engine is not there yet
    assert "was killed by SIGKILL" in json.loads(error.removeprefix("data: "))["error"]["message"]
    assert done == "data: [DONE]"

    assert http.get("/health").status_code == 200
    ready = http.get("/ready")
    assert (ready.status_code, ready.json()) == (503, {"status": "restarting"})
    for stream in (True, False):
        refused = http.post("/v1/completions", json=BODY | {"stream": stream})
        assert refused.status_code == 503
        assert refused.json()["error"] == {
            "message": "the engine has failed and is being started again",
            "type": "server_error",
            "param": None,
            "code": "engine_unavailable",
        }
        assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert server.metric("engine_cores") == 0

    how(server, "go")
    wait_for(lambda: http.get("/ready").status_code == 200)
    assert http.post("/v1/completions", json=BODY | {"seed": 0}).json()["choices"] == before
    assert server.metric("engine_cores") == server.metric("engine_restarts_total") == 1
    assert not killed.is_running()
    log = server.log.read_text().splitlines()
    said = [line.rpartition(" weft.serving.engine.supervisor: ")[2] for line in log]
    assert said[-2:] == [
        "the engine was killed by SIGKILL; it is started again",
        "the engine serves again",
    ]


def test_one_that_is_killed_while_it_loads_is_started_once_more(server: Server) -> None:
    how(server, "wait")
    engine_of(server).kill()
    wait_for(lambda: server.metric("engine_restarts_total") == 1)
    wait_for(lambda: len(psutil.Process(server.process.pid).children()) == 1)
    engine_of(server).kill()
    wait_for(lambda: server.metric("engine_restarts_total") == 2)
    how(server, "go")
    wait_for(lambda: server.http.get("/ready").status_code == 200)
    assert server.http.post("/v1/completions", json=BODY).status_code == 200


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ("miss", "the engine cannot be started again: no weights in model.safetensors"),
        (
            "leave",
            "the engine exited with status 7 while it was loading; it was started 3 times in vain",
        ),
    ],
)
def test_one_that_cannot_be_loaded_again_ends_the_server(
    server: Server, told: str, why: str
) -> None:
    how(server, told)
    engine_of(server).kill()
    assert server.process.wait(timeout=TIMEOUT) == 1
    assert server.log.read_text().splitlines()[-1] == f"weft: error: {why}"


def test_a_signal_while_it_is_started_again_ends_the_server(server: Server) -> None:
    how(server, "wait")
    engine_of(server).kill()
    wait_for(lambda: server.metric("engine_restarts_total") == 1)
    wait_for(lambda: len(psutil.Process(server.process.pid).children()) == 1)
    loading = engine_of(server).pid
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=TIMEOUT) == 0
    wait_until_gone([loading])
