"""Tensors in GGUF files -> torch tensors, dequantised by the package `gguf`.

llama.cpp rotates neighbouring rows of queries and keys in some architectures; their files hold each
head's rows in that order. `GgufTensor.read` restores the order of config.json's models, where row i
is rotated with row i + head size / 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.models.checkpoint.dequantize import CHUNK
from weft.models.checkpoint.gguf_header import TensorInfo
from weft.models.checkpoint.read_ahead import Span

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types that are not quantised."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in a GGUF file, or one expert's part.

    Attributes:
        file: the file.
        info: the tensor's description in the header.
        shape: the tensor's own shape; the file may lack axes of length 1.
        start: its first byte in the file.
        head_dim: rows of a head, if they are in llama.cpp's order; else 0.
    """

    file: Path
    info: TensorInfo
    shape: tuple[int, ...]
    start: int
    head_dim: int = 0

    @property
    def name(self) -> str:
        """The tensor's name in the file."""
        return self.info.name

    @property
    def bytes(self) -> int:
        """Size in the file."""
        size: int = torch.Size(self.shape).numel()
        return size // self.info.block * self.info.block_bytes

    def read(self, index: tuple[int | slice, ...]) -> Tensor:
        """Return a part of the tensor: float32 if the file has it quantised, else its own dtype.

        Args:
            index: the part, a slice with start and stop for each axis.
        """
        info, columns = self.info, self.shape[-1]
        row = columns // info.block * info.block_bytes
        # Copied on write: torch warns about arrays that cannot be written to.
        stored = np.memmap(self.file, np.uint8, "c", self.start, (self.bytes // row, row))
        *leading, part = index
        assert isinstance(part, slice)
        if not leading:
            vector = self._numbers(stored, slice(0, columns))[0]
            return vector[self._rows(part)]
        (rows,) = leading
        assert isinstance(rows, slice)
        return self._numbers(stored[self._rows(rows)], part)

    def spans(self, index: tuple[int | slice, ...]) -> list[Span]:
        """Return the bytes that a part has: whole rows."""
        if len(index) == 1:
            return [Span(self.file, self.start, self.start + self.bytes)]
        rows, row = index[0], self.bytes // self.shape[0]
        assert isinstance(rows, slice)
        return [Span(self.file, self.start + rows.start * row, self.start + rows.stop * row)]

    def _rows(self, rows: slice) -> slice | NDArray[np.int64]:
        """Return where the file has these rows."""
        if not self.head_dim:
            return rows
        wanted = np.arange(rows.start, rows.stop)
        head, row = np.divmod(wanted, self.head_dim)
        half, pair = np.divmod(row, self.head_dim // 2)
        order: NDArray[np.int64] = head * self.head_dim + 2 * pair + half
        return order

    def _numbers(self, stored: NDArray[np.uint8], columns: slice) -> Tensor:
        """Return the columns of stored rows; only the blocks with these columns are computed."""
        block, size = self.info.block, self.info.block_bytes
        first, last = columns.start // block, -(-columns.stop // block)
        blocks = stored[:, first * size : last * size]
        if self.info.type in PLAIN:
            return torch.from_numpy(blocks).view(PLAIN[self.info.type])
        from gguf import GGMLQuantizationType, dequantize

        kind = GGMLQuantizationType[self.info.type]
        numbers = torch.empty(len(blocks), (last - first) * block)
        step = max(1, CHUNK // numbers.shape[1])
        with np.errstate(all="ignore"):  # the loader looks for NaN and infinities
            for i in range(0, len(blocks), step):
                part = dequantize(blocks[i : i + step], kind)
                numbers[i : i + step] = torch.from_numpy(part)
        return numbers[:, columns.start - first * block : columns.stop - first * block]
