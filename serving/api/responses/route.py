"""POST /v1/responses: OpenAI's newer form of a conversation. Nothing is stored."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from weft.errors import EngineError, RequestError
from weft.serving.api.admin.documentation import returns
from weft.serving.api.body import JsonRoute
from weft.serving.api.conversation import Conversation
from weft.serving.api.errors import describe, error_body
from weft.serving.api.generation import Generation
from weft.serving.api.openai.replies import FinishReason, new_id, now
from weft.serving.api.openai.requests import FunctionCall, Message, TextPart, ToolCall
from weft.serving.api.parsing.parser import AnswerFormat
from weft.serving.api.parsing.pieces import Answer, Arguments, CallStart, Content, Piece, Reasoning
from weft.serving.api.responses import events as shapes
from weft.serving.api.responses import requests as asked
from weft.serving.api.state import State
from weft.serving.api.streaming import EventStream, cancel_on_disconnect, typed_event

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/responses", **returns(shapes.ResponseObject, streams=True))
async def create_response(request: Request, body: asked.ResponsesRequest, state: State) -> Response:
    """Answer a conversation in the form of OpenAI's Responses; nothing is stored."""
    engine = state.ready_engine(body.model)
    generation = await Generation.of_chat(
        state, engine, lambda: (_conversation(body), body.sampling_params()), body.priority or 0
    )
    writer = _Writer(body, generation, state.answer_format(engine))
    if body.stream:
        return await EventStream.start(request, writer.stream(), failure=writer.failure, done=b"")
    response = await cancel_on_disconnect(request.receive, writer.whole())
    return Response(msgspec.json.encode(response), media_type="application/json")


def _conversation(body: asked.ResponsesRequest) -> Conversation:
    """Convert the request to the form of a chat."""
    messages = []
    if body.instructions is not None:
        messages.append(Message(role="system", content=[_text(body.instructions)]))
    for item in body.input:
        _append(messages, item)
    return Conversation(
        messages,
        body.tools or (),
        body.tool_choice or "auto",
        body.parallel_tool_calls is not False,
    )


def _append(messages: list[Message], item: asked.InputItem) -> None:
    """Add an item; an assistant's thought, text and calls in one turn become one message."""
    parts = [_text(part.text) for part in item.content or ()]
    if item.type == "message" and item.role is not None and item.role != "assistant":
        messages.append(Message(role=item.role, content=parts))
        return
    if item.type == "function_call_output":
        output = [_text(part.text) for part in item.output or ()]
        messages.append(Message(role="tool", tool_call_id=item.call_id, content=output))
        return
    if not messages or messages[-1].role != "assistant":
        messages.append(Message(role="assistant"))
    turn = messages[-1]
    if item.type == "reasoning":
        thought = "\n".join(part.text for part in item.content or item.summary or ())
        turn.reasoning_content = "\n".join(filter(None, (turn.reasoning_content, thought)))
    elif item.type == "message":
        turn.content = turn.content or []
        turn.content += parts
    else:
        function = FunctionCall(name=item.name or "", arguments=item.arguments or "")
        call = ToolCall(id=item.call_id or "", function=function)
        turn.tool_calls = turn.tool_calls or []
        turn.tool_calls.append(call)


def _text(text: str) -> TextPart:
    return TextPart(type="text", text=text)


class _Writer:
    """Writes an answer as events, or as the complete response."""

    def __init__(
        self, body: asked.ResponsesRequest, generation: Generation, form: AnswerFormat
    ) -> None:
        self._generation = generation
        self._format = form
        self._sequence = 0
        self._begun = False
        choice = body.tool_choice or "auto"
        params = generation.params.chosen(generation.defaults)
        self._response = shapes.ResponseObject(
            id=new_id("resp", "_"),
            created_at=now(),
            model=body.model,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            temperature=params.temperature,
            text={
                "format": {"type": "text"}
                if body.text_format is None
                else body.text_format.model_dump(exclude_none=True, by_alias=True)
            },
            tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
            tools=[
                {"strict": None, "parameters": None} | tool.model_dump(exclude_none=True)
                for tool in body.tools or ()
            ],
            top_p=params.top_p,
            user=msgspec.UNSET if body.user is None else body.user,
        )

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the events, encoded."""
        async with aclosing(self._generation.stream()) as parts:
            async for part in parts:
                for event in self._events(part):
                    yield self._numbered(event)

    def failure(self, error: RequestError | EngineError) -> bytes:
        """Encode the last event of a failed answer."""
        status, _ = describe(error)
        self._response.status = "failed"
        self._response.error = shapes.ResponseError(_code(status), error_body(error).error.message)
        return self._numbered(shapes.Failed(response=self._response))

    async def whole(self) -> shapes.ResponseObject:
        """Return the response once it is complete."""
        for answer in await self._generation.collect():
            for _ in self._events(answer):
                pass
        return self._response

    def _numbered(self, event: shapes.ResponseEvent) -> bytes:
        event.sequence_number = self._sequence
        self._sequence += 1
        return typed_event(event)

    def _events(self, part: Answer) -> Iterator[shapes.ResponseEvent]:
        """Add a part of the answer to the response, and yield its events."""
        if not self._begun:
            self._begun = True
            yield shapes.Created(response=self._response)
            yield shapes.InProgress(response=self._response)
        for piece in part.pieces:
            yield from self._add(piece)
        if part.finish_reason is not None:
            yield from self._end(part.finish_reason)

    def _add(self, piece: Piece) -> Iterator[shapes.ResponseEvent]:
        """Add a piece to the response, and yield its events."""
        last = self._response.output[-1] if self._response.output else None
        match piece:
            case CallStart(name):
                call_id = self._format.new_call_id()
                yield from self._begin(shapes.OutputCall(new_id("fc", "_"), call_id, name))
            case Arguments(text):
                assert isinstance(last, shapes.OutputCall)
                last.arguments += text
                yield shapes.ArgumentsDelta(delta=text, **self._place())
            case Content(text):
                if not isinstance(last, shapes.OutputMessage):
                    last = shapes.OutputMessage(new_id("msg", "_"), [])
                    yield from self._begin(last)
                    yield shapes.PartAdded(part=shapes.OutputText(""), **self._place())
                    last.content.append(shapes.OutputText(""))
                last.content[0].text += text
                yield shapes.TextDelta(delta=text, **self._place())
            case Reasoning(text):
                if not isinstance(last, shapes.ReasoningItem):
                    last = shapes.ReasoningItem(new_id("rs", "_"), [])
                    yield from self._begin(last)
                    yield shapes.PartAdded(part=shapes.ReasoningText(""), **self._place())
                    last.content.append(shapes.ReasoningText(""))
                last.content[0].text += text
                yield shapes.ReasoningDelta(delta=text, **self._place())

    def _place(self) -> dict[str, Any]:
        """Return the fields that identify the last item."""
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
        item.status = status
        match item:
            case shapes.OutputCall():
                yield shapes.ArgumentsDone(name=item.name, arguments=item.arguments, **place)
            case shapes.OutputMessage():
                yield shapes.TextDone(text=item.content[0].text, **place)
                yield shapes.PartDone(part=item.content[0], **place)
            case shapes.ReasoningItem():
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
            yield shapes.Incomplete(response=response)
        else:
            response.status, response.completed_at = "completed", now()
            yield shapes.Completed(response=response)

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
