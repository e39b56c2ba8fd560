"""Replies in OpenAI's shapes, whole and streamed.

They are msgspec structs, because a stream encodes one for every token. UNSET fields are omitted;
None becomes null.
"""

from __future__ import annotations

import time
import uuid
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from weft.serving.engine.protocol import EngineStats
from weft.serving.engine.timeline import Timeline

FinishReason = Literal["stop", "length", "tool_calls"]


def new_id(prefix: str, separator: str = "-") -> str:
    """Make a request's id, such as "cmpl-2f1c..."."""
    return f"{prefix}{separator}{uuid.uuid4().hex}"


def now() -> int:
    """Return the seconds since 1970."""
    return int(time.time())


class PromptTokensDetails(Struct):
    """Details about the prompt; `cached_tokens` came from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(Struct):
    """Details about the output; `reasoning_tokens` are the thought before the answer."""

    reasoning_tokens: int


class CompletionUsage(Struct):
    """Token counts: each prompt once, and all answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class EmbeddingUsage(Struct):
    """Token counts over all inputs."""

    prompt_tokens: int
    total_tokens: int


class Embedding(Struct):
    """An input's vector: a list, or little-endian float32 in base64."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingList(Struct):
    """The embeddings for a request, in the order of its inputs."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class CompletionLogprobs(Struct):
    """Log probabilities for a text's tokens, in parallel lists.

    A token that is a part of a character is written `bytes:\\xe2\\x82`. The first token of an
    echoed prompt has no log probability; it is null.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Struct):
    """A prompt token's log probability and rank (1 is the most likely), in vLLM's form."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each prompt token, the log probabilities by token id; null for the first token."""


class CompletionChoice(Struct):
    """One text; in a stream, `finish_reason` is null until the last event."""

    index: int
    text: str
    finish_reason: FinishReason | None
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(Struct):
    """The reply to /v1/completions; a stream's events have the same shape."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: CompletionUsage | UnsetType | None = UNSET


class TopLogprob(Struct):
    """A token, its log probability, and its UTF-8 bytes; a token may be part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    """An output token, and the most likely tokens in its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Log probabilities, one entry for each output token."""

    content: list[ChatTokenLogprob] | None
    refusal: None = None


class CalledFunction(Struct):
    """A function's name and arguments: JSON, if the model made no mistake."""

    name: str
    arguments: str


class MessageToolCall(Struct):
    """A function call; the client runs it, and sends the result in a message with role "tool"."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(Struct):
    """The assistant's turn. Its content is null if it has only calls.

    The model's thought is in two fields, because clients know either name.
    """

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[MessageToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChoice(Struct):
    """One answer."""

    index: int
    message: ChatMessage
    finish_reason: FinishReason | None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct):
    """The reply to /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class FunctionDelta(Struct):
    """A call's name, or more arguments."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    """The start of a call, with its id and name, or more arguments."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Struct):
    """An event's addition to the message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    refusal: UnsetType | None = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """An event's addition to one answer."""

    index: int
    delta: ChatDelta
    finish_reason: FinishReason | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Struct):
    """An event in a streamed chat. With `include_usage` the last event has no choices."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: CompletionUsage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class SamplingDefault(Struct):
    """A default, and where it comes from: generation_config.json, a file's path, or "default"."""

    value: float | None
    source: str


class Model(Struct):
    """A model; `max_model_len` is the maximum token count in prompt and answer.

    `sampling_defaults` are the values for missing fields in a request. Each has its source.
    Both are null while the model loads.
    """

    id: str
    created: int
    max_model_len: int | None
    sampling_defaults: dict[str, SamplingDefault] | None = None
    object: Literal["model"] = "model"
    owned_by: str = "weft"


class ModelList(Struct):
    """The server's models: always one."""

    data: list[Model]
    object: Literal["list"] = "list"


class Tokens(Struct):
    """A text's token ids; `token_strs` are their names in the vocabulary, when asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizedText(Struct):
    """The text for token ids, including special tokens."""

    prompt: str


class TokenizerInfo(Struct):
    """The tokenizer's properties that clients need to render chats and to count tokens."""

    tokenizer_class: str
    vocab_size: int
    max_model_len: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    eos_token_ids: list[int]
    chat_template: str | None


class EngineView(Struct):
    """The engine's current work.

    Attributes:
        now: the current time, in seconds on the same clock as the requests' times.
        status: the status in /ready.
        places: maximum number of requests that run at once.
        stats: sums over the engine cores; counters start with the server.
        requests: up to 128 live requests, and the last that have ended. Each phase has its start
            time, and lasts until the next phase, or until the request `ended`.
    """

    now: float
    status: str
    places: int
    stats: EngineStats
    requests: list[Timeline]


class Status(Struct):
    """The server's status."""

    status: str


class Health(Struct):
    """The health of the API process and its engine.

    Attributes:
        engine: the status in /ready.
        progressing: whether the engine makes steps, if it has work.
        seconds_without_step: seconds since the last step, if the engine has work.
    """

    status: Literal["ok"]
    engine: str
    progressing: bool
    seconds_without_step: float


class Version(Struct):
    """weft's version."""

    version: str
