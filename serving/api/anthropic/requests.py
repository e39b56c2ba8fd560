"""Requests for Anthropic's Messages; events.py has the replies.

As in openai/requests.py, an unknown field is refused by its name. `cache_control` is accepted and
has no effect, because prefixes are always cached.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from weft.errors import RequestError
from weft.serving.api.body import Body, by_type
from weft.serving.api.openai.requests import Function, Parameters, StopTexts, sampling_params
from weft.serving.engine.sampling_params import SamplingParams


class CacheControl(Body):
    """A cache hint; it has no effect."""

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


_REQUIRED = {
    "text": ("text",),
    "thinking": ("thinking",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
_BLOCKS = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use")}


class Block(Body):
    """A text, a thought, a call, or a call's result in a message, depending on `type`."""

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

    model_config = by_type(_REQUIRED)


class AnthropicMessage(Body):
    """A turn in the conversation."""

    role: Literal["user", "assistant"]
    content: Annotated[
        list[Block], BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block])
    ]

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {
                    "properties": {
                        "role": {"const": role},
                        "content": {"items": {"properties": {"type": {"enum": list(types)}}}},
                    }
                }
                for role, types in _BLOCKS.items()
            ]
        }
    )

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


class CustomTool(Body):
    """A tool that the client runs. This check comes first and refuses Anthropic's hosted tools."""

    type: Literal["custom"] | None = None


class AnthropicTool(Function, CustomTool):
    """A function for the model."""

    parameters: Parameters = Field(alias="input_schema")
    cache_control: CacheControl | None = None


class AnthropicToolChoice(Body):
    """The choice between tools: the model may, must or must not call one."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    model_config = by_type(
        {"tool": ("name",), "auto": (), "any": (), "none": ()},
        dict.fromkeys(("auto", "any", "none"), ("name",)),
    )

    @model_validator(mode="after")
    def _one_has_a_name(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise RequestError(
                "tool_choice.name is only for type 'tool', which requires it",
                param="tool_choice.name",
            )
        return self


class Thinking(Body):
    """Options for thinking; it cannot be limited or turned off."""

    type: Literal["adaptive"]
    display: Literal["summarized"] | None = None


class Metadata(Body):
    """Labels for the request."""

    user_id: str | None = None


class CountRequest(Body):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: list[AnthropicMessage] = Field(min_length=1)
    system: Texts | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None

    @model_validator(mode="after")
    def _the_last_message_can_be_continued(self) -> Self:
        if self.messages[-1].role == "user":
            return self
        content = self.messages[-1].content
        if other := [block.type for block in content if block.type != "text"]:
            raise RequestError(
                f"messages ends with a message of the assistant that has a block of type "
                f"{other[0]}; only text can be continued",
                param="messages",
            )
        if "".join(block.text or "" for block in content)[-1:].isspace():
            raise RequestError(
                "messages ends with a message of the assistant whose text ends with white space; "
                "remove it, because the answer continues the text",
                param="messages",
            )
        return self


class MessagesRequest(CountRequest):
    """POST /v1/messages. Anthropic does not have `seed`, `min_p` and `priority`."""

    max_tokens: int
    metadata: Metadata | None = None
    min_p: float | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    seed: int | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    stop_sequences: StopTexts | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    def sampling_params(self) -> SamplingParams:
        """Return the sampling settings; RequestError if a value is out of range."""
        return sampling_params(self, stop=self.stop_sequences)
