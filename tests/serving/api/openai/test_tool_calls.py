"""Calls of tools and reasoning over a real socket: by the bundled models, and by one that echoes.

The echo says what the last message says, so each test writes what "the model" answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.echo_runner import LOADER, write_echo
from support.server import Server, start_server

from weft.models.bundled.tasks import held_out, tool_schema

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
PARTS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", CALL, '{"name": "f", "arguments": {',
    '"x": 1', "}", "{", '"', "\n", " ", "hello world", "é日本😀", "<|im_", "\\",
)  # fmt: skip


@pytest.fixture(scope="module")
def servers(echo: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """The echo, with Qwen's marks, with those of Mistral, and in a template that opens thoughts."""
    path = tmp_path_factory.mktemp("echo")
    models = {
        "mistral": write_echo(path / "mistral", marks="[TOOL_CALLS]"),
        "opened": write_echo(path / "opened", marks="<think> </think>", opening="<think>\n"),
    }
    with ExitStack() as stack:
        yield {"qwen": echo} | {
            name: stack.enter_context(start_server(model, path, loader=LOADER))
            for name, model in models.items()
        }


def body(server: Server, text: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": server.model,
        "messages": [{"role": "user", "content": text}],
        "tools": [WEATHER],
        **fields,
    }


def whole(server: Server, text: str, **fields: Any) -> dict[str, Any]:
    """The response, unstreamed."""
    response = server.http.post("/v1/chat/completions", json=body(server, text, **fields))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def events(server: Server, text: str, **fields: Any) -> list[dict[str, Any]]:
    asked = body(server, text, stream=True, stream_options={"include_usage": True}, **fields)
    response = server.http.post("/v1/chat/completions", json=asked)
    assert response.status_code == 200, response.text
    return [json.loads(event.removeprefix("data: ")) for event in response.text.split("\n\n")[:-2]]


_KINDS = ("content", "reasoning_content", "tool_calls")


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the deltas join to, with the finish_reason; their shape is checked."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    newest = ""
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        assert "finish_reason" not in message, "an event after the answer's end"
        delta = choice["delta"]
        if newest in ("reasoning_content", "tool_calls"):
            assert delta.get("content") != "", "which some clients take for a thought's end"
        newest = next((kind for kind in _KINDS if delta.get(kind)), newest)
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content", "")
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["calls"]):
                assert call["id"]
                assert call["type"] == "function"
                message["calls"].append([call["function"]["name"], ""])
            else:
                assert call.keys() == {"index", "function"}
                assert call["index"] == len(message["calls"]) - 1
            message["calls"][-1][1] += call["function"]["arguments"]
        if choice["finish_reason"] is not None:
            message["finish_reason"] = choice["finish_reason"]
    return message


def told(answer: dict[str, Any]) -> dict[str, Any]:
    """The same of an unstreamed response."""
    (choice,) = answer["choices"]
    message = choice["message"]
    assert message.get("reasoning") == message.get("reasoning_content")
    calls = message.get("tool_calls", [])
    assert (message["content"] is None) <= bool(calls)
    assert all(call["type"] == "function" for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    return {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "calls": [[call["function"]["name"], call["function"]["arguments"]] for call in calls],
        "finish_reason": choice["finish_reason"],
    }


@pytest.mark.parametrize("form", ["qwen", "mistral", "opened"])
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    text=st.lists(st.sampled_from((*PARTS, "[TOOL_CALLS]", '[{"name": "g"}', "]")), max_size=8),
    max_tokens=st.integers(1, 200),
    stop=st.sampled_from([None, "</", "Pa"]),
)
def test_streamed_equals_unstreamed(
    servers: dict[str, Server], form: str, text: list[str], max_tokens: int, stop: str | None
) -> None:
    said = "".join(text)
    fields = {"max_tokens": max_tokens, "stop": stop}
    one = whole(servers[form], said, **fields)
    chunks = events(servers[form], said, **fields)
    assert joined(chunks) == told(one)
    assert chunks[-1]["usage"] == one["usage"] | {
        "prompt_tokens_details": chunks[-1]["usage"]["prompt_tokens_details"]
    }


def test_a_call(servers: dict[str, Server]) -> None:
    seen = told(whole(servers["qwen"], f"Let me see.\n{CALL}"))
    assert seen == {
        "content": "Let me see.",
        "reasoning_content": "",
        "calls": [["get_weather", '{"city": "Paris"}']],
        "finish_reason": "tool_calls",
    }


def test_marks_that_are_special_tokens(servers: dict[str, Server]) -> None:
    text = '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]'
    answer = whole(servers["mistral"], text)
    assert told(answer)["calls"] == [["get_weather", '{"city": "Paris"}']]
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert len(call["id"]) == 9
    assert call["id"].isalnum()


def test_a_call_without_tools_is_content(servers: dict[str, Server]) -> None:
    for fields in ({"tools": None}, {"tool_choice": "none"}):
        answer = whole(servers["qwen"], CALL, **fields)
        assert told(answer)["content"] == CALL
        assert told(answer)["finish_reason"] == "stop"
        assert "tool_calls" not in answer["choices"][0]["message"]


def test_a_call_that_is_cut_off(servers: dict[str, Server]) -> None:
    tokens = whole(servers["qwen"], CALL)["usage"]["completion_tokens"]
    seen = told(whole(servers["qwen"], CALL, max_tokens=tokens - 18))
    assert seen["finish_reason"] == "length"
    ((name, arguments),) = seen["calls"]
    assert name == "get_weather"
    assert '{"city": "Paris"}'.startswith(arguments)


def test_only_one_call(servers: dict[str, Server]) -> None:
    text = CALL + CALL.replace("Paris", "Rome")
    assert len(told(whole(servers["qwen"], text))["calls"]) == 2
    seen = told(whole(servers["qwen"], text, parallel_tool_calls=False))
    assert seen["calls"] == [["get_weather", '{"city": "Paris"}']]


def test_reasoning(servers: dict[str, Server]) -> None:
    for form, text in (("qwen", "<think>\nhello"), ("opened", "hello")):
        answer = whole(servers[form], text + "\n</think>\n\nworld", logprobs=True)
        assert told(answer)["reasoning_content"] == "hello"
        assert told(answer)["content"] == "world"
        usage = answer["usage"]
        thought = usage["completion_tokens_details"]["reasoning_tokens"]
        assert thought == (6 if form == "qwen" else 4)  # `</think>` included
        assert len(answer["choices"][0]["logprobs"]["content"]) == usage["completion_tokens"]
        no_thought = whole(servers[form], "world" if form == "qwen" else "</think>world")
        assert "reasoning_content" not in no_thought["choices"][0]["message"]
    assert whole(servers["qwen"], "world")["usage"]["completion_tokens_details"] == {
        "reasoning_tokens": 0
    }


def test_reasoning_can_be_sent_back(servers: dict[str, Server]) -> None:
    message = whole(servers["qwen"], f"<think>hm</think>{CALL}")["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}
    messages = [{"role": "user", "content": "weather?"}, message, result]
    assert told(whole(servers["qwen"], "", messages=messages))["content"] == "sunny"


def test_a_parser_can_be_set(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("set")
    model = write_echo(path / "echo", marks="<tool_call> <think> </think>")
    settings = {"tool_parser": "pythonic", "reasoning_parser": "none"}
    with start_server(model, path, loader=LOADER, **settings) as server:
        seen = told(whole(server, "[get_weather(city='Paris')]"))
        assert seen["calls"] == [["get_weather", '{"city": "Paris"}']]
        text = f"<think>hm</think>{CALL}"
        assert told(whole(server, text))["content"] == text.replace("<think>", "").replace(
            "</think>", ""
        )


@pytest.mark.parametrize("stream", [False, True])
def test_the_bundled_model_calls_tools(demo: openai.OpenAI, stream: bool) -> None:
    for question in held_out("tool_call", 4):
        expected = json.loads(question.answer.splitlines()[1])
        asked: Any = {
            "model": "weft-demo",
            "messages": list(question.messages),
            "tools": list(question.tools or ()),
            "temperature": 0,
        }
        if stream:
            with demo.chat.completions.stream(**asked) as chunks:
                choice: Any = chunks.get_final_completion().choices[0]
        else:
            choice = demo.chat.completions.create(**asked).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
        (call,) = choice.message.tool_calls
        assert call.function.name == expected["name"]
        assert json.loads(call.function.arguments) == expected["arguments"]


def test_a_whole_exchange(demo: openai.OpenAI) -> None:
    tools: Any = [tool_schema("get_weather"), tool_schema("set_timer")]
    messages: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]

    def ask() -> Any:
        answer = demo.chat.completions.create(
            model="weft-demo", messages=messages, tools=tools, temperature=0
        )
        return answer.choices[0].message

    call = ask()
    messages.append(call)
    (one,) = call.tool_calls
    result = json.dumps({"temperature": 7, "sky": "cloudy"})
    messages.append({"role": "tool", "tool_call_id": one.id, "content": result})
    assert ask().content == "It is 7 degrees and cloudy in Oslo."


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_asked_for(demo: openai.OpenAI, stream: bool) -> None:
    """The bundled model would not call anything here."""
    tools: Any = [tool_schema("get_weather"), tool_schema("set_timer")]
    named: Any = {"type": "function", "function": {"name": "set_timer"}}
    for choice in ("required", named):
        asked: Any = {
            "model": "weft-demo",
            "messages": [{"role": "user", "content": "What is 47 + 85?"}],
            "tools": tools,
            "tool_choice": choice,
            "temperature": 0,
            "max_tokens": 200,
        }
        if stream:
            with demo.chat.completions.stream(**asked) as chunks:
                answer: Any = chunks.get_final_completion().choices[0]
        else:
            answer = demo.chat.completions.create(**asked).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert not answer.message.content
        call = answer.message.tool_calls[0]
        arguments = json.loads(call.function.arguments)
        if choice == named:
            assert len(answer.message.tool_calls) == 1
            assert call.function.name == "set_timer"
        kinds = {"get_weather": {"city": str}, "set_timer": {"minutes": int}}[call.function.name]
        assert {name: type(value) for name, value in arguments.items()} == kinds


def test_a_form_and_a_call_are_asked_for(servers: dict[str, Server]) -> None:
    fields = {"tool_choice": "required", "response_format": {"type": "json_object"}}
    asked = body(servers["qwen"], "x", **fields)
    answer = servers["qwen"].http.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format"


@pytest.mark.parametrize("stream", [False, True])
def test_tools_and_a_form_beside_each_other(demo: openai.OpenAI, stream: bool) -> None:
    """The bundled model calls where it would; kept from that, it answers in the form."""
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
    (question,) = held_out("tool_call", 1)

    def ask(**fields: Any) -> Any:
        asked: Any = {
            "model": "weft-demo",
            "messages": list(question.messages),
            "tools": list(question.tools or ()),
            "response_format": form,
            "temperature": 0,
            "max_tokens": 100,
            **fields,
        }
        if stream:
            with demo.chat.completions.stream(**asked) as chunks:
                return chunks.get_final_completion().choices[0]
        return demo.chat.completions.create(**asked).choices[0]

    choice = ask()
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    expected = json.loads(question.answer.splitlines()[1])
    assert choice.message.tool_calls[0].function.name == expected["name"]
    url = str(demo.base_url).removesuffix("v1/") + "tokenize"
    mark = httpx.post(url, json={"prompt": "<tool_call>", "add_special_tokens": False}, timeout=60)
    choice = ask(logit_bias={str(mark.json()["tokens"][0]): -100})
    assert not choice.message.tool_calls
    assert isinstance(json.loads(choice.message.content)["ok"], bool)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_a_model_whose_calls_are_not_known_cannot(
    servers: dict[str, Server], fields: dict[str, Any], param: str
) -> None:
    asked = body(servers["opened"], "x", **fields)
    answer = servers["opened"].http.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, "unsupported_value")
    assert "--tool-parser" in error["message"]


PARAMETERS = "tools[0].function.parameters"


def bad_tool(parameters: Any) -> dict[str, Any]:
    """A tool whose parameters are no schema."""
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tool_choice": "any"}, "tool_choice", "'required'"),
        ({"tool_choice": 1}, "tool_choice", "'required'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function", "missing"),
        (
            {"tool_choice": {"type": "allowed_tools", "function": {"name": "f"}}},
            "tool_choice.type",
            "'function'",
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            "get_weather",
        ),
        ({"tool_choice": "required", "tools": None}, "tool_choice", "tools is missing"),
        (bad_tool({"type": "array"}), PARAMETERS, "must be 'object'"),
        (bad_tool({"properties": {"x": {"type": "text"}}}), PARAMETERS, ".properties.x.type"),
        (bad_tool({"properties": {"x": {"pattern": 1}}}), PARAMETERS, "must be a text"),
        (bad_tool({"properties": {"x": {"anyOf": [{"items": 1}]}}}), PARAMETERS, "anyOf[0].items"),
        (bad_tool({"properties": []}), PARAMETERS, "must be an object"),
    ],
)
def test_a_choice_that_cannot_be(
    servers: dict[str, Server], fields: dict[str, Any], param: str, words: str
) -> None:
    answer = servers["qwen"].http.post(
        "/v1/chat/completions", json=body(servers["qwen"], "x", **fields)
    )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_health(servers: dict[str, Server]) -> None:
    """After all that, each of them serves."""
    for server in servers.values():
        assert httpx.get(f"{server.url}/ready").status_code == 200
