"""Conversations in Anthropic's form, converted to OpenAI's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import msgspec

from weft.errors import RequestError
from weft.serving.api.anthropic.blocks import (
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from weft.serving.api.anthropic.requests import CountRequest
from weft.serving.api.anthropic.tools import ToolChoice, functions
from weft.serving.api.conversation import Conversation
from weft.serving.api.openai.messages import FunctionCall, Message, TextPart, ToolCall
from weft.serving.api.openai.tools import FunctionName, ToolMode
from weft.serving.engine.chat_templates import ChatTemplates

_TOOL_MODES: dict[str, ToolMode] = {"auto": "auto", "any": "required", "none": "none"}
_BILLING = "x-anthropic-billing-header:"
"""The beginning of a system text that Claude Code changes in each request. It is no instruction,
and would make the prefix cache useless."""


def conversation(body: CountRequest, templates: ChatTemplates) -> Conversation:
    """Convert the request to OpenAI's form.

    As in Anthropic's API, neighbouring messages with the same role are one turn.

    Raises:
        RequestError: no message has any content, or the tools and the choice contradict each other.
    """
    messages: list[Message] = []
    for role, turn in groupby(_turns(body, templates), key=lambda turn: turn[0]):
        blocks = [block for _, part in turn for block in part]
        match role:
            case "user":
                messages += _user(blocks)
            case "assistant":
                messages.append(_assistant(blocks))
            case "system":
                messages.append(Message(role="system", content=_parts(blocks)))
    last = messages[-1]
    continued = last.role == "assistant" and any(part.text for part in last.content or ())
    if last.role == "assistant" and not continued:
        messages.pop()  # an empty message cannot be continued
    if not messages:
        raise RequestError(
            "messages has only an empty message of the assistant; send one of the user",
            param="messages",
        )
    choice = body.tool_choice or ToolChoice(type="auto")
    return Conversation(
        messages,
        functions(body.tools or ()),
        _TOOL_MODES[choice.type] if choice.name is None else FunctionName(name=choice.name),
        not choice.disable_parallel_tool_use,
        continued,
        thinking=body.asked_thinking,
    )


def _turns(body: CountRequest, templates: ChatTemplates) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield role and blocks for the system prompt and for each message.

    Many templates take a system message only at the start. For them, a later one becomes a user
    message.
    """
    texts = [block for block in body.system or () if block.text]
    if system := [block for block in texts if not block.text.startswith(_BILLING)]:
        yield "system", system
    of_users = [i for i, message in enumerate(body.messages) if message.role == "user"]
    for i, message in enumerate(body.messages):
        if not isinstance(message, SystemMessage):
            yield message.role, message.content
        elif not (message.clear_at == "next_user_message" and of_users and i < of_users[-1]):
            late = i > 0 and not templates.takes_late_system
            yield "user" if late else "system", message.content


def _user(blocks: Sequence[Any]) -> Iterator[Message]:
    """Yield a message for each call's result, and one for the other text."""
    texts = []
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            parts = [TextPart(type="text", text=text) for text in block.texts or [""]]
            yield Message(role="tool", tool_call_id=block.tool_use_id, content=parts)
        else:
            texts.append(block)
    if texts or not blocks:
        yield Message(role="user", content=_parts(texts))


def _assistant(blocks: Sequence[Any]) -> Message:
    calls = [
        ToolCall(
            id=block.id,
            function=FunctionCall(
                name=block.name, arguments=msgspec.json.encode(block.input).decode()
            ),
        )
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    return Message(
        role="assistant",
        content=_parts([block for block in blocks if isinstance(block, TextBlock)]) or None,
        tool_calls=calls or None,
        reasoning_content="\n".join(filter(None, thoughts)) or None,
    )


def _parts(blocks: Sequence[Any]) -> list[TextPart]:
    return [TextPart(type="text", text=block.text) for block in blocks]
