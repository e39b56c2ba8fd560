"""The layers of a decoder on the CPU: small, pure, and built from a ModelSpec and its weights.

Every layer takes and gives a ragged batch: [T, ...], the tokens of all
requests one after the other. Matrices are packed for oneDNN when a layer is
made (kernels/cpu/linear.py); projections that read the same input are one
matrix. Nothing here trains, and nothing is a nn.Module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from weft.kernels.cpu.attention import AttentionPlan, paged_attention, write_kv
from weft.kernels.cpu.linear import PackedLinear
from weft.kernels.cpu.moe import Linear, PackedExperts
from weft.models.spec import (
    AttentionSpec,
    LinearSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    RopeSpec,
    WeightSpec,
)


class Load(Protocol):
    """Gives weights in the type to compute in, and makes layers of them."""

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """`x @ weight.T + bias`, stored as the settings say: packed, or quantised."""

    def __call__(self, weight: WeightSpec) -> Tensor:
        """A weight that is one tensor of the checkpoint."""

    def each(self, weight: WeightSpec) -> Iterator[Tensor]:
        """The tensors of a weight that has one per expert, one at a time."""


KVCache = tuple[Tensor, Tensor]
"""One layer's keys and values, [num_blocks, kv_heads, block_size, head_dim] each."""


class RMSNorm:
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019), in float32 inside."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        # Cloned, for else this small view would keep the whole file mapped.
        self._weight = weight.clone()
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return rms_norm(x, self._weight.shape, self._weight, self._eps)


class Rope:
    """Rotary positions: cosines and sines for one step's tokens, shared by all layers.

    They are computed for the tokens at hand, and not looked up: a table would be as long as the
    context.
    """

    def __init__(self, spec: RopeSpec, head_dim: int, dtype: torch.dtype) -> None:
        frequencies = torch.from_numpy(spec.inverse_frequencies(head_dim))
        self._frequencies = torch.cat((frequencies, frequencies))
        # rotate() swaps a head's halves; the first half then comes in with a minus.
        self._sign = torch.ones(head_dim)
        self._sign[: head_dim // 2] = -1
        self._dtype = dtype

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions int32 [T] -> cosines and signed sines, [T, 1, head_dim] each."""
        angles = (positions[:, None].float() * self._frequencies)[:, None, :]
        return angles.cos().to(self._dtype), (angles.sin() * self._sign).to(self._dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[d], x[d + D/2]) of x [T, heads, D] by its angle."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class Attention:
    """Grouped-query attention over the paged cache, from one fused projection."""

    def __init__(self, model: ModelSpec, spec: AttentionSpec, load: Load) -> None:
        self._heads = model.num_heads
        self._kv_heads = model.num_kv_heads
        self._head_dim = model.head_dim
        self._window = spec.sliding_window
        self._scale = model.head_dim**-0.5
        self._eps = model.norm_eps
        self._head_norm = None
        if spec.q_norm is not None and spec.k_norm is not None:
            q_norm = load(spec.q_norm).expand(self._heads, -1)
            k_norm = load(spec.k_norm).expand(self._kv_heads, -1)
            self._head_norm = torch.cat((q_norm, k_norm))
        self._qkv = fuse((spec.q, spec.k, spec.v), load)
        self._o = fuse((spec.o,), load)

    def __call__(
        self, x: Tensor, rope: tuple[Tensor, Tensor], cache: KVCache, plan: AttentionPlan
    ) -> Tensor:
        """[T, hidden] -> [T, hidden]; the tokens' keys and values are written to the cache."""
        tokens = x.shape[0]
        qkv = self._qkv(x).view(tokens, -1, self._head_dim)
        qk, v = qkv.tensor_split((self._heads + self._kv_heads,), dim=1)
        if self._head_norm is not None:
            qk = rms_norm(qk, (self._head_dim,), eps=self._eps) * self._head_norm
        q, k = rotate(qk, *rope).tensor_split((self._heads,), dim=1)
        keys, values = cache
        write_kv(k, v, keys, values, plan)
        out = paged_attention(q, keys, values, plan, scale=self._scale, sliding_window=self._window)
        return self._o(out.view(tokens, -1))


class Mlp:
    """down(silu(gate(x)) * up(x)), gate and up in one matrix (Shazeer 2020)."""

    def __init__(self, spec: MlpSpec, load: Load) -> None:
        self._gate_up = fuse((spec.gate, spec.up), load)
        self._down = fuse((spec.down,), load)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(silu(gate).mul_(up))


class Moe:
    """A router that sends each token to its `top_k` most probable experts."""

    def __init__(self, spec: MoeSpec, load: Load) -> None:
        self._top_k = spec.top_k
        self._normalize = spec.normalize
        self._router = PackedLinear(load(spec.router))
        gate, up, down = map(load.each, (spec.gate, spec.up, spec.down))
        self._experts = PackedExperts(gate, up, down, load.pack)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        probabilities = self._router(x).softmax(dim=-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self._top_k, dim=-1)
        if self._normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return self._experts(x, experts, weights)


def fuse(linears: tuple[LinearSpec, ...], load: Load) -> Linear:
    """One matrix for projections of the same input; their outputs follow each other."""
    weights = [load(linear.weight) for linear in linears]
    biases = [load(linear.bias) for linear in linears if linear.bias is not None]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    return load.pack(weight, torch.cat(biases) if biases else None)
