"""safetensors -> tensors, checked against the model's description before any byte is read.

1. The files are found: model.safetensors, or the shards that
   model.safetensors.index.json names.
2. Every file's header is read and compared with the ModelSpec: a missing,
   unexpected or mis-shaped tensor, a type that is not plain floating point, or
   a file that is shorter than its header says, is a ModelError naming file and
   tensor. Nothing is skipped but what `_is_harmless` lists.
3. `Weights.read` gives one weight at a time, mapped into memory and not copied:
   the caller converts, packs or shards it and drops it, so that loading needs
   the model's memory plus the weight in hand.

Not here: pickled checkpoints (they can run code), quantised weights, and
writing. A file that is overwritten in place while it is mapped ends the
process (SIGBUS); replacing it by renaming is safe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weft.errors import ModelError
from weft.models.checkpoint import read_json
from weft.models.spec import ModelSpec, WeightSpec

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}

Progress = Callable[[int, int], None]
"""Called with (bytes read so far, bytes in all)."""


class Weights:
    """The tensors of a checkpoint, open for reading until the object goes away.

    Args:
        path: the checkpoint's directory.
        spec: what must be in it.
        progress: told after each weight how far reading has come.

    Raises:
        ModelError: the checkpoint is not what `spec` describes; see the module's text.
    """

    def __init__(self, path: Path, spec: ModelSpec, progress: Progress | None = None) -> None:
        self._handles = {file: _open(file) for file in find_files(path)}
        self._file_of = _find_tensors(path, spec, self._handles)
        self._progress = progress
        self._done = 0
        self._total = sum(self._bytes(weight) for weight in spec.weights)

    def read(self, weight: WeightSpec) -> Tensor:
        """One weight, in the checkpoint's type, shape `weight.shape`.

        It is a view of the mapped file and must not be written to; only the experts of a layer,
        which are many tensors, are put together in new memory.
        """
        tensors = [self._handle(name).get_tensor(name) for name in weight.tensor_names]
        self._done += self._bytes(weight)
        if self._progress is not None:
            self._progress(self._done, self._total)
        return torch.stack(tensors) if weight.is_per_expert else tensors[0]

    def keep_mapped(self, weight: WeightSpec) -> Tensor:
        """One weight through a mapping of its own, to be used from the file as long as it lives.

        Only what is looked at takes memory, and the system may take it back. The mapping is its
        own because the pages that reading has touched count as the process's until they are
        unmapped.
        """
        (name,) = weight.tensor_names
        tensor: Tensor = _open(self._file_of[name]).get_tensor(name)
        return tensor

    def _handle(self, name: str) -> Any:
        return self._handles[self._file_of[name]]

    def _bytes(self, weight: WeightSpec) -> int:
        name = weight.tensor_names[0]
        return weight.size * DTYPE_BYTES[self._handle(name).get_slice(name).get_dtype()]


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
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ModelError(f"{file} is truncated or not a safetensors file: {error}") from error
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error}") from error


def _find_tensors(path: Path, spec: ModelSpec, handles: dict[Path, Any]) -> dict[str, Path]:
    """Which file each of the model's tensors is in, after checking all of them."""
    wanted = {name: weight for weight in spec.weights for name in weight.tensor_names}
    file_of: dict[str, Path] = {}
    for file, handle in handles.items():
        names = handle.keys()
        unexpected = [name for name in names if name not in wanted and not _is_harmless(name, spec)]
        if unexpected:
            raise ModelError(f"{file} has {_some(unexpected)}, which {spec.architecture} has not")
        for name in names:
            if name in wanted:
                _check(file, name, handle.get_slice(name), wanted[name])
                if name in file_of:
                    raise ModelError(f"{file} and {file_of[name]} both have {name}")
                file_of[name] = file
    if missing := [name for name in wanted if name not in file_of]:
        raise ModelError(f"{path} lacks {_some(missing)}, in any of its safetensors files")
    return file_of


def _check(file: Path, name: str, entry: Any, weight: WeightSpec) -> None:
    shape = tuple(entry.get_shape())
    if shape != weight.tensor_shape:
        raise ModelError(
            f"{file}: {name} has shape {shape}; by config.json it is {weight.tensor_shape}"
        )
    if entry.get_dtype() not in DTYPE_BYTES:
        raise ModelError(
            f"{file}: {name} is {entry.get_dtype()}; supported is one of {', '.join(DTYPE_BYTES)}"
        )


def _is_harmless(name: str, spec: ModelSpec) -> bool:
    """Tensors that older exports hold though they follow from the rest of the model."""
    return name.endswith(".rotary_emb.inv_freq") or (
        name == "lm_head.weight" and spec.lm_head is None
    )


def _some(names: Sequence[str]) -> str:
    """The first few of many names."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
