"""One answer on its way from the engine to its reader."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import chain

import msgspec

from weft.errors import WeftError
from weft.serving.engine.detokenizer import Detokenizer
from weft.serving.engine.protocol import FinishReason, TokenLogprob, TokenOutput
from weft.serving.engine.sampling_params import SamplingParams
from weft.serving.engine.timeline import Timeline
from weft.serving.engine.tokenizer import Tokenizer


class Delta(msgspec.Struct, frozen=True):
    """What is new of an answer.

    Attributes:
        text: may be empty: a token can be a part of a character, or of a possible stop string.
        token_ids: at least one, but for the last delta.
        finish_reason: of the last delta; None before.
        stop_reason: the stop string or user's stop token that ended it; None for the model's own.
        logprobs: one per token, when asked for.
        prompt_logprobs: on the first delta, when asked for.
        cached_tokens: prompt tokens that came from the prefix cache.
        error: what went wrong, when finish_reason is "error".
        error_param: the request's field that is at fault; None when the server is.
        queued: on the first delta with tokens, seconds that the request waited until it ran.
        embedding: of a request for one, on its only delta: float32[hidden], see Pooling.finish.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    cached_tokens: int = 0
    error: str | None = None
    error_param: str | None = None
    queued: float | None = None
    embedding: bytes | None = None


def joined(deltas: Sequence[Delta]) -> Delta:
    """Join all deltas of an answer to one."""
    last = deltas[-1]
    return msgspec.structs.replace(
        last,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=_concatenated([delta.logprobs for delta in deltas]),
        prompt_logprobs=_concatenated([delta.prompt_logprobs for delta in deltas]),
        cached_tokens=max(delta.cached_tokens for delta in deltas),
    )


def _concatenated(
    parts: Iterable[tuple[TokenLogprob, ...] | None],
) -> tuple[TokenLogprob, ...] | None:
    found = [part for part in parts if part is not None]
    return tuple(chain.from_iterable(found)) if found else None


class StreamObserver:
    """Callbacks of `AsyncEngine.generate`, for one request; these do nothing."""

    def on_delta(self, delta: Delta) -> None:
        """Take a delta, before the reader gets it."""

    def on_error(self) -> None:
        """Note that the request was refused or failed with a WeftError; `on_end` follows."""

    def on_end(self) -> None:
        """Note that nothing more comes, for whatever reason."""


class RequestStream:
    """Turns tokens into text, and keeps what has not been read, merged into one delta.

    However slow the reader, no more is kept than the answer itself.

    Args:
        tokenizer: of the model.
        params: of the request.
        timeline: of the request.
        visible: special tokens whose text is wanted.
        grammar: key and size in bytes of the request's grammar, if it has one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        timeline: Timeline,
        visible: frozenset[int] = frozenset(),
        grammar: tuple[bytes, int] | None = None,
    ) -> None:
        self.timeline = timeline
        self.grammar = grammar
        self._param = None if params.grammar is None else params.grammar.param
        self._detokenizer = Detokenizer(tokenizer, stop=params.stop, visible=visible)
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._min_tokens = params.min_tokens
        self._count = 0
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self._prompt_logprobs: list[TokenLogprob] | None = None
        self._finish_reason: FinishReason | None = None
        self._stop_reason: str | int | None = None
        self._cached_tokens = 0
        self._error: str | None = None
        self._error_param: str | None = None
        self._queued: float | None = None
        self._embedding: bytes | None = None
        self._failure: WeftError | None = None
        self._news = asyncio.Event()

    def push(self, output: TokenOutput) -> bool:
        """Take in what the core sent; returns whether the answer is complete.

        It is also complete, unknown to the core, when a stop string has been found.
        """
        self.timeline.got(len(output.token_ids))
        self._cached_tokens = output.cached_tokens
        if output.queued is not None:
            self._queued = output.queued
        self._embedding = output.embedding
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs
        text = output.token_ids if output.stop_token_id is None else output.token_ids[:-1]
        for i, token in enumerate(output.token_ids):
            self._token_ids.append(token)
            self._count += 1
            if self._logprobs is not None and output.logprobs is not None:
                self._logprobs.append(output.logprobs[i])
            if i < len(text):
                may_stop = self._count > self._min_tokens
                self._text.append(self._detokenizer.push((token,), may_stop=may_stop))
            if self._detokenizer.stopped is not None:
                break
        else:
            if output.finish_reason is not None:
                self._finish(output)
        if self._detokenizer.stopped is not None:
            self._finish_reason = "stop"
            self._stop_reason = self._detokenizer.stopped
        if self._finish_reason is not None:
            self.timeline.end()
        self._news.set()
        return self._finish_reason is not None

    def fail(self, failure: WeftError) -> None:
        """There will be no more: the reader gets what has come, and then this error."""
        self._failure = failure
        self._news.set()

    async def next(self) -> Delta:
        """Wait for something new, and take all of it.

        Raises:
            WeftError: that of `fail`, once everything before has been read.
        """
        await self._news.wait()
        self._news.clear()
        if self._failure is not None and self._finish_reason is None:
            if self._token_ids:
                self._news.set()
            else:
                raise self._failure
        delta = Delta(
            "".join(self._text),
            tuple(self._token_ids),
            self._finish_reason,
            self._stop_reason,
            None if self._logprobs is None else tuple(self._logprobs),
            None if self._prompt_logprobs is None else tuple(self._prompt_logprobs),
            self._cached_tokens,
            self._error,
            self._error_param,
            self._queued,
            self._embedding,
        )
        self._text = []
        self._token_ids = []
        self._logprobs = None if self._logprobs is None else []
        self._prompt_logprobs = self._queued = None
        return delta

    def _finish(self, output: TokenOutput) -> None:
        self._text.append(self._detokenizer.flush())
        self._finish_reason = output.finish_reason
        self._error = output.error
        self._error_param = self._param if output.faulty_grammar else None
        if output.stop_token_id in self._stop_token_ids:
            self._stop_reason = output.stop_token_id
