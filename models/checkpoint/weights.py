"""safetensors -> tensors, checked against the model's spec before any tensor is read.

1. Find the files: model.safetensors, or the shards that model.safetensors.index.json names.
2. Read every file's header and compare it with the ModelSpec. A missing, unexpected or mis-shaped
   tensor, a dtype other than plain floating point, or a truncated file raises a ModelError with
   file and tensor. Only tensors in `ModelSpec.skipped` are skipped; the log names them.
3. `Weights.read` returns one tensor at a time, or this rank's part, as a view of the mapped file.
   The caller converts or packs it and drops it. Loading therefore needs the model's memory plus one
   tensor, and reads only what the rank keeps. NaN or an infinity in a tensor raises a ModelError.

Not handled: pickled checkpoints (they can run code), quantised weights, and writing. Overwriting a
mapped file in place kills the process (SIGBUS); replacing it by renaming is safe.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from weft.errors import ModelError
from weft.models.checkpoint.locate import find_files
from weft.models.memory.ledger import human_bytes
from weft.models.spec.layout import WHOLE, Layout
from weft.models.spec.spec import ModelSpec, TensorBlock, WeightSpec

LM_HEAD = "lm_head.weight"
BASE = "model."
"""Prefix of all tensor names except the LM head's."""
QUANTIZED = (".qweight", ".qzeros", "_packed", "_scale", "_scale_inv", ".scales", ".absmax")
"""Ends of names of tensors in quantized checkpoints."""
LFS_POINTER = b"version https://git-lfs.github.com/"
REMAP_BYTES = 64 * 2**20
"""Bytes read from one mapping before the file is mapped again; bounds the resident memory."""
DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}

Index = tuple[int | slice, ...]

Progress = Callable[[int, int], None]
"""Called with (bytes read so far, bytes in total)."""

logger = logging.getLogger(__name__)


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
        self._entries, self._blocks, skipped = _check_files(path, spec)
        if skipped and layout.rank == 0:
            _log_skipped(skipped, spec)
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
        for name, index, size in self._to_read(weight):
            entry = self._entries[name]
            if handle is None or file != entry.file or mapped > REMAP_BYTES:
                file, handle, mapped = entry.file, _open(entry.file), 0
            tensor = handle.get_tensor(entry.name)[index]
            _check_finite(tensor, entry)
            yield tensor
            mapped += size
            self._count(name, index, size)

    def parts(self, weight: WeightSpec) -> tuple[slice, ...]:
        """Return the part that is read, one slice per axis."""
        return self.layout.parts(self._spec, weight)

    def _to_read(self, weight: WeightSpec) -> Iterator[tuple[str, Index, int]]:
        """Yield (name, index, bytes) for each tensor with a part for this rank.

        The index selects the part. Several parts may be in one tensor.
        """
        part = self.parts(weight)
        names = weight.tensor_names
        if (block := self._blocks.get(weight.name)) is not None:
            moved = zip(part, block.start, strict=True)
            part = tuple(slice(axis.start + by, axis.stop + by) for axis, by in moved)
        if weight.is_per_expert:
            experts, part = range(part[0].start, part[0].stop), part[1:]
        else:
            experts = range(1)
        size = math.prod(axis.stop - axis.start for axis in part)
        for expert in experts:
            index: Index = part
            name = names[expert] if block is None else block.name
            if weight.is_per_expert and block is not None:
                index = (expert, *part)
            yield name, index, size * self._entries[name].itemsize

    def _count(self, name: str, index: Index, size: int) -> None:
        """Report progress; a tensor that is read twice counts once."""
        key = f"{name}{index}"
        if key in self._read:
            return
        self._read.add(key)
        self._done += size
        if self._progress is not None:
            self._progress(self._done, self._total)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor in a file, as the file's header describes it; `name` is its name there."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes per element; 1 if weights cannot have this dtype."""
        return DTYPE_BYTES.get(self.dtype, 1)

    @property
    def bytes(self) -> int:
        """Size."""
        return math.prod(self.shape) * self.itemsize


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
        raise ModelError(f"{file} {_damage(file)}: {error}") from error
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror or error}") from error


def _damage(file: Path) -> str:
    """Say how a file differs from its header."""
    unreadable = "is truncated or not a safetensors file"
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > size:
            return unreadable
        try:
            header = json.loads(opened.read(length))
            header.pop("__metadata__", None)
            ends = {name: 8 + length + tensor["data_offsets"][1] for name, tensor in header.items()}
        except (ValueError, TypeError, AttributeError, LookupError, OverflowError):
            return unreadable
    if cut := min((name for name in ends if ends[name] > size), key=ends.__getitem__, default=None):
        return f"is truncated within {cut}"
    if more := size - max(ends.values(), default=size):
        return f"has {more:,} bytes after its last tensor; get the file again"
    return unreadable


def _check_files(
    path: Path, spec: ModelSpec
) -> tuple[dict[str, _Entry], dict[str, TensorBlock], dict[str, _Entry]]:
    """Compare all headers with the spec.

    Returns:
        Each tensor's location, the block for each weight in its alternative place, and each skipped
        tensor's location.
    """
    weights = list(spec.weights)
    others = {each.name: each.alternative for each in weights if each.alternative is not None}
    known = {name for each in weights for name in each.tensor_names}
    known.update(block.name for block in others.values())
    entries: dict[str, _Entry] = {}
    for file in find_files(path):
        handle = _open(file)
        held: list[str] = handle.keys()
        for stored in held:
            # A model saved without its LM head, such as an embedding model, has names without this
            # prefix.
            name = f"{BASE}{stored}" if f"{BASE}{stored}" in known else stored
            if name in entries:
                raise ModelError(f"{entries[name].file} and {file} both have {name}")
            header = handle.get_slice(stored)
            entries[name] = _Entry(file, stored, tuple(header.get_shape()), header.get_dtype())
    blocks: dict[str, TensorBlock] = {}
    expected: dict[str, tuple[int, ...]] = {}
    for weight in weights:
        names, block = weight.tensor_names, others.get(weight.name)
        if block is None or block.name not in entries or any(name in entries for name in names):
            expected |= dict.fromkeys(names, weight.tensor_shape)
        else:
            blocks[weight.name] = block
            expected[block.name] = block.shape
    rest = {name: entry for name, entry in entries.items() if name not in expected}
    lm_head = rest.pop(LM_HEAD, None) if spec.lm_head is None else None
    if unexpected := [name for name in rest if not _patterns(name, spec)]:
        raise _unexpected(unexpected, rest[unexpected[0]].file, spec)
    if missing := [name for name in expected if name not in entries]:
        raise ModelError(f"{path} lacks {_join_first(missing)}, in any of its safetensors files")
    for name, shape in expected.items():
        _check_tensor(entries[name], shape)
    if lm_head is not None:
        _check_tied(entries[spec.embedding.name], lm_head)
    return entries, blocks, rest


def _patterns(name: str, spec: ModelSpec) -> list[str]:
    """Return the patterns in `spec.skipped` that match a name."""
    return [pattern for pattern in spec.skipped if fnmatch(name, pattern)]


def _unexpected(names: Sequence[str], file: Path, spec: ModelSpec) -> ModelError:
    """Return the error for tensors without a weight in the spec."""
    what = f"{file} has {_join_first(names)}, which {'is' if len(names) == 1 else 'are'}"
    if any(name.endswith(QUANTIZED) for name in names):
        return ModelError(
            f"{what} quantized; weft does not support that yet, so give the original model"
        )
    return ModelError(f"{what} no part of {spec.architecture}: remove it, or correct config.json")


def _log_skipped(skipped: Mapping[str, _Entry], spec: ModelSpec) -> None:
    patterns = sorted({_patterns(name, spec)[0] for name in skipped})
    size = human_bytes(sum(entry.bytes for entry in skipped.values()))
    logger.info("skipped tensors: %d, %s: %s", len(skipped), size, ", ".join(patterns))


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


def _check_tensor(entry: _Entry, shape: tuple[int, ...]) -> None:
    """Compare a tensor's header with its spec."""
    if entry.shape != shape:
        raise ModelError(
            f"{entry.file}: {entry.name} has shape {entry.shape}; by config.json it is {shape}"
        )
    if entry.dtype not in DTYPE_BYTES:
        supported = ", ".join(DTYPE_BYTES)
        raise ModelError(
            f"{entry.file}: {entry.name} is {entry.dtype}; supported is {supported}, so give the "
            "model without quantization"
        )


def _join_first(names: Sequence[str]) -> str:
    """Join the first few names."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
