"""A GGUF file's header: its metadata, and each tensor's place.

A file has a version, counts, metadata, descriptions of tensors, padding, and the tensors' data
(github.com/ggml-org/ggml/blob/master/docs/gguf.md). All lengths in a header are checked against the
file's size before they are used.

A model may be split over several files, which llama.cpp names NAME-00001-of-00003.gguf and so on.
The first has the metadata; `read_header` joins their tensors.

The package `gguf` dequantises (gguf_tensor.py), but its GGUFReader is not used. For a vocabulary
with 150,000 tokens it takes 15 s, and this reader takes 0.3 s; it also runs on beyond a file's end
if an array's length is wrong.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from weft.errors import ModelError, shown

SUFFIX = ".gguf"
PART = re.compile(r"-\d{5}-of-\d{5}$")
"""End of the name of a split model's files, without the suffix."""
MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
MAX_AXES = 4
_FORMATS = "B b H h I i f ? - - Q q d"
SCALARS = {kind: form for kind, form in enumerate(_FORMATS.split()) if form != "-"}
"""Types of metadata, as formats of `struct`."""
FLOAT32, STRING, ARRAY = 6, 8, 9
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    30: ("BF16", 1, 2),
}
"""The tensor types that weft reads: name, numbers in a block, and the block's bytes."""
OTHER_TYPES = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}
"""Names of other types, for messages."""
LFS_POINTER = b"version https://git-lfs.github.com/"

Kind = TypeVar("Kind", int, float, str, bool, list[Any])


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in a file.

    Attributes:
        file: the file.
        name: its name in the file.
        type: a name in `TYPES`.
        shape: rows come before columns, as in torch.
        start, bytes: its place in the file.
        block, block_bytes: the numbers in a block of a row, and the block's size.
    """

    file: Path
    name: str
    type: str
    shape: tuple[int, ...]
    start: int
    bytes: int
    block: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """A file's header.

    Attributes:
        file: the file; of a split model, the first.
        metadata: key -> value; an array is a list.
        tensors: every tensor, by name.
        files: all files of the model.
    """

    file: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    files: tuple[Path, ...]

    def get(self, key: str, kind: type[Kind]) -> Kind | None:
        """Return a key's value; None if it is absent.

        Raises:
            ModelError: the value has another type.
        """
        value = self.metadata.get(key)
        if value is None:
            return None
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise ModelError(f"{self.file}: {key} is {shown(value)}; it must be {_WORDS[kind]}")
        return value

    def need(self, key: str, kind: type[Kind]) -> Kind:
        """Return a key's value.

        Raises:
            ModelError: it is absent, or has another type.
        """
        if (value := self.get(key, kind)) is None:
            raise ModelError(f"{self.file}: {key} is missing in the metadata; get another file")
        return value


_WORDS: Mapping[type, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    list: "an array",
}


def is_gguf(path: Path) -> bool:
    """Tell whether a path is a GGUF file, by its name."""
    return path.suffix == SUFFIX and path.is_file()


def check_gguf() -> None:
    """Check that the package `gguf` is there, before any process starts.

    Raises:
        ModelError: it is not installed.
    """
    if find_spec("gguf") is None:
        raise ModelError("GGUF files need the package gguf: pip install 'weft[gguf]'")


def read_header(file: Path) -> Header:
    """Read and check a file's header, and those of a split model's other files.

    Raises:
        ModelError: a file cannot be read, is missing, is damaged or cut short, is not the first of
            several, or has an unsupported version, byte order or tensor type.
    """
    header = _read_one(file)
    count = header.get("split.count", int) or 1
    return header if count == 1 else _joined(header, count)


def _read_one(file: Path) -> Header:
    try:
        status = file.stat()
        return _read_header(file, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror or error}") from error


def _joined(first: Header, count: int) -> Header:
    """Return the header of a model that is split over `count` files."""
    file, number = first.file, first.need("split.no", int)
    name = PART.sub("", file.stem)
    files = [
        file.with_name(f"{name}-{i + 1:05}-of-{count:05}{SUFFIX}")
        for i in range(max(count, number + 1))
    ]
    if files[number] != file:
        raise ModelError(
            f"{file} is part {number + 1} of {count}; name it {files[number].name}, as llama.cpp "
            "does"
        )
    if number:
        raise ModelError(f"{file} is part {number + 1} of {count}; give the first: {files[0]}")
    if missing := [part.name for part in files if not part.is_file()]:
        shown_names = ", ".join(missing[:3]) + (" and others" if len(missing) > 3 else "")
        raise ModelError(f"{file} lacks {shown_names}; get all {count} files into one directory")
    tensors: dict[str, TensorInfo] = {}
    for i, part in enumerate(files):
        header = _read_one(part)
        if (header.need("split.no", int), header.get("split.count", int)) != (i, count):
            raise ModelError(f"{part} is not part {i + 1} of {count}, by its metadata")
        if twice := tensors.keys() & header.tensors:
            raise ModelError(f"{part} has {min(twice)}, as an earlier part; get the files again")
        tensors |= header.tensors
    total = first.get("split.tensors.count", int)
    if total is not None and total != len(tensors):
        raise ModelError(
            f"{file}: split.tensors.count is {total}; all {count} files have {len(tensors)}"
        )
    return replace(first, tensors=tensors, files=tuple(files))


@lru_cache(maxsize=128)
def _read_header(file: Path, size: int, _: int) -> Header:
    """Read a header once for each version of the file."""
    if size == 0:
        raise ModelError(f"{file} is empty; get the file again")
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _parse(file, data)


def _parse(file: Path, data: mmap.mmap) -> Header:
    if data[: len(LFS_POINTER)] == LFS_POINTER:
        raise ModelError(f"{file} is a Git LFS pointer, not the weights; fetch them: git lfs pull")
    if data[:4] != MAGIC:
        raise ModelError(f"{file} is not a GGUF file: it begins with {data[:4]!r}, not {MAGIC!r}")
    cursor = _Cursor(file, data, at=4)
    (version,) = cursor.numbers("I", "the version")
    if version and not version & 0xFFFF:
        raise ModelError(
            f"{file} is a big-endian GGUF file; weft reads little-endian ones, so get that one"
        )
    if version not in VERSIONS:
        raise ModelError(
            f"{file} has GGUF version {version}; supported is "
            f"{' or '.join(map(str, VERSIONS))}, so convert the model again with llama.cpp"
        )
    tensor_count, count = cursor.numbers("QQ", "the counts")
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.text("a key in the metadata")
        if key in metadata:
            raise ModelError(f"{file} has {key} twice in its metadata; the file is damaged")
        metadata[key] = cursor.value(key)
    header = Header(file, metadata, {}, (file,))
    infos = [_info(cursor) for _ in range(tensor_count)]
    alignment = header.get("general.alignment", int)
    alignment = ALIGNMENT if alignment is None else alignment
    if alignment < 8 or alignment & (alignment - 1):
        message = f"general.alignment is {alignment}; it must be a power of two, and at least 8"
        raise ModelError(f"{file}: {message}")
    data_start = -(-cursor.at // alignment) * alignment
    return replace(header, tensors=_placed(file, infos, data_start, alignment, len(data)))


def _info(cursor: _Cursor) -> TensorInfo:
    """Read a tensor's description; `start` is still relative to the data."""
    file, name = cursor.file, cursor.text("a tensor's name")
    (axes,) = cursor.numbers("I", name)
    if not 1 <= axes <= MAX_AXES:
        raise ModelError(f"{file}: {name} has {axes} axes; a tensor has 1 to {MAX_AXES}")
    shape = cursor.numbers(f"{axes}Q", name)[::-1]
    number, start = cursor.numbers("IQ", name)
    if number not in TYPES:
        kind = OTHER_TYPES.get(number, f"type {number}")
        supported = ", ".join(name for name, *_ in TYPES.values())
        raise ModelError(f"{file}: {name} is {kind}; supported is {supported}")
    kind, block, block_bytes = TYPES[number]
    if 0 in shape or shape[-1] % block:
        raise ModelError(
            f"{file}: {name} has shape {shape}; the rows of a {kind} tensor must be multiples of "
            f"{block}"
        )
    size = math.prod(shape) // block * block_bytes
    return TensorInfo(file, name, kind, shape, start, size, block, block_bytes)


def _placed(
    file: Path, infos: list[TensorInfo], data_start: int, alignment: int, size: int
) -> dict[str, TensorInfo]:
    """Return the tensors by name, with starts in the file; check that they fit into it."""
    placed: dict[str, TensorInfo] = {}
    end, before = data_start, "the header"
    for info in sorted(infos, key=lambda info: info.start):
        start = data_start + info.start
        if info.name in placed:
            raise ModelError(f"{file} has {info.name} twice; the file is damaged")
        if info.start % alignment or start < end:
            raise ModelError(
                f"{file}: {info.name} begins at byte {start:,}, within {before} or not on a "
                f"multiple of {alignment}; the file is damaged"
            )
        end, before = start + info.bytes, info.name
        if end > size:
            raise ModelError(
                f"{file} is cut short within {info.name}: it has {size:,} bytes, and the tensor "
                f"ends at byte {end:,}; get the file again"
            )
        placed[info.name] = replace(info, start=start)
    return placed


class _Cursor:
    """Reads a header from its beginning to its end.

    Args:
        file: the file, for messages.
        data: its bytes.
        at: the first byte to read.
    """

    def __init__(self, file: Path, data: mmap.mmap, at: int) -> None:
        self.file, self.at = file, at
        self._data, self._size = data, len(data)

    def numbers(self, form: str, what: str) -> tuple[Any, ...]:
        """Read numbers in a format of `struct`."""
        form = f"<{form}"
        start, self.at = self.at, self.at + struct.calcsize(form)
        if self.at > self._size:
            self._cut(what)
        return struct.unpack_from(form, self._data, start)

    def text(self, what: str) -> str:
        """Read a length and as many bytes of UTF-8."""
        (length,) = self.numbers("Q", what)
        start, self.at = self.at, self.at + length
        if self.at > self._size:
            self._cut(what)
        try:
            return self._data[start : self.at].decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.file}: {what} is not UTF-8: {error}") from error

    def value(self, key: str) -> Any:
        """Read a type and a value of it."""
        (kind,) = self.numbers("I", key)
        if kind in SCALARS:
            number = self.numbers(SCALARS[kind], key)[0]
            return _decimal(number) if kind == FLOAT32 else number
        if kind == STRING:
            return self.text(key)
        if kind != ARRAY:
            raise ModelError(f"{self.file}: {key} has the unknown type {kind}")
        kind, count = self.numbers("IQ", key)
        if kind != STRING and kind not in SCALARS:
            raise ModelError(f"{self.file}: {key} is an array of the unknown type {kind}")
        least = 8 if kind == STRING else struct.calcsize(SCALARS[kind])
        if count * least > self._size - self.at:
            self._cut(key)
        if kind == STRING:
            return [self.text(key) for _ in range(count)]
        return list(self.numbers(f"{count}{SCALARS[kind]}", key))

    def _cut(self, what: str) -> NoReturn:
        raise ModelError(
            f"{self.file} is cut short within its header, or a length there is wrong: {what} "
            f"ends beyond the file's {self._size:,} bytes; get the file again"
        )


def _decimal(number: float) -> float:
    """Return the shortest decimal that float32 rounds to a number: 0.6, not 0.6000000238418579."""
    shorts = (float(f"{number:.{digits}g}") for digits in (6, 7, 8))
    return next((each for each in shorts if _as_float32(each) == number), number)


def _as_float32(number: float) -> float:
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", number))[0]
    except OverflowError:  # a decimal above the greatest float32
        return math.inf
    return rounded
