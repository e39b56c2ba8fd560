"""What goes wrong on a disk: what may pass is a DiskError, what stays so a ConfigError."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

from weft.errors import ConfigError, DiskError, WeftError

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
