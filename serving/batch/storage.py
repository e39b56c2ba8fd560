"""A server's files and batches, in a folder:

    weft.db               the objects that OpenAI's API shows
    files/ID              an uploaded file
    batches/ID/state      a batch's journal, until the batch ends
    batches/ID/output     its answers; and errors

A file enters the database after its content is complete, and leaves it before its content is
deleted. So a crash leaves at most a file that the database does not know. The next start removes
such files.

Each file and batch has an owner: the digest of the API key that made it, or "" without keys. Other
owners cannot see it.

The functions below `Store` open a batch's input and journal, and end a batch.
"""

from __future__ import annotations

import logging
import re
import shutil
import sqlite3
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from weft.errors import ConfigError, RequestError, WeftError
from weft.serving.batch.database import Database, file_error
from weft.serving.batch.files import Inputs
from weft.serving.batch.journal import Journal
from weft.serving.batch.objects import (
    LIVE,
    BatchError,
    BatchErrors,
    BatchObject,
    BatchStatus,
    ExpiresAfter,
    FileObject,
    RequestCounts,
    new_id,
    now,
)

ANYONE = None  # in place of an owner: any owner
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
# Only the server itself finds expired files; see `remove_expired`.
_EXPIRY = "json_extract(CAST(body AS TEXT), '$.expires_at')"
_LASTS = f"(? IS NULL OR {_EXPIRY} IS NULL OR {_EXPIRY} > ?)"
_OWNED = "(? IS NULL OR owner = ?)"
_OURS = re.compile("file-[0-9a-f]{32}")  # from objects.new_id; other files are not ours

_file = msgspec.json.Decoder(FileObject)
_batch = msgspec.json.Decoder(BatchObject)

logger = logging.getLogger(__name__)


class Store:
    """A server's files and batches; see the module's text. Any thread may call.

    Raises:
        ConfigError: the folder cannot be used, or another server uses it.
        DiskError: the disk is full or fails; the methods raise it, too.
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
        """Remove incomplete files that a killed server left."""
        known = {path for (path,) in self._db.all("SELECT path FROM file")}
        for path in (self.folder / "files").iterdir():
            if _OURS.fullmatch(path.name) and str(path.relative_to(self.folder)) not in known:
                logger.warning("removed the incomplete upload %s", path)
                path.unlink()
        for folder in (self.folder / "batches").iterdir():
            if self._find("batch", folder.name, ANYONE):
                self._sweep_batch(self.batch(folder.name, ANYONE), folder)

    def _sweep_batch(self, batch: BatchObject, folder: Path) -> None:
        for id, name in ((batch.output_file_id, "output"), (batch.error_file_id, "errors")):
            if isinstance(id, str) and not self._find("file", id, ANYONE):  # the file was deleted
                (folder / name).unlink(missing_ok=True)
        if batch.status not in (*LIVE, "failed"):
            self.clean(batch.id)

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def _find(self, kind: str, id: str, owner: str | None) -> Any:
        """Return a file's or batch's columns; None if the owner has no such object."""
        columns = "body, path" if kind == "file" else "body, owner"
        query = f"SELECT {columns} FROM {kind} WHERE id = ? AND {_OWNED}"
        values: list[Any] = [id, owner, owner]
        if kind == "file":
            query, values = f"{query} AND {_LASTS}", [*values, owner, now()]
        return next(iter(self._db.all(query, *values)), None)

    def _get(self, kind: str, id: str, owner: str | None) -> Any:
        if (found := self._find(kind, id, owner)) is None:
            message = f"there is no {kind} {id!r}"
            raise RequestError(message, param=f"{kind}_id", status=404)
        return found

    # Files.

    def upload_path(self, id: str) -> Path:
        """Return the path for a new file's content."""
        return self.folder / "files" / id

    def add_file(self, file: FileObject, path: Path, owner: str) -> None:
        """Add a file whose content is complete."""
        with self._db.transaction() as db:
            self._add_file(db, file, path, owner)

    def _add_file(self, db: sqlite3.Connection, file: FileObject, path: Path, owner: str) -> None:
        row = (file.id, owner, file.purpose, str(path.relative_to(self.folder)))
        db.execute(
            "INSERT INTO file (id, owner, purpose, path, body) VALUES (?, ?, ?, ?, ?)",
            (*row, msgspec.json.encode(file)),
        )

    def file(self, id: str, owner: str | None) -> FileObject:
        """Return a file by its id; RequestError 404 if the owner has no such file."""
        return _file.decode(self._get("file", id, owner)[0])

    def content(self, id: str, owner: str | None) -> Path:
        """Return the path of a file's content; RequestError 404 if the owner has no such file."""
        return self.folder / str(self._get("file", id, owner)[1])

    def files(
        self, owner: str, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> list[FileObject]:
        """Return a page of files, and one more if any is left; RequestError for a bad `after`."""
        order, beyond = ("DESC", "<") if newest_first else ("ASC", ">")
        rows = self._db.all(
            f"SELECT body FROM file WHERE owner = ? AND {_LASTS} "
            f"AND (? IS NULL OR number {beyond} ?) "
            f"AND (? IS NULL OR purpose = ?) ORDER BY number {order} LIMIT ?",
            *(owner, owner, now()),
            *[self._number("file", after, owner)] * 2,
            *[purpose] * 2,
            limit + 1,
        )
        return [_file.decode(body) for (body,) in rows]

    def delete_file(self, id: str, owner: str | None) -> None:
        """Delete a file and its content.

        Raises:
            RequestError: 404, the owner has no such file; 409, a batch still reads it.
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
        path.unlink(missing_ok=True)  # after a crash, `_sweep` does it

    def remove_expired(self) -> None:
        """Delete the expired files, unless a batch still reads them."""
        for (id,) in self._db.all(f"SELECT id FROM file WHERE {_EXPIRY} <= ?", now()):
            with suppress(RequestError):
                self.delete_file(id, ANYONE)

    # Batches.

    def batch_folder(self, id: str) -> Path:
        """Return a batch's folder; create it if missing."""
        folder = self.folder / "batches" / id
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise file_error(folder, error) from error
        return folder

    def add_batch(self, batch: BatchObject, owner: str) -> None:
        """Add a new batch; RequestError if the owner has no such input file."""
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
        """Return a batch by its id; RequestError 404 if the owner has no such batch."""
        return _batch.decode(self._get("batch", id, owner)[0])

    def batches(
        self,
        owner: str,
        *,
        after: str | None,
        limit: int,
        newest_first: bool = True,
        kind: str = "",
    ) -> list[BatchObject]:
        """Return a page of batches with ids that begin with `kind`; else the same as `files`."""
        order, beyond = ("DESC", "<") if newest_first else ("ASC", ">")
        rows = self._db.all(
            f"SELECT body FROM batch WHERE owner = ? AND (? IS NULL OR number {beyond} ?) "
            f"AND substr(id, 1, length(?)) = ? ORDER BY number {order} LIMIT ?",
            owner,
            *[self._number("batch", after, owner)] * 2,
            *[kind] * 2,
            limit + 1,
        )
        return [_batch.decode(body) for (body,) in rows]

    def delete_batch(self, id: str, owner: str) -> None:
        """Delete a batch with its input and output files.

        Raises:
            RequestError: 404, the owner has no such batch; 409, it has not ended.
        """
        batch = self.batch(id, owner)
        if batch.status in LIVE:
            raise RequestError(f"batch {id} is {batch.status}; cancel it first", status=409)
        for file in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
            if isinstance(file, str):
                with suppress(RequestError):  # it was deleted, or another batch reads it
                    self.delete_file(file, owner)
        with self._db.transaction() as db:
            db.execute("DELETE FROM batch WHERE id = ?", (id,))
        shutil.rmtree(self.folder / "batches" / id, ignore_errors=True)

    def next(self, statuses: Sequence[BatchStatus], skip: Collection[str]) -> BatchObject | None:
        """Return the oldest batch with the first status, else with the next status, and so on.

        Args:
            statuses: statuses, in order of preference.
            skip: ids of batches to ignore.
        """
        for status in statuses:
            query = "SELECT id FROM batch WHERE status = ? ORDER BY number"
            for (id,) in self._db.all(query, status):
                if id not in skip:
                    return self.batch(id, ANYONE)
        return None

    def change(
        self,
        id: str,
        update: Callable[[BatchObject], BatchObject],
        owner: str | None,
        files: Iterable[tuple[FileObject, Path]] = (),
    ) -> BatchObject:
        """Change a batch, and add its output files, in one transaction.

        Args:
            id: id of the batch.
            update: makes the new batch from the old one; if it raises, nothing changes.
            owner: owner of the batch.
            files: output files to add for the same owner, with the paths of their contents.

        Raises:
            RequestError: 404, the owner has no such batch.
        """
        with self._db.transaction() as db:
            body, batch_owner = self._get("batch", id, owner)
            batch = update(_batch.decode(body))
            db.execute(
                "UPDATE batch SET status = ?, body = ? WHERE id = ?",
                (batch.status, msgspec.json.encode(batch), id),
            )
            for file, path in files:
                self._add_file(db, file, path, batch_owner)
        return batch

    def clean(self, id: str) -> None:
        """Remove what an ended batch no longer needs: its state, and empty outputs."""
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
        return [_batch.decode(body) for (body,) in rows]

    def _number(self, kind: str, id: str | None, owner: str) -> int | None:
        if id is None:
            return None
        found = self._db.all(f"SELECT number FROM {kind} WHERE id = ? AND owner = ?", id, owner)
        if not found:
            raise RequestError(f"there is no {kind} {id!r}", param="after")
        return int(found[0][0])


def open_inputs(store: Store, batch: BatchObject) -> Inputs:
    """Return a batch's input file; ConfigError if it is gone."""
    try:
        path = store.content(batch.input_file_id, ANYONE)
    except RequestError:
        path = None
    if path is None or not path.is_file():
        raise ConfigError(f"input file {batch.input_file_id} is gone")
    return Inputs([path])


def make_journal(store: Store, batch: BatchObject) -> Journal:
    """Open a batch's journal, and create it if missing; raises as `Journal`."""
    folder = store.batch_folder(batch.id)
    return Journal(folder / "state", [folder / "output", folder / "errors"])


def open_journal(store: Store, batch: BatchObject) -> Journal:
    """Open a batch's journal and output files, and recover from a crash.

    Raises:
        ConfigError: a file is damaged.
        DiskError: the disk is full or fails.
    """
    journal = make_journal(store, batch)
    try:
        journal.recover()
        journal.open()
    except WeftError:
        journal.close()
        raise
    return journal


def reopen_journal(store: Store, batch: BatchObject) -> Journal:
    """Open the journal of a validated batch; ConfigError if the batch's input has changed."""
    journal = open_journal(store, batch)
    try:
        if journal.settings is None:
            raise ConfigError("the state of the batch is gone")
        digests = journal.settings["inputs"]
        if batch.status == "in_progress" and open_inputs(store, batch).digests() != digests:
            raise ConfigError(f"input file {batch.input_file_id} has changed since the batch began")
    except WeftError:
        journal.close()
        raise
    return journal


class Ending(Struct, frozen=True):
    """The final status of a batch, and the reason if it failed."""

    status: Literal["completed", "cancelled", "expired", "failed"]
    failure: BatchError | None = None


def end_batch(store: Store, id: str, journal: Journal | None, ending: Ending) -> None:
    """End a batch, and add the outputs that its journal records.

    Args:
        store: store with the batch.
        id: id of the batch.
        journal: open journal; None if it cannot be read, and there are no outputs.
        ending: final status; a batch that is being cancelled becomes cancelled, unless it failed.

    Raises:
        DiskError: the disk is full or fails.
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
            if isinstance(after := store.batch(id, ANYONE).output_expires_after, ExpiresAfter):
                file.expires_at = file.created_at + after.seconds
            files.append((file, path))
            ids[which] = file.id

    def last(batch: BatchObject) -> BatchObject:
        status, failure = ending.status, ending.failure
        if batch.status == "cancelling" and failure is None:
            status = "cancelled"
        return replace(
            batch,
            status=status,
            request_counts=batch.request_counts if journal is None else _all_of(batch, counts),
            output_file_id=ids[0],
            error_file_id=ids[1],
            errors=UNSET if failure is None else BatchErrors([failure]),
            **{f"{status}_at": now()},
        )

    store.change(id, last, ANYONE, files)


def _all_of(batch: BatchObject, counts: RequestCounts) -> RequestCounts:
    """Return a journal's counts. After an early cancellation it may not know all rows."""
    return replace(counts, total=max(counts.total, batch.request_counts.total))
