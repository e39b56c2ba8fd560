"""POST /v1/chat/completions: the next turn in a conversation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from weft.serving.api.admin.documentation import returns
from weft.serving.api.body import JsonRoute
from weft.serving.api.conversation import Conversation, text_of
from weft.serving.api.generation import Generation
from weft.serving.api.logprobs import chat_logprobs, check_scores, prompt_logprobs
from weft.serving.api.openai.replies import (
    CalledFunction,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    CompletionTokensDetails,
    CompletionUsage,
    FunctionDelta,
    MessageToolCall,
    ToolCallDelta,
    new_id,
    now,
)
from weft.serving.api.openai.requests import ChatRequest
from weft.serving.api.openai.tools import NamedTool
from weft.serving.api.parsing.parser import AnswerFormat
from weft.serving.api.parsing.pieces import Answer, Arguments, CallStart, Content, Piece, Reasoning
from weft.serving.api.state import State
from weft.serving.api.streaming import EventStream, cancel_on_disconnect, event
from weft.serving.engine.sampling_params import SamplingParams

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", **returns(ChatCompletion, streams=True))
async def create_chat_completion(request: Request, body: ChatRequest, state: State) -> Response:
    """Answer a conversation, with the model's chat template."""
    engine = state.ready_engine(body.model)
    generation = await Generation.of_chat(
        state,
        engine,
        lambda: (_conversation(body), _params(body)),
        body.priority or 0,
        body.prompt_options,
    )
    if body.prompt_logprobs is not None:
        check_scores(generation.prompt_tokens, body.prompt_logprobs, "prompt_logprobs")
    writer = _Writer(body, state.model, generation, state.answer_format(engine))
    if body.stream:
        return await EventStream.start(request, writer.events())
    completion = await cancel_on_disconnect(request.receive, writer.whole())
    return Response(completion, media_type="application/json")


def _conversation(body: ChatRequest) -> Conversation:
    choice = body.tool_choice or "auto"
    return Conversation(
        body.messages,
        [tool.function for tool in body.tools or ()],
        choice.function if isinstance(choice, NamedTool) else choice,
        body.parallel_tool_calls is not False,
        to_answer=body.to_answer,
        continued=bool(body.continue_final_message),
        template_arguments=body.chat_template_kwargs or {},
        thinking=body.thinking,
        verbosity=body.asked_verbosity,
    )


def _params(body: ChatRequest) -> SamplingParams:
    more: dict[str, Any] = {"logprobs": (body.top_logprobs or 0) if body.logprobs else None}
    names = {"logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        more["max_tokens"] = body.max_completion_tokens
        names["max_tokens"] = "max_completion_tokens"
    return body.sampling_params(names, **more)


class _Writer:
    """Writes the answers to one request in OpenAI's shape."""

    def __init__(
        self, body: ChatRequest, model: str, generation: Generation, form: AnswerFormat
    ) -> None:
        self._body = body
        self._model = model
        self._generation = generation
        self._format = form
        self._id = new_id("chatcmpl")
        self._created = now()
        self._calls = [0] * generation.count  # number of calls in each answer, so far
        # Of each answer: its newest piece is content. Thoughts come before it.
        self._in_content = [form.reasoning is None] * generation.count
        last = body.messages[-1]
        self._echo = text_of(last) if body.echo and last.role == "assistant" else ""

    async def whole(self) -> bytes:
        """Return all answers in one response, as JSON."""
        answers = await self._generation.collect()
        if not self._body.logprobs and self._body.prompt_logprobs is None:
            return self._written(answers)
        return await asyncio.to_thread(self._written, answers)  # there may be very many

    def _written(self, answers: Sequence[Answer]) -> bytes:
        choices = [
            ChatChoice(
                index=answer.index,
                message=self._message(answer),
                finish_reason=answer.finish_reason,
                logprobs=self._logprobs(answer),
                token_ids=self._token_ids(answer),
            )
            for answer in answers
        ]
        completion = ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=self._usage(),
            prompt_token_ids=self._prompt_token_ids(),
        )
        if (top := self._body.prompt_logprobs) is not None:
            scores = answers[0].prompt_logprobs or ()
            completion.prompt_logprobs = prompt_logprobs(self._format.tokenizer, scores, top)
        return msgspec.json.encode(completion)

    def _message(self, answer: Answer) -> ChatMessage:
        calls, reasoning = answer.calls, answer.reasoning
        message = ChatMessage(self._echo + answer.content or (None if calls else ""))
        if calls:
            message.tool_calls = [
                MessageToolCall(
                    self._format.new_call_id(), CalledFunction(call.name, call.arguments)
                )
                for call in calls
            ]
        if reasoning and self._body.include_reasoning is not False:
            message.reasoning = message.reasoning_content = reasoning
        return message

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield for each answer its role, then its pieces, then its finish reason."""
        chunk = ChatCompletionChunk(
            id=self._id, created=self._created, model=self._model, choices=[]
        )
        if self._body.include_usage:
            chunk.usage = None
        chunk.prompt_token_ids = self._prompt_token_ids()
        new = set(range(self._generation.count))
        async with aclosing(self._generation.stream()) as parts:
            async for part in parts:
                i, reason = part.index, part.finish_reason
                if self._body.continuous_usage:
                    chunk.usage = self._usage()
                if i in new:
                    new.remove(i)
                    role = ChatDelta(role="assistant", content=self._echo, refusal=None)
                    chunk.choices = [ChatChunkChoice(i, role)]
                    yield event(chunk)
                    chunk.prompt_token_ids = UNSET
                for choice in self._choices(part):
                    chunk.choices = [choice]
                    yield event(chunk)
                if reason is not None:
                    chunk.choices = [ChatChunkChoice(i, ChatDelta(), reason)]
                    yield event(chunk)
        if self._body.include_usage:
            chunk.choices, chunk.usage = [], self._usage()
            yield event(chunk)

    def _usage(self) -> CompletionUsage:
        usage = self._generation.usage()
        usage.completion_tokens_details = CompletionTokensDetails(self._generation.reasoning_tokens)
        return usage

    def _token_ids(self, answer: Answer) -> list[int] | UnsetType:
        return list(answer.token_ids) if self._body.return_token_ids else UNSET

    def _prompt_token_ids(self) -> list[int] | UnsetType:
        return self._generation.prompt(0) if self._body.return_token_ids else UNSET

    def _logprobs(self, answer: Answer) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(self._format.tokenizer, answer.logprobs)

    def _choices(self, part: Answer) -> Iterator[ChatChunkChoice]:
        """Yield a delta for each piece; log probabilities and token ids go with the first."""
        deltas = [
            self._delta(part.index, piece)
            for piece in part.pieces
            if not (isinstance(piece, Reasoning) and self._body.include_reasoning is False)
        ]
        token_ids = self._token_ids(part)
        # A delta without text is sent too, because clients measure the time between tokens. In a
        # thought or a call it has no content: some clients take that for the end of the thought.
        if part.pieces:
            self._in_content[part.index] = isinstance(part.pieces[-1], Content)
        if not deltas and (part.logprobs or token_ids or part.finish_reason is None):
            deltas = [ChatDelta(content="") if self._in_content[part.index] else ChatDelta()]
        logprobs = self._logprobs(part)
        for delta in deltas:
            yield ChatChunkChoice(part.index, delta, logprobs=logprobs, token_ids=token_ids)
            logprobs, token_ids = None, UNSET

    def _delta(self, i: int, piece: Piece) -> ChatDelta:
        match piece:
            case Content(text):
                return ChatDelta(content=text)
            case Reasoning(text):
                return ChatDelta(reasoning_content=text, reasoning=text)
            case CallStart(name):
                self._calls[i] += 1
                call = ToolCallDelta(
                    self._calls[i] - 1,
                    FunctionDelta("", name),
                    self._format.new_call_id(),
                    "function",
                )
            case Arguments(text):
                call = ToolCallDelta(self._calls[i] - 1, FunctionDelta(text))
        return ChatDelta(tool_calls=[call])
