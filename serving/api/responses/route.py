"""/v1/responses: OpenAI's newer conversation API, with stored responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from fastapi import APIRouter, Query, Request, Response
from pydantic import WithJsonSchema

from weft.errors import RequestError
from weft.serving.api.admin.documentation import returns
from weft.serving.api.body import JsonRoute
from weft.serving.api.conversation import MAX_COUNTED, Conversation, prompt_from
from weft.serving.api.generation import Generation
from weft.serving.api.middleware.request_context import owner
from weft.serving.api.prompts import LONGEST
from weft.serving.api.responses import events as shapes
from weft.serving.api.responses import requests as asked
from weft.serving.api.responses.turn import Turn
from weft.serving.api.responses.writer import Writer
from weft.serving.api.state import State
from weft.serving.api.streaming import EventStream, cancel_on_disconnect

if TYPE_CHECKING:
    from weft.serving.engine.engine import AsyncEngine
    from weft.serving.engine.sampling_params import SamplingParams

MAX_LISTED = 100

_NoStream = Annotated[bool | None, WithJsonSchema({"type": "boolean", "const": False})]

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/responses", **returns(shapes.ResponseObject, streams=True))
async def create_response(request: Request, body: asked.ResponsesRequest, state: State) -> Response:
    """Answer a conversation in OpenAI's Responses format."""
    engine = state.ready_engine(body.model)
    turn = Turn(body, state.responses, owner())

    def asked_for() -> tuple[Conversation, SamplingParams]:
        params = body.sampling_params()
        return turn.conversation(_fits(engine, params.max_tokens or 1)), params

    generation = await Generation.of_chat(
        state, engine, asked_for, body.priority or 0, field="input", scored=body.scored
    )
    keeps = body.store is not False and state.responses.keeps
    store = state.responses if keeps else None
    writer = Writer(body, state.model, generation, state.answer_format(engine), turn, store)
    if body.stream:
        return await EventStream.start(request, writer.stream(), failure=writer.failure, done=b"")
    whole = await cancel_on_disconnect(request.receive, writer.whole())
    return Response(whole, media_type="application/json")


@router.post("/v1/responses/input_tokens", **returns(shapes.InputTokens))
async def count_input_tokens(body: asked.InputTokensRequest, state: State) -> Response:
    """Count a request's prompt tokens."""
    engine = state.ready_engine(body.model)
    turn = Turn(body, state.responses, owner())

    def counted() -> int:
        most = max(engine.info.max_model_len, MAX_COUNTED)
        return _count(engine, turn.conversation(_fits(engine, 1)), most)

    with prompt_from("input"):
        return _json(shapes.InputTokens(await state.aside(counted)))


@router.get("/v1/responses/{response_id}", **returns(shapes.ResponseObject))
async def retrieve_response(response_id: str, state: State, stream: _NoStream = None) -> Response:
    """Return a stored response."""
    if stream:
        raise RequestError(
            "stream is true; a stored response is returned whole, so leave stream out",
            param="stream",
            code="unsupported_value",
        )
    stored = state.responses.get(owner(), response_id)
    return Response(stored.body, media_type="application/json")


@router.delete("/v1/responses/{response_id}", **returns(shapes.ResponseDeleted))
async def delete_response(response_id: str, state: State) -> Response:
    """Delete a stored response."""
    state.responses.delete(owner(), response_id)
    return _json(shapes.ResponseDeleted(response_id))


@router.post("/v1/responses/{response_id}/cancel", **returns(shapes.ResponseObject))
async def cancel_response(response_id: str, state: State) -> Response:
    """Refuse to cancel: a stored response is complete."""
    state.responses.get(owner(), response_id)
    raise RequestError(
        "the response is complete, because this server has no background responses; to stop an "
        "answer, close its connection",
        param="response_id",
        code="unsupported_operation",
    )


@router.get("/v1/responses/{response_id}/input_items", **returns(shapes.ResponseItems))
async def list_input_items(
    response_id: str,
    state: State,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """List the response's input items, newest first unless `order` is "asc"."""
    items = await state.aside(state.responses.get(owner(), response_id).input)
    if order == "desc":
        items.reverse()
    if after is not None:
        places = [i for i, item in enumerate(items) if item["id"] == after]
        if not places:
            raise RequestError(
                f"after is {after!r}, which is no item of the response", param="after", status=404
            )
        items = items[places[0] + 1 :]
    page = items[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return _json(shapes.ResponseItems(page, first, last, len(items) > limit))


def _count(engine: AsyncEngine, conversation: Conversation, most: int) -> int:
    """Return a prompt's token count; refuse a text with far more than `most` tokens."""
    prompt = conversation.prompt(engine.tokenizer, most=most)
    return len(engine.tokenizer.encode(prompt, add_special_tokens=False, most=most))


def _fits(engine: AsyncEngine, answer: int) -> Callable[[Conversation], bool]:
    """Return a function to test whether a prompt leaves room for an answer."""
    context = engine.info.max_model_len
    return lambda conversation: _count(engine, conversation, context * LONGEST) + answer <= context


def _json(reply: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(reply), media_type="application/json")
