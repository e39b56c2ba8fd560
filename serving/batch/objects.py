"""Files and batches, as OpenAI's API defines them. A field that is UNSET is left out."""

from __future__ import annotations

import time
import uuid
from typing import Literal

from msgspec import UNSET, Struct, UnsetType, field

BatchStatus = Literal[
    "validating",
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "cancelling",
    "cancelled",
    "expired",
]
MIN_EXPIRY, MAX_EXPIRY = 3600, 30 * 24 * 3600
"""Seconds after which files may be removed, as in OpenAI's API."""
LIVE: tuple[BatchStatus, ...] = ("validating", "in_progress", "finalizing", "cancelling")
Purpose = Literal["batch", "batch_output"]


def new_id(kind: str) -> str:
    """Make an id such as "file-2f1c..."."""
    return f"{kind}{uuid.uuid4().hex}"


def now() -> int:
    """Return the seconds since 1970."""
    return int(time.time())


class ExpiresAfter(Struct):
    """When a file is removed: this many seconds after it was created."""

    seconds: int
    anchor: Literal["created_at"] = "created_at"


class FileObject(Struct):
    """An uploaded file, or a batch's output; `expires_at` in seconds since 1970."""

    id: str
    bytes: int
    filename: str
    purpose: Purpose
    created_at: int
    expires_at: int | UnsetType = UNSET
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class FileList(Struct):
    """A page of files; pass `last_id` as `after` to get the next page."""

    data: list[FileObject]
    has_more: bool
    first_id: str
    last_id: str
    object: Literal["list"] = "list"


class FileDeleted(Struct):
    """The reply to a deletion."""

    id: str
    deleted: Literal[True] = True
    object: Literal["file"] = "file"


class BatchError(Struct):
    """A reason why an input file cannot run; `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(Struct):
    """The first errors in an input file."""

    data: list[BatchError]
    object: Literal["list"] = "list"


class RequestCounts(Struct):
    """Numbers of rows: in total, completed with an answer, and failed with an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(Struct):
    """A batch; times are in seconds since 1970."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: BatchStatus = "validating"
    object: Literal["batch"] = "batch"
    request_counts: RequestCounts = field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | UnsetType = UNSET
    errors: BatchErrors | UnsetType = UNSET
    output_file_id: str | UnsetType = UNSET
    error_file_id: str | UnsetType = UNSET
    in_progress_at: int | UnsetType = UNSET
    finalizing_at: int | UnsetType = UNSET
    completed_at: int | UnsetType = UNSET
    failed_at: int | UnsetType = UNSET
    expired_at: int | UnsetType = UNSET
    cancelling_at: int | UnsetType = UNSET
    cancelled_at: int | UnsetType = UNSET


class BatchList(Struct):
    """A page of batches, newest first."""

    data: list[BatchObject]
    has_more: bool
    first_id: str | UnsetType = UNSET
    last_id: str | UnsetType = UNSET
    object: Literal["list"] = "list"
