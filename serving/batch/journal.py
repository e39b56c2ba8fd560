"""What of a batch is done: output files that only grow, and a SQLite file that says how far.

Answers are appended a group at a time, and a group counts once it is in the state:

    append its lines to the output(s) ──► fsync ──► one transaction: its rows, its end, its checksum

So the state never knows of a line that is not on the disk. Whatever a crash leaves, the next run
finds in one of these, and each row is in the output once:

| the output | what was lost | what is done |
| --- | --- | --- |
| is longer than the state says | the transaction; perhaps a part of the group, too | cut it there |
| is shorter (another disk, a file system that broke its word) | groups | forget them, and cut |
| has its length, and another checksum | nothing: somebody has written to it | refuse it |

The state is of one process at a time, which SQLite's lock sees to; that goes with the process. It
has no names of rows but their lines' indices, so memory and state do not grow with
what is in the rows.

Does not handle: an output that is not a regular file.

Answers go to the journal in groups, by a thread, in their order or as they come.
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
from weft.serving.batch.database import Database, of_file

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
    """A row's line of output.

    Attributes:
        row: its index.
        file: which of the journal's files it goes to.
        line: with its newline.
    """

    row: int
    file: int
    line: bytes


class Journal:
    """The state of one batch, and the files that it is of. Its methods may be called by any thread.

    Args:
        path: of the state; made if need be.
        files: outputs; they are made by `open`.

    Attributes:
        settings: that the run was begun with; None if it has not been begun.
        total: rows of the input.

    Raises:
        ConfigError: it cannot be opened, is of something else, or another process has it.
        DiskError: the disk is full, or fails; so do the methods.
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
        """Begin a run, in place of what was there.

        Args:
            settings: JSON that says which run this is.
            rows: each one's index, place and custom_id, if that must be unique.
        """
        with self._db.transaction() as db:
            for table in ("run", "duplicate", "append", "done", "failure"):
                db.execute(f"DELETE FROM {table}")
            # On disk, too, for there may be many.
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
        """Compare the state with the files; returns how many rows have to be done again.

        Raises:
            ConfigError: a file has been written to by others, or cannot be read.
        """
        before = sum(self.counts())
        for file, path in enumerate(self.paths):
            self._ends[file] = self._recover(file, path)
        return before - sum(self.counts())

    def _recover(self, file: int, path: Path) -> int:
        """The end of the last group that is whole; those after it are forgotten."""
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
                            f"bytes {begin} to {end} of {path} are not those that were written; "
                            "put them back, or cut the file there (truncate -s "
                            f"{begin} {path}) to have their rows and all after them done again"
                        )
                    begin = end
        except OSError as error:
            raise of_file(path, error) from error
        return begin

    def _forget(self, file: int, number: int) -> None:
        with self._db.transaction() as db:
            which = "append WHERE file = ? AND number >= ?"
            db.execute(
                f"DELETE FROM done WHERE append IN (SELECT number FROM {which})", (file, number)
            )
            db.execute(f"DELETE FROM {which}", (file, number))

    def open(self) -> None:
        """Open the files to add to them; what the state does not know of is cut off.

        Raises:
            ConfigError: one cannot be written.
        """
        for path, end in zip(self.paths, self._ends, strict=True):
            try:
                file = path.open("ab", buffering=0)
                self._files.append(file)
                file.truncate(end)
            except OSError as error:
                raise of_file(path, error) from error

    def append(self, answers: Sequence[Answer]) -> None:
        """Add a group. When that fails, the files are as they were."""
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
                    with suppress(OSError):  # the next run does it
                        opened.truncate(end)
                raise
            self._ends = ends

    def _write(
        self, file: int, answers: Sequence[Answer], ends: list[int]
    ) -> tuple[tuple[int, int], list[int]] | None:
        """Write the answers that go to a file; its number, their checksum, and their rows."""
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
            raise of_file(self.paths[file], error) from error
        ends[file] += len(data)
        return (file, zlib.crc32(data)), [answer.row for answer in mine]

    def note_failures(self, failures: Mapping[int, int]) -> None:
        """How often the engine has failed with rows."""
        if failures:
            with self._db.transaction() as db:
                db.executemany("REPLACE INTO failure VALUES (?, ?)", failures.items())

    def close(self) -> None:
        """Let go of the files and the state. May be called again."""
        with self._db.lock:
            for file in self._files:
                file.close()
            self._files = []
            self._db.close()

    # What is done.

    def counts(self) -> list[int]:
        """Rows that are done, by the file that has their answers."""
        query = "SELECT file, COUNT(*) FROM done JOIN append ON append = number GROUP BY file"
        found = dict(self._db.all(query))
        return [found.get(file, 0) for file in range(len(self.paths))]

    def done(self, first: int, last: int) -> set[int]:
        """Which of the rows from `first` up to, without, `last` are done."""
        query = "SELECT row FROM done WHERE row >= ? AND row < ?"
        return {row for (row,) in self._db.all(query, first, last)}

    def failures(self) -> dict[int, int]:
        """How often the engine has failed with rows that are not done."""
        return dict(self._db.all("SELECT * FROM failure WHERE row NOT IN (SELECT row FROM done)"))

    def duplicates(self, first: int, last: int, *, most: int = -1) -> dict[int, str]:
        """Of these rows, those whose custom_id came before, and the place where that was."""
        query = "SELECT * FROM duplicate WHERE row >= ? AND row < ? ORDER BY row LIMIT ?"
        return dict(self._db.all(query, first, last, most))


def _checksum(content: BinaryIO, size: int) -> int:
    """CRC-32 of the next bytes."""
    crc = 0
    while size and (data := content.read(min(size, _CHUNK))):
        crc = zlib.crc32(data, crc)
        size -= len(data)
    return crc


GROUP_SECONDS = 1.0  # that an answer waits at most until it is on the disk
GROUP_BYTES = 1 << 20  # of lines that make a group before that
HELD_BYTES = 64 << 20  # of lines that wait for one before them, with `ordered`


class Line(msgspec.Struct):
    """A line of output with the answer's HTTP status and output tokens."""

    answer: Answer
    status: int
    tokens: int


class Writer:
    """Gathers lines, and has the journal write them in groups, in a thread."""

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
        self._turn = 0
        self._wake = asyncio.Event()
        self._closed = False
        self._failure: Exception | None = None
        self._room: deque[asyncio.Future[None]] = deque()

    async def add(self, turn: int, line: Line) -> None:
        """Take a line, once there is room for it.

        Args:
            turn: of the line, counted from 0 without a gap; what is ordered is written by it.

        Raises:
            WeftError: lines cannot be written any more.
        """
        if self._ordered:
            # The line whose turn it is never waits here, so the others do not for ever.
            await self._until(lambda: turn == self._turn or self._held_bytes < HELD_BYTES)
            self._held[turn] = line
            self._held_bytes += len(line.answer.line)
            while (line_now := self._held.pop(self._turn, None)) is not None:
                self._turn += 1
                self._held_bytes -= len(line_now.answer.line)
                self._take(line_now)
            self._let_in()
        else:
            self._take(line)
        await self._until(lambda: self._bytes < GROUP_BYTES)

    def _take(self, line: Line) -> None:
        self._lines.append(line)
        self._bytes += len(line.answer.line)
        if self._bytes >= GROUP_BYTES:
            self._wake.set()

    async def run(self) -> None:
        """Write groups until `close`. Raises WeftError when one cannot be written."""
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
            self._let_in()

    async def _commit(self) -> None:
        if not self._lines:
            return
        lines, self._lines, self._bytes = self._lines, [], 0
        self._let_in()
        await asyncio.to_thread(self._journal.append, [line.answer for line in lines])
        for line in lines:
            self._on_done(line.status, line.tokens)

    def close(self) -> None:
        """Have `run` write what there is, and return."""
        self._closed = True
        self._wake.set()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds() or self._failure is not None:
            if self._failure is not None:
                raise self._failure
            waiter = asyncio.get_running_loop().create_future()
            self._room.append(waiter)
            await waiter

    def _let_in(self) -> None:
        while self._room:
            waiter = self._room.popleft()
            if not waiter.done():
                waiter.set_result(None)
