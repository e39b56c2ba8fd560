"""Conversation items in Responses, and their messages for the model.

The server never encrypts. `encrypted_content` is a thought's text in base64, with a digest.
Some clients send back nothing else. It hides nothing: the same text is in `content`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import (
    AliasChoices,
    BeforeValidator,
    Field,
    TypeAdapter,
    WithJsonSchema,
    model_validator,
)

from weft.errors import RequestError
from weft.serving.api.body import Body, by_type, wrong_choice
from weft.serving.api.openai.messages import FunctionCall, Message, TextPart, ToolCall
from weft.serving.api.openai.replies import new_id
from weft.serving.api.parsing.tool_grammar import INPUT

_SEALED = "weft1."
_DIGEST = 8  # bytes


def seal(thought: str) -> str:
    """Return the encrypted content for a thought."""
    text = thought.encode()
    return _SEALED + base64.urlsafe_b64encode(_digest(text) + text).decode()


def unseal(content: str, param: str) -> str:
    """Return the thought in encrypted content.

    Raises:
        RequestError: this server did not write the content.
    """
    try:
        data = base64.b64decode(content.removeprefix(_SEALED), b"-_", validate=True)
        text = data[_DIGEST:]
        if content.startswith(_SEALED) and data[:_DIGEST] == _digest(text):
            return text.decode()
    except (binascii.Error, ValueError):  # ValueError if a character is not ASCII
        pass
    raise RequestError(
        f"{param} is not from this server; send the item's content instead, or leave the item out",
        param=param,
        code="invalid_encrypted_content",
    )


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()[:_DIGEST]


class InputPart(Body):
    """A text in an item's content. Annotations and log probabilities have no effect."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = Field(None, exclude=True)
    parsed: Any = Field(None, exclude=True)
    prompt_cache_breakpoint: dict[str, Any] | None = Field(None, exclude=True)


def _as_parts(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


Parts = Annotated[
    list[InputPart], BeforeValidator(_as_parts, json_schema_input_type=str | list[InputPart])
]

_REQUIRED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
    "reasoning": (),
    "item_reference": ("id",),
}
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
_OWN = re.compile("[a-z]+_[0-9a-f]{32}")  # see new_id
IGNORED = (
    *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
    *("computer_call", "computer_call_output", "tool_search_call", "tool_search_output"),
    *("local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output"),
    *("apply_patch_call", "apply_patch_call_output", "mcp_list_tools", "mcp_call"),
    *("mcp_approval_request", "mcp_approval_response"),
)
"""Items of tools that this server leaves out."""


class Direct(Body):
    """A call's caller: the model."""

    type: Literal["direct"]


class InputItem(Body):
    """A message (with a role), a call, a call's output, a thought, or a reference, by `type`.

    Items from unsupported tools keep only their type.
    """

    type: Annotated[
        Literal[
            "message",
            "function_call",
            "function_call_output",
            "custom_tool_call",
            "custom_tool_call_output",
            "reasoning",
            "item_reference",
            "ignored",
        ],
        WithJsonSchema({"enum": [*_REQUIRED, None]}),
    ] = "message"
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Parts | None = None
    phase: Literal["commentary", "final_answer"] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: Parts | None = None
    summary: Parts | None = None
    encrypted_content: str | None = None
    caller: Direct | None = None
    async_: Literal[False] | None = Field(
        None, validation_alias=AliasChoices("async", "async_"), exclude=True
    )
    # Clients' notes, without an effect.
    created_by: str | None = Field(None, exclude=True)
    internal_chat_message_metadata_passthrough: Any = Field(None, exclude=True)
    metadata: Any = Field(None, exclude=True)
    parsed_arguments: Any = Field(None, exclude=True)

    model_config = by_type(_REQUIRED, default="message")

    @model_validator(mode="before")
    @classmethod
    def _of_another_kind(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kind = value.get("type")
        if isinstance(kind, str) and kind in IGNORED:
            return {"type": "ignored"}
        if kind is not None and not (isinstance(kind, str) and kind in _REQUIRED):
            raise wrong_choice("type", value, _REQUIRED)
        if kind is None and value.get("role") is None and value.get("id") is not None:
            return {**value, "type": "item_reference"}
        return {name: each for name, each in value.items() if name != "type" or each is not None}

    @model_validator(mode="after")
    def _has_what_its_type_says(self) -> Self:
        for name in _REQUIRED.get(self.type, ()):
            if getattr(self, name) is None:
                raise RequestError(
                    f"input has an item of type {self.type} without {name}",
                    param=f"input.{name}",
                    code="missing_parameter",
                )
        return self

    @property
    def thought(self) -> str:
        """The thought's text; RequestError if another server sealed it."""
        parts = self.content or ()
        if not parts and self.encrypted_content is not None:
            return unseal(self.encrypted_content, "input.encrypted_content")
        return "\n".join(part.text for part in parts or self.summary or ())


_ITEM = TypeAdapter(InputItem)


def encoded(items: Iterable[InputItem]) -> bytes:
    """Return the items as a JSON list. Other threads run between two items."""
    each = (_ITEM.dump_json(item, by_alias=True, exclude_none=True) for item in items)
    return b"[" + b",".join(each) + b"]"


def named(items: Iterable[InputItem]) -> list[InputItem]:
    """Return the items with an effect, each with an id."""
    kept = [item for item in items if item.type != "ignored"]
    for item in kept:
        item.id = item.id or new_id(_PREFIXES[item.type], "_")
    return kept


def references(items: Iterable[InputItem]) -> tuple[str, ...]:
    """Return the ids by which clients may refer to these items later.

    An id in another form is a client's own. Two clients may use the same one, and without API keys
    one would get the other's item.
    """
    return tuple(item.id for item in items if item.id is not None and _OWN.fullmatch(item.id))


class Names(Protocol):
    """Tool names as the model sees them."""

    def shown(self, namespace: str | None, name: str) -> str:
        """Return a tool's name for the model."""


def messages_of(items: Sequence[InputItem], names: Names) -> list[Message]:
    """Convert items to messages; an assistant's thought, text and calls become one message."""
    messages: list[Message] = []
    for item in items:
        _append(messages, item, names)
    return messages


def _append(messages: list[Message], item: InputItem, names: Names) -> None:
    parts = [text_part(part.text) for part in item.content or ()]
    if item.type == "message" and item.role is not None and item.role != "assistant":
        messages.append(Message(role=item.role, content=parts))
        return
    if item.type in ("function_call_output", "custom_tool_call_output"):
        output = [text_part(part.text) for part in item.output or ()]
        messages.append(Message(role="tool", tool_call_id=item.call_id, content=output))
        return
    if not messages or messages[-1].role != "assistant":
        messages.append(Message(role="assistant"))
    turn = messages[-1]
    if item.type == "reasoning":
        turn.reasoning_content = "\n".join(filter(None, (turn.reasoning_content, item.thought)))
    elif item.type == "message":
        turn.content = turn.content or []
        turn.content += parts
    else:
        arguments = item.arguments
        if item.type == "custom_tool_call":
            arguments = json.dumps({INPUT: item.input}, ensure_ascii=False)
        name = names.shown(item.namespace, item.name or "")
        function = FunctionCall(name=name, arguments=arguments or "")
        turn.tool_calls = turn.tool_calls or []
        turn.tool_calls.append(ToolCall(id=item.call_id or "", function=function))


def text_part(text: str) -> TextPart:
    """Return a message part."""
    return TextPart(type="text", text=text)
