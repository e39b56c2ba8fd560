"""Files and batches as OpenAI's API has them. What is UNSET is left out."""

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
LIVE: tuple[BatchStatus, ...] = ("validating", "in_progress", "finalizing", "cancelling")
Purpose = Literal["batch", "batch_output"]


def new_id(kind: str) -> str:
    """A name as "file-2f1c..."."""
    return f"{kind}{uuid.uuid4().hex}"


def now() -> int:
    """Seconds since 1970."""
    return int(time.time())


class FileObject(Struct):
    """A file that was uploaded, or that a batch has made."""

    id: str
    bytes: int
    filename: str
    purpose: Purpose
    created_at: int
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class FileList(Struct):
    """A page of files; `last_id` is the `after` of the next one."""

    data: list[FileObject]
    has_more: bool
    first_id: str
    last_id: str
    object: Literal["list"] = "list"


class FileDeleted(Struct):
    """That a file is gone."""

    id: str
    deleted: Literal[True] = True
    object: Literal["file"] = "file"


class BatchError(Struct):
    """Why an input file is not run; `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(Struct):
    """The first of what is wrong with an input file."""

    data: list[BatchError]
    object: Literal["list"] = "list"


class RequestCounts(Struct):
    """Rows of a batch; `completed` have an answer, `failed` an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(Struct):
    """A batch; times are seconds since 1970."""

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
    """A page of batches, the newest first."""

    data: list[BatchObject]
    has_more: bool
    first_id: str | UnsetType = UNSET
    last_id: str | UnsetType = UNSET
    object: Literal["list"] = "list"
