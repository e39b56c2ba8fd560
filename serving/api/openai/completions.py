"""POST /v1/completions: texts, continued."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec.structs import replace

from weft.serving.api.admin.documentation import returns
from weft.serving.api.body import JsonRoute
from weft.serving.api.connection import unless_gone
from weft.serving.api.generation import Answer, Answers, finish_reason
from weft.serving.api.logprobs import TextLogprobs, joined
from weft.serving.api.openai.replies import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionUsage,
    new_id,
    now,
)
from weft.serving.api.openai.requests import CompletionRequest
from weft.serving.api.state import State
from weft.serving.api.streaming import EventStream, event
from weft.serving.engine.sampling_params import SamplingParams
from weft.serving.engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from weft.serving.engine.engine import Delta

_DEFAULT_MAX_TOKENS = 16  # OpenAI's

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions", **returns(Completion, streams=True))
async def create_completion(request: Request, body: CompletionRequest, state: State) -> Response:
    """Continue one text or many, as they stand, without a chat template."""
    engine = state.ready_engine(body.model)
    params = _params(body)
    encode = partial(engine.tokenizer.encode, most=engine.info.max_model_len)
    prompts = await asyncio.to_thread(
        lambda: [encode(text) if isinstance(text, str) else text for text in body.prompt]
    )
    answers = Answers(state, engine, prompts, params, body.priority or 0)
    writer = _Writer(body, engine.tokenizer, answers)
    if body.stream:
        return await EventStream.start(request, writer.events())
    completion = await unless_gone(request.receive, writer.whole())
    return Response(msgspec.json.encode(completion), media_type="application/json")


def _params(body: CompletionRequest) -> SamplingParams:
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if _only_echo(body):
        max_tokens = 1  # the least that the engine can do; the writer leaves it out
    return body.sampling_params(
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )


def _only_echo(body: CompletionRequest) -> bool:
    """Whether the prompt, with its log probabilities, is all that is wanted."""
    return bool(body.echo) and body.max_tokens == 0


class _Writer:
    """Writes the answers to one request in OpenAI's shape."""

    def __init__(self, body: CompletionRequest, tokenizer: Tokenizer, answers: Answers) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self._answers = answers
        self._only_echo = _only_echo(body)
        self._head = Completion(id=new_id("cmpl"), created=now(), model=body.model, choices=[])

    async def whole(self) -> Completion:
        """All answers in one response."""
        choices = []
        for i, answer in enumerate(await self._answers.collect()):
            logprobs = TextLogprobs(self._tokenizer)
            choice = self._choice(i, answer, logprobs, echo=bool(self._body.echo))
            choice.finish_reason = answer.finish_reason
            choices.append(choice)
        return replace(self._head, choices=choices, usage=self._usage())

    async def events(self) -> AsyncGenerator[bytes, None]:
        """A piece of one answer at a time; an echoed prompt is in its answer's first piece."""
        if self._body.include_usage:
            self._head.usage = None
        logprobs = [TextLogprobs(self._tokenizer) for _ in range(self._answers.count)]
        to_echo = set(range(self._answers.count)) if self._body.echo else set()
        async with aclosing(self._answers.stream()) as pieces:
            async for i, delta in pieces:
                choice = self._choice(i, delta, logprobs[i], echo=i in to_echo)
                choice.finish_reason = finish_reason(delta)
                to_echo.discard(i)
                self._head.choices = [choice]
                yield event(self._head)
        if self._body.include_usage:
            yield event(replace(self._head, choices=[], usage=self._usage()))

    def _choice(
        self, i: int, piece: Answer | Delta, logprobs: TextLogprobs, *, echo: bool
    ) -> CompletionChoice:
        """A piece of the i-th answer, or all of it."""
        choice = CompletionChoice(index=i, text="", finish_reason=None)
        if self._body.logprobs is not None:
            choice.logprobs = CompletionLogprobs([], [], [], [])
        if echo:
            self._echo(i // self._answers.n, choice, piece, logprobs)
        if not self._only_echo:
            choice.text += piece.text
            if choice.logprobs is not None:
                choice.logprobs = joined(choice.logprobs, logprobs.output(piece.logprobs or []))
        return choice

    def _echo(
        self, i: int, choice: CompletionChoice, piece: Answer | Delta, logprobs: TextLogprobs
    ) -> None:
        """Begin a choice with the i-th prompt."""
        choice.text = self._prompt_text(i)
        if choice.logprobs is not None:
            token_ids = self._answers.prompts[i]
            choice.logprobs = logprobs.prompt(choice.text, token_ids, piece.prompt_logprobs or [])

    def _prompt_text(self, i: int) -> str:
        prompt = self._body.prompt[i]
        if isinstance(prompt, str):
            return prompt
        return self._tokenizer.decode(prompt, skip_special_tokens=False)

    def _usage(self) -> CompletionUsage:
        usage = self._answers.usage()
        if self._only_echo:
            return replace(usage, completion_tokens=0, total_tokens=usage.prompt_tokens)
        return usage
