"""Logits to tokens on the devices, for a whole batch at once; see models/torch/sampler.py.

For each row, penalties change the logits, then logit bias, then the suppression of end tokens, then
the grammar's mask. Finally draw.py shapes the distribution and draws from it. Operations that no
row needs are skipped on the devices (`lax.cond`), so one compiled function serves every mixture of
settings.

Between steps, the devices keep each slot's newest token, and the data for penalties and biases: one
number per token of the vocabulary, cut over the mesh. The host keeps the settings.

`sample` is one program over the whole mesh, split by XLA's partitioner. Devices exchange only
maxima and sums of a row. It is traced with 64-bit types, for draw.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from weft.models.interface import FINITE, NOT_FINITE, Float32, Int32, SlotSampling, StepInput
from weft.models.jax.draw import ONE, Shaping, digits_of, draw, number_of, uniform

MAX_TOP = 20
"""Maximum number of alternatives in a token's log probabilities."""

# Flags for what a row needs, in `Rows.integers[2]`.
EDITED, NO_END, RANDOM, SCORED, MASKED = 1, 2, 4, 8, 16

# A slot's history has these bits for each token; the bits above count how often it was sampled.
IN_PROMPT, IS_END, ONCE = 1, 2, 4

MASKS = 8
"""Number of masks that are sent to the devices at once."""

SMALLEST = float(np.finfo(np.float32).tiny)


class State(NamedTuple):
    """State on the devices, by slot.

    Attributes:
        newest: int32 [slots]; the last sampled token.
        history: int32 [slots, V]; see IN_PROMPT.
        bias: float32 [slots, V]; added to logits.
        mask: int32 [slots, ceil(V / 32)]; allowed tokens, see `StepInput.token_mask`; replicated.
    """

    newest: jax.Array
    history: jax.Array
    bias: jax.Array
    mask: jax.Array


class Rows(NamedTuple):
    """Settings of S rows.

    Attributes:
        integers: int32 [7, S]: slot, or the number of slots for padding; top-k; flags; the tail
            that top-p cuts off, and u, in two digits each (draw.py).
        floats: float32 [5, S]: temperature, log2 of min-p, the three penalties.
    """

    integers: Any
    floats: Any


class Scores(NamedTuple):
    """Log probabilities for N tokens: chosen, rank int32 [N], and the likeliest [N, MAX_TOP]."""

    chosen: jax.Array
    rank: jax.Array
    top_ids: jax.Array
    top: jax.Array


class Sampled(NamedTuple):
    """int32 [S] twice, see StepOutput; scores are zeros if no row asked."""

    token_ids: jax.Array
    status: jax.Array
    scores: Scores


def sample(logits: jax.Array, rows: Rows, state: State) -> tuple[Sampled, State]:
    """Sample one token for each row, [S, V] in any float dtype; columns beyond the vocabulary are
    -inf.
    """
    slot, top_k, flags, *shares = rows.integers
    tail, u = (number_of(shares[i], shares[i + 1]) for i in (0, 2))
    temperature, min_log_weight, repetition, presence, frequency = rows.floats

    def has_flag(flag: int) -> jax.Array:
        return (flags & flag) != 0

    plain = logits.astype(jnp.float32)
    finite = jnp.isfinite(plain.max(axis=1))
    safe = jnp.where(finite[:, None], plain, 0.0)
    history = state.history.at[slot].get(mode="fill", fill_value=0)

    def edit() -> jax.Array:
        count = history // ONCE
        penalty = jnp.maximum(repetition, SMALLEST)[:, None]
        repeated = jnp.where(safe > 0, safe / penalty, safe * penalty)
        repeated = jnp.minimum(repeated, jnp.finfo(jnp.float32).max)
        seen = (count > 0) | ((history & IN_PROMPT) != 0)
        edited = jnp.where(seen, repeated, safe)
        edited -= jnp.where(count > 0, presence[:, None], 0.0)
        edited -= frequency[:, None] * count
        edited += state.bias.at[slot].get(mode="fill", fill_value=0.0)
        suppressed = has_flag(NO_END)[:, None] & ((history & IS_END) != 0)
        edited = jnp.where(suppressed, -jnp.inf, edited)
        return jnp.where(has_flag(EDITED)[:, None], edited, safe)

    def mask(logits: jax.Array) -> jax.Array:
        words = state.mask.at[slot].get(mode="fill", fill_value=-1)
        bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
        allowed = bits.reshape(len(slot), -1)[:, : logits.shape[1]] != 0
        return jnp.where(allowed | ~has_flag(MASKED)[:, None], logits, -jnp.inf)

    final_logits = lax.cond(has_flag(EDITED).any(), edit, lambda: safe)
    final_logits = lax.cond(has_flag(MASKED).any(), mask, lambda logits: logits, final_logits)
    greedy = jnp.argmax(final_logits, axis=1).astype(jnp.int32)
    shaping = Shaping(
        jnp.maximum(temperature * jnp.float32(math.log(2)), SMALLEST),
        jnp.where(top_k > 0, top_k, jnp.iinfo(jnp.int32).max).astype(jnp.int64),
        *(tail, min_log_weight, u),
    )
    random = has_flag(RANDOM)
    drawn = lax.cond(random.any(), lambda: draw(final_logits, shaping), lambda: greedy)
    token_ids = jnp.minimum(jnp.where(random, drawn, greedy), logits.shape[1] - 1)
    scores = lax.cond(
        has_flag(SCORED).any(),
        lambda: score(plain, token_ids),
        lambda: no_scores(len(slot), logits.shape[1]),
    )
    status = jnp.where(finite, FINITE, NOT_FINITE).astype(jnp.int32)
    new_state = State(
        newest=state.newest.at[slot].set(token_ids, mode="drop"),
        history=state.history.at[slot, token_ids].add(jnp.int32(ONCE), mode="drop"),
        bias=state.bias,
        mask=state.mask,
    )
    return Sampled(token_ids, status, scores), new_state


def score(logits: jax.Array, token_ids: jax.Array) -> Scores:
    """Return log probabilities for given tokens, from unchanged logits: [N, V], int32 [N]."""
    logits = logits.astype(jnp.float32)
    total = jax.nn.logsumexp(logits, axis=1)
    word = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    chosen = jnp.where(word == token_ids[:, None], logits, -jnp.inf).max(axis=1)
    larger = (logits > chosen[:, None]).astype(jnp.int32).sum(axis=1, dtype=jnp.int32)
    top, top_ids = lax.top_k(logits, min(MAX_TOP, logits.shape[1]))
    return Scores(chosen - total, larger + 1, top_ids.astype(jnp.int32), top - total[:, None])


def no_scores(rows: int, vocab: int) -> Scores:
    """Return zeros in the shape of `score`."""
    top = min(MAX_TOP, vocab)
    return Scores(
        jnp.zeros(rows, jnp.float32),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros((rows, top), jnp.int32),
        jnp.zeros((rows, top), jnp.float32),
    )


def set_slot(state: State, slot: jax.Array, history: jax.Array, bias: jax.Array) -> State:
    """Store a request's history and bias, [V] each, in its slot."""
    return state._replace(
        history=state.history.at[slot].set(history), bias=state.bias.at[slot].set(bias)
    )


def set_masks(state: State, slots: jax.Array, masks: jax.Array) -> State:
    """Store masks, [MASKS, ceil(V / 32)], in their slots; padding's slot is beyond the last."""
    return state._replace(mask=state.mask.at[slots].set(masks, mode="drop"))


class Settings:
    """The host's side: every slot's settings, and the part that a step's rows need.

    Args:
        vocab_size: V.
        columns: columns in the logits; V and padding.
        max_num_seqs: number of slots.
    """

    def __init__(self, vocab_size: int, columns: int, max_num_seqs: int) -> None:
        self._vocab_size = vocab_size
        self._columns = columns
        self._slots = max_num_seqs
        self._floats = np.zeros((5, max_num_seqs), np.float32)
        self._tail, self._seed = np.zeros((2, max_num_seqs), np.uint64)
        self._integers = np.zeros((4, max_num_seqs), np.int32)  # top-k, asked, min tokens, logprobs

    def set_slot(self, settings: SlotSampling) -> tuple[Int32, Float32] | None:
        """Store a request's settings; return its history and bias if they are needed.

        Raises:
            ValueError: it asks for more log probabilities than available.
        """
        slot = settings.slot
        if settings.logprobs > MAX_TOP:
            raise ValueError(f"logprobs is {settings.logprobs}; it must be at most {MAX_TOP}")
        suppresses = settings.min_tokens > 0 and bool(settings.end_token_ids)
        edited = settings.needs_history or bool(settings.logit_bias) or suppresses
        flags = EDITED * edited | RANDOM * (settings.temperature > 0.0)
        flags |= SCORED * (settings.logprobs >= 0)
        min_log_weight = math.log2(settings.min_p or 2.0**-149)
        penalties = (
            settings.repetition_penalty,
            settings.presence_penalty,
            settings.frequency_penalty,
        )
        self._floats[:, slot] = (settings.temperature, min_log_weight, *penalties)
        self._tail[slot] = round((1 - settings.top_p) * ONE)
        self._seed[slot] = settings.seed % 2**64
        top_k = min(settings.top_k, 2**31 - 1)
        min_tokens = settings.min_tokens if suppresses else 0
        self._integers[:, slot] = (top_k, flags, min_tokens, settings.logprobs)
        return self._history_and_bias(settings) if edited else None

    def _history_and_bias(self, settings: SlotSampling) -> tuple[Int32, Float32]:
        history = np.zeros(self._columns, np.int32)
        history[np.array(settings.prompt_token_ids, np.int64)] = IN_PROMPT
        # An id beyond the vocabulary can neither be sampled nor be used as an index.
        ends = [token for token in settings.end_token_ids if 0 <= token < self._vocab_size]
        history[ends] |= IS_END
        np.add.at(history, np.array(settings.output_token_ids, np.int64), ONCE)
        bias = np.zeros(self._columns, np.float32)
        for token, value in settings.logit_bias.items():
            bias[token] = value
        return history, bias

    def rows(self, batch: StepInput, size: int) -> Rows:
        """Return the settings for a step's sampled rows, padded to `size` rows."""
        slots, index = batch.sample_slot, batch.output_index
        count = len(slots)
        integers = np.zeros((7, size), np.int32)
        integers[0, count:] = self._slots
        integers[0, :count] = slots
        top_k, flags, min_tokens, _ = self._integers[:, slots]
        integers[1, :count] = top_k
        integers[2, :count] = flags | NO_END * (index < min_tokens)
        integers[2, batch.masked] |= MASKED
        integers[3:5, :count] = digits_of(self._tail[slots])
        integers[5:, :count] = digits_of(uniform(self._seed[slots], index))
        floats = np.ones((5, size), np.float32)
        floats[:, :count] = self._floats[:, slots]
        return Rows(integers, floats)

    def masks(self, batch: StepInput) -> Iterator[tuple[Int32, Int32]]:
        """Yield the slots of a step's masked rows and their masks, MASKS at a time."""
        slots = batch.sample_slot[batch.masked]
        words = -(-self._columns // 32)
        for start in range(0, len(slots), MASKS):
            chunk = slots[start : start + MASKS]
            padded = np.full(MASKS, self._slots, np.int32)
            padded[: len(chunk)] = chunk
            masks = np.zeros((MASKS, words), np.int32)
            given = batch.token_mask[start : start + MASKS]
            masks[: len(chunk), : given.shape[1]] = given
            yield padded, masks

    def logprobs(self, slots: Int32) -> Int32:
        """Return the number of log probabilities that each row's request wants; -1 for none."""
        counts: Int32 = self._integers[3, slots]
        return counts
