"""The files and batches of a server, in a folder:

    weft.db               what there is, as OpenAI's API shows it
    files/ID              an uploaded file
    batches/ID/state      a batch's journal, until it has come to its end
    batches/ID/output     its answers; and errors

A file is in the database once it is whole, so whatever ends the server leaves at most a piece
that nobody knows of.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from weft.errors import ConfigError, RequestError
from weft.serving.batch.database import Database
from weft.serving.batch.objects import BatchObject, FileObject

T = TypeVar("T", BatchObject, FileObject)

_APPLICATION = 0x77656673  # "wefs"
_SCHEMA = """
CREATE TABLE file (
  number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, purpose TEXT NOT NULL,
  path TEXT NOT NULL, body BLOB NOT NULL
);
CREATE TABLE batch (
  number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, status TEXT NOT NULL,
  body BLOB NOT NULL
);
"""
_LIVE = ("validating", "in_progress", "finalizing", "cancelling")


class Store:
    """See the module's text. Any thread may call.

    Raises:
        ConfigError: the folder cannot be used, or another server does.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            for name in ("files", "batches"):
                (folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--state-dir {folder}: {error.strerror}") from None
        self._db = Database(folder / "weft.db", _SCHEMA, _APPLICATION)

    def close(self) -> None:
        """Let go of it."""
        self._db.close()

    # Files.

    def upload_path(self, id: str) -> Path:
        """Where the content of a new file goes."""
        return self.folder / "files" / id

    def add_file(self, file: FileObject, path: Path) -> None:
        """Have a file whose content is there; WeftError when the disk is full."""
        self.update([], [(file, path)])

    def file(self, id: str) -> FileObject:
        """A file by its id; RequestError 404 when there is none."""
        found = self._db.all("SELECT body FROM file WHERE id = ?", id)
        if not found:
            raise missing("file", id)
        return msgspec.json.decode(found[0][0], type=FileObject)

    def content(self, id: str) -> Path:
        """Where a file's content is; RequestError 404 when there is no such file."""
        found = self._db.all("SELECT path FROM file WHERE id = ?", id)
        if not found:
            raise missing("file", id)
        return self.folder / str(found[0][0])

    def files(
        self, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> list[FileObject]:
        """A page of files, and one more if there is; RequestError when `after` is unknown."""
        order, beyond = ("DESC", "<") if newest_first else ("ASC", ">")
        rows = self._db.all(
            f"SELECT body FROM file WHERE (? IS NULL OR number {beyond} ?) "
            f"AND (? IS NULL OR purpose = ?) ORDER BY number {order} LIMIT ?",
            *[self._number("file", after)] * 2,
            *[purpose] * 2,
            limit + 1,
        )
        return [msgspec.json.decode(body, type=FileObject) for (body,) in rows]

    def delete_file(self, id: str) -> None:
        """Forget a file, and remove its content.

        Raises:
            RequestError: 404, there is none; 409, a batch still reads it.
        """
        path = self.content(id)
        for batch in self.unfinished():
            if batch.input_file_id == id:
                raise RequestError(
                    f"batch {batch.id} reads file {id} and is {batch.status}; cancel it first",
                    param="file_id",
                    status=409,
                )
        with self._db.transaction() as db:
            db.execute("DELETE FROM file WHERE id = ?", (id,))
        path.unlink(missing_ok=True)

    # Batches.

    def batch_folder(self, id: str) -> Path:
        """What a batch has on the disk."""
        return self.folder / "batches" / id

    def batch(self, id: str) -> BatchObject:
        """A batch by its id; RequestError 404 when there is none."""
        found = self._db.all("SELECT body FROM batch WHERE id = ?", id)
        if not found:
            raise missing("batch", id)
        return msgspec.json.decode(found[0][0], type=BatchObject)

    def batches(self, *, after: str | None, limit: int) -> list[BatchObject]:
        """A page of batches, newest first, and one more if there is; RequestError as `files`."""
        rows = self._db.all(
            "SELECT body FROM batch WHERE ? IS NULL OR number < ? ORDER BY number DESC LIMIT ?",
            *[self._number("batch", after)] * 2,
            limit + 1,
        )
        return [msgspec.json.decode(body, type=BatchObject) for (body,) in rows]

    def unfinished(self) -> list[BatchObject]:
        """Batches that have not come to an end, the oldest first."""
        rows = self._db.all(
            "SELECT body FROM batch WHERE status IN (?, ?, ?, ?) ORDER BY number", *_LIVE
        )
        return [msgspec.json.decode(body, type=BatchObject) for (body,) in rows]

    def update(
        self, batches: Iterable[BatchObject], files: Iterable[tuple[FileObject, Path]] = ()
    ) -> None:
        """Write batches, and add files with their contents' paths, all at once.

        Raises:
            WeftError: the disk is full.
        """
        with self._db.transaction() as db:
            for batch in batches:
                db.execute(
                    "INSERT INTO batch (id, status, body) VALUES (?, ?, ?) "
                    "ON CONFLICT (id) DO UPDATE SET status = excluded.status, body = excluded.body",
                    (batch.id, batch.status, msgspec.json.encode(batch)),
                )
            for file, path in files:
                row = (file.id, file.purpose, str(path.relative_to(self.folder)))
                db.execute(
                    "INSERT INTO file (id, purpose, path, body) VALUES (?, ?, ?, ?)",
                    (*row, msgspec.json.encode(file)),
                )

    def clean(self, id: str) -> None:
        """Remove what an ended batch no longer needs: its state, and files without a line."""
        folder = self.batch_folder(id)
        for path in folder.glob("state*"):
            path.unlink()
        for path in folder.glob("*"):
            if path.stat().st_size == 0:
                path.unlink()
        if folder.exists() and not any(folder.iterdir()):
            shutil.rmtree(folder)

    def _number(self, kind: str, id: str | None) -> int | None:
        if id is None:
            return None
        found = self._db.all(f"SELECT number FROM {kind} WHERE id = ?", id)
        if not found:
            raise RequestError(f"there is no {kind} {id!r} to go on after", param="after")
        return int(found[0][0])


def missing(kind: str, id: str) -> RequestError:
    """The error for an id that is nobody's."""
    return RequestError(f"there is no {kind} {id!r}", param=f"{kind}_id", status=404)
