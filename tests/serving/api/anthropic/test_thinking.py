"""Thinking in Anthropic's terms: the model repeats the last message.

The prompt ends with the template's text for the answer, so its length shows the switch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from support import echo_runner
from support.server import Server, start_server
from support.tokenizers import write_byte_level

HEAD = f"{echo_runner.START}{{{{ messages[-1].content }}}}{echo_runner.END}"
OFF, ON = "<think>\n\n</think>\n\n", "<think>\n"
SWITCHED = (
    HEAD
    + "{% if thinking %}{{ '<think>\\n' }}{% else %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
)
EFFORTS = HEAD + "{# </think> #}<think>{{ reasoning_effort or '' }}{{ '\\n' }}"
TEMPLATES = {"switched": SWITCHED, "efforts": EFFORTS, "plain": HEAD}
ASKED: Any = [{"role": "user", "content": "first</think>then"}]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """Servers for models with a switch, with efforts, and without thoughts."""
    path = tmp_path_factory.mktemp("thinking")
    for name, template in TEMPLATES.items():
        write_byte_level(path / name, ["<think>", "</think>"], chat_template=template)
    load = {"loader": echo_runner.LOADER}
    with (
        start_server(path / "switched", path, **load) as switched,
        start_server(path / "efforts", path, **load) as efforts,
        start_server(path / "plain", path, **load) as plain,
    ):
        yield {"switched": switched, "efforts": efforts, "plain": plain}


def extra(server: Server, **fields: Any) -> int:
    """The prompt's token count after the message, by both routes."""
    body = {"model": server.model, "messages": ASKED} | fields
    response = server.http.post("/v1/messages/count_tokens", json=body)
    assert response.status_code == 200, response.text
    count: int = response.json()["input_tokens"]
    usage = server.http.post("/v1/messages", json=body | {"max_tokens": 30}).json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count
    text = echo_runner.START + ASKED[0]["content"] + echo_runner.END
    asked = {"prompt": text, "add_special_tokens": False}
    before: int = server.http.post("/tokenize", json=asked).json()["count"]
    return count - before


def test_the_switch(servers: dict[str, Server]) -> None:
    server = servers["switched"]
    on, off = extra(server, thinking={"type": "adaptive"}), extra(server)
    assert 0 < on < off
    assert extra(server, thinking={"type": "enabled", "budget_tokens": 1024}) == on
    assert extra(server, thinking={"type": "disabled"}) == off
    assert extra(server, thinking=None) == off
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        asked: Any = {"model": server.model, "messages": ASKED, "max_tokens": 30}
        answer = client.messages.create(**asked, thinking={"type": "adaptive"})
        thought, text = answer.content
        assert thought.type == "thinking"
        assert (thought.thinking, len(thought.signature)) == ("first", 64)
        assert text.type == "text"
        assert text.text == "then"
        details = answer.usage.output_tokens_details
        assert details is not None
        assert details.thinking_tokens > 0
        (text,) = client.messages.create(**asked, thinking={"type": "disabled"}).content
        assert text.type == "text"
        assert text.text == "first</think>then"


@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_that_is_left_out(servers: dict[str, Server], stream: bool) -> None:
    server = servers["switched"]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        asked: Any = {"model": server.model, "messages": ASKED, "max_tokens": 30}
        asked["thinking"] = {"type": "adaptive", "display": "omitted"}
        if stream:
            with client.messages.stream(**asked) as events:
                answer = events.get_final_message()
        else:
            answer = client.messages.create(**asked)
        thought, text = answer.content
        assert thought.type == "thinking"
        assert (thought.thinking, len(thought.signature)) == ("", 64)
        assert text.type == "text"
        assert text.text == "then"


def test_efforts(servers: dict[str, Server]) -> None:
    server = servers["efforts"]
    none = extra(server)
    for effort, shown in (("low", "low"), ("high", "high"), ("max", "high")):
        config = {"effort": effort}
        assert extra(server, output_config=config) == none + len(shown)
        both = extra(server, output_config=config, thinking={"type": "adaptive"})
        assert both == none + len(shown)
    body = {"model": server.model, "messages": ASKED, "max_tokens": 9}
    response = server.http.post("/v1/messages", json=body | {"thinking": {"type": "disabled"}})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("thinking asks for no thought;")


def test_a_model_that_never_thinks(servers: dict[str, Server]) -> None:
    for kind in ("enabled", "disabled", "adaptive"):
        thinking = {"type": kind} | ({"budget_tokens": 9} if kind == "enabled" else {})
        assert extra(servers["plain"], thinking=thinking) == 0
    assert extra(servers["plain"], output_config={"effort": "low"}) == 0
