"""Conversations in Anthropic's form, as the model sees them."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from weft.errors import RequestError
from weft.serving.api.anthropic import tools as anthropic_tools
from weft.serving.api.anthropic.conversation import conversation
from weft.serving.api.anthropic.requests import MessagesRequest
from weft.serving.engine.chat_templates import ChatTemplates

EACH = (
    "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content or '' }}{{ m.content or '' }}"
    "{% for call in m.tool_calls %}({{ call.function.name }} {{ call.function.arguments }})"
    "{% endfor %}{% endfor %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"
) + EACH
SILENT = EACH.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
PLAIN = ChatTemplates({"default": EACH}, {})
USER: dict[str, Any] = {"role": "user", "content": "hi"}


def body(**fields: Any) -> MessagesRequest:
    return MessagesRequest.model_validate(
        {"model": "m", "max_tokens": 9, "messages": [USER]} | fields
    )


def seen(messages: list[Any], templates: ChatTemplates = PLAIN, **fields: Any) -> str:
    """The template's text."""
    asked = conversation(body(messages=messages, **fields), templates)
    shown = [message.model_dump(exclude_none=True) for message in asked.messages]
    for message in shown:
        message["content"] = "\n".join(part["text"] for part in message.get("content", ()))
    return templates.render(shown)


def said(role: str, *blocks: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": b} if isinstance(b, str) else b for b in blocks]
    return {"role": role, "content": content}


def result(*content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "a", "content": list(content)}


def test_system_texts() -> None:
    billing = "x-anthropic-billing-header: cc_version=2.1; cch=fa690;"
    system = said("system", billing, "be brief", {"type": "text", "text": "and kind"})["content"]
    assert seen([USER], system=system) == "[system]be brief\nand kind[user]hi"
    for nothing in ("", [], [system[0]], None):
        assert seen([USER], system=nothing) == "[user]hi"


def test_neighbouring_messages_of_one_role_are_one_turn() -> None:
    messages = [USER, said("user", "ho"), said("assistant", "a"), said("assistant", "b"), USER]
    assert seen(messages) == "[user]hi\nho[assistant]a\nb[user]hi"


def test_nothing_but_an_empty_answer_is_refused() -> None:
    with pytest.raises(RequestError, match="messages has only an empty message of the assistant"):
        seen([said("assistant", "")])


def test_thoughts_calls_and_results() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    hidden = {"type": "redacted_thinking", "data": "xyz"}
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}, "caller": {}}
    document = {
        "type": "document",
        "title": "T",
        "source": {"type": "text", "media_type": "text/plain", "data": "D"},
    }
    found = {
        "type": "search_result",
        "source": "url",
        "title": "S",
        "content": [{"type": "text", "text": "C"}],
    }
    parts = {"type": "document", "source": {"type": "content", "content": "P"}, "context": "about"}
    assert seen([USER, said("assistant", thought, hidden, call), said("user", result(), "x")]) == (
        '[user]hi[assistant]hm(f {"x":1})[tool][user]x'
    )
    reference = {"type": "tool_reference", "tool_name": "g"}
    assert seen([USER, said("assistant", call), said("user", result(document, found, reference))])[
        -23:
    ].endswith("[tool]T\nD\nS\nurl\nC\ng")
    assert seen([said("user", document, found, parts)]) == "[user]T\nD\nS\nurl\nC\nabout\nP"


@pytest.mark.parametrize("template", [STRICT, SILENT])
def test_a_late_system_message_reaches_every_model(template: str) -> None:
    """Also if the template takes a system message only at the start, or drops it."""
    messages = [USER, said("system", "be kind"), said("assistant", "ok"), USER]
    late = ChatTemplates({"default": template}, {})
    assert seen(messages, late) == "[user]hi\nbe kind[assistant]ok[user]hi"
    assert seen(messages) == "[user]hi[system]be kind[assistant]ok[user]hi"
    assert seen(messages[1:])[:15] == "[system]be kind"


def test_a_system_message_for_one_turn() -> None:
    brief = said("system", "now") | {"clear_at": "next_user_message"}
    assert seen([USER, brief]) == "[user]hi[system]now"
    assert seen([USER, brief, said("assistant", "ok"), USER]) == "[user]hi[assistant]ok[user]hi"


def test_tools_that_the_client_runs_get_their_schema() -> None:
    asked = body(
        tools=[
            {"type": "bash_20250124", "name": "bash", "cache_control": {"type": "ephemeral"}},
            {
                "type": "text_editor_20250728",
                "name": "str_replace_based_edit_tool",
                "max_characters": 10000,
            },
            {"type": "memory_20250818", "name": "memory", "allowed_callers": ["direct"]},
        ]
    )
    bash, editor, memory = conversation(asked, PLAIN).tools
    assert (bash.name, list((bash.parameters or {})["properties"])) == (
        "bash",
        ["command", "restart"],
    )
    for tool, last in ((editor, "insert"), (memory, "rename")):
        assert tool.parameters is not None
        assert tool.parameters["properties"]["command"]["enum"][-1] == last
    old = body(tools=[{"type": "text_editor_20250124", "name": "str_replace_editor"}])
    (editor,) = conversation(old, PLAIN).tools
    assert "insert_text" not in (editor.parameters or {})["properties"]


def test_tools_of_anthropic_s_servers_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """This is said once for each kind."""
    anthropic_tools._note_left_out.cache_clear()
    mine = {"name": "f", "description": "F.", "input_schema": {"type": "object"}}
    kinds = ("web_search_20250305", "web_fetch_20260318", "code_execution_20250825")
    theirs = [{"type": kind, "name": "n", "max_uses": 3} for kind in kinds]
    search = {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}
    asked = body(tools=[*theirs, mine | {"defer_loading": True}, search])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            (shown,) = conversation(asked, PLAIN).tools
    assert (shown.name, shown.description) == ("f", "F.")
    assert len(caplog.records) == 4
    assert "web_search" in caplog.text


def test_examples_of_inputs_are_in_the_description() -> None:
    tool = {"name": "f", "input_schema": {}, "input_examples": [{"x": 1}], "strict": True}
    (shown,) = conversation(body(tools=[tool]), PLAIN).tools
    assert (shown.description, shown.strict) == ('Example input: {"x": 1}', True)
