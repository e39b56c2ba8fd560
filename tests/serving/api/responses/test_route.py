"""POST /v1/responses, by a model that echoes and by OpenAI's client, types and schemas."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.documents import check_documented, check_type
from support.server import Server

from weft.errors import EngineError, RequestError
from weft.serving.api.generation import Generation
from weft.serving.api.parsing.parser import AnswerFormat
from weft.serving.api.responses.requests import ResponsesRequest
from weft.serving.api.responses.store import ResponseStore
from weft.serving.api.responses.turn import Turn
from weft.serving.api.responses.writer import Writer
from weft.serving.engine.chat_templates import Thinking, Verbosity
from weft.serving.engine.sampling_params import NEUTRAL, SamplingParams

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "get_weather", "parameters": CITY, "strict": False}
GROUP = {"type": "namespace", "name": "mcp__maps", "description": "Maps.", "tools": [WEATHER]}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
PARTS = ("<think>", "</think>", CALL, "<tool_call>", '{"name": "f", ', "hello world", "é😀", "\n")
# What differs between two answers to one question.
VOLATILE = {"id", "item_id", "call_id", "created_at", "completed_at", "cached_tokens"}


def _grammar(syntax: str, definition: str) -> dict[str, Any]:
    return {"type": "grammar", "syntax": syntax, "definition": definition}


def post(echo: Server, text: Any, **fields: Any) -> dict[str, Any]:
    body = {"model": "echo", "input": text, "tools": [WEATHER], **fields}
    response = echo.http.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stream(echo: Server, text: Any, **fields: Any) -> list[dict[str, Any]]:
    """The events; their names and numbers are checked."""
    body = {"model": "echo", "input": text, "tools": [WEATHER], "stream": True, **fields}
    response = echo.http.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    events = []
    *parts, end = response.text.split("\n\n")
    assert end == ""
    for part in parts:
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def steady(value: Any) -> Any:
    """Without what differs each time."""
    if isinstance(value, dict):
        return {key: steady(each) for key, each in value.items() if key not in VOLATILE}
    return [steady(each) for each in value] if isinstance(value, list) else value


def replayed(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output that the events add up to, each in its place."""
    output: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind in ("created", "in_progress", "completed", "incomplete"):
            continue
        assert event["output_index"] == len(output) - (kind != "output_item.added")
        if kind == "output_item.added":
            output.append(event["item"])
            assert event["item"]["status"] == "in_progress"
            continue
        item = output[-1]
        assert event.get("item_id", item["id"]) == item["id"]
        match kind.split("."):
            case ["content_part", "added"]:
                assert event["content_index"] == len(item["content"]) == 0
                item["content"].append(event["part"])
            case ["function_call_arguments", "delta"]:
                item["arguments"] += event["delta"]
            case ["function_call_arguments", "done"]:
                assert (event["name"], event["arguments"]) == (item["name"], item["arguments"])
            case ["output_text" | "reasoning_text", "delta"]:
                item["content"][0]["text"] += event["delta"]
            case ["output_text" | "reasoning_text", "done"]:
                assert event["text"] == item["content"][0]["text"]
            case ["content_part", "done"]:
                assert event["part"] == item["content"][0]
            case ["output_item", "done"]:
                item["status"] = event["item"]["status"]
                assert event["item"] == item
            case _:
                raise AssertionError(f"an unknown event: {kind}")
    return output


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=st.lists(st.sampled_from(PARTS), min_size=1, max_size=6), limit=st.integers(1, 150))
def test_streamed_equals_unstreamed(echo: Server, text: list[str], limit: int) -> None:
    whole = post(echo, "".join(text), max_output_tokens=limit)
    events = stream(echo, "".join(text), max_output_tokens=limit)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last["type"] == f"response.{whole['status']}"
    assert steady(last["response"]) == steady(whole)
    assert steady(replayed(events)) == steady(whole["output"])


def test_an_answer_of_every_kind(echo: Server) -> None:
    answer = post(echo, f"<think>hm</think>Let me see.\n{CALL}", instructions="be brief")
    thought, message, call = answer["output"]
    assert (thought["type"], thought["content"][0]["text"]) == ("reasoning", "hm")
    assert (message["type"], message["content"][0]["text"]) == ("message", "Let me see.")
    assert (call["name"], call["arguments"]) == ("get_weather", '{"city": "Paris"}')
    assert answer["status"] == "completed"
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 4
    assert answer["instructions"] == "be brief"
    assert answer["text"] == {"format": {"type": "text"}, "verbosity": None}
    assert answer["store"] is True


def test_an_answer_that_is_cut_off(echo: Server) -> None:
    answer = post(echo, "hello world", max_output_tokens=2)
    assert answer["status"] == answer["output"][0]["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}


def test_the_form_of_the_answer(demo: openai.OpenAI) -> None:
    schema: Any = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form: Any = {"type": "json_schema", "name": "number", "schema": schema, "strict": True}
    answer = demo.responses.create(
        model="weft-demo", input="What is 47 + 85?", text={"format": form}, max_output_tokens=60
    )
    assert answer.status == "completed"
    assert type(json.loads(answer.output_text)["n"]) is int
    assert answer.text is not None
    assert answer.text.format is not None
    assert answer.text.format.type == "json_schema"
    check_type("Response", answer.model_dump(exclude_unset=True, by_alias=True))


def test_types_and_schemas(echo: Server) -> None:
    text = f"<think>hm</think>Let me see.\n{CALL}"
    for fields in ({}, {"max_output_tokens": 3}, {"metadata": {"a": "b"}, "tool_choice": "none"}):
        bodies = [("Response", post(echo, text, **fields))]
        bodies += [("ResponseStreamEvent", event) for event in stream(echo, text, **fields)]
        for name, body in bodies:
            check_type(name, body)
        for name, body in bodies:
            check_documented(name, body)


def test_the_client(echo: Server) -> None:
    with openai.OpenAI(base_url=f"{echo.url}/v1", api_key="none", max_retries=0) as client:
        tools: Any = [WEATHER]
        text = f"<think>hm</think>Let me see.\n{CALL}"
        with client.responses.stream(model="echo", input=text, tools=tools) as events:
            for _ in events:
                pass
            answer = events.get_final_response()
        assert answer.output_text == "Let me see."
        call = answer.output[-1]
        assert call.type == "function_call"
        assert json.loads(call.arguments) == {"city": "Paris"}
        # All of it is sent back, with what the call has given.
        given = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        conversation: Any = [{"role": "user", "content": "weather?"}, *answer.output, given]
        again = client.responses.create(model="echo", input=conversation, tools=tools)
        assert again.output_text == "sunny"


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("background", {"background": True}),
        ("conversation", {"conversation": "conv_1"}),
        ("include[0]", {"include": ["reasoning.text"]}),
        ("top_logprobs", {"top_logprobs": 21}),
        ("top_logprobs", {"top_logprobs": -1, "include": ["message.output_text.logprobs"]}),
        ("prompt", {"prompt": {"id": "pmpt_1"}}),
        ("truncation", {"truncation": "always"}),
        ("reasoning.effort", {"reasoning": {"effort": "utmost"}}),
        ("reasoning.mode", {"reasoning": {"mode": "pro"}}),
        ("text.verbosity", {"text": {"verbosity": "low"}}),
        ("tools[1].type", {"tools": [WEATHER, {"type": "wizardry"}]}),
        ("tools[0].tools[0].type", {"tools": [GROUP | {"tools": [{"type": "mcp"}]}]}),
        ("tools[0].name", {"tools": [{"type": "custom", "name": "a b"}]}),
        ("tools[0].allowed_callers", {"tools": [WEATHER | {"allowed_callers": ["programmatic"]}]}),
        ("tools[0].format", {"tools": [PATCH | {"format": {"type": "grammar"}}]}),
        ("tools[0].format.syntax", {"tools": [PATCH | {"format": _grammar("peg", "a")}]}),
        ("tools", {"tools": [WEATHER, WEATHER]}),
        ("tool_choice.type", {"tools": [WEATHER], "tool_choice": {"type": "web_search"}}),
        ("tool_choice", {"tools": [{"type": "web_search"}], "tool_choice": "required"}),
        ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "a"}}}),
        ("text.format.name", {"text": {"format": {"type": "json_object", "name": "a"}}}),
        ("input", {"input": []}),
        ("input[0].content[0].type", {"input": [{"role": "user", "content": [{"type": "x"}]}]}),
        ("input[0].type", {"input": [{"type": "compaction", "encrypted_content": "a"}]}),
        ("input[0].type", {"input": [{"type": "ignored"}]}),
        ("input", {"input": [{"type": "web_search_call", "id": "ws_1"}]}),
        ("input.encrypted_content", {"input": [{"type": "reasoning", "encrypted_content": "a"}]}),
        ("input.encrypted_content", {"input": [{"type": "reasoning", "encrypted_content": "é"}]}),
        ("input.role", {"input": [{"content": "a"}]}),
        ("input.call_id", {"input": [{"type": "function_call_output", "output": "a"}]}),
        ("temperature", {"temperature": 3}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("input", {"input": "word " * 10_000}),
    ],
)
def test_what_cannot_be_is_named(echo: Server, param: str, fields: dict[str, Any]) -> None:
    response = echo.http.post("/v1/responses", json={"model": "echo", "input": "a"} | fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_truncation_leaves_out_the_oldest_turns(server: Server) -> None:
    context = server.http.get(f"/v1/models/{server.model}").json()["max_model_len"]
    rules = {"role": "developer", "content": "rules"}
    turns = [
        {"role": role, "content": f"{i} " + "word " * 8}
        for i in range(context // 10)
        for role in ("user", "assistant")
    ]
    items = [turns[0], rules, *turns[1:], {"role": "user", "content": "last"}]
    body: dict[str, Any] = {"input": items, "max_output_tokens": 5, "temperature": 0}
    refused = server.http.post("/v1/responses", json=body)
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    answer = server.http.post("/v1/responses", json=body | {"truncation": "auto"}).json()
    assert answer["truncation"] == "auto"
    seen = server.http.get(
        f"/v1/responses/{answer['id']}/input_items", params={"order": "asc", "limit": 100}
    ).json()["data"]
    texts = [item["content"][0]["text"] for item in seen]
    assert texts == ["rules", *(item["content"] for item in items[-len(texts) + 1 :])]
    assert seen[1]["role"] == "user"
    # With one more turn it would be too long.
    tokens = answer["usage"]["input_tokens"]
    longer = [rules, *items[-len(texts) - 1 :]]
    counted = server.http.post("/v1/responses/input_tokens", json={"input": longer}).json()
    assert tokens <= context - 5 < counted["input_tokens"]
    # A last turn stays, even if it is too long by itself.
    body["input"] = [*turns[:2], {"role": "user", "content": "word " * context}]
    refused = server.http.post("/v1/responses", json=body | {"truncation": "auto"})
    assert refused.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("reasoning", "thinking"),
    [
        (None, Thinking(None, None, "reasoning.effort")),
        ({"effort": None}, Thinking(None, None, "reasoning.effort")),
        ({"effort": "none"}, Thinking(False, None, "reasoning.effort")),
        ({"effort": "high", "summary": "auto"}, Thinking(True, "high", "reasoning.effort")),
    ],
)
def test_the_effort_is_the_chats(reasoning: Any, thinking: Thinking) -> None:
    body = ResponsesRequest.model_validate({"input": "hi", "reasoning": reasoning})
    assert Turn(body, ResponseStore(0), "").conversation(lambda _: True).thinking == thinking


@pytest.mark.parametrize(
    ("text", "verbosity"),
    [
        (None, Verbosity(None, "text.verbosity")),
        ({"format": {"type": "text"}}, Verbosity(None, "text.verbosity")),
        ({"verbosity": "low"}, Verbosity("low", "text.verbosity")),
    ],
)
def test_the_verbosity_is_the_chats(text: Any, verbosity: Verbosity) -> None:
    body = ResponsesRequest.model_validate({"input": "hi", "text": text})
    assert Turn(body, ResponseStore(0), "").conversation(lambda _: True).verbosity == verbosity


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestError("no token can follow", param="text.format.schema"), "invalid_prompt"),
        (RequestError("the queue is full", status=429), "rate_limit_exceeded"),
        (RequestError("too late", status=504), "server_error"),
        (EngineError("it has died"), "server_error"),
    ],
)
def test_a_failure_says_whose_fault_it_is(error: RequestError | EngineError, code: str) -> None:
    body = ResponsesRequest.model_validate({"model": "echo", "input": "hi"})
    generation = cast(Generation, SimpleNamespace(params=SamplingParams(), defaults=NEUTRAL))
    writer = Writer(body, "echo", generation, cast(AnswerFormat, None), cast(Turn, None), None)
    event = writer.failure(error).decode()
    name, data = event.rstrip("\n").split("\n")
    assert name == "event: response.failed"
    response = json.loads(data.removeprefix("data: "))["response"]
    assert response["error"] == {"code": code, "message": str(error)}
    check_type("Response", response)
