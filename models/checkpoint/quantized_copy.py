"""A checkpoint -> its quantised copy, one tensor at a time.

Quantised are the matrices in attention, in MLPs and in experts. All other tensors are copied as
they are: embedding, LM head, routers, gates of shared experts, norms, biases, and parts of the
model that weft does not run. Linear modules among them are in the copy's list `ignore`.

A matrix keeps its name and its form, with two exceptions. Stacked experts become one matrix for
each expert, as in all checkpoints of compressed-tensors. Each has its gate and up matrix, too.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from weft.errors import ConfigError, DiskError, ModelError
from weft.models.checkpoint.gguf_header import is_gguf
from weft.models.checkpoint.locate import INDEX_FILE, find_files, read_config
from weft.models.checkpoint.quantize import quantize
from weft.models.checkpoint.shards import Shards, write_text
from weft.models.checkpoint.weights import PREFIXES, Progress, Weights, read_header
from weft.models.spec.quantization import SECTION
from weft.models.spec.schemes import GROUP_SIZES, SCHEMES, Scheme, quantization_config
from weft.models.spec.spec import ModelSpec, Place, WeightSpec

SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*")
"""Files that are copied: tokenizer, chat template, sampling defaults, terms of use."""
OTHER_FILES = ("config.json", INDEX_FILE, "params.json")
"""Files that are not: the copy has its own, or they describe the original weights."""

Edit = Callable[[str, Tensor], Tensor]
"""Changes a tensor before it is rounded or copied, by its name in the copy."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix to quantise.

    Attributes:
        name: its name in the copy.
        shape: [out, in].
        expert: its index in a stack; None if it is a tensor of its own.
        start: its first row in a stack's matrices.
        transposed: the stack has [in, out].
    """

    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    start: int = 0
    transposed: bool = False

    def of(self, tensor: Tensor) -> Tensor:
        """Take the matrix [out, in] from the tensor in the file."""
        if self.expert is None:
            return tensor
        one = tensor[self.expert]
        return (one.t() if self.transposed else one)[self.start : self.start + self.shape[0]]


def check_source(path: Path, spec: ModelSpec) -> None:
    """Refuse a checkpoint that is quantised already.

    Raises:
        ModelError: it is.
    """
    if is_gguf(path):
        raise ModelError(
            f"{path} is a GGUF file; weft quantize takes safetensors: give the original model"
        )
    if spec.quantization is not None:
        raise ModelError(
            f"{path / 'config.json'} has {SECTION}: the model is quantized already, and rounding "
            "twice loses more; give the original model"
        )


def quantized_weights(spec: ModelSpec) -> list[WeightSpec]:
    """Return every weight that is quantised, in the order of use."""
    products = spec.products()
    return [weight for weight in spec.weights if weight in products]


def copy_names(weights: Weights, weight: WeightSpec) -> list[str]:
    """Return a weight's tensors in the copy: one, or one for each expert.

    A weight inside a fused matrix has the whole matrix.
    """
    place, stored = weights.sources(weight)
    if not weight.has_experts or place.is_per_expert:
        return [each.name for each in stored]
    # The stack's prefix in the file may be another than in weft.
    name = weight.name
    for theirs, ours in (("", ""), *PREFIXES):
        if place.name.startswith(ours) and stored[0].name == theirs + place.name[len(ours) :]:
            name = theirs + weight.name[len(ours) :]
            break
    return [name.format(expert=expert) for expert in range(weight.shape[0])]


def _matrices(spec: ModelSpec, weights: Weights) -> dict[str, list[Matrix]]:
    """Return all matrices to quantise, by their tensor in the files."""
    found: dict[str, list[Matrix]] = {}
    for weight in quantized_weights(spec):
        place, stored = weights.sources(weight)
        names = copy_names(weights, weight)
        if weight.has_experts and not place.is_per_expert:
            found.setdefault(stored[0].name, []).extend(
                Matrix(name, weight.shape[1:], expert, _first_row(place), place.transposed)
                for expert, name in enumerate(names)
            )
            continue
        for tensor, name in zip(stored, names, strict=True):
            # A fused matrix belongs to several weights.
            found[tensor.name] = [Matrix(name, tensor.shape)]
    return found


def _first_row(place: Place) -> int:
    """Return a weight's first row in each matrix of a stack."""
    return place.start[-1 if place.transposed else -2] if place.start else 0


def check_sizes(scheme: Scheme, spec: ModelSpec, weights: Weights) -> None:
    """Check that the scheme's groups fit all matrices.

    Raises:
        ConfigError: they do not; with the tensor, its size and sizes that work.
    """
    all_of = [each for some in _matrices(spec, weights).values() for each in some]
    unit = scheme.unit
    wrong = next((each for each in all_of if each.shape[1] % unit), None)
    if wrong is None:
        return
    columns = {each.shape[1] for each in all_of}
    working = [size for size in GROUP_SIZES if not any(count % size for count in columns)]
    others = " or ".join(name for name, other in SCHEMES.items() if other.unit == 1)
    advice = f"use --format {others}"
    if working:
        advice = f"these group sizes work: {', '.join(map(str, working))}"
    flag = "--group-size" if scheme.spec.block[1] else f"--format {scheme.name}: the word's size"
    raise ConfigError(
        f"{flag} is {unit}; it must divide the columns of all matrices, and {wrong.name} has "
        f"{wrong.shape[1]}; {advice}"
    )


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of the weights before and after."""

    before: int
    after: int


def write_copy(
    path: Path,
    spec: ModelSpec,
    folder: Path,
    scheme: Scheme,
    *,
    edits: Mapping[str, Sequence[Edit]] = {},
    progress: Progress,
) -> Sizes:
    """Write a checkpoint's quantised copy into an empty folder.

    Args:
        path: the checkpoint; `check_source` accepts it.
        spec: its model.
        folder: the copy's folder.
        scheme: how to quantise.
        edits: changes of tensors, by name in the copy.
        progress: called with the bytes read so far, and in total.

    Raises:
        ConfigError: the scheme's groups do not fit a matrix.
        ModelError: a tensor is damaged.
        DiskError: a file cannot be written.
    """
    weights = Weights(path, spec)
    check_sizes(scheme, spec, weights)
    matrices = _matrices(spec, weights)
    embedding = weights.sources(spec.embedding)[1][0].name
    shards = Shards(folder)
    ignored: list[str] = []
    done = 0
    entries = [
        entry
        for file in find_files(path)
        for entry in sorted(read_header(file).values(), key=lambda entry: entry.start)
    ]
    total = sum(entry.bytes for entry in entries)
    for entry in entries:
        tensor = entry.map()
        for matrix in matrices.get(entry.name, ()):
            part = _edited(matrix.name, matrix.of(tensor), edits)
            if not part.isfinite().all():
                raise ModelError(
                    f"{entry.file}: {entry.name} holds NaN or an infinity; the file is damaged"
                )
            for name, packed in quantize(scheme.spec, matrix.name, part, tensor.dtype).items():
                shards.add(name, packed)
        if entry.name not in matrices:
            shards.add(entry.name, _edited(entry.name, tensor, edits).to(tensor.dtype))
            if len(entry.shape) > 1 and entry.name.endswith(".weight") and entry.name != embedding:
                ignored.append(entry.name.removesuffix(".weight"))
        done += entry.bytes
        progress(done, total)
    shards.finish()
    if "lm_head" not in ignored:
        ignored.append("lm_head")
    _write_small_files(path, folder, quantization_config(scheme, ignored))
    return Sizes(done, shards.bytes)


def _edited(name: str, tensor: Tensor, edits: Mapping[str, Sequence[Edit]]) -> Tensor:
    for edit in edits.get(name, ()):
        tensor = edit(name, tensor)
    return tensor


def _write_small_files(path: Path, folder: Path, section: dict[str, object]) -> None:
    """Copy the tokenizer and the like, and write config.json.

    Raises:
        DiskError: a file cannot be written.
    """
    try:
        for pattern in SMALL_FILES:
            for file in path.glob(pattern):
                if file.name not in OTHER_FILES and file.is_file():
                    shutil.copyfile(file, folder / file.name)
    except OSError as error:
        raise DiskError(f"cannot copy {file} to {folder}: {error.strerror}") from error
    config = read_config(path) | {SECTION: section}
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
