"""/v1/files: the files that batches read and write."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import msgspec
from fastapi import APIRouter, Query, Request, Response
from starlette.datastructures import UploadFile
from starlette.responses import FileResponse

from weft.errors import DiskError, RequestError
from weft.serving.api.admin.documentation import returns
from weft.serving.api.middleware.request_context import owner
from weft.serving.api.state import State
from weft.serving.batch.database import is_transient
from weft.serving.batch.objects import (
    MAX_EXPIRY,
    MIN_EXPIRY,
    FileDeleted,
    FileList,
    FileObject,
    new_id,
    now,
)
from weft.serving.batch.service import BatchService

MAX_LISTED = 10_000

router = APIRouter()

_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_DOCUMENTED: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "additionalProperties": False,
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                        _ANCHOR: {"type": "string", "enum": ["created_at"]},
                        _SECONDS: {
                            "type": "integer",
                            "minimum": MIN_EXPIRY,
                            "maximum": MAX_EXPIRY,
                        },
                    },
                    "dependentRequired": {_ANCHOR: [_SECONDS], _SECONDS: [_ANCHOR]},
                }
            }
        },
    },
    "responses": {
        "200": {
            "links": {
                "batch": {
                    "operationId": "create_batch_v1_batches_post",
                    "requestBody": {
                        "input_file_id": "$response.body#/id",
                        "endpoint": "/v1/completions",
                        "completion_window": "24h",
                    },
                }
            }
        }
    },
}


@router.post("/v1/files", **returns(FileObject), openapi_extra=_DOCUMENTED)
async def create_file(request: Request, state: State) -> Response:
    """Upload a file of requests; the response comes after the file is on the disk."""
    try:
        # Starlette keeps at most 1 MiB of a file in memory, and the rest in a temporary file.
        async with request.form(max_files=1, max_fields=8) as form:
            fields = dict(form)
            file, expiry = _checked(fields), _expiry(fields)
            name = Path(file.filename or "").name or "file.jsonl"
            stored = await asyncio.to_thread(
                store_upload, file.file, name, expiry, state.batches, owner()
            )
    except OSError as error:
        if not is_transient(error):
            raise
        raise DiskError(f"an upload: {error.strerror}") from error
    return _json(stored)


def _checked(form: dict[str, Any]) -> UploadFile:
    for name in form:
        if name not in ("file", "purpose", _ANCHOR, _SECONDS):
            raise RequestError(
                f"{name} is not a field that this server knows",
                param=name,
                code="unknown_parameter",
            )
    for name in ("file", "purpose"):
        if name not in form:
            raise RequestError(f"{name} is missing", param=name, code="missing_parameter")
    file, purpose = form["file"], form["purpose"]
    if purpose != "batch":
        shown = purpose[:80] if isinstance(purpose, str) else "a file"
        raise RequestError(
            f"purpose is {shown!r}; this server takes 'batch'",
            param="purpose",
            code="unsupported_value",
        )
    if not isinstance(file, UploadFile):
        raise RequestError("file is not a file", param="file")
    return file


def _expiry(form: dict[str, Any]) -> int | None:
    """Return the file's lifetime in seconds, if the form has one."""
    anchor, seconds = form.get(_ANCHOR), form.get(_SECONDS)
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise RequestError(
            f"{_ANCHOR} must be 'created_at'", param=_ANCHOR, code="unsupported_value"
        )
    digits = seconds if isinstance(seconds, str) and re.fullmatch("[0-9]{1,9}", seconds) else "0"
    if not MIN_EXPIRY <= int(digits) <= MAX_EXPIRY:
        raise RequestError(
            f"{_SECONDS} must be an integer from {MIN_EXPIRY} to {MAX_EXPIRY}", param=_SECONDS
        )
    return int(digits)


def store_upload(
    source: BinaryIO, name: str, expiry: int | None, batches: BatchService, owner: str
) -> FileObject:
    """Copy a request file into the store; DiskError if the disk is full."""
    store, id = batches.store, new_id("file-")
    path = store.upload_path(id)
    try:
        with path.open("xb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
            stored = FileObject(id, file.tell(), name, "batch", now())
            if expiry is not None:
                stored.expires_at = stored.created_at + expiry
        store.add_file(stored, path, owner)
    except (OSError, DiskError):
        path.unlink(missing_ok=True)
        raise
    return stored


@router.get("/v1/files", **returns(FileList))
def list_files(
    state: State,
    purpose: str | None = None,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = MAX_LISTED,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """List uploaded files and the output files of batches."""
    files = state.batches.store.files(
        owner(), purpose=purpose, after=after, limit=limit, newest_first=order == "desc"
    )
    page = files[:limit]
    first, last = (page[0].id, page[-1].id) if page else ("", "")
    return _json(FileList(page, len(files) > limit, first, last))


@router.get("/v1/files/{file_id}", **returns(FileObject))
def retrieve_file(file_id: str, state: State) -> Response:
    """Return one file's description."""
    return _json(state.batches.store.file(file_id, owner()))


@router.get("/v1/files/{file_id}/content", **returns(None, media_type="application/octet-stream"))
def file_content(file_id: str, state: State) -> Response:
    """Return a file's content."""
    path = state.batches.store.content(file_id, owner())
    return FileResponse(path, media_type="application/octet-stream")


@router.delete("/v1/files/{file_id}", **returns(FileDeleted))
def delete_file(file_id: str, state: State) -> Response:
    """Delete a file, unless a batch still needs it."""
    state.batches.store.delete_file(file_id, owner())
    return _json(FileDeleted(file_id))


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
