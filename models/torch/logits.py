"""Logits whose columns ranks share: what is asked of them moves, and no more.

The likeliest token of each row takes two numbers of each rank. Rows are put
together only where one is sampled, penalised or scored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels.cpu.argmax import argmax
from weft.models.torch.group import ALONE, Group


class Logits:
    """[S, V], of which this rank has some columns. All ranks call the same methods.

    Args:
        local: [S, n], any float dtype; this rank's columns.
        columns: V; each rank has ceil(V / size) of them, but the last ones, which may have fewer.
        group: the ranks.
    """

    def __init__(self, local: Tensor, columns: int, group: Group) -> None:
        self._local = local
        self._group = group
        self.shape = len(local), columns

    @classmethod
    def whole(cls, logits: Tensor) -> Logits:
        """Logits [S, V] that are all here."""
        return cls(logits, logits.shape[1], ALONE.tensor)

    def __len__(self) -> int:
        return self.shape[0]

    def argmax(self) -> tuple[Tensor, Tensor]:
        """The largest of each row and where it is first; NaN if there is one.

        Returns:
            float32 [S], int64 [S]; the same on all ranks.
        """
        if self._group.size == 1:
            return argmax(self._local)
        rows, columns = self.shape
        each = -(-columns // self._group.size)
        here = torch.full((rows, 2), -torch.inf, dtype=torch.float64)  # holds any id
        here[:, 1] = 0
        if self._local.shape[1]:
            largest, index = argmax(self._local)
            here[:, 0], here[:, 1] = largest, index + self._group.index * each
        all_ranks = self._group.gather_columns(here, 2 * self._group.size)
        largest, index = here.new_full((rows,), -torch.inf), here.new_zeros(rows)
        for value, at in (part.unbind(1) for part in all_ranks.view(rows, -1, 2).unbind(1)):
            better = (value > largest) | value.isnan()
            largest, index = torch.where(better, value, largest), torch.where(better, at, index)
        return largest.float(), index.long()

    def rows(self, index: list[int] | slice) -> Tensor:
        """[R, V]; the same on all ranks."""
        return self._group.gather_columns(self._local[index], self.shape[1])
