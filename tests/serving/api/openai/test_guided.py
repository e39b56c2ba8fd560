"""Structured output over HTTP: every name that a client knows it by, streamed and whole."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel
from support.server import Server

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
COMPLETION = {"model": "tiny", "prompt": "hi", "max_tokens": 200}
HOT = {"temperature": 2.0, "seed": 3}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["S", "M", "L"]}},
    "required": ["ok", "size"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<a>",
        "content": {"type": "regex", "pattern": "b+"},
        "end": "</a>",
    },
}


def is_json(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


FIELDS: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
     is_json),
    ({"response_format": {"type": "json_schema",
                          "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
     is_json),
    ({"response_format": TAG}, lambda text: re.fullmatch("<a>b+</a>", text)),
    ({"structured_outputs": {"json": SCHEMA}}, is_json),
    ({"structured_outputs": {"regex": "[ab]{3}"}}, lambda text: re.fullmatch("[ab]{3}", text)),
    ({"structured_outputs": {"choice": ["red", "blue"]}}, {"red", "blue"}.__contains__),
    ({"structured_outputs": {"grammar": 'root ::= "x" | "yy"'}}, {"x", "yy"}.__contains__),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}},
     lambda text: re.fullmatch("<a>b+</a>", text)),
    ({"guided_json": json.dumps(SCHEMA)}, is_json),
    ({"guided_regex": "[ab]{3}"}, lambda text: re.fullmatch("[ab]{3}", text)),
    ({"guided_choice": ["red", "blue"]}, {"red", "blue"}.__contains__),
    ({"guided_grammar": 'root ::= "x" | "yy"'}, {"x", "yy"}.__contains__),
    ({"json_schema": SCHEMA}, is_json),
    ({"regex": "[ab]{3}"}, lambda text: re.fullmatch("[ab]{3}", text)),
    ({"ebnf": 'root ::= "x" | "yy"'}, {"x", "yy"}.__contains__),
]  # fmt: skip


def ask(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    choices: list[dict[str, Any]] = response.json()["choices"]
    return choices


def text_of(choice: dict[str, Any]) -> str:
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


@pytest.mark.parametrize(("fields", "suits"), FIELDS)
def test_every_name_for_it(http: httpx.Client, fields: dict[str, Any], suits: Any) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        (choice,) = ask(http, path, body | HOT | fields)
        assert choice["finish_reason"] == "stop"
        assert suits(text_of(choice))


def test_each_of_several_answers_keeps_to_it(http: httpx.Client) -> None:
    body = CHAT | {"temperature": 2.0, "n": 4, "guided_choice": ["red", "blue"]}
    texts = [text_of(choice) for choice in ask(http, "/v1/chat/completions", body)]
    assert len(texts) == 4
    assert set(texts) <= {"red", "blue"}


def test_any_object(http: httpx.Client) -> None:
    for fields in (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
    ):
        for choice in ask(http, "/v1/chat/completions", CHAT | HOT | fields | {"n": 2}):
            if choice["finish_reason"] == "stop":
                assert isinstance(json.loads(text_of(choice)), dict)
            else:
                assert text_of(choice).startswith("{")


def test_streamed_equals_whole(http: httpx.Client) -> None:
    body = CHAT | HOT | {"guided_json": SCHEMA, "logprobs": True, "top_logprobs": 2}
    (whole,) = ask(http, "/v1/chat/completions", body)
    with http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as got:
        lines = [line for line in got.iter_lines() if line and "[DONE]" not in line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    pieces = [choice for event in events for choice in event["choices"]]
    assert "".join(p["delta"].get("content") or "" for p in pieces) == text_of(whole)
    assert pieces[-1]["finish_reason"] == whole["finish_reason"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": SCHEMA, "regex": "a"}, "regex"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex"),
    ],
)
def test_it_can_be_said_once(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    error = refused(http, fields)
    assert error["param"] == param
    assert "give one of them" in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("regex", "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"),
        ("guided_regex", "(" * 60_000 + "a" + ")" * 60_000),
        ("guided_regex", "x" * 300_000),
        ("guided_regex", ""),
        ("guided_regex", "\ud800"),
        ("ebnf", "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000),
        ("guided_json", {"$ref": "#"}),
        ("guided_json", {"type": "object", "not": {}}),
        ("guided_json", '{"items":' * 10_000 + "{}" + "}" * 10_000),
        ("guided_json", "{"),
        ("guided_choice", []),
        ("guided_choice", [""]),
        ("guided_choice", ["a"] * 2000),
    ],
)
def test_what_is_hostile_is_named_and_the_next_request_works(
    http: httpx.Client, field: str, value: Any
) -> None:
    for stream in (False, True):
        error = refused(http, {field: value, "stream": stream})
        assert error["param"] == field
        assert field in error["message"]
    (choice,) = ask(http, "/v1/completions", COMPLETION | {"guided_choice": ["fine"]})
    assert text_of(choice) == "fine"


@pytest.mark.parametrize("value", [{}, {"json": None}, {"json_object": False}])
def test_structured_outputs_that_say_nothing(http: httpx.Client, value: dict[str, Any]) -> None:
    error = refused(http, {"structured_outputs": value})
    assert (error["param"], error["code"]) == ("structured_outputs", "missing_parameter")
    assert "json, regex, choice" in error["message"]


def test_a_grammar_that_fails_half_way_is_at_fault(http: httpx.Client) -> None:
    """Behind so many characters that no look at it beforehand comes there."""
    field = {"ebnf": 'root ::= [b-y]{300} "a" dead\ndead ::= [^\\u0000-\\U0010FFFF]'}
    asked = COMPLETION | HOT | field | {"max_tokens": 400, "ignore_eos": True}
    response = http.post("/v1/completions", json=asked)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("ebnf", "invalid_grammar")
    with http.stream("POST", "/v1/completions", json=asked | {"stream": True}) as got:
        assert "invalid_grammar" in got.read().decode()


def refused(http: httpx.Client, fields: dict[str, Any]) -> dict[str, Any]:
    response = http.post(
        "/v1/completions",
        content=json.dumps(COMPLETION | fields),
        headers={"content-type": "application/json"},
    )
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def test_the_openai_package_parses_what_it_asked_for(server: Server) -> None:
    class Shirt(BaseModel):
        size: Literal["S", "M", "L"]
        clean: bool

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.parse(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            response_format=Shirt,
            max_tokens=200,
        )
    assert isinstance(answer.choices[0].message.parsed, Shirt)
