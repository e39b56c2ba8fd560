"""What a model is: the one description that every backend, the loader and the planner read.

`families.py` makes a ModelSpec from a checkpoint's config.json. It says which
weights there are, what they are called in the checkpoint and which logical
axis each of their dimensions is, so that a parallel layout is a map from axes
to ranks and nothing else has to know about names.

All models described are decoders with RMSNorm before attention and before the
feed-forward, rotary positions (halves convention), SiLU-gated MLPs or routed
experts. Not described: encoders, cross attention, ALiBi, latent attention,
shared experts, quantised weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Axis = Literal[
    "vocab",  # tokens
    "hidden",  # the residual stream
    "q_heads",  # query heads x head_dim; may be cut between heads only
    "kv_heads",  # key/value heads x head_dim; may be cut between heads only
    "head_dim",  # inside one head; never cut
    "intermediate",  # width of a dense MLP
    "choice",  # what a router chooses among: each rank looks at all experts
    "expert",  # experts of a layer
    "moe_intermediate",  # width of one expert
]
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One weight.

    Attributes:
        name: in the checkpoint. `{expert}` in it stands for each expert's number: the checkpoint
            then holds one tensor of shape[1:] per expert.
        shape: of the whole weight; matrices are [out, in].
        axes: what each dimension is.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[Axis, ...]

    @property
    def is_per_expert(self) -> bool:
        """Whether the checkpoint holds one tensor per expert."""
        return "{expert}" in self.name

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of the tensors in the checkpoint that make up this weight, in order."""
        if not self.is_per_expert:
            return (self.name,)
        return tuple(self.name.format(expert=expert) for expert in range(self.shape[0]))

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of each of those tensors."""
        return self.shape[1:] if self.is_per_expert else self.shape

    @property
    def tensor_size(self) -> int:
        """Number of elements of each of those tensors."""
        return math.prod(self.tensor_shape)

    @property
    def size(self) -> int:
        """Number of elements."""
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
        q_norm, k_norm: RMSNorm of each head before the rotary embedding, if there is one.
        sliding_window: a token sees itself and the `sliding_window - 1` tokens before it; None
            means all.
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
    """The `top_k` most probable experts of each token, each an MLP, weighted by probability.

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
    """Rotary positions: Su et al. 2021, with the scaling of the context that a checkpoint asks for.

    Attributes:
        theta: base of the wavelengths.
        scaling: "none"; "linear": all positions divided by `factor`; "llama3": long wavelengths
            divided by `factor`, short ones kept, blended between (Llama 3.1 model card).
        factor, low_freq_factor, high_freq_factor, original_max_len: of the scaling.
    """

    theta: float
    scaling: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_len: int = 0

    def inverse_frequencies(self, head_dim: int) -> npt.NDArray[np.float32]:
        """Radians per position of each pair of dimensions, [head_dim / 2]."""
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
        architecture: as config.json names it, e.g. "LlamaForCausalLM".
        dtype: the checkpoint's: "float32", "bfloat16" or "float16".
        max_model_len: most tokens of one request that the model was made for.
        head_dim: width of one head; not always hidden_size / num_heads.
        norm_eps: added to the mean square in every RMSNorm.
        lm_head: None when the embedding is used for it (tied).
        is_first: whether tokens are looked up here; not so in a stage that has later layers only.
        is_last: whether logits are made here.
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
    is_first: bool = True
    is_last: bool = True

    @property
    def weights(self) -> Iterator[WeightSpec]:
        """Every weight that is used, in the order of use."""
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
        """Number of parameters; a tied embedding counts once."""
        return sum(weight.size for weight in self.weights)

    def compute_dtype(self, requested: str) -> str:
        """The dtype to compute in: "auto" is the checkpoint's, with bfloat16 for float16."""
        if requested != "auto":
            return requested
        return "bfloat16" if self.dtype == "float16" else self.dtype

    def weight_bytes(self, dtype: str = "auto", quantization: str = "none") -> int:
        """Bytes of all weights in `dtype`, or with the matrices in "int8" and a scale per row."""
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
        """Bytes of keys and values that one token takes in the cache, over all layers."""
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
