"""safetensors -> tensors, checked against the model's spec before any tensor is read.

1. Find the files: model.safetensors, or the shards that model.safetensors.index.json names.
2. Read every file's header and compare it with the ModelSpec. A missing, unexpected or mis-shaped
   tensor, a dtype other than plain floating point, or a truncated file raises a ModelError with
   file and tensor. Only the tensors in `_is_harmless` are skipped.
3. `Weights.read` returns one tensor at a time, or this rank's part, as a view of the mapped file.
   The caller converts or packs it and drops it. Loading therefore needs the model's memory plus one
   tensor, and reads only what the rank keeps. NaN or an infinity in a tensor raises a ModelError.

Not handled: pickled checkpoints (they can run code), quantised weights, and writing. Overwriting a
mapped file in place kills the process (SIGBUS); replacing it by renaming is safe.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from weft.errors import ModelError
from weft.models.checkpoint.locate import INDEX_FILE, SINGLE_FILE, other_weights, read_json
from weft.models.spec.layout import WHOLE, Layout
from weft.models.spec.spec import ModelSpec, WeightSpec

LM_HEAD = "lm_head.weight"
BASE = "model."
"""Prefix of all tensor names except the LM head's."""
LFS_POINTER = b"version https://git-lfs.github.com/"
REMAP_BYTES = 64 * 2**20
"""Bytes read from one mapping before the file is mapped again; bounds the resident memory."""
DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}

Progress = Callable[[int, int], None]
"""Called with (bytes read so far, bytes in total)."""


class Weights:
    """The tensors in a checkpoint.

    Args:
        path: the checkpoint's directory.
        spec: the model that the checkpoint must hold.
        progress: called after each tensor.
        layout: selects the parts to read.

    Raises:
        ModelError: the checkpoint does not match `spec`; see the module's text.
    """

    def __init__(
        self,
        path: Path,
        spec: ModelSpec,
        progress: Progress | None = None,
        layout: Layout = WHOLE,
    ) -> None:
        self._entries = _check_files(path, spec)
        self._spec = spec
        self.layout = layout
        own = layout.of_stage(spec).weights
        self._total = sum(size for weight in own for *_, size in self._to_read(weight))
        self._done = 0
        self._read: set[str] = set()
        self._progress = progress

    def read(self, weight: WeightSpec) -> Tensor:
        """Read this rank's part of a single-tensor weight, in the checkpoint's dtype.

        The result is a view of the mapped file: do not write to it. Each call maps the file again,
        because touched pages leave the process only together with their mapping.

        Raises:
            ModelError: the part holds NaN or an infinity.
        """
        (tensor,) = self.read_each(weight)
        return tensor

    def read_each(self, weight: WeightSpec) -> Iterator[Tensor]:
        """Yield this rank's tensors for a weight, one at a time, as in `read`.

        A weight can have one tensor per expert. If experts are cut, only this rank's part is read.
        Small tensors share a mapping; otherwise each would parse the file's header again.
        """
        file, handle, mapped = None, None, 0
        for name, part, size in self._to_read(weight):
            entry = self._entries[name]
            if handle is None or file != entry.file or mapped > REMAP_BYTES:
                file, handle, mapped = entry.file, _open(entry.file), 0
            tensor = handle.get_tensor(entry.name)[part]
            _check_finite(tensor, entry)
            yield tensor
            mapped += size
            self._count(name, size)

    def parts(self, weight: WeightSpec) -> tuple[slice, ...]:
        """Return the part that is read, one slice per axis."""
        return self.layout.parts(self._spec, weight)

    def _to_read(self, weight: WeightSpec) -> Iterator[tuple[str, tuple[slice, ...], int]]:
        """Yield (name, part, bytes) for each tensor that this rank reads."""
        names, part = weight.tensor_names, self.parts(weight)
        if weight.is_per_expert:
            names, part = names[part[0]], part[1:]
        numbers = math.prod(axis.stop - axis.start for axis in part)
        for name in names:
            yield name, part, numbers * self._entries[name].itemsize

    def _count(self, name: str, size: int) -> None:
        """Report progress; a tensor that is read twice counts once."""
        if name in self._read:
            return
        self._read.add(name)
        self._done += size
        if self._progress is not None:
            self._progress(self._done, self._total)


@dataclass(frozen=True, slots=True)
class _Entry:
    """Location of a tensor: its file, its name there, and its bytes per element."""

    file: Path
    name: str
    itemsize: int


def find_files(path: Path) -> list[Path]:
    """List a checkpoint's safetensors files, by its index if there is one.

    Raises:
        ModelError: no file exists, one is missing, or the index is malformed.
    """
    if (path / SINGLE_FILE).exists():
        return [path / SINGLE_FILE]
    index = path / INDEX_FILE
    if not index.exists():
        raise ModelError(f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}{_what_is_there(path)}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"{index} names {name!r}, which is not a file beside it")
        if not (path / name).exists():
            raise ModelError(f"{path / name} is missing; {INDEX_FILE} names it")
    return [path / name for name in names]


def _what_is_there(path: Path) -> str:
    """Name the other weights in a directory, and say what to do with them."""
    for name in (SINGLE_FILE, INDEX_FILE):
        if (path / name).is_symlink():
            return (
                f": {name} is a link to {(path / name).readlink()}, which does not exist; "
                "download the model again"
            )
    return other_weights(file.name for file in path.iterdir())


def _open(file: Path) -> Any:
    """Map a file and read its header; safetensors checks that they fit each other."""
    try:
        file.open("rb").close()  # safetensors reports every unreadable file as missing
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        with file.open("rb") as opened:
            if opened.read(len(LFS_POINTER)) == LFS_POINTER:
                raise ModelError(
                    f"{file} is a Git LFS pointer, not the weights; fetch them: git lfs pull"
                ) from error
        cut = _first_cut(file)
        where = f"within {cut}" if cut else "or not a safetensors file"
        raise ModelError(f"{file} is truncated {where}: {error}") from error
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror or error}") from error


def _first_cut(file: Path) -> str | None:
    """Return the first tensor that ends beyond the file's end; None for an unreadable header."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > size:
            return None
        try:
            header = json.loads(opened.read(length))
            header.pop("__metadata__", None)
            ends = {name: 8 + length + tensor["data_offsets"][1] for name, tensor in header.items()}
        except (ValueError, TypeError, AttributeError, LookupError, OverflowError):
            return None
    return min((name for name in ends if ends[name] > size), key=ends.__getitem__, default=None)


def _check_files(path: Path, spec: ModelSpec) -> dict[str, _Entry]:
    """Compare all headers with the spec; return each tensor's location."""
    expected = {name: weight for weight in spec.weights for name in weight.tensor_names}
    entries: dict[str, _Entry] = {}
    lm_head = None
    for file in find_files(path):
        handle = _open(file)
        held: list[str] = handle.keys()
        # A model saved without its LM head, such as an embedding model, has names without this
        # prefix.
        names = {name: f"{BASE}{name}" if f"{BASE}{name}" in expected else name for name in held}
        if spec.lm_head is None and LM_HEAD in names:
            lm_head = _Entry(file, LM_HEAD, 0)
        names = {held: name for held, name in names.items() if not _is_harmless(name, spec)}
        if unexpected := [name for name in names.values() if name not in expected]:
            raise ModelError(
                f"{file} has {_join_first(unexpected)}, which {spec.architecture} does not use"
            )
        for stored, name in names.items():
            if name in entries:
                raise ModelError(f"{entries[name].file} and {file} both have {name}")
            itemsize = _check_tensor(file, stored, handle.get_slice(stored), expected[name])
            entries[name] = _Entry(file, stored, itemsize)
    if missing := [name for name in expected if name not in entries]:
        raise ModelError(f"{path} lacks {_join_first(missing)}, in any of its safetensors files")
    if lm_head is not None:
        _check_tied(entries[spec.embedding.name], lm_head)
    return entries


def _check_tied(embedding: _Entry, lm_head: _Entry) -> None:
    """Compare a tied model's LM head with its embedding. Some exports hold both.

    Raises:
        ModelError: they differ, so the config or the file is wrong.
    """
    one, other = (_open(each.file).get_slice(each.name) for each in (embedding, lm_head))
    shape = one.get_shape()
    rows = max(1, REMAP_BYTES // (4 * shape[1]))
    equal = (shape, one.get_dtype()) == (other.get_shape(), other.get_dtype())
    for start in range(0, shape[0], rows) if equal else ():
        block = one[start : start + rows]
        _check_finite(block, embedding)  # NaN equals nothing
        equal = equal and block.equal(other[start : start + rows])
    if not equal:
        raise ModelError(
            f"{lm_head.file}: {LM_HEAD} differs from {embedding.name}, but config.json says "
            "tie_word_embeddings is true; set it to false to use both tensors"
        )


def _check_finite(tensor: Tensor, entry: _Entry) -> None:
    """Raise ModelError if the tensor holds NaN or an infinity.

    Either makes the sum NaN or infinite, and the sum takes a few percent of loading's time. A sum
    may also overflow, so the tensor is searched before an error.
    """
    if tensor.sum().isfinite():
        return
    wrong = tensor[~tensor.isfinite()]
    if wrong.numel():
        number = wrong[0].item()
        raise ModelError(f"{entry.file}: {entry.name} holds {number}; the file is damaged")


def _check_tensor(file: Path, name: str, found: Any, weight: WeightSpec) -> int:
    """Compare a tensor's header with its spec; return the bytes per element."""
    shape, dtype = tuple(found.get_shape()), found.get_dtype()
    if shape != weight.tensor_shape:
        raise ModelError(
            f"{file}: {name} has shape {shape}; by config.json it is {weight.tensor_shape}"
        )
    if dtype not in DTYPE_BYTES:
        raise ModelError(f"{file}: {name} is {dtype}; supported is {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def _is_harmless(name: str, spec: ModelSpec) -> bool:
    """True if older exports hold this tensor although the rest of the model implies it."""
    if name == LM_HEAD:
        return spec.lm_head is None
    return name.endswith(".rotary_emb.inv_freq")


def _join_first(names: Sequence[str]) -> str:
    """Join the first few names."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
