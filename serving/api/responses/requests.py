"""Requests for OpenAI's Responses; events.py has the replies.

As in openai/requests.py, an unknown field is refused by its name.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from weft.errors import RequestError
from weft.serving.api.body import Body, by_type
from weft.serving.api.openai.requests import Priority, Stop, sampling_params
from weft.serving.api.openai.tools import ToolMode, mode_or
from weft.serving.api.responses.items import InputItem
from weft.serving.api.responses.tools import NamedTool, Tools
from weft.serving.engine.chat_templates import Effort, Level, Thinking, Verbosity
from weft.serving.engine.sampling_params import MAX_LOGPROBS, Grammar, SamplingParams


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


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
    verbosity: Level | None = None


_Summary = Literal["auto", "concise", "detailed"]


class ReasoningOptions(Body):
    """Options for reasoning. No summary is written, because `content` has the whole thought."""

    effort: Effort | None = None
    summary: _Summary | None = None
    generate_summary: _Summary | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class ResponsesStreamOptions(Body):
    """Options for a stream; none can be set."""

    include_obfuscation: Literal[False] | None = None


SEALED_THOUGHTS = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
Included = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
_Items = Annotated[list[InputItem], Field(min_length=1)]


class InputTokensRequest(Body):
    """POST /v1/responses/input_tokens: the fields with an effect on the prompt."""

    model: str | None = None
    input: Annotated[
        list[InputItem],
        BeforeValidator(_as_items, json_schema_input_type=str | _Items),
    ] = Field(min_length=1)
    conversation: None = None
    instructions: str | None = None
    parallel_tool_calls: bool | None = None
    personality: None = None
    previous_response_id: str | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    tool_choice: Annotated[ToolMode | NamedTool | None, mode_or(NamedTool)] = None
    tools: Tools | None = None
    truncation: Literal["auto", "disabled"] | None = None

    @property
    def text_format(self) -> TextFormat | None:
        """The answer's form, if the request has one."""
        return None if self.text is None else self.text.format

    @property
    def thinking(self) -> Thinking:
        """The requested thinking."""
        effort = None if self.reasoning is None else self.reasoning.effort
        return Thinking.of_effort(effort, "reasoning.effort")

    @property
    def verbosity(self) -> Verbosity:
        """The requested length of the answer."""
        return Verbosity(None if self.text is None else self.text.verbosity, "text.verbosity")


class ResponsesRequest(InputTokensRequest):
    """POST /v1/responses.

    OpenAI does not have `ignore_eos`, `seed`, `stop`, `top_k`, `min_p` and `priority`.
    """

    ignore_eos: bool | None = None
    include: list[Included] | None = None
    max_output_tokens: int | None = None
    min_p: float | None = None
    priority: Priority | None = None
    seed: int | None = None
    stop: Stop | None = None
    store: bool | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    top_p: float | None = None
    # Labels and hints, and values without an effect.
    background: Literal[False] | None = None
    client_metadata: dict[str, Any] | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    stream_options: ResponsesStreamOptions | None = None
    user: str | None = None
    # Unsupported; null is the same as absent.
    access_programs: None = None
    background_options: None = None
    context_management: None = None
    image: None = None
    moderation: None = None
    prompt: None = None

    @property
    def seals_thoughts(self) -> bool:
        """True if thoughts carry `encrypted_content`."""
        return SEALED_THOUGHTS in (self.include or ())

    @property
    def scored(self) -> bool:
        """True if texts carry their tokens' log probabilities."""
        return LOGPROBS in (self.include or ())

    def sampling_params(self) -> SamplingParams:
        """Return the sampling settings; RequestError if a value is out of range."""
        form = self.text_format
        grammar = None if form is None else form.grammar
        names = {"max_tokens": "max_output_tokens"}
        return sampling_params(
            self,
            names,
            max_tokens=self.max_output_tokens,
            grammar=grammar,
            logprobs=(self.top_logprobs or 0) if self.scored else None,
        )
