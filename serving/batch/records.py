"""What a server's batch has on the disk: its input, its journal, and in the end its files."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from weft.errors import ConfigError, RequestError, WeftError
from weft.serving.batch.inputs import Inputs
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


def inputs_of(store: Store, batch: BatchObject) -> Inputs:
    """The input file; ConfigError when it is gone."""
    try:
        path = store.content(batch.input_file_id, ANYONE)
    except RequestError:
        path = None
    if path is None or not path.is_file():
        raise ConfigError(f"input file {batch.input_file_id} is gone")
    return Inputs([path])


def journal_of(store: Store, batch: BatchObject) -> Journal:
    """The journal, made if need be; raises as `Journal`."""
    folder = store.batch_folder(batch.id)
    return Journal(folder / "state", [folder / "output", folder / "errors"])


def opened(store: Store, batch: BatchObject) -> Journal:
    """The journal, with its outputs as it says.

    Raises:
        ConfigError: one of them is damaged.
        DiskError: the disk is full, or fails.
    """
    journal = journal_of(store, batch)
    try:
        journal.recover()
        journal.open()
    except WeftError:
        journal.close()
        raise
    return journal


def opened_to_go_on(store: Store, batch: BatchObject) -> Journal:
    """The same of a batch that was validated; ConfigError when its input is not what it was."""
    journal = opened(store, batch)
    try:
        if journal.settings is None:
            raise ConfigError("the state of the batch is gone")
        digests = journal.settings["inputs"]
        if batch.status == "in_progress" and inputs_of(store, batch).digests() != digests:
            raise ConfigError(f"input file {batch.input_file_id} is not what it was at first")
    except WeftError:
        journal.close()
        raise
    return journal


class Ending(Struct, frozen=True):
    """The last status of a batch, and why it has failed, if it has."""

    status: Literal["completed", "cancelled", "expired", "failed"]
    failure: BatchError | None = None


def end(store: Store, id: str, journal: Journal | None, ending: Ending) -> None:
    """End a batch, with the outputs that its journal has.

    Args:
        store: that has the batch.
        id: of the batch.
        journal: open; None when it cannot be read, and there are no outputs.
        ending: one that is to be cancelled is, unless it has failed.

    Raises:
        DiskError: the disk is full, or fails.
    """
    rows = [0, 0] if journal is None else journal.counts()
    counts = RequestCounts(0 if journal is None else journal.total, *rows)

    def finalizing(batch: BatchObject) -> BatchObject:
        if batch.status != "in_progress" or ending.status != "completed":
            return batch
        return replace(batch, status="finalizing", finalizing_at=now(), request_counts=counts)

    store.change(id, finalizing, ANYONE)
    files: list[tuple[FileObject, Path]] = []
    ids: list[str | UnsetType] = [UNSET, UNSET]
    for which, path in enumerate([] if journal is None else journal.paths):
        if rows[which]:
            name = f"{id}_{path.name}.jsonl"
            file = FileObject(new_id("file-"), path.stat().st_size, name, "batch_output", now())
            files.append((file, path))
            ids[which] = file.id

    def last(batch: BatchObject) -> BatchObject:
        status, failure = ending.status, ending.failure
        if batch.status == "cancelling" and failure is None:
            status = "cancelled"
        return replace(
            batch,
            status=status,
            request_counts=batch.request_counts if journal is None else counts,
            output_file_id=ids[0],
            error_file_id=ids[1],
            errors=UNSET if failure is None else BatchErrors([failure]),
            **{f"{status}_at": now()},
        )

    store.change(id, last, ANYONE, files)
