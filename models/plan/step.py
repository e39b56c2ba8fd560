"""A step as a list of operators: operations, bytes from memory, and bytes between ranks.

    specification + layout + batch ──► operators on one rank ──► seconds (times.py)

The list follows the models' own steps (models/torch/cpu_model.py, models/jax/model.py):

| operator | its product | exchange after it |
| --- | --- | --- |
| embedding | none, a lookup | tp > 1: all-reduce |
| qkv | [T, hidden] x [hidden, q + 2 kv] | - |
| norms | over all heads, if the model has them | tp > 1: all-reduce of two numbers |
| attention | scores and values, over the KV cache | --cp: queries and parts |
| o | [T, q] x [q, hidden] | tp > 1: all-reduce |
| gate + up, down | the MLP | tp > 1: all-reduce |
| experts | the router, each token's top_k experts, the shared MLP | as the MLP; --ep: more |
| lm head | [S, hidden] x [hidden, vocabulary] | tp > 1: the largest logits |
| sampling | jax: searches in the logits | - |

T is the step's tokens, S its requests: only their last tokens get logits. With torch, only these
pass the last layer's feed-forward.

Overlapped products use an all-gather before a product and a reduce-scatter after one, not an
all-reduce (Korthikanti et al. 2022, section 4.2), and hide both behind the product. With jax the
embedding then ends in a reduce-scatter, too, and an all-reduce collects the S tokens.

Experts: a batch of T tokens needs E (1 - (1 - k/E)^T) of E experts, if each token's k experts are
drawn evenly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Literal, TypeVar

from weft.models.plan.batch import Batch
from weft.models.spec.layout import Layout
from weft.models.spec.spec import (
    DTYPE_BYTES,
    ROUNDED,
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    Packed,
    WeightSpec,
)

Value = TypeVar("Value")
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
Backend = Literal["torch", "jax"]
Ranks = Literal["tensor", "context", "data", "stage"]
"""Which ranks exchange: groups in models/torch/group.py, or two neighbouring stages."""

FLOAT32 = DTYPE_BYTES["float32"]
TOKEN = 8
"""Bytes for a sampled token, which the last stage sends to the first."""
SEARCHED = 480
"""Bytes that sampling on TPUs reads for a logit. It searches bit by bit: for top-k, top-p, and the
token (models/jax/draw.py). XLA counts 490 for 128 rows, on v5e and v6e.
"""
LARGEST = 2 * 8
"""Bytes for the largest logit in a row: its value and its column, as in models/torch/logits.py."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One exchange between ranks.

    Attributes:
        kind: the collective.
        ranks: the group.
        size: number of ranks in it.
        payload: bytes of the whole array that is gathered, reduced or exchanged.
    """

    kind: Collective
    ranks: Ranks
    size: int
    payload: float

    @property
    def sent(self) -> float:
        """Bytes that one rank sends, if each byte goes to its receiver directly."""
        if self.kind == "send":
            return self.payload
        passes = 2 if self.kind == "all_reduce" else 1
        parts = self.size if self.kind == "all_to_all" else 1
        return passes * self.payload * (self.size - 1) / self.size / parts


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator on one rank, in all layers that are alike.

    Attributes:
        what: its name.
        flops: operations, each time.
        read: bytes from and to the device's memory, each time.
        exchanges: exchanges of its input or output, each time.
        overlapped: the exchanges are hidden behind the product.
        times: how often it runs in the step.
        kernels: operators or kernels that are launched for it.
        vector: on a CPU, vector units compute it, not matrix units: attention, a tied LM head, and
            products with rounded weights, which are widened (kernels/cpu/linear.py).
    """

    what: str
    flops: float
    read: float
    exchanges: tuple[Exchange, ...] = ()
    overlapped: bool = False
    times: int = 1
    kernels: int = 1
    vector: bool = False

    @property
    def sent(self) -> float:
        """Bytes that this rank sends, each time."""
        return sum(exchange.sent for exchange in self.exchanges)


@dataclass(frozen=True, slots=True)
class Precision:
    """Number formats.

    Attributes:
        dtype: activations: "bfloat16" or "float32".
        quantization: the matrices: "none", "int8" or "int4".
        kv_cache_dtype: the KV cache: "auto", which is `dtype`, or "fp8".
        packed: where products read a quantised checkpoint's weights as they are stored.
    """

    dtype: str = "bfloat16"
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    packed: Packed = None

    @property
    def item(self) -> int:
        """Bytes of one number in an activation."""
        return DTYPE_BYTES[self.dtype]

    @property
    def kv_item(self) -> int:
        """Bytes of one number in the KV cache."""
        return 1 if self.kv_cache_dtype == "fp8" else self.item

    def weight_bytes(self, weight: WeightSpec, size: float) -> float:
        """Return the bytes for `size` of a matrix's numbers."""
        stored = None
        if self.packed == "gpu":
            stored = weight.packed_bytes(weight.shape, self.item, self.quantization)
        elif self.packed == "cpu":
            stored = weight.native_bytes(weight.shape)
        if stored is not None:
            return size * stored / weight.size
        if self.quantization == "none" or len(weight.shape) == 1:
            return size * self.item
        width = weight.shape[-1]
        return size * ROUNDED[self.quantization].row_bytes(width, self.item) / width


class RankModel:
    """One rank's part of a model, prepared to list the operators of any step.

    Args:
        spec: the whole model. Layers that are one object become one operator of each kind: see
            `anonymous`.
        layout: the rank's layout.
        precision: number formats.
        overlapped: the products' exchanges are hidden behind them, with sharded tokens.
        backend: the model's implementation.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layout: Layout,
        precision: Precision = Precision(),
        *,
        overlapped: bool = False,
        backend: Backend = "torch",
    ) -> None:
        self.layout = layout
        self.precision = precision
        self.overlapped = overlapped
        self._in_jax = backend == "jax"
        self.local = layout.local(spec)
        alike = list(self.local.layers)
        self._last = alike.pop() if self.local.is_last else None
        kinds = {id(layer): layer for layer in alike}
        self._layers = [(kinds[key], times) for key, times in Counter(map(id, alike)).items()]

    def operators(self, batch: Batch) -> list[Operator]:
        """Return a step's operators in order; those of equal layers are one.

        Args:
            batch: the tokens in each data-parallel attention group.
        """
        return list(self._operators(batch))

    def _operators(self, batch: Batch) -> Iterator[Operator]:
        local, tokens = self.local, batch.tokens
        hidden = local.hidden_size * self.precision.item
        if local.is_first:
            scattered = self.overlapped and self._in_jax
            summed = self._exchange("reduce_scatter" if scattered else "all_reduce", tokens)
            yield Operator("embedding", 0, 2 * tokens * hidden, summed)
        for layer, times in self._layers:
            yield from self._layer(layer, batch, tokens, times)
        if self._last is not None:
            yield from self._layer(self._last, batch, tokens if self._in_jax else batch.requests)
            if self.overlapped and self._in_jax:
                yield Operator("rows", 0, 0, self._exchange("all_reduce", batch.requests))
            yield self._lm_head(batch.requests)
            if self._in_jax:
                columns = self._head_weight.shape[0]
                yield Operator("sampling", 0, batch.requests * columns * SEARCHED)
        if self.layout.pp > 1:
            payload = batch.requests * TOKEN if local.is_last else tokens * hidden
            yield Operator("next stage", 0, 0, (Exchange("send", "stage", 2, payload),))

    def _layer(
        self, layer: LayerSpec, batch: Batch, rows: int, times: int = 1
    ) -> Iterator[Operator]:
        """Return the operators of `times` layers; their feed-forward has `rows` rows."""
        yield from self._attention(layer.attention, batch, times)
        block = layer.feed_forward
        if isinstance(block, MlpSpec):
            yield from self._mlp(block, rows, times, self._into(rows), self._out_of(rows))
            return
        yield from self._experts(block, rows, times)
        if block.shared is not None:
            # Overlapped, it is exchanged like an MLP. Otherwise one sum has its and the experts'.
            ends = (self._into(rows), self._out_of(rows)) if self.overlapped else ((), ())
            yield from self._mlp(block.shared, rows, times, *ends)

    def _mlp(
        self,
        mlp: MlpSpec,
        rows: int,
        times: int,
        before: tuple[Exchange, ...],
        after: tuple[Exchange, ...],
    ) -> Iterator[Operator]:
        inner = (mlp.gate.weight, mlp.up.weight)
        yield self._product("gate + up", rows, inner, before, times)
        yield self._product("down", rows, (mlp.down.weight,), after, times)

    def _exchange(self, kind: Collective, rows: int) -> tuple[Exchange, ...]:
        size = self.layout.dense_size
        if size == 1 or not rows:
            return ()
        payload = rows * self.local.hidden_size * self.precision.item
        return (Exchange(kind, "tensor", size, payload),)

    def _into(self, rows: int) -> tuple[Exchange, ...]:
        """Return the exchange before a product: sharded tokens are gathered."""
        return self._exchange("all_gather", rows) if self.overlapped else ()

    def _out_of(self, rows: int) -> tuple[Exchange, ...]:
        """Return the exchange after a product, whose terms are summed."""
        return self._exchange("reduce_scatter" if self.overlapped else "all_reduce", rows)

    def _product(
        self,
        what: str,
        rows: int,
        weights: tuple[WeightSpec, ...],
        exchanges: tuple[Exchange, ...] = (),
        times: int = 1,
    ) -> Operator:
        """Return a product of `rows` rows with matrices that are fused to one."""
        item = self.precision.item
        size = sum(weight.size for weight in weights)
        columns, width = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        read = sum(self.precision.weight_bytes(weight, weight.size) for weight in weights)
        read += rows * (width + columns) * item
        return Operator(
            what,
            2 * rows * size,
            read if rows else 0,
            exchanges,
            self.overlapped and size > 0,
            times,
            vector=self.precision.quantization in ROUNDED,
        )

    def _attention(self, attention: AttentionSpec, batch: Batch, times: int) -> Iterator[Operator]:
        local, tokens, cp = self.local, batch.tokens, self.layout.cp
        q = attention.q.weight
        qkv = (q, attention.k.weight, attention.v.weight)
        yield self._product("qkv", tokens, qkv, self._into(tokens), times)
        norm, size = attention.q_norm, self.layout.dense_size
        if norm is not None and norm.spans_heads and size > 1 and tokens:
            squares = 2 * tokens * FLOAT32  # the means of queries and keys
            exchange = Exchange("all_reduce", "tensor", size, squares)
            yield Operator("norms", 0, 2 * squares, (exchange,), times=times)
        seen = float("inf") if attention.sliding_window is None else attention.sliding_window
        # A rank has its part of the keys, for the heads of all ranks that share them.
        decode_keys = batch.decodes * min(batch.decode_context, seen) / cp
        prefill_keys = batch.prefill_tokens * min(batch.prefill_context, seen) / cp
        heads = local.num_heads * cp
        flops = 4 * heads * local.head_dim * (decode_keys + prefill_keys)
        key_bytes = 2 * local.num_kv_heads * local.head_dim * self.precision.kv_item
        # A prompt's tokens share what is read. Half of them see less than the mean.
        prefill_read = batch.prefills * min(2 * batch.prefill_context, seen + tokens) / cp
        read = key_bytes * (decode_keys + prefill_read + tokens / cp)
        read += 2 * tokens * heads * local.head_dim * self.precision.item
        exchanges = self._attention_exchanges(tokens, heads)
        # On TPUs, a kernel works through the requests in turn: a grid step, and a write to a block.
        kernels = 1 + batch.requests if self._in_jax else 1
        yield Operator(
            *("attention", flops, read, exchanges), times=times, kernels=kernels, vector=True
        )
        yield self._product("o", tokens, (attention.o.weight,), self._out_of(tokens), times)

    def _attention_exchanges(self, tokens: int, heads: int) -> tuple[Exchange, ...]:
        """Return what ranks that share keys exchange: all queries, and each rank's results."""
        cp = self.layout.cp
        if cp == 1:
            return ()
        queries = tokens * heads * self.local.head_dim * self.precision.item
        parts = cp * tokens * heads * (self.local.head_dim + 1) * FLOAT32
        return (
            Exchange("all_gather", "context", cp, queries),
            Exchange("all_to_all", "context", cp, parts),
        )

    def _experts(self, moe: MoeSpec, rows: int, times: int) -> Iterator[Operator]:
        """Return the router and the experts; `rows` are those of each attention group."""
        layout, item, hidden = self.layout, self.precision.item, self.local.hidden_size
        groups = layout.dp_size
        all_rows = rows * groups
        router = moe.router
        yield self._product("router", all_rows, (router.weight,), self._into(rows), times)
        count, width, _ = moe.gate.shape  # this rank's experts
        part = router.top_k / router.weight.shape[0]  # of the experts, for each token
        chosen = all_rows * part * count
        hit = count * (1 - (1 - part) ** all_rows)
        per_expert = sum(
            self.precision.weight_bytes(weight, weight.size / count)
            for weight in (moe.gate, moe.up, moe.down)
        )
        exchanges: tuple[Exchange, ...] = ()
        if groups > 1 and rows:
            payload = all_rows * hidden * item
            exchanges = (
                Exchange("all_gather", "data", groups, payload),
                Exchange("reduce_scatter", "data", groups, payload),
            )
        yield Operator(
            "experts",
            2 * chosen * 3 * width * hidden,
            hit * per_expert + chosen * (2 * hidden + 3 * width) * item,
            exchanges + self._out_of(rows),  # nothing hides them
            times=times,
            kernels=4,  # sort the tokens, two grouped products, weigh their results
            vector=self.precision.quantization in ROUNDED,
        )

    @property
    def _head_weight(self) -> WeightSpec:
        return self.local.lm_head or self.local.embedding

    def _lm_head(self, requests: int) -> Operator:
        local, size = self.local, self.layout.dense_size
        head = self._product("lm head", requests, (self._head_weight,))
        exchanges: tuple[Exchange, ...] = ()
        if size > 1 and requests:
            payload = size * requests * LARGEST
            exchanges = (Exchange("all_gather", "tensor", size, payload),)
        vector = head.vector or local.lm_head is None
        return replace(head, exchanges=exchanges, overlapped=False, vector=vector)


def stages(
    spec: ModelSpec,
    layout: Layout,
    precision: Precision,
    *,
    overlapped: bool = False,
    backend: Backend = "torch",
) -> list[RankModel]:
    """Return the first rank in each pipeline stage."""
    ranks = (stage * layout.stage_size for stage in range(layout.pp))
    layouts = [replace(layout, rank=rank) for rank in ranks]
    return [
        RankModel(spec, each, precision, overlapped=overlapped, backend=backend) for each in layouts
    ]


def anonymous(spec: ModelSpec) -> ModelSpec:
    """Return a model without its weights' names; equal layers are one object."""
    layers: dict[LayerSpec, LayerSpec] = {}
    for layer in map(_without_names, spec.layers):
        layers.setdefault(layer, layer)
    return replace(spec, layers=tuple(layers[_without_names(layer)] for layer in spec.layers))


def _without_names(value: Value) -> Value:
    """Return a layer without its weights' names, so that equal layers compare as equal."""
    if isinstance(value, WeightSpec):
        return replace(value, name="", places=())
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value,
            **{each.name: _without_names(getattr(value, each.name)) for each in fields(value)},
        )
    return value
