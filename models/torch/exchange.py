"""How ranks that share a model's layers communicate, between Triton kernels.

`Plain` runs torch.distributed collectives after the products: NCCL between GPUs, gloo between CPUs.
All ranks hold all tokens (Shoeybi et al. 2019, section 3), as in cpu_layers.py. It also serves a
single rank, which exchanges nothing. The alternative is `Overlapped` in overlapped.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from weft.kernels.cpu.attention import merge_parts
from weft.kernels.gpu.attention.decode import decode_attention
from weft.kernels.gpu.attention.inputs import PagedBatch
from weft.kernels.gpu.attention.mixed import mixed_attention
from weft.kernels.gpu.attention.paged import paged_attention
from weft.kernels.gpu.attention.tile import is_decode
from weft.kernels.gpu.rowwise import activation
from weft.kernels.gpu.rowwise.norm import mean_squares
from weft.kernels.gpu.rowwise.rope import CacheScales
from weft.models.torch.cpu_layers import LayerCache
from weft.models.torch.gpu_layers import Experts, Linear, Norm
from weft.models.torch.group import Groups


class Stream(NamedTuple):
    """The residual stream between two blocks, [T, hidden].

    Attributes:
        x: the stream, or without the last block's output.
        added: that output; the next norm adds it, in the same kernel. None if x has it already.
    """

    x: Tensor
    added: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor | None, added: Tensor) -> Stream:
        """Make the stream with an output, from the stream before; None is 0."""
        return cls(added) if x is None else cls(x, added)

    def norm(self, norm: Norm) -> tuple[Tensor, Tensor]:
        """Return the normalized stream, and the stream."""
        normed = norm(self.x, self.added)
        return normed.out, self.x if normed.total is None else normed.total

    def whole(self) -> Tensor:
        """Return the stream."""
        return self.x if self.added is None else self.x + self.added


class AttentionForm(NamedTuple):
    """Options of a layer's attention.

    Attributes:
        scale: multiplies the scores.
        window: size of the sliding window; None sees all.
        scales: of an fp8 cache; None for any other cache.
    """

    scale: float
    window: int | None
    scales: CacheScales | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the attention ops."""
        k, v = self.scales or (None, None)
        return {"scale": self.scale, "sliding_window": self.window, "k_scale": k, "v_scale": v}


class Exchange(Protocol):
    """Communication inside layers. All ranks call the same methods in the same order.

    In a sharded step, each rank holds ceil(T / W) tokens between products, and the last ones are
    padded. Otherwise each rank holds all tokens.
    """

    def step(self) -> AbstractContextManager[None]:
        """Return a context for a step's exchanges."""

    def is_sharded(self, tokens: int) -> bool:
        """True if a step with this number of tokens is sharded."""

    def shard(self, x: Tensor) -> Tensor:
        """In a sharded step: take this rank's rows from [T, hidden]."""

    def unshard(self, x: Tensor, tokens: int) -> Tensor:
        """In a sharded step: gather all ranks' rows into [T, hidden]."""

    def column_parallel(
        self, x: Tensor, linear: Linear, *, silu_multiply: bool, sharded: bool
    ) -> Tensor:
        """Multiply all tokens by this rank's columns; a sharded step keeps its padding."""

    def row_parallel(
        self, x: Tensor, linear: Linear, residual: Tensor | None, *, sharded: bool
    ) -> Stream:
        """Multiply all tokens by this rank's rows, sum over the ranks and add the residual."""

    def mean_squares(self, qkv: Tensor, queries: int, keys: int) -> Tensor:
        """Compute the mean squares of each token's queries and keys over all ranks' heads.

        Args:
            qkv: [T, N], of all tokens: own queries, own keys and more.
            queries, keys: their columns on this rank; equally many on all.

        Returns:
            float32 [T, 2].
        """

    def attend(
        self, q: Tensor, cache: LayerCache, batch: PagedBatch, form: AttentionForm
    ) -> Tensor:
        """Attention for this rank's heads, [T, H, D] to the same shape, wherever the pages are."""

    def run_experts(
        self, experts: Experts, x: Tensor, normed: Tensor, tokens: Sequence[int], *, sharded: bool
    ) -> Stream:
        """Run the experts and the shared MLP on all ranks, and add their results to x.

        Args:
            experts: this rank's experts.
            x: the residual.
            normed: the experts' input.
            tokens: tokens in each data-parallel attention group, if there are several. T may then
                be 0.
            sharded: whether the step is.
        """

    def faults(self) -> list[Tensor]:
        """Return the fault words, int32 [4] each, on the device; waits that time out set them."""

    def check(self, faults: Sequence[Sequence[int]]) -> None:
        """Raise KernelError if one of `faults`, as read from the device, is set."""


def attend(q: Tensor, cache: LayerCache, batch: PagedBatch, form: AttentionForm) -> Tensor:
    """Attention over local pages: [T, H, D] to the same shape."""
    op = decode_attention if is_decode(q, batch) else mixed_attention
    return op(q, *cache, batch, **form.options)


def multiply(x: Tensor, linear: Linear, *, silu_multiply: bool) -> Tensor:
    """[T, K] -> [T, N], or silu(gate) * up [T, N / 2]."""
    out = linear(x)
    return activation.silu_multiply(out) if silu_multiply else out


class Plain:
    """Collectives between the kernels.

    Args:
        groups: the ranks.
    """

    def __init__(self, groups: Groups) -> None:
        self._group, self._context, self._data = groups.tensor, groups.context, groups.data

    def step(self) -> AbstractContextManager[None]:
        """See Exchange; nothing to do."""
        return nullcontext()

    def is_sharded(self, tokens: int) -> bool:
        """Never: all ranks hold all tokens."""
        return False

    def shard(self, x: Tensor) -> Tensor:
        """See Exchange; never called."""
        return x

    def unshard(self, x: Tensor, tokens: int) -> Tensor:
        """See Exchange; never called."""
        return x

    def column_parallel(
        self, x: Tensor, linear: Linear, *, silu_multiply: bool, sharded: bool
    ) -> Tensor:
        """See Exchange."""
        return multiply(x, linear, silu_multiply=silu_multiply)

    def row_parallel(
        self, x: Tensor, linear: Linear, residual: Tensor | None, *, sharded: bool
    ) -> Stream:
        """See Exchange. The first rank adds the bias."""
        return Stream.of(residual, self._group.sum(linear(x, biased=self._group.is_first)))

    def mean_squares(self, qkv: Tensor, queries: int, keys: int) -> Tensor:
        """See Exchange."""
        own = mean_squares(qkv, queries, keys, ranks=self._group.size)
        return self._group.sum(own)

    def attend(
        self, q: Tensor, cache: LayerCache, batch: PagedBatch, form: AttentionForm
    ) -> Tensor:
        """See Exchange."""
        ranks = self._context.size
        if ranks == 1:
            return attend(q, cache, batch, form)
        tokens, heads, dim = q.shape
        all_q = self._context.gather_columns(q.reshape(tokens, -1), ranks * heads * dim)
        all_q = all_q.contiguous().view(tokens, ranks * heads, dim)
        lse = torch.empty(tokens, ranks * heads, device=q.device)
        out = paged_attention(
            *(all_q, *cache, batch),
            **form.options,
            lse=lse,
            rank=self._context.index,
            world_size=ranks,
        )
        # Each rank gets every rank's result for its heads: D numbers, and the LSE.
        parts = torch.cat((out.float(), lse[..., None]), dim=2).view(tokens, ranks, -1)
        parts = self._context.all_to_all(parts.transpose(0, 1)).view(ranks, tokens, heads, dim + 1)
        return merge_parts(parts[..., :dim], parts[..., dim]).to(q.dtype)

    def run_experts(
        self, experts: Experts, x: Tensor, normed: Tensor, tokens: Sequence[int], *, sharded: bool
    ) -> Stream:
        """See Exchange."""
        if self._data.size == 1:
            own = experts(normed)
        elif not sum(tokens):
            return Stream(x)
        else:
            routed = experts(self._data.gather_rows(normed, tokens))
            own = self._data.scatter_sum(routed, tokens)
        if not len(x):
            return Stream(x)
        own = experts.with_shared(own, normed, biased=self._group.is_first)
        return Stream(x, self._group.sum(own.to(x.dtype)))

    def faults(self) -> list[Tensor]:
        """None: torch.distributed raises."""
        return []

    def check(self, faults: Sequence[Sequence[int]]) -> None:
        """See Exchange."""
