"""A checkpoint's files -> tensors, checked against the model's spec before any tensor is read.

1. Find the files: model.safetensors, the shards that model.safetensors.index.json names, or one
   GGUF file.
2. Read every file's header and compare it with the ModelSpec. A missing, unexpected or mis-shaped
   tensor, a dtype other than plain floating point, or a truncated file raises a ModelError with
   file and tensor. Only tensors in `ModelSpec.skipped` are skipped; the log names them.
3. `Weights.read` returns one tensor at a time, or this rank's part, as a view of the mapped file.
   The caller converts or packs it and drops it. Loading therefore needs the model's memory plus one
   tensor, and reads only what the rank keeps. Within `Weights.read_ahead`, the system reads what
   comes next (read_ahead.py). NaN or an infinity in a tensor raises a ModelError.

A quantised matrix is one entry here, with its own name and shape (stored.py). `read` converts the
part to float32, so no backend sees the checkpoint's quantisation. A tensor in a GGUF file is an
entry, too (gguf_tensor.py).

Not handled: pickled checkpoints (they can run code), and writing. Overwriting a mapped file in
place kills the process (SIGBUS); replacing it by renaming is safe.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weft.errors import ModelError
from weft.kernels.packed import PackedForm, PackedMatrix
from weft.models.checkpoint.gguf_header import check_gguf, is_gguf
from weft.models.checkpoint.gguf_model import gguf_tensors
from weft.models.checkpoint.gguf_tensor import PLAIN, GgufTensor
from weft.models.checkpoint.locate import find_files
from weft.models.checkpoint.read_ahead import ReadAhead
from weft.models.checkpoint.stored import (
    PART_ENDS,
    Entry,
    Index,
    Quantized,
    join_quantized,
)
from weft.models.memory.ledger import human_bytes
from weft.models.spec.layout import WHOLE, Layout
from weft.models.spec.quantization import SECTION
from weft.models.spec.spec import ModelSpec, Place, WeightSpec

LM_HEAD = "lm_head.weight"
PREFIXES = (
    ("", "model."),
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.", ""),
)
"""Prefixes of tensor names in other checkpoints, with weft's: of a model saved without its LM head,
such as an embedding model, and of the text model inside one for several modalities."""
LFS_POINTER = b"version https://git-lfs.github.com/"
COMPARED = 16 * 2**20
"""Numbers of two tensors that are compared at once."""
PLAIN_DTYPES = ("F32", "BF16", "F16")

Progress = Callable[[int, int], None]
"""Called with (bytes read so far, bytes in total)."""

Stored = Entry | Quantized | GgufTensor
"""A tensor in a checkpoint."""

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
        self._entries, self._places, self._skipped = _check_files(path, spec)
        if self._skipped and layout.rank == 0:
            _log_skipped(self._skipped, spec)
        self._spec = spec
        self.layout = layout
        own = layout.of_stage(spec).weights
        parts = [part for weight in own for part in self._to_read(weight)]
        self._total = sum(part.size for part in parts)
        self._ahead = ReadAhead(
            span for part in parts for span in self._entries[part.tensor].spans(part.where)
        )
        self._done = 0
        self._read: set[str] = set()
        self._progress = progress

    def read(self, weight: WeightSpec) -> Tensor:
        """Read this rank's part of a weight without experts. A tensor for each head is stacked.

        It has the checkpoint's dtype; a quantised or scaled weight is float32. The result may be a
        view of the mapped file: do not write to it.

        Raises:
            ModelError: the part holds NaN or an infinity, or its scales are wrong.
        """
        if weight.is_stack:
            return torch.stack(list(self.read_each(weight)))
        (tensor,) = self.read_each(weight)
        return tensor

    def stays_in_file(self, weight: WeightSpec) -> bool:
        """Tell whether `read` returns a view of the mapped file, which takes no memory."""
        if weight.is_ones:
            return False
        stored = (self._entries[part.tensor] for part in self._to_read(weight))
        return weight.scale == 1.0 and not weight.head_order and not any(map(_is_quantized, stored))

    def read_each(self, weight: WeightSpec) -> Iterator[Tensor]:
        """Yield this rank's tensors for a weight, one at a time, as in `read`.

        A weight with experts has one tensor for each expert. If experts are cut, only this rank's
        part is read.
        """
        if weight.is_ones:
            yield torch.ones([part.stop - part.start for part in self.parts(weight)])
            return
        for part in self._parts(weight):
            entry = self._entries[part.tensor]
            tensor = entry.read(part.where)
            _check_finite(tensor, entry)
            if part.transposed:
                tensor = tensor.mT
            if (order := weight.head_order) and weight.axes[-1] == "head_dim":
                tensor = tensor[..., list(order)]
            elif order:
                heads = tensor.reshape(-1, len(order), *tensor.shape[1:])
                tensor = heads[:, list(order)].flatten(0, 1)
            if weight.scale != 1.0:
                tensor = tensor.float() * weight.scale
            yield tensor

    def packed_form(self, weight: WeightSpec) -> PackedForm | None:
        """Return the form in which kernels can read this rank's part as it is stored.

        None if the weight is not quantised, or kernels do not know its form.
        """
        forms = set()
        for part in self._to_read(weight):
            stored = self._entries[part.tensor]
            if not isinstance(stored, Quantized) or stored.is_transposed != part.transposed:
                return None
            forms.add(stored.form_of(part.where))
        form = forms.pop()
        if forms or form is None:
            return None
        kind, block, has_zeros = form
        return kind, (1, block[1]) if weight.head_order else block, has_zeros  # see read_packed

    def read_packed(self, weight: WeightSpec) -> Iterator[PackedMatrix]:
        """Yield this rank's matrices for a weight with a `packed_form`, one for each expert.

        Raises:
            ModelError: as in `read`.
        """
        for part in self._parts(weight):
            stored = self._entries[part.tensor]
            assert isinstance(stored, Quantized), "packed_form"
            matrix = stored.pack(part.where)
            if order := weight.head_order:
                rows = torch.arange(matrix.shape[0]).view(-1, len(order))
                matrix = matrix.permuted(rows[:, list(order)].flatten())
            yield matrix.scaled(weight.scale)

    def _parts(self, weight: WeightSpec) -> Iterator[_Part]:
        """Yield each part to read; then count it."""
        for part in self._to_read(weight):
            self._ahead.at(self._entries[part.tensor].spans(part.where)[0])
            yield part
            self._count(part)

    def read_ahead(self) -> AbstractContextManager[None]:
        """Have the system read what this rank reads next, while the caller packs other tensors."""
        return self._ahead.running()

    def sources(self, weight: WeightSpec) -> tuple[Place, list[Stored]]:
        """Return where the checkpoint holds a whole weight: the place, and the tensors there."""
        place = self._places[weight.name]
        return place, [self._entries[name] for name in place.tensors(weight.shape[0])]

    def cache_scale(self, weight: WeightSpec, which: Literal["k", "v"]) -> float:
        """Return the scale of a layer's keys or values in an fp8 cache; 1 if there is none.

        compressed-tensors and vLLM name it after the attention, ModelOpt after the projection.

        Args:
            weight: of the projection that makes the keys or values.
            which: "k" for keys, "v" for values.

        Raises:
            ModelError: it is not one positive number.
        """
        projection = weight.name.removesuffix(".weight")
        attention = projection.rpartition(".")[0]
        names = [f"{module}.{which}_scale" for module in (attention, projection)]
        for stored, entry in self._skipped.items():
            if isinstance(entry, Entry) and _known_name(stored, set(names)) in names:
                tensor = entry.map()
                if tensor.numel() != 1:
                    raise ModelError(
                        f"{entry.file}: {entry.name} has shape {entry.shape}; with "
                        "--kv-cache-dtype fp8 it must be one number"
                    )
                if not 0 < (scale := float(tensor)) < math.inf:
                    raise ModelError(
                        f"{entry.file}: {entry.name} holds {scale}; a scale of an fp8 cache is a "
                        "positive number, so the file is damaged"
                    )
                return scale
        return 1.0

    def parts(self, weight: WeightSpec) -> tuple[slice, ...]:
        """Return the part that is read, one slice per axis."""
        return self.layout.parts(self._spec, weight)

    def _to_read(self, weight: WeightSpec) -> Iterator[_Part]:
        """Yield each tensor's part for this rank. Several parts may be in one tensor."""
        if weight.is_ones:
            return
        place, part = self._places[weight.name], self.parts(weight)
        if weight.is_stack:
            experts, part = range(part[0].start, part[0].stop), part[1:]
        else:
            experts = range(1)
        size = math.prod(axis.stop - axis.start for axis in part)
        if place.transposed:
            part = (*part[:-2], part[-1], part[-2])
        in_stack = weight.is_stack and not place.is_per_expert
        more = len(place.shape) - len(part)  # axes before the weight's: experts, or one of length 1
        if start := place.start[more:]:
            part = tuple(slice(a.start + s, a.stop + s) for a, s in zip(part, start, strict=True))
        for expert in experts:
            tensor = place.tensor(expert)
            index: Index = (*([expert if in_stack else 0] * more), *part)
            entry = self._entries[tensor]
            stored = size * entry.bytes // math.prod(entry.shape)
            yield _Part(tensor, index, stored, place.transposed)

    def _count(self, part: _Part) -> None:
        """Report progress; a tensor that is read twice counts once."""
        key = f"{part.tensor}{part.where}"
        if key in self._read:
            return
        self._read.add(key)
        self._done += part.size
        if self._progress is not None:
            self._progress(self._done, self._total)


class _Part(NamedTuple):
    """A part of a tensor: where it is, and its bytes there; whether it is read transposed."""

    tensor: str
    where: Index
    size: int
    transposed: bool


def read_header(file: Path) -> dict[str, Entry]:
    """Return the tensors in a safetensors file, by name; the library checks the header.

    Raises:
        ModelError: the file cannot be read, or does not fit its header.
    """
    try:
        with file.open("rb") as opened:  # safetensors reports every unreadable file as missing
            size = int.from_bytes(opened.read(8), "little")
            names: list[str] = safe_open(file, framework="pt").keys()  # type: ignore[no-untyped-call]
            header = json.loads(opened.read(size))
    except SafetensorError as error:
        with file.open("rb") as opened:
            if opened.read(len(LFS_POINTER)) == LFS_POINTER:
                raise ModelError(
                    f"{file} is a Git LFS pointer, not the weights; fetch them: git lfs pull"
                ) from error
        raise ModelError(f"{file} {_damage(file)}: {error}") from error
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror or error}") from error
    entries = {}
    for name in names:
        tensor = header[name]
        start, stop = tensor["data_offsets"]
        place = 8 + size + start, stop - start
        entries[name] = Entry(file, name, tuple(tensor["shape"]), tensor["dtype"], *place)
    return entries


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
) -> tuple[dict[str, Stored], dict[str, Place], dict[str, Stored]]:
    """Compare all headers with the spec.

    Returns:
        Each tensor's location, each weight's place, and each skipped tensor's location.
    """
    weights = list(spec.weights)
    tensors = {
        place: place.tensors(each.shape[0]) for each in weights for place in each.known_places
    }
    known = {name for names in tensors.values() for name in names}
    entries: dict[str, Stored] = {}
    for stored, entry in _stored(path, spec).items():
        name = _known_name(stored, known)
        if (other := entries.setdefault(name, entry)) is not entry:
            raise ModelError(f"{other.file} and {entry.file} both have {name}")

    def fits(place: Place) -> tuple[bool, bool]:
        found = next((entries[name] for name in tensors[place] if name in entries), None)
        return found is not None, found is not None and found.shape == place.shape

    places = {weight.name: max(weight.known_places, key=fits) for weight in weights}
    expected = {name: place.shape for place in places.values() for name in tensors[place]}
    rest = {name: entry for name, entry in entries.items() if name not in expected}
    lm_head = rest.pop(LM_HEAD, None) if spec.lm_head is None else None
    for name in [name for name in rest if _is_extra_bias(name, entries)]:
        _check_zero(rest.pop(name))
    if unexpected := [name for name in rest if not _patterns(name, spec)]:
        raise _unexpected(unexpected, rest[unexpected[0]].file, spec)
    if missing := [name for name in expected if name not in entries]:
        where = "" if is_gguf(path) else ", in any of its safetensors files"
        raise ModelError(f"{path} lacks {_join_first(missing)}{where}")
    for name, shape in expected.items():
        _check_tensor(entries[name], shape)
    if lm_head is not None:
        _check_tied(entries[spec.embedding.name], lm_head)
    return entries, places, rest


def _is_quantized(stored: Stored) -> bool:
    if isinstance(stored, GgufTensor):
        return stored.info.type not in PLAIN
    return isinstance(stored, Quantized)


def _stored(path: Path, spec: ModelSpec) -> Mapping[str, Stored]:
    """Return every tensor in a checkpoint; a quantised matrix is one."""
    if is_gguf(path):
        check_gguf()
        return gguf_tensors(path)
    return join_quantized(_read_headers(path), spec.quantization)


def _described(file: Path) -> str:
    """Name the part of a checkpoint that describes the model, for messages about a file of it."""
    return "its metadata" if is_gguf(file) else "config.json"


def _read_headers(path: Path) -> dict[str, Entry]:
    """Return every tensor in a checkpoint's safetensors files."""
    entries: dict[str, Entry] = {}
    for file in find_files(path):
        for name, entry in read_header(file).items():
            if (other := entries.setdefault(name, entry)) is not entry:
                raise ModelError(f"{other.file} and {file} both have {name}")
    return entries


def _known_name(stored: str, known: Set[str]) -> str:
    """Return the known name of a tensor; its own if no prefix leads to one."""
    for prefix, ours in PREFIXES:
        if stored.startswith(prefix) and (name := ours + stored[len(prefix) :]) in known:
            return name
    return stored


def _is_extra_bias(name: str, entries: Mapping[str, Stored]) -> bool:
    """Tell whether a name is the bias of a GPTQ matrix; AutoGPTQ gives one to every matrix."""
    if not name.endswith(".bias"):
        return False
    matrix = entries.get(_known_name(name.removesuffix("bias") + "weight", entries.keys()))
    return isinstance(matrix, Quantized) and matrix.spec.format in ("gptq", "gptq_v2")


def _check_zero(bias: Stored) -> None:
    """Check that a bias without a place in the model has no effect."""
    if bias.read((slice(0, bias.shape[0]),)).count_nonzero():
        raise ModelError(f"{bias.file}: {bias.name} is not 0, but the model has no such bias")


def _patterns(name: str, spec: ModelSpec) -> list[str]:
    """Return the patterns in `spec.skipped` that match a name."""
    return [pattern for pattern in spec.skipped if fnmatch(name, pattern)]


def _unexpected(names: Sequence[str], file: Path, spec: ModelSpec) -> ModelError:
    """Return the error for tensors without a weight in the spec."""
    what = f"{file} has {_join_first(names)}, which {'is' if len(names) == 1 else 'are'}"
    if any(name.endswith(PART_ENDS) for name in names):
        here = "no" if spec.quantization is None else "another"
        return ModelError(f"{what} part of a quantized weight; config.json has {here} {SECTION}")
    advice = f"remove it, or correct {_described(file)}"
    return ModelError(f"{what} no part of {spec.architecture}: {advice}")


def _log_skipped(skipped: Mapping[str, Stored], spec: ModelSpec) -> None:
    patterns = sorted({_patterns(name, spec)[0] for name in skipped})
    size = human_bytes(sum(entry.bytes for entry in skipped.values()))
    logger.info("skipped tensors: %d, %s: %s", len(skipped), size, ", ".join(patterns))


def _check_tied(embedding: Stored, lm_head: Stored) -> None:
    """Compare a tied model's LM head with its embedding. Some exports hold both.

    Raises:
        ModelError: they differ, so the config or the file is wrong.
    """
    for each in (embedding, lm_head):
        if isinstance(each, Quantized):
            raise ModelError(
                f"{each.file}: {each.name} is quantized, but tie_word_embeddings is true; set it "
                "to false in config.json to use both tensors"
            )
    one, other = (
        each.read(tuple(slice(0, size) for size in each.shape)) for each in (embedding, lm_head)
    )
    equal = (one.shape, one.dtype) == (other.shape, other.dtype)
    rows = max(1, COMPARED // one.shape[1])
    for start in range(0, len(one), rows) if equal else ():
        block = one[start : start + rows]
        _check_finite(block, embedding)  # NaN equals nothing
        equal = equal and block.equal(other[start : start + rows])
    if not equal:
        raise ModelError(
            f"{lm_head.file}: {LM_HEAD} differs from {embedding.name}, but tie_word_embeddings is "
            "true; set it to false in config.json to use both tensors"
        )


def _check_finite(tensor: Tensor, entry: Stored) -> None:
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


def _check_tensor(entry: Stored, shape: tuple[int, ...]) -> None:
    """Compare a tensor's header with its spec."""
    if entry.shape != shape:
        raise ModelError(
            f"{entry.file}: {entry.name} has shape {entry.shape}; by {_described(entry.file)} it "
            f"is {shape}"
        )
    if isinstance(entry, Entry) and entry.dtype not in PLAIN_DTYPES:
        supported = ", ".join(PLAIN_DTYPES)
        raise ModelError(
            f"{entry.file}: {entry.name} is {entry.dtype}; supported is {supported}, and quantized "
            f"weights as {SECTION} in config.json describes them"
        )


def _join_first(names: Sequence[str]) -> str:
    """Join the first few names."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
