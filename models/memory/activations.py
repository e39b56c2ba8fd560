"""Bytes for the temporary tensors in a model's largest step, from their shapes.

The residual stream and its norm live for the whole step. Attention, the feed-forward and the
sampler run in turn, so only the largest of them counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from weft.kernels.cpu.tile_limits import BY_HEAD_SCORES, MAX_TILE_ELEMENTS
from weft.models.spec.spec import DTYPE_BYTES, MlpSpec, ModelSpec, MoeSpec

CHUNK_LOGITS = {"cpu": 1 << 19, "cuda": 1 << 23, "meta": 1 << 23}
"""Logits processed at once, by device type: on a CPU, as many as fit its cache; on a GPU, 55 rows
of 151,936, which are copied to float32 if they are edited or scored.
"""

XLA_SAMPLER_BYTES, XLA_SAMPLER_BYTES_PER_LOGIT = 8 << 20, 24
"""Temporaries of sampling: a constant, and bytes for each logit. libtpu reports 13 to 24 bytes per
logit on a v5e for 250,000 to 33 million logits, and 4 MB below that.
"""


@dataclass(frozen=True, slots=True)
class LargestStep:
    """An engine's largest step.

    Attributes:
        max_num_seqs: maximum number of requests.
        max_num_batched_tokens: maximum number of tokens.
        max_model_len: maximum number of tokens in a request.
        dp_size: data-parallel attention groups. Each group may have such a step; the experts get
            the tokens of all groups.
        cp: ranks that share each KV head by position. A rank then computes cp times its heads, over
            a part of the keys.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    dp_size: int = 1
    cp: int = 1

    @property
    def tokens(self) -> int:
        """Maximum number of tokens."""
        return min(self.max_num_batched_tokens, self.max_num_seqs * self.max_model_len)

    @property
    def requests(self) -> int:
        """Maximum number of requests, with one token each."""
        return min(self.max_num_seqs, self.tokens)


class ActivationBytes(Protocol):
    """Counts a step's bytes, for a rank's part of a model."""

    def __call__(self, spec: ModelSpec, dtype: str, step: LargestStep) -> int: ...


def cpu_activations(spec: ModelSpec, dtype: str, step: LargestStep) -> int:
    """Count the bytes for the CPU kernels."""
    return _residual_bytes(spec, dtype, step) + max(
        _cpu_block_bytes(spec, dtype, step), _sampler_bytes(spec, dtype, step, "cpu")
    )


def jax_activations(spec: ModelSpec, dtype: str, step: LargestStep, *, tp: int) -> int:
    """Count the bytes for XLA on `tp` devices.

    Blocks are as on CPUs. For sampling, each device holds its tokens of all rows at once
    (models/jax/draw.py).
    """
    words = padded_numbers(step.requests, -(-spec.vocab_size // tp))
    logits = words * DTYPE_BYTES[spec.compute_dtype(dtype)]
    sampler = XLA_SAMPLER_BYTES + words * XLA_SAMPLER_BYTES_PER_LOGIT
    return logits + max(
        _residual_bytes(spec, dtype, step) + _cpu_block_bytes(spec, dtype, step),
        sampler,
    )


def padded_numbers(rows: int, columns: int) -> int:
    """Return the elements of a TPU's 32-bit matrix, padded to tiles of 8 rows and 128 lanes."""
    return -(-rows // 8) * 8 * (-(-columns // 128) * 128)


def sampler_state_bytes(spec: ModelSpec, max_num_seqs: int, tp: int) -> int:
    """Return the bytes that the sampler's state takes on one device (models/jax/sampler.py)."""
    return 2 * 4 * padded_numbers(max_num_seqs, -(-spec.vocab_size // tp))


def _cpu_block_bytes(spec: ModelSpec, dtype: str, step: LargestStep) -> int:
    """Return the larger of attention and the feed-forward."""
    item, tokens = DTYPE_BYTES[spec.compute_dtype(dtype)], step.tokens
    heads, keys = spec.num_heads * step.cp, -(-step.max_model_len // step.cp)
    q, kv = heads * spec.head_dim, spec.num_kv_heads * spec.head_dim

    scores = max(MAX_TILE_ELEMENTS, spec.num_kv_heads * BY_HEAD_SCORES)
    scores = min(max(scores, q // kv * keys), tokens * heads * keys)
    gathered = max(min(MAX_TILE_ELEMENTS, step.max_num_seqs * keys * kv), keys * kv)
    attention = tokens * (4 * q + 4 * kv) * item  # projection, rotated, result
    if _has_wide_norms(spec) or _has_norms_by_head(spec):
        # In float32 twice, and the projection again.
        attention += tokens * (q + kv) * (4 + 4 + 2 * item)
    attention += scores * (4 + 4 + item)  # scores, softmax, in the type of the values
    attention += gathered * (item + 4 + item)  # keys, in float32, values
    if step.cp > 1:  # all heads' results in float32, sent and received
        attention += tokens * 4 * (q + heads) * 4

    feed_forward = 0
    for layer in spec.layers:
        mlp = layer.feed_forward
        if isinstance(mlp, MlpSpec):
            size = tokens * 3 * mlp.gate.weight.shape[0] * item  # gate and up, their product
        else:  # inputs and results in expert order, float32 sum, one expert with all tokens
            rows = step.dp_size * tokens
            top_k = mlp.router.top_k
            size = rows * (2 * top_k * spec.hidden_size + 3 * mlp.gate.shape[1]) * item
            size += rows * spec.hidden_size * 4
            if mlp.router.weight.in_float32:  # the norm, and in float32
                size += rows * spec.hidden_size * (item + 4)
            if mlp.router.scales_input:  # the norm, and scaled
                size += rows * spec.hidden_size * 2 * item
            size = max(size, tokens * 3 * _shared_width(mlp) * item) + _shared_out(mlp, spec, step)
            if step.dp_size > 1:  # tokens from the other ranks, and results for them
                size += rows * 4 * spec.hidden_size * item
        feed_forward = max(feed_forward, size)
    return max(attention, feed_forward)


def triton_activations(
    spec: ModelSpec, dtype: str, step: LargestStep, *, sampled: bool = True
) -> int:
    """Count the bytes for Triton kernels, which keep scores in registers.

    Not counted: the partial results of decodes whose keys are split. They take a few MiB, because
    fewer requests have more parts.

    Args:
        spec, dtype, step: as in `ActivationBytes`.
        sampled: include the sampler's temporaries; otherwise only the logits count.
    """
    item, tokens = DTYPE_BYTES[spec.compute_dtype(dtype)], step.tokens
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention = tokens * (3 * q + 2 * kv) * item  # projection, rotated, result
    if _has_wide_norms(spec):  # mean squares of queries and keys, own ones and over all ranks
        attention += tokens * 2 * 2 * 4
    if step.cp > 1:
        # All heads' queries, twice; results in float32, sent and received.
        attention += tokens * step.cp * q * (3 * item + 4 * 4)

    feed_forward = 0
    for layer in spec.layers:
        mlp = layer.feed_forward
        if isinstance(mlp, MlpSpec):
            size = tokens * 3 * mlp.gate.weight.shape[0] * item  # gate and up, their product
        else:  # gate and up's product, results in expert order; received rows, if dispatched
            rows = step.dp_size * tokens * mlp.router.top_k
            size = rows * (2 * spec.hidden_size + mlp.gate.shape[1]) * item
            if mlp.router.weight.in_float32:
                size += tokens * spec.hidden_size * 4
            if mlp.router.scales_input:
                size += step.dp_size * tokens * spec.hidden_size * item
            size = max(size, tokens * 3 * _shared_width(mlp) * item) + _shared_out(mlp, spec, step)
        feed_forward = max(feed_forward, size)
    end = _sampler_bytes(spec, dtype, step, "cuda") if sampled else _logits_bytes(spec, dtype, step)
    # The embeddings, the stream and the last result, their sum, its norm; then cos and sin.
    ropes = len({layer.attention.rope for layer in spec.layers})
    stream = tokens * (5 * spec.hidden_size + 2 * ropes * spec.head_dim) * item
    return stream + max(attention, feed_forward, end)


def _has_wide_norms(spec: ModelSpec) -> bool:
    """Return whether a layer has norms over all heads."""
    return any(layer.attention.norms_span_heads for layer in spec.layers)


def _has_norms_by_head(spec: ModelSpec) -> bool:
    """Return whether a layer has norms of queries with weights for each head."""
    norms = (layer.attention.q_norm for layer in spec.layers)
    return any(norm is not None and norm.is_by_head for norm in norms)


def _shared_width(moe: MoeSpec) -> int:
    """Return the shared MLP's width; 0 without one."""
    return 0 if moe.shared is None else moe.shared.gate.weight.shape[0]


def _shared_out(moe: MoeSpec, spec: ModelSpec, step: LargestStep) -> int:
    """Return the bytes for the shared MLP's result, twice: as it is, and added or gated."""
    return 2 * step.tokens * spec.hidden_size * 4 if moe.shared is not None else 0


def _residual_bytes(spec: ModelSpec, dtype: str, step: LargestStep) -> int:
    """Return the bytes for the residual stream and one block's output."""
    return step.tokens * 3 * spec.hidden_size * DTYPE_BYTES[spec.compute_dtype(dtype)]


def _sampler_bytes(spec: ModelSpec, dtype: str, step: LargestStep, device: str) -> int:
    """Return the bytes for the logits (twice, for log probabilities) and one chunk in sampling."""
    if not spec.is_last:
        return 0
    chunk = min(CHUNK_LOGITS[device], step.requests * spec.vocab_size)
    return 2 * _logits_bytes(spec, dtype, step) + 4 * 7 * max(chunk, spec.vocab_size)


def _logits_bytes(spec: ModelSpec, dtype: str, step: LargestStep) -> int:
    """Return the bytes for the logits; only the last stage has some."""
    numbers = step.requests * spec.vocab_size if spec.is_last else 0
    return numbers * DTYPE_BYTES[spec.compute_dtype(dtype)]
