"""Bodies are strict JSON, on every route: what could not be written again is refused when read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from pydantic import ValidationError
from support.server import Server

from weft.errors import RequestError
from weft.serving.api import app  # noqa: F401  imports every route's bodies
from weft.serving.api.body import MAX_DEPTH, Body, read_json

HALF = "\ud800"
MESSAGES = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": "echo", "messages": MESSAGES, "max_tokens": 4}


def lists(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize(
    ("data", "param", "says"),
    [
        (rb'{"a": "\ud800"}', "a", "a holds half of a surrogate pair"),
        (rb'{"a": [{}, {"b": "x\udc00\ud800"}]}', "a[1].b", "a[1].b holds half"),
        (rb'{"a": {"\udfff": 1}}', "a", "a has a field whose name holds half"),
        (rb'{"\ud800": 1}', None, "the body has a field whose name holds half"),
        (rb'["\ud800"]', "[0]", "[0] holds half"),
        (b'{"a": NaN}', "a", "a is nan"),
        (b'{"a": [1, -Infinity]}', "a[1]", "a[1] is -inf"),
        (b'{"a": ' + lists(MAX_DEPTH + 50) + b"}", "a" + "[0]" * 26 + "[", "nested too deeply"),
        (lists(100_000), None, "recursion"),
        (b'{"a": ' + b"9" * 5000 + b"}", None, "out of range at line 1"),
        (b'{"a": "\xed\xa0\x80"}', "a", "a holds half"),
        (b'{"a": "\xff"}', None, "line 1 column"),
        (b'{"a": 1,}', None, "line 1 column"),
        (b'{"a": 1} {}', None, "line 1 column"),
        (b'{"a": "\x01"}', None, "line 1 column"),
        ('{"a": 1}'.encode("utf-16"), None, "line 1 column"),
        (rb'{"a": "\ud800", "b": "' + b"x" * 100_000 + b'"}', None, "surrogate pair"),
    ],
)
def test_what_is_refused_is_named(data: bytes, param: str | None, says: str) -> None:
    with pytest.raises(RequestError) as error:
        read_json(data)
    assert (error.value.status, error.value.code) == (400, "invalid_json")
    assert error.value.param == param
    assert says in error.value.message
    assert len(error.value.message) < 200


def test_what_is_read() -> None:
    assert read_json('{"a": "\\ud83d\\ude00 é\\u0000", "b": [1.5, -0, null]}'.encode()) == {
        "a": "\U0001f600 é\0",
        "b": [1.5, 0, None],
    }
    assert read_json(b'{"a": 1, "a": 2}') == {"a": 2}
    assert read_json(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}
    assert read_json(b"1" + b"0" * 50) == 10**50
    assert read_json(lists(MAX_DEPTH)) == json.loads(lists(MAX_DEPTH))


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {HALF: {}}}}}
USE = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"a": {HALF: HALF}}}],
    },
]


HALVES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"user": HALF}, "user"),
    ("/v1/chat/completions", {"metadata": {"a": HALF}}, "metadata.a"),
    ("/v1/chat/completions", {"metadata": {HALF: "a"}}, "metadata"),
    (
        "/v1/chat/completions",
        {"tools": [TOOL], "tool_choice": "none"},
        "tools[0].function.parameters.properties",
    ),
    ("/v1/completions", {"prompt": HALF}, "prompt"),
    ("/v1/embeddings", {"input": ["a", HALF]}, "input[1]"),
    ("/v1/responses", {"input": "hi", "metadata": {"a": HALF}}, "metadata.a"),
    ("/v1/responses/input_tokens", {"input": HALF}, "input"),
    ("/v1/messages", {"messages": USE}, "messages[1].content[0].input.a"),
    ("/v1/messages/count_tokens", {"messages": USE}, "messages[1].content[0].input.a"),
    (
        "/v1/messages/batches",
        {"requests": [{"custom_id": "a", "params": {"a": HALF}}]},
        "requests[0].params.a",
    ),
    ("/v1/batches", {"metadata": {"a": HALF}}, "metadata.a"),
    ("/tokenize", {"prompt": HALF}, "prompt"),
    ("/detokenize", {HALF: 1}, "the body"),
]


@pytest.mark.parametrize(("path", "fields", "place"), HALVES)
def test_half_of_a_surrogate_pair(
    echo: Server, path: str, fields: dict[str, Any], place: str
) -> None:
    body = json.dumps({"model": "echo"} | (CHAT if "chat" in path else {}) | fields)
    headers = {"content-type": "application/json"}
    response = echo.http.post(path, content=body, headers=headers)
    assert response.status_code == 400, response.text
    anthropics = path.startswith("/v1/messages")
    assert (response.json().get("type") == "error") == anthropics
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"{place} ")
    assert "half of a surrogate pair" in error["message"]


def test_every_route_with_a_body_reads_it_so(echo: Server) -> None:
    taking = {
        path
        for path, methods in echo.http.get("/openapi.json").json()["paths"].items()
        for method in methods.values()
        if "application/json" in method.get("requestBody", {}).get("content", {})
    }
    assert taking == {path for path, _, _ in HALVES}


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/chat/completions", "response_format", {"json_schema": {"name": "s", "schema": 0}}),
        ("/v1/chat/completions", "guided_json", 0),
        ("/v1/chat/completions", "tools", [{"type": "function", "function": {"parameters": 0}}]),
        ("/v1/responses", "text", {"format": {"type": "json_schema", "name": "s", "schema": 0}}),
        ("/v1/messages", "tools", [{"name": "f", "input_schema": 0}]),
    ],
)
def test_schemas_that_are_nested_too_deeply(
    echo: Server, path: str, field: str, value: Any
) -> None:
    schema = '{"items":' * 900 + "{}" + "}" * 900
    body = json.dumps(CHAT | {"max_tokens": 4, field: value}).replace("0", schema)
    headers = {"content-type": "application/json"}
    response = echo.http.post(path, content=body, headers=headers)
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert message.startswith(f"{field}")
    assert "is nested too deeply: over 200" in message


def _bodies(kind: type[Body] = Body) -> Iterator[type[Body]]:
    for each in kind.__subclasses__():
        yield each
        yield from _bodies(each)


MANY = 5000
HOSTILE: dict[str, Any] = {
    "numbers": [1] * MANY,
    "texts": ["x"] * MANY,
    "empty texts": [""] * MANY,
    "nulls": [None] * MANY,
    "lists": [[]] * MANY,
    "objects": [{}] * MANY,
    "objects without a known field": [{f"k{i}": 1 for i in range(MANY)}],
    "objects with a list": [{"type": "text", "content": [1] * MANY, "text": [1] * MANY}],
    "keys": {f"k{i}": 1 for i in range(MANY)},
    "keys with texts": {str(i): "x" for i in range(MANY)},
    "keys beside a type": {f"k{i}": 1 for i in range(MANY)} | {"type": "function"},
}


@pytest.mark.parametrize("body", dict.fromkeys(_bodies()), ids=lambda body: body.__name__)
def test_wrong_elements_are_not_all_described(body: type[Body]) -> None:
    """pydantic describes each: the work for a small body was seconds, and gigabytes."""
    for what, value in HOSTILE.items():
        for name, field in body.model_fields.items():
            with suppress(RequestError):
                with pytest.raises(ValidationError) as caught:
                    body.model_validate({field.alias or name: value, "no such field": 1})
                count = caught.value.error_count()
                assert count < 100, f"{count} errors for {what} in {name}"
    with suppress(RequestError), pytest.raises(ValidationError) as caught:
        body.model_validate(HOSTILE["keys"])
    assert caught.value.error_count() == 1
