"""A SQLite file that one process has at a time, and whose every change is on the disk.

What goes wrong on a disk: what may pass is a DiskError, what stays so a ConfigError.
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
        path: it is made if need be.
        schema: statements that make its tables.
        application: a number that is in its head, by which it is known.

    Attributes:
        lock: taken by every call here; for changes that belong together with others.

    Raises:
        ConfigError: it cannot be opened, is of something else, or another process has it.
        DiskError: there is no room for it, or the disk fails; so does every call.
    """

    def __init__(self, path: Path, schema: str, application: int) -> None:
        self.path = path
        self.lock = threading.RLock()
        try:
            self._db = _connect(path, schema, application)
        except sqlite3.Error as error:
            raise of_database(path, error) from error

    def all(self, query: str, *values: object) -> list[Any]:
        """The rows that a query finds."""
        with self.lock:
            try:
                return self._db.execute(query, values).fetchall()
            except sqlite3.Error as error:
                raise of_database(self.path, error) from error

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All of what is done within it, or nothing.

        Raises:
            DiskError: the disk is full, or fails.
            ConfigError: it is damaged, or what is done breaks a rule of its tables.
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
                    raise of_database(self.path, error) from error
                raise

    def close(self) -> None:
        """Let go of it. May be called again."""
        with self.lock:
            self._db.close()


def _connect(path: Path, schema: str, application: int) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
    try:
        # The lock is held from here to the end, and no shared memory is needed, which network
        # file systems have not.
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("BEGIN EXCLUSIVE")
        (tables,) = db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        (found,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if tables and found != application:
            raise sqlite3.DatabaseError("it is a database of something else")
        if tables and version != _VERSION:
            raise sqlite3.DatabaseError("another version of weft has written it")
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


# No room, no more open files, no memory, a disk or a network file system that does not answer.
_PASSING = frozenset(
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
_PASSING_OF_SQLITE = frozenset(
    {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_CANTOPEN}
)


def passes(error: OSError) -> bool:
    """Whether the same may work later."""
    return error.errno in _PASSING


def of_file(path: Path, error: OSError) -> WeftError:
    """The error to raise for a file's."""
    return (DiskError if passes(error) else ConfigError)(f"{path}: {error.strerror}")


def of_database(path: Path, error: sqlite3.Error) -> WeftError:
    """The error to raise for a SQLite file's."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # without its details
    reason = "another process has it" if code == sqlite3.SQLITE_BUSY else str(error)
    kind = DiskError if code in _PASSING_OF_SQLITE else ConfigError
    return kind(f"the state {path}: {reason}")
