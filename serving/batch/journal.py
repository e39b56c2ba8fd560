"""A record of the rows that are done: append-only output files, and a SQLite file, the state.

Answers are appended in groups. A group counts only when it is in the state:

    append its lines to the output(s) ──► fsync ──► one transaction: its rows, its end, its checksum

So every line in the state is on the disk. After a crash, the next run finds one of these cases, and
each row is in the output once:

| output | lost | remedy |
| --- | --- | --- |
| longer than in the state | the transaction, perhaps part of the group | truncate the file |
| shorter (another disk, a file system that lied) | groups | forget the groups, truncate |
| same length, another checksum | nothing; another program wrote to it | refuse to continue |

One process uses the state at a time; SQLite's lock ensures it and ends with the process. The state
stores rows by line index only, so neither it nor memory grows with the contents of rows.

`Writer` collects answers into groups, and has a thread append them to the journal.

Does not handle: an output that is not a regular file.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import msgspec

from weft.errors import ConfigError
from weft.serving.batch.database import Database, file_error

if TYPE_CHECKING:
    import sqlite3

_APPLICATION = 0x77656662  # "wefb"
_SCHEMA = """
CREATE TABLE run (settings TEXT NOT NULL, total INTEGER NOT NULL);
CREATE TABLE duplicate (row INTEGER PRIMARY KEY, first TEXT NOT NULL);
CREATE TABLE append (
  number INTEGER PRIMARY KEY, file INTEGER NOT NULL, end INTEGER NOT NULL, crc INTEGER NOT NULL
);
CREATE TABLE done (row INTEGER PRIMARY KEY, append INTEGER NOT NULL);
CREATE TABLE failure (row INTEGER PRIMARY KEY, times INTEGER NOT NULL);
"""
_CHUNK = 1 << 20  # bytes read at a time


class Answer(NamedTuple):
    """A row's output line.

    Attributes:
        row: index of the row.
        file: index of the journal's file that gets the line.
        line: contents, with newline.
    """

    row: int
    file: int
    line: bytes


class Journal:
    """The state of one batch, and its output files. Any thread may call its methods.

    Args:
        path: location of the state; it is created if missing.
        files: output files; `open` creates them.

    Attributes:
        settings: settings that the run began with; None if none has begun.
        total: number of rows.

    Raises:
        ConfigError: the state cannot be used, or another process uses it.
        DiskError: the disk is full or fails; all methods raise it, too.
    """

    def __init__(self, path: Path, files: Sequence[Path]) -> None:
        self.path, self.paths = path, list(files)
        self.settings: dict[str, Any] | None = None
        self.total = 0
        self._files: list[BinaryIO] = []
        self._ends = [0] * len(files)
        self._db = Database(path, _SCHEMA, _APPLICATION)
        for settings, total in self._db.all("SELECT settings, total FROM run"):
            self.settings, self.total = msgspec.json.decode(settings), total

    def begin(self, settings: dict[str, Any], rows: Iterable[tuple[int, str, str | None]]) -> None:
        """Begin a run, and forget the run before it.

        Args:
            settings: JSON object that identifies the run.
            rows: index, place and custom_id of each row; None for a custom_id that may repeat.
        """
        with self._db.transaction() as db:
            for table in ("run", "duplicate", "append", "done", "failure"):
                db.execute(f"DELETE FROM {table}")
            # A table on the disk, because there may be many.
            db.execute("CREATE TEMP TABLE seen (id BLOB PRIMARY KEY, place TEXT) WITHOUT ROWID")
            total = 0
            for index, place, custom_id in rows:
                total += 1
                if custom_id is not None:
                    self._note_id(db, index, place, custom_id)
            db.execute("DROP TABLE temp.seen")
            text = msgspec.json.encode(settings).decode()
            db.execute("INSERT INTO run VALUES (?, ?)", (text, total))
        self.settings, self.total = settings, total
        self._ends = [0] * len(self.paths)

    @staticmethod
    def _note_id(db: sqlite3.Connection, index: int, place: str, custom_id: str) -> None:
        key = hashlib.blake2b(custom_id.encode(errors="surrogatepass"), digest_size=16).digest()
        if not db.execute("INSERT OR IGNORE INTO temp.seen VALUES (?, ?)", (key, place)).rowcount:
            (first,) = db.execute("SELECT place FROM temp.seen WHERE id = ?", (key,)).fetchone()
            db.execute("INSERT INTO duplicate VALUES (?, ?)", (index, first))

    def recover(self) -> int:
        """Compare the state with the files; return how many rows must be done again.

        Raises:
            ConfigError: another program wrote to a file, or a file cannot be read.
        """
        before = sum(self.counts())
        for file, path in enumerate(self.paths):
            self._ends[file] = self._recover_file(file, path)
        return before - sum(self.counts())

    def _recover_file(self, file: int, path: Path) -> int:
        """Return the end of the last complete group, and forget the groups after it."""
        appends = self._db.all(
            "SELECT number, end, crc FROM append WHERE file = ? ORDER BY number", file
        )
        begin = 0
        try:
            size = path.stat().st_size if path.exists() else 0
            with path.open("rb") if size else open(os.devnull, "rb") as content:
                for number, end, crc in appends:
                    if end > size:
                        self._forget(file, number)
                        return begin
                    if _checksum(content, end - begin) != crc:
                        raise ConfigError(
                            f"bytes {begin} to {end} of {path} have changed since weft wrote them; "
                            "restore them, or truncate the file there (truncate -s "
                            f"{begin} {path}) to repeat these rows and all after them"
                        )
                    begin = end
        except OSError as error:
            raise file_error(path, error) from error
        return begin

    def _forget(self, file: int, number: int) -> None:
        with self._db.transaction() as db:
            which = "append WHERE file = ? AND number >= ?"
            db.execute(
                f"DELETE FROM done WHERE append IN (SELECT number FROM {which})", (file, number)
            )
            db.execute(f"DELETE FROM {which}", (file, number))

    def open(self) -> None:
        """Open the files for appending, and truncate whatever the state does not record.

        Raises:
            ConfigError: a file cannot be written.
        """
        for path, end in zip(self.paths, self._ends, strict=True):
            try:
                file = path.open("ab", buffering=0)
                self._files.append(file)
                file.truncate(end)
            except OSError as error:
                raise file_error(path, error) from error

    def append(self, answers: Sequence[Answer]) -> None:
        """Append a group. If that fails, the files are as before."""
        with self._db.lock:
            ends = list(self._ends)
            try:
                added = [self._write(file, answers, ends) for file in range(len(self._files))]
                with self._db.transaction() as db:
                    for (file, crc), rows in filter(None, added):
                        number = db.execute(
                            "INSERT INTO append (file, end, crc) VALUES (?, ?, ?)",
                            (file, ends[file], crc),
                        ).lastrowid
                        db.executemany(
                            "INSERT INTO done VALUES (?, ?)", ((row, number) for row in rows)
                        )
            except BaseException:
                for opened, end in zip(self._files, self._ends, strict=True):
                    with suppress(OSError):  # else the next run truncates it
                        opened.truncate(end)
                raise
            self._ends = ends

    def _write(
        self, file: int, answers: Sequence[Answer], ends: list[int]
    ) -> tuple[tuple[int, int], list[int]] | None:
        """Write a file's answers; return the file's index and their checksum, and their rows."""
        mine = [answer for answer in answers if answer.file == file]
        if not mine:
            return None
        data = b"".join(answer.line for answer in mine)
        opened = self._files[file]
        try:
            left = memoryview(data)
            while left:
                left = left[opened.write(left) :]
            os.fsync(opened.fileno())
        except OSError as error:
            raise file_error(self.paths[file], error) from error
        ends[file] += len(data)
        return (file, zlib.crc32(data)), [answer.row for answer in mine]

    def note_failures(self, failures: Mapping[int, int]) -> None:
        """Record how often the engine failed with each row."""
        if failures:
            with self._db.transaction() as db:
                db.executemany("REPLACE INTO failure VALUES (?, ?)", failures.items())

    def close(self) -> None:
        """Close the files and the state. May be called again."""
        with self._db.lock:
            for file in self._files:
                file.close()
            self._files = []
            self._db.close()

    # Queries.

    def counts(self) -> list[int]:
        """Return the number of rows that are done, for each output file."""
        query = "SELECT file, COUNT(*) FROM done JOIN append ON append = number GROUP BY file"
        found = dict(self._db.all(query))
        return [found.get(file, 0) for file in range(len(self.paths))]

    def done(self, first: int, last: int) -> set[int]:
        """Return which rows from `first` to `last`, exclusive, are done."""
        query = "SELECT row FROM done WHERE row >= ? AND row < ?"
        return {row for (row,) in self._db.all(query, first, last)}

    def failures(self) -> dict[int, int]:
        """Return how often the engine failed with rows that are not done."""
        return dict(self._db.all("SELECT * FROM failure WHERE row NOT IN (SELECT row FROM done)"))

    def duplicates(self, first: int, last: int, *, most: int = -1) -> dict[int, str]:
        """Return rows with a repeated custom_id, each with the place of the first occurrence."""
        query = "SELECT * FROM duplicate WHERE row >= ? AND row < ? ORDER BY row LIMIT ?"
        return dict(self._db.all(query, first, last, most))


def _checksum(content: BinaryIO, size: int) -> int:
    """Return the CRC-32 of the next `size` bytes."""
    crc = 0
    while size and (data := content.read(min(size, _CHUNK))):
        crc = zlib.crc32(data, crc)
        size -= len(data)
    return crc


GROUP_SECONDS = 1.0  # maximum time before an answer is written
GROUP_BYTES = 1 << 20  # size of lines that are written earlier
HELD_BYTES = 64 << 20  # maximum size of lines that wait for an earlier one, with `ordered`


class Line(msgspec.Struct):
    """An output line, with the answer's HTTP status and output tokens."""

    answer: Answer
    status: int
    tokens: int


class Writer:
    """A collector of lines. A thread appends them to the journal in groups."""

    def __init__(
        self, journal: Journal, *, ordered: bool, on_done: Callable[[int, int], None]
    ) -> None:
        self._journal = journal
        self._ordered = ordered
        self._on_done = on_done
        self._lines: list[Line] = []
        self._bytes = 0
        self._held: dict[int, Line] = {}
        self._held_bytes = 0
        self._next_order = 0
        self._wake = asyncio.Event()
        self._closed = False
        self._failure: Exception | None = None
        self._waiters: deque[asyncio.Future[None]] = deque()

    async def add(self, order: int, line: Line) -> None:
        """Take a line, once there is room for it.

        Args:
            order: position among all lines, counted from 0 without gaps.
            line: the line.

        Raises:
            WeftError: an earlier line could not be written.
        """
        if self._ordered:
            # The next line never waits here, so the other lines do not wait for ever.
            await self._wait_for(lambda: order == self._next_order or self._held_bytes < HELD_BYTES)
            self._held[order] = line
            self._held_bytes += len(line.answer.line)
            while (line_now := self._held.pop(self._next_order, None)) is not None:
                self._next_order += 1
                self._held_bytes -= len(line_now.answer.line)
                self._enqueue(line_now)
            self._wake_waiters()
        else:
            self._enqueue(line)
        await self._wait_for(lambda: self._bytes < GROUP_BYTES)

    def _enqueue(self, line: Line) -> None:
        self._lines.append(line)
        self._bytes += len(line.answer.line)
        if self._bytes >= GROUP_BYTES:
            self._wake.set()

    async def run(self) -> None:
        """Write groups until `close`. Raises WeftError if a group cannot be written."""
        try:
            while not self._closed:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), GROUP_SECONDS)
                self._wake.clear()
                await self._commit()
            await self._commit()
        except Exception as error:
            self._failure = error
            raise
        finally:
            self._closed = True
            self._wake_waiters()

    async def _commit(self) -> None:
        if not self._lines:
            return
        lines, self._lines, self._bytes = self._lines, [], 0
        self._wake_waiters()
        await asyncio.to_thread(self._journal.append, [line.answer for line in lines])
        for line in lines:
            self._on_done(line.status, line.tokens)

    def close(self) -> None:
        """Make `run` write the remaining lines and return."""
        self._closed = True
        self._wake.set()

    async def _wait_for(self, holds: Callable[[], bool]) -> None:
        while not holds() or self._failure is not None:
            if self._failure is not None:
                raise self._failure
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def _wake_waiters(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
