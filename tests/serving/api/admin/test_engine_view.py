"""GET /engine: the phases of requests, which the playground draws."""

from __future__ import annotations

import json
from typing import Any

import httpx
from support.server import Server


def view(http: httpx.Client, since: float = 0.0) -> dict[str, Any]:
    answer = http.get("/engine", params={"since": since})
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


def stream(http: httpx.Client, tokens: int) -> Any:
    body = {"model": "mock", "prompt": [1, 2, 3], "max_tokens": tokens, "stream": True}
    return http.stream("POST", "/v1/completions", json=body)


def test_a_request_goes_through_its_phases(mock: Server) -> None:
    mock.wait_until("kv_cache_blocks", 4096)  # the engine's first statistics have come
    mock.wait_until("requests_running", 0)
    before = view(mock.http)
    assert before["status"] == "ready"
    assert before["places"] == 8
    assert before["stats"]["kv_blocks_total"] == 4096
    with stream(mock.http, 4000) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if line.startswith("data:"))
        during = view(mock.http, before["now"])
        (request,) = during["requests"]
        assert [phase for phase, _ in request["phases"]] == ["queued", "prefill", "decode"]
        times = [before["now"], *(begin for _, begin in request["phases"]), during["now"]]
        assert times == sorted(times)
        assert request["ended"] is None
        assert request["prompt_tokens"] == 3
        assert request["output_tokens"] >= 1
    mock.wait_until("requests_running", 0)  # the client has gone
    after = view(mock.http, during["now"])
    (ended,) = after["requests"]
    assert ended["id"] == request["id"]
    assert ended["ended"] > ended["phases"][-1][1]
    assert after["stats"]["generation_tokens"] > before["stats"]["generation_tokens"]
    assert view(mock.http, after["now"])["requests"] == []


def test_no_room_is_queued(mock: Server) -> None:
    body = {"model": "mock", "prompt": [[5], [6], [7]], "n": 4, "max_tokens": 4000, "stream": True}
    with mock.http.stream("POST", "/v1/completions", json=body) as answer:
        # All places are taken when each of eight answers has begun.
        begun: set[int] = set()
        lines = answer.iter_lines()
        while len(begun) < 8:
            if (line := next(lines)).startswith("data:"):
                begun.add(json.loads(line[5:])["choices"][0]["index"])
        requests = [r for r in view(mock.http)["requests"] if r["ended"] is None]
        now = sorted(request["phases"][-1][0] for request in requests)
        assert now == ["decode"] * 8 + ["queued"] * 4
    mock.wait_until("requests_running", 0)


def test_it_says_nothing_of_what_was_asked(http: httpx.Client) -> None:
    http.post("/v1/completions", json={"model": "tiny", "prompt": "hello", "max_tokens": 2})
    request = view(http)["requests"][-1]
    assert request.keys() == {"id", "prompt_tokens", "output_tokens", "phases", "ended"}


def test_a_wrong_time_is_refused(http: httpx.Client) -> None:
    answer = http.get("/engine", params={"since": "yesterday"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "since"
