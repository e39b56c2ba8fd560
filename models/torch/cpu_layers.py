"""The layers of a decoder on the CPU: small, pure, and built from a ModelSpec and its weights.

Every layer takes and gives a ragged batch: [T, ...], the tokens of all
requests one after the other. Matrices are packed when a layer is made
(kernels/cpu/linear.py); projections that read the same input are one matrix,
and norms and residuals belong to the layers, since the kernels compute them
with the products. Where ranks share a layer, each has some heads and some of an
MLP's width or experts, and what they give is summed: the first one's has the
residual and the bias in it. Where they share KV heads by position (context parallel),
each attends with the heads of all of them to the pages that it has. Nothing here trains,
and nothing is a nn.Module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from weft.kernels.cpu import native
from weft.kernels.cpu.attention import AttentionPlan, merge_parts, paged_attention
from weft.kernels.cpu.layer import NativeAttention, NativeMlp
from weft.kernels.cpu.linear import Linear, NativeLinear, RMSNorm
from weft.kernels.cpu.moe import MakeLinear, PackedExperts, route
from weft.kernels.cpu.rope import HeadNorms, Rotation, rotate_into_cache
from weft.models.spec.spec import (
    AttentionSpec,
    LinearSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    WeightSpec,
)
from weft.models.torch.group import Groups


class Load(Protocol):
    """Gives this rank's part of weights in the type to compute in, and makes layers of them."""

    @property
    def groups(self) -> Groups:
        """The ranks that have the other parts."""

    @property
    def make(self) -> MakeLinear:
        """Makes layers that store their weights as the settings say: packed, or quantised."""

    @property
    def make_plain(self) -> MakeLinear:
        """Makes layers whose weights are never quantised."""

    def __call__(self, weight: WeightSpec) -> Tensor:
        """A weight that is one tensor of the checkpoint."""

    def each(self, weight: WeightSpec) -> Iterator[Tensor]:
        """The tensors of a weight that has one per expert, one at a time."""

    def parts(self, weight: WeightSpec) -> tuple[slice, ...]:
        """Which part of a weight is this rank's, by axis."""


LayerCache = tuple[Tensor, Tensor]
"""One layer's keys and values, [num_blocks, kv_heads, block_size, head_dim] each."""


class Attention:
    """x + attention(norm(x)): grouped-query, over the paged cache, from one fused projection."""

    def __init__(self, model: ModelSpec, spec: AttentionSpec, norm: RMSNorm, load: Load) -> None:
        """`model` is this rank's part."""
        self._group = group = load.groups.tensor
        self._context = load.groups.context
        self._heads = model.num_heads
        self._head_dim = model.head_dim
        self._window = spec.sliding_window
        self._scale = model.head_dim**-0.5
        self._norm = norm
        self._head_norms = None
        if spec.q_norm is not None and spec.k_norm is not None:
            q_norm, k_norm = load(spec.q_norm).clone(), load(spec.k_norm).clone()
            self._head_norms = HeadNorms(q_norm, k_norm, model.norm_eps)
        self._qkv = qkv = fuse((spec.q, spec.k, spec.v), load)
        self._o = o = fuse((spec.o,), load, biased=group.is_first)
        heads, kv_heads, head_dim = model.num_heads, model.num_kv_heads, model.head_dim
        self.native = None
        if (
            group.size == 1
            and isinstance(qkv, NativeLinear)
            and isinstance(o, NativeLinear)
            and native.takes_heads(heads, kv_heads, head_dim)
        ):
            self.native = NativeAttention(
                *(qkv, o, norm, self._head_norms),
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                scale=self._scale,
                sliding_window=self._window,
            )

    def __call__(
        self, x: Tensor, rotation: Rotation, cache: LayerCache, plan: AttentionPlan
    ) -> Tensor:
        """[T, hidden] -> [T, hidden]; the tokens' keys and values are written to the cache."""
        keys, values = cache
        if self.native is not None:
            return self.native(x, rotation, keys, values, plan)
        q = rotate_into_cache(
            self._qkv(x, norm=self._norm),
            rotation,
            keys,
            values,
            plan,
            heads=self._heads,
            norms=self._head_norms,
        )
        out = self._attend(q, keys, values, plan)
        residual = x if self._group.is_first else None
        return self._group.sum(self._o(out.view(len(x), -1), residual=residual))

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan) -> Tensor:
        """[T, H, D] to the same, of this rank's heads, whoever has the pages."""
        attend = partial(paged_attention, scale=self._scale, sliding_window=self._window)
        ranks = self._context.size
        if ranks == 1:
            return attend(q, keys, values, plan)
        tokens, heads, dim = q.shape
        everyones = self._context.gather_columns(q.reshape(tokens, -1), ranks * heads * dim)
        everyones = everyones.view(tokens, ranks * heads, dim)
        lse = torch.empty(tokens, ranks * heads)
        out = attend(everyones, keys, values, plan, lse=lse)
        # Each rank gets what all have for its heads: D numbers of the result, and the LSE.
        parts = torch.cat((out.float(), lse[..., None]), dim=2).view(tokens, ranks, -1)
        parts = self._context.exchange(parts.transpose(0, 1)).view(ranks, tokens, heads, dim + 1)
        return merge_parts(parts[..., :dim], parts[..., dim]).to(q.dtype)


class Mlp:
    """x + down(silu(gate(norm(x))) * up(norm(x))), gate and up in one matrix (Shazeer 2020)."""

    def __init__(self, spec: MlpSpec, norm: RMSNorm, load: Load) -> None:
        self._group = group = load.groups.tensor
        self._norm = norm
        self._gate_up = gate_up = fuse((spec.gate, spec.up), load, gated=True)
        self._down = down = fuse((spec.down,), load, biased=group.is_first)
        self.native = None
        if group.size == 1 and isinstance(gate_up, NativeLinear) and isinstance(down, NativeLinear):
            self.native = NativeMlp(gate_up, down, norm)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        if self.native is not None:
            return self.native(x)
        residual = x if self._group.is_first else None
        return self._group.sum(self._down(self._gate_up(x, norm=self._norm), residual=residual))


class Moe:
    """x + the experts of norm(x), to which a router sends it: the `top_k` most probable.

    With copies of attention, each has tokens of its own, and all ranks run their experts for the
    tokens of all.
    """

    def __init__(self, spec: MoeSpec, norm: RMSNorm, load: Load) -> None:
        self._group, self._copies = load.groups.tensor, load.groups.copies
        self._norm = norm
        self._top_k = spec.top_k
        self._normalize = spec.normalize
        self._router = load.make_plain(load(spec.router))
        gate, up, down = map(load.each, (spec.gate, spec.up, spec.down))
        first = load.parts(spec.gate)[0].start
        self._experts = PackedExperts(gate, up, down, load.make, first=first)

    def __call__(self, x: Tensor, rows: Sequence[int] = ()) -> Tensor:
        """[T, hidden] -> [T, hidden].

        Args:
            rows: T of each copy of attention, if there are several.
        """
        if self._copies.size == 1:
            residual = x if self._group.is_first else None
            return self._group.sum(self._mix(x, residual))
        if not sum(rows):
            return x
        mixed = self._mix(self._copies.gather_rows(x, rows), None)
        own = self._copies.scatter_sum(mixed, rows)
        if not len(x):
            return x
        return self._group.sum((x + own if self._group.is_first else own).to(x.dtype))

    def _mix(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The experts here of norm(x), and the residual."""
        logits = self._router(x, norm=self._norm)
        experts, weights = route(logits, self._top_k, normalize=self._normalize)
        return self._experts(x, experts, weights, norm=self._norm, residual=residual)


def fuse(
    linears: tuple[LinearSpec, ...], load: Load, *, gated: bool = False, biased: bool = True
) -> Linear:
    """One matrix for projections of the same input; their outputs follow each other.

    Without the biases if not `biased`: another rank adds them.
    """
    weights = [load(linear.weight) for linear in linears]
    biases = [load(linear.bias) for linear in linears if biased and linear.bias is not None]
    return load.make(weights, torch.cat(biases) if biases else None, gated=gated)
