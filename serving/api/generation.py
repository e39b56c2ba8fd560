"""The answers to one HTTP request: every prompt `n` times, all at once.

Answer i belongs to prompt i // n. Each is a stream of the engine, with a seed
of its own; they are merged in the order in which their pieces come.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from weft.errors import EngineError, RequestError
from weft.serving.api.middleware.request_context import admit, current
from weft.serving.api.openai.replies import CompletionUsage, FinishReason, PromptTokensDetails
from weft.serving.api.state import ServerState
from weft.serving.engine.metrics import Phases
from weft.serving.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from weft.serving.engine.engine import AsyncEngine, Delta
    from weft.serving.engine.protocol import TokenLogprob

MAX_ANSWERS = 1024


@dataclass
class Answer:
    """One answer, all of it."""

    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprob] | None = None
    finish_reason: FinishReason = "stop"
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        """What the model wrote."""
        return "".join(self.pieces)


class Answers:
    """Runs the answers to one request, and counts their tokens.

    Args:
        state: of the server.
        engine: ready to take requests.
        prompts: token ids, at least one prompt.
        params: sampling settings of each answer; `n` answers are made for each prompt.
        priority: lower is served first.
        visible: special tokens whose text is wanted.

    Raises:
        RequestError: a prompt or a setting does not fit the model, or there are too many answers.
    """

    def __init__(
        self,
        state: ServerState,
        engine: AsyncEngine,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        priority: int,
        visible: frozenset[int] = frozenset(),
    ) -> None:
        if len(prompts) * params.n > MAX_ANSWERS:
            raise RequestError(
                f"{len(prompts)} prompts with n={params.n} are {len(prompts) * params.n} answers; "
                f"at most {MAX_ANSWERS} in one request",
                param="n",
            )
        if len(prompts) * params.n > engine.places:
            raise RequestError(
                f"{len(prompts)} prompts with n={params.n} are {len(prompts) * params.n} answers; "
                f"this server has room for {engine.places}, running and waiting",
                param="n",
            )
        self.prompts = prompts
        self.n = params.n
        self._state = state
        self._engine = engine
        self._requests = [engine.validate(prompt, params) for prompt in prompts]
        self._priority = priority
        self._context = current.get()
        self._deadline = None if self._context is None else state.deadline(self._context)
        self._visible = visible
        self._admitted = 0
        self._completion_tokens = 0
        self._cached_tokens = [0] * len(prompts)

    @property
    def count(self) -> int:
        """How many answers there are."""
        return len(self.prompts) * self.n

    async def stream(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """(answer, its next piece), until all have ended. Closing it aborts the answers.

        Raises:
            RequestError: the queue is full.
            EngineError: the engine has died or is ending.
        """
        await note_prompts(self._state, self._engine, self.prompts)
        async with aclosing(_merged([self._one(i) for i in range(self.count)])) as pieces:
            async for i, delta in pieces:
                self._completion_tokens += len(delta.token_ids)
                self._spend(len(delta.token_ids))
                if delta.cached_tokens and i % self.n == 0:
                    self._cached_tokens[i // self.n] = delta.cached_tokens
                yield i, delta

    async def collect(self) -> list[Answer]:
        """Every answer, once all have ended; raises as `stream` and `finish_reason` do."""
        answers = [Answer() for _ in range(self.count)]
        async with aclosing(self.stream()) as pieces:
            async for i, delta in pieces:
                answer = answers[i]
                answer.pieces.append(delta.text)
                answer.token_ids += delta.token_ids
                answer.logprobs += delta.logprobs or ()
                if delta.prompt_logprobs is not None:
                    answer.prompt_logprobs = delta.prompt_logprobs
                answer.finish_reason = finish_reason(delta) or "stop"
                answer.stop_reason = delta.stop_reason
        return answers

    def usage(self) -> CompletionUsage:
        """Token counts so far."""
        prompt_tokens = sum(map(len, self.prompts))
        return CompletionUsage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=prompt_tokens + self._completion_tokens,
            prompt_tokens_details=PromptTokensDetails(sum(self._cached_tokens)),
        )

    def _one(self, i: int) -> AsyncGenerator[Delta, None]:
        request = self._requests[i // self.n].answer(i % self.n)
        phases = Phases(len(request.prompt_token_ids))
        if self._context is not None:
            self._context.answers.append(phases)
        return self._engine.generate(
            request,
            priority=self._priority,
            deadline=self._deadline,
            visible=self._visible,
            admit=admit.get(),
            on_admitted=self._admit,
            observer=self._state.metrics.observer(phases),
        )

    def _admit(self) -> None:
        """An answer has a place. Once all have, the prompts will be computed, for whoever waits."""
        self._admitted += 1
        if self._admitted == self.count:
            self._spend(sum(map(len, self.prompts)))

    def _spend(self, tokens: int) -> None:
        if self._context is not None and self._context.key is not None:
            self._context.key.spend(tokens)


async def note_prompts(
    state: ServerState, engine: AsyncEngine, prompts: Sequence[list[int]]
) -> None:
    """Tell the request's context what the model sees, if that is to be logged."""
    context = current.get()
    if context is not None and state.log_prompts:
        decode = partial(engine.tokenizer.decode, skip_special_tokens=False)
        context.prompts = await asyncio.to_thread(lambda: list(map(decode, prompts)))


def finish_reason(delta: Delta) -> FinishReason | None:
    """Why an answer has ended, if it has.

    Raises:
        RequestError: it has failed.
        EngineError: the engine is ending.
    """
    reason = delta.finish_reason
    if reason == "error":
        message = delta.error or "the answer failed"
        if delta.error_param is not None:
            raise RequestError(message, param=delta.error_param, code="invalid_grammar")
        raise RequestError(message, code="generation_failed", status=500)
    if reason == "abort":
        raise EngineError("the answer was cut off: the server is shutting down")
    return reason


async def _merged(
    streams: Sequence[AsyncGenerator[Delta, None]],
) -> AsyncGenerator[tuple[int, Delta], None]:
    """All streams' items with the stream's index; closes them all when closed or when one fails."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for delta in stream:
                yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, Delta] | asyncio.Task[None]] = asyncio.Queue()

    async def pump(i: int, stream: AsyncGenerator[Delta, None]) -> None:
        async with aclosing(stream):
            async for delta in stream:
                queue.put_nowait((i, delta))

    tasks = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    for task in tasks:
        task.add_done_callback(queue.put_nowait)
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, asyncio.Task):
                item.result()
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
