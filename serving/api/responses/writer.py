"""Writes an answer as a response, whole or as events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from weft.errors import EngineError, RequestError
from weft.serving.api.errors import describe, error_body
from weft.serving.api.generation import Generation
from weft.serving.api.logprobs import chat_logprobs
from weft.serving.api.openai.replies import ChatTokenLogprob, FinishReason, new_id, now
from weft.serving.api.parsing.parser import AnswerFormat
from weft.serving.api.parsing.pieces import Answer, Arguments, CallStart, Content, Piece, Reasoning
from weft.serving.api.responses import events as shapes
from weft.serving.api.responses import requests as asked
from weft.serving.api.responses.items import seal
from weft.serving.api.responses.store import ResponseStore, Stored
from weft.serving.api.responses.tool_input import ToolInput
from weft.serving.api.responses.tools import NamedTool, echoed
from weft.serving.api.responses.turn import Turn
from weft.serving.api.streaming import typed_event

if TYPE_CHECKING:
    from weft.serving.engine.protocol import TokenLogprob

T = TypeVar("T")


class Writer:
    """Writes an answer as events, or as the complete response.

    Args:
        body: the request.
        model: the model's name.
        generation: runs the answer.
        form: the model's formats.
        turn: the request in its conversation.
        store: where the response is kept; None if it is not.
    """

    def __init__(
        self,
        body: asked.ResponsesRequest,
        model: str,
        generation: Generation,
        form: AnswerFormat,
        turn: Turn,
        store: ResponseStore | None,
    ) -> None:
        self._generation = generation
        self._format = form
        self._turn = turn
        self._store = store
        self._seals = body.seals_thoughts
        self._scored = body.scored
        self._input = ToolInput()
        self._sequence = 0
        self._begun = False
        params = generation.params.chosen(generation.defaults)
        self._response = shapes.ResponseObject(
            id=new_id("resp", "_"),
            created_at=now(),
            model=model,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            reasoning={
                "effort": None if body.reasoning is None else body.reasoning.effort,
                "summary": None,
            },
            store=store is not None,
            temperature=params.temperature,
            text={
                "format": {"type": "text"}
                if body.text_format is None
                else body.text_format.model_dump(exclude_none=True, by_alias=True),
                "verbosity": body.verbosity.level,
            },
            tool_choice=(
                body.tool_choice.model_dump(exclude_none=True)
                if isinstance(body.tool_choice, NamedTool)
                else body.tool_choice or "auto"
            ),
            tools=[echoed(tool) for tool in body.tools or ()],
            top_logprobs=body.top_logprobs or 0,
            top_p=params.top_p,
            truncation=body.truncation or "disabled",
            user=msgspec.UNSET if body.user is None else body.user,
        )

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the events, encoded."""
        async with aclosing(self._generation.stream()) as parts:
            async for part in parts:
                if part.finish_reason is None:
                    events = self._encoded(part)
                else:
                    events = await self._aside(self._encoded, part)
                    if self._store is not None:
                        self._keep(await self._aside(msgspec.json.encode, self._response))
                for event in events:
                    yield event

    def failure(self, error: RequestError | EngineError) -> bytes:
        """Encode a failed answer's last event."""
        status, _ = describe(error)
        self._response.status = "failed"
        self._response.error = shapes.ResponseError(_code(status), error_body(error).error.message)
        return self._numbered(shapes.Failed(response=self._response))

    async def whole(self) -> bytes:
        """Return the response as JSON, once it is complete."""
        async with aclosing(self._generation.stream()) as parts:
            async for part in parts:
                for _ in self._events(part):
                    pass
        body = await self._aside(msgspec.json.encode, self._response)
        self._keep(body)
        return body

    async def _aside(self, work: Callable[..., T], *arguments: Any) -> T:
        """Call a function, in a thread if there may be very many log probabilities."""
        if self._scored:
            return await asyncio.to_thread(work, *arguments)
        return work(*arguments)

    def _keep(self, body: bytes) -> None:
        """Store the complete response, given as JSON, if it is to be stored."""
        if self._store is not None:
            ids = (*self._turn.ids, *(item.id for item in self._response.output))
            stored = Stored(body, self._turn.items)
            self._store.put(self._turn.owner, self._response.id, stored, ids)

    def _encoded(self, part: Answer) -> list[bytes]:
        """Add a partial answer to the response; returns its events, encoded."""
        return [self._numbered(event) for event in self._events(part)]

    def _numbered(self, event: shapes.ResponseEvent) -> bytes:
        event.sequence_number = self._sequence
        self._sequence += 1
        return typed_event(event)

    def _events(self, part: Answer) -> Iterator[shapes.ResponseEvent]:
        """Add a partial answer to the response, and yield its events."""
        if not self._begun:
            self._begun = True
            yield shapes.Created(response=self._response)
            yield shapes.InProgress(response=self._response)
        for piece in part.pieces:
            yield from self._add(piece)
        if part.finish_reason is not None:
            yield from self._end(part.finish_reason)

    def _add(self, piece: Piece) -> Iterator[shapes.ResponseEvent]:
        """Add a partial answer to the response, and yield its events."""
        last = self._response.output[-1] if self._response.output else None
        match piece:
            case CallStart(name):
                yield from self._begin(self._call(name))
            case Arguments(text) if isinstance(last, shapes.OutputCustomCall):
                yield from self._add_input(last, self._input.push(text))
            case Arguments(text):
                assert isinstance(last, shapes.OutputCall)
                last.arguments += text
                yield shapes.ArgumentsDelta(delta=text, **self._place())
            case Content(text, scores):
                logprobs = self._logprobs(scores)
                if not isinstance(last, shapes.OutputMessage):
                    last = shapes.OutputMessage(new_id("msg", "_"), [])
                    yield from self._begin(last)
                    yield shapes.PartAdded(part=shapes.OutputText(""), **self._place())
                    last.content.append(shapes.OutputText(""))
                last.content[0].text += text
                last.content[0].logprobs += logprobs
                yield shapes.TextDelta(delta=text, logprobs=logprobs, **self._place())
            case Reasoning(text):
                if not isinstance(last, shapes.ReasoningItem):
                    last = shapes.ReasoningItem(new_id("rs", "_"), [])
                    yield from self._begin(last)
                    yield shapes.PartAdded(part=shapes.ReasoningText(""), **self._place())
                    last.content.append(shapes.ReasoningText(""))
                last.content[0].text += text
                yield shapes.ReasoningDelta(delta=text, **self._place())

    def _logprobs(self, scores: Sequence[TokenLogprob]) -> list[ChatTokenLogprob]:
        if not scores:
            return []
        return chat_logprobs(self._format.tokenizer, scores).content or []

    def _call(self, name: str) -> shapes.OutputCall | shapes.OutputCustomCall:
        called, call_id = self._turn.toolbox.called(name), self._format.new_call_id()
        group = msgspec.UNSET if called.namespace is None else called.namespace
        if not called.takes_text:
            return shapes.OutputCall(new_id("fc", "_"), call_id, called.name, namespace=group)
        self._input = ToolInput()
        return shapes.OutputCustomCall(new_id("ctc", "_"), call_id, called.name, namespace=group)

    def _add_input(
        self, call: shapes.OutputCustomCall, text: str
    ) -> Iterator[shapes.ResponseEvent]:
        if text:
            call.input += text
            yield shapes.InputDelta(delta=text, **self._place())

    def _place(self) -> dict[str, Any]:
        """Return the last item's identifying fields."""
        output = self._response.output
        return {"item_id": output[-1].id, "output_index": len(output) - 1}

    def _begin(self, item: shapes.OutputItem) -> Iterator[shapes.ResponseEvent]:
        """End the last item, and begin another."""
        yield from self._end_item("completed")
        self._response.output.append(item)
        yield shapes.ItemAdded(item=item, output_index=len(self._response.output) - 1)

    def _end_item(self, status: shapes.Progress) -> Iterator[shapes.ResponseEvent]:
        if not self._response.output:
            return
        item, place = self._response.output[-1], self._place()
        if isinstance(item, shapes.OutputCustomCall):
            yield from self._add_input(item, self._input.flush())
        item.status = status
        match item:
            case shapes.OutputCustomCall():
                yield shapes.InputDone(input=item.input, **place)
            case shapes.OutputCall():
                yield shapes.ArgumentsDone(name=item.name, arguments=item.arguments, **place)
            case shapes.OutputMessage():
                part = item.content[0]
                yield shapes.TextDone(text=part.text, logprobs=part.logprobs, **place)
                yield shapes.PartDone(part=part, **place)
            case shapes.ReasoningItem():
                if self._seals:
                    item.encrypted_content = seal(item.content[0].text)
                yield shapes.ReasoningDone(text=item.content[0].text, **place)
                yield shapes.PartDone(part=item.content[0], **place)
        yield shapes.ItemDone(item=item, output_index=place["output_index"])

    def _end(self, reason: FinishReason) -> Iterator[shapes.ResponseEvent]:
        cut_off = reason == "length"
        yield from self._end_item("incomplete" if cut_off else "completed")
        response = self._response
        response.usage = self._usage()
        if cut_off:
            response.status, response.incomplete_details = "incomplete", shapes.IncompleteDetails()
        else:
            response.status, response.completed_at = "completed", now()
        last = shapes.Incomplete if cut_off else shapes.Completed
        yield last(response=response)

    def _usage(self) -> shapes.ResponseUsage:
        usage = self._generation.usage()
        return shapes.ResponseUsage(
            usage.prompt_tokens,
            shapes.InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            shapes.OutputTokensDetails(self._generation.reasoning_tokens),
            usage.total_tokens,
        )


def _code(status: int) -> str:
    """Return OpenAI's nearest error code for a failed response."""
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_exceeded"
    return "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_prompt"
