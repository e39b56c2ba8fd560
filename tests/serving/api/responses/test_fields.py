"""Every field of /v1/responses: the server agrees with the table in docs/api.md."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses.input_token_count_params import InputTokenCountParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from support.field_tables import field_table
from support.server import Server

from weft.serving.api.responses.requests import InputTokensRequest, ResponsesRequest

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
TAKEN: dict[str, list[Any]] = {
    "model": ["echo"],
    "input": ["a", [{"role": "user", "content": "a"}]],
    "instructions": ["be brief"],
    "previous_response_id": [],
    "store": [True, False],
    "include": [
        [],
        ["reasoning.encrypted_content", "message.output_text.logprobs"],
        ["file_search_call.results"],
    ],
    "max_output_tokens": [5],
    "temperature": [0, 2.0],
    "top_logprobs": [0, 20],
    "top_p": [0.5],
    "stream": [True, False],
    "stream_options": [{}, {"include_obfuscation": False}],
    "tools": [[], [TOOL]],
    "tool_choice": ["none", "auto"],
    "parallel_tool_calls": [True, False],
    "reasoning": [
        {"effort": "high", "summary": "auto", "generate_summary": "concise", "context": "auto"},
        {"effort": None, "summary": None, "mode": "standard"},
    ],
    "text": [{}, {"format": {"type": "text"}, "verbosity": "medium"}],
    "truncation": ["auto", "disabled"],
    "background": [False],
    "service_tier": ["auto", "default"],
    "max_tool_calls": [3],
    "metadata": [{"a": "b"}],
    "client_metadata": [{"a": "b"}],
    "user": ["me"],
    "safety_identifier": ["me"],
    "prompt_cache_key": ["k"],
    "prompt_cache_options": [{"mode": "implicit"}],
    "prompt_cache_retention": ["24h"],
    "seed": [5],
    "stop": ["zz", ["zz"]],
    "top_k": [5],
    "min_p": [0.1],
    "ignore_eos": [False],
    "priority": [-1],
}
NOT_TAKEN: dict[str, Any] = {
    "background": True,
    "service_tier": "flex",
    "stream_options": {"include_obfuscation": True},
    "max_tool_calls": "a",
    "metadata": "a",
    "client_metadata": "a",
    "user": 5,
    "safety_identifier": 5,
    "prompt_cache_key": 5,
    "prompt_cache_options": "a",
    "prompt_cache_retention": 24,
}


ROWS = {row.field: row.says["responses"] for row in field_table("Fields of responses", "responses")}


def named(*kinds: str) -> list[str]:
    return [name for name, says in ROWS.items() if says in kinds]


def post(echo: Server, fields: dict[str, Any]) -> Any:
    return echo.http.post("/v1/responses", json={"model": "echo", "input": "a"} | fields)


def test_the_table_has_exactly_the_fields_of_the_code() -> None:
    assert set(ROWS.values()) == {"yes", "no effect", "refused"}
    assert sorted(ROWS) == sorted(ResponsesRequest.model_fields)


def test_the_table_has_every_field_of_openai_s_client() -> None:
    assert set(ResponseCreateParamsBase.__annotations__) | {"stream"} <= ROWS.keys()
    assert set(InputTokenCountParams.__annotations__) <= InputTokensRequest.model_fields.keys()


@pytest.mark.parametrize("field", named("yes", "no effect"))
def test_a_field_is_taken(echo: Server, field: str) -> None:
    for value in [*TAKEN[field], *([None] if field != "input" else [])]:
        needed = {"tools": [TOOL]} if field == "tool_choice" else {}
        response = post(echo, needed | {field: value})
        assert response.status_code == 200, (field, value, response.text)


@pytest.mark.parametrize("field", named("no effect"))
def test_a_value_with_an_effect_is_refused(echo: Server, field: str) -> None:
    response = post(echo, {field: NOT_TAKEN[field]})
    assert response.status_code == 400, (field, response.text)
    assert response.json()["error"]["param"].startswith(field)


@pytest.mark.parametrize("field", named("refused"))
def test_a_field_is_refused(echo: Server, field: str) -> None:
    assert post(echo, {field: None}).status_code == 200
    for value in ("a", {"id": "a"}, True, 1):
        response = post(echo, {field: value})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == field
        assert field in error["message"]


def test_an_answer_can_go_on_after_its_end(echo: Server) -> None:
    """Load generators such as GuideLLM ask for exact lengths."""
    answer = post(echo, {"ignore_eos": True, "max_output_tokens": 9}).json()
    assert answer["status"] == "incomplete"
    assert answer["usage"]["output_tokens"] == 9
    assert post(echo, {"max_output_tokens": 9}).json()["status"] == "completed"


@pytest.mark.parametrize(
    ("fields", "param", "value"),
    [
        ({"background": 0}, "background", "0"),
        ({"tools": [{"type": "custom", "name": "f", "async": 0}]}, "tools[0].async", "0"),
    ],
)
def test_zero_is_not_false(echo: Server, fields: dict[str, Any], param: str, value: str) -> None:
    error = post(echo, fields).json()["error"]
    assert (error["param"], error["code"]) == (param, "unsupported_value")
    assert error["message"].startswith(f"{param} is {value}; this server takes ")
