"""safetensors -> tensors, checked against the model's description before any byte is read.

1. The files are found: model.safetensors, or the shards that
   model.safetensors.index.json names.
2. Every file's header is read and compared with the ModelSpec: a missing,
   unexpected or mis-shaped tensor, a type that is not plain floating point, or
   a file that is shorter than its header says, is a ModelError naming file and
   tensor. Nothing is skipped but what `_is_harmless` lists.
3. `Weights.read` gives one tensor at a time, or this rank's part of it, mapped
   into memory and not copied: the caller converts or packs it and drops it, so
   that loading needs the model's memory plus the tensor in hand, and reads what
   the rank keeps.

Not here: pickled checkpoints (they can run code), quantised weights, and
writing. A file that is overwritten in place while it is mapped ends the
process (SIGBUS); replacing it by renaming is safe.
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
from weft.models.checkpoint.locate import read_json
from weft.models.spec.layout import WHOLE, Layout
from weft.models.spec.spec import ModelSpec, WeightSpec

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
BASE = "model."
"""Before the names of all tensors but the head's."""
LFS_POINTER = b"version https://git-lfs.github.com/"
REMAP_BYTES = 64 * 2**20
"""Bytes of a mapping that are read before the file is mapped anew; bounds what stays in memory."""
DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}

Progress = Callable[[int, int], None]
"""Called with (bytes read so far, bytes in all)."""


class Weights:
    """The tensors of a checkpoint.

    Args:
        path: the checkpoint's directory.
        spec: what must be in it.
        progress: told after each tensor how far reading has come.
        layout: whose parts are read.

    Raises:
        ModelError: the checkpoint is not what `spec` describes; see the module's text.
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
        """This rank's part of a weight that is one tensor, in the checkpoint's type.

        It is a view of the mapped file and must not be written to. The file is mapped anew for
        each weight: the pages that it has touched then leave the process with it.
        """
        (tensor,) = self.read_each(weight)
        return tensor

    def read_each(self, weight: WeightSpec) -> Iterator[Tensor]:
        """Those of the tensors that a weight consists of (one per expert) that are this rank's.

        One at a time, as in `read`; of experts that are cut, the part that is this rank's.

        Small ones share a mapping, for else the file's header is read for each of them.
        """
        file, handle, mapped = None, None, 0
        for name, part, size in self._to_read(weight):
            entry = self._entries[name]
            if handle is None or file != entry.file or mapped > REMAP_BYTES:
                file, handle, mapped = entry.file, _open(entry.file), 0
            yield handle.get_tensor(entry.name)[part]
            mapped += size
            self._count(name, size)

    def parts(self, weight: WeightSpec) -> tuple[slice, ...]:
        """Which part of a weight is read, by axis."""
        return self.layout.parts(self._spec, weight)

    def _to_read(self, weight: WeightSpec) -> Iterator[tuple[str, tuple[slice, ...], int]]:
        """Of each tensor of a weight that this rank reads: name, part and bytes of the part."""
        names, part = weight.tensor_names, self.parts(weight)
        if weight.is_per_expert:
            names, part = names[part[0]], part[1:]
        numbers = math.prod(axis.stop - axis.start for axis in part)
        for name in names:
            yield name, part, numbers * self._entries[name].itemsize

    def _count(self, name: str, size: int) -> None:
        """Tell how far reading has come; a tensor that is read again counts once."""
        if name in self._read:
            return
        self._read.add(name)
        self._done += size
        if self._progress is not None:
            self._progress(self._done, self._total)


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a tensor is, what it is called there, and the bytes of one of its elements."""

    file: Path
    name: str
    itemsize: int


def find_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint, by its index if it has one.

    Raises:
        ModelError: there are none, one is missing, or the index is not one.
    """
    if (path / SINGLE_FILE).exists():
        return [path / SINGLE_FILE]
    index = path / INDEX_FILE
    if not index.exists():
        raise ModelError(f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}")
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


def _open(file: Path) -> Any:
    """Map a file and read its header; safetensors checks that the two fit."""
    try:
        file.open("rb").close()  # safetensors says of whatever it cannot read that it is not there
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        with file.open("rb") as opened:
            if opened.read(len(LFS_POINTER)) == LFS_POINTER:
                raise ModelError(
                    f"{file} is a pointer of Git LFS, not the weights; fetch them: git lfs pull"
                ) from error
        cut = _first_cut(file)
        where = f"within {cut}" if cut else "or not a safetensors file"
        raise ModelError(f"{file} is truncated {where}: {error}") from error
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror or error}") from error


def _first_cut(file: Path) -> str | None:
    """The first tensor that ends past the end of a file; None when its header cannot be read."""
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
    """Compare all headers with the model's description; say where each tensor is."""
    wanted = {name: weight for weight in spec.weights for name in weight.tensor_names}
    entries: dict[str, _Entry] = {}
    for file in find_files(path):
        handle = _open(file)
        held: list[str] = handle.keys()
        # Of a model that was saved without its head, as embedding models are, names lack this.
        names = {name: f"{BASE}{name}" if f"{BASE}{name}" in wanted else name for name in held}
        names = {held: name for held, name in names.items() if not _is_harmless(name, spec)}
        if unexpected := [name for name in names.values() if name not in wanted]:
            raise ModelError(f"{file} has {_some(unexpected)}, which {spec.architecture} has not")
        for stored, name in names.items():
            if name in entries:
                raise ModelError(f"{entries[name].file} and {file} both have {name}")
            itemsize = _check_tensor(file, stored, handle.get_slice(stored), wanted[name])
            entries[name] = _Entry(file, stored, itemsize)
    if missing := [name for name in wanted if name not in entries]:
        raise ModelError(f"{path} lacks {_some(missing)}, in any of its safetensors files")
    return entries


def _check_tensor(file: Path, name: str, found: Any, weight: WeightSpec) -> int:
    """Compare one tensor's header with its description; the bytes of one of its elements."""
    shape, dtype = tuple(found.get_shape()), found.get_dtype()
    if shape != weight.tensor_shape:
        raise ModelError(
            f"{file}: {name} has shape {shape}; by config.json it is {weight.tensor_shape}"
        )
    if dtype not in DTYPE_BYTES:
        raise ModelError(f"{file}: {name} is {dtype}; supported is {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def _is_harmless(name: str, spec: ModelSpec) -> bool:
    """Tensors that older exports hold though they follow from the rest of the model."""
    if name == "lm_head.weight":
        return spec.lm_head is None
    return name.endswith(".rotary_emb.inv_freq")


def _some(names: Sequence[str]) -> str:
    """The first few of many names."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
