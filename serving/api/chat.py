"""POST /v1/chat/completions: the next turn of a conversation.

The model's text is the message's content as it stands, also when tools were offered: a call in
it is the client's to read.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from weft.serving.api.answers import Answers, finish_reason
from weft.serving.api.connection import unless_gone
from weft.serving.api.documentation import returns
from weft.serving.api.logprobs import chat_logprobs
from weft.serving.api.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatMessage,
    new_id,
    now,
)
from weft.serving.api.schemas import ChatRequest, Message
from weft.serving.api.sse import EventStream, event
from weft.serving.api.state import State
from weft.serving.sampling_params import SamplingParams
from weft.serving.tokenizer import Tokenizer

router = APIRouter()


@router.post("/v1/chat/completions", **returns(ChatCompletion, streams=True))
async def create_chat_completion(request: Request, body: ChatRequest, state: State) -> Response:
    """Answer a conversation, with the model's chat template."""
    engine = state.ready_engine(body.model)
    params = _params(body)
    prompt = await asyncio.to_thread(_prompt, body, engine.tokenizer)
    answers = Answers(state, engine, [prompt], params, body.priority or 0)
    writer = _Writer(body, engine.tokenizer, answers)
    if body.stream:
        return await EventStream.start(request, writer.events())
    completion = await unless_gone(request.receive, writer.whole())
    return Response(msgspec.json.encode(completion), media_type="application/json")


def _params(body: ChatRequest) -> SamplingParams:
    more: dict[str, Any] = {}
    if body.max_completion_tokens is not None:
        more["max_tokens"] = body.max_completion_tokens
    if body.logprobs:
        more["logprobs"] = body.top_logprobs or 0
    return body.sampling_params(**more)


def _prompt(body: ChatRequest, tokenizer: Tokenizer) -> list[int]:
    """The conversation's token ids. With `tool_choice: "none"` the model sees no tools."""
    tools = None
    if body.tools and body.tool_choice != "none":
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
    return tokenizer.apply_chat_template(
        [_template_message(message, tokenizer) for message in body.messages], tools
    )


def _template_message(message: Message, tokenizer: Tokenizer) -> dict[str, Any]:
    """A message as chat templates expect it: its text in one piece, and arguments as objects."""
    seen = message.model_dump(exclude_none=True)
    if message.role == "developer" and not _knows_developer(tokenizer):
        seen["role"] = "system"
    # Templates test it without asking whether it is there.
    seen["content"] = None
    if message.content is not None:
        seen["content"] = "\n".join(part.text for part in message.content)
    for call in seen.get("tool_calls", ()):
        function = call["function"]
        function["arguments"] = _object(function["arguments"])
    return seen


def _knows_developer(tokenizer: Tokenizer) -> bool:
    return any("developer" in source for source in tokenizer.chat_templates.values())


def _object(arguments: str) -> Any:
    """The object that a model wrote; what is no JSON stays text, as the model wrote that too."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


class _Writer:
    """Writes the answers to one request in OpenAI's shape."""

    def __init__(self, body: ChatRequest, tokenizer: Tokenizer, answers: Answers) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self._answers = answers
        self._id = new_id("chatcmpl")
        self._created = now()

    async def whole(self) -> ChatCompletion:
        """All answers in one response."""
        choices = [
            ChatChoice(
                index=i,
                message=ChatMessage(answer.text),
                finish_reason=answer.finish_reason,
                logprobs=chat_logprobs(self._tokenizer, answer.logprobs)
                if self._body.logprobs
                else None,
            )
            for i, answer in enumerate(await self._answers.collect())
        ]
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._body.model,
            choices=choices,
            usage=self._answers.usage(),
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """For each answer its role, then its pieces, then the reason of its end."""
        chunk = ChatCompletionChunk(
            id=self._id, created=self._created, model=self._body.model, choices=[]
        )
        if self._body.include_usage:
            chunk.usage = None
        new = set(range(self._answers.count))
        async with aclosing(self._answers.stream()) as pieces:
            async for i, delta in pieces:
                reason = finish_reason(delta)  # raises while the status can still be an error
                if i in new:
                    new.remove(i)
                    role = ChatDelta(role="assistant", content="", refusal=None)
                    chunk.choices = [ChatChunkChoice(i, role)]
                    yield event(chunk)
                # Also without text: clients measure the time between tokens.
                if delta.text or delta.logprobs or reason is None:
                    choice = ChatChunkChoice(i, ChatDelta(content=delta.text))
                    if self._body.logprobs:
                        choice.logprobs = chat_logprobs(self._tokenizer, delta.logprobs or [])
                    chunk.choices = [choice]
                    yield event(chunk)
                if reason is not None:
                    chunk.choices = [ChatChunkChoice(i, ChatDelta(), reason)]
                    yield event(chunk)
        if self._body.include_usage:
            chunk.choices, chunk.usage = [], self._answers.usage()
            yield event(chunk)
