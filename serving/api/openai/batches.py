"""/v1/batches: files of requests, which run beside live requests."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query, Response
from pydantic import Field

from weft.serving.api.admin.documentation import returns
from weft.serving.api.body import Body, JsonRoute
from weft.serving.api.middleware.request_context import owner
from weft.serving.api.state import State
from weft.serving.batch.objects import (
    MAX_EXPIRY,
    MIN_EXPIRY,
    BatchList,
    BatchObject,
    ExpiresAfter,
    new_id,
    now,
)

WINDOW = 24 * 3600  # seconds until a batch expires

router = APIRouter(route_class=JsonRoute)

Key = Annotated[str, Field(max_length=64)]
Text = Annotated[str, Field(max_length=512)]


class OutputExpiry(Body):
    """When the output files are removed, counted from their creation."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_EXPIRY, le=MAX_EXPIRY)


class BatchRequest(Body):
    """POST /v1/batches: each line of the file is a request to the endpoint."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages"]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[Key, Text], Field(max_length=16)] | None = None
    output_expires_after: OutputExpiry | None = None


@router.post("/v1/batches", **returns(BatchObject))
async def create_batch(body: BatchRequest, state: State) -> Response:
    """Create a batch; its status soon shows whether the file is valid."""
    created = now()
    batch = BatchObject(
        id=new_id("batch_"),
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        created_at=created,
        expires_at=created + WINDOW,
        metadata=body.metadata,
    )
    if body.output_expires_after is not None:
        batch.output_expires_after = ExpiresAfter(body.output_expires_after.seconds)
    await state.batches.create(batch, owner())
    return _json(batch)


@router.get("/v1/batches", **returns(BatchList))
def list_batches(
    state: State,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Response:
    """List batches, the newest first."""
    service = state.batches
    batches = service.store.batches(owner(), after=after, limit=limit)
    page = BatchList(
        [service.with_progress(batch) for batch in batches[:limit]], len(batches) > limit
    )
    if page.data:
        page.first_id, page.last_id = page.data[0].id, page.data[-1].id
    return _json(page)


@router.get("/v1/batches/{batch_id}", **returns(BatchObject))
def retrieve_batch(batch_id: str, state: State) -> Response:
    """Return a batch, with the number of its rows that are done."""
    return _json(state.batches.with_progress(state.batches.store.batch(batch_id, owner())))


@router.post("/v1/batches/{batch_id}/cancel", **returns(BatchObject))
async def cancel_batch(batch_id: str, state: State) -> Response:
    """Cancel a batch; its output file keeps the answers so far."""
    return _json(await state.batches.cancel(batch_id, owner()))


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
