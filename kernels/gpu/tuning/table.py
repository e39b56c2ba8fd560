"""The tuning file: one line for each op, device, world size, dtype and shape.

    {"format": 1, "entries": [
    {"op": "all_gather_matmul", "device": "NVIDIA H100 80GB HBM3", ..., "config": {...}}
    ]}

Reading is strict. An unknown field, a value out of range or two entries for one key raise an error
with the place. Otherwise a table that is only half understood would silently make every op
slower. A file with another format is neither read nor overwritten. Entries from another Triton
version are kept but not used: the fastest configuration changes with the compiler, and so does
the set of configurations that fit.

Writing replaces the file atomically. Two processes can tune different ops at the same time: each
keeps the entries from the other.
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
    """The tuning file cannot be read or written. The message names the file."""


class Key(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True, kw_only=True):
    """Problem and device that a configuration was tuned for.

    Attributes:
        device: name from the driver.
        rows: largest number of rows in the bucket. For attention, n is also a bucket's largest.
        groups, top_k: as in `costs.Problem`.
        triton: version of Triton.
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
    """A key with its best configuration, and the time for one call on the slowest rank."""

    config: Config
    microseconds: Annotated[float, msgspec.Meta(gt=0)]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    entries: list[Entry]


class _Head(msgspec.Struct):
    format: int


_file = msgspec.json.Decoder(_File)
_head = msgspec.json.Decoder(_Head)


Table = dict[Key, Entry]


def bucket(rows: int) -> int:
    """Round `rows` up to a power of two, at least 16."""
    return max(SMALLEST_BUCKET, 1 << max(0, rows - 1).bit_length())


def buckets(max_rows: int) -> list[int]:
    """List every bucket, up to the bucket for `max_rows`."""
    found = [SMALLEST_BUCKET]
    while found[-1] < max_rows:
        found.append(2 * found[-1])
    return found


def key_of(problem: Problem, device: str) -> Key:
    """Build the key for a problem, with the running version of Triton."""
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
    """Return weft/tuning.json in the user's cache folder ($XDG_CACHE_HOME, else ~/.cache)."""
    cache = environment.get("XDG_CACHE_HOME", "")
    folder = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    return folder / "weft" / "tuning.json"


def load(path: Path) -> Table:
    """Read the tuned entries. The table is empty without a file, or if its format differs.

    Raises:
        TuningError: the file cannot be read, or its content is invalid.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise TuningError(f"{path}: {error.strerror}") from error
    try:
        if _head.decode(data).format != FORMAT:
            return {}
        entries = _file.decode(data).entries
    except msgspec.MsgspecError as error:
        raise TuningError(
            f"{path} is not a valid tuning file: {error}. Remove it to tune again"
        ) from error
    table: Table = {}
    for entry in entries:
        key = _key(entry)
        if key in table:
            raise TuningError(
                f"{path} has two entries for {_describe(key)}. Remove it to tune again"
            )
        table[key] = entry
    return table


def record(path: Path, table: Table) -> None:
    """Add entries to the file. They replace entries with the same keys.

    Raises:
        TuningError: the file is damaged, has another format or cannot be written.
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
    """Refuse to overwrite a file with another format."""
    if path.exists():
        try:
            found = _head.decode(path.read_bytes()).format
        except msgspec.MsgspecError:
            return  # load raises a better error
        if found != FORMAT:
            raise TuningError(
                f"{path} has format {found}, but this version of weft writes format {FORMAT}: "
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
