"""A model that thinks is free to, and what it says then is what was asked for.

Its weights are random; its marks are special tokens, as those of Mistral.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from support.checkpoints import make_checkpoint
from support.server import Server, start_server
from support.tokenizers import write_byte_level

from weft.serving.engine.tokenizer import Tokenizer

MARKS = ("[THINK]", "[/THINK]", "[TOOL_CALLS]")
TEMPLATE = (
    "{# [TOOL_CALLS] [/THINK] #}<|im_start|>{{ messages[-1].content }}<|im_end|>"
    "{{ '[THINK]' if messages[-1].content != 'at once' }}"
)
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["S", "M", "L"]}},
    "required": ["ok", "size"],
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("thinks")
    model = make_checkpoint(path / "model", "llama", eos_token_id=None)
    write_byte_level(model, MARKS, chat_template=TEMPLATE)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    with start_server(model, path) as server:
        yield server


def asked(server: Server, content: str, **fields: Any) -> dict[str, Any]:
    """A request whose thoughts end soon."""
    close = Tokenizer.load(server.log.parent / "model").backend.token_to_id("[/THINK]")
    return {
        "model": server.model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 1.0,
        "seed": 5,
        "max_tokens": 300,
        "logit_bias": {str(close): 2.0},
        **fields,
    }


def messages(server: Server, content: str, **fields: Any) -> list[dict[str, Any]]:
    """Of four answers, which all end by themselves."""
    body = asked(server, content, n=4, **fields)
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert {choice["finish_reason"] for choice in choices} <= {"stop", "tool_calls"}
    return [choice["message"] for choice in choices]


def test_the_answer_behind_the_thought_keeps_to_the_schema(server: Server) -> None:
    found = messages(server, "hm", response_format=FORM)
    assert any(message["reasoning_content"] for message in found)
    for message in found:
        jsonschema.validate(json.loads(message["content"]), SCHEMA)


@pytest.mark.parametrize(
    "fields", [{"regex": "yes|no"}, {"guided_choice": ["yes", "no"]}, {"ebnf": 'root ::= "yes"'}]
)
def test_other_grammars(server: Server, fields: dict[str, Any]) -> None:
    for message in messages(server, "hm", **fields):
        assert message["content"] in ("yes", "no")


def test_without_an_opening_mark_it_may_think_or_not(server: Server) -> None:
    for message in messages(server, "at once", guided_choice=["yes", "no"]):
        assert message["content"] in ("yes", "no")


def test_streamed_equals_whole(server: Server) -> None:
    body = asked(server, "hm", response_format=FORM)
    whole = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    streamed = server.http.post("/v1/chat/completions", json=body | {"stream": True}).text
    events = [json.loads(line[6:]) for line in streamed.split("\n\n")[:-2]]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    for field in ("reasoning_content", "content"):
        assert "".join(delta.get(field) or "" for delta in deltas) == whole[field]


def test_calls_are_made_with_the_model_s_own_mark(server: Server) -> None:
    for message in messages(server, "hm", tools=[TOOL], tool_choice="required"):
        assert message["content"] is None
        for call in message["tool_calls"]:
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


def test_a_tool_s_schema_is_refused_by_name(server: Server) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    body = asked(server, "hm", tools=[tool], tool_choice="required")
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "tools"
    assert error["message"] == "tools: f/properties/x: uniqueItems is not supported"
