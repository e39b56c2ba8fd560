"""Every field for chats and completions: the server agrees with the table in docs/api.md."""

from __future__ import annotations

import re
from typing import Any, Literal

import httpx
import pytest
from openai.types import completion_create_params as openai_completion
from openai.types.chat import completion_create_params as openai_chat
from support.field_tables import field_table

from weft.serving.api.openai.requests import ChatRequest, CompletionRequest

Route = Literal["chats", "completions"]
ROUTES: tuple[Route, ...] = ("chats", "completions")
PATHS = {"chats": "/v1/chat/completions", "completions": "/v1/completions"}
MODELS = {"chats": ChatRequest, "completions": CompletionRequest}
MESSAGES = [{"role": "user", "content": "the weft"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

TAKEN: dict[str, list[Any]] = {
    "messages": [MESSAGES],
    "prompt": ["a", ["a", "b"], [1, 2], [[1], [2]]],
    "model": ["tiny"],
    "max_tokens": [1],
    "max_completion_tokens": [1],
    "n": [2],
    "temperature": [0, 2.0],
    "presence_penalty": [-2, 2.0],
    "frequency_penalty": [-2, 2.0],
    "logit_bias": [{}, {"5": 3}],
    "seed": [-5],
    "top_p": [0, 0.5, 1],
    "stop": ["a", ["a", "b"]],
    "stream": [False, True],
    "stream_options": [{"include_usage": True, "continuous_usage_stats": True}],
    "tools": [[TOOL]],
    "tool_choice": ["none", "auto"],
    "parallel_tool_calls": [True, False],
    "response_format": [{"type": "text"}],
    "reasoning_effort": ["none", "high"],
    "echo": [False, True],
    "best_of": [1],
    "suffix": [""],
    "modalities": [["text"]],
    "service_tier": ["auto", "default"],
    "store": [False],
    "verbosity": ["medium"],
    "user": ["me"],
    "metadata": [{"a": "b"}],
    "safety_identifier": ["me"],
    "prompt_cache_key": ["k"],
    "prompt_cache_options": [{"mode": "implicit"}],
    "prompt_cache_retention": ["24h"],
    "top_k": [-1, 0, 5],
    "min_p": [0.1],
    "repetition_penalty": [1.5],
    "min_tokens": [1],
    "ignore_eos": [True],
    "stop_token_ids": [[5]],
    "allowed_token_ids": [[5, 6]],
    "bad_words": [["a"]],
    "include_stop_str_in_output": [True, False],
    "skip_special_tokens": [True, False],
    "add_special_tokens": [True, False],
    "truncate_prompt_tokens": [-1, 1, 5000],
    "prompt_logprobs": [0, 20],
    "return_token_ids": [True, False],
    "cache_salt": ["s"],
    "priority": [0, -5],
    "structured_outputs": [{"choice": ["yes"]}],
    "guided_json": [{"type": "boolean"}],
    "guided_regex": ["a+"],
    "guided_choice": [["yes"]],
    "guided_grammar": ['root ::= "a"'],
    "json_schema": [{"type": "boolean"}],
    "regex": ["a+"],
    "ebnf": ['root ::= "a"'],
    "chat_template_kwargs": [{}, {"enable_thinking": False}],
    "add_generation_prompt": [True, False],
    "continue_final_message": [False],
    "include_reasoning": [True, False],
    "spaces_between_special_tokens": [True],
    "use_beam_search": [False],
    "early_stopping": [False],
    "length_penalty": [1, 1.0],
    "keep_alive": [-1, "5m", 0.5],
}
TAKEN_IN: dict[tuple[Route, str], list[Any]] = {
    ("chats", "logprobs"): [True, False],
    ("completions", "logprobs"): [0, 5],
    ("chats", "top_logprobs"): [0],
}
NEEDS: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "tool_choice": {"tools": [TOOL]},
    "max_completion_tokens": {"max_tokens": None},
}
NOT_TAKEN: dict[str, Any] = {
    "best_of": 2,
    "suffix": "end",
    "modalities": ["audio"],
    "service_tier": "flex",
    "store": True,
    "spaces_between_special_tokens": False,
    "use_beam_search": True,
    "early_stopping": True,
    "length_penalty": 1.5,
    "user": 5,
    "metadata": "a",
    "safety_identifier": 5,
    "prompt_cache_key": 5,
    "prompt_cache_options": "24h",
    "prompt_cache_retention": 24,
    "keep_alive": [],
}
WITHOUT_EFFECT = {"temperature": 0, "max_tokens": 4}


ROWS = field_table("Fields of chats and completions", *ROUTES)


def post(http: httpx.Client, route: Route, fields: dict[str, Any]) -> httpx.Response:
    body = {"messages": MESSAGES} if route == "chats" else {"prompt": "the weft"}
    return http.post(PATHS[route], json=body | WITHOUT_EFFECT | fields)


def refusal(http: httpx.Client, route: Route, field: str, value: Any) -> str:
    response = post(http, route, {field: value})
    assert response.status_code == 400, (field, value, response.text)
    error = response.json()["error"]
    assert re.split(r"[.\[]", error["param"])[0] == field
    assert field in error["message"]
    message: str = error["message"]
    return message


def cases(*kinds: str) -> list[Any]:
    return [
        pytest.param(route, row.field, id=f"{route}-{row.field}")
        for row in ROWS
        for route in ROUTES
        if row.says[route] in kinds
    ]


@pytest.mark.parametrize("route", ROUTES)
def test_the_table_has_exactly_the_fields_of_the_code(route: Route) -> None:
    assert {row.says[route] for row in ROWS} == {"yes", "no effect", "refused", "-"}
    named = [row.field for row in ROWS if row.says[route] != "-"]
    assert sorted(named) == sorted(MODELS[route].model_fields)


@pytest.mark.parametrize("route", ROUTES)
def test_the_table_has_every_field_of_openai_s_client(route: Route) -> None:
    params = {"chats": openai_chat, "completions": openai_completion}[route]
    theirs = set(params.CompletionCreateParamsBase.__annotations__) | {"stream"}
    assert theirs <= {row.field for row in ROWS if row.says[route] != "-"}


@pytest.mark.parametrize(("route", "field"), cases("yes", "no effect"))
def test_a_field_is_taken(http: httpx.Client, route: Route, field: str) -> None:
    """Null is taken, too, but for the messages or the prompt."""
    values = TAKEN_IN.get((route, field)) or TAKEN[field]
    for value in [*values, *([None] if field not in ("messages", "prompt") else [])]:
        needed = NEEDS.get(field, {}) if value is not None else {}
        response = post(http, route, needed | {field: value})
        assert response.status_code == 200, (field, value, response.text)


@pytest.mark.parametrize(("route", "field"), cases("no effect"))
def test_a_field_without_effect(http: httpx.Client, route: Route, field: str) -> None:
    plain = post(http, route, {}).json()["choices"]
    for value in TAKEN[field]:
        assert post(http, route, {field: value}).json()["choices"] == plain
    refusal(http, route, field, NOT_TAKEN[field])


@pytest.mark.parametrize(("route", "field"), cases("refused"))
def test_a_refused_field(http: httpx.Client, route: Route, field: str) -> None:
    for value in ({}, [], "x", 1, True):
        assert refusal(http, route, field, value) == f"{field} is not supported; leave it out"
    assert post(http, route, {field: None}).status_code == 200


@pytest.mark.parametrize(("route", "field"), cases("-"))
def test_a_field_of_the_other_route(http: httpx.Client, route: Route, field: str) -> None:
    other = TAKEN.get(field, ["x"])[0]
    assert refusal(http, route, field, other) == f"{field} is not a field that this server knows"
