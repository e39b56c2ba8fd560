"""The stream of one answer, from the engine to its reader."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TypeVar

import msgspec

from weft.errors import WeftError
from weft.serving.engine.detokenizer import Detokenizer
from weft.serving.engine.protocol import FinishReason, TokenLogprob, TokenOutput
from weft.serving.engine.sampling_params import SamplingParams
from weft.serving.engine.timeline import Timeline
from weft.serving.engine.tokenizer import Tokenizer

T = TypeVar("T")


class Delta(msgspec.Struct, frozen=True):
    """The new part of an answer.

    Attributes:
        text: may be empty, because a token can be part of a character or of a possible stop string.
        token_ids: at least one, except on the last delta.
        finish_reason: set on the last delta; None before.
        stop_reason: the stop string or the user's stop token that ended the answer; None for the
            model's own end token.
        logprobs: one per token, when asked for.
        token_texts: the text of each token, when log probabilities are asked for; on the last
            delta, the rest of the text may follow.
        prompt_logprobs: on the first delta, when asked for.
        cached_tokens: number of prompt tokens from the prefix cache.
        error: the reason, when finish_reason is "error".
        error_param: the request's field at fault; None when the server is at fault.
        queued: on the first delta with tokens, the seconds from arrival to the first step.
        embedding: float32[hidden] on the only delta, when asked for; see Pooling.finish.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    token_texts: tuple[str, ...] | None = None
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
        token_texts=_concatenated([delta.token_texts for delta in deltas]),
        prompt_logprobs=_concatenated([delta.prompt_logprobs for delta in deltas]),
        cached_tokens=max(delta.cached_tokens for delta in deltas),
    )


def _concatenated(parts: Iterable[tuple[T, ...] | None]) -> tuple[T, ...] | None:
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
    """Turns tokens into text, and merges the unread part of an answer into one delta.

    A slow reader therefore never makes it hold more than the answer itself.

    Args:
        tokenizer: the model's tokenizer.
        params: the request's sampling settings.
        timeline: records when the request waited and ran.
        visible: special tokens whose text the reader needs.
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
        self._param = _constraint(params)
        self._detokenizer = Detokenizer(
            tokenizer,
            stop=params.stop,
            keep_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            visible=visible,
        )
        self._keep_stop = params.include_stop_str_in_output
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
        """Take new output from the core; returns whether the answer is complete.

        A stop string also completes the answer; the core does not know about it.
        """
        self.timeline.got(len(output.token_ids))
        self._cached_tokens = output.cached_tokens
        if output.queued is not None:
            self._queued = output.queued
        self._embedding = output.embedding
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs
        ended = output.stop_token_id is not None and not self._keep_stop
        text = output.token_ids[:-1] if ended else output.token_ids
        for i, token in enumerate(output.token_ids):
            self._token_ids.append(token)
            self._count += 1
            if self._logprobs is not None and output.logprobs is not None:
                self._logprobs.append(output.logprobs[i])
            may_stop = self._count > self._min_tokens
            new = (token,) if i < len(text) else ()
            self._text.append(self._detokenizer.push(new, may_stop=may_stop))
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
        """End the stream with an error; the reader first gets the rest of the output."""
        self._failure = failure
        self._news.set()

    async def next(self) -> Delta:
        """Wait for new output, and take all of it.

        Raises:
            WeftError: the error of `fail`, after all output before it has been read.
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
            None if self._logprobs is None else tuple(self._text),
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


def _constraint(params: SamplingParams) -> str | None:
    """Return the field that restricts the output's tokens, for errors."""
    if params.grammar is not None:
        return params.grammar.param
    return "bad_words" if params.allowed_token_ids is None else "allowed_token_ids"
