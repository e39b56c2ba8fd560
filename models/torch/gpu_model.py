"""A decoder on Triton kernels: on a GPU, or in Triton's interpreter on a CPU.

    x [T, hidden]
    norm
    column_parallel     qkv: own heads, all tokens
    mean_squares        for norms over all heads
    rotate_into_cache
    attend              own heads
    row_parallel        o, + x
    norm
    column_parallel     silu(gate) * up: own width        or, for experts:
    row_parallel        down, + x                         run_experts

A block without a norm before it reads x itself. The output of a block with a norm after it is
summed without x, and normed; then x is added.

An Exchange implements `column_parallel`, `row_parallel`, `mean_squares`, `attend` and
`run_experts`, and so decides how ranks communicate: by plain collectives (exchange.py) or
overlapped ones (overlapped.py).

Nothing here waits for the device or reads from it, and all shapes follow from the step's. Steps
with equal shapes can therefore be captured in a CUDA graph (graphs.py).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding

from weft.kernels.cpu.rope import HeadNorms
from weft.kernels.gpu.rowwise.rope import rotate_into_cache
from weft.models.interface import Size
from weft.models.spec.spec import LayerSpec, ModelSpec, MoeSpec, NormSpec
from weft.models.torch.angles import Angles, Turns
from weft.models.torch.cpu_layers import LayerCache
from weft.models.torch.exchange import AttentionForm, Exchange, Stream
from weft.models.torch.gpu_layers import (
    Experts,
    Norm,
    PlainLinear,
    WeightLoader,
    WeightSource,
)
from weft.models.torch.group import Groups
from weft.models.torch.inputs import PagedPlan
from weft.models.torch.logits import Logits


@dataclass(frozen=True, slots=True)
class _Step:
    """Arguments that all layers share in a step.

    Attributes:
        turns: the tokens' rotary embeddings.
        plan: where keys and values are written, and which requests the tokens belong to.
        sharded: whether each rank holds only some tokens between products.
        dp_tokens: tokens in each data-parallel attention group, if there are several.
    """

    turns: Turns
    plan: PagedPlan
    sharded: bool
    dp_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Norms:
    """The norms of a block's input and output.

    Attributes:
        before, after: None for no norm.
    """

    before: Norm | None
    after: Norm | None

    @classmethod
    def of(cls, before: NormSpec | None, after: NormSpec | None, load: WeightLoader) -> _Norms:
        """Load the weights."""

        def loaded(norm: NormSpec | None) -> Norm | None:
            return None if norm is None else load.norm(norm)

        return cls(loaded(before), loaded(after))

    def begin(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """Return the block's input, and the residual stream."""
        if self.before is not None:
            return stream.norm(self.before)
        x = stream.whole()
        return x, x

    def residual(self, x: Tensor) -> Tensor | None:
        """Return what the block's last op adds to its output; None for nothing."""
        return x if self.after is None else None

    def end(self, out: Stream, x: Tensor) -> Stream:
        """Return the residual stream after the block; `out` is its output, with `residual(x)`."""
        if self.after is None:
            return out
        return Stream(x, self.after(out.whole()).out)


class Layer:
    """This rank's part of one layer; `model` is this rank's part of the model."""

    def __init__(
        self,
        model: ModelSpec,
        spec: LayerSpec,
        load: WeightLoader,
        exchange: Exchange,
        copies: int = 0,
        fp8_cache: bool = False,
    ) -> None:
        attention, block = spec.attention, spec.feed_forward
        self._model, self._exchange = model, exchange
        scales = load.cache_scales(attention, model.num_kv_heads) if fp8_cache else None
        self._form = AttentionForm(attention.scale, attention.sliding_window, scales)
        self._norms = _Norms.of(spec.attention_norm, spec.attention_output_norm, load)
        self._second_norms = _Norms.of(spec.feed_forward_norm, spec.feed_forward_output_norm, load)
        self.rope = attention.rope
        self._query_weight: Tensor | None = None
        self._head_norms, self._wide = None, attention.norms_span_heads
        if attention.q_norm is not None and attention.k_norm is not None:
            q, k = load(attention.q_norm.weight), load(attention.k_norm.weight)
            if attention.norms_after_rope:  # see cpu_layers.Attention
                self._query_weight, q, k = q * k, torch.ones_like(q), torch.ones_like(k)
            form = attention.q_norm
            self._head_norms = HeadNorms(q, k, form.eps, form.is_centered)
        self._qkv = load.linear(attention.q, attention.k, attention.v)
        self._widths = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        self._o = load.linear(attention.o)
        self._experts, self._is_parallel = None, spec.is_parallel
        if isinstance(block, MoeSpec):
            self._experts = Experts(block, load, copies)
        else:
            self._gate_up = load.linear(block.gate, block.up)
            self._down = load.linear(block.down)

    def attend(
        self, stream: Stream, step: _Step, cache: LayerCache
    ) -> tuple[Stream, Tensor | None]:
        """Run the first half: [T, hidden], or this rank's rows, to the same shape.

        Also return its normed input, if the second half reads it, too.
        """
        tokens, model, exchange = len(step.plan.pages), self._model, self._exchange
        normed, x = self._norms.begin(stream)
        qkv = exchange.column_parallel(
            normed, self._qkv, silu_multiply=False, sharded=step.sharded
        )[:tokens].contiguous()
        means = exchange.mean_squares(qkv, *self._widths) if self._wide else None
        turn = step.turns[self.rope]
        q, _ = rotate_into_cache(
            qkv,
            turn.rotation,
            *cache,
            step.plan.pages,
            step.plan.slots,
            heads=model.num_heads,
            norms=self._head_norms,
            means=means,
            scales=self._form.scales,
        )
        for factor in (self._query_weight, turn.query_scale):
            q = q if factor is None else q * factor
        out = exchange.attend(q, cache, step.plan.batch, self._form)
        residual = self._norms.residual(x)
        ended = exchange.row_parallel(out.view(tokens, -1), self._o, residual, sharded=step.sharded)
        return self._norms.end(ended, x), normed if self._is_parallel else None

    def feed_forward(self, stream: Stream, normed: Tensor | None, step: _Step) -> Stream:
        """Run the second half, likewise. What only the first half needed should be freed before.

        Its input is `normed`, or else it follows from the stream.
        """
        exchange, tokens = self._exchange, len(step.plan.pages)
        norms = self._second_norms
        normed, x = norms.begin(stream) if normed is None else (normed, stream.whole())
        residual = norms.residual(x)
        if self._experts is not None:
            residual = torch.zeros_like(x) if residual is None else residual
            out = exchange.run_experts(
                self._experts, residual, normed, step.dp_tokens, sharded=step.sharded
            )
            return norms.end(out, x)
        inner = exchange.column_parallel(
            normed, self._gate_up, silu_multiply=True, sharded=step.sharded
        )
        out = exchange.row_parallel(inner[:tokens], self._down, residual, sharded=step.sharded)
        return norms.end(out, x)

    @property
    def experts(self) -> Experts | None:
        """The layer's experts, if it has some."""
        return self._experts

    def run_empty(self, empty: Tensor, tokens: Sequence[int]) -> None:
        """Run the experts for other data-parallel attention groups; `empty` is [0, hidden]."""
        if self._experts is not None:
            self._exchange.run_experts(self._experts, empty, empty, tokens, sharded=False)


class GpuModel:
    """`CpuModel` on Triton kernels.

    Args:
        spec: the whole model.
        weights: source of this rank's tensors.
        dtype: compute dtype.
        device: device for all tensors.
        exchange: how ranks communicate inside layers.
        groups: the ranks, for embedding and logits, which are not worth overlapping.
        copies: slots for experts beyond one for each of this rank's.
        fp8_cache: the KV cache is in fp8.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: WeightSource,
        dtype: torch.dtype,
        *,
        device: torch.device,
        exchange: Exchange,
        groups: Groups,
        copies: int = 0,
        fp8_cache: bool = False,
    ) -> None:
        sharded = exchange.is_sharded(sys.maxsize)
        load = WeightLoader(weights, dtype, device, sharded=sharded)
        stage, local = weights.layout.of_stage(spec), weights.layout.local(spec)
        self.device, self.exchange = device, exchange
        self._dtype, self._group = dtype, groups.tensor
        self._angles = Angles(stage.layers, spec.head_dim, device)
        self._layers = [
            Layer(local, layer, load, exchange, copies, fp8_cache) for layer in stage.layers
        ]
        if stage.is_first:
            self._table = load(spec.embedding)
        if stage.is_last:
            self._norm = load.norm(spec.norm)
            tied = stage.is_first and spec.lm_head is None
            head = self._table if tied else load(spec.lm_head or spec.embedding)
            self._lm_head = PlainLinear([head])
        load.buffer.allocate()
        self._vocabulary = weights.parts(spec.embedding)[0]
        self._vocab_size, self._hidden_size = spec.vocab_size, spec.hidden_size

    @property
    def experts(self) -> list[Experts]:
        """The experts of each layer that has some."""
        return [layer.experts for layer in self._layers if layer.experts is not None]

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        cache: Sequence[LayerCache],
        plan: PagedPlan,
        rows: Tensor | None = None,
        dp_sizes: Sequence[Size] = (),
    ) -> Tensor:
        """Run the layers; see `CpuModel`. Whoever reads the result also checks the faults."""
        tokens = len(x)
        turns = self._angles.at(positions, self._dtype)
        sharded = self.exchange.is_sharded(tokens)
        step = _Step(turns, plan, sharded, tuple(size.tokens for size in dp_sizes))
        with self.exchange.step():
            if sharded:
                x = self.exchange.shard(x)
            stream = Stream(x)
            for layer, layer_cache in zip(self._layers, cache, strict=True):
                stream, normed = layer.attend(stream, step, layer_cache)
                stream = layer.feed_forward(stream, normed, step)
            x = stream.whole()
            if sharded:
                x = self.exchange.unshard(x, tokens)
        return x if rows is None else x[rows]

    def run_empty(self, dp_sizes: Sequence[Size]) -> None:
        """See `CpuModel.run_empty`."""
        empty = torch.empty(0, self._hidden_size, dtype=self._dtype, device=self.device)
        with self.exchange.step():
            for layer in self._layers:
                layer.run_empty(empty, [size.tokens for size in dp_sizes])

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Apply the final norm, as for `logits` and embeddings; [S, hidden] to the same shape."""
        return self._norm(hidden.contiguous()).out

    def logits(self, hidden: Tensor) -> Logits:
        """[S, hidden] for the sampled tokens -> [S, vocab_size]."""
        local = self._lm_head(self.final_norm(hidden))
        return Logits(local, self._vocab_size, self._group)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Int [T] -> [T, hidden]; each rank holds a part of the vocabulary."""
        if self._group.size == 1:
            return embedding(token_ids, self._table)
        here = (token_ids >= self._vocabulary.start) & (token_ids < self._vocabulary.stop)
        x = embedding(torch.where(here, token_ids - self._vocabulary.start, 0), self._table)
        return self._group.sum(x.masked_fill(~here[:, None], 0))
