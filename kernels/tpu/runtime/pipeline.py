"""Operations on arrays in HBM beyond VMEM's size, with blocks moved during the arithmetic."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
SUBLANES = 8

BLOCK_BYTES = 1 << 20
"""A float32 block's size. An adding pipeline holds six: two for each array."""


def largest_divisor(count: int, limit: int, unit: int) -> int:
    """Return the largest divisor of `count` that is at most `limit` and a multiple of `unit`.

    If there is none, return `count` itself: a block as wide as its array may have any width.
    """
    return next((n for n in range(limit - limit % unit, 0, -unit) if count % n == 0), count)


def block(rows: int, columns: int) -> tuple[int, int]:
    """Choose a block in [rows, columns] for adding: whole rows if eight fit, else parts."""
    limit = BLOCK_BYTES // 4
    wide = columns
    if SUBLANES * columns > limit:
        wide = largest_divisor(columns, limit // SUBLANES, LANES)
    return largest_divisor(rows, max(limit // wide, SUBLANES), 2 * SUBLANES), wide


def add(first: jax.Ref, second: jax.Ref, out: jax.Ref) -> None:
    """Compute out = first + second, in float32 and rounded once.

    Args:
        first, second, out: [..., rows, columns] in HBM. `out` may be one of the others.
    """
    *lead, rows, columns = out.shape
    tall, wide = block(rows, columns)

    def body(a: jax.Ref, b: jax.Ref, o: jax.Ref) -> None:
        o[...] = (a[...].astype(jnp.float32) + b[...].astype(jnp.float32)).astype(o.dtype)

    spec = pl.BlockSpec((*(None,) * len(lead), tall, wide), lambda *at: at)
    pipeline = pltpu.emit_pipeline(
        body,
        grid=(*lead, rows // tall, columns // wide),
        in_specs=[spec, spec],
        out_specs=[spec],
    )
    pipeline(first, second, out)


def tiles(rows: int, columns: int, inner: int) -> tuple[int, int, int]:
    """Choose a product's tiles, as tall as possible, because each row of tiles reads the weight
    again.
    """
    return (
        largest_divisor(rows, 512, 2 * SUBLANES),
        largest_divisor(columns, 1024, LANES),
        largest_divisor(inner, 1024, LANES),
    )


def dot(x: jax.Array, w: jax.Array) -> jax.Array:
    """Compute x @ w with float32 accumulation; float32 inputs are multiplied as float32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, w, precision=precision, preferred_element_type=jnp.float32)


def multiply(
    x: jax.Ref,
    w: jax.Ref,
    out: jax.Ref,
    accumulator: jax.Ref,
    plus: jax.Ref | None = None,
) -> None:
    """Compute out = x @ w + plus, accumulated in float32 and rounded once.

    Args:
        x: [..., m, K] in HBM.
        w: [K, N] in HBM.
        out: [..., m, N] in HBM.
        accumulator: float32 in VMEM, one tile of `tiles(m, N, K)`.
        plus: [..., m, N] in HBM; may be `out`. None adds nothing.
    """
    *lead, m, k = x.shape
    n = w.shape[1]
    tall, wide, deep = tiles(m, n, k)
    steps = k // deep
    axis = len(lead) + 2

    def body(x: jax.Ref, w: jax.Ref, *rest: jax.Ref) -> None:
        out = rest[-1]
        step = pl.program_id(axis)
        product = dot(x[...], w[...])

        @pl.when(step == 0)
        def _() -> None:
            start = rest[0][...].astype(jnp.float32) if plus is not None else 0.0
            accumulator[...] = product + start

        @pl.when(step > 0)
        def _() -> None:
            accumulator[...] += product

        @pl.when(step == steps - 1)
        def _() -> None:
            out[...] = accumulator[...].astype(out.dtype)

    none = (None,) * len(lead)
    result = pl.BlockSpec((*none, tall, wide), lambda *at: at[:-1])
    pipeline = pltpu.emit_pipeline(
        body,
        grid=(*lead, m // tall, n // wide, steps),
        in_specs=[
            pl.BlockSpec((*none, tall, deep), lambda *at: (*at[:-2], at[-1])),
            pl.BlockSpec((deep, wide), lambda *at: (at[-1], at[-2])),
            *([result] if plus is not None else []),
        ],
        out_specs=[result],
    )
    pipeline(*(ref for ref in (x, w, plus, out) if ref is not None))
