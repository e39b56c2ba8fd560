"""A SQLite file that one process uses at a time; every change is on the disk when a call returns.

Disk errors become weft's errors: DiskError if a retry may work, else ConfigError.
"""

from __future__ import annotations

import errno
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, DiskError, WeftError

_VERSION = 2  # of the schemas


class Database:
    """The file, locked until `close` or the end of the process. Any thread may call.

    Args:
        path: location of the file; it is created if missing.
        schema: SQL statements that create the tables.
        application: number in the file's header, which identifies the kind of file.

    Attributes:
        lock: lock for all calls; take it to combine a call with other changes.

    Raises:
        ConfigError: the file cannot be opened, has other contents, or another process has it.
        DiskError: the disk is full or fails; all methods raise it, too.
    """

    def __init__(self, path: Path, schema: str, application: int) -> None:
        self.path = path
        self.lock = threading.RLock()
        try:
            self._db = _connect(path, schema, application)
        except sqlite3.Error as error:
            raise database_error(path, error) from error

    def all(self, query: str, *values: object) -> list[Any]:
        """Return the rows that a query finds."""
        with self.lock:
            try:
                return self._db.execute(query, values).fetchall()
            except sqlite3.Error as error:
                raise database_error(self.path, error) from error

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Apply all changes of the `with` block, or none.

        Raises:
            DiskError: the disk is full or fails.
            ConfigError: the file is damaged, or a change violates a constraint of its tables.
        """
        with self.lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db
                self._db.execute("COMMIT")
            except BaseException as error:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error):
                    raise database_error(self.path, error) from error
                raise

    def close(self) -> None:
        """Close the file. May be called again."""
        with self.lock:
            self._db.close()


def _connect(path: Path, schema: str, application: int) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
    try:
        # The lock is held until `close`. SQLite then needs no shared memory, which network
        # file systems lack.
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("BEGIN EXCLUSIVE")
        (tables,) = db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        (found,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if tables and found != application:
            raise sqlite3.DatabaseError("another program has made this database")
        if tables and version != _VERSION:
            raise sqlite3.DatabaseError("another version of weft has made this database")
        if not tables:
            for statement in schema.split(";"):
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {application}")
            db.execute(f"PRAGMA user_version = {_VERSION}")
        db.execute("COMMIT")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
    except BaseException:
        db.close()
        raise
    return db


# Full disk or quota, too many open files, no memory, a failing disk or network file system.
_TRANSIENT = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EIO,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ESTALE,
    }
)
_TRANSIENT_SQLITE = frozenset(
    {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_CANTOPEN}
)


def is_transient(error: OSError) -> bool:
    """Return whether the same operation may work later."""
    return error.errno in _TRANSIENT


def file_error(path: Path, error: OSError) -> WeftError:
    """Make the error to raise for an OSError about a file."""
    return (DiskError if is_transient(error) else ConfigError)(f"{path}: {error.strerror}")


def database_error(path: Path, error: sqlite3.Error) -> WeftError:
    """Make the error to raise for an error about a SQLite file."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # the primary code
    reason = "another process has it" if code == sqlite3.SQLITE_BUSY else str(error)
    kind = DiskError if code in _TRANSIENT_SQLITE else ConfigError
    return kind(f"the state {path}: {reason}")
