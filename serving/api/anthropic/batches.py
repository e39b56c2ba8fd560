"""/v1/messages/batches: Messages requests as a batch, beside live requests.

The server stores the requests in an input file for the endpoint /v1/messages. So the batch is an
ordinary batch of /v1/batches, with an id that begins with "msgbatch_".
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec
from fastapi import APIRouter, Query, Response
from msgspec import UNSET, UnsetType
from pydantic import Field, model_validator
from starlette.responses import StreamingResponse

from weft.errors import RequestError
from weft.serving.api.admin.documentation import returns
from weft.serving.api.anthropic import events as shapes
from weft.serving.api.body import Body, JsonRoute
from weft.serving.api.middleware.request_context import owner
from weft.serving.api.openai.batches import WINDOW
from weft.serving.api.openai.files import store_upload
from weft.serving.api.state import State
from weft.serving.batch.objects import LIVE, BatchObject, RequestCounts, new_id, now
from weft.serving.batch.storage import Store

MAX_REQUESTS = 100_000
_KIND = "msgbatch_"
_ENDPOINT = "/v1/messages"
_EXPIRED = "batch_expired"

router = APIRouter(route_class=JsonRoute)


class BatchedRequest(Body):
    """A request in a batch. `params` are checked when it runs."""

    custom_id: str = Field(pattern="^[a-zA-Z0-9_-]{1,64}$")
    params: Annotated[
        dict[str, Any],
        Field(json_schema_extra={"properties": {"stream": {"enum": [False, None]}}}),
    ]


class BatchRequest(Body):
    """POST /v1/messages/batches."""

    requests: list[BatchedRequest] = Field(min_length=1, max_length=MAX_REQUESTS)

    @model_validator(mode="after")
    def _each_can_run(self) -> Self:
        places: dict[str, int] = {}
        for i, request in enumerate(self.requests):
            if (first := places.setdefault(request.custom_id, i)) != i:
                raise RequestError(
                    f"requests[{i}].custom_id is {request.custom_id!r}, as in requests[{first}]; "
                    "each must differ",
                    param=f"requests[{i}].custom_id",
                )
            if (stream := request.params.get("stream")) is not None and stream is not False:
                raise RequestError(
                    f"requests[{i}].params.stream must be false; leave it out",
                    param=f"requests[{i}].params.stream",
                    code="unsupported_value",
                )
        return self


@router.post("/v1/messages/batches", **returns(shapes.MessageBatch, error=shapes.AnthropicError))
async def create_batch(body: BatchRequest, state: State) -> Response:
    """Create a batch."""
    created, key = now(), owner()
    id = new_id(_KIND)

    def store() -> str:
        lines = (msgspec.json.encode(_line(request)) + b"\n" for request in body.requests)
        source = io.BytesIO(b"".join(lines))
        return store_upload(source, f"{id}.jsonl", None, state.batches, key).id

    batch = BatchObject(
        id=id,
        endpoint=_ENDPOINT,
        input_file_id=await asyncio.to_thread(store),
        completion_window="24h",
        created_at=created,
        expires_at=created + WINDOW,
        request_counts=RequestCounts(len(body.requests)),
    )
    await state.batches.create(batch, key)
    return _json(await asyncio.to_thread(_shown, state.batches.store, batch))


def _line(request: BatchedRequest) -> dict[str, Any]:
    return {
        "custom_id": request.custom_id,
        "method": "POST",
        "url": _ENDPOINT,
        "body": request.params,
    }


@router.get("/v1/messages/batches", **returns(shapes.MessageBatchList, error=shapes.AnthropicError))
def list_batches(
    state: State,
    after_id: str | None = None,
    before_id: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
) -> Response:
    """List batches, the newest first."""
    if after_id is not None and before_id is not None:
        raise RequestError("give one of after_id and before_id", param="before_id")
    store = state.batches.store
    found = store.batches(
        owner(),
        after=after_id or before_id,
        limit=limit,
        newest_first=before_id is None,
        kind=_KIND,
    )
    page = [_shown(store, batch) for batch in found[:limit]]
    if before_id is not None:
        page.reverse()
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return _json(shapes.MessageBatchList(page, len(found) > limit, first, last))


@router.get(
    "/v1/messages/batches/{message_batch_id}",
    **returns(shapes.MessageBatch, error=shapes.AnthropicError),
)
def retrieve_batch(message_batch_id: str, state: State) -> Response:
    """Return a batch."""
    store = state.batches.store
    return _json(_shown(store, _find(store, message_batch_id)))


@router.post(
    "/v1/messages/batches/{message_batch_id}/cancel",
    **returns(shapes.MessageBatch, error=shapes.AnthropicError),
)
async def cancel_batch(message_batch_id: str, state: State) -> Response:
    """Cancel a batch; its results keep the answers so far."""
    key = owner()
    await asyncio.to_thread(lambda: _find(state.batches.store, message_batch_id, key))
    batch = await state.batches.cancel(message_batch_id, key)
    return _json(await asyncio.to_thread(_shown, state.batches.store, batch))


@router.delete(
    "/v1/messages/batches/{message_batch_id}",
    **returns(shapes.MessageBatchDeleted, error=shapes.AnthropicError),
)
def delete_batch(message_batch_id: str, state: State) -> Response:
    """Delete an ended batch, with its requests and results."""
    store = state.batches.store
    _find(store, message_batch_id)
    store.delete_batch(message_batch_id, owner())
    return _json(shapes.MessageBatchDeleted(message_batch_id))


@router.get(
    "/v1/messages/batches/{message_batch_id}/results",
    **returns(None, media_type="application/x-jsonl", error=shapes.AnthropicError),
)
def batch_results(message_batch_id: str, state: State) -> Response:
    """Return a result for each request in an ended batch, in any order."""
    store = state.batches.store
    batch = _find(store, message_batch_id)
    if batch.status in LIVE:
        raise RequestError(
            f"batch {batch.id} is {batch.status}; its results are there once it has ended",
            status=409,
        )
    lines = (msgspec.json.encode(result) + b"\n" for result in _results(store, batch))
    return StreamingResponse(lines, media_type="application/x-jsonl")


def _find(store: Store, id: str, key: str | None = None) -> BatchObject:
    """Return a batch with the request's key; RequestError 404 if it has no Messages requests."""
    if not id.startswith(_KIND):
        raise RequestError(f"there is no batch {id!r}", param="message_batch_id", status=404)
    return store.batch(id, owner() if key is None else key)


def _shown(store: Store, batch: BatchObject) -> shapes.MessageBatch:
    shown = shapes.MessageBatch(
        batch.id,
        "canceling" if batch.status == "cancelling" else "in_progress",
        shapes.BatchCounts(processing=batch.request_counts.total),
        _time(batch.created_at),
        _time(batch.expires_at),
    )
    if batch.cancelling_at is not UNSET:
        shown.cancel_initiated_at = _time(batch.cancelling_at)
    if batch.status not in LIVE:
        shown.processing_status = "ended"
        shown.ended_at = _time(getattr(batch, f"{batch.status}_at"))
        shown.results_url = f"/v1/messages/batches/{batch.id}/results"
        shown.request_counts = _counts(store, batch)
    return shown


def _counts(store: Store, batch: BatchObject) -> shapes.BatchCounts:
    """Count the requests in an ended batch."""
    rows = batch.request_counts
    counts = shapes.BatchCounts(succeeded=rows.completed, errored=rows.failed)
    match batch.status:
        case "cancelled":
            counts.canceled = rows.total - rows.completed - rows.failed
        case "failed":
            counts.errored = rows.total - rows.completed
        case "expired":
            errors = _lines(_content(store, batch.error_file_id))
            counts.expired = sum(_is_expired(line) for line in errors)
            counts.errored -= counts.expired
    return counts


class _RowResponse(msgspec.Struct):
    """The response to a row."""

    status_code: int
    body: msgspec.Raw


class _RowError(msgspec.Struct):
    """The reason why a row has no response."""

    code: str
    message: str


class _Line(msgspec.Struct):
    """A line in a batch's output files, as serving/batch/files.py writes it."""

    custom_id: str
    response: _RowResponse | None
    error: _RowError | None


class _Input(msgspec.Struct):
    """The id in a line from a batch's input file."""

    custom_id: str


_outputs = msgspec.json.Decoder(_Line)
_inputs = msgspec.json.Decoder(_Input)


def _content(store: Store, id: str | UnsetType) -> Path | None:
    """Return a file's path; None if there is no file."""
    if isinstance(id, str):
        with suppress(RequestError):  # it was deleted, or has expired
            return store.content(id, owner())
    return None


def _lines(path: Path | None) -> Iterator[_Line]:
    if path is not None:
        with path.open("rb") as file:
            yield from (_outputs.decode(line) for line in file)


def _is_expired(line: _Line) -> bool:
    return line.error is not None and line.error.code == _EXPIRED


def _results(store: Store, batch: BatchObject) -> Iterator[shapes.BatchResult]:
    """Return the results in the output files, then a result for each request without an output.

    Raises:
        RequestError: 404, an output file was deleted.
    """
    ids = [id for id in (batch.output_file_id, batch.error_file_id) if id is not UNSET]
    outputs = [store.content(id, owner()) for id in ids]
    return _result_lines(batch, outputs, _content(store, batch.input_file_id))


def _result_lines(
    batch: BatchObject, outputs: list[Path], inputs: Path | None
) -> Iterator[shapes.BatchResult]:
    done = set[str]()
    for path in outputs:
        for line in _lines(path):
            done.add(line.custom_id)
            yield shapes.BatchResult(line.custom_id, _result(line))
    if batch.status not in ("cancelled", "failed") or inputs is None:
        return
    rest: shapes.Canceled | shapes.Errored = shapes.Canceled()
    if batch.status == "failed":
        reasons = [] if batch.errors is UNSET else [error.message for error in batch.errors.data]
        detail = shapes.AnthropicErrorDetail("api_error", "; ".join(reasons))
        rest = shapes.Errored(shapes.AnthropicError(detail))
    with inputs.open("rb") as file:
        for row in file:
            if (id := _inputs.decode(row).custom_id) not in done:
                yield shapes.BatchResult(id, rest)


def _result(line: _Line) -> shapes.Succeeded | shapes.Errored | shapes.Expired:
    if line.response is not None:
        if line.response.status_code == 200:
            return shapes.Succeeded(line.response.body)
        return shapes.Errored(line.response.body)
    if _is_expired(line):
        return shapes.Expired()
    assert line.error is not None
    detail = shapes.AnthropicErrorDetail("api_error", line.error.message)
    detail.details = shapes.ErrorDetails(line.error.code)
    return shapes.Errored(shapes.AnthropicError(detail))


def _time(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
