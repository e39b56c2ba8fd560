"""Anthropic's messages: what clients get, whole or as a stream of typed events."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesUsage(Struct):
    """Token counts; `input_tokens` are those that did not come from the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class TextOut(Struct, tag="text"):
    """What the model says."""

    text: str
    citations: None = None


class ThinkingOut(Struct, tag="thinking"):
    """What the model thinks first."""

    thinking: str
    signature: str = ""


class ToolUseOut(Struct, tag="tool_use"):
    """A call. Arguments that are no JSON are its one key INVALID_JSON, as Anthropic advises."""

    id: str
    name: str
    input: dict[str, Any]


BlockOut = TextOut | ThinkingOut | ToolUseOut


class MessageOut(Struct, tag="message"):
    """The assistant's turn."""

    id: str
    model: str
    content: list[BlockOut]
    usage: MessagesUsage
    role: Literal["assistant"] = "assistant"
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None


class TokenCount(Struct):
    """What /v1/messages/count_tokens answers."""

    input_tokens: int


class MessageStart(Struct, tag="message_start"):
    """The first event, with a message that is empty yet."""

    message: MessageOut


class BlockStart(Struct, tag="content_block_start"):
    """A block begins."""

    index: int
    content_block: BlockOut


class TextDelta(Struct, tag="text_delta"):
    """More of a text."""

    text: str


class ThinkingDelta(Struct, tag="thinking_delta"):
    """More of a thought."""

    thinking: str


class InputJsonDelta(Struct, tag="input_json_delta"):
    """More of a call's input."""

    partial_json: str


class BlockDelta(Struct, tag="content_block_delta"):
    """More of the block."""

    index: int
    delta: TextDelta | ThinkingDelta | InputJsonDelta


class BlockStop(Struct, tag="content_block_stop"):
    """The block has ended."""

    index: int


class MessageEnd(Struct):
    """Why the message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, tag="message_delta"):
    """The message has ended."""

    delta: MessageEnd
    usage: MessagesUsage


class MessageStop(Struct, tag="message_stop"):
    """The last event."""


class Ping(Struct, tag="ping"):
    """The server is there, and the prompt is computed."""


MessageEvent = (
    MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping
)


class AnthropicErrorDetail(Struct):
    """What went wrong."""

    type: str
    message: str


class AnthropicError(Struct, tag="error"):
    """The body of an answer that is not 2xx, and an event that ends a stream."""

    error: AnthropicErrorDetail
    request_id: str | UnsetType | None = UNSET
