"""POST /v1/completions: the continuation of texts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec.structs import replace

from weft.serving.api.admin.documentation import returns
from weft.serving.api.body import JsonRoute
from weft.serving.api.generation import Generation
from weft.serving.api.logprobs import TextLogprobs, check_scores, joined, prompt_logprobs
from weft.serving.api.openai.replies import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionUsage,
    new_id,
    now,
)
from weft.serving.api.openai.requests import CompletionRequest
from weft.serving.api.parsing.pieces import Answer
from weft.serving.api.state import State
from weft.serving.api.streaming import EventStream, cancel_on_disconnect, event
from weft.serving.engine.engine import AsyncEngine
from weft.serving.engine.sampling_params import SamplingParams
from weft.serving.engine.tokenizer import Tokenizer

_DEFAULT_MAX_TOKENS = 16  # as OpenAI

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions", **returns(Completion, streams=True))
async def create_completion(request: Request, body: CompletionRequest, state: State) -> Response:
    """Continue one text or several, without a chat template."""
    engine = state.ready_engine(body.model)
    generation = await Generation.of_texts(
        state,
        engine,
        body.prompt,
        lambda: _params(body, engine),
        body.priority or 0,
        body.prompt_options,
    )
    if (top := _prompt_logprobs(body)) is not None:
        field = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        check_scores(generation.prompt_tokens, top, field)
    writer = _Writer(body, state.model, engine.tokenizer, generation)
    if body.stream:
        return await EventStream.start(request, writer.events())
    completion = await cancel_on_disconnect(request.receive, writer.whole())
    return Response(completion, media_type="application/json")


def _params(body: CompletionRequest, engine: AsyncEngine) -> SamplingParams:
    max_tokens = body.max_tokens
    if max_tokens is None and engine.generation_config.defaults.max_tokens is None:
        max_tokens = _DEFAULT_MAX_TOKENS
    if _only_echo(body):
        max_tokens = 1  # the engine's minimum; the writer omits the token
    return body.sampling_params(
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=_prompt_logprobs(body),
    )


def _prompt_logprobs(body: CompletionRequest) -> int | None:
    """Return the larger of `prompt_logprobs` and, for an echo, `logprobs`; None without both."""
    asked = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return max((count for count in asked if count is not None), default=None)


def _only_echo(body: CompletionRequest) -> bool:
    """Return whether the request asks only for its prompt and the log probabilities."""
    return bool(body.echo) and body.max_tokens == 0


class _Writer:
    """Writes the answers to one request in OpenAI's shape."""

    def __init__(
        self, body: CompletionRequest, model: str, tokenizer: Tokenizer, generation: Generation
    ) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self._generation = generation
        self._n = body.n or 1
        self._only_echo = _only_echo(body)
        self._head = Completion(id=new_id("cmpl"), created=now(), model=model, choices=[])

    async def whole(self) -> bytes:
        """Return all answers in one response, as JSON."""
        answers = await self._generation.collect()
        if self._body.logprobs is None and self._body.prompt_logprobs is None:
            return self._written(answers)
        return await asyncio.to_thread(self._written, answers)  # there may be very many

    def _written(self, answers: Sequence[Answer]) -> bytes:
        choices = [self._choice(answer, self._logprobs(), first=True) for answer in answers]
        return msgspec.json.encode(replace(self._head, choices=choices, usage=self._usage()))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the answers in parts; an echoed prompt is in its answer's first part."""
        if self._body.include_usage:
            self._head.usage = None
        count = self._generation.count
        logprobs = [self._logprobs() for _ in range(count)]
        new = set(range(count))
        async with aclosing(self._generation.stream()) as parts:
            async for part in parts:
                i = part.index
                self._head.choices = [self._choice(part, logprobs[i], first=i in new)]
                new.discard(i)
                if self._body.continuous_usage:
                    self._head.usage = self._usage()
                yield event(self._head)
        if self._body.include_usage:
            yield event(replace(self._head, choices=[], usage=self._usage()))

    def _logprobs(self) -> TextLogprobs:
        skip = self._body.skip_special_tokens is not False
        return TextLogprobs(self._tokenizer, self._body.logprobs or 0, skip_special_tokens=skip)

    def _choice(self, part: Answer, logprobs: TextLogprobs, *, first: bool) -> CompletionChoice:
        """Write an answer, or a part."""
        reason = part.finish_reason
        choice = CompletionChoice(
            part.index, "", "length" if reason and self._only_echo else reason
        )
        if self._body.logprobs is not None:
            choice.logprobs = CompletionLogprobs([], [], [], [])
        if first and self._body.echo:
            self._echo(choice, part, logprobs)
        if first and (top := self._body.prompt_logprobs) is not None:
            scores = part.prompt_logprobs or ()
            choice.prompt_logprobs = prompt_logprobs(self._tokenizer, scores, top)
        if self._body.return_token_ids:
            choice.token_ids = [] if self._only_echo else list(part.token_ids)
            if first:
                choice.prompt_token_ids = self._generation.prompt(part.index)
        if not self._only_echo:
            choice.text += part.content
            if choice.logprobs is not None:
                choice.logprobs = joined(choice.logprobs, logprobs.output(part.logprobs))
        return choice

    def _echo(self, choice: CompletionChoice, part: Answer, logprobs: TextLogprobs) -> None:
        """Begin a choice with its prompt."""
        choice.text = self._prompt_text(part.index)
        if choice.logprobs is not None:
            token_ids = self._generation.prompt(part.index)
            choice.logprobs = logprobs.prompt(choice.text, token_ids, part.prompt_logprobs or [])

    def _prompt_text(self, i: int) -> str:
        """Return the prompt of answer i as text."""
        prompt, body = self._body.prompt[i // self._n], self._body
        if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
            return prompt
        return self._tokenizer.decode(self._generation.prompt(i), skip_special_tokens=False)

    def _usage(self) -> CompletionUsage:
        usage = self._generation.usage()
        if self._only_echo:
            return replace(usage, completion_tokens=0, total_tokens=usage.prompt_tokens)
        return usage
