"""POST /v1/messages: a conversation in Anthropic's form."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic_core import from_json

from weft.errors import EngineError, RequestError
from weft.serving.api.admin.documentation import returns
from weft.serving.api.anthropic import events as shapes
from weft.serving.api.anthropic.conversation import conversation
from weft.serving.api.anthropic.errors import anthropic_error
from weft.serving.api.anthropic.requests import CountRequest, MessagesRequest
from weft.serving.api.body import JsonRoute
from weft.serving.api.conversation import MAX_COUNTED
from weft.serving.api.errors import describe, error_body
from weft.serving.api.generation import Generation
from weft.serving.api.openai.replies import FinishReason, new_id
from weft.serving.api.parsing.parser import AnswerFormat
from weft.serving.api.parsing.pieces import Answer, Arguments, CallStart, Content, Piece, Reasoning
from weft.serving.api.state import State
from weft.serving.api.streaming import EventStream, cancel_on_disconnect, typed_event

router = APIRouter(route_class=JsonRoute)


@router.post(
    "/v1/messages", **returns(shapes.MessageOut, streams=True, error=shapes.AnthropicError)
)
async def create_message(request: Request, body: MessagesRequest, state: State) -> Response:
    """Answer a conversation in Anthropic's form."""
    engine = state.ready_engine(body.model)
    templates = engine.tokenizer.chat_templates
    generation = await Generation.of_chat(
        state,
        engine,
        lambda: (conversation(body, templates), body.sampling_params()),
        body.priority or 0,
    )
    writer = _Writer(body, generation, state.answer_format(engine))
    if body.stream:
        return await EventStream.start(request, writer.stream(), failure=_failure, done=b"")
    message = await cancel_on_disconnect(request.receive, writer.whole())
    return Response(msgspec.json.encode(message), media_type="application/json")


@router.post("/v1/messages/count_tokens", **returns(shapes.TokenCount, error=shapes.AnthropicError))
async def count_tokens(body: CountRequest, state: State) -> Response:
    """Count the tokens in a conversation."""
    engine = state.ready_engine(body.model)

    def counted() -> int:
        most = max(engine.info.max_model_len, MAX_COUNTED)
        asked = conversation(body, engine.tokenizer.chat_templates)
        prompt = asked.prompt(engine.tokenizer, most=most)
        return len(engine.tokenizer.encode(prompt, add_special_tokens=False, most=most))

    count = await state.aside(counted)
    return Response(msgspec.json.encode(shapes.TokenCount(count)), media_type="application/json")


class _Writer:
    """Writes an answer in Anthropic's shape, as events or as the complete message."""

    def __init__(self, body: MessagesRequest, generation: Generation, form: AnswerFormat) -> None:
        self._generation = generation
        self._format = form
        self._message = shapes.MessageOut(new_id("msg", "_"), body.model, [], self._usage())
        if body.context_management is not None:
            self._message.context_management = shapes.AppliedEdits()
        self._hides_thoughts = body.hides_thoughts
        self._begun = False
        self._thought = hashlib.sha256()  # of the thought in the last block
        self._arguments = ""  # arguments of the call in the last block

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the events, encoded."""
        async with aclosing(self._generation.stream()) as parts:
            async for part in parts:
                for event in self._events(part):
                    yield typed_event(event)

    async def whole(self) -> shapes.MessageOut:
        """Return the message once it is complete."""
        for answer in await self._generation.collect():
            for _ in self._events(answer):
                pass
        return self._message

    def _events(self, part: Answer) -> Iterator[shapes.MessageEvent]:
        """Add a part of the answer to the message, and yield its events."""
        if not self._begun:
            self._begun = True
            self._message.usage = self._usage()
            yield shapes.MessageStart(self._message)
            yield shapes.Ping()
        for piece in part.pieces:
            yield from self._add(piece)
        if part.finish_reason is not None:
            yield from self._end(part.finish_reason, part.stop_reason)

    def _add(self, piece: Piece) -> Iterator[shapes.MessageEvent]:
        """Add a piece to the message, and yield its events."""
        last = self._message.content[-1] if self._message.content else None
        match piece:
            case CallStart(name):
                call = shapes.ToolUseOut(self._format.new_call_id(), name, {})
                yield from self._begin(call)
                return
            case Content(text):
                if not isinstance(last, shapes.TextOut):
                    last = shapes.TextOut("")
                    yield from self._begin(last)
                last.text += text
                delta: Any = shapes.TextDelta(text)
            case Reasoning(text):
                if not isinstance(last, shapes.ThinkingOut):
                    last = shapes.ThinkingOut("")
                    yield from self._begin(last)
                self._thought.update(text.encode())
                if self._hides_thoughts:
                    return
                last.thinking += text
                delta = shapes.ThinkingDelta(text)
            case Arguments(text):
                self._arguments += text
                delta = shapes.InputJsonDelta(text)
        yield shapes.BlockDelta(len(self._message.content) - 1, delta)

    def _begin(self, block: shapes.BlockOut) -> Iterator[shapes.MessageEvent]:
        """End the last block, and begin another."""
        yield from self._end_block()
        self._message.content.append(block)
        yield shapes.BlockStart(len(self._message.content) - 1, block)

    def _end_block(self, *, cut_off: bool = False) -> Iterator[shapes.MessageEvent]:
        content = self._message.content
        if not content:
            return
        match content[-1]:
            case shapes.ToolUseOut() as call:
                call.input = _input(self._arguments, cut_off=cut_off)
                self._arguments = ""
            case shapes.ThinkingOut() as thought:
                thought.signature = self._thought.hexdigest()
                self._thought = hashlib.sha256()
                signed = shapes.SignatureDelta(thought.signature)
                yield shapes.BlockDelta(len(content) - 1, signed)
        yield shapes.BlockStop(len(content) - 1)

    def _end(
        self, reason: FinishReason, stopped: str | int | None
    ) -> Iterator[shapes.MessageEvent]:
        yield from self._end_block(cut_off=reason == "length" or isinstance(stopped, str))
        message = self._message
        message.usage = self._usage()
        match reason:
            case "length":
                message.stop_reason = "max_tokens"
            case "tool_calls":
                message.stop_reason = "tool_use"
            case _ if isinstance(stopped, str):
                message.stop_reason, message.stop_sequence = "stop_sequence", stopped
            case _:
                message.stop_reason = "end_turn"
        end = shapes.MessageEnd(message.stop_reason, message.stop_sequence)
        yield shapes.MessageDelta(end, message.usage)
        yield shapes.MessageStop()

    def _usage(self) -> shapes.MessagesUsage:
        usage = self._generation.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        thinking = shapes.OutputTokensDetails(self._generation.reasoning_tokens)
        return shapes.MessagesUsage(
            usage.prompt_tokens - cached, usage.completion_tokens, thinking, cached
        )


def _input(arguments: str, *, cut_off: bool) -> dict[str, Any]:
    """Parse a call's input; if the answer was cut off, parse the beginning."""
    try:
        value = from_json(arguments, allow_partial="trailing-strings" if cut_off else False)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}


def _failure(error: RequestError | EngineError) -> bytes:
    status, _ = describe(error)
    return typed_event(anthropic_error(status, error_body(error).error))
