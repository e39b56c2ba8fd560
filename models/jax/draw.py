"""One token from each row of logits: the algorithm of models/torch/draw.py, for a whole batch.

Temperature, top-k, top-p and min-p shape the distribution, in this order; then one uniform
number picks a token by inverse CDF, in the order of the vocabulary. Weights are whole numbers,
exp2 rounded down to a multiple of 2**-40, so that sums are exact in any order, whatever the mesh.

Every cut, and the draw itself, is the smallest of some numbers (a float's bits, a place in the
vocabulary) up to which a row's mass comes to a target. It is found bit by bit, with one masked
sum for each: rows are never sorted, and of a vocabulary that is cut over devices these exchange
nothing but sums.

Traced with 64-bit types (`jax.enable_x64`). The uniform numbers are made on the host (`uniform`).
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
"""A weight is at most 2**40; those of 2**23 tokens can be summed."""

FLOAT_BITS, PLACE_BITS = 31, 23
"""Of a float without its sign; of a place in a vocabulary."""

DIGIT_BITS = 24
WHOLE = 1 << 2 * DIGIT_BITS
"""What shares of a row's mass are counted in. TPUs have no float64, so they come as two digits."""


class Shaping(NamedTuple):
    """How each of S rows is drawn from.

    Attributes:
        temperature: float32 [S]; in units in which a logit less makes a token half as likely.
        top_k: int64 [S]; at least the vocabulary if all are kept.
        tail: int64 [S]; what top-p cuts off, of WHOLE.
        least: float32 [S]; log2 of the weight that min-p asks for.
        u: int64 [S]; of WHOLE, less than that.
    """

    temperature: jax.Array
    top_k: jax.Array
    tail: jax.Array
    least: jax.Array
    u: jax.Array


def draw(logits: jax.Array, rows: Shaping) -> jax.Array:
    """float32 [S, V], finite or -inf -> int32 [S]; 0 where all of a row are -inf."""
    largest = logits.max(axis=1, keepdims=True)
    largest = jnp.where(largest == -jnp.inf, 0.0, largest)
    scaled = (logits - largest) / rows.temperature[:, None]
    # Without their sign, numbers that are not positive are in the order of their bits.
    keys = lax.bitcast_convert_type(scaled, jnp.int32) & jnp.int32(0x7FFFFFFF)
    weights = (jnp.exp2(scaled) * jnp.float32(1 << BITS)).astype(jnp.int64)

    def keep(some: jax.Array, mass: jax.Array, target: jax.Array) -> jax.Array:
        """Weights of the likeliest tokens whose mass comes to the target, and of their ties."""
        floor = _first(FLOAT_BITS, keys, mass, lambda total: total >= target)
        return jnp.where(some[:, None] & (keys > floor[:, None]), 0, weights)

    by_k = rows.top_k < logits.shape[1]
    weights = lax.cond(
        by_k.any(), lambda: keep(by_k, jnp.ones_like(weights), rows.top_k), lambda: weights
    )
    by_p = rows.tail > 0
    total = weights.sum(axis=1)
    nucleus = jnp.maximum(total - share_of(rows.tail, total), 1)
    weights = lax.cond(by_p.any(), lambda: keep(by_p, weights, nucleus), lambda: weights)
    weights = jnp.where(scaled >= rows.least[:, None], weights, 0)
    total = weights.sum(axis=1)
    target = jnp.minimum(share_of(rows.u, total), total - 1)  # -1 of nothing
    place = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    return _first(PLACE_BITS, place, weights, lambda sums: sums > target)


def number_of(high: jax.Array, low: jax.Array) -> jax.Array:
    """int64 [S] of two digits."""
    return (high.astype(jnp.int64) << DIGIT_BITS) + low


def digits_of(numbers: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.int32], ...]:
    """The higher and the lower digit of numbers up to WHOLE."""
    digit = np.uint64((1 << DIGIT_BITS) - 1)
    return (numbers >> np.uint64(DIGIT_BITS)).astype("i4"), (numbers & digit).astype("i4")


def share_of(share: jax.Array, total: jax.Array) -> jax.Array:
    """share / WHOLE of a total, rounded down: int64 [S]; long multiplication."""
    digit = (1 << DIGIT_BITS) - 1
    high, low = share >> DIGIT_BITS, share & digit
    top, middle, bottom = total >> 2 * DIGIT_BITS, (total >> DIGIT_BITS) & digit, total & digit
    carried = (high * bottom + low * middle + (low * bottom >> DIGIT_BITS)) >> DIGIT_BITS
    return (high * top << DIGIT_BITS) + high * middle + low * top + carried


def _first(
    bits: int, keys: jax.Array, mass: jax.Array, enough: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """The smallest number of each row such that what has no larger key has enough mass.

    Args:
        bits: of the keys.
        keys: int32 [S, V], not negative.
        mass: int64 [S, V], not negative.
        enough: of a mass, int64 [S] to bool [S].

    Returns:
        int32 [S]; 2**bits - 1 where there is never enough.
    """

    def halve(i: jax.Array, low: jax.Array) -> jax.Array:
        half = jnp.left_shift(jnp.int32(1), (bits - 1 - i).astype(jnp.int32))
        below = jnp.where(keys <= (low + (half - 1))[:, None], mass, 0).sum(axis=1)
        return jnp.where(enough(below), low, low + half)

    start = jnp.zeros(keys.shape[0], jnp.int32)
    return lax.fori_loop(jnp.int32(0), jnp.int32(bits), halve, start)


_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def uniform(seeds: npt.NDArray[np.uint64], index: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """The index-th number of each seed's stream, of WHOLE: models.torch.draw.uniform's.

    SplitMix64's finaliser (Steele, Lea and Flood 2014): mix(mix(seed) + (index + 1) * gamma).
    """
    state = _mix(seeds) + (index.astype(np.uint64) + np.uint64(1)) * _GAMMA
    return _mix(state) >> np.uint64(16)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
