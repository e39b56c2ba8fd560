"""Thinking switched on and off, over HTTP. The model repeats the last message.

The prompt ends with the template's text for the answer, so its length shows the switch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support import echo_runner
from support.server import Server, start_server
from support.tokenizers import write_byte_level

OFF = "<think>\n\n</think>\n\n"
HEAD = f"{echo_runner.START}{{{{ messages[-1].content }}}}{echo_runner.END}"
SWITCHED = (
    HEAD + "{{ verbosity }}"
    "{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% else %}{{ '<think>\\n' }}{% endif %}"
)
ALWAYS = HEAD + "{# </think> #}<think>{{ '\\n' }}"
PLAIN = HEAD + "{{ x }}"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """Servers for models with a switch, with permanent thinking, and without thinking."""
    path = tmp_path_factory.mktemp("thinking")
    found = {}
    for name, template in (("switched", SWITCHED), ("always", ALWAYS), ("plain", PLAIN)):
        write_byte_level(path / name, ["<think>", "</think>"], chat_template=template)
    load = {"loader": echo_runner.LOADER}
    with (
        start_server(path / "switched", path, **load) as found["switched"],
        start_server(path / "always", path, **load) as found["always"],
        start_server(path / "plain", path, **load) as found["plain"],
    ):
        yield found


def body(said: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": said}], **fields}


def prompt(server: Server, **fields: Any) -> str:
    """The prompt's end, after the message."""
    tokens = server.http.post("/tokenize", json=body("hello", **fields))
    assert tokens.status_code == 200, tokens.text
    text = server.http.post("/detokenize", json={"tokens": tokens.json()["tokens"]}).json()
    end: str = text["prompt"].partition(echo_runner.END)[2]
    return end


def message(server: Server, said: str, **fields: Any) -> dict[str, Any]:
    """The answer; a streamed one is the same."""
    asked = body(said, model=server.model, **fields)
    response = server.http.post("/v1/chat/completions", json=asked)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()["choices"][0]["message"]
    streamed = server.http.post("/v1/chat/completions", json=asked | {"stream": True}).text
    events = [json.loads(line[6:]) for line in streamed.split("\n\n") if line[6:].startswith("{")]
    deltas = [event["choices"][0]["delta"] for event in events]
    for name in ("content", "reasoning_content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == (found.get(name) or "")
    return found


def refusal(server: Server, **fields: Any) -> dict[str, Any]:
    for path, more in (("/v1/chat/completions", {"model": server.model}), ("/tokenize", {})):
        response = server.http.post(path, json=body("hello", **more, **fields))
        assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def test_the_switch(servers: dict[str, Server]) -> None:
    server = servers["switched"]
    assert prompt(server) == prompt(server, reasoning_effort="low") == "<think>\n"
    off: dict[str, Any]
    for off in (
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": False}},
    ):
        assert prompt(server, **off) == OFF
        assert message(server, "hello", **off)["content"] == "hello"
        assert "reasoning_content" not in message(server, "hello", **off)
        assert message(server, "<think>a</think>b", **off)["content"] == "<think>a</think>b"
    thought = message(server, "first</think>then", reasoning_effort="high")
    assert (thought["reasoning_content"], thought["content"]) == ("first", "then")


def test_without_a_thought_a_grammar_begins_at_once(servers: dict[str, Server]) -> None:
    fields = {"structured_outputs": {"choice": ["yes"]}, "reasoning_effort": "none"}
    answer = message(servers["switched"], "yes", **fields)
    assert answer["content"] == "yes"


def test_a_model_that_always_thinks(servers: dict[str, Server]) -> None:
    server = servers["always"]
    assert prompt(server, reasoning_effort="high") == "<think>\n"
    error = refusal(server, reasoning_effort="none")
    assert error["param"] == "reasoning_effort"
    assert error["message"] == "reasoning_effort asks for no thought; this model always thinks"


def test_a_model_that_never_thinks(servers: dict[str, Server]) -> None:
    """Its answer would be the same, so every effort is taken."""
    for effort in ("none", "low", "xhigh", None):
        answer = message(servers["plain"], "hello", reasoning_effort=effort)
        assert answer["content"] == "hello"


def test_arguments_of_the_template(servers: dict[str, Server]) -> None:
    assert prompt(servers["plain"], chat_template_kwargs={"x": "[1]", "unread": {}}) == "[1]"
    assert prompt(servers["plain"], chat_template_kwargs={}) == ""
    assert prompt(servers["plain"], chat_template_kwargs=None) == ""


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"reasoning_effort": 1}, "reasoning_effort"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        (
            {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"},
            "reasoning_effort",
        ),
    ],
)
def test_wrong_values_are_named(
    servers: dict[str, Server], fields: dict[str, Any], param: str
) -> None:
    error = refusal(servers["switched"], **fields)
    assert error["param"] == param
    assert param in error["message"]


def test_the_settings(servers: dict[str, Server], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("settings")
    write_byte_level(path / "model", chat_template=PLAIN)
    (path / "mine.jinja").write_text(SWITCHED)
    settings = {
        "chat_template": str(path / "mine.jinja"),
        "default_chat_template_kwargs": '{"enable_thinking": false}',
    }
    with start_server(path / "model", path, loader=echo_runner.LOADER, **settings) as server:
        assert prompt(server) == OFF
        assert prompt(server, reasoning_effort="low") == "<think>\n"
        assert prompt(server, chat_template_kwargs={"enable_thinking": True}) == "<think>\n"


def test_verbosity(servers: dict[str, Server]) -> None:
    assert prompt(servers["switched"], verbosity="low") == "low<think>\n"
    message(servers["switched"], "hello", verbosity="high")
    assert prompt(servers["plain"], verbosity="medium") == prompt(servers["plain"])
    assert refusal(servers["plain"], verbosity="high")["param"] == "verbosity"
    response = servers["switched"].http.post(
        "/v1/responses", json={"input": "hello", "text": {"verbosity": "low"}}
    )
    assert response.status_code == 200, response.text
    assert response.json()["text"]["verbosity"] == "low"
    counted = [
        servers["switched"].http.post(
            "/v1/responses/input_tokens", json={"input": "hello", "text": {"verbosity": level}}
        )
        for level in (None, "high")
    ]
    without, high = (each.json()["input_tokens"] for each in counted)
    assert high == without + len("high")
