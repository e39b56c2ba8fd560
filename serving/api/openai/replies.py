"""What clients get: the answers in OpenAI's shapes, streamed and whole.

msgspec structs, because one of them is encoded for every token of every
stream. UNSET fields are left out; None is written as null.
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
    """A request's id, as "cmpl-2f1c..."."""
    return f"{prefix}{separator}{uuid.uuid4().hex}"


def now() -> int:
    """Seconds since 1970."""
    return int(time.time())


class PromptTokensDetails(Struct):
    """`cached_tokens` came from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(Struct):
    """`reasoning_tokens` are of what the model thought before it answered."""

    reasoning_tokens: int


class CompletionUsage(Struct):
    """Token counts of a request: the prompt's, once however many answers, and all answers'."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class EmbeddingUsage(Struct):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class Embedding(Struct):
    """Of one input: numbers, or the base64 text of their bytes as little-endian float32."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingList(Struct):
    """The embeddings of a request, in the order of its inputs."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class CompletionLogprobs(Struct):
    """Log probabilities of a text's tokens, in parallel lists.

    A token that is a part of a character is written `bytes:\\xe2\\x82`. Where nothing precedes
    a token (the first of an echoed prompt) its log probability is null.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct):
    """One text; `finish_reason` is null in a stream until its end."""

    index: int
    text: str
    finish_reason: FinishReason | None
    logprobs: CompletionLogprobs | None = None


class Completion(Struct):
    """The answer of /v1/completions; a stream's events have the same shape."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: CompletionUsage | UnsetType | None = UNSET


class TopLogprob(Struct):
    """A token, its log probability, and its UTF-8 bytes, which may be a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    """A token of the answer, and the most likely tokens at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """One entry for each token of the answer."""

    content: list[ChatTokenLogprob] | None
    refusal: None = None


class CalledFunction(Struct):
    """A function's name and its arguments, which are JSON if the model made no mistake."""

    name: str
    arguments: str


class MessageToolCall(Struct):
    """A call of a function, which the client makes, and answers with a message of role "tool"."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(Struct):
    """The assistant's turn. Without content (null) it is all calls.

    What the model thought is given under both names that clients know.
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


class ChatCompletion(Struct):
    """The answer of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    object: Literal["chat.completion"] = "chat.completion"


class FunctionDelta(Struct):
    """A call's name, or more of its arguments."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    """A call that begins (with its id and name), or more of its arguments."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Struct):
    """What an event adds to the message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    refusal: UnsetType | None = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """An event's part of one answer."""

    index: int
    delta: ChatDelta
    finish_reason: FinishReason | None = None
    logprobs: ChatLogprobs | None = None


class ChatCompletionChunk(Struct):
    """An event of a streamed chat. With `include_usage` the last one has no choices."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: CompletionUsage | UnsetType | None = UNSET


class Model(Struct):
    """A model that can be asked; `max_model_len` is the most tokens of prompt and answer."""

    id: str
    created: int
    max_model_len: int | None
    object: Literal["model"] = "model"
    owned_by: str = "weft"


class ModelList(Struct):
    """The models of this server: one."""

    data: list[Model]
    object: Literal["list"] = "list"


class Tokens(Struct):
    """A text's token ids; `token_strs` are the vocabulary's names for them, when asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizedText(Struct):
    """The text of token ids, special ones included."""

    prompt: str


class TokenizerInfo(Struct):
    """What clients must know to render chats and to count tokens."""

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
    """What the engine is doing.

    Attributes:
        now: seconds of the clock that the requests' times are of.
        status: as of /ready.
        places: most requests that run at once.
        stats: sums over the engine cores; counters are since the server's start.
        requests: live ones, at most 128, and the last that have ended. Each phase has the time
            at which it began, and lasts until the next, or until the request `ended`.
    """

    now: float
    status: str
    places: int
    stats: EngineStats
    requests: list[Timeline]


class Status(Struct):
    """How the server stands."""

    status: str


class Health(Struct):
    """That the process answers, and how its engine stands.

    Attributes:
        engine: the status that /ready has.
        progressing: whether steps get done, as far as there is work.
        seconds_without_step: with work at hand.
    """

    status: Literal["ok"]
    engine: str
    progressing: bool
    seconds_without_step: float


class Version(Struct):
    """The version of weft."""

    version: str
