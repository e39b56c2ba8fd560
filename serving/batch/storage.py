"""The files and batches of a server, in a folder:

    weft.db               what there is, as OpenAI's API shows it
    files/ID              an uploaded file
    batches/ID/state      a batch's journal, until it has come to its end
    batches/ID/output     its answers; and errors

A file is in the database once it is whole, so whatever ends the server leaves at most a piece
that nobody knows of, which the next start removes: a file is deleted there before its content.

Files and batches belong to an owner: the digest of the API key that made them, or "" where there
are no keys. For everybody else they are not there.

What a server's batch has on the disk: its input, its journal, and in the end its files.
"""

from __future__ import annotations

import logging
import re
import shutil
import sqlite3
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from weft.errors import ConfigError, RequestError, WeftError
from weft.serving.batch.database import Database, of_file
from weft.serving.batch.files import Inputs
from weft.serving.batch.journal import Journal
from weft.serving.batch.objects import (
    LIVE,
    BatchError,
    BatchErrors,
    BatchObject,
    BatchStatus,
    FileObject,
    RequestCounts,
    new_id,
    now,
)

ANYONE = None  # as an owner: whoever it is
_APPLICATION = 0x77656673  # "wefs"
_SCHEMA = """
CREATE TABLE file (
  number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL,
  purpose TEXT NOT NULL, path TEXT NOT NULL, body BLOB NOT NULL
);
CREATE TABLE batch (
  number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL,
  status TEXT NOT NULL, body BLOB NOT NULL
);
"""
_OWNED = "(? IS NULL OR owner = ?)"
_OURS = re.compile("file-[0-9a-f]{32}")  # by objects.new_id; others may have files there, too

logger = logging.getLogger(__name__)


class Store:
    """See the module's text. Any thread may call.

    Raises:
        ConfigError: the folder cannot be used, or another server does.
        DiskError: the disk is full, or fails; so do the methods.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            for name in ("files", "batches"):
                (folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--state-dir {folder}: {error.strerror}") from None
        self._db = Database(folder / "weft.db", _SCHEMA, _APPLICATION)
        self._sweep()

    def _sweep(self) -> None:
        """Remove what a server that was killed has left in the middle of something."""
        known = {path for (path,) in self._db.all("SELECT path FROM file")}
        for path in (self.folder / "files").iterdir():
            if _OURS.fullmatch(path.name) and str(path.relative_to(self.folder)) not in known:
                logger.warning("%s is a piece of an upload; it is removed", path)
                path.unlink()
        for folder in (self.folder / "batches").iterdir():
            if self._found("batch", folder.name, ANYONE):
                self._sweep_batch(self.batch(folder.name, ANYONE), folder)

    def _sweep_batch(self, batch: BatchObject, folder: Path) -> None:
        for id, name in ((batch.output_file_id, "output"), (batch.error_file_id, "errors")):
            if isinstance(id, str) and not self._found("file", id, ANYONE):  # it was deleted
                (folder / name).unlink(missing_ok=True)
        if batch.status not in (*LIVE, "failed"):
            self.clean(batch.id)

    def close(self) -> None:
        """Let go of it."""
        self._db.close()

    def _found(self, kind: str, id: str, owner: str | None) -> Any:
        """The columns of a file or batch, None if the owner has none of this id."""
        columns = "body, path" if kind == "file" else "body, owner"
        query = f"SELECT {columns} FROM {kind} WHERE id = ? AND {_OWNED}"
        return next(iter(self._db.all(query, id, owner, owner)), None)

    def _get(self, kind: str, id: str, owner: str | None) -> Any:
        if (found := self._found(kind, id, owner)) is None:
            message = f"there is no {kind} {id!r}"
            raise RequestError(message, param=f"{kind}_id", status=404)
        return found

    # Files.

    def upload_path(self, id: str) -> Path:
        """Where the content of a new file goes."""
        return self.folder / "files" / id

    def add_file(self, file: FileObject, path: Path, owner: str) -> None:
        """Have a file whose content is there."""
        with self._db.transaction() as db:
            self._add_file(db, file, path, owner)

    def _add_file(self, db: sqlite3.Connection, file: FileObject, path: Path, owner: str) -> None:
        row = (file.id, owner, file.purpose, str(path.relative_to(self.folder)))
        db.execute(
            "INSERT INTO file (id, owner, purpose, path, body) VALUES (?, ?, ?, ?, ?)",
            (*row, msgspec.json.encode(file)),
        )

    def file(self, id: str, owner: str | None) -> FileObject:
        """A file by its id; RequestError 404 when the owner has none."""
        return msgspec.json.decode(self._get("file", id, owner)[0], type=FileObject)

    def content(self, id: str, owner: str | None) -> Path:
        """Where a file's content is; RequestError 404 when the owner has no such file."""
        return self.folder / str(self._get("file", id, owner)[1])

    def files(
        self, owner: str, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> list[FileObject]:
        """A page of files, and one more if there is; RequestError when `after` is unknown."""
        order, beyond = ("DESC", "<") if newest_first else ("ASC", ">")
        rows = self._db.all(
            f"SELECT body FROM file WHERE owner = ? AND (? IS NULL OR number {beyond} ?) "
            f"AND (? IS NULL OR purpose = ?) ORDER BY number {order} LIMIT ?",
            owner,
            *[self._number("file", after, owner)] * 2,
            *[purpose] * 2,
            limit + 1,
        )
        return [msgspec.json.decode(body, type=FileObject) for (body,) in rows]

    def delete_file(self, id: str, owner: str) -> None:
        """Forget a file, and remove its content.

        Raises:
            RequestError: 404, the owner has none; 409, a batch still reads it.
        """
        with self._db.transaction() as db:
            path = self.content(id, owner)
            for batch in self._with_status(LIVE):
                if batch.input_file_id == id:
                    raise RequestError(
                        f"batch {batch.id} reads file {id} and is {batch.status}; cancel it first",
                        param="file_id",
                        status=409,
                    )
            db.execute("DELETE FROM file WHERE id = ?", (id,))
        path.unlink(missing_ok=True)  # a crash before this: see `_sweep`

    # Batches.

    def batch_folder(self, id: str) -> Path:
        """What a batch has on the disk; made if need be."""
        folder = self.folder / "batches" / id
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise of_file(folder, error) from error
        return folder

    def add_batch(self, batch: BatchObject, owner: str) -> None:
        """Have a new batch; RequestError when the owner has no such file for its input."""
        with self._db.transaction() as db:
            self._check_input(batch.input_file_id, owner)
            db.execute(
                "INSERT INTO batch (id, owner, status, body) VALUES (?, ?, ?, ?)",
                (batch.id, owner, batch.status, msgspec.json.encode(batch)),
            )

    def _check_input(self, id: str, owner: str) -> None:
        try:
            purpose = self.file(id, owner).purpose
        except RequestError as error:
            raise RequestError(error.message, param="input_file_id") from None
        if purpose != "batch":
            message = f"file {id} has the purpose {purpose!r}; it must be 'batch'"
            raise RequestError(message, param="input_file_id")

    def batch(self, id: str, owner: str | None) -> BatchObject:
        """A batch by its id; RequestError 404 when the owner has none."""
        return msgspec.json.decode(self._get("batch", id, owner)[0], type=BatchObject)

    def batches(self, owner: str, *, after: str | None, limit: int) -> list[BatchObject]:
        """A page of batches, newest first, and one more if there is; RequestError as `files`."""
        rows = self._db.all(
            "SELECT body FROM batch WHERE owner = ? AND (? IS NULL OR number < ?) "
            "ORDER BY number DESC LIMIT ?",
            owner,
            *[self._number("batch", after, owner)] * 2,
            limit + 1,
        )
        return [msgspec.json.decode(body, type=BatchObject) for (body,) in rows]

    def next(self, statuses: Sequence[BatchStatus], but: Collection[str]) -> BatchObject | None:
        """The oldest batch that has the first of these statuses, else the next; some left out."""
        for status in statuses:
            query = "SELECT id FROM batch WHERE status = ? ORDER BY number"
            for (id,) in self._db.all(query, status):
                if id not in but:
                    return self.batch(id, ANYONE)
        return None

    def change(
        self,
        id: str,
        how: Callable[[BatchObject], BatchObject],
        owner: str | None,
        files: Iterable[tuple[FileObject, Path]] = (),
    ) -> BatchObject:
        """Change a batch, and add files of its owner with their contents' paths, all at once.

        Args:
            id: of the batch.
            how: what it is afterwards, of what it is; may raise to leave it so.
            owner: of the batch.
            files: that it has made.

        Raises:
            RequestError: 404, the owner has none.
        """
        with self._db.transaction() as db:
            body, batch_owner = self._get("batch", id, owner)
            batch = how(msgspec.json.decode(body, type=BatchObject))
            db.execute(
                "UPDATE batch SET status = ?, body = ? WHERE id = ?",
                (batch.status, msgspec.json.encode(batch), id),
            )
            for file, path in files:
                self._add_file(db, file, path, batch_owner)
        return batch

    def clean(self, id: str) -> None:
        """Remove what an ended batch no longer needs: its state, and files without a line."""
        folder = self.folder / "batches" / id
        for path in folder.glob("state*"):
            path.unlink()
        for path in (folder / "output", folder / "errors"):
            if path.exists() and path.stat().st_size == 0:
                path.unlink()
        if folder.exists() and not any(folder.iterdir()):
            shutil.rmtree(folder)

    def _with_status(self, statuses: Sequence[BatchStatus]) -> list[BatchObject]:
        marks = ", ".join("?" * len(statuses))
        rows = self._db.all(f"SELECT body FROM batch WHERE status IN ({marks})", *statuses)
        return [msgspec.json.decode(body, type=BatchObject) for (body,) in rows]

    def _number(self, kind: str, id: str | None, owner: str) -> int | None:
        if id is None:
            return None
        found = self._db.all(f"SELECT number FROM {kind} WHERE id = ? AND owner = ?", id, owner)
        if not found:
            raise RequestError(f"there is no {kind} {id!r} to go on after", param="after")
        return int(found[0][0])


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
