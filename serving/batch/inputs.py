"""The input of a batch: JSONL files, the files of directories, and stdin.

Lines are counted from 0 through all files. They are read one at a time, and of
a line that is too long no more than the limit is in memory.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from weft.errors import ConfigError
from weft.serving.batch.faults import of_file

MAX_LINE = 32 * 1024 * 1024  # bytes; a prompt of a million tokens takes about five
STDIN = Path("-")
_CHUNK = 1 << 20  # bytes read at a time


class Line(msgspec.Struct, frozen=True):
    """A line that is not blank.

    Attributes:
        index: among all lines of all files, from 0.
        place: where it is, for people: its number, and its file if there are several.
        data: the line; None if it is longer than `MAX_LINE`.
    """

    index: int
    place: str
    data: bytes | None


class Inputs:
    """Files that are read one after the other; iterate over it for their lines.

    Raises:
        ConfigError: when one of them cannot be read.
        DiskError: when that may pass.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files

    def digests(self) -> list[str]:
        """SHA-256 of each file."""
        found = []
        for path in self.files:
            with _opened(path) as file:
                digest = hashlib.sha256()
                while data := file.read(_CHUNK):
                    digest.update(data)
                found.append(digest.hexdigest())
        return found

    def __iter__(self) -> Iterator[Line]:
        index = 0
        for path in self.files:
            name = f"{path.name} " if len(self.files) > 1 else ""
            with _opened(path) as file:
                for number, data in enumerate(_lines(file), start=1):
                    if data is None or data.strip():
                        yield Line(index, f"{name}line {number}", data)
                    index += 1


def find(sources: Sequence[Path], leave_out: Collection[Path]) -> list[Path]:
    """The files that are meant, in their order; of a directory, every *.jsonl in it, sorted.

    Args:
        sources: files, directories, `STDIN`.
        leave_out: files that are not taken for a directory's.

    Raises:
        ConfigError: one is not there, is no file, or holds none.
    """
    apart = {path.resolve() for path in leave_out}
    files: list[Path] = []
    for source in sources:
        if source.is_dir():
            within = sorted(p for p in source.glob("*.jsonl") if p.resolve() not in apart)
            if not within:
                raise ConfigError(f"{source} has no file that ends in .jsonl")
            files += within
        elif source != STDIN and source.exists() and not source.is_file():  # it is read twice
            raise ConfigError(f"{source} is not a regular file; - reads stdin")
        else:
            files.append(source)
    if files.count(STDIN) > 1:
        raise ConfigError("- is given twice; stdin can be read once")
    return files


def spool(stdin: BinaryIO, path: Path) -> None:
    """Write stdin to a file, to be read again; ConfigError when there is no room."""
    try:
        with path.open("wb") as file:
            shutil.copyfileobj(stdin, file, _CHUNK)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ConfigError(f"stdin is kept in {path}: {error.strerror}") from None


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise of_file(path, error) from error


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    while line := file.readline(MAX_LINE + 1):
        if len(line) <= MAX_LINE:
            yield line
            continue
        while not line.endswith(b"\n") and (line := file.readline(MAX_LINE)):
            pass
        yield None
