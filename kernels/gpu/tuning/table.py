"""The tuning file: one line for each op, device, world size, dtype and shape.

    {"format": 1, "entries": [
    {"op": "all_gather_matmul", "device": "NVIDIA H100 80GB HBM3", ..., "config": {...}}
    ]}

It is read strictly. An unknown field, a value out of range or two entries for one key are an error
with their place, because a half understood table would quietly slow every op down. A file of
another format is ignored and never overwritten. Entries of another Triton version are kept but not
used: speed and fit depend on the compiler.

Writing replaces the file in one step. Several processes may tune different ops at once; each keeps
the others' entries.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from weft.errors import WeftError
from weft.kernels.gpu.tuning.costs import Config, Problem

FORMAT = 1
SMALLEST_BUCKET = 16

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Text = Annotated[str, msgspec.Meta(min_length=1)]


class TuningError(WeftError):
    """The tuning file cannot be read or written; the message names it."""


class Key(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True, kw_only=True):
    """The problem of a tuned configuration.

    Attributes:
        device: the driver's name.
        rows: the bucket's largest number of rows; for attention, n is a bucket too.
        groups, top_k: as in a `costs.Problem`.
        triton: version.
    """

    op: Text
    device: Text
    world_size: Positive
    dtype: Text
    rows: Positive
    n: Positive
    k: Count
    groups: Positive = 1
    top_k: Positive = 1
    triton: Text


class Entry(Key, frozen=True, order=True, forbid_unknown_fields=True, kw_only=True):
    """A key and its best configuration, with the time of one call on the slowest rank."""

    config: Config
    microseconds: Annotated[float, msgspec.Meta(gt=0)]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    entries: list[Entry]


class _Head(msgspec.Struct):
    format: int


Table = dict[Key, Entry]


def bucket(rows: int) -> int:
    """Return the smallest power of two, at least 16 and at least `rows`."""
    return max(SMALLEST_BUCKET, 1 << max(0, rows - 1).bit_length())


def buckets(max_rows: int) -> list[int]:
    """Return every bucket up to `rows` rows."""
    found = [SMALLEST_BUCKET]
    while found[-1] < max_rows:
        found.append(2 * found[-1])
    return found


def key_of(problem: Problem, device: str) -> Key:
    """Return a problem's key, with the running Triton's version."""
    import triton

    return Key(
        op=problem.op,
        device=device,
        world_size=problem.world_size,
        dtype=problem.dtype,
        rows=bucket(problem.rows),
        n=bucket(problem.n) if problem.attends else problem.n,
        k=problem.k,
        groups=problem.groups,
        top_k=problem.top_k,
        triton=triton.__version__,
    )


def default_path(environment: Mapping[str, str] = os.environ) -> Path:
    """Return weft/tuning.json in the user's cache folder (XDG: $XDG_CACHE_HOME)."""
    cache = environment.get("XDG_CACHE_HOME", "")
    folder = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    return folder / "weft" / "tuning.json"


def load(path: Path) -> Table:
    """Read the tuned configurations; empty without a file, or with one of another format.

    Raises:
        TuningError: the file cannot be read, or is malformed.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise TuningError(f"{path}: {error.strerror}") from error
    try:
        if msgspec.json.decode(data, type=_Head).format != FORMAT:
            return {}
        entries = msgspec.json.decode(data, type=_File).entries
    except msgspec.MsgspecError as error:
        raise TuningError(
            f"{path} is not a file of tuned configurations: {error}. Remove it to tune anew"
        ) from error
    table: Table = {}
    for entry in entries:
        key = _key(entry)
        if key in table:
            raise TuningError(
                f"{path} has two entries for {_describe(key)}. Remove it to tune anew"
            )
        table[key] = entry
    return table


def record(path: Path, table: Table) -> None:
    """Write entries to the file, replacing those with the same keys.

    Raises:
        TuningError: the file is damaged or has another format, or cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _require_own_format(path)
            _replace(path, load(path) | table)
    except OSError as error:
        raise TuningError(f"{error.filename or path}: {error.strerror}") from error


def _require_own_format(path: Path) -> None:
    """Refuse to overwrite another weft version's file."""
    if path.exists():
        try:
            found = msgspec.json.decode(path.read_bytes(), type=_Head).format
        except msgspec.MsgspecError:
            return  # load reports it better
        if found != FORMAT:
            raise TuningError(
                f"{path} is of format {found}, and this weft writes format {FORMAT}: "
                "name another file"
            )


def _replace(path: Path, table: Table) -> None:
    lines = ",\n".join(msgspec.json.encode(table[key]).decode() for key in sorted(table))
    text = f'{{"format": {FORMAT}, "entries": [\n{lines}\n]}}\n'
    file, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".new")
    try:
        with os.fdopen(file, "w") as new:
            new.write(text)
            new.flush()
            os.fsync(new.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _key(entry: Entry) -> Key:
    return Key(**{name: getattr(entry, name) for name in Key.__struct_fields__})


def _describe(key: Key) -> str:
    return ", ".join(f"{name} {getattr(key, name)}" for name in Key.__struct_fields__)
