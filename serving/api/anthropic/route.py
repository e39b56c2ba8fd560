"""POST /v1/messages: a conversation in Anthropic's form."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic_core import from_json

from weft.errors import EngineError, RequestError
from weft.serving.api.admin.documentation import returns
from weft.serving.api.anthropic import events as shapes
from weft.serving.api.anthropic import requests as asked
from weft.serving.api.anthropic.errors import anthropic_error
from weft.serving.api.body import JsonRoute
from weft.serving.api.conversation import MAX_COUNTED, Conversation
from weft.serving.api.errors import describe, error_body
from weft.serving.api.generation import Generation
from weft.serving.api.openai.replies import FinishReason, new_id
from weft.serving.api.openai.requests import (
    FunctionCall,
    FunctionName,
    Message,
    TextPart,
    ToolCall,
    ToolMode,
)
from weft.serving.api.parsing.parser import AnswerFormat
from weft.serving.api.parsing.pieces import Answer, Arguments, CallStart, Content, Piece, Reasoning
from weft.serving.api.state import State
from weft.serving.api.streaming import EventStream, cancel_on_disconnect, typed_event

_TOOL_MODES: dict[str, ToolMode] = {"auto": "auto", "any": "required", "none": "none"}


router = APIRouter(route_class=JsonRoute)


@router.post(
    "/v1/messages", **returns(shapes.MessageOut, streams=True, error=shapes.AnthropicError)
)
async def create_message(request: Request, body: asked.MessagesRequest, state: State) -> Response:
    """Answer a conversation in Anthropic's form."""
    engine = state.ready_engine(body.model)
    generation = await Generation.of_chat(
        state, engine, lambda: (_conversation(body), body.sampling_params()), body.priority or 0
    )
    writer = _Writer(body.model, generation, state.answer_format(engine))
    if body.stream:
        return await EventStream.start(request, writer.stream(), failure=_failure, done=b"")
    message = await cancel_on_disconnect(request.receive, writer.whole())
    return Response(msgspec.json.encode(message), media_type="application/json")


@router.post("/v1/messages/count_tokens", **returns(shapes.TokenCount, error=shapes.AnthropicError))
async def count_tokens(body: asked.CountRequest, state: State) -> Response:
    """Count the tokens in a conversation."""
    engine = state.ready_engine(body.model)

    def counted() -> int:
        most = max(engine.info.max_model_len, MAX_COUNTED)
        prompt = _conversation(body).prompt(engine.tokenizer, most=most)
        return len(engine.tokenizer.encode(prompt, add_special_tokens=False, most=most))

    count = await state.aside(counted)
    return Response(msgspec.json.encode(shapes.TokenCount(count)), media_type="application/json")


def _conversation(body: asked.CountRequest) -> Conversation:
    """Convert the request to OpenAI's form."""
    messages = []
    if body.system:
        parts = [TextPart(type="text", text=block.text) for block in body.system]
        messages.append(Message(role="system", content=parts))
    for message in body.messages:
        messages += _user(message) if message.role == "user" else [_assistant(message)]
    *_, last = body.messages
    continued = last.role == "assistant" and any(block.text for block in last.content)
    if last.role == "assistant" and not continued:
        messages.pop()  # an empty message cannot be continued
    choice = body.tool_choice or asked.AnthropicToolChoice(type="auto")
    return Conversation(
        messages,
        body.tools or (),
        _TOOL_MODES[choice.type] if choice.name is None else FunctionName(name=choice.name),
        not choice.disable_parallel_tool_use,
        continued,
    )


def _user(message: asked.AnthropicMessage) -> Iterator[Message]:
    """Yield a message for each result of a call, and one for the other text."""
    texts = []
    for block in message.content:
        if block.type == "tool_result":
            results = [part.text for part in block.content or ()]
            if block.is_error:  # chat templates do not know this field
                results.insert(0, "Error:")
            parts = [TextPart(type="text", text=text) for text in results or [""]]
            yield Message(role="tool", tool_call_id=block.tool_use_id, content=parts)
        else:
            texts.append(TextPart(type="text", text=block.text or ""))
    if texts or not message.content:
        yield Message(role="user", content=texts)


def _assistant(message: asked.AnthropicMessage) -> Message:
    texts = [TextPart(type="text", text=b.text or "") for b in message.content if b.type == "text"]
    calls = [
        ToolCall(
            id=block.id or "",
            function=FunctionCall(
                name=block.name or "", arguments=msgspec.json.encode(block.input).decode()
            ),
        )
        for block in message.content
        if block.type == "tool_use"
    ]
    thoughts = [block.thinking or "" for block in message.content if block.type == "thinking"]
    return Message(
        role="assistant",
        content=texts or None,
        tool_calls=calls or None,
        reasoning_content="\n".join(thoughts) or None,
    )


class _Writer:
    """Writes an answer in Anthropic's shape, as events or as the complete message."""

    def __init__(self, model: str, generation: Generation, form: AnswerFormat) -> None:
        self._generation = generation
        self._format = form
        self._message = shapes.MessageOut(new_id("msg", "_"), model, [], self._usage())
        self._begun = False
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
        if isinstance(content[-1], shapes.ToolUseOut):
            content[-1].input = _input(self._arguments, cut_off=cut_off)
            self._arguments = ""
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
        return shapes.MessagesUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)


def _input(arguments: str, *, cut_off: bool) -> dict[str, Any]:
    """Parse a call's input; if the answer was cut off, parse the beginning."""
    try:
        value = from_json(arguments, allow_partial="trailing-strings" if cut_off else False)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}


def _failure(error: RequestError | EngineError) -> bytes:
    status, _ = describe(error)
    return typed_event(anthropic_error(status, error_body(error).error.message))
