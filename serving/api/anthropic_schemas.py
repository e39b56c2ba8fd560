"""Anthropic's messages: what clients may ask, and what they get.

As in schemas.py, a field that is not here is refused by name. `cache_control` is taken and means
nothing: prefixes are cached anyway.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from msgspec import UNSET, Struct, UnsetType
from pydantic import BeforeValidator, Field, model_validator

from weft.errors import RequestError
from weft.serving.api.body import Body
from weft.serving.api.tool_schema import Parameters
from weft.serving.sampling_params import SamplingParams

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class CacheControl(Body):
    """Taken, and without effect."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


def _as_blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class TextBlock(Body):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = Field(None, max_length=0)


Texts = Annotated[
    list[TextBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock])
]


class Block(Body):
    """A part of a message: text, a thought, a call, or a call's result, by its `type`."""

    type: Literal["text", "thinking", "tool_use", "tool_result"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Texts | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    citations: list[Any] | None = Field(None, max_length=0)
    caller: dict[str, Any] | None = None


class AnthropicMessage(Body):
    """A turn of the conversation."""

    role: Literal["user", "assistant"]
    content: Annotated[
        list[Block], BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block])
    ]

    @model_validator(mode="after")
    def _blocks_have_what_their_type_says(self) -> Self:
        for block in self.content:
            for field in _REQUIRED[block.type]:
                if getattr(block, field) is None:
                    raise RequestError(
                        f"messages has a block of type {block.type} without {field}",
                        param=f"messages.content.{field}",
                        code="missing_parameter",
                    )
            if block.type not in _BLOCKS[self.role]:
                raise RequestError(
                    f"messages has a block of type {block.type} in a message of the {self.role}",
                    param="messages.content.type",
                )
        return self


_REQUIRED = {
    "text": ("text",),
    "thinking": ("thinking",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
_BLOCKS = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use")}


class AnthropicTool(Body):
    """A function that the model may call."""

    name: str = Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")
    input_schema: Parameters
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class AnthropicToolChoice(Body):
    """Whether the model may or must call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _one_has_a_name(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise RequestError(
                "tool_choice.name goes with type 'tool', and with no other",
                param="tool_choice.name",
            )
        return self


class Thinking(Body):
    """The model thinks as it likes: there is no way to set how much, or to forbid it."""

    type: Literal["adaptive"]
    display: Literal["summarized"] | None = None


class Metadata(Body):
    """Labels of the request."""

    user_id: str | None = None


class CountRequest(Body):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: list[AnthropicMessage] = Field(min_length=1)
    system: Texts | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None


class MessagesRequest(CountRequest):
    """POST /v1/messages. `seed`, `min_p` and `priority` are not Anthropic's."""

    max_tokens: int
    metadata: Metadata | None = None
    min_p: float | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    seed: int | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    def sampling_params(self) -> SamplingParams:
        """The sampling settings; RequestError when a value is out of range."""
        names = ("max_tokens", "min_p", "seed", "temperature", "top_k", "top_p")
        given = {name: getattr(self, name) for name in names}
        return SamplingParams(
            **{name: value for name, value in given.items() if value is not None},
            stop=tuple(self.stop_sequences or ()),
        )


# What clients get.


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
