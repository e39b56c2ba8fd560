"""Decoder layers on the CPU: small, pure, built from a ModelSpec and its weights.

Every layer maps a ragged batch, [T, ...], to another: the tokens of all requests in turn. Making a
layer packs its matrices (kernels/cpu/linear.py). Projections with the same input form one matrix.
Norms and residuals belong to the layers, because the kernels compute them together with the
products.

If ranks share a layer, each holds some heads, and some experts or a part of the MLP's width. Their
results are summed; the first rank adds the residual and the bias. If ranks share KV heads by
position (context parallel), each rank attends with all their heads, over its own pages. Nothing
here trains, and nothing is an nn.Module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from weft.kernels.cpu import native
from weft.kernels.cpu.attention import AttentionPlan, merge_parts, paged_attention
from weft.kernels.cpu.layer import NativeAttention, NativeMlp
from weft.kernels.cpu.linear import Linear, NativeLinear, Norm
from weft.kernels.cpu.moe import MakeLinear, PackedExperts, route
from weft.kernels.cpu.rope import HeadNorms, rotate_into_cache
from weft.kernels.packed import PackedMatrix
from weft.models.spec.spec import (
    AttentionSpec,
    LinearSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    WeightSpec,
)
from weft.models.torch.angles import Turn
from weft.models.torch.group import Group, Groups

Stored = Tensor | PackedMatrix
"""A matrix in the compute dtype, or quantised as the checkpoint has it."""


class LayerLoader(Protocol):
    """Loads this rank's part of weights in the compute dtype, and makes layers from them."""

    @property
    def groups(self) -> Groups:
        """The ranks with the other parts."""

    @property
    def make(self) -> Callable[..., Linear]:
        """A MakeLinear for what `each` and `matrix` return: layers are packed or quantised."""

    @property
    def make_plain(self) -> MakeLinear:
        """Makes layers whose weights are never quantised."""

    def __call__(self, weight: WeightSpec) -> Tensor:
        """Load a single-tensor weight."""

    def each(self, weight: WeightSpec) -> Iterator[Stored]:
        """Load a product's matrices, one per expert, one at a time."""

    def matrix(self, weight: WeightSpec) -> Stored:
        """Load a product's single matrix."""

    def parts(self, weight: WeightSpec) -> tuple[slice, ...]:
        """Return this rank's part of a weight, one slice per axis."""


LayerCache = tuple[Tensor, Tensor]
"""One layer's keys and values, [num_blocks, kv_heads, block_size, head_dim] each."""


class Ending:
    """The end of a block: the sum over the ranks, the block's output norm, and the residual.

    Args:
        norm: the block's output norm, if it has one.
        group: the ranks.
    """

    def __init__(self, norm: Norm | None, group: Group) -> None:
        self._norm, self._group = norm, group

    @property
    def is_plain(self) -> bool:
        """True without other ranks and without a norm."""
        return self._norm is None and self._group.size == 1

    def residual(self, x: Tensor) -> Tensor | None:
        """Return what this rank's product adds, [T, hidden]; None for nothing."""
        return x if self._norm is None and self._group.is_first else None

    def __call__(self, part: Tensor, x: Tensor) -> Tensor:
        """Return the residual stream after the block, [T, hidden].

        Args:
            part: this rank's part of the output, with `residual(x)`.
            x: the stream before the block.
        """
        total = self._group.sum(part)
        return total if self._norm is None else x + self._norm(total)


class Attention:
    """x + attention(norm(x)): grouped-query, over the paged cache, from one fused projection."""

    def __init__(
        self,
        model: ModelSpec,
        spec: AttentionSpec,
        norm: Norm | None,
        ending: Ending,
        load: LayerLoader,
    ) -> None:
        """Load the layer; `model` is this rank's part."""
        self._group = group = load.groups.tensor
        self._context = load.groups.context
        self._heads = model.num_heads
        self._window, self._scale = spec.sliding_window, spec.scale
        self._norm, self._end = norm, ending
        self._wide_norms: tuple[Norm, Norm] | None = None
        self._query_weight: Tensor | None = None
        self._head_norms = None
        if spec.q_norm is not None and spec.k_norm is not None:
            q_norm, k_norm = (load(one.weight).clone() for one in (spec.q_norm, spec.k_norm))
            eps = spec.q_norm.eps
            if spec.norms_span_heads:
                self._wide_norms = Norm(q_norm, eps), Norm(k_norm, eps)
            elif spec.norms_after_rope:
                # A rotation keeps the mean square, and scores need only the weights' product.
                self._query_weight = q_norm * k_norm
                ones = torch.ones_like(q_norm)
                self._head_norms = HeadNorms(ones, ones, eps)
            else:
                self._head_norms = HeadNorms(q_norm, k_norm, eps, spec.q_norm.is_centered)
        self._qkv = qkv = fuse((spec.q, spec.k, spec.v), load)
        self._o = o = fuse((spec.o,), load, biased=group.is_first)
        heads, kv_heads, head_dim = model.num_heads, model.num_kv_heads, model.head_dim
        self._widths = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        self.native = None
        if (
            ending.is_plain
            and norm is not None
            and self._wide_norms is None
            and self._query_weight is None
            and (self._head_norms is None or self._head_norms.is_plain)
            and not spec.rope.query_beta
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

    def __call__(self, x: Tensor, turn: Turn, cache: LayerCache, plan: AttentionPlan) -> Tensor:
        """[T, hidden] -> [T, hidden]; writes the tokens' keys and values to the cache."""
        keys, values = cache
        if self.native is not None:
            return self.native(x, turn.rotation, keys, values, plan)
        qkv = self._qkv(x, norm=self._norm)
        if self._wide_norms is not None:
            qkv = self._norm_wide(qkv, *self._wide_norms)
        q = rotate_into_cache(
            qkv,
            turn.rotation,
            keys,
            values,
            plan,
            heads=self._heads,
            norms=self._head_norms,
        )
        for factor in (self._query_weight, turn.query_scale):
            q = q if factor is None else q * factor
        out = self._attend(q, keys, values, plan)
        return self._end(self._o(out.view(len(x), -1), residual=self._end.residual(x)), x)

    def _norm_wide(self, qkv: Tensor, q_norm: Norm, k_norm: Norm) -> Tensor:
        """Norm queries and keys over all ranks' heads, [T, (H + 2 Hk) * D] to the same shape."""
        q, k, v = torch.split(qkv, self._widths, dim=1)
        means = torch.stack([part.float().square().mean(dim=1) for part in (q, k)], dim=1)
        # Ranks with the same heads have them equally often, so the mean over ranks is exact.
        means = self._group.sum(means) / self._group.size
        scaled = [
            (part.float() * (means[:, i : i + 1] + norm.eps).rsqrt()).to(part.dtype) * norm.weight
            for i, (part, norm) in enumerate(((q, q_norm), (k, k_norm)))
        ]
        return torch.cat((*scaled, v), dim=1)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan) -> Tensor:
        """Attention for this rank's heads, [T, H, D] to the same shape, wherever the pages are."""
        attend = partial(paged_attention, scale=self._scale, sliding_window=self._window)
        ranks = self._context.size
        if ranks == 1:
            return attend(q, keys, values, plan)
        tokens, heads, dim = q.shape
        all_q = self._context.gather_columns(q.reshape(tokens, -1), ranks * heads * dim)
        all_q = all_q.view(tokens, ranks * heads, dim)
        lse = torch.empty(tokens, ranks * heads)
        out = attend(all_q, keys, values, plan, lse=lse)
        # Each rank gets every rank's result for its heads: D numbers, and the LSE.
        parts = torch.cat((out.float(), lse[..., None]), dim=2).view(tokens, ranks, -1)
        parts = self._context.all_to_all(parts.transpose(0, 1)).view(ranks, tokens, heads, dim + 1)
        return merge_parts(parts[..., :dim], parts[..., dim]).to(q.dtype)


class Mlp:
    """x + down(silu(gate(norm(x))) * up(norm(x))), gate and up in one matrix (Shazeer 2020).

    With `is_parallel`, it is added to another residual stream than its input.
    """

    def __init__(
        self,
        spec: MlpSpec,
        norm: Norm | None,
        ending: Ending,
        load: LayerLoader,
        *,
        is_parallel: bool = False,
    ) -> None:
        group = load.groups.tensor
        self._norm, self._end = norm, ending
        self._gate_up = gate_up = fuse((spec.gate, spec.up), load, gated=True)
        self._down = down = fuse((spec.down,), load, biased=group.is_first)
        self.native = None
        if (
            ending.is_plain
            and norm is not None
            and isinstance(gate_up, NativeLinear)
            and isinstance(down, NativeLinear)
        ):
            self.native = NativeMlp(gate_up, down, norm, is_parallel=is_parallel)

    def __call__(self, x: Tensor, stream: Tensor) -> Tensor:
        """Add the result for x to the residual stream, [T, hidden] each."""
        if self.native is not None:
            return self.native(x, stream)
        return self._end(self.part(x, self._end.residual(stream)), stream)

    def part(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Compute this rank's part of the sum over ranks, [T, hidden], and add the residual."""
        return self._down(self._gate_up(x, norm=self._norm), residual=residual)


class Moe:
    """x + experts(norm(x)); a router picks the experts of each token. A shared MLP has all tokens.

    With data-parallel attention, each group has its own tokens, and all ranks run their experts for
    all groups' tokens.
    """

    def __init__(self, spec: MoeSpec, norm: Norm | None, ending: Ending, load: LayerLoader) -> None:
        self._data = load.groups.data
        self._norm, self._end = norm, ending
        self._routing, router = spec.router, load(spec.router.weight)
        self._bias = None if spec.router.bias is None else load(spec.router.bias)
        self._router = load.make_plain(router)
        self._shared = None if spec.shared is None else Mlp(spec.shared, norm, ending, load)
        self._shared_gate = None if spec.shared_gate is None else load(spec.shared_gate)
        gate, up, down = map(load.each, (spec.gate, spec.up, spec.down))
        first = load.parts(spec.gate)[0].start
        self._experts = PackedExperts(gate, up, down, load.make, first=first)

    def __call__(self, x: Tensor, rows: Sequence[int] = ()) -> Tensor:
        """[T, hidden] -> [T, hidden].

        Args:
            x: the tokens.
            rows: T in each data-parallel attention group, if there are several.
        """
        if self._data.size == 1:
            return self._end(self._run_experts(x, self._run_shared(x)), x)
        if not sum(rows):
            return x
        mixed = self._run_experts(self._data.gather_rows(x, rows), None)
        own = self._data.scatter_sum(mixed, rows)
        if not len(x):
            return x
        shared = self._run_shared(x)
        return self._end((own if shared is None else shared + own).to(x.dtype), x)

    def _run_shared(self, x: Tensor) -> Tensor | None:
        """Run this rank's part of the shared MLP on norm(x), and add the residual."""
        residual = self._end.residual(x)
        if self._shared is None:
            return residual
        if self._shared_gate is None:
            return self._shared.part(x, residual)
        gate = linear(self._normed(x), self._shared_gate).sigmoid()
        out = gate * self._shared.part(x, None)
        return out if residual is None else residual + out

    def _run_experts(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Run this rank's experts on norm(x) and add the residual."""
        router = self._routing
        if router.weight.in_float32:
            logits = self._router(self._normed(x).float())
        else:
            logits = self._router(x, norm=self._norm)
        experts, weights = route(
            *(logits, router.top_k),
            normalize=router.normalize,
            scoring=router.scoring,
            bias=self._bias,
            groups=router.groups,
            top_groups=router.top_groups,
            scale=router.scale,
        )
        if router.scales_input:
            x = self._normed(x) * weights.to(x.dtype)
            return self._experts(x, experts, torch.ones_like(weights), residual=residual)
        return self._experts(x, experts, weights, norm=self._norm, residual=residual)

    def _normed(self, x: Tensor) -> Tensor:
        return x if self._norm is None else self._norm(x)


def fuse(
    linears: tuple[LinearSpec, ...], load: LayerLoader, *, gated: bool = False, biased: bool = True
) -> Linear:
    """Make one matrix for projections with the same input; their outputs are concatenated.

    `biased` False leaves the biases out, because another rank adds them.
    """
    weights = [load.matrix(linear.weight) for linear in linears]
    biases = [load(linear.bias) for linear in linears if biased and linear.bias is not None]
    return load.make(weights, torch.cat(biases) if biases else None, gated=gated)


def load_norm(spec: NormSpec, load: LayerLoader) -> Norm:
    """Load a norm over the residual stream."""
    bias = None if spec.bias is None else load(spec.bias)
    return Norm(load(spec.weight), spec.eps, is_centered=spec.is_centered, bias=bias)
