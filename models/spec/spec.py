"""ModelSpec: the one description of a model that every backend, the loader and the planner read.

`build.py` makes a ModelSpec from a checkpoint's config.json. The spec lists the weights, their
names in the checkpoint, and each dimension's logical axis. A parallel layout can therefore map
axes to ranks without knowing any names.

All described models are decoders with norms before or after attention and the feed-forward, rotary
positions, and SiLU-gated MLPs or routed experts. Not described: encoders, cross attention, ALiBi,
latent attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from weft.models.spec.quantization import Quantization, QuantSpec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Axis = Literal[
    "vocab",  # tokens
    "hidden",  # the residual stream
    "q_heads",  # query heads x head_dim; may be cut between heads only
    "kv_heads",  # key/value heads x head_dim; may be cut between heads only
    "head_dim",  # inside one head; never cut
    "intermediate",  # width of a dense MLP
    "choice",  # a router's output; never cut, because every rank scores all experts
    "expert",  # experts of a layer
    "moe_intermediate",  # width of one expert
]
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class RoundedFormat:
    """How matrices are rounded when loading (kernels/cpu/int8.py, int4.py).

    Attributes:
        bits: of each number.
        group: consecutive inputs with one scale, and the last group is filled up; None is a row.
    """

    bits: int
    group: int | None = None

    def row_bytes(self, width: int, item: int) -> int:
        """Return the bytes of a row with `width` numbers; `item` is a scale's."""
        group = self.group or width
        groups = -(-width // group)
        return groups * (group * self.bits // 8 + item)


ROUNDED = {"int8": RoundedFormat(8), "int4": RoundedFormat(4, 32)}
"""The values of `--quantization`, except for "none"."""

Packed = Literal["cpu", "gpu"] | None
"""Whose kernels read a quantised checkpoint's weights as they are stored; None dequantises them."""

FLOAT32_BYTES = DTYPE_BYTES["float32"]
FP8_CACHE = "float8_e4m3fn"
"""The dtype of a KV cache in fp8, by its torch name."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint may hold a weight: a tensor, a block in a fused one, or one per expert.

    Attributes:
        name: the tensor's name; with `{expert}` in it, each expert has a tensor, or each head.
        shape: the whole tensor's shape; axes of length 1 may come before the weight's.
        start: the weight's first index on each of the tensor's axes; () is the tensor's beginning.
        transposed: the tensor's last two axes are swapped.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...] = ()
    transposed: bool = False

    @property
    def is_per_expert(self) -> bool:
        """True if the checkpoint holds one tensor per expert."""
        return "{expert}" in self.name

    def swapped(self) -> Place:
        """Return the place in a tensor whose last two axes are swapped."""

        def swap(axes: tuple[int, ...]) -> tuple[int, ...]:
            return (*axes[:-2], *axes[:-3:-1])

        return Place(self.name, swap(self.shape), swap(self.start), transposed=True)

    def tensor(self, expert: int) -> str:
        """Return the name of the tensor with an expert."""
        return self.name.format(expert=expert) if self.is_per_expert else self.name

    def tensors(self, experts: int) -> tuple[str, ...]:
        """Return the names of all tensors, for a number of experts."""
        return tuple(map(self.tensor, range(experts))) if self.is_per_expert else (self.name,)


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One weight.

    Attributes:
        name: the weight's name; no other weight has it.
        shape: the whole weight's shape; matrices are [out, in], and experts come first.
        axes: the logical axis for each dimension.
        places: where checkpoints may hold it, the usual place first; () is a tensor `name`.
        head_order: for each row of a head, its index in the checkpoint's heads; () if they have
            the same order. The first axis then consists of heads, or the last is one head.
        in_float32: kept in float32, whatever the compute dtype is.
        scale: multiplies the checkpoint's numbers, in float32.
        stored: how the checkpoint quantises a product's weight; None if it does not.
        is_ones: no checkpoint has it, and all its numbers are 1.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[Axis, ...]
    places: tuple[Place, ...] = ()
    head_order: tuple[int, ...] = ()
    in_float32: bool = False
    scale: float = 1.0
    stored: QuantSpec | None = None
    is_ones: bool = False

    @property
    def has_experts(self) -> bool:
        """True if the first axis is the layer's experts."""
        return self.axes[0] == "expert"

    @property
    def is_stack(self) -> bool:
        """True if checkpoints may hold a tensor for each index of the first axis."""
        return self.has_experts or any(place.is_per_expert for place in self.places)

    @property
    def known_places(self) -> tuple[Place, ...]:
        """The places; at least one."""
        return self.places or (Place(self.name, self.shape),)

    @property
    def size(self) -> int:
        """Element count."""
        return math.prod(self.shape)

    def native_bytes(self, shape: tuple[int, ...]) -> int | None:
        """Return the bytes of a part on a CPU whose kernels read it as it is stored, or None.

        Other factors than powers of two make int4's scales too long for float16.
        """
        if self.stored is None or (self.stored.bits == 4 and math.frexp(self.scale)[0] != 0.5):
            return None
        return self.stored.native_bytes(shape)

    def packed_bytes(self, shape: tuple[int, ...], item: int, quantization: str) -> int:
        """Return the bytes of a part on a GPU, where products read quantised weights.

        Args:
            shape: the part's.
            item: bytes of a number without quantisation.
            quantization: how weights are rounded that the checkpoint does not quantise; or "none".
        """
        if self.stored is not None:
            return self.stored.packed_bytes(shape)
        if quantization == "none":
            return math.prod(shape) * item
        *rows, width = shape
        return math.prod(rows) * ROUNDED[quantization].row_bytes(width, FLOAT32_BYTES)


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """y = x @ weight.T + bias."""

    weight: WeightSpec
    bias: WeightSpec | None = None

    def scaled(self, factor: float) -> LinearSpec:
        """Return the layer whose result is `factor` times as large."""
        bias = None if self.bias is None else replace(self.bias, scale=factor)
        return LinearSpec(replace(self.weight, scale=factor), bias)


@dataclass(frozen=True, slots=True)
class NormSpec:
    """RMSNorm (Zhang and Sennrich 2019), or layer norm (Ba et al. 2016), which subtracts the mean.

    Attributes:
        weight: [hidden]; for queries and keys, [head_dim], or each head's: [heads, head_dim], or of
            all heads together: [heads x head_dim].
        eps: added to the mean square.
        is_centered: the mean is subtracted first.
        bias: added to the result, if any; like the weight.
    """

    weight: WeightSpec
    eps: float
    is_centered: bool = False
    bias: WeightSpec | None = None

    @property
    def spans_heads(self) -> bool:
        """True if the mean is taken over all heads together."""
        return self.weight.axes in (("q_heads",), ("kv_heads",))

    @property
    def is_by_head(self) -> bool:
        """True if each head has its own weights."""
        return len(self.weight.axes) == 2


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary positions (Su et al. 2021), with the checkpoint's context scaling.

    weft rotates dimension i of a head together with dimension i + head_dim / 2, in all backends.
    Checkpoints that pair neighbours, or that rotate only some dimensions, become such models when
    they are loaded: `head_order` sorts the rows of queries and keys, and the angle of a pair that
    is not rotated is 0. Scores stay the same, because queries and keys have one order.

    Attributes:
        theta: the wavelengths' base.
        dim: rotated dimensions, the first in a head; even, and 0 for none.
        neighbours: the checkpoint pairs dimensions 2i and 2i + 1, and not i and i + dim / 2.
        scaling: "none"; "linear": all positions divided by `factor`; "llama3": long wavelengths
            divided by `factor`, short ones kept, blended between (Llama 3.1 model card); "yarn":
            the same by another rule (Peng et al. 2023); "longrope": each wavelength has its own
            factor (Ding et al. 2024).
        factor, original_max_len: the scaling's parameters.
        low_freq_factor, high_freq_factor: llama3's limits, in turns over the original context.
        beta_fast, beta_slow, truncate: yarn's limits; whether they are whole dimensions.
        amplitude: multiplies the rotated dimensions.
        short_factors, long_factors: longrope's divisors, one per pair. Contexts longer than
            `original_max_len` have the long ones.
        max_len: the maximum context, which selects longrope's divisors. transformers selects them
            by each batch's longest request, and computes the keys again when it changes.
        query_beta: a query at position p is multiplied by 1 + query_beta *
            log(1 + floor((p + query_shift) / original_max_len)), so that attention stays sharp over
            long contexts (Llama 4's temperature).
    """

    theta: float
    dim: int
    neighbours: bool = False
    scaling: Literal["none", "linear", "llama3", "yarn", "longrope"] = "none"
    factor: float = 1.0
    original_max_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    max_len: int = 0
    query_beta: float = 0.0
    query_shift: int = 0

    def head_order(self, head_dim: int) -> tuple[int, ...]:
        """Return the order of a head's rows that pairs i with i + head_dim / 2; () if they are.

        See `WeightSpec.head_order`.
        """
        pairs = self.dim // 2
        step, away = (2, 1) if self.neighbours else (1, pairs)
        kept = range(self.dim, head_dim)
        half = len(kept) // 2
        first = (*range(0, step * pairs, step), *kept[:half])
        second = (*range(away, away + step * pairs, step), *kept[half:])
        order = (*first, *second)
        return () if order == tuple(range(head_dim)) else order

    def inverse_frequencies(self, head_dim: int) -> npt.NDArray[np.float32]:
        """Return the radians per position for each pair of dimensions, [head_dim / 2]."""
        import numpy as np  # here, because the process that starts the engine needs no NumPy

        all_pairs = np.zeros(head_dim // 2, np.float32)
        if self.dim:
            exponent = np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim)
            powers = np.power(np.float32(self.theta), exponent).astype(np.float32)
            inverse: npt.NDArray[np.float32] = np.float32(1) / powers
            all_pairs[: self.dim // 2] = self._scaled(inverse)
        return all_pairs

    def amplitudes(self, head_dim: int) -> npt.NDArray[np.float32] | None:
        """Return each pair's factor, [head_dim / 2]; None if all are 1."""
        import numpy as np

        if self.amplitude == 1.0:
            return None
        all_pairs = np.ones(head_dim // 2, np.float32)
        all_pairs[: self.dim // 2] = self.amplitude
        return all_pairs

    def _scaled(self, inverse: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Scale the radians per position, [dim / 2]."""
        import numpy as np

        if self.scaling == "none":
            return inverse
        if self.scaling == "longrope":
            is_long = self.max_len > self.original_max_len
            factors = self.long_factors if is_long else self.short_factors
            return (inverse / np.array(factors, np.float32)).astype(np.float32)
        scaled: npt.NDArray[np.float32] = inverse / np.float32(self.factor)
        if self.scaling == "linear":
            return scaled
        blend: npt.NDArray[Any]
        if self.scaling == "yarn":
            blend = 1 - self._ramp(len(inverse))
        else:
            turns = self.original_max_len * inverse / np.float32(2 * np.pi)
            width = self.high_freq_factor - self.low_freq_factor
            above = turns - self.low_freq_factor
            blend = above / width if width else above > 0
        kept = np.clip(blend, 0.0, 1.0).astype(np.float32)
        blended: npt.NDArray[np.float32] = (1 - kept) * scaled + kept * inverse
        return blended

    def _ramp(self, pairs: int) -> npt.NDArray[Any]:
        """Return yarn's ramp over the pairs, from 0 (kept) to 1 (scaled); not clipped."""
        import numpy as np

        def pair_of(turns: float) -> float:
            length = self.original_max_len / (turns * 2 * math.pi)
            return self.dim * math.log(length) / (2 * math.log(self.theta))

        low, high = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        width = high - low if high != low else 0.001
        ramp: npt.NDArray[Any] = (np.arange(pairs) - low) / width
        return ramp


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention of one layer.

    Attributes:
        q, k, v, o: the projections.
        rope: the rotary embedding of queries and keys.
        scale: multiplies the scores.
        q_norm, k_norm: applied before the rotary embedding, if any.
        norms_after_rope: they are applied after it (Hunyuan).
        sliding_window: a token sees itself and the `sliding_window - 1` tokens before it; None
            means all earlier tokens.
        chunk: the context is cut into chunks of so many tokens, and a token sees only its own
            chunk; None for no chunks. weft serves one chunk, where this is full attention.
    """

    q: LinearSpec
    k: LinearSpec
    v: LinearSpec
    o: LinearSpec
    rope: RopeSpec
    scale: float
    q_norm: NormSpec | None = None
    k_norm: NormSpec | None = None
    norms_after_rope: bool = False
    sliding_window: int | None = None
    chunk: int | None = None

    @property
    def norms_span_heads(self) -> bool:
        """True if queries and keys have norms over all heads together."""
        return self.q_norm is not None and self.q_norm.spans_heads


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """down(silu(gate(x)) * up(x))."""

    gate: LinearSpec
    up: LinearSpec
    down: LinearSpec

    def scaled(self, factor: float) -> MlpSpec:
        """Return the MLP whose result is `factor` times as large."""
        return replace(self, down=self.down.scaled(factor))


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How a token's experts are chosen and weighted.

    The scores are a softmax or sigmoid of the router's outputs. `bias` counts in the choice alone
    (Wang et al. 2024). With groups, a token first chooses `top_groups` groups of experts: by the
    sum of a group's two best scores with a bias, by its best without (DeepSeek-V3, section 2.1.2).

    Attributes:
        weight: [experts, hidden]; with `in_float32`, the outputs are computed in float32.
        top_k: experts per token.
        normalize: divide the weights of the chosen experts by their sum.
        scoring: the scores' function.
        bias: float32 [experts], added to the scores for the choice, if any.
        groups, top_groups: number of groups, and of groups per token.
        scale: multiplies the weights.
        scales_input: the weight multiplies the expert's input, and not its result (Llama 4). Only
            with one expert per token.
    """

    weight: WeightSpec
    top_k: int
    normalize: bool
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    bias: WeightSpec | None = None
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    scales_input: bool = False


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Routed experts: each token uses `top_k` of the MLPs, and all tokens use the shared one.

    Attributes:
        router: chooses the experts.
        gate, up: [experts, moe_intermediate, hidden].
        down: [experts, hidden, moe_intermediate].
        shared: an MLP whose result is added, if any. Several shared experts are one wide MLP.
        shared_gate: [1, hidden]; the sigmoid of its output multiplies the shared MLP's result.
    """

    router: RouterSpec
    gate: WeightSpec
    up: WeightSpec
    down: WeightSpec
    shared: MlpSpec | None = None
    shared_gate: WeightSpec | None = None

    @property
    def experts(self) -> int:
        """Number of experts; of a rank's, in its part."""
        return self.gate.shape[0]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """x += norm(attention(norm(x))); x += norm(feed_forward(norm(x))).

    Attributes:
        attention_norm, feed_forward_norm: of the block's input, if it has one.
        attention: the first block.
        attention_output_norm, feed_forward_output_norm: of the block's output, if it has one.
        feed_forward: the second block.
        is_parallel: both blocks read the first one's input, x += attention(norm(x)) + mlp(norm(x))
            (Wang and Komatsuzaki 2021). The first norm is then the only one, and there are no
            experts.
    """

    attention_norm: NormSpec | None
    attention: AttentionSpec
    attention_output_norm: NormSpec | None
    feed_forward_norm: NormSpec | None
    feed_forward: MlpSpec | MoeSpec
    feed_forward_output_norm: NormSpec | None
    is_parallel: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model.

    Attributes:
        architecture: name in config.json, e.g. "LlamaForCausalLM".
        dtype: the checkpoint's dtype: "float32", "bfloat16" or "float16".
        max_model_len: maximum number of tokens in a request, by the model's training.
        head_dim: one head's width; not always hidden_size / num_heads.
        lm_head: None if it shares the embedding's weight (tied).
        skipped: name patterns for tensors in a checkpoint that weft does not use.
        quantization: how the checkpoint stores matrices; None if none is quantised.
        is_first: whether this stage embeds the tokens.
        is_last: whether this stage makes the logits.
    """

    architecture: str
    dtype: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    embedding: WeightSpec
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    lm_head: WeightSpec | None
    skipped: tuple[str, ...] = ()
    quantization: Quantization | None = None
    is_first: bool = True
    is_last: bool = True

    @property
    def weights(self) -> Iterator[WeightSpec]:
        """Every weight in use, in the order of use."""
        if self.is_first or (self.is_last and self.lm_head is None):
            yield self.embedding
        for layer in self.layers:
            yield from _layer_weights(layer)
        if self.is_last:
            yield from _norm_weights(self.norm)
        if self.is_last and self.lm_head is not None:
            yield self.lm_head

    @property
    def parameters(self) -> int:
        """Parameter count; a tied embedding counts once."""
        return sum(weight.size for weight in self.weights)

    def for_context(self, max_len: int) -> ModelSpec:
        """Return the model for requests with up to `max_len` tokens; see `RopeSpec.max_len`."""
        if all(layer.attention.rope.scaling != "longrope" for layer in self.layers):
            return self

        def limited(layer: LayerSpec) -> LayerSpec:
            rope = replace(layer.attention.rope, max_len=max_len)
            return replace(layer, attention=replace(layer.attention, rope=rope))

        return replace(self, layers=tuple(map(limited, self.layers)))

    def compute_dtype(self, requested: str) -> str:
        """Resolve "auto" to the checkpoint's dtype; bfloat16 replaces float16."""
        dtype = self.dtype if requested == "auto" else requested
        return "bfloat16" if dtype in ("float16", "half") else dtype

    def products(self) -> set[WeightSpec]:
        """Return the weights of all products in layers, but not of routers and gates."""
        return {weight for layer in self.layers for weight in _products(layer)}

    def weight_bytes(
        self, dtype: str = "auto", quantization: str = "none", *, packed: Packed = None
    ) -> int:
        """Return how many bytes all weights take.

        Args:
            dtype: the weights' type; "auto" as in `compute_dtype`.
            quantization: "none", or how the matrices are rounded when loading; see ROUNDED.
            packed: "gpu": only the products in layers are quantised: as a quantised checkpoint
                stores them, or else rounded, with float32 scales. "cpu": products in layers stay
                as the checkpoint stores them if compiled kernels have that form.
        """
        item = DTYPE_BYTES[self.compute_dtype(dtype)]
        kept = set() if quantization == "none" else self._unquantized()
        if packed == "gpu":
            kept = set(self.weights) - self.products()
        size = 0
        for weight in self.weights:
            each = 4 if weight.in_float32 else item
            if packed == "gpu" and weight not in kept:
                size += weight.packed_bytes(weight.shape, each, quantization)
            elif packed == "cpu" and (native := weight.native_bytes(weight.shape)) is not None:
                size += native
            elif quantization == "none" or len(weight.shape) == 1 or weight in kept:
                size += weight.size * each
            else:
                width = weight.shape[-1]
                size += weight.size // width * ROUNDED[quantization].row_bytes(width, each)
        return size

    def _unquantized(self) -> set[WeightSpec]:
        """Return the matrices that keep the compute dtype."""
        kept = set()
        for layer in self.layers:
            norms = layer.attention.q_norm, layer.attention.k_norm  # of each head: matrices
            kept |= {norm.weight for norm in norms if norm is not None}
            if isinstance(moe := layer.feed_forward, MoeSpec):
                kept |= {moe.router.weight} | ({moe.shared_gate} if moe.shared_gate else set())
        if self.lm_head is not None or not self.is_last:
            kept.add(self.embedding)
        return kept

    def kv_bytes_per_token(self, dtype: str = "auto") -> int:
        """Return how many bytes one token's keys and values take over all layers.

        Args:
            dtype: the KV cache's: `FP8_CACHE`, or as in `compute_dtype`.
        """
        numbers = 2 * len(self.layers) * self.num_kv_heads * self.head_dim
        return numbers * (1 if dtype == FP8_CACHE else DTYPE_BYTES[self.compute_dtype(dtype)])


def _products(layer: LayerSpec) -> Iterator[WeightSpec]:
    """Yield the weights of a layer's products, but not of routers and gates."""
    attention, block = layer.attention, layer.feed_forward
    yield from (each.weight for each in (attention.q, attention.k, attention.v, attention.o))
    if isinstance(block, MoeSpec):
        yield from (block.gate, block.up, block.down)
    mlp = block.shared if isinstance(block, MoeSpec) else block
    if mlp is not None:
        yield from (each.weight for each in (mlp.gate, mlp.up, mlp.down))


def with_stored(layer: LayerSpec, quantization: Quantization) -> LayerSpec:
    """Return a layer whose products' weights say how the checkpoint quantises them."""

    def weight(each: WeightSpec) -> WeightSpec:
        name = each.known_places[0].tensor(0)
        return replace(each, stored=quantization.of(name.removesuffix(".weight")))

    def linear(each: LinearSpec) -> LinearSpec:
        return replace(each, weight=weight(each.weight))

    def mlp(each: MlpSpec) -> MlpSpec:
        gate, up, down = map(linear, (each.gate, each.up, each.down))
        return replace(each, gate=gate, up=up, down=down)

    attention, block = layer.attention, layer.feed_forward
    q, k, v, o = map(linear, (attention.q, attention.k, attention.v, attention.o))
    if isinstance(block, MoeSpec):
        gate, up, down = map(weight, (block.gate, block.up, block.down))
        shared = None if block.shared is None else mlp(block.shared)
        block = replace(block, gate=gate, up=up, down=down, shared=shared)
    else:
        block = mlp(block)
    attention = replace(attention, q=q, k=k, v=v, o=o)
    return replace(layer, attention=attention, feed_forward=block)


def _layer_weights(layer: LayerSpec) -> Iterator[WeightSpec]:
    attention, feed_forward = layer.attention, layer.feed_forward
    yield from _norm_weights(layer.attention_norm)
    for linear in (attention.q, attention.k, attention.v, attention.o):
        yield from _linear_weights(linear)
    yield from _norm_weights(attention.q_norm, attention.k_norm, layer.attention_output_norm)
    yield from _norm_weights(layer.feed_forward_norm)
    if isinstance(feed_forward, MlpSpec):
        yield from _mlp_weights(feed_forward)
    else:
        yield from _moe_weights(feed_forward)
    yield from _norm_weights(layer.feed_forward_output_norm)


def _norm_weights(*norms: NormSpec | None) -> Iterator[WeightSpec]:
    for norm in norms:
        if norm is not None and not norm.weight.is_ones:
            yield norm.weight
            if norm.bias is not None:
                yield norm.bias


def _moe_weights(feed_forward: MoeSpec) -> Iterator[WeightSpec]:
    router = feed_forward.router
    yield router.weight
    if router.bias is not None:
        yield router.bias
    yield from (feed_forward.gate, feed_forward.up, feed_forward.down)
    if feed_forward.shared is not None:
        yield from _mlp_weights(feed_forward.shared)
    if feed_forward.shared_gate is not None:
        yield feed_forward.shared_gate


def _mlp_weights(mlp: MlpSpec) -> Iterator[WeightSpec]:
    for linear in (mlp.gate, mlp.up, mlp.down):
        yield from _linear_weights(linear)


def _linear_weights(linear: LinearSpec) -> Iterator[WeightSpec]:
    yield linear.weight
    if linear.bias is not None:
        yield linear.bias
