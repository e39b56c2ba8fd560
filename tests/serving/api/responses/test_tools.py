"""Coding agents' tools: texts with a grammar, groups, and hosted tools (left out)."""

from __future__ import annotations

import json
import re
from typing import Any, get_args, get_type_hints

import openai
import pytest
from openai.types.responses.tool_param import ToolParam
from support.documents import check_documented, check_type
from support.patches import PATCH_GRAMMAR
from support.server import Server

from weft.errors import RequestError
from weft.serving.api.responses.tools import MAX_NAME, NamespaceTool, Toolbox

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "get_weather", "parameters": CITY, "strict": False}
GROUP = {"type": "namespace", "name": "mcp__maps", "description": "Maps.", "tools": [WEATHER]}
SHELL = {"type": "custom", "name": "shell", "description": "Runs a command."}
VERSION = {"type": "grammar", "syntax": "regex", "definition": r'v\d{1,3}\.\d{1,3}"\n'}
PATCH = "*** Begin Patch\n*** Update File: é.py\n@@ f\n-\"a\"\n+\t'b'\n*** End Patch"
WORDS = {
    "type": "grammar",
    "syntax": "lark",
    "definition": 'start: "<" WORD ("," WORD)~0..2 ">"\nWORD: /[a-z]{1,4}/',
}


def called(name: str, arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def post(echo: Server, **fields: Any) -> dict[str, Any]:
    response = echo.http.post("/v1/responses", json={"model": "echo"} | fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    check_type("Response", answer)
    check_documented("Response", answer)
    return answer


def test_a_custom_tool_call_streamed_and_whole(echo: Server) -> None:
    text = 'ls "a b"\ncat é😀'
    fields: dict[str, Any] = {"input": called("shell", {"input": text}), "tools": [SHELL]}
    (call,) = post(echo, **fields)["output"]
    assert re.fullmatch("ctc_[0-9a-f]+", call.pop("id"))
    assert re.fullmatch("call_[0-9a-f]+", call.pop("call_id"))
    assert call == {
        "type": "custom_tool_call",
        "name": "shell",
        "input": text,
        "status": "completed",
    }
    with openai.OpenAI(base_url=f"{echo.url}/v1", api_key="none", max_retries=0) as client:
        events = list(client.responses.create(model="echo", stream=True, **fields))
    for event in events:
        check_type("ResponseStreamEvent", event.model_dump(exclude_unset=True, by_alias=True))
    deltas = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == text
    assert all(deltas)
    (done,) = [e for e in events if e.type == "response.custom_tool_call_input.done"]
    assert done.input == text
    last = events[-1]
    assert last.type == "response.completed"
    (item,) = last.response.output
    assert item.type == "custom_tool_call"
    assert item.input == text


def test_the_model_sees_a_function_with_one_text(echo: Server) -> None:
    tools = [SHELL | {"format": VERSION}]
    body = {"model": "echo", "input": "hi", "tools": tools, "tool_choice": "none"}
    without = echo.http.post("/v1/responses/input_tokens", json=body).json()
    counted = echo.http.post("/v1/responses/input_tokens", json=body | {"tool_choice": "auto"})
    assert counted.json()["object"] == "response.input_tokens"
    assert counted.json()["input_tokens"] > without["input_tokens"] + len(VERSION["definition"])


@pytest.mark.parametrize(
    ("form", "pattern"),
    [(VERSION, r'v\d{1,3}\.\d{1,3}"\n'), (WORDS, "<[a-z]{1,4}(,[a-z]{1,4}){0,2}>")],
    ids=["regex", "lark"],
)
def test_the_grammar_of_a_text_holds(
    demo: openai.OpenAI, form: dict[str, str], pattern: str
) -> None:
    tools: Any = [SHELL | {"format": form}, WEATHER]
    for seed in range(3):
        answer = demo.responses.create(
            model="weft-demo",
            input="hello",
            tools=tools,
            tool_choice={"type": "custom", "name": "shell"},
            extra_body={"seed": seed, "temperature": 1.5},
            max_output_tokens=100,
        )
        (call,) = [item for item in answer.output if item.type == "custom_tool_call"]
        assert re.fullmatch(pattern, call.input)


def test_a_patch(echo: Server) -> None:
    """A coding agent's grammar, beside its other tools."""
    form = {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR}
    tools = [SHELL | {"name": "apply_patch", "format": form}, WEATHER, GROUP]
    text = f"<think>hm</think>I edit.\n{called('apply_patch', {'input': PATCH})}"
    _, _, call = post(echo, input=text, tools=tools)["output"]
    assert call["input"] == PATCH
    # The echo model writes against the grammar, and this ends its answer.
    bad = called("apply_patch", {"input": PATCH.replace("*** End", "*** And")})
    body = {"model": "echo", "input": bad, "tools": tools}
    response = echo.http.post("/v1/responses", json=body)
    assert response.status_code == 400
    assert "does not follow in the grammar" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (VERSION | {"definition": "a(?=b)"}, "tools: shell: 'a(?=b)' has look-ahead"),
        (VERSION | {"definition": "(" * 1000 + ")" * 1000}, "tools is nested too deeply; simplify"),
        (WORDS | {"definition": "start: nothing"}, "tools: shell: it is not a Lark grammar"),
    ],
)
def test_a_grammar_that_cannot_be_enforced(
    echo: Server, form: dict[str, str], message: str
) -> None:
    body = {"model": "echo", "input": "hi", "tools": [SHELL | {"format": form}]}
    response = echo.http.post("/v1/responses", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("tools", "invalid_grammar")
    assert message in error["message"]


@pytest.mark.parametrize("group", ["mcp__maps", "mcp__maps__", "m" * 60])
def test_a_tool_in_a_namespace(echo: Server, group: str) -> None:
    """A call has the tool's own name and its namespace, and it comes back in this form."""
    tools = [GROUP | {"name": group, "tools": [WEATHER, SHELL]}, WEATHER]
    inner = Toolbox([NamespaceTool.model_validate(GROUP | {"name": group})])
    (name,) = [function.name for function in inner.functions]
    assert name.startswith(group[:50])
    assert len(name) <= MAX_NAME
    text = called(name, {"city": "Rome"})
    (call,) = post(echo, input=text, tools=tools)["output"]
    assert (call["type"], call["name"], call["namespace"]) == (
        "function_call",
        "get_weather",
        group,
    )
    (plain,) = post(echo, input=called("get_weather", {"city": "a"}), tools=tools)["output"]
    assert plain["name"] == "get_weather"
    assert "namespace" not in plain
    given = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    answer = post(echo, input=[{"role": "user", "content": "a"}, call, given], tools=tools)
    assert answer["output"][0]["content"][0]["text"] == "sunny"
    assert answer["tools"][0]["name"] == group


def test_a_choice_within_a_namespace(demo: openai.OpenAI) -> None:
    tools: Any = [GROUP]
    choice: Any = {"type": "function", "name": "get_weather", "namespace": "mcp__maps"}
    answer = demo.responses.create(
        model="weft-demo", input="Rome?", tools=tools, tool_choice=choice, max_output_tokens=100
    )
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert (call.name, call.namespace) == ("get_weather", "mcp__maps")


def test_hosted_tools_are_left_out_and_named_in_the_log_once(echo: Server) -> None:
    kinds = [
        kind
        for param in get_args(ToolParam)
        for kind in get_args(get_type_hints(param)["type"])
        if kind not in ("function", "custom", "namespace")
    ]
    assert len(kinds) > 10
    tools = [{"type": kind, "vector_store_ids": ["a"], "filters": {}} for kind in kinds]
    for _ in range(2):
        answer = post_untyped(echo, input="hello", tools=[*tools, WEATHER])
        assert answer["output"][0]["content"][0]["text"] == "hello"
    for kind in kinds:
        echo.wait_until_said(f"tools of type {kind} are left out")
    log = echo.log.read_text()
    assert all(log.count(f"tools of type {kind} are left out") == 1 for kind in kinds)


def post_untyped(echo: Server, **fields: Any) -> dict[str, Any]:
    """For tools outside OpenAI's types."""
    response = echo.http.post("/v1/responses", json={"model": "echo"} | fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_two_tools_with_one_name_for_the_model() -> None:
    group = NamespaceTool.model_validate(GROUP)
    with pytest.raises(RequestError, match="mcp__maps__get_weather"):
        Toolbox([group, group])
