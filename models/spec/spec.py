"""ModelSpec: the one description of a model that every backend, the loader and the planner read.

`families.py` makes a ModelSpec from a checkpoint's config.json. The spec lists the weights, their
names in the checkpoint, and each dimension's logical axis. A parallel layout can therefore map
axes to ranks without knowing any names.

All described models are decoders with RMSNorm before attention and before the feed-forward, rotary
positions (halves convention), and SiLU-gated MLPs or routed experts. Not described: encoders, cross
attention, ALiBi, latent attention, shared experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from weft.models.spec.quantization import Quantization

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
class TensorBlock:
    """A block in a checkpoint's tensor: the whole tensor, or one of several fused weights.

    Attributes:
        name: the tensor's name.
        shape: the whole tensor's shape.
        start: the block's first index on each axis.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One weight.

    Attributes:
        name: name in the checkpoint. With `{expert}` in it, the checkpoint holds one tensor of
            shape[1:] for each expert number.
        shape: the whole weight's shape; matrices are [out, in].
        axes: the logical axis for each dimension.
        alternative: the weight's place in checkpoints without a tensor `name`, if it has one.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[Axis, ...]
    alternative: TensorBlock | None = None

    @property
    def is_per_expert(self) -> bool:
        """True if the checkpoint holds one tensor per expert."""
        return "{expert}" in self.name

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The checkpoint's names for the tensors in this weight, in order."""
        if not self.is_per_expert:
            return (self.name,)
        return tuple(self.name.format(expert=expert) for expert in range(self.shape[0]))

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """One such tensor's shape."""
        return self.shape[1:] if self.is_per_expert else self.shape

    @property
    def size(self) -> int:
        """Element count."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """y = x @ weight.T + bias."""

    weight: WeightSpec
    bias: WeightSpec | None = None


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention of one layer.

    Attributes:
        q, k, v, o: the projections.
        q_norm, k_norm: RMSNorm of each head before the rotary embedding, if any.
        sliding_window: a token sees itself and the `sliding_window - 1` tokens before it; None
            means all earlier tokens.
    """

    q: LinearSpec
    k: LinearSpec
    v: LinearSpec
    o: LinearSpec
    q_norm: WeightSpec | None = None
    k_norm: WeightSpec | None = None
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """down(silu(gate(x)) * up(x))."""

    gate: LinearSpec
    up: LinearSpec
    down: LinearSpec


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Routed experts: each token uses its `top_k` most probable MLPs, weighted by probability.

    Attributes:
        router: [experts, hidden]; the softmax of its output is the probability.
        gate, up: [experts, moe_intermediate, hidden].
        down: [experts, hidden, moe_intermediate].
        top_k: experts per token.
        normalize: divide the weights of the chosen experts by their sum.
    """

    router: WeightSpec
    gate: WeightSpec
    up: WeightSpec
    down: WeightSpec
    top_k: int
    normalize: bool


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """x += attention(norm(x)); x += feed_forward(norm(x))."""

    attention_norm: WeightSpec
    attention: AttentionSpec
    feed_forward_norm: WeightSpec
    feed_forward: MlpSpec | MoeSpec


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary positions (Su et al. 2021), with the checkpoint's context scaling.

    Attributes:
        theta: the wavelengths' base.
        scaling: "none"; "linear": all positions divided by `factor`; "llama3": long wavelengths
            divided by `factor`, short ones kept, blended between (Llama 3.1 model card).
        factor, low_freq_factor, high_freq_factor, original_max_len: the scaling's parameters.
    """

    theta: float
    scaling: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_len: int = 0

    def inverse_frequencies(self, head_dim: int) -> npt.NDArray[np.float32]:
        """Return the radians per position for each pair of dimensions, [head_dim / 2]."""
        import numpy as np  # here, because the process that starts the engine needs no NumPy

        exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        inverse: npt.NDArray[np.float32] = np.float32(1) / np.float32(self.theta) ** exponent
        if self.scaling == "none":
            return inverse
        scaled: npt.NDArray[np.float32] = inverse / np.float32(self.factor)
        if self.scaling == "linear":
            return scaled
        turns = self.original_max_len * inverse / np.float32(2 * np.pi)
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = np.clip(blend, 0.0, 1.0).astype(np.float32)
        blended: npt.NDArray[np.float32] = (1 - blend) * scaled + blend * inverse
        return blended


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model.

    Attributes:
        architecture: name in config.json, e.g. "LlamaForCausalLM".
        dtype: the checkpoint's dtype: "float32", "bfloat16" or "float16".
        max_model_len: maximum number of tokens in a request, by the model's training.
        head_dim: one head's width; not always hidden_size / num_heads.
        norm_eps: added to the mean square in every RMSNorm.
        lm_head: None if it shares the embedding's weight (tied).
        skipped: name patterns for tensors in a checkpoint that weft does not use.
        quantization: how the checkpoint stores matrices; None if none is quantised. The loader
            converts them, so that all sizes here are without quantisation.
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
    norm_eps: float
    rope: RopeSpec
    embedding: WeightSpec
    layers: tuple[LayerSpec, ...]
    norm: WeightSpec
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
            yield self.norm
        if self.is_last and self.lm_head is not None:
            yield self.lm_head

    @property
    def parameters(self) -> int:
        """Parameter count; a tied embedding counts once."""
        return sum(weight.size for weight in self.weights)

    def compute_dtype(self, requested: str) -> str:
        """Resolve "auto" to the checkpoint's dtype; bfloat16 replaces float16."""
        dtype = self.dtype if requested == "auto" else requested
        return "bfloat16" if dtype in ("float16", "half") else dtype

    def weight_bytes(self, dtype: str = "auto", quantization: str = "none") -> int:
        """Return how many bytes all weights take.

        Args:
            dtype: the weights' type; "auto" as in `compute_dtype`.
            quantization: "int8" stores matrices in int8 with one scale per row, in `dtype`.
        """
        item = DTYPE_BYTES[self.compute_dtype(dtype)]
        if quantization == "none":
            return self.parameters * item
        blocks = (layer.feed_forward for layer in self.layers)
        kept = {block.router for block in blocks if isinstance(block, MoeSpec)}
        if self.lm_head is not None or not self.is_last:
            kept.add(self.embedding)
        return sum(
            weight.size * item
            if len(weight.shape) == 1 or weight in kept
            else weight.size + weight.size // weight.shape[-1] * item
            for weight in self.weights
        )

    def kv_bytes_per_token(self, dtype: str = "auto") -> int:
        """Return how many bytes one token's keys and values take over all layers."""
        numbers = 2 * len(self.layers) * self.num_kv_heads * self.head_dim
        return numbers * DTYPE_BYTES[self.compute_dtype(dtype)]


def _layer_weights(layer: LayerSpec) -> Iterator[WeightSpec]:
    attention, feed_forward = layer.attention, layer.feed_forward
    yield layer.attention_norm
    for linear in (attention.q, attention.k, attention.v, attention.o):
        yield from _linear_weights(linear)
    for norm in (attention.q_norm, attention.k_norm):
        if norm is not None:
            yield norm
    yield layer.feed_forward_norm
    if isinstance(feed_forward, MoeSpec):
        yield from (feed_forward.router, feed_forward.gate, feed_forward.up, feed_forward.down)
    else:
        for linear in (feed_forward.gate, feed_forward.up, feed_forward.down):
            yield from _linear_weights(linear)


def _linear_weights(linear: LinearSpec) -> Iterator[WeightSpec]:
    yield linear.weight
    if linear.bias is not None:
        yield linear.bias
