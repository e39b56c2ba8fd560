"""Requests for OpenAI's Responses; events.py has the replies.

As in openai/requests.py, an unknown field is refused by its name. The server stores nothing between
requests. It refuses references to earlier responses, so send the whole conversation.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from weft.errors import RequestError
from weft.serving.api.body import Body, by_type
from weft.serving.api.openai.requests import (
    Function,
    FunctionName,
    Stop,
    ToolMode,
    mode_or,
    sampling_params,
)
from weft.serving.engine.sampling_params import Grammar, SamplingParams


class InputPart(Body):
    """A text in an item's content."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text"]
    text: str
    annotations: list[Any] | None = Field(None, max_length=0)
    logprobs: list[Any] | None = None


def _as_parts(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


Parts = Annotated[
    list[InputPart], BeforeValidator(_as_parts, json_schema_input_type=str | list[InputPart])
]


_REQUIRED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


class InputItem(Body):
    """A message (with a role), a call, a call's output, or a thought, depending on `type`."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Parts | None = None
    phase: None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Parts | None = None
    summary: Parts | None = None
    encrypted_content: None = None

    model_config = by_type(_REQUIRED, default="message")

    @model_validator(mode="after")
    def _has_what_its_type_says(self) -> Self:
        for name in _REQUIRED[self.type]:
            if getattr(self, name) is None:
                raise RequestError(
                    f"input has an item of type {self.type} without {name}",
                    param=f"input.{name}",
                    code="missing_parameter",
                )
        return self


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class OwnTool(Body):
    """A tool that the client runs. This check comes first and refuses OpenAI's hosted tools."""

    type: Literal["function"]


class ResponsesTool(Function, OwnTool):
    """A function for the model."""


class NamedFunction(FunctionName, OwnTool):
    """The tool that the model must call."""


class TextFormat(Body):
    """The form of the answer: text, any JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, pattern="^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    model_config = by_type(
        {"json_schema": ("schema", "name"), "text": (), "json_object": ()},
        dict.fromkeys(("text", "json_object"), ("schema", "name")),
    )

    @model_validator(mode="after")
    def _a_schema_has_a_name(self) -> Self:
        for name, value in (("schema", self.schema_), ("name", self.name)):
            if (self.type == "json_schema") != (value is not None):
                raise RequestError(
                    f"text.format.{name} is only for type 'json_schema', which requires it",
                    param=f"text.format.{name}",
                )
        return self

    @property
    def grammar(self) -> Grammar | None:
        """The constraint on the answer, if there is one."""
        if self.type == "text":
            return None
        if self.schema_ is None:
            return Grammar("json_object", param="text.format")
        return Grammar("json_schema", json.dumps(self.schema_), "text.format.schema")


class TextOptions(Body):
    """Options for the answer's text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Body):
    """Options for reasoning; none can be set."""

    effort: None = None
    summary: None = None


class ResponsesStreamOptions(Body):
    """Options for a stream; none can be set."""

    include_obfuscation: Literal[False] | None = None


_Items = Annotated[list[InputItem], Field(min_length=1)]


class ResponsesRequest(Body):
    """POST /v1/responses. OpenAI does not have `seed`, `stop`, `top_k`, `min_p` and `priority`."""

    model: str
    input: Annotated[
        list[InputItem],
        BeforeValidator(_as_items, json_schema_input_type=str | _Items),
    ] = Field(min_length=1)
    background: Literal[False] | None = None
    include: list[Any] | None = Field(None, max_length=0)
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    min_p: float | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    prompt_cache_key: str | None = None
    reasoning: ReasoningOptions | None = None
    safety_identifier: str | None = None
    seed: int | None = None
    service_tier: Literal["auto", "default"] | None = None
    stop: Stop | None = None
    store: Literal[False] | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    temperature: float | None = None
    text: TextOptions | None = None
    tool_choice: Annotated[ToolMode | NamedFunction | None, mode_or(NamedFunction)] = None
    tools: list[ResponsesTool] | None = None
    top_k: int | None = None
    top_logprobs: Literal[0] | None = None
    top_p: float | None = None
    truncation: Literal["disabled"] | None = None
    user: str | None = None

    @property
    def text_format(self) -> TextFormat | None:
        """The form of the answer, if the request has one."""
        return None if self.text is None else self.text.format

    def sampling_params(self) -> SamplingParams:
        """Return the sampling settings; RequestError if a value is out of range."""
        form = self.text_format
        grammar = None if form is None else form.grammar
        names = {"max_tokens": "max_output_tokens"}
        return sampling_params(self, names, max_tokens=self.max_output_tokens, grammar=grammar)
