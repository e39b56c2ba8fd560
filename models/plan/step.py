"""A step as a list of operators: operations, bytes from memory, and bytes between ranks.

    specification + layout + batch ──► operators on one rank ──► seconds (times.py)

The list follows the models' own steps (models/torch/cpu_model.py, models/jax/model.py):

| operator | its product | exchange after it |
| --- | --- | --- |
| embedding | none, a lookup | tp > 1: all-reduce |
| qkv | [T, hidden] x [hidden, q + 2 kv] | - |
| attention | scores and values, over the KV cache | --cp: queries and parts |
| o | [T, q] x [q, hidden] | tp > 1: all-reduce |
| gate + up, down | the MLP | tp > 1: all-reduce |
| experts | the router, and each token's top_k experts | tp > 1: all-reduce; --ep: more |
| lm head | [S, hidden] x [hidden, vocabulary] | tp > 1: the largest logits |

T is the step's tokens, S its requests: only their last tokens get logits. Overlapped kernels use
an all-gather before a product and a reduce-scatter after one, not an all-reduce (Korthikanti et al.
2022, section 4.2), and hide both behind the product.

Experts: a batch of T tokens needs E (1 - (1 - k/E)^T) of E experts, if each token's k experts are
drawn evenly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from weft.models.plan.batch import Batch
from weft.models.spec.layout import Layout
from weft.models.spec.spec import (
    DTYPE_BYTES,
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    WeightSpec,
)

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
Ranks = Literal["tensor", "context", "data", "stage"]
"""Which ranks exchange: groups in models/torch/group.py, or two neighbouring stages."""

FLOAT32 = DTYPE_BYTES["float32"]
TOKEN = 8
"""Bytes for a sampled token, which the last stage sends to the first."""
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
    """

    what: str
    flops: float
    read: float
    exchanges: tuple[Exchange, ...] = ()
    overlapped: bool = False
    times: int = 1
    kernels: int = 1

    @property
    def sent(self) -> float:
        """Bytes that this rank sends, each time."""
        return sum(exchange.sent for exchange in self.exchanges)


@dataclass(frozen=True, slots=True)
class Precision:
    """Number formats.

    Attributes:
        dtype: activations and KV cache: "bfloat16" or "float32".
        quantization: the matrices: "none" or "int8".
    """

    dtype: str = "bfloat16"
    quantization: str = "none"

    @property
    def item(self) -> int:
        """Bytes of one number in an activation."""
        return DTYPE_BYTES[self.dtype]

    def weight_bytes(self, weight: WeightSpec, size: float) -> float:
        """Return the bytes for `size` of a matrix's numbers."""
        if self.quantization == "none" or len(weight.shape) == 1:
            return size * self.item
        return size * (1 + self.item / weight.shape[-1])


@dataclass(frozen=True, slots=True)
class Step:
    """A step of one engine, as rank `layout.rank` computes it.

    Attributes:
        spec: the whole model.
        layout: the rank's layout.
        batch: the tokens in each data-parallel attention group.
        precision: number formats.
        overlapped: the products' exchanges are hidden behind them, with sharded tokens.
    """

    spec: ModelSpec
    layout: Layout
    batch: Batch
    precision: Precision = Precision()
    overlapped: bool = False

    def operators(self) -> list[Operator]:
        """Return the operators in order; those of equal layers are one."""
        local = self.layout.local(self.spec)
        found: dict[Operator, int] = {}
        for operator in self._operators(local):
            found[operator] = found.get(operator, 0) + operator.times
        return [replace(operator, times=times) for operator, times in found.items()]

    def _operators(self, local: ModelSpec) -> Iterator[Operator]:
        tokens, requests = self.batch.tokens, self.batch.requests
        hidden = self.spec.hidden_size * self.precision.item
        if local.is_first:
            summed = self._all_reduce(tokens)
            yield Operator("embedding", 0, 2 * tokens * hidden, summed)
        for i, layer in enumerate(local.layers):
            yield from self._attention(local, layer.attention)
            last = local.is_last and i == len(local.layers) - 1
            yield from self._feed_forward(layer, requests if last else tokens)
        if local.is_last:
            yield self._lm_head(local)
        if self.layout.pp > 1:
            payload = requests * TOKEN if local.is_last else tokens * hidden
            yield Operator("next stage", 0, 0, (Exchange("send", "stage", 2, payload),))

    def _all_reduce(self, rows: int) -> tuple[Exchange, ...]:
        """Return the exchange that sums a product's rows over the ranks."""
        return self._exchange("all_reduce", rows)

    def _exchange(self, kind: Collective, rows: int) -> tuple[Exchange, ...]:
        size = self.layout.dense_size
        if size == 1 or not rows:
            return ()
        payload = rows * self.spec.hidden_size * self.precision.item
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
    ) -> Operator:
        """Return a product of `rows` rows with matrices that are fused to one."""
        item = self.precision.item
        size = sum(weight.size for weight in weights)
        columns, width = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        read = sum(self.precision.weight_bytes(weight, weight.size) for weight in weights)
        read += rows * (width + columns) * item
        return Operator(
            what, 2 * rows * size, read if rows else 0, exchanges, self.overlapped and size > 0
        )

    def _attention(self, local: ModelSpec, attention: AttentionSpec) -> Iterator[Operator]:
        batch, tokens, cp = self.batch, self.batch.tokens, self.layout.cp
        q = attention.q.weight
        yield self._product(
            "qkv", tokens, (q, attention.k.weight, attention.v.weight), self._into(tokens)
        )
        seen = float("inf") if attention.sliding_window is None else attention.sliding_window
        # A rank has its part of the keys, for the heads of all ranks that share them.
        decode_keys = batch.decodes * min(batch.decode_context, seen) / cp
        prefill_keys = batch.prefill_tokens * min(batch.prefill_context, seen) / cp
        heads = local.num_heads * cp
        flops = 4 * heads * local.head_dim * (decode_keys + prefill_keys)
        key_bytes = 2 * local.num_kv_heads * local.head_dim * self.precision.item
        # A prompt's tokens share what is read. Half of them see less than the mean.
        prefill_read = batch.prefills * min(2 * batch.prefill_context, seen + tokens) / cp
        read = key_bytes * (decode_keys + prefill_read + tokens / cp)
        read += 2 * tokens * heads * local.head_dim * self.precision.item
        yield Operator("attention", flops, read, self._attention_exchanges(tokens, heads, local))
        yield self._product("o", tokens, (attention.o.weight,), self._out_of(tokens))

    def _attention_exchanges(
        self, tokens: int, heads: int, local: ModelSpec
    ) -> tuple[Exchange, ...]:
        """Return what ranks that share keys exchange: all queries, and each rank's results."""
        cp = self.layout.cp
        if cp == 1:
            return ()
        queries = tokens * heads * local.head_dim * self.precision.item
        parts = cp * tokens * heads * (local.head_dim + 1) * FLOAT32
        return (
            Exchange("all_gather", "context", cp, queries),
            Exchange("all_to_all", "context", cp, parts),
        )

    def _feed_forward(self, layer: LayerSpec, rows: int) -> Iterator[Operator]:
        block = layer.feed_forward
        if isinstance(block, MlpSpec):
            yield self._product(
                "gate + up", rows, (block.gate.weight, block.up.weight), self._into(rows)
            )
            yield self._product("down", rows, (block.down.weight,), self._out_of(rows))
            return
        yield from self._experts(block, rows)

    def _experts(self, moe: MoeSpec, rows: int) -> Iterator[Operator]:
        """Return the router and the experts; `rows` are those of each attention group."""
        layout, item, hidden = self.layout, self.precision.item, self.spec.hidden_size
        groups = layout.dp_size
        all_rows = rows * groups
        yield self._product("router", all_rows, (moe.router,), self._into(rows))
        count, width, _ = moe.gate.shape  # this rank's experts
        chosen = all_rows * moe.top_k * count / moe.router.shape[0]
        hit = count * (1 - (1 - moe.top_k / moe.router.shape[0]) ** all_rows)
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
            exchanges + self._out_of(rows),
            self.overlapped,
            kernels=4,  # sort the tokens, two grouped products, weigh their results
        )

    def _lm_head(self, local: ModelSpec) -> Operator:
        weight = local.embedding if local.lm_head is None else local.lm_head
        requests, size = self.batch.requests, self.layout.dense_size
        head = self._product("lm head", requests, (weight,))
        exchanges: tuple[Exchange, ...] = ()
        if size > 1 and requests:
            payload = size * requests * LARGEST
            exchanges = (Exchange("all_gather", "tensor", size, payload),)
        return replace(head, exchanges=exchanges, overlapped=False)


def stages(step: Step) -> list[list[Operator]]:
    """Return the operators of the first rank in each pipeline stage."""
    layout = step.layout
    first = (stage * layout.stage_size for stage in range(layout.pp))
    return [replace(step, layout=replace(layout, rank=rank)).operators() for rank in first]
