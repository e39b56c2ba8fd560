"""Logits with their columns split over ranks, which exchange small summaries on a CPU.

| method | each rank sends for a row |
| --- | --- |
| argmax, amax | its largest number, and where |
| candidates, top | its largest k numbers, and where |
| score | the log of its sum of exponentials, one logit, and how many logits are larger |
| deal | its columns of the row, to one rank; GPUs then draw without waiting for the host |

Every result is the same on all ranks. Except for rounding in `score`, it does not depend on the
number of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels.cpu.sampling import argmax
from weft.models.torch.group import ALONE, Group


class Logits:
    """[S, V], with some columns on this rank. All ranks call the same methods.

    Args:
        local: [S, n], any float dtype; this rank's columns.
        columns: V; each rank has ceil(V / size) columns, and the last ranks may have fewer.
        group: the ranks.

    Attributes:
        local, group: as given.
        shape: S, V.
        each: columns on the first rank.
        own: this rank's columns.
    """

    def __init__(self, local: Tensor, columns: int, group: Group) -> None:
        self.local = local
        self.group = group
        self.shape = len(local), columns
        self.each = -(-columns // group.size)
        first = group.index * self.each
        self.own = range(first, first + local.shape[1])

    @classmethod
    def whole(cls, logits: Tensor) -> Logits:
        """Wrap logits [S, V] with all columns on this rank."""
        return cls(logits, logits.shape[1], ALONE.tensor)

    def __len__(self) -> int:
        return self.shape[0]

    def float_rows(self, index: list[int] | slice) -> Logits:
        """Select rows, in float32; shares memory if possible."""
        if isinstance(index, list) and index == list(range(len(self))):
            index = slice(None)
        return Logits(self.local[index].float(), self.shape[1], self.group)

    def select(self, index: Tensor | slice) -> Logits:
        """Select rows in their dtype; shares memory if `index` is a slice."""
        return Logits(self.local[index], self.shape[1], self.group)

    def deal(self, rows: Tensor) -> Tensor:
        """Deal out some rows, so that each rank has whole ones.

        Args:
            rows: int64 [D].

        Returns:
            [n, V], n = ceil(D / size); rank r has the rows from r n to before (r + 1) n. Behind the
            D rows there are zeros.
        """
        ranks = self.group.size
        each = -(-len(rows) // ranks)
        sent = self.local.new_zeros(ranks * each, self.each)
        sent[: len(rows), : self.local.shape[1]] = self.local[rows]
        parts = self.group.all_to_all(sent.view(ranks, each, self.each))
        return parts.transpose(0, 1).contiguous().view(each, -1)[:, : self.shape[1]]

    def argmax(self) -> tuple[Tensor, Tensor]:
        """Find each row's largest number and its first column; NaN if the row has one.

        Returns:
            float32 [S], int64 [S].
        """
        if self.group.size == 1:
            return argmax(self.local)
        device = self.local.device
        here = torch.full((2, len(self)), -torch.inf, dtype=torch.float64, device=device)  # any id
        here[1] = 0
        if self.own:
            largest, index = argmax(self.local)
            here[0], here[1] = largest, index + self.own.start
        largest, index = torch.full_like(here[0], -torch.inf), torch.zeros_like(here[1])
        for value, at in self.group.gather(here).unbind():
            better = (value > largest) | value.isnan()
            largest, index = torch.where(better, value, largest), torch.where(better, at, index)
        return largest.float(), index.long()

    def amax(self) -> Tensor:
        """Find each row's largest number, float32 [S]; rows must not have NaN."""
        if not self.own:
            empty = torch.full((len(self),), -torch.inf, device=self.local.device)
            return self.group.gather(empty).amax(0)
        return self.group.gather(self.local.amax(-1).float()).amax(0)

    def candidates(self, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Collect the `width` largest float32 logits from each rank's columns.

        Returns:
            float32 [S, M], the values, largest first; the whole row if V is at most `width`;
            int64 [S, M], their columns;
            float32 [S], an upper bound for all other logits; -inf if there are none.
        """
        values, ids = self.local.topk(min(width, len(self.own)))
        unlisted = values.new_full((len(self),), -torch.inf)
        if self.group.size == 1:
            return values, ids, values[:, -1] if 0 < width < self.shape[1] else unlisted
        message = ids.new_zeros(2, len(self), min(width, self.each), dtype=torch.int32)
        message[0, :, : values.shape[1]] = values.view(torch.int32)
        message[1, :, : values.shape[1]] = ids + self.own.start
        lists = []
        for rank, part in enumerate(self.group.gather(message)):
            columns = min(self.each, max(0, self.shape[1] - rank * self.each))
            lists.append(part[..., : min(width, columns)])
            if 0 < width < columns:
                unlisted = unlisted.maximum(part[0, :, -1].view(torch.float32))
        bits, ids = torch.cat(lists, dim=-1)
        values, order = bits.view(torch.float32).sort(dim=-1, descending=True, stable=True)
        return values, ids.long().gather(1, order), unlisted

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """Find the k largest numbers in each row, largest first: [S, k], and their columns, int64
        [S, k].
        """
        values, ids, _ = self.candidates(k)
        return values[:, :k], ids[:, :k]

    def score(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Score one token in each row; `ids` is int64 [S].

        Returns:
            float32 [S], its logit;
            float32 [S], the log of the row's sum of exponentials;
            int64 [S], the token's rank: 1 for the largest.
        """
        column = ids - self.own.start
        here = (column >= 0) & (column < len(self.own))
        message = torch.full((2, len(self)), -torch.inf, device=ids.device)
        if self.own:
            logit = self.local.gather(1, column.clamp(0, len(self.own) - 1)[:, None]).flatten()
            message[0] = logit.masked_fill(~here, -torch.inf)
            largest = self.local.amax(-1)  # half the time of logsumexp
            message[1] = largest - self.local.log_softmax(-1).amax(-1)
            message[1].masked_fill_(largest == -torch.inf, -torch.inf)
        gathered = self.group.gather(message)
        chosen = gathered[:, 0].amax(0)
        larger = self.group.sum((self.local > chosen[:, None]).sum(-1))
        return chosen, gathered[:, 1].logsumexp(0), larger + 1
