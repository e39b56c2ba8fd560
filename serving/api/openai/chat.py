"""POST /v1/chat/completions: the next turn of a conversation."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from weft.serving.api.admin.documentation import returns
from weft.serving.api.body import JsonRoute
from weft.serving.api.connection import unless_gone
from weft.serving.api.conversation import Conversation
from weft.serving.api.logprobs import chat_logprobs
from weft.serving.api.openai.replies import (
    CalledFunction,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatMessage,
    FunctionDelta,
    MessageToolCall,
    ToolCallDelta,
    new_id,
    now,
)
from weft.serving.api.openai.requests import ChatRequest, NamedTool
from weft.serving.api.parsing.pieces import Arguments, CallStart, Content, Piece, Reasoning
from weft.serving.api.state import State
from weft.serving.api.streaming import EventStream, event
from weft.serving.api.turns import Turn, TurnDelta, Turns
from weft.serving.engine.sampling_params import SamplingParams
from weft.serving.engine.tokenizer import Tokenizer

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", **returns(ChatCompletion, streams=True))
async def create_chat_completion(request: Request, body: ChatRequest, state: State) -> Response:
    """Answer a conversation, with the model's chat template."""
    engine = state.ready_engine(body.model)
    choice = body.tool_choice or "auto"
    conversation = Conversation(
        body.messages,
        [tool.function for tool in body.tools or ()],
        choice.function if isinstance(choice, NamedTool) else choice,
        body.parallel_tool_calls is not False,
    )
    turns = await Turns.begin(state, engine, conversation, _params(body), body.priority or 0)
    writer = _Writer(body, engine.tokenizer, turns)
    if body.stream:
        return await EventStream.start(request, writer.events())
    completion = await unless_gone(request.receive, writer.whole())
    return Response(msgspec.json.encode(completion), media_type="application/json")


def _params(body: ChatRequest) -> SamplingParams:
    more: dict[str, Any] = {"logprobs": (body.top_logprobs or 0) if body.logprobs else None}
    if body.max_completion_tokens is not None:
        more["max_tokens"] = body.max_completion_tokens
    return body.sampling_params(**more)


class _Writer:
    """Writes the turns of one request in OpenAI's shape."""

    def __init__(self, body: ChatRequest, tokenizer: Tokenizer, turns: Turns) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self._turns = turns
        self._id = new_id("chatcmpl")
        self._created = now()
        self._calls = [0] * turns.count  # of each turn, so far

    async def whole(self) -> ChatCompletion:
        """All turns in one response."""
        choices = [
            ChatChoice(
                index=i,
                message=self._message(turn),
                finish_reason=turn.finish_reason,
                logprobs=chat_logprobs(self._tokenizer, turn.logprobs)
                if self._body.logprobs
                else None,
            )
            for i, turn in enumerate(await self._turns.collect())
        ]
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._body.model,
            choices=choices,
            usage=self._turns.usage(),
        )

    def _message(self, turn: Turn) -> ChatMessage:
        answer = turn.answer
        message = ChatMessage(answer.content or (None if answer.calls else ""))
        if answer.calls:
            message.tool_calls = [
                MessageToolCall(
                    self._turns.format.new_call_id(), CalledFunction(c.name, c.arguments)
                )
                for c in answer.calls
            ]
        if answer.reasoning:
            message.reasoning = message.reasoning_content = answer.reasoning
        return message

    async def events(self) -> AsyncGenerator[bytes, None]:
        """For each turn its role, then its pieces, then the reason of its end."""
        chunk = ChatCompletionChunk(
            id=self._id, created=self._created, model=self._body.model, choices=[]
        )
        if self._body.include_usage:
            chunk.usage = None
        new = set(range(self._turns.count))
        async with aclosing(self._turns.stream()) as turns:
            async for turn in turns:
                i, reason = turn.index, turn.finish_reason
                if i in new:
                    new.remove(i)
                    role = ChatDelta(role="assistant", content="", refusal=None)
                    chunk.choices = [ChatChunkChoice(i, role)]
                    yield event(chunk)
                for choice in self._choices(turn):
                    chunk.choices = [choice]
                    yield event(chunk)
                if reason is not None:
                    chunk.choices = [ChatChunkChoice(i, ChatDelta(), reason)]
                    yield event(chunk)
        if self._body.include_usage:
            chunk.choices, chunk.usage = [], self._turns.usage()
            yield event(chunk)

    def _choices(self, turn: TurnDelta) -> Iterator[ChatChunkChoice]:
        """A delta for each piece; log probabilities go with the first."""
        deltas = [self._delta(turn.index, piece) for piece in turn.pieces]
        # Also without text: clients measure the time between tokens.
        if not deltas and (turn.logprobs or turn.finish_reason is None):
            deltas = [ChatDelta(content="")]
        logprobs = None
        if self._body.logprobs:
            logprobs = chat_logprobs(self._tokenizer, turn.logprobs)
        for delta in deltas:
            yield ChatChunkChoice(turn.index, delta, logprobs=logprobs)
            logprobs = None

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
                    self._turns.format.new_call_id(),
                    "function",
                )
            case Arguments(text):
                call = ToolCallDelta(self._calls[i] - 1, FunctionDelta(text))
        return ChatDelta(tool_calls=[call])
