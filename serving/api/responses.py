"""What clients get: the answers in OpenAI's shapes, streamed and whole.

msgspec structs, because one of them is encoded for every token of every
stream. UNSET fields are left out; None is written as null.
"""

from __future__ import annotations

import time
import uuid
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from weft.serving.messages import EngineStats
from weft.serving.timeline import Timeline

FinishReason = Literal["stop", "length"]


def new_id(prefix: str) -> str:
    """A request's id, as "cmpl-2f1c..."."""
    return f"{prefix}-{uuid.uuid4().hex}"


def now() -> int:
    """Seconds since 1970."""
    return int(time.time())


class PromptTokensDetails(Struct):
    """`cached_tokens` came from the prefix cache."""

    cached_tokens: int


class CompletionUsage(Struct):
    """Token counts of a request: the prompt's, once however many answers, and all answers'."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


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


class ChatMessage(Struct):
    """The assistant's turn."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


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


class ChatDelta(Struct):
    """What an event adds to the message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET


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
