"""Whatever is wrong with a request: a 4xx in OpenAI's shape that names the field."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import pytest
from support.server import Server

COMPLETION = {"model": "tiny", "prompt": "weft", "max_tokens": 2}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def failure(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of a response, once its shape is checked."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 500
    return error


BAD_SAMPLING = [
    ("n", 0),
    ("n", 10**9),
    ("n", "2"),
    ("n", True),
    ("max_tokens", -1),
    ("max_tokens", 2**63),
    ("max_tokens", 1.5),
    ("temperature", -0.1),
    ("temperature", 1e308),
    ("temperature", "hot"),
    ("top_p", -0.1),
    ("top_p", 1.01),
    ("top_k", -2),
    ("min_p", 2),
    ("repetition_penalty", 0),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("seed", 2**64),
    ("seed", 10**400),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["a"] * 60_000),
    ("stop", [1]),
    ("stop", "a" * 5000),
    ("stop_token_ids", [10**6]),
    ("stop_token_ids", [-1]),
    ("logit_bias", {"999999": 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", [1]),
    ("min_tokens", 10),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("priority", 2**40),
    ("user", 5),
    ("model", 1),
    ("logprobs_of", 1),
    ("chat_template", "{{ 1 }}"),
    ("chat_template_kwargs", {"add_generation_prompt": False}),
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(("param", "value"), BAD_SAMPLING)
def test_a_bad_setting_is_named(http: httpx.Client, path: str, param: str, value: Any) -> None:
    body = (CHAT if "chat" in path else COMPLETION) | {param: value}
    error = failure(http.post(path, json=body))
    assert error["type"] == "invalid_request_error"
    assert error["param"] is not None
    assert error["param"].split("[")[0].split(".")[0] == param
    assert param in error["message"]


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("prompt", ""),
        ("prompt", []),
        ("prompt", [""]),
        ("prompt", [[]]),
        ("prompt", ["a", [1]]),
        ("prompt", [1, "a"]),
        ("prompt", [1, True]),
        ("prompt", [1.0]),
        ("prompt", None),
        ("prompt", {"text": "a"}),
        ("prompt", [999_999]),
        ("prompt", [-1]),
        ("prompt", [2**80]),
        ("prompt", ["a"] * 257),
        ("best_of", 2),
        ("best_of", 10**9),
        ("suffix", "end"),
        ("logprobs", 1_000_000),
        ("logprobs", -1),
        ("logprobs", True),
        ("max_tokens", 0),
    ],
)
def test_completions_own_fields(http: httpx.Client, param: str, value: Any) -> None:
    error = failure(http.post("/v1/completions", json=COMPLETION | {param: value}))
    assert error["param"] == param


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("messages", []),
        ("messages", "hi"),
        ("messages[0].role", [{"role": "emperor", "content": "hi"}]),
        ("messages[0].content", [{"role": "user"}]),
        ("messages[0].content", [{"role": "user", "content": None}]),
        ("messages[0].content", [{"role": "user", "content": 5}]),
        ("messages[0].content[0].type", [{"role": "user", "content": [{"type": "image_url"}]}]),
        ("messages[0].colour", [{"role": "user", "content": "hi", "colour": "red"}]),
        ("max_completion_tokens", 0),
        ("max_completion_tokens", 5),
        ("logprobs", 2),
        ("top_logprobs", 2),
        ("tools[0].type", [{"type": "computer"}]),
        ("tools[0].function", [{"type": "function"}]),
        ("tools[0].function.name", [{"type": "function", "function": {"name": "a b"}}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("response_format.type", {"type": "xml"}),
        ("response_format.json_schema", {"type": "json_schema"}),
        ("response_format.json_schema", {"type": "text", "json_schema": {"name": "a"}}),
        ("response_format.json_schema.name", {"type": "json_schema", "json_schema": {}}),
        ("response_format.format", {"type": "structural_tag"}),
        ("structured_outputs.xml", {"xml": "a"}),
        ("functions", []),
        ("function_call", "auto"),
        ("audio", {"voice": "alloy"}),
        ("modalities[0]", ["audio"]),
        ("store", True),
        ("service_tier", "flex"),
        ("reasoning_effort", "much"),
        ("prediction", {"type": "content", "content": "x"}),
        ("web_search_options", {}),
    ],
)
def test_chats_own_fields(http: httpx.Client, param: str, value: Any) -> None:
    field = param.split("[")[0].split(".")[0]
    error = failure(http.post("/v1/chat/completions", json=CHAT | {field: value}))
    assert error["param"] in (param, "max_tokens")


def test_an_unsupported_value_says_what_is_taken(http: httpx.Client) -> None:
    body = CHAT | {"service_tier": "flex"}
    error = failure(http.post("/v1/chat/completions", json=body))
    assert error["message"] == "service_tier is 'flex'; this server takes 'auto' or 'default'"
    assert error["code"] == "unsupported_value"


def test_a_missing_field_is_named(http: httpx.Client) -> None:
    error = failure(http.post("/v1/completions", json={"model": "tiny"}))
    assert (error["param"], error["code"]) == ("prompt", "missing_parameter")


def test_a_prompt_beyond_the_context_gives_both_counts(http: httpx.Client) -> None:
    for path, body in (
        ("/v1/completions", COMPLETION | {"prompt": [5] * 600}),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "z" * 600}]}),
    ):
        error = failure(http.post(path, json=body))
        assert "512" in error["message"]
        assert "6" in error["message"]


def test_too_many_answers_in_one_request(http: httpx.Client) -> None:
    body = COMPLETION | {"prompt": ["a"] * 100, "n": 100}
    assert failure(http.post("/v1/completions", json=body))["param"] == "n"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_unknown_model(http: httpx.Client, path: str) -> None:
    body = (CHAT if "chat" in path else COMPLETION) | {"model": "gpt-9"}
    error = failure(http.post(path, json=body), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "gpt-9" in error["message"]
    assert "tiny" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"\xff\xfe",
        b'{"model": "tiny", "prompt": ' + b"[" * 100_000,
        b'{"model": "tiny", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model": "tiny", "prompt": "a\\ud800b"}',
        b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "a", "temperature": Infinity}',
        b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 10_000 + b"}",
    ],
)
def test_a_bad_body(http: httpx.Client, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    failure(http.post("/v1/completions", content=body, headers=headers))


def test_a_zero_character_is_text(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json=COMPLETION | {"prompt": "a\x00b", "echo": True})
    assert response.json()["choices"][0]["text"].startswith("a\x00b")


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
    ],
    ids=str,
)
def test_another_content_type(http: httpx.Client, headers: dict[str, str]) -> None:
    body = json.dumps(COMPLETION).encode()
    error = failure(http.post("/v1/completions", content=body, headers=headers), 415)
    assert "application/json" in error["message"]


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "gzip, br"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/files"])
def test_a_compressed_body(http: httpx.Client, path: str, coding: str) -> None:
    kind = "application/json" if path == "/v1/completions" else "multipart/form-data; boundary=a"
    headers = {"content-encoding": coding, "content-type": kind}
    response = http.post(path, content=gzip.compress(b"{}"), headers=headers)
    assert repr(coding) in failure(response, 415)["message"]
    assert response.headers["accept-encoding"] == "identity"


def test_a_body_that_is_not_compressed_may_say_so(http: httpx.Client) -> None:
    headers = {"content-encoding": "identity"}
    assert http.post("/v1/completions", json=COMPLETION, headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_body_without_a_content_type_is_json(http: httpx.Client, path: str) -> None:
    body = json.dumps({"model": COMPLETION["model"], "prompt": "one"}).encode()
    assert http.post(path, content=body).status_code == 200
    error = failure(http.post(path, content=b"no json"))
    assert "JSON" in error["message"]


def test_a_charset_is_fine(http: httpx.Client) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    body = json.dumps(COMPLETION).encode()
    assert http.post("/v1/completions", content=body, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("path", "param", "body"),
    [
        ("/v1/chat/completions", "top_logprobs", CHAT | {"logprobs": True, "top_logprobs": -1}),
        ("/v1/chat/completions", "max_completion_tokens", CHAT | {"max_completion_tokens": 2**31}),
        ("/v1/responses", "max_output_tokens", {"input": "a", "max_output_tokens": 0}),
        ("/v1/responses", "max_output_tokens", {"input": "a", "max_output_tokens": 2**40}),
    ],
)
def test_the_field_of_the_client_is_named(
    http: httpx.Client, path: str, param: str, body: dict[str, Any]
) -> None:
    error = failure(http.post(path, json={"model": CHAT["model"]} | body))
    assert error["param"] == param
    assert error["message"].startswith(f"{param} is ")


LONG = "m" * 10**6


@pytest.mark.parametrize(
    "changes",
    [{"model": LONG}, {"seed": int("9" * 4000)}, {LONG: 1}, {"response_format": {LONG: 1}}],
    ids=["model", "seed", "name of a field", "name inside"],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_a_long_value_is_not_repeated(
    http: httpx.Client, path: str, changes: dict[str, Any]
) -> None:
    response = http.post(path, json=COMPLETION | changes)
    assert response.status_code in (400, 404)
    assert len(response.content) < 3000


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_null_is_not_called_missing(http: httpx.Client, role: str) -> None:
    message = {"role": role, "content": None, "tool_call_id": "a"}
    error = failure(http.post("/v1/chat/completions", json=CHAT | {"messages": [message]}))
    assert error["message"].startswith("messages[0].content is null; ")
    assert error["param"] == "messages[0].content"
    del message["content"]
    error = failure(http.post("/v1/chat/completions", json=CHAT | {"messages": [message]}))
    assert (error["message"], error["code"]) == (
        "messages[0].content is missing",
        "missing_parameter",
    )


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("chat/completions", {"max_tokens": True}, "max_tokens is true; it should be a valid int"),
        ("completions", {"keep_alive": [1]}, "keep_alive is [1]; it must be a text or a number"),
        ("chat/completions", {"stop": [None]}, "stop[0] is null; it should be a valid string"),
        ("chat/completions", {"store": 1}, "store is 1; this server takes false"),
        ("chat/completions", {"tool_choice": True}, "tool_choice is true; this server accepts"),
        (
            "chat/completions",
            {"logit_bias": [True, {"a": None}]},
            "is [true, {'a': null}]; it shou",
        ),
        ("chat/completions", {"messages": [False]}, "messages[0] is false; it should be an object"),
        ("messages", {"max_tokens": None}, "max_tokens is null; it should be a valid integer"),
        ("responses", {"input": None}, "input is null; it should be a valid list"),
    ],
)
def test_words_are_those_of_json(
    http: httpx.Client, path: str, fields: dict[str, Any], message: str
) -> None:
    error = http.post(f"/v1/{path}", json=CHAT | fields).json()["error"]
    assert message in error["message"]


def test_many_unknown_fields_are_one_error(http: httpx.Client) -> None:
    error = failure(http.post("/v1/completions", json={f"k{i}": 1 for i in range(60_000)}))
    assert error["message"].startswith("the body has 60,000 fields; this server knows ")
    assert error["param"] is None


def test_a_slash_at_the_end_is_another_path(http: httpx.Client) -> None:
    """A redirect to the right path would repeat the client's Host."""
    headers = {"host": "evil.localhost"}
    response = http.post("/v1/chat/completions/", json=CHAT, headers=headers)
    assert "/v1/chat/completions/" in failure(response, 404)["message"]
    assert "location" not in response.headers


@pytest.mark.parametrize("path", ["/v1", "/v1/rerank", "/v1/chat/completions/x"])
def test_unknown_path(http: httpx.Client, path: str) -> None:
    assert path in failure(http.get(path), 404)["message"]


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/completions"), ("DELETE", "/v1/models/tiny"), ("POST", "/health")],
)
def test_wrong_method(http: httpx.Client, method: str, path: str) -> None:
    headers = {"content-type": "application/json"}
    response = http.request(method, path, headers=headers)
    assert method in failure(response, 405)["message"]
    assert response.headers["allow"]


def test_a_wrong_method_is_told_all_that_are_right(http: httpx.Client) -> None:
    """Also where each of them is a route of its own."""
    assert http.request("PUT", "/v1/files").headers["allow"] == "GET, POST"
    assert http.request("PUT", "/v1/files/x").headers["allow"] == "DELETE, GET"


def test_a_body_that_is_too_large(server: Server, http: httpx.Client) -> None:
    """Refused by its announced length, before it is sent, and while it is sent without one."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    answer = server.raw(head + b"content-length: 1000000000\r\n\r\n")
    assert b" 413 " in answer.partition(b"\r\n")[0]
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"]
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    answer = server.raw(head + b"transfer-encoding: chunked\r\n\r\n" + chunk * 33)
    assert b" 413 " in answer.partition(b"\r\n")[0]
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize("head", [b"x: " + b"a" * 10_000_000, b"x: a\r\n" * 1_000_000])
def test_a_head_that_is_too_large(server: Server, http: httpx.Client, head: bytes) -> None:
    answer = server.raw(b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + head)
    assert b" 431 " in answer.partition(b"\r\n")[0]
    assert http.get("/health").status_code == 200


def test_no_http_at_all(server: Server, http: httpx.Client) -> None:
    assert b" 400 " in server.raw(b"\x80\x02cposix\nsystem\n(S'true'\ntR.\r\n\r\n")
    assert http.get("/health").status_code == 200
