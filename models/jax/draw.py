"""Draws one token from each row of logits, with the algorithm of models/torch/draw.py.

Temperature, top-k, top-p and min-p shape the distribution, in this order. Then one uniform number
picks a token by inverse CDF, in vocabulary order. Weights are integers: exp2 rounded down to a
multiple of 2**-40. Sums are therefore exact in any order, on any mesh.

Every cut, and the draw itself, searches for the smallest key (a float's bits, or an index in the
vocabulary) up to which a row's mass reaches a target. It is found bit by bit, with one masked sum
per bit. Rows are never sorted. If the vocabulary is split over devices, they exchange only sums.

Trace it with 64-bit types (`jax.enable_x64`). The host makes the uniform numbers (`uniform`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

BITS = 40
"""A weight is at most 2**40; the weights of 2**23 tokens can be summed."""

FLOAT_BITS, PLACE_BITS = 31, 23
"""Bits of a float without its sign, and of an index in a vocabulary."""

DIGIT_BITS = 24
ONE = 1 << 2 * DIGIT_BITS
"""Unit for fractions of a row's mass. TPUs have no float64, so fractions come as two digits."""


class Shaping(NamedTuple):
    """How to draw from each of S rows.

    Attributes:
        temperature: float32 [S]; scaled so that one logit less halves a token's weight.
        top_k: int64 [S]; at least the vocabulary's size keeps all tokens.
        tail: int64 [S]; the fraction that top-p cuts off, in units of 1 / ONE.
        min_log_weight: float32 [S]; log2 of the weight that min-p requires.
        u: int64 [S]; the uniform number, in units of 1 / ONE, less than ONE.
    """

    temperature: jax.Array
    top_k: jax.Array
    tail: jax.Array
    min_log_weight: jax.Array
    u: jax.Array


def draw(logits: jax.Array, rows: Shaping) -> jax.Array:
    """float32 [S, V], finite or -inf -> int32 [S]; 0 for rows with only -inf."""
    largest = logits.max(axis=1, keepdims=True)
    largest = jnp.where(largest == -jnp.inf, 0.0, largest)
    scaled = (logits - largest) / rows.temperature[:, None]
    # Without their sign, numbers that are not positive sort like their bits.
    keys = lax.bitcast_convert_type(scaled, jnp.int32) & jnp.int32(0x7FFFFFFF)
    weights = (jnp.exp2(scaled) * jnp.float32(1 << BITS)).astype(jnp.int64)

    def keep(selected: jax.Array, mass: jax.Array, target: jax.Array) -> jax.Array:
        """Keep the likeliest tokens whose mass reaches the target, and their ties."""
        floor = _smallest_key(FLOAT_BITS, keys, mass, lambda total: total >= target)
        return jnp.where(selected[:, None] & (keys > floor[:, None]), 0, weights)

    by_k = rows.top_k < logits.shape[1]
    weights = lax.cond(
        by_k.any(), lambda: keep(by_k, jnp.ones_like(weights), rows.top_k), lambda: weights
    )
    by_p = rows.tail > 0
    total = weights.sum(axis=1)
    nucleus = jnp.maximum(total - share_of(rows.tail, total), 1)
    weights = lax.cond(by_p.any(), lambda: keep(by_p, weights, nucleus), lambda: weights)
    weights = jnp.where(scaled >= rows.min_log_weight[:, None], weights, 0)
    total = weights.sum(axis=1)
    target = jnp.minimum(share_of(rows.u, total), total - 1)  # -1 if the total is 0
    index = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    return _smallest_key(PLACE_BITS, index, weights, lambda sums: sums > target)


def number_of(high: jax.Array, low: jax.Array) -> jax.Array:
    """Combine two digits: int64 [S]."""
    return (high.astype(jnp.int64) << DIGIT_BITS) + low


def digits_of(numbers: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.int32], ...]:
    """Split numbers up to ONE into a higher and a lower digit."""
    digit = np.uint64((1 << DIGIT_BITS) - 1)
    return (numbers >> np.uint64(DIGIT_BITS)).astype("i4"), (numbers & digit).astype("i4")


def share_of(share: jax.Array, total: jax.Array) -> jax.Array:
    """Return share / ONE of a total, rounded down: int64 [S]; by long multiplication."""
    digit = (1 << DIGIT_BITS) - 1
    high, low = share >> DIGIT_BITS, share & digit
    top, middle, bottom = total >> 2 * DIGIT_BITS, (total >> DIGIT_BITS) & digit, total & digit
    carried = (high * bottom + low * middle + (low * bottom >> DIGIT_BITS)) >> DIGIT_BITS
    return (high * top << DIGIT_BITS) + high * middle + low * top + carried


def _smallest_key(
    bits: int, keys: jax.Array, mass: jax.Array, enough: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Find each row's smallest key such that the tokens up to it have enough mass.

    Args:
        bits: number of bits in the keys.
        keys: int32 [S, V], not negative.
        mass: int64 [S, V], not negative.
        enough: tests a mass: int64 [S] to bool [S].

    Returns:
        int32 [S]; 2**bits - 1 if the mass is never enough.
    """

    def halve(i: jax.Array, low: jax.Array) -> jax.Array:
        half = jnp.left_shift(jnp.int32(1), (bits - 1 - i).astype(jnp.int32))
        below = jnp.where(keys <= (low + (half - 1))[:, None], mass, 0).sum(axis=1)
        return jnp.where(enough(below), low, low + half)

    start = jnp.zeros(keys.shape[0], jnp.int32)
    return lax.fori_loop(jnp.int32(0), jnp.int32(bits), halve, start)


_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def uniform(seeds: npt.NDArray[np.uint64], index: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Return each seed's index-th number, in units of 1 / ONE; as models.torch.draw.uniform.

    This is SplitMix64's finaliser (Steele, Lea and Flood 2014): mix(mix(seed) + (index + 1) *
    gamma).
    """
    state = _mix(seeds) + (index.astype(np.uint64) + np.uint64(1)) * _GAMMA
    return _mix(state) >> np.uint64(16)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
