"""A decoder on Triton kernels: on a GPU, or in Triton's interpreter on a CPU.

    x [T, hidden]
    norm
    begin               qkv: own heads, all tokens
    rotate_into_cache
    attend              own heads
    end                 o, + x
    norm
    begin               silu(gate) * up: own width        or, of experts:
    end                 down, + x                         mix

What `begin`, `attend`, `end` and `mix` are, and so how ranks exchange numbers, is said by an
Exchange: plain collectives (exchange.py) or overlapped ones (overlapped.py).

Nothing here waits for the device or reads from it, and all shapes follow from those of
the step: steps of one shape can be captured in a CUDA graph (graphs.py).

Not handled: quantisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding

from weft.kernels.cpu.rope import HeadNorms, Rotation
from weft.kernels.gpu.matmul.matmul import matmul
from weft.kernels.gpu.rowwise.norm import rms_norm
from weft.kernels.gpu.rowwise.rope import rotate_into_cache
from weft.models.interface import Size
from weft.models.spec.spec import LayerSpec, ModelSpec, MoeSpec
from weft.models.torch.cpu_layers import LayerCache
from weft.models.torch.exchange import Exchange
from weft.models.torch.gpu_layers import Experts, Linear, Load, Source
from weft.models.torch.group import Groups
from weft.models.torch.inputs import PagedPlan
from weft.models.torch.logits import Logits


@dataclass(frozen=True, slots=True)
class _Step:
    """What all layers are told of a step.

    Attributes:
        rotation: of its tokens.
        plan: where their keys and values are written, and which requests they belong to.
        split: whether each rank has some of the tokens between products.
        tokens: how many each copy of attention has, if there are several.
    """

    rotation: Rotation
    plan: PagedPlan
    split: bool
    tokens: tuple[int, ...]


class Layer:
    """One layer's part on this rank; `model` is this rank's part of the model."""

    def __init__(self, model: ModelSpec, spec: LayerSpec, load: Load, exchange: Exchange) -> None:
        attention, block = spec.attention, spec.feed_forward
        self._model, self._exchange = model, exchange
        self._window = attention.sliding_window
        self._norms = load(spec.attention_norm), load(spec.feed_forward_norm)
        self._head_norms = None
        if attention.q_norm is not None and attention.k_norm is not None:
            q, k = load(attention.q_norm), load(attention.k_norm)
            self._head_norms = HeadNorms(q, k, model.norm_eps)
        self._qkv = load.linear(attention.q, attention.k, attention.v)
        self._o = load.linear(attention.o)
        self._experts = None
        if isinstance(block, MoeSpec):
            self._experts = Experts(block, load)
        else:
            self._gate_up = load.linear(block.gate, block.up)
            self._down = load.linear(block.down)

    def __call__(self, x: Tensor, step: _Step, cache: LayerCache) -> Tensor:
        """[T, hidden], or this rank's rows of them, to the same."""
        tokens, model, exchange = len(step.plan.pages), self._model, self._exchange
        normed = rms_norm(x, self._norms[0], model.norm_eps).out
        qkv = exchange.begin(normed, self._qkv, silu_multiply=False, split=step.split)[:tokens]
        q, _ = rotate_into_cache(
            qkv.contiguous(),
            step.rotation,
            *cache,
            step.plan.pages,
            step.plan.slots,
            heads=model.num_heads,
            norms=self._head_norms,
        )
        out = exchange.attend(q, cache, step.plan.batch, model.head_dim**-0.5, self._window)
        x = exchange.end(out.view(tokens, -1), self._o, x, split=step.split)
        if self._experts is not None:
            return self._mix(self._experts, x, step.tokens, split=step.split)
        normed = rms_norm(x, self._norms[1], model.norm_eps).out
        inner = exchange.begin(normed, self._gate_up, silu_multiply=True, split=step.split)
        return exchange.end(inner[:tokens], self._down, x, split=step.split)

    def take_part(self, none: Tensor, tokens: Sequence[int]) -> None:
        """Without a token, [0, hidden], for those of other copies of attention."""
        if self._experts is not None:
            self._mix(self._experts, none, tokens, split=False)

    def _mix(self, experts: Experts, x: Tensor, tokens: Sequence[int], *, split: bool) -> Tensor:
        normed = rms_norm(x, self._norms[1], self._model.norm_eps).out
        return self._exchange.mix(experts, x, normed, tokens, split=split)


class GpuModel:
    """`model.Model`, on Triton kernels.

    Args:
        spec: what it is.
        weights: where this rank's tensors come from.
        dtype: to compute in.
        device: of all tensors.
        exchange: how this rank's layers and those of the others exchange numbers.
        groups: the ranks, for what is not worth overlapping: embedding and logits.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Source,
        dtype: torch.dtype,
        *,
        device: torch.device,
        exchange: Exchange,
        groups: Groups,
    ) -> None:
        load = Load(weights, dtype, device)
        stage, local = weights.layout.of_stage(spec), weights.layout.local(spec)
        self.device, self.exchange = device, exchange
        self._dtype, self._group = dtype, groups.tensor
        inv_freq = torch.from_numpy(spec.rope.inverse_frequencies(spec.head_dim))
        self._inv_freq = inv_freq.to(device)
        self._layers = [Layer(local, layer, load, exchange) for layer in stage.layers]
        if stage.is_first:
            self._table = load(spec.embedding)
        if stage.is_last:
            self._norm, self._eps = load(spec.norm), spec.norm_eps
            tied = stage.is_first and spec.lm_head is None
            head = self._table if tied else load(spec.lm_head or spec.embedding)
            self._lm_head = Linear([head])
        self._vocabulary = weights.parts(spec.embedding)[0]
        self._vocab_size, self._hidden_size = spec.vocab_size, spec.hidden_size

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        cache: Sequence[LayerCache],
        plan: PagedPlan,
        rows: Tensor | None = None,
        copies: Sequence[Size] = (),
    ) -> Tensor:
        """Run the layers; see `model.Model`. Whoever reads the result checks the faults, too."""
        tokens = len(x)
        rotation = Rotation.of(positions, self._inv_freq, self._dtype)
        split = self.exchange.is_split(tokens)
        step = _Step(rotation, plan, split, tuple(copy.tokens for copy in copies))
        if split:
            x = self.exchange.shard(x)
        for layer, layer_cache in zip(self._layers, cache, strict=True):
            x = layer(x, step, layer_cache)
        if split:
            x = self.exchange.unshard(x, tokens)
        return x if rows is None else x[rows]

    def take_part(self, copies: Sequence[Size]) -> None:
        """See `model.Model.take_part`."""
        none = torch.empty(0, self._hidden_size, dtype=self._dtype, device=self.device)
        for layer in self._layers:
            layer.take_part(none, [copy.tokens for copy in copies])

    def final_norm(self, hidden: Tensor) -> Tensor:
        """[S, hidden] to the same: what `logits` is made of, and embeddings."""
        return rms_norm(hidden.contiguous(), self._norm, self._eps).out

    def logits(self, hidden: Tensor) -> Logits:
        """[S, hidden] of the tokens that matter -> [S, vocab_size]."""
        local = matmul(self.final_norm(hidden), self._lm_head.weights)
        return Logits(local, self._vocab_size, self._group)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Int [T] -> [T, hidden]; each rank knows some tokens."""
        if self._group.size == 1:
            return embedding(token_ids, self._table)
        here = (token_ids >= self._vocabulary.start) & (token_ids < self._vocabulary.stop)
        x = embedding(torch.where(here, token_ids - self._vocabulary.start, 0), self._table)
        return self._group.sum(x.masked_fill(~here[:, None], 0))
