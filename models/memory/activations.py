"""What the temporary tensors of a model's largest step take, from their shapes.

The residual stream and its norm live all along; attention, the feed-forward and the sampler come
one after the other, so that the largest of them counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from weft.models.spec.spec import DTYPE_BYTES, MlpSpec, ModelSpec

XLA_SAMPLER_BYTES, XLA_SAMPLER_BYTES_OF_NUMBER = 8 << 20, 24
"""Temporaries of sampling, at all and for each logit: by libtpu's count for a v5e, 13 to 24 bytes
for each of 250,000 to 33 million logits, and 4 MB for less than that."""


@dataclass(frozen=True, slots=True)
class Step:
    """The largest step of an engine.

    Attributes:
        max_num_seqs: requests.
        max_num_batched_tokens: most tokens.
        max_model_len: most tokens of a request.
        copies: of attention, each of which may have such a step; experts have the tokens of all.
        cp: ranks that share each KV head, by position: a rank attends with as many times the
            heads, to a part of the keys.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    copies: int = 1
    cp: int = 1

    @property
    def tokens(self) -> int:
        """That there can be."""
        return min(self.max_num_batched_tokens, self.max_num_seqs * self.max_model_len)

    @property
    def requests(self) -> int:
        """With a token each."""
        return min(self.max_num_seqs, self.tokens)


class ActivationBytes(Protocol):
    """Counts a step's bytes: of a rank's part of a model, in a dtype of it."""

    def __call__(self, spec: ModelSpec, dtype: str, step: Step) -> int: ...


def cpu_activations(spec: ModelSpec, dtype: str, step: Step) -> int:
    """Of the kernels for CPUs."""
    return _stream(spec, dtype, step) + max(
        _cpu_blocks(spec, dtype, step), _sampler(spec, dtype, step, "cpu")
    )


def jax_activations(spec: ModelSpec, dtype: str, step: Step, *, tp: int) -> int:
    """Of what XLA makes of a model on `tp` devices: blocks as on CPUs; and sampling, of which each
    device has its words of all rows at once (models/jax/draw.py).
    """
    words = padded_numbers(step.requests, -(-spec.vocab_size // tp))
    logits = words * DTYPE_BYTES[spec.compute_dtype(dtype)]
    sampler = XLA_SAMPLER_BYTES + words * XLA_SAMPLER_BYTES_OF_NUMBER
    return logits + max(
        _stream(spec, dtype, step) + _cpu_blocks(spec, dtype, step),
        sampler,
    )


def padded_numbers(rows: int, columns: int) -> int:
    """What a TPU keeps for a matrix of 32-bit numbers: whole tiles, of 8 rows and 128 lanes."""
    return -(-rows // 8) * 8 * (-(-columns // 128) * 128)


def _cpu_blocks(spec: ModelSpec, dtype: str, step: Step) -> int:
    """The larger of attention and the feed-forward."""
    # torch is not needed to read this module, only here.
    from weft.kernels.cpu.attention import BY_HEAD_SCORES, MAX_TILE_NUMBERS

    item, tokens = DTYPE_BYTES[spec.compute_dtype(dtype)], step.tokens
    heads, keys = spec.num_heads * step.cp, -(-step.max_model_len // step.cp)
    q, kv = heads * spec.head_dim, spec.num_kv_heads * spec.head_dim

    scores = max(MAX_TILE_NUMBERS, spec.num_kv_heads * BY_HEAD_SCORES)
    scores = min(max(scores, q // kv * keys), tokens * heads * keys)
    gathered = max(min(MAX_TILE_NUMBERS, step.max_num_seqs * keys * kv), keys * kv)
    attention = tokens * (4 * q + 4 * kv) * item  # projection, rotated, result
    attention += scores * (4 + 4 + item)  # scores, softmax, in the type of the values
    attention += gathered * (item + 4 + item)  # keys, in float32, values
    if step.cp > 1:  # all heads' results in float32, as they are sent, and as they come
        attention += tokens * 4 * (q + heads) * 4

    feed_forward = 0
    for layer in spec.layers:
        mlp = layer.feed_forward
        if isinstance(mlp, MlpSpec):
            size = tokens * 3 * mlp.gate.weight.shape[0] * item  # gate and up, their product
        else:  # inputs and results in expert order, float32 sum, one expert with all tokens
            rows = step.copies * tokens
            size = rows * (2 * mlp.top_k * spec.hidden_size + 3 * mlp.gate.shape[1]) * item
            size += rows * spec.hidden_size * 4
            if step.copies > 1:  # what comes from the other ranks, what goes back
                size += rows * 4 * spec.hidden_size * item
        feed_forward = max(feed_forward, size)
    return max(attention, feed_forward)


def triton_activations(spec: ModelSpec, dtype: str, step: Step, *, sampled: bool = True) -> int:
    """Of Triton kernels, which keep scores in registers; without the sampler's, unless `sampled`.

    Not counted are the parts of decodes whose keys are split, a few MiB: the fewer requests there
    are, the more are their parts.
    """
    item, tokens = DTYPE_BYTES[spec.compute_dtype(dtype)], step.tokens
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention = tokens * (3 * q + 2 * kv) * item  # projection, rotated, result
    if step.cp > 1:
        # All heads' queries, twice; results, in float32, as they are sent, and as they come.
        attention += tokens * step.cp * q * (3 * item + 4 * 4)

    feed_forward = 0
    for layer in spec.layers:
        mlp = layer.feed_forward
        if isinstance(mlp, MlpSpec):
            size = tokens * mlp.gate.weight.shape[0] * item
        else:  # rows in expert order, their results; both in float32, weighted
            rows = step.copies * tokens * mlp.top_k
            size = rows * (2 * spec.hidden_size + mlp.gate.shape[1]) * item
            size += rows * 2 * spec.hidden_size * 4
        feed_forward = max(feed_forward, size)
    end = _sampler(spec, dtype, step, "cuda") if sampled else _logits(spec, dtype, step)
    return _stream(spec, dtype, step) + max(attention, feed_forward, end)


def _stream(spec: ModelSpec, dtype: str, step: Step) -> int:
    """The residual stream, and what a block makes of it."""
    return step.tokens * 3 * spec.hidden_size * DTYPE_BYTES[spec.compute_dtype(dtype)]


def _sampler(spec: ModelSpec, dtype: str, step: Step, device: str) -> int:
    """Logits, and those whose log probabilities are wanted; the rest is done in chunks of rows."""
    from weft.models.torch.sampler import CHUNK_NUMBERS

    if not spec.is_last:
        return 0
    chunk = min(CHUNK_NUMBERS[device], step.requests * spec.vocab_size)
    return 2 * _logits(spec, dtype, step) + 4 * 7 * max(chunk, spec.vocab_size)


def _logits(spec: ModelSpec, dtype: str, step: Step) -> int:
    """Of the last stage."""
    numbers = step.requests * spec.vocab_size if spec.is_last else 0
    return numbers * DTYPE_BYTES[spec.compute_dtype(dtype)]
