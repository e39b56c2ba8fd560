"""Log probabilities of /v1/responses: OpenAI's form, with the figures of a chat."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from support.documents import check_documented, check_type
from support.server import Server

INCLUDE = {"include": ["message.output_text.logprobs"]}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def post(server: Server, **fields: Any) -> dict[str, Any]:
    body = {"model": server.model, "temperature": 0, "max_output_tokens": 200} | fields
    response = server.http.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stream(server: Server, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": server.model, "temperature": 0, "max_output_tokens": 200, "stream": True}
    response = server.http.post("/v1/responses", json=body | fields)
    assert response.status_code == 200, response.text
    lines = response.text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


def messages(answer: dict[str, Any]) -> list[tuple[str, list[Any]]]:
    """The text of each message, and its log probabilities."""
    parts = [item["content"][0] for item in answer["output"] if item["type"] == "message"]
    return [(part["text"], part["logprobs"]) for part in parts]


def of_chat(server: Server, text: str, top: int, tokens: int, **fields: Any) -> list[Any]:
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0}
    body |= {"logprobs": True, "top_logprobs": top, "max_tokens": tokens}
    answer = server.http.post("/v1/chat/completions", json=body | fields).json()
    entries: list[Any] = answer["choices"][0]["logprobs"]["content"]
    return entries


def test_they_are_those_of_a_chat(server: Server) -> None:
    """The tiny model writes half characters; the end of its text waits for their other halves."""
    text, more = "who weaves the weft?", {"ignore_eos": True}
    for top in (0, 2, 20):
        asked = INCLUDE | {"input": text, "top_logprobs": top, "max_output_tokens": 12} | more
        answer = post(server, **asked)
        [(_, found)] = messages(answer)
        assert found == of_chat(server, text, top, 12, **more)
        assert [len(entry["top_logprobs"]) for entry in found] == [top] * 12
        assert answer["top_logprobs"] == top
        assert messages(stream(server, **asked)[-1]["response"]) == [(answer_text(answer), found)]
    without = post(server, input=text, max_output_tokens=12, **INCLUDE, **more)
    assert messages(without)[0][1] == of_chat(server, text, 0, 12, **more)
    assert without["top_logprobs"] == 0


def answer_text(answer: dict[str, Any]) -> str:
    return "".join(text for text, _ in messages(answer))


def test_without_include_there_are_none(server: Server) -> None:
    answer = post(server, input="weft", top_logprobs=5, max_output_tokens=5)
    assert answer["top_logprobs"] == 5
    assert messages(answer)[0][1] == []
    events = stream(server, input="weft", top_logprobs=5, max_output_tokens=5)
    assert all(event.get("logprobs", []) == [] for event in events)


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        ("hello world", ["hello world"]),
        (f"<think>hm</think>\n\nLet me see.\n{CALL}", ["Let me see."]),
        (f"<think>hm</think>{CALL}", []),
        (f"hello {CALL}world", ["hello", "world"]),
    ],
)
def test_a_message_has_those_of_its_own_text(echo: Server, text: str, texts: list[str]) -> None:
    fields = INCLUDE | {"input": text, "tools": [TOOL], "top_logprobs": 2}
    answer = post(echo, **fields)
    found = messages(answer)
    assert [message for message, _ in found] == texts
    for message, entries in found:
        written = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
        assert written.removesuffix("<|im_end|>") == message
    tool = {"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}
    in_chat = of_chat(echo, text, 2, 200, tools=[tool])
    places = [in_chat.index(entry) for _, entries in found for entry in entries]
    assert places == sorted(set(places))

    events = stream(echo, **fields)
    assert messages(events[-1]["response"]) == found
    deltas: dict[int, list[Any]] = {}
    done = []
    for event in events:
        if event["type"] == "response.output_text.delta":
            deltas.setdefault(event["output_index"], []).extend(event["logprobs"])
        elif event["type"] == "response.output_text.done":
            done.append((event["text"], event["logprobs"]))
    assert done == found
    assert list(deltas.values()) == [entries for _, entries in found]
    for event in events:
        check_type("ResponseStreamEvent", event)
        check_documented("ResponseStreamEvent", event)
    check_type("Response", answer)
    check_documented("Response", answer)


def test_a_stop_string(echo: Server) -> None:
    fields = INCLUDE | {"input": "hello world", "stop": "world"}
    answer = post(echo, **fields)
    [(text, entries)] = messages(answer)
    assert text == "hello "
    assert entries == of_chat(echo, "hello world", 0, 200, stop="world")
    assert messages(stream(echo, **fields)[-1]["response"]) == [(text, entries)]


def test_openai_s_client(echo: Server) -> None:
    with openai.OpenAI(base_url=f"{echo.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.responses.create(
            model="echo",
            input="hello world",
            top_logprobs=3,
            include=["message.output_text.logprobs"],
        )
        assert answer.top_logprobs == 3
        [message] = answer.output
        assert message.type == "message"
        [part] = message.content
        assert part.type == "output_text"
        assert part.logprobs is not None
        assert "".join(one.token for one in part.logprobs) == "hello world<|im_end|>"
        assert len(part.logprobs[0].top_logprobs) == 3
        # All of it is sent back, and a stored response has it.
        again: Any = [{"role": "user", "content": "a"}, message, {"role": "user", "content": "b"}]
        assert client.responses.create(model="echo", input=again).output_text == "b"
        assert client.responses.retrieve(answer.id) == answer
        with client.responses.stream(
            model="echo",
            input="hello world",
            top_logprobs=3,
            include=["message.output_text.logprobs"],
        ) as events:
            seen = [e for e in events if e.type == "response.output_text.delta"]
        assert [one.token for event in seen for one in event.logprobs] == [
            one.token for one in part.logprobs
        ]
