"""Requests in OpenAI's shapes, with OpenAI's names.

An unknown field is refused by its name, and so is a value for a missing feature. Nothing is ignored
silently except labels of a request, such as `user` and `metadata`. Types are checked here.
sampling_params.py checks the ranges of sampling settings, for all APIs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)

from weft.errors import RequestError, shown
from weft.serving.api.body import Body, only_with
from weft.serving.api.openai.messages import Messages
from weft.serving.api.openai.tools import NamedTool, Tool, ToolChoice, mode_or
from weft.serving.api.output_format import GuidedRequest
from weft.serving.api.prompts import PromptOptions
from weft.serving.engine.chat_templates import Effort, Level, Thinking, Verbosity
from weft.serving.engine.sampling_params import (
    MAX_ALLOWED,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    SamplingParams,
)

MAX_PROMPTS = 256


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


_StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
StopTexts = Annotated[list[_StopText], Field(max_length=MAX_STOP_STRINGS)]
BadWords = Annotated[list[_StopText], Field(max_length=MAX_BAD_WORDS)]
Stop = Annotated[list[str], BeforeValidator(_listed, json_schema_input_type=_StopText | StopTexts)]
LogitBias = Annotated[
    dict[str, float],
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_LOGIT_BIAS,
        }
    ),
]


AllowedTokens = Annotated[
    list[int],
    WithJsonSchema(
        {
            "type": "array",
            "items": {"type": "integer", "minimum": 0},
            "minItems": 1,
            "maxItems": MAX_ALLOWED,
        }
    ),
]
Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)]


def _kept_tokens(value: int) -> int:
    if value < 1 and value != -1:
        raise ValueError(f" is {value}; it must be at least 1, or -1")
    return value


KeptTokens = Annotated[
    int,
    AfterValidator(_kept_tokens),
    WithJsonSchema({"type": "integer", "anyOf": [{"minimum": 1}, {"const": -1}]}),
]


def _text_or_number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float | None):
        raise ValueError(f" is {shown(value)}; it must be a text or a number")
    return value


KeepAlive = Annotated[str | float, BeforeValidator(_text_or_number)]


class StreamOptions(Body):
    """Options for a stream.

    `include_usage` adds a last event with all token counts. With `continuous_usage_stats` too, each
    event has the counts so far.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


_TRUE: dict[str, Any] = {"const": True}
_STREAM_OPTIONS = only_with(
    "stream_options", {"properties": {"stream": _TRUE}, "required": ["stream"]}
)
_PROMPT_LOGPROBS = only_with("prompt_logprobs", {"properties": {"stream": {"enum": [False, None]}}})


class GenerationRequest(GuidedRequest):
    """The common fields of completions and chats.

    docs/api.md lists all fields. Fields beyond OpenAI's are from vLLM, except Ollama's
    `keep_alive`.
    """

    model: str | None = None
    add_special_tokens: bool | None = None
    allowed_token_ids: AllowedTokens | None = None
    bad_words: BadWords | None = None
    best_of: int | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    echo: bool | None = None
    frequency_penalty: float | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: LogitBias | None = None
    max_tokens: int | None = None
    metadata: dict[str, str] | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    n: int | None = None
    presence_penalty: float | None = None
    priority: Priority | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float | None = None
    return_token_ids: bool | None = None
    seed: int | None = None
    skip_special_tokens: bool | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKENS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    truncate_prompt_tokens: KeptTokens | None = None
    user: str | None = None
    # Only the value without an effect.
    early_stopping: Literal[False] | None = None
    keep_alive: KeepAlive | None = None
    length_penalty: Literal[1] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    use_beam_search: Literal[False] | None = None
    # Unsupported; null is the same as absent.
    guided_decoding_backend: None = None
    guided_whitespace_pattern: None = None
    kv_transfer_params: None = None
    logits_processors: None = None
    request_id: None = None
    return_tokens_as_token_ids: None = None
    thinking_token_budget: None = None
    vllm_xargs: None = None

    model_config = ConfigDict(json_schema_extra={"allOf": [_STREAM_OPTIONS, _PROMPT_LOGPROBS]})

    @model_validator(mode="after")
    def _stream_agrees(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only for stream: true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError(
                "prompt_logprobs and stream: true do not go together", param="prompt_logprobs"
            )
        return self

    @model_validator(mode="after")
    def _best_of_is_n(self) -> Self:
        if self.best_of not in (None, 1, self.n or 1):
            raise RequestError(
                f"best_of is {self.best_of}; this server accepts it only when 1 or equal to n",
                param="best_of",
                code="unsupported_value",
            )
        return self

    @property
    def include_usage(self) -> bool:
        """True if a last event has the token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """True if each event has the token counts so far."""
        options = self.stream_options
        return self.include_usage and options is not None and bool(options.continuous_usage_stats)

    @property
    def prompt_options(self) -> PromptOptions:
        """Options for the request's prompts."""
        return PromptOptions(
            self.add_special_tokens, self.truncate_prompt_tokens, self.cache_salt or ""
        )

    def sampling_params(
        self, names: Mapping[str, str] | None = None, **more: Any
    ) -> SamplingParams:
        """Return the sampling settings, with `more`; see `sampling_params`."""
        bias = None if self.logit_bias is None else _token_biases(self.logit_bias)
        return sampling_params(
            self, names, **({"logit_bias": bias, "grammar": self.grammar} | more)
        )


def sampling_params(
    body: Body, names: Mapping[str, str] | None = None, **more: Any
) -> SamplingParams:
    """Build the sampling settings of a request from the fields that it shares with SamplingParams.

    Args:
        body: the request.
        names: settings whose fields have other names, with these names, for errors.
        more: settings whose fields have other names or types. None leaves one at its default.

    Raises:
        RequestError: a value is out of range.
    """
    shared = SamplingParams.__struct_fields__
    given = {name: getattr(body, name) for name in shared if name in type(body).model_fields}
    settings: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in (given | more).items()
        if value is not None
    }
    try:
        return SamplingParams(**settings)
    except RequestError as error:
        if (field := (names or {}).get(error.param or "")) is None:
            raise
        message = error.message.replace(str(error.param), field, 1)
        raise RequestError(message, param=field, code=error.code) from None


def _token_biases(biases: dict[str, float]) -> dict[int, float]:
    by_id = {}
    for token, bias in biases.items():
        if not (token.isascii() and token.isdigit()) or len(token) > 10:
            raise RequestError(
                f"logit_bias has the key {token[:40]!r}; keys are token ids", param="logit_bias"
            )
        by_id[int(token)] = bias
    return by_id


# Forms of a prompt in the OpenAPI document.
_Text = Annotated[str, Field(min_length=1)]
_TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


def prompts_up_to(most: int) -> BeforeValidator:
    """Return a validator that makes a list of one prompt or several, as texts or token ids."""

    def listed(value: Any) -> list[str] | list[list[int]]:
        if isinstance(value, str) or _is_token_ids(value):
            value = [value]
        if value in ([], [""]):
            raise ValueError(" is empty")
        if not isinstance(value, list):
            raise ValueError(" must be a text, a list of token ids, or a list of either")
        if len(value) > most:
            raise ValueError(f" has {len(value)} prompts; at most {most}")
        for i, item in enumerate(value):
            if item in ("", []):
                raise ValueError(f"[{i}] is empty")
            if not (isinstance(item, str) or _is_token_ids(item)):
                raise ValueError(f"[{i}] must be a text or a list of token ids")
            if type(item) is not type(value[0]):
                raise ValueError(
                    f"[{i}] has another type than [0]; texts and token ids cannot be mixed"
                )
        return value

    some = Field(min_length=1, max_length=most)
    documented = _Text | Annotated[list[_Text], some] | _TokenIds | Annotated[list[_TokenIds], some]
    return BeforeValidator(listed, json_schema_input_type=documented)


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


class CompletionRequest(GenerationRequest):
    """POST /v1/completions: continue a text without a chat template."""

    prompt: Annotated[list[str] | list[list[int]], prompts_up_to(MAX_PROMPTS)]
    logprobs: int | None = None
    max_tokens: int | None = Field(None, ge=0)
    suffix: Literal[""] | None = None
    prompt_embeds: None = None


class TemplateRequest(Body):
    """The fields for the chat template."""

    add_generation_prompt: bool | None = None
    chat_template: None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Effort | None = None
    verbosity: Level | None = None

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt are two ends of the prompt; set "
                "one of them",
                param="continue_final_message",
            )
        return self

    @property
    def to_answer(self) -> bool:
        """True if the prompt ends where the assistant's turn begins."""
        return self.add_generation_prompt is not False

    @property
    def thinking(self) -> Thinking:
        """The requested thinking."""
        return Thinking.of_effort(self.reasoning_effort)

    @property
    def asked_verbosity(self) -> Verbosity:
        """The requested length of the answer."""
        return Verbosity(self.verbosity)


class ChatRequest(TemplateRequest, GenerationRequest):
    """POST /v1/chat/completions: the chat template turns the messages into one prompt."""

    messages: Messages
    include_reasoning: bool | None = None
    logprobs: bool | None = None
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    modalities: list[Literal["text"]] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    tool_choice: Annotated[ToolChoice | None, mode_or(NamedTool)] = None
    tools: list[Tool] | None = None
    top_logprobs: int | None = None
    # Unsupported; null is the same as absent.
    audio: None = None
    documents: None = None
    function_call: None = None
    functions: None = None
    media_io_kwargs: None = None
    mm_processor_kwargs: None = None
    moderation: None = None
    prediction: None = None
    web_search_options: None = None

    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                _STREAM_OPTIONS,
                _PROMPT_LOGPROBS,
                only_with(
                    "top_logprobs",
                    {
                        "anyOf": [
                            {"properties": {"logprobs": _TRUE}, "required": ["logprobs"]},
                            {"properties": {"top_logprobs": {"const": 0}}},
                        ]
                    },
                ),
                only_with(
                    "max_completion_tokens", {"properties": {"max_tokens": {"type": "null"}}}
                ),
            ]
        }
    )

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs is only for logprobs: true", param="top_logprobs")
        if self.max_completion_tokens is not None and self.max_tokens is not None:
            raise RequestError(
                "max_tokens and max_completion_tokens are one setting; give one of them",
                param="max_tokens",
            )
        return self
