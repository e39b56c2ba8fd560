"""Writes a checkpoint's tensors, in files of bounded size, with an index if there are several.

A file is written when its tensors have `SHARD_BYTES`, so that no more than these are in memory.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from weft.errors import DiskError
from weft.models.checkpoint.locate import INDEX_FILE, SINGLE_FILE

SHARD_BYTES = 2 * 2**30


class Shards:
    """The files with weights in one folder.

    Args:
        folder: an existing folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, Tensor] = {}
        self._held_bytes = 0
        self._files: list[tuple[Path, list[str]]] = []
        self.bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a contiguous tensor.

        Raises:
            DiskError: a file cannot be written.
        """
        if self._held and self._held_bytes + tensor.nbytes > SHARD_BYTES:
            self._write()
        self._held[name] = tensor
        self._held_bytes += tensor.nbytes
        self.bytes += tensor.nbytes

    def finish(self) -> None:
        """Write the last tensors, and give all files their names.

        Raises:
            DiskError: a file cannot be written.
        """
        self._write()
        names = [SINGLE_FILE]
        if (count := len(self._files)) > 1:
            names = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
        weight_map: dict[str, str] = {}
        for name, (path, tensors) in zip(names, self._files, strict=True):
            path.rename(self._folder / name)
            weight_map |= dict.fromkeys(tensors, name)
        if count == 1:
            return
        index = {"metadata": {"total_size": self.bytes}, "weight_map": weight_map}
        write_text(self._folder / INDEX_FILE, json.dumps(index, indent=2) + "\n")

    def _write(self) -> None:
        path = self._folder / f"part-{len(self._files)}.safetensors"
        try:
            path.touch()
            mode = path.stat().st_mode
            save_file(self._held, path, metadata={"format": "pt"})
            path.chmod(mode)  # safetensors makes files that others cannot read
        except (SafetensorError, OSError) as error:
            raise DiskError(f"cannot write {path}: {error}") from error
        self._files.append((path, list(self._held)))
        self._held, self._held_bytes = {}, 0


def write_text(path: Path, text: str) -> None:
    """Write a small file.

    Raises:
        DiskError: it cannot be written.
    """
    try:
        path.write_text(text)
    except OSError as error:
        raise DiskError(f"cannot write {path}: {error.strerror}") from error
