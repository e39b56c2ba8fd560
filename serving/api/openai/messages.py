"""Messages of a chat in OpenAI's form."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from weft.errors import RequestError
from weft.serving.api.body import Body


class TextPart(Body):
    """A text in a message's content. Images and audio are refused by their type.

    Hints for caches have no effect, because prefixes are always cached.
    """

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = Field(default=None, exclude=True)
    prompt_cache_breakpoint: dict[str, Any] | None = Field(default=None, exclude=True)


class FunctionCall(Body):
    """A function call by the model; `arguments` is JSON.

    OpenAI's Python SDK adds `parsed_arguments` to the calls in its answers.
    """

    name: str
    arguments: str
    parsed_arguments: Any = Field(default=None, exclude=True)


class ToolCall(Body):
    """A call in an assistant's message. A streamed one has its `index` in the message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = Field(default=None, exclude=True)


def _parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Message(Body):
    """A turn in the conversation.

    An assistant's turn may have all fields from a response's message, so you can append the message
    unchanged. Fields outside this server's responses must be empty. `parsed` is from OpenAI's SDK
    and `provider_specific_fields` from litellm.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Annotated[
            list[TextPart], BeforeValidator(_parts, json_schema_input_type=str | list[TextPart])
        ]
        | None
    ) = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = Field(default=None, max_length=0)
    audio: None = None
    function_call: None = None
    parsed: Any = Field(default=None, exclude=True)
    provider_specific_fields: Any = Field(default=None, exclude=True)

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"properties": {"role": {"const": "assistant"}}},
                {"properties": {"content": {"not": {"type": "null"}}}, "required": ["content"]},
            ]
        }
    )


def _have_content(messages: list[Message]) -> list[Message]:
    for i, message in enumerate(messages):
        if message.content is None and message.role != "assistant":
            param = f"messages[{i}].content"
            if "content" in message.model_fields_set:
                raise RequestError(f"{param} is null; it must be a text or parts", param=param)
            raise RequestError(f"{param} is missing", param=param, code="missing_parameter")
    return messages


Messages = Annotated[list[Message], Field(min_length=1), AfterValidator(_have_content)]
