"""How a server's batch comes to its end: its outputs become files."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from weft.serving.batch.journal import Journal
from weft.serving.batch.objects import (
    BatchError,
    BatchErrors,
    BatchObject,
    FileObject,
    RequestCounts,
    new_id,
    now,
)
from weft.serving.batch.store import ANYONE, Store


class Ending(Struct, frozen=True):
    """The last status of a batch, and why it has failed, if it has."""

    status: Literal["completed", "cancelled", "expired", "failed"]
    failure: BatchError | None = None


def ended(store: Store, id: str, journal: Journal | None, ending: Ending) -> None:
    """End a batch, with the outputs that its journal has.

    Args:
        store: that has the batch.
        id: of the batch.
        journal: open; None when it cannot be read, and there are no outputs.
        ending: unless it is to be cancelled.

    Raises:
        DiskError: the disk is full.
    """
    rows = [0, 0] if journal is None else journal.counts()
    paths = [] if journal is None else journal.paths
    counts = RequestCounts(0 if journal is None else journal.total, *rows)

    def finalizing(batch: BatchObject) -> BatchObject:
        if batch.status != "in_progress" or ending.status != "completed":
            return batch
        return replace(batch, status="finalizing", finalizing_at=now(), request_counts=counts)

    store.change(id, finalizing, ANYONE)
    files: list[tuple[FileObject, Path]] = []
    ids: list[str | UnsetType] = [UNSET, UNSET]
    for which, path in enumerate(paths):
        if rows[which]:
            name = f"{id}_{path.name}.jsonl"
            file = FileObject(new_id("file-"), path.stat().st_size, name, "batch_output", now())
            files.append((file, path))
            ids[which] = file.id

    def last(batch: BatchObject) -> BatchObject:
        status = ending.status
        if batch.status == "cancelling" and status != "failed":
            status = "cancelled"
        failure = ending.failure
        return replace(
            batch,
            status=status,
            request_counts=counts if journal is not None else batch.request_counts,
            output_file_id=ids[0],
            error_file_id=ids[1],
            errors=UNSET if failure is None else BatchErrors([failure]),
            **{f"{status}_at": now()},
        )

    store.change(id, last, ANYONE, files)
