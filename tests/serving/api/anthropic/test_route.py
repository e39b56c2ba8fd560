"""POST /v1/messages, by a model that echoes and by Anthropic's own client."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from support.server import Server

from weft.models.bundled.tasks import held_out

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Weather.", "input_schema": CITY}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
PARTS = ("<think>", "</think>", CALL, "<tool_call>", '{"name": "f", ', "hello world", "é😀", "\n")
ASKED = [{"role": "user", "content": "a"}]
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
FORMAT = {"type": "json_schema", "schema": {"type": "object"}}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def body(text: Any, **fields: Any) -> dict[str, Any]:
    messages = text if isinstance(text, list) else [{"role": "user", "content": text}]
    asked = {"model": "echo", "max_tokens": 300, "messages": messages, "tools": [WEATHER]}
    return asked | fields


def post(echo: Server, text: Any, **fields: Any) -> dict[str, Any]:
    response = echo.http.post("/v1/messages", json=body(text, **fields))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    Message.model_validate(answer, strict=True)
    return answer


def stream(echo: Server, text: Any, **fields: Any) -> list[dict[str, Any]]:
    """The events; their names and types are checked."""
    response = echo.http.post("/v1/messages", json=body(text, stream=True, **fields))
    assert response.status_code == 200, response.text
    events = []
    *parts, end = response.text.split("\n\n")
    assert end == ""
    for part in parts:
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] != "ping":
            EVENTS.validate_python(event, strict=True)
            events.append(event)
    return events


def replayed(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events add up to."""
    start, *middle, delta, stop = events
    assert (start["type"], stop) == ("message_start", {"type": "message_stop"})
    message: dict[str, Any] = start["message"]
    assert message["content"] == []
    texts: list[str] = []
    for event in middle:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"]) == len(texts)
                message["content"].append(event["content_block"])
            case "content_block_delta":
                assert event["index"] == len(message["content"]) - 1
                block, part = message["content"][-1], event["delta"]
                kind = part.pop("type").removesuffix("_delta")
                (text,) = part.values()
                if kind == "input_json":
                    block.setdefault("written", []).append(text)
                elif kind == "signature":
                    assert block["signature"] == ""
                    block["signature"] = text
                else:
                    assert kind == block["type"]
                    block[kind] += text
            case "content_block_stop":
                texts.append("")
                assert event["index"] == len(texts) - 1
    for block in message["content"]:
        if "written" in block:
            block["input"] = "".join(block.pop("written"))
    return message | delta["delta"] | {"usage": delta["usage"]}


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    text=st.lists(st.sampled_from(PARTS), min_size=1, max_size=6),
    limit=st.integers(1, 150),
    stop=st.sampled_from([None, ["llo"], ["Pa"]]),
)
def test_streamed_equals_unstreamed(
    echo: Server, text: list[str], limit: int, stop: list[str] | None
) -> None:
    fields = {"max_tokens": limit, "stop_sequences": stop}
    whole = post(echo, "".join(text), **fields)
    streamed = replayed(stream(echo, "".join(text), **fields))
    assert streamed["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    for one, other in zip(whole["content"], streamed["content"], strict=True):
        if one["type"] == "tool_use" and whole["stop_reason"] == "tool_use" and not stop:
            assert one["input"] == json.loads(other["input"])
        one.pop("input", None), other.pop("input", None)
        one.pop("id", None), other.pop("id", None)
    for message in (whole, streamed):
        del message["id"], message["usage"]
    assert streamed == whole


def test_an_answer_of_every_kind(echo: Server) -> None:
    answer = post(echo, f"<think>hm</think>Let me see.\n{CALL}")
    thought, text, call = answer["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "hm")
    assert thought["signature"]
    assert (text["type"], text["text"]) == ("text", "Let me see.")
    assert (call["type"], call["name"], call["input"]) == (
        "tool_use",
        "get_weather",
        {"city": "Paris"},
    )
    assert answer["stop_reason"] == "tool_use"


def test_why_it_stopped(echo: Server) -> None:
    assert post(echo, "hello")["stop_reason"] == "end_turn"
    assert post(echo, "hello world", max_tokens=1)["stop_reason"] == "max_tokens"
    stopped = post(echo, "hello world", stop_sequences=["wor"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "wor")
    assert stopped["content"][0]["text"] == "hello "


def test_arguments_that_are_no_json(echo: Server) -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": 1 2}}</tool_call>'
    assert post(echo, text)["content"][0]["input"] == {"INVALID_JSON": '{"city": 1 2}}'}
    cut_off = post(echo, CALL, stop_sequences=["ris"])
    assert cut_off["content"][0]["input"] == {"city": "Pa"}


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ({"content": "sunny", "is_error": False}, "sunny"),
        ({"content": "no such city", "is_error": True}, "Error:\nno such city"),
        ({"is_error": True}, "Error:"),
    ],
)
def test_a_call_that_has_failed(echo: Server, result: dict[str, Any], shown: str) -> None:
    """The model is shown that it has."""
    messages = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "a", "name": "get_weather", "input": {}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"} | result]},
    ]
    (block,) = post(echo, messages)["content"]
    assert block["text"] == shown


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_has_begun_is_continued(demo: openai.OpenAI, stream: bool) -> None:
    """By the bundled model: the rest of what it would have said."""
    (question,) = held_out("about", 1)[0].messages

    def ask(client: anthropic.Anthropic, *messages: Any) -> str:
        asked: Any = {"model": "weft-demo", "max_tokens": 60, "messages": [question, *messages]}
        asked["extra_body"] = {"temperature": 0}
        if stream:
            with client.messages.stream(**asked) as events:
                answer = events.get_final_message()
        else:
            answer = client.messages.create(**asked)
        (block,) = answer.content
        assert block.type == "text"
        return block.text

    url = str(demo.base_url).removesuffix("/v1/")
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        whole = ask(client)
        words = whole.split(" ")
        assert len(words) >= 6
        begun = " ".join(words[:3])
        assert begun + ask(client, {"role": "assistant", "content": begun}) == whole
        assert ask(client, {"role": "assistant", "content": ""}) == whole


def test_the_client(echo: Server) -> None:
    tools: Any = [WEATHER]
    with anthropic.Anthropic(base_url=echo.url, api_key="none", max_retries=0) as client:
        question: Any = {"role": "user", "content": f"<think>hm</think>Let me see.\n{CALL}"}
        with client.messages.stream(
            model="echo", max_tokens=300, messages=[question], tools=tools, system="be brief"
        ) as events:
            answer = events.get_final_message()
        call = answer.content[-1]
        assert call.type == "tool_use"
        assert call.input == {"city": "Paris"}
        result: Any = [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]
        again = client.messages.create(
            model="echo",
            max_tokens=300,
            messages=[
                question,
                {"role": "assistant", "content": answer.content},
                {"role": "user", "content": result},
            ],
            tools=tools,
        )
        assert again.content[0].type == "text"
        assert again.content[0].text == "sunny"
        assert again.stop_reason == "end_turn"
        counted = client.messages.count_tokens(model="echo", messages=[question], tools=tools)
        usage = answer.usage
        tokens = usage.input_tokens + (usage.cache_read_input_tokens or 0)
        assert counted.input_tokens == tokens
        with pytest.raises(anthropic.NotFoundError, match="claude"):
            client.messages.create(model="claude", max_tokens=3, messages=[question])
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            client.messages.create(
                model="echo", max_tokens=3, messages=[question], extra_body={"temperature": 3}
            )


@pytest.mark.parametrize(
    ("status", "kind", "words", "path", "fields"),
    [
        (400, "invalid_request_error", "max_tokens is missing", "", {"max_tokens": ...}),
        (400, "invalid_request_error", "thinking.budget_tokens is missing", "",
         {"thinking": {"type": "enabled"}}),
        (400, "invalid_request_error", "thinking.type is 'between_tools'", "",
         {"thinking": {"type": "between_tools"}}),
        (400, "invalid_request_error", "tools[0].type is 'computer_20250124'", "",
         {"tools": [{"type": "computer_20250124", "name": "computer"}]}),
        (400, "invalid_request_error", "a tool of type bash_20250124 is named 'bash'", "",
         {"tools": [{"type": "bash_20250124", "name": "sh"}]}),
        (400, "invalid_request_error", "without 'direct' in allowed_callers", "",
         {"tools": [WEATHER | {"allowed_callers": ["code_execution_20260120"]}]}),
        (400, "invalid_request_error", "tool_choice names 'web_search', a tool of type web_sea", "",
         {"tools": [WEATHER, SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}),
        (400, "invalid_request_error", "asks for a call; tools has only web_search_20250305", "",
         {"tools": [SEARCH], "tool_choice": {"type": "any"}}),
        (400, "invalid_request_error", "mcp_servers", "", {"mcp_servers": [{"type": "url"}]}),
        (400, "invalid_request_error", "context_management.edits[0].type is 'clear_all'", "",
         {"context_management": {"edits": [{"type": "clear_all"}]}}),
        (400, "invalid_request_error", "messages[0].content[0].type is 'image'", "",
         {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
        (400, "invalid_request_error", "messages[0].content[0].type is missing", "",
         {"messages": [{"role": "user", "content": [{"text": "a"}]}]}),
        (400, "invalid_request_error", "messages[0].content[0].source.type is 'base64'", "",
         {"messages": [{"role": "user", "content": [
             {"type": "document", "source": {"type": "base64"}}]}]}),
        (400, "invalid_request_error", "citations.enabled is true", "",
         {"messages": [{"role": "user", "content": [
             {"type": "search_result", "source": "s", "title": "t", "content": [],
              "citations": {"enabled": True}}]}]}),
        (400, "invalid_request_error", "output_format and output_config.format each", "",
         {"output_config": {"format": FORMAT}, "output_format": FORMAT}),
        (404, "not_found_error", "this server stores no conversations", "",
         {"thread": {"type": "continue", "previous_message_id": "msg_a"}}),
        (400, "invalid_request_error", "tool_choice.name", "", {"tool_choice": {"type": "tool"}}),
        (400, "invalid_request_error", "messages[0].role", "", {"messages": [{"role": "tool"}]}),
        (400, "invalid_request_error", "messages[0].content[0].input is null", "",
         {"messages": [{"role": "assistant", "content": [USE | {"input": None}]}]}),
        (400, "invalid_request_error", "stop_sequences[0]", "", {"stop_sequences": [""]}),
        (400, "invalid_request_error", "ends with white space", "",
         {"messages": [*ASKED, {"role": "assistant", "content": "It is "}]}),
        (400, "invalid_request_error", "type tool_use; only text can be continued", "",
         {"messages": [*ASKED, {"role": "assistant", "content": [USE]}]}),
        (404, "not_found_error", "claude", "", {"model": "claude"}),
        (404, "not_found_error", "/v1/messages/other", "/other", {}),
    ],
)  # fmt: skip
def test_errors_have_anthropics_shape(
    echo: Server, status: int, kind: str, words: str, path: str, fields: dict[str, Any]
) -> None:
    asked = {name: value for name, value in body("a", **fields).items() if value is not ...}
    response = echo.http.post(f"/v1/messages{path}", json=asked)
    assert response.status_code == status
    answer = response.json()
    assert (answer["type"], answer["error"]["type"]) == ("error", kind)
    assert words in answer["error"]["message"]
    assert answer["request_id"] == response.headers["request-id"]
    assert answer["request_id"] == response.headers["x-request-id"]


def test_another_content_type(echo: Server) -> None:
    response = echo.http.post("/v1/messages", content=b"x", headers={"content-type": "text/plain"})
    assert response.status_code == 415
    assert response.json()["error"]["type"] == "invalid_request_error"
