"""Every Messages field: the server agrees with the table in docs/api.md."""

from __future__ import annotations

from typing import Any, Literal

import httpx
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_tokens_params
from anthropic.types.beta import message_create_params as beta_create_params
from support.field_tables import field_table

from weft.serving.api.anthropic.requests import CountRequest, MessagesRequest

Route = Literal["messages", "count_tokens"]
ROUTES: tuple[Route, ...] = ("messages", "count_tokens")
PATHS = {"messages": "/v1/messages", "count_tokens": "/v1/messages/count_tokens"}
MODELS = {"messages": MessagesRequest, "count_tokens": CountRequest}
THEIRS = {
    "messages": (message_create_params, beta_create_params),
    "count_tokens": (message_count_tokens_params, beta_count_tokens_params),
}
REQUIRED: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 4,
    "messages": [{"role": "user", "content": "the weft"}],
}
# The SDK sends them as headers.
HEADERS = {"betas", "user_profile_id", "workspace_id"}
FORMAT = {"type": "json_schema", "schema": {"type": "boolean"}}
TOOL = {"name": "f", "input_schema": {"type": "object"}}

TAKEN: dict[str, list[Any]] = {
    "messages": [
        REQUIRED["messages"],
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": []}],
        [*REQUIRED["messages"], {"role": "system", "content": "be kind"}],
        [*REQUIRED["messages"], {"role": "assistant", "content": "The"}],
    ],
    "model": ["tiny"],
    "max_tokens": [1],
    "system": ["be brief", [{"type": "text", "text": "be brief", "cache_control": None}]],
    "stop_sequences": [["a", "b"]],
    "stream": [False, True],
    "temperature": [0, 0.5],
    "top_k": [5],
    "top_p": [0.5],
    "thinking": [
        {"type": "enabled", "budget_tokens": 1024},
        {"type": "disabled"},
        {"type": "adaptive", "display": "summarized"},
        {"type": "adaptive", "display": "omitted", "block_binding": {}},
    ],
    "output_config": [{}, {"effort": "max"}, {"format": FORMAT, "effort": None}],
    "output_format": [FORMAT],
    "tools": [[], [TOOL], [{"type": "web_search_20250305", "name": "web_search"}]],
    "tool_choice": [{"type": "auto"}, {"type": "none"}],
    "cache_control": [{"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h", "scope": "global"}],
    "context_management": [
        {},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        {
            "edits": [
                {
                    "type": "clear_tool_uses_20250919",
                    "trigger": {"type": "input_tokens", "value": 30000},
                    "keep": {"type": "tool_uses", "value": 3},
                    "clear_at_least": {"type": "input_tokens", "value": 5000},
                    "exclude_tools": ["web_search"],
                    "clear_tool_inputs": False,
                }
            ]
        },
        {"edits": [{"type": "compact_20260112", "instructions": "x"}]},
    ],
    "thread": [{"type": "create"}],
    "diagnostics": [{}, {"previous_message_id": "msg_a"}],
    "metadata": [{}, {"user_id": "me"}],
    "mcp_servers": [[]],
    "service_tier": ["auto", "standard_only"],
    "inference_geo": ["eu"],
    "speed": ["standard", "fast"],
    "seed": [-5],
    "min_p": [0.1],
    "priority": [-5],
}
NEEDS: dict[str, dict[str, Any]] = {"tool_choice": {"tools": [TOOL]}}
NOT_TAKEN: dict[str, Any] = {
    "cache_control": "5m",
    "context_management": {"edits": [{"type": "drop_all"}]},
    "thread": {"type": "fork"},
    "diagnostics": {"next": "msg_a"},
    "metadata": {"user_id": 5},
    "mcp_servers": [{"type": "url", "url": "http://127.0.0.1/", "name": "m"}],
    "service_tier": "priority",
    "inference_geo": 5,
    "speed": "slow",
}


ROWS = field_table("Fields of messages", *ROUTES)


def post(http: httpx.Client, route: Route, fields: dict[str, Any]) -> httpx.Response:
    known = MODELS[route].model_fields
    body = {name: each for name, each in (REQUIRED | {"temperature": 0}).items() if name in known}
    return http.post(PATHS[route], json=body | fields)


def refusal(http: httpx.Client, route: Route, field: str, value: Any) -> str:
    response = post(http, route, {field: value})
    assert response.status_code == 400, (field, value, response.text)
    message: str = response.json()["error"]["message"]
    assert message.startswith(field)
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
    assert {row.says[route] for row in ROWS} <= {"yes", "no effect", "refused", "-"}
    named = [row.field for row in ROWS if row.says[route] != "-"]
    assert sorted(named) == sorted(MODELS[route].model_fields)


@pytest.mark.parametrize("route", ROUTES)
def test_the_table_has_every_field_of_anthropic_s_client(route: Route) -> None:
    names = ("MessageCreateParamsBase", "MessageCountTokensParams")
    for module in THEIRS[route]:
        (params,) = [getattr(module, name) for name in names if hasattr(module, name)]
        theirs = set(params.__annotations__) - HEADERS
        assert theirs <= {row.field for row in ROWS if row.says[route] != "-"}


@pytest.mark.parametrize(("route", "field"), cases("yes", "no effect"))
def test_a_field_is_taken(http: httpx.Client, route: Route, field: str) -> None:
    """Null is taken, too, except for required fields."""
    for value in [*TAKEN[field], *([None] if field not in REQUIRED else [])]:
        needed = NEEDS.get(field, {}) if value is not None else {}
        response = post(http, route, needed | {field: value})
        assert response.status_code == 200, (field, value, response.text)


@pytest.mark.parametrize(("route", "field"), cases("no effect"))
def test_a_field_without_effect(http: httpx.Client, route: Route, field: str) -> None:
    def answer(**fields: Any) -> Any:
        body = post(http, route, fields).json()
        return body.get("content"), body.get("input_tokens"), body.get("stop_reason")

    for value in TAKEN[field]:
        assert answer(**{field: value}) == answer()
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
