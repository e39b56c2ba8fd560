"""Agents: Anthropic's SDK in its tool loop, and Claude Code's requests.

The model repeats the last message, so tool results script the conversation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import openai
import pytest
from anthropic import beta_tool
from anthropic.types.beta import BetaMessage
from pydantic import BaseModel
from support.server import Server


def call(name: str, **arguments: Any) -> str:
    written = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{written}\n</tool_call>"


@pytest.fixture
def client(echo: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=echo.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thread", [None, False])
def test_the_loop_of_the_sdk(
    client: anthropic.Anthropic, stream: bool, thread: Literal[False] | None
) -> None:
    """Two calls with thoughts, then text. The loop begins with a thread; weft has no threads."""
    script = [f"<think>second</think>{call('add', a=3, b=4)}", "the sum is 7"]
    added = []

    @beta_tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        added.append((a, b))
        return script[len(added) - 1]

    asked: Any = {
        "model": "echo",
        "max_tokens": 300,
        "messages": [{"role": "user", "content": f"<think>first</think>{call('add', a=1, b=2)}"}],
        "tools": [add],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "system": [{"type": "text", "text": "add", "cache_control": {"type": "ephemeral"}}],
        "thread": thread,
    }
    turns: list[BetaMessage] = []
    if stream:
        for events in client.beta.messages.tool_runner(**asked, stream=True):
            turns.append(events.get_final_message())
    else:
        turns += client.beta.messages.tool_runner(**asked)
    assert added == [(1, 2), (3, 4)]
    assert [[block.type for block in turn.content] for turn in turns] == [
        ["thinking", "tool_use"],
        ["thinking", "tool_use"],
        ["text"],
    ]
    assert [turn.stop_reason for turn in turns] == ["tool_use", "tool_use", "end_turn"]
    (text,) = turns[-1].content
    assert text.type == "text"
    assert text.text == "the sum is 7"


def test_a_thread_sends_all_messages(client: anthropic.Anthropic) -> None:
    """Each turn is refused once; then the SDK sends the whole conversation."""
    thread = client.beta.messages.thread(model="echo", max_tokens=99)
    for said in ("one", "two", "three"):
        answer: Any = thread.send({"role": "user", "content": said})
        assert answer.content[0].text == said
    assert len(thread.messages) == 6


def test_ids_of_requests(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "echo", "messages": [{"role": "user", "content": "a"}]}
    answer = client.messages.create(**asked, max_tokens=3, extra_headers={"x-request-id": "mine"})
    assert answer._request_id == "mine"
    assert client.messages.count_tokens(**asked)._request_id
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.beta.messages.create(
            **asked, max_tokens=3, thread={"type": "continue", "previous_message_id": "msg_a"}
        )
    assert caught.value.request_id
    assert caught.value.error_code == "thread_not_found"


def test_structured_output(demo: openai.OpenAI) -> None:
    class Answer(BaseModel):
        colour: Literal["red", "blue"]
        bright: bool

    url = str(demo.base_url).removesuffix("/v1/")
    asked: Any = {"model": "weft-demo", "max_tokens": 300, "extra_body": {"temperature": 0}}
    asked["messages"] = [{"role": "user", "content": "Which colour?"}]
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        parsed = client.messages.parse(**asked, output_format=Answer)
        assert isinstance(parsed.parsed_output, Answer)
        again = [*asked["messages"], {"role": "assistant", "content": parsed.content}]
        asked["messages"] = [*again, {"role": "user", "content": "Really?"}]
        with client.messages.stream(**asked, output_format=Answer) as events:
            streamed = events.get_final_message()
        assert isinstance(streamed.parsed_output, Answer)
        beta = client.beta.messages.parse(**asked, output_format=Answer)
        assert isinstance(beta.parsed_output, Answer)
        older = {"output_format": {"type": "json_schema", "schema": {"type": "boolean"}}}
        asked["extra_body"] |= older
        (text,) = client.messages.create(**asked).content
        assert text.type == "text"
        assert json.loads(text.text) in (True, False)


# Claude Code.

CACHED = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,"
    "thinking-token-count-2026-05-13,context-management-2025-06-27,"
    "prompt-caching-scope-2026-01-05,mid-conversation-system-2026-04-07,effort-2025-11-24",
    "anthropic-dangerous-direct-browser-access": "true",
    "authorization": "Bearer none",
    "user-agent": "claude-cli/2.1.197 (external, sdk-cli)",
    "x-app": "cli",
    "x-stainless-lang": "js",
}
TOOLS = [
    {
        "name": "Bash",
        "description": "Executes a given bash command.",
        "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {
                "command": {"description": "The command to execute", "type": "string"},
                "timeout": {"type": "number"},
                "run_in_background": {"type": "boolean"},
            },
            "required": ["command"],
            "additionalProperties": False,
        },
        "eager_input_streaming": True,
    },
    {
        "name": "mcp__plugin_with_a_long_name__" + "tool_" * 10,
        "description": "A tool of an MCP server.",
        "input_schema": {"type": "object", "properties": {}},
        "defer_loading": True,
    },
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
]


def claude_code(messages: list[Any], **fields: Any) -> dict[str, Any]:
    """A request from Claude Code 2.1.197, shortened, with fields from other versions."""
    return {
        "model": "echo",
        "max_tokens": 3000,
        "messages": messages,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=fa690;"},
            {"type": "text", "text": "You are Claude Code.", "cache_control": CACHED},
            {"type": "text", "text": "You are an interactive agent.", "cache_control": CACHED},
        ],
        "tools": TOOLS,
        "metadata": {"user_id": '{"device_id":"d","account_uuid":"","session_id":"s"}'},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "temperature": 1,
        "stream": True,
    } | fields


def turn(echo: Server, messages: list[Any], **fields: Any) -> dict[str, Any]:
    """Send a request, and return the streamed message."""
    path, body = "/v1/messages?beta=true", claude_code(messages, **fields)
    response = echo.http.post(path, json=body, headers=HEADERS)
    assert response.status_code == 200, response.text
    message: dict[str, Any] = {}
    for line in response.text.splitlines():
        if not line.startswith("data: "):
            continue
        event = json.loads(line.removeprefix("data: "))
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                message["content"].append(event["content_block"])
            case "content_block_delta":
                block, delta = message["content"][-1], event["delta"]
                del delta["type"]
                for name, value in delta.items():
                    block[name] = (block.get(name) or "") + value
            case "message_delta":
                message |= event["delta"]
    for block in message["content"]:
        if "partial_json" in block:
            block["input"] = json.loads(block.pop("partial_json"))
    return message


def test_a_conversation_of_claude_code(echo: Server) -> None:
    assert echo.http.head("/", headers=HEADERS).status_code == 200
    quota: dict[str, Any] = {"role": "user", "content": "quota"}
    probe = {"model": "echo", "max_tokens": 1, "messages": [quota], "metadata": {"user_id": "u"}}
    assert echo.http.post("/v1/messages?beta=true", json=probe, headers=HEADERS).status_code == 200

    said = f"<think>look</think>I will look.\n{call('Bash', command='ls')}"
    reminder = {"type": "text", "text": "<system-reminder>be brief</system-reminder>"}
    asked = {"type": "text", "text": said, "cache_control": {"type": "ephemeral"}}
    messages: list[Any] = [{"role": "user", "content": [reminder, asked]}]
    counted = claude_code(messages)
    for name in ("max_tokens", "metadata", "temperature", "stream"):
        del counted[name]
    count = echo.http.post("/v1/messages/count_tokens?beta=true", json=counted, headers=HEADERS)
    assert count.status_code == 200, count.text

    first = turn(echo, messages)
    assert first["context_management"] == {"applied_edits": []}
    usage = first["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count.json()["input_tokens"]
    text, used = first["content"][-2:]
    assert "I will look." in text["text"]
    assert (used["name"], used["input"]) == ("Bash", {"command": "ls"})
    assert first["stop_reason"] == "tool_use"

    result = {
        "type": "tool_result",
        "tool_use_id": used["id"],
        "content": "README.md",
        "is_error": False,
        "cache_control": {"type": "ephemeral"},
    }
    messages += [{"role": "assistant", "content": first["content"]}]
    messages += [{"role": "user", "content": [result]}]
    second = turn(echo, messages)
    assert [block["type"] for block in second["content"]] == ["text"]
    assert second["content"][0]["text"] == "README.md"
    assert second["stop_reason"] == "end_turn"

    messages += [{"role": "assistant", "content": second["content"]}]
    messages += [{"role": "user", "content": "and now?"}]
    messages += [{"role": "system", "content": "The user has opened README.md."}]
    third = turn(echo, messages, thinking={"type": "disabled"}, output_config=None)
    assert third["content"][0]["text"] == "and now?\nThe user has opened README.md."

    title = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    titled = turn(echo, [{"role": "user", "content": "{}"}], tools=[], output_config=title)
    assert json.loads(titled["content"][0]["text"]) == {}
