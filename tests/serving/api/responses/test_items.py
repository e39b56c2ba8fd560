"""Items from clients, as OpenAI's client and coding agents send them back."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from support.server import Server

from weft.errors import RequestError
from weft.serving.api.responses.items import IGNORED, InputItem, messages_of, seal, unseal
from weft.serving.api.responses.tools import NamespaceTool, Toolbox

SHELL = {"type": "custom", "name": "shell", "description": "Runs a command."}
GROUP = {"type": "namespace", "name": "mcp__maps", "description": "Maps.", "tools": [SHELL]}
NOTES = {"turn_id": "t1"}
# A turn's items, as a coding agent keeps and sends them.
AGENT: list[dict[str, Any]] = [
    {
        "type": "message",
        "role": "developer",
        "content": [{"type": "input_text", "text": "rules"}],
        "internal_chat_message_metadata_passthrough": NOTES,
    },
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "do it"}]},
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": None,
        "encrypted_content": seal("hm 日本"),
    },
    {
        "type": "message",
        "role": "assistant",
        "id": "msg_1",
        "status": "completed",
        "phase": "commentary",
        "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
    },
    {
        "type": "function_call",
        "id": "fc_1",
        "name": "find",
        "namespace": "mcp__maps",
        "arguments": '{"city": "Rome"}',
        "call_id": "call_1",
        "metadata": NOTES,
    },
    {
        "type": "custom_tool_call",
        "id": "ctc_1",
        "status": "completed",
        "name": "shell",
        "input": 'ls "a"\n',
        "call_id": "call_2",
    },
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
    {"type": "function_call_output", "call_id": "call_1", "output": "41.9"},
    {
        "type": "custom_tool_call_output",
        "call_id": "call_2",
        "name": "shell",
        "output": [{"type": "input_text", "text": "a.py"}],
    },
]


def test_the_messages_of_an_agent_s_turn() -> None:
    toolbox = Toolbox([NamespaceTool.model_validate(GROUP)])
    items = [item for item in map(InputItem.model_validate, AGENT) if item.type != "ignored"]
    messages = [each.model_dump(exclude_none=True) for each in messages_of(items, toolbox)]
    assert [message["role"] for message in messages] == [
        *("developer", "user", "assistant", "tool", "tool"),
    ]
    turn = messages[2]
    assert turn["reasoning_content"] == "hm 日本"
    assert turn["content"] == [{"type": "text", "text": "I look."}]
    names = [call["function"]["name"] for call in turn["tool_calls"]]
    assert names == ["mcp__maps__find", "shell"]
    assert json.loads(turn["tool_calls"][1]["function"]["arguments"]) == {"input": 'ls "a"\n'}
    assert [(m["tool_call_id"], m["content"][0]["text"]) for m in messages[3:]] == [
        ("call_1", "41.9"),
        ("call_2", "a.py"),
    ]


def test_an_agent_s_request(echo: Server) -> None:
    """All fields from a coding agent."""
    body = {
        "model": "echo",
        "instructions": "You are a coding agent.",
        "input": AGENT,
        "tools": [SHELL, GROUP, {"type": "web_search", "external_web_access": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "text": {"verbosity": "medium"},
        "client_metadata": {"installation": "1"},
    }
    response = echo.http.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["output"][0]["content"][0]["text"] == "a.py"
    assert answer["reasoning"] == {"effort": "medium", "summary": None}
    assert answer["store"] is False


def test_thoughts_go_back_sealed(echo: Server) -> None:
    with openai.OpenAI(base_url=f"{echo.url}/v1", api_key="none", max_retries=0) as client:
        question: Any = [{"role": "user", "content": "<think>hm</think>yes"}]
        plain = client.responses.create(model="echo", input=question)
        assert plain.output[0].type == "reasoning"
        assert plain.output[0].encrypted_content is None
        with client.responses.stream(
            model="echo", input=question, include=["reasoning.encrypted_content"], store=False
        ) as events:
            (done,) = [
                event.item
                for event in events
                if event.type == "response.output_item.done" and event.item.type == "reasoning"
            ]
        assert done.encrypted_content is not None
        assert unseal(done.encrypted_content, "a") == "hm"
        sent = {"type": "reasoning", "id": done.id, "summary": []}
        sent["encrypted_content"] = done.encrypted_content
        more: Any = [*question, sent, {"role": "user", "content": "again"}]
        assert client.responses.create(model="echo", input=more).output_text == "again"
        sent["encrypted_content"] = "gAAAAABo"
        with pytest.raises(openai.BadRequestError, match="is not from this server") as caught:
            client.responses.create(model="echo", input=more)
        assert caught.value.code == "invalid_encrypted_content"
        sent["content"] = [{"type": "reasoning_text", "text": "hm"}]  # it then has no effect
        assert client.responses.create(model="echo", input=more).output_text == "again"


@pytest.mark.parametrize("thought", ["", "hm", "日本😀\n" * 100])
def test_a_sealed_thought(thought: str) -> None:
    sealed = seal(thought)
    assert unseal(sealed, "a") == thought
    for wrong in (sealed[:-4], sealed[:10] + "é" + sealed[10:], sealed.replace(".", "", 1), ""):
        with pytest.raises(RequestError, match="is not from this server"):
            unseal(wrong, "a")


@pytest.mark.parametrize("kind", IGNORED)
def test_items_of_tools_that_are_left_out(echo: Server, kind: str) -> None:
    items = [{"type": kind, "id": "x_1", "action": {}}, {"role": "user", "content": "hello"}]
    response = echo.http.post("/v1/responses", json={"model": "echo", "input": items})
    assert response.json()["output"][0]["content"][0]["text"] == "hello"


def test_what_the_client_s_own_objects_carry(echo: Server) -> None:
    """Parsed output, and items from a list, go back."""
    with openai.OpenAI(base_url=f"{echo.url}/v1", api_key="none", max_retries=0) as client:
        tools: Any = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
        call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
        text = f"<think>hm</think>Let me see.\n{call}"
        with client.responses.stream(model="echo", input=text, tools=tools) as events:
            for _ in events:
                pass
            answer = events.get_final_response()
        listed = client.responses.input_items.list(answer.id).data
        given = {"type": "function_call_output", "call_id": "c", "output": "sunny", "status": None}
        conversation: Any = [*listed, *answer.output, given]
        dumped: Any = [
            each.model_dump() if hasattr(each, "model_dump") else each for each in conversation
        ]
        for items in (conversation, dumped):
            again = client.responses.create(model="echo", input=items, tools=tools)
            assert again.output_text == "sunny"
