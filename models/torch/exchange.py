"""How ranks that share a model's layers exchange numbers inside them, between Triton kernels.

`Plain` is torch.distributed's collectives after the products: NCCL between GPUs, gloo
between CPUs. All ranks have all tokens (Shoeybi et al. 2019, section 3). It does what
layers.py does, and serves a rank alone, too, which exchanges nothing. overlapped.py has
the other way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from weft.kernels.cpu.attention import merge_parts
from weft.kernels.gpu.attention.decode import decode_attention
from weft.kernels.gpu.attention.inputs import PagedBatch
from weft.kernels.gpu.attention.paged import paged_attention
from weft.kernels.gpu.attention.tile import is_decode
from weft.kernels.gpu.matmul.epilogue import Epilogue
from weft.kernels.gpu.matmul.matmul import matmul
from weft.models.torch.cpu_layers import LayerCache
from weft.models.torch.gpu_layers import Experts, Linear
from weft.models.torch.group import Groups


class Exchange(Protocol):
    """What layers ask for. All ranks call the same methods in the same order.

    Of a step that is split, each rank has ceil(T / W) of the tokens between products, the last
    ones padded; else it has all.
    """

    def is_split(self, tokens: int) -> bool:
        """Whether a step of so many tokens is."""

    def shard(self, x: Tensor) -> Tensor:
        """[T, hidden] of a step that is split, to this rank's rows."""

    def unshard(self, x: Tensor, tokens: int) -> Tensor:
        """All ranks' rows of a step that is split: [T, hidden]."""

    def begin(self, x: Tensor, linear: Linear, *, silu_multiply: bool, split: bool) -> Tensor:
        """All tokens times this rank's columns; in a split step, with the padding."""

    def end(self, x: Tensor, linear: Linear, residual: Tensor, *, split: bool) -> Tensor:
        """All tokens times this rank's rows, summed over the ranks; plus the residual."""

    def attend(
        self, q: Tensor, cache: LayerCache, batch: PagedBatch, scale: float, window: int | None
    ) -> Tensor:
        """[T, H, D] to the same, of this rank's heads, whoever has the pages."""

    def mix(
        self, experts: Experts, x: Tensor, normed: Tensor, tokens: Sequence[int], *, split: bool
    ) -> Tensor:
        """x and what the experts of all ranks add to it, for [T, hidden].

        Args:
            tokens: of each copy of attention, if there are several. T may then be 0.
        """

    def faults(self) -> list[Tensor]:
        """Int32 [4] each, on the device: what waits have reported that ran out."""

    def check(self, faults: Sequence[Sequence[int]]) -> None:
        """Raise KernelError if one of `faults`, as they have been read, is one."""


def attend(
    q: Tensor, cache: LayerCache, batch: PagedBatch, scale: float, window: int | None
) -> Tensor:
    """Attention to pages that are all here: [T, H, D] to the same."""
    op = decode_attention if is_decode(q, batch) else paged_attention
    return op(q, *cache, batch, scale=scale, sliding_window=window)


class Plain:
    """Collectives between the kernels.

    Args:
        groups: the ranks.
    """

    def __init__(self, groups: Groups) -> None:
        self._group, self._context, self._copies = groups.tensor, groups.context, groups.copies

    def is_split(self, tokens: int) -> bool:
        """Never: all ranks have all tokens."""
        return False

    def shard(self, x: Tensor) -> Tensor:
        """See Exchange; not called."""
        return x

    def unshard(self, x: Tensor, tokens: int) -> Tensor:
        """See Exchange; not called."""
        return x

    def begin(self, x: Tensor, linear: Linear, *, silu_multiply: bool, split: bool) -> Tensor:
        """See Exchange."""
        epilogue = Epilogue(bias=linear.bias, silu_multiply=silu_multiply)
        return matmul(x, linear.weights, epilogue=epilogue)

    def end(self, x: Tensor, linear: Linear, residual: Tensor, *, split: bool) -> Tensor:
        """See Exchange. The first rank's part has the bias and the residual in it."""
        epilogue = Epilogue()
        if self._group.is_first:
            epilogue = Epilogue(bias=linear.bias, residual=residual)
        (weight,) = linear.weights
        return self._group.sum(matmul(x, weight, epilogue=epilogue))

    def attend(
        self, q: Tensor, cache: LayerCache, batch: PagedBatch, scale: float, window: int | None
    ) -> Tensor:
        """See Exchange."""
        ranks = self._context.size
        if ranks == 1:
            return attend(q, cache, batch, scale, window)
        tokens, heads, dim = q.shape
        everyones = self._context.gather_columns(q.reshape(tokens, -1), ranks * heads * dim)
        everyones = everyones.contiguous().view(tokens, ranks * heads, dim)
        lse = torch.empty(tokens, ranks * heads, device=q.device)
        out = paged_attention(
            *(everyones, *cache, batch),
            scale=scale,
            sliding_window=window,
            lse=lse,
            rank=self._context.index,
            world_size=ranks,
        )
        # Each rank gets what all have for its heads: D numbers of the result, and the LSE.
        parts = torch.cat((out.float(), lse[..., None]), dim=2).view(tokens, ranks, -1)
        parts = self._context.exchange(parts.transpose(0, 1)).view(ranks, tokens, heads, dim + 1)
        return merge_parts(parts[..., :dim], parts[..., dim]).to(q.dtype)

    def mix(
        self, experts: Experts, x: Tensor, normed: Tensor, tokens: Sequence[int], *, split: bool
    ) -> Tensor:
        """See Exchange."""
        if self._copies.size == 1:
            mixed = experts(normed)
            return self._group.sum(x + mixed if self._group.is_first else mixed)
        if not sum(tokens):
            return x
        every = experts(self._copies.gather_rows(normed, tokens))
        own = self._copies.scatter_sum(every, tokens)
        if not len(x):
            return x
        return self._group.sum((x + own if self._group.is_first else own).to(x.dtype))

    def faults(self) -> list[Tensor]:
        """None: torch.distributed raises."""
        return []

    def check(self, faults: Sequence[Sequence[int]]) -> None:
        """See Exchange."""
