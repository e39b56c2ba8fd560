"""Faults that have broken servers of language models, and the answer that each must get.

After each the next request gets the same answer as before, all blocks of the KV cache are free,
and memory does not grow. Those that are not one request to a running server are tested where their
part is: see `ELSEWHERE`.
"""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.mock_runner import expected
from support.server import TESTS, Server, start_server
from support.tokenizers import write_byte_level

from weft.serving.api.openai.requests import ChatRequest, CompletionRequest

COMPLETION = {"model": "tiny", "prompt": "weft", "max_tokens": 4, "temperature": 0}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
STEADY = {"model": "tiny", "prompt": "the steady one", "max_tokens": 24, "temperature": 0}
CHATS = "/v1/chat/completions"
GRAMMAR_WORKER = "weft.serving.engine.grammar.worker"
JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Fault:
    """One request that is at fault.

    Attributes:
        number: of the fault.
        body: the request's, or what it changes in a good one.
        statuses: that it may get.
        param: the field that the error must name, if one is at fault.
        says: must be in the error's message.
        path: where it goes.
        headers: of the request.
    """

    number: int
    body: dict[str, Any] | bytes
    statuses: tuple[int, ...] = (400,)
    param: str | None = None
    says: tuple[str, ...] = ()
    path: str = "/v1/completions"
    headers: tuple[tuple[str, str], ...] = ()

    def send(self, http: httpx.Client) -> httpx.Response:
        """Ask a server for it."""
        body = self.body
        if isinstance(body, dict):
            good = CHAT if "chat" in self.path else COMPLETION
            body = json.dumps(good | body).encode()
        return http.post(self.path, content=body, headers=JSON | dict(self.headers))


def completion(number: int, param: str, value: Any, *says: str) -> Fault:
    """A field of a completion."""
    return Fault(number, {param: value}, param=param, says=says)


def chat(number: int, param: str, value: Any, *says: str) -> Fault:
    """A field of a chat; the error may name a part of it."""
    return Fault(number, {param: value}, param=param, says=says, path=CHATS)


def image(url: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


def nested(depth: int) -> dict[str, Any]:
    """A JSON schema of arrays of arrays."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def as_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


def tool(properties: Any) -> dict[str, Any]:
    """A tool with these arguments."""
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


OPEN = b'{"model": "tiny", "prompt": '
PNG = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"
PICKLE = pickle.dumps(print)

FAULTS = [
    completion(1, "n", 10**9),
    chat(1, "n", 10**9),
    completion(2, "best_of", 10**9),
    completion(3, "logprobs", 10**6),
    Fault(
        3,
        {"logprobs": True, "top_logprobs": 10**6},
        says=("1000000",),
        path=CHATS,
    ),
    completion(4, "stop", ["a"] * 60_000, "60000"),
    chat(4, "stop", ["a"] * 60_000, "60000"),
    completion(5, "stop", ""),
    completion(5, "stop", ["a", ""]),
    completion(6, "max_tokens", -1),
    completion(6, "max_tokens", 2**63),
    chat(6, "max_tokens", -1),
    chat(6, "max_completion_tokens", 2**63),
    Fault(7, OPEN + b'"a", "temperature": NaN}', says=("temperature is nan",)),
    completion(7, "temperature", 1e308),
    completion(8, "top_p", -0.01),
    completion(8, "top_p", 1.01),
    completion(9, "logit_bias", {"320": 1}, "320"),
    chat(9, "logit_bias", {str(2**70): 1}),
    completion(10, "prompt", [999_999], "999999"),
    completion(10, "prompt", [-1], "-1"),
    completion(11, "prompt", ""),
    completion(11, "prompt", []),
    completion(11, "prompt", [""]),
    completion(12, "prompt", [5] * 600, "600", "512"),
    Fault(
        12,
        {"messages": [{"role": "user", "content": "z" * 600}]},
        says=("512", " 6"),
        path=CHATS,
    ),
    Fault(13, OPEN + b"[" * 100_000),
    Fault(13, OPEN + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    Fault(13, OPEN + b'{"a":' * 100_000 + b"1" + b"}" * 100_001),
    chat(16, "response_format", as_format(nested(400))),
    Fault(
        16,
        b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "response_format": '
        b'{"type": "json_schema", "json_schema": {"name": "s", "schema": '
        + b'{"type": "array", "items": ' * 10_000
        + b"{}"
        + b"}" * 10_003,
        path=CHATS,
    ),
    chat(
        16,
        "response_format",
        as_format({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    ),
    completion(17, "regex", "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"),
    chat(17, "guided_regex", "(" * 60_000 + "a" + ")" * 60_000),
    completion(18, "guided_grammar", "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000),
    chat(19, "tools", [tool({"n": {"type": "banana"}})], "banana", "integer"),
    chat(19, "tools", [tool({"n": {"type": ["integer", None]}})], "type"),
    chat(19, "tools", [tool({"n": {"type": "string", "pattern": 5}})], "pattern"),
    chat(19, "tools", [tool({"n": {"anyOf": [{"items": 5}]}})], "schema"),
    chat(19, "tools", [tool([])]),
    chat(20, "chat_template", "{{ ''.__class__ }}"),
    chat(20, "chat_template_kwargs", {"messages": [], "tokenize": False}),
    Fault(21, OPEN + b'"a\\ud800b"}'),
    Fault(21, OPEN + b'"a\\udc00\\ud800"}'),
    Fault(21, OPEN + b'"a", "stop": "\\udfff"}', param="stop"),
    Fault(21, {"prompt": "a\x00b", "stop": "\x00"}, (200,)),
    Fault(21, OPEN + b'"a", "\\ud800": 1}', says=("name",)),
    Fault(21, {"messages": [{"role": "user", "content": "\x00"}]}, (200,), path=CHATS),
    Fault(22, {}, (415,), headers=(("content-type", "text/plain"),)),
    Fault(22, {}, (415,), headers=(("content-type", "application/x-www-form-urlencoded"),)),
    Fault(22, b"[]"),
    Fault(22, b'[{"model": "tiny"}]'),
    Fault(23, {"model": "gpt-9"}, (404,), "model", ("gpt-9", "tiny")),
    Fault(24, {"speculative": 3}, param="speculative"),
    chat(24, "audio", {"voice": "alloy"}),
    completion(24, "suffix", "end"),
    *[
        chat(25, "messages", image(url))
        for url in (
            "http://169.254.169.254/latest/meta-data/",
            "http://[::ffff:169.254.169.254]/",
            "file:///etc/passwd",
            "http://127.0.0.1:PORT/redirect",
            "http://example.org\\@127.0.0.1/",
        )
    ],
    chat(26, "messages", image(PNG)),
    chat(26, "messages", image("data:image/png;base64," + "A" * 10**6)),
    completion(27, "prompt_embeds", "gASVFAAAAAAAAACMCGJ1aWx0aW5zlIwFcHJpbnSUk5Qu"),
    Fault(27, PICKLE),
    Fault(27, PICKLE, (415,), headers=(("content-type", "application/octet-stream"),)),
]

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
RAW = {
    "14 announced": (HEAD + b"content-length: 1073741824\r\n\r\n", b"413"),
    "14 in pieces": (
        HEAD
        + b"transfer-encoding: chunked\r\n\r\n"
        + (b"100000\r\n" + b" " * 0x100000 + b"\r\n") * 33,
        b"413",
    ),
    "15 one": (b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 10_000_000, b"431"),
    "15 many": (b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"x: a\r\n" * 1_000_000, b"431"),
    "27": (PICKLE + b"\r\n\r\n", b"400"),
}

# Those that one request to a running server does not bring about, or that have a file of their own.
ELSEWHERE = {
    28: ["serving/engine/test_tokenizer.py::test_code_of_the_checkpoint_is_never_run"],
    29: ["serving/api/middleware/test_auth.py::test_no_route_answers_without_a_key"],
    30: ["serving/cli/test_batch.py::test_mixed_file_and_resumption"],
    31: ["serving/api/test_lifecycle.py::test_a_client_that_leaves_aborts_its_request"],
    32: ["serving/api/middleware/test_auth.py::test_a_client_that_does_not_read_is_cut_off"],
    33: ["serving/api/test_http.py::test_a_request_that_does_not_arrive_is_408"],
    34: ["serving/api/middleware/test_auth.py::test_a_full_queue_tells_when_to_come_again"],
    35: [
        "serving/api/test_lifecycle.py::test_sigterm_drains",
        "serving/api/test_lifecycle.py::test_a_second_signal_does_not_wait",
    ],
    36: ["serving/executor/test_ranks.py::test_two_ranks_answer_as_one_and_a_dead_one_is_named"],
    38: [
        "serving/batch/test_kills.py::test_killed_at_random_moments",
        "serving/batch/test_kills.py::test_a_full_disk_stops_it_and_resume_goes_on",
        "models/checkpoint/test_weights.py::test_the_first_truncated_tensor_is_named",
    ],
}


@pytest.fixture(scope="module")
def answer(server: Server) -> str:
    """What the server says to a good request."""
    return steady(server)


def steady(server: Server) -> str:
    response = server.http.post("/v1/completions", json=STEADY)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def check_unharmed(server: Server, answer: str) -> None:
    """It answers as before, and holds nothing."""
    assert steady(server) == answer
    server.wait_until("requests_running", 0)
    assert server.metric("requests_waiting") == 0
    assert server.metric("kv_cache_usage_ratio") == 0


def check_answer(fault: Fault, response: httpx.Response) -> None:
    """The status, and an error in OpenAI's shape that says what is wrong."""
    assert response.status_code in fault.statuses, response.text[:500]
    if response.status_code == 200:
        return
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert len(error["message"]) < 700
    if fault.param is not None:
        assert error["param"].split("[")[0].split(".")[0] == fault.param
    for said in fault.says:
        assert said in error["message"]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: str(fault.number))
def test_a_request_at_fault(server: Server, answer: str, fault: Fault) -> None:
    check_answer(fault, fault.send(server.http))
    check_unharmed(server, answer)


@pytest.mark.parametrize("name", RAW)
def test_bytes_at_fault(server: Server, answer: str, name: str) -> None:
    data, status = RAW[name]
    assert server.raw(data).startswith(b"HTTP/1.1 " + status)
    check_unharmed(server, answer)


def test_memory_stays_flat(server: Server, answer: str) -> None:
    """Rounds of all faults leave no more behind than the first one did.

    A leak grows in each round, but an allocator takes more memory in one of them.
    """

    def round_of_all() -> int:
        for fault in FAULTS:
            check_answer(fault, fault.send(server.http))
        for data, _ in RAW.values():
            server.raw(data)
        return sum(
            process.memory_info().rss
            for process in server.processes()
            if GRAMMAR_WORKER not in process.cmdline()  # which is ended when it takes too long
        )

    sizes = [round_of_all() for _ in range(6)]
    assert min(after - before for before, after in pairwise(sizes[1:])) < 3 * 2**20, sizes
    check_unharmed(server, answer)


def test_only_the_http_port_listens(server: Server) -> None:
    """27: there is no other port to send a pickle to."""
    ports = {
        connection.laddr.port
        for process in server.processes()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert ports == {server.port}


# 19


@pytest.mark.parametrize("pattern", ["(", "[a-", "a{3,2}", "(?<=a)b"])
def test_a_pattern_that_cannot_be_kept_to(echo: Server, pattern: str) -> None:
    """Where arguments must follow it; it is told before anything runs."""
    body = {"model": "echo", "messages": CHAT["messages"], "max_tokens": 4}
    bad = body | {"tools": [tool({"n": {"type": "string", "pattern": pattern}})]}
    response = echo.http.post(CHATS, json=bad | {"tool_choice": "required"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith("tool")
    assert echo.http.post(CHATS, json=body).status_code == 200
    assert echo.metric("requests_running") == echo.metric("requests_waiting") == 0


# 37


def test_what_the_cache_can_never_hold_is_refused(crowded: Server) -> None:
    body = {"model": "mock", "prompt": [1] * 100, "max_tokens": 300}
    response = crowded.http.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "max_tokens"
    assert "--kv-cache-memory" in response.json()["error"]["message"]
    assert crowded.metric("kv_cache_usage_ratio") == 0


def test_requests_that_thrash_all_finish(crowded: Server) -> None:
    """Sixteen that would take five times what the cache holds; each is preempted a few times."""
    prompts = [[i + 1, i + 2] for i in range(16)]

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=crowded.url, timeout=120) as client:
            body = {"model": "mock", "max_tokens": 200, "seed": 0, "ignore_eos": True}
            asked = (client.post("/v1/completions", json=body | {"prompt": p}) for p in prompts)
            return await asyncio.gather(*asked)

    for prompt, response in zip(prompts, asyncio.run(run()), strict=True):
        text = "".join(chr(33 + token) for token in expected(prompt, 200, ends=()))
        assert response.json()["choices"][0]["text"] == text
    assert 0 < crowded.metric("preemptions_total") < 10 * len(prompts)
    crowded.wait_until("requests_running", 0)
    assert crowded.metric("kv_cache_usage_ratio") == 0


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A mock with 20 blocks of 16 tokens, for sixteen requests at once."""
    path = tmp_path_factory.mktemp("crowded")
    model = write_byte_level(path / "mock")
    settings = {"kv_cache_memory": 20 * 1024, "max_num_seqs": 16, "max_model_len": 512}
    with start_server(model, path, loader="support.mock_runner:load", **settings) as server:
        yield server


def test_every_fault_is_tested() -> None:
    """Those elsewhere, too, are where they are said to be."""
    raw = {int(name.split()[0]) for name in RAW}
    here = {fault.number for fault in FAULTS} | raw | {37}
    assert here.isdisjoint(ELSEWHERE)
    assert here | ELSEWHERE.keys() == set(range(1, 39))
    for place in chain.from_iterable(ELSEWHERE.values()):
        file, _, name = place.partition("::")
        assert f"def {name}(" in (TESTS / file).read_text(), place


# Hostile requests beside a steady one.

TEXTS = st.text(max_size=20) | st.sampled_from(["\x00", "\U0001f9f6", "<|im_end|>", "{{ 7 * 7 }}"])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-2, 40)
    | st.floats()
    | TEXTS,
    lambda values: st.lists(values, max_size=4) | st.dictionaries(TEXTS, values, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    [*sorted(CompletionRequest.model_fields | ChatRequest.model_fields), "no_such_field"]
)
HOSTILE = st.tuples(
    st.sampled_from(["/v1/completions", CHATS]),
    st.dictionaries(FIELDS, VALUES, min_size=1, max_size=4),
)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(hostile=st.lists(HOSTILE, min_size=1, max_size=4))
def test_hostile_requests_hurt_no_other(
    server: Server, loop: asyncio.Runner, answer: str, hostile: list[tuple[str, dict[str, Any]]]
) -> None:
    """Each gets 2xx or a structured 4xx; what runs beside them is the same to the byte."""

    async def run() -> tuple[httpx.Response, list[httpx.Response]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:

            async def attack(path: str, fields: dict[str, Any]) -> httpx.Response:
                body = (CHAT if path == CHATS else COMPLETION) | fields
                return await client.post(path, content=json.dumps(body), headers=JSON)

            calm = client.post("/v1/completions", json=STEADY)
            calm_one, *attacks = await asyncio.gather(calm, *(attack(*each) for each in hostile))
            return calm_one, attacks

    calm, attacks = loop.run(run())
    for response in attacks:
        assert 200 <= response.status_code < 300 or 400 <= response.status_code < 500, response.text
        if response.status_code >= 400:
            assert response.json()["error"]["message"]
    assert calm.json()["choices"][0]["text"] == answer
