"""Clients of a server: one that asks once, one while something fails, and some that go on asking.

The latter judge what they get: an answer, or an error of OpenAI's shape.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from support.server import TIMEOUT, Server
from weft import LLM, SamplingParams

GREEDY = {"prompt": "the user asks the assistant for", "temperature": 0, "ignore_eos": True}
CLIENTS = 3


def complete(server: Server, tokens: int = 12) -> str:
    """What it answers, in so many tokens."""
    body = GREEDY | {"model": server.model, "max_tokens": tokens}
    response = server.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def answer_of_one_rank(model: Path, tokens: int = 12, **settings: Any) -> str:
    """What `complete` is to give, by an engine in this process."""
    prompt = str(GREEDY["prompt"])
    greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    with LLM(model, threads=1, **settings) as llm:
        return llm.generate([prompt], greedy)[0].text


def fail_in_a_request(server: Server, fault: Callable[[], Any]) -> str:
    """Bring about a fault when the first token has come; with what message the request ends."""
    body = GREEDY | {"model": server.model, "max_tokens": 400, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as got:
        lines = (line for line in got.iter_lines() if line)
        assert next(lines).startswith("data: ")
        fault()
        *_, last = (line for line in lines if "[DONE]" not in line)
    message: str = json.loads(last.removeprefix("data: "))["error"]["message"]
    return message


class Client(threading.Thread):
    """Asks for one answer after the other, some streamed, and judges what it gets.

    Attributes:
        faults: what should not have come.
        began: of the request under way; None between two.
        failed: requests that ended with an error.
    """

    def __init__(self, server: Server, stop: threading.Event, seed: int) -> None:
        super().__init__()
        self.faults: list[str] = []
        self.began: float | None = None
        self.failed = 0
        self._url, self._model = server.url, server.model
        self._stop_asking = stop
        self._rng = random.Random(seed)

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=TIMEOUT) as http:
            while not self._stop_asking.is_set():
                body: dict[str, Any] = GREEDY | {"model": self._model}
                body["max_tokens"] = self._rng.randrange(1, 200)
                body["stream"] = self._rng.random() < 0.5
                self.began = time.monotonic()
                try:
                    self._judge(http.post("/v1/completions", json=body), bool(body["stream"]))
                except (httpx.HTTPError, ValueError, LookupError) as error:
                    self.faults.append(repr(error))
                self.began = None

    def _judge(self, response: httpx.Response, streamed: bool) -> None:
        if response.status_code == 200 and streamed:
            *pieces, done = (line for line in response.text.split("\n\n") if line)
            last = msgspec.json.decode(pieces[-1].removeprefix("data: "))
            if done != "data: [DONE]":
                self.faults.append(f"ends with {done}")
        else:
            last = msgspec.json.decode(response.content)
        if "error" not in last:
            if response.status_code != 200 or last["choices"][0]["finish_reason"] != "length":
                self.faults.append(response.text)
            return
        self.failed += 1
        if last["error"].keys() != {"message", "type", "param", "code"}:
            self.faults.append(response.text)
        if response.status_code == 503:
            if int(response.headers["retry-after"]) < 1:
                self.faults.append(str(response.headers))
            self._stop_asking.wait(0.05)
        elif response.status_code not in (200, 500):
            self.faults.append(response.text)


@contextmanager
def asking(server: Server, seed: int) -> Iterator[list[Client]]:
    """Some clients that ask until the end of this."""
    stop = threading.Event()
    clients = [Client(server, stop, 10 * seed + i) for i in range(CLIENTS)]
    for client in clients:
        client.start()
    try:
        yield clients
    finally:
        stop.set()
        for client in clients:
            client.join()
