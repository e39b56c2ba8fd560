"""The answers to one API request: each prompt is answered `n` times, all answers at once.

Answer i belongs to prompt i // n and has its own seed. Its text passes a parser, which separates
content, reasoning and calls in chats; completions have only content. A token passes three
generators on its way out: `AsyncEngine.generate`, `Generation.stream`, and a route's writer, which
yields events.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec

from weft.errors import EngineError, RequestError
from weft.serving.api.conversation import Conversation, TextFunction, prompt_from
from weft.serving.api.middleware.request_context import admit, current, owner
from weft.serving.api.openai.replies import CompletionUsage, FinishReason, PromptTokensDetails
from weft.serving.api.openai.tools import Function, FunctionName
from weft.serving.api.parsing.pieces import Answer, CallStart, Content, Piece, Reasoning
from weft.serving.api.parsing.scored import ScoredParser
from weft.serving.api.parsing.tool_grammar import (
    ANY_OBJECT,
    InputGrammar,
    Offered,
    calls_only,
    or_calls,
    strict_calls,
)
from weft.serving.api.prompts import AS_USUAL, PromptOptions
from weft.serving.api.state import ServerState
from weft.serving.engine.admission import for_each
from weft.serving.engine.metrics import Phases
from weft.serving.engine.request_stream import Delta, joined
from weft.serving.engine.sampling_params import SamplingDefaults, SamplingParams

if TYPE_CHECKING:
    from weft.serving.api.parsing.parser import AnswerFormat, AnswerParser
    from weft.serving.engine.checks import CheckedRequest
    from weft.serving.engine.engine import AsyncEngine

MAX_ANSWERS = 1024

_NO_PARAMETERS = {"type": "object", "properties": {}}


class Generation:
    """Runs the answers to one request and counts their tokens; made by `of_chat` or `of_texts`.

    Args:
        state: the server.
        engine: ready to take requests.
        requests: one for each prompt.
        params: the request's settings, for all its prompts.
        priority: lower is served first.
        reader: makes the parser of an answer.
        visible: special tokens whose text the parser needs.

    Attributes:
        count: number of answers.
        params: the request's settings.
        reasoning_tokens: number of tokens in thoughts, over the answers that have ended.
    """

    def __init__(
        self,
        state: ServerState,
        engine: AsyncEngine,
        requests: Sequence[CheckedRequest],
        params: SamplingParams,
        priority: int,
        reader: Callable[[], _Reader],
        visible: frozenset[int] = frozenset(),
    ) -> None:
        self.count = len(requests) * params.n
        self.params = params
        self.reasoning_tokens = 0
        self._state = state
        self._engine = engine
        self._requests = requests
        self._n = params.n
        self._priority = priority
        self._visible = visible
        self._readers = [reader() for _ in range(self.count)]
        self._context = current.get()
        self._key = None if self._context is None else self._context.key
        self._deadline = None if self._context is None else state.deadline(self._context)
        self._admitted = 0
        self._completion_tokens = 0
        self._cached_tokens = [0] * len(requests)

    @classmethod
    async def of_texts(
        cls,
        state: ServerState,
        engine: AsyncEngine,
        prompts: Sequence[str | list[int]],
        settings: Callable[[], SamplingParams],
        priority: int,
        options: PromptOptions = AS_USUAL,
    ) -> Generation:
        """Prepare to continue texts, or token ids.

        `settings` is called in a thread, because a large grammar takes long.

        Raises:
            RequestError: a prompt or a setting does not fit the model, or there are too many
                answers.
        """

        def prepare() -> tuple[SamplingParams, list[CheckedRequest]]:
            params = settings()
            _check_count(len(prompts), params.n, engine)
            encode = partial(options.encode, engine, params=params, special=True)
            return params, engine.validate_all(map(encode, prompts), params, options.cache_salt)

        params, requests = await state.aside(prepare)
        return cls(state, engine, requests, params, priority, _TextReader)

    @classmethod
    async def of_chat(
        cls,
        state: ServerState,
        engine: AsyncEngine,
        asked: Callable[[], tuple[Conversation, SamplingParams]],
        priority: int,
        options: PromptOptions = AS_USUAL,
        field: str = "messages",
        *,
        scored: bool = False,
    ) -> Generation:
        """Prepare the assistant's next turn in a conversation.

        `asked` is called in a thread, because a long conversation takes long. The prompt is made
        from the request's `field`, which errors name. With `scored`, each content has its tokens'
        log probabilities.

        Raises:
            RequestError: the conversation or a setting does not fit the model.
        """
        form = state.answer_format(engine)

        def prepare() -> tuple[Conversation, SamplingParams, str, CheckedRequest]:
            conversation, params = asked()
            _check_count(1, params.n, engine)
            prompt = conversation.prompt(engine.tokenizer, most=options.longest(engine))
            ids = options.encode(engine, prompt, params, special=False)
            params = _with_grammar(params, conversation, form, prompt)
            return conversation, params, prompt, engine.validate(ids, params, options.cache_salt)

        with prompt_from(field):
            conversation, params, prompt, request = await state.aside(prepare)
        tools = {tool.name: tool.parameters or _NO_PARAMETERS for tool in conversation.offered}

        def reader() -> _ChatReader:
            parser = form.parser(
                prompt, tools, parallel=conversation.parallel, continued=conversation.continued_text
            )
            return _ChatReader(form, parser, scored=scored)

        return cls(state, engine, [request], params, priority, reader, form.visible)

    @property
    def defaults(self) -> SamplingDefaults:
        """Values for settings without a value in the request."""
        return self._engine.generation_config.defaults

    def prompt(self, i: int) -> list[int]:
        """Return the token ids of the prompt of answer i."""
        return self._requests[i // self._n].prompt_token_ids

    async def stream(self) -> AsyncGenerator[Answer, None]:
        """Yield all answers in parts, as they come. Closing the iterator aborts the answers.

        Raises:
            RequestError: the queue is full, or an answer has failed.
            EngineError: the engine has died or is shutting down.
        """
        await self._note_prompts()
        if self.count == 1:
            async with aclosing(self._generate(0)) as deltas:
                async for delta in deltas:
                    self._count(0, delta)
                    yield self._parse(0, delta)
            return
        queue: asyncio.Queue[tuple[int, Delta] | None] = asyncio.Queue()
        running = asyncio.create_task(self._run(lambda i, delta: queue.put_nowait((i, delta))))
        running.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (item := await queue.get()) is not None:
                self._count(*item)
                yield self._parse(*item)
            running.result()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def collect(self) -> list[Answer]:
        """Return all answers once they have ended; raises as `stream`."""
        await self._note_prompts()
        parts: list[list[Delta]] = [[] for _ in range(self.count)]

        def take(i: int, delta: Delta) -> None:
            self._count(i, delta)
            finish_reason(delta)
            parts[i].append(delta)

        await self._run(take)
        return [self._parse(i, joined(deltas)) for i, deltas in enumerate(parts)]

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens in all answers together."""
        return self._n * sum(len(each.prompt_token_ids) for each in self._requests)

    def usage(self) -> CompletionUsage:
        """Count the tokens so far."""
        prompt_tokens = sum(len(each.prompt_token_ids) for each in self._requests)
        return CompletionUsage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=prompt_tokens + self._completion_tokens,
            prompt_tokens_details=PromptTokensDetails(sum(self._cached_tokens)),
        )

    async def _note_prompts(self) -> None:
        prompts = [each.prompt_token_ids for each in self._requests]
        await note_prompts(self._state, self._engine, prompts)

    async def _run(self, take: Callable[[int, Delta], None]) -> None:
        """Run all answers to their ends; the first error ends the others."""

        async def one(i: int) -> None:
            async with aclosing(self._generate(i)) as deltas:
                async for delta in deltas:
                    take(i, delta)

        if self.count == 1:
            await one(0)
        else:
            await for_each(range(self.count), one, workers=self.count)

    def _generate(self, i: int) -> AsyncGenerator[Delta, None]:
        request = self._requests[i // self._n].answer(i % self._n)
        phases = Phases(len(request.prompt_token_ids))
        if self._context is not None:
            self._context.answers.append(phases)
        return self._engine.generate(
            request,
            priority=self._priority,
            deadline=self._deadline,
            owner=owner(),
            visible=self._visible,
            admit=admit.get(),
            on_admitted=self._on_admitted,
            observer=self._state.metrics.observer(phases),
        )

    def _on_admitted(self) -> None:
        """Charge the prompts once all answers are admitted: then they will be computed."""
        self._admitted += 1
        if self._admitted == self.count:
            self._spend(sum(len(each.prompt_token_ids) for each in self._requests))

    def _count(self, i: int, delta: Delta) -> None:
        tokens = len(delta.token_ids)
        self._completion_tokens += tokens
        self._spend(tokens)
        if delta.cached_tokens and i % self._n == 0:
            self._cached_tokens[i // self._n] = delta.cached_tokens

    def _spend(self, tokens: int) -> None:
        if self._key is not None:
            self._key.spend(tokens)

    def _parse(self, i: int, delta: Delta) -> Answer:
        """Parse an answer, or a part; raises as `finish_reason`."""
        reason = finish_reason(delta)
        reader = self._readers[i]
        pieces = reader.push(delta)
        if reason is not None:
            pieces += reader.flush()
            reason = reader.finish_reason(reason)
            self.reasoning_tokens += reader.reasoning_tokens
        return Answer(
            pieces,
            i,
            delta.token_ids,
            delta.logprobs or (),
            delta.prompt_logprobs,
            reason,
            delta.stop_reason,
        )


def _check_count(prompts: int, n: int, engine: AsyncEngine) -> None:
    """Raise RequestError if there are too many answers for one request, or for this server."""
    count = prompts * n
    if count > MAX_ANSWERS:
        raise RequestError(
            f"{prompts} prompts with n={n} are {count} answers; at most {MAX_ANSWERS} in one "
            "request",
            param="n",
        )
    if count > engine.places:
        raise RequestError(
            f"{prompts} prompts with n={n} are {count} answers; this server has room for "
            f"{engine.places}, running and waiting",
            param="n",
        )


async def note_prompts(
    state: ServerState, engine: AsyncEngine, prompts: Sequence[list[int]]
) -> None:
    """Add the prompts as the model sees them to the request's context, if they are logged."""
    context = current.get()
    if context is not None and state.log_prompts:
        decode = partial(engine.tokenizer.decode, skip_special_tokens=False)
        context.prompts = await state.aside(lambda: list(map(decode, prompts)))


def finish_reason(delta: Delta) -> FinishReason | None:
    """Return why an answer has ended; None if it goes on.

    Raises:
        RequestError: the answer has failed.
        EngineError: the engine is shutting down.
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


def _with_grammar(
    params: SamplingParams, conversation: Conversation, form: AnswerFormat, prompt: str
) -> SamplingParams:
    """Add a grammar to the settings if calls are required or must match a schema.

    The grammar applies after the thought, if the model thinks.
    """
    tools = [
        (tool, Offered(tool.name, tool.parameters or _NO_PARAMETERS, _input_grammar(tool)))
        for tool in conversation.offered
    ]
    free = [
        offered if tool.strict else replace(offered, schema=ANY_OBJECT) for tool, offered in tools
    ]
    choice, several, tokens = (
        conversation.tool_choice,
        conversation.parallel,
        form.tokenizer.mark_tokens,
    )
    grammar = params.grammar
    if grammar is not None:
        grammar = form.in_answer(grammar)
    if isinstance(choice, FunctionName) or choice == "required":
        if grammar is not None:
            raise RequestError(
                f"{grammar.param} and tool_choice each constrain the answer; give one of them",
                param=grammar.param,
            )
        wanted = [offered for _, offered in tools]
        if isinstance(choice, FunctionName):
            wanted = [offered for offered in wanted if offered.name == choice.name][:1]
            several = False
        grammar = calls_only(form.tools, wanted, several=several, tokens=tokens)
    elif tools and grammar is not None:
        grammar = or_calls(grammar, form.tools, free, several=several, tokens=tokens)
    elif any(tool.strict for tool, _ in tools):
        grammar = strict_calls(form.tools, free, several=several, tokens=tokens)
    if grammar is None:
        return params
    grammar = form.after_thought(grammar, prompt, conversation.continued_text)
    return msgspec.structs.replace(params, grammar=grammar)


def _input_grammar(tool: Function) -> InputGrammar | None:
    return tool.grammar if isinstance(tool, TextFunction) else None


class _Reader(Protocol):
    """Splits one answer into pieces.

    Attributes:
        reasoning_tokens: number of tokens in the thought, once the answer has ended.
    """

    reasoning_tokens: int

    def push(self, delta: Delta) -> list[Piece]:
        """Take more of the answer; returns the pieces that are certain."""

    def flush(self) -> list[Piece]:
        """End the answer; returns the pieces that were held back."""

    def finish_reason(self, reason: FinishReason) -> FinishReason:
        """Return the reason as clients see it."""


class _TextReader:
    """Takes a text as it is: everything is content."""

    reasoning_tokens = 0

    def push(self, delta: Delta) -> list[Piece]:
        return [Content(delta.text)] if delta.text else []

    def flush(self) -> list[Piece]:
        return []

    def finish_reason(self, reason: FinishReason) -> FinishReason:
        return reason


class _ChatReader:
    """Splits an answer into content, reasoning and calls, and counts the tokens in its thought."""

    def __init__(self, form: AnswerFormat, parser: AnswerParser, *, scored: bool) -> None:
        self.reasoning_tokens = 0
        self._format = form
        self._parser = parser
        self._scored = ScoredParser(parser) if scored else None
        self._thinking = True
        self._tokens = 0  # up to the end of the thought, if the answer turns out to have one
        self._thought: list[str] = []
        self._calls = False

    def push(self, delta: Delta) -> list[Piece]:
        if self._thinking:
            for token in delta.token_ids:
                self._tokens += 1
                if token == self._format.end_of_reasoning:
                    self._thinking = False
                    break
        if self._scored is not None:
            return self._seen(self._scored.push(delta))
        return self._seen(self._parser.push(delta.text))

    def flush(self) -> list[Piece]:
        pieces = self._seen((self._scored or self._parser).flush())
        if self._format.end_of_reasoning is None:
            self.reasoning_tokens = self._format.count_tokens("".join(self._thought))
        elif self._parser.has_reasoning:
            self.reasoning_tokens = self._tokens
        return pieces

    def finish_reason(self, reason: FinishReason) -> FinishReason:
        return "tool_calls" if reason == "stop" and self._calls else reason

    def _seen(self, pieces: list[Piece]) -> list[Piece]:
        for piece in pieces:
            if isinstance(piece, CallStart):
                self._calls = True
            elif isinstance(piece, Reasoning):
                self._thought.append(piece.text)
        return pieces
