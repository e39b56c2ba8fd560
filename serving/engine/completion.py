"""Requests that run to their end: completions and embeddings."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.errors import EngineError, RequestError
from weft.serving.engine.request_stream import joined

if TYPE_CHECKING:
    from weft.models.interface import Float32
    from weft.serving.engine.checks import CheckedRequest
    from weft.serving.engine.engine import AsyncEngine
    from weft.serving.engine.protocol import TokenLogprob


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished answer.

    Attributes:
        prompt_token_ids: the prompt as the model saw it.
        text: the output, without the stop string that ended it.
        token_ids: the sampled tokens, including an end token.
        finish_reason: "stop", "length", "abort" when the model was closed first, or "error".
        stop_reason: the stop string or stop token that ended the answer, if one did.
        logprobs: one per output token, when asked for.
        prompt_logprobs: one per prompt token from the second on, when asked for.
        cached_tokens: number of prompt tokens from the prefix cache.
        error: the reason, when finish_reason is "error".
    """

    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    cached_tokens: int = 0
    error: str | None = None


async def complete(engine: AsyncEngine, request: CheckedRequest) -> Completion:
    """Run one request to its end."""
    async with aclosing(engine.generate(request)) as stream:
        whole = joined([delta async for delta in stream])
    return Completion(
        prompt_token_ids=request.prompt_token_ids,
        text=whole.text,
        token_ids=list(whole.token_ids),
        finish_reason=whole.finish_reason or "error",
        stop_reason=whole.stop_reason,
        logprobs=None if whole.logprobs is None else list(whole.logprobs),
        prompt_logprobs=None if whole.prompt_logprobs is None else list(whole.prompt_logprobs),
        cached_tokens=whole.cached_tokens,
        error=whole.error,
    )


async def embed(engine: AsyncEngine, request: CheckedRequest, dimensions: int | None) -> Float32:
    """Return a prompt's embedding, float32 [dimensions].

    Raises:
        RequestError: the embedding failed.
        EngineError: the embedding was aborted.
    """
    async with aclosing(engine.generate(request)) as stream:
        (last,) = [delta async for delta in stream]
    if last.embedding is not None:
        return engine.pooling.finish(last.embedding, dimensions)
    if last.finish_reason == "abort":
        raise EngineError("the embedding was cut off: the engine is shutting down")
    raise RequestError(last.error or "the embedding failed", code="generation_failed", status=500)
