"""Matrix products of groups of rows, each group with a weight of its own: the experts of a chip.

    grouped_matmul(x [T, K], w [E, K, N], offsets int32 [E + 1]) -> [T, N]
    grouped_gate_up(x [T, K], gate, up [E, K, N], offsets)       -> [T, N]   silu(x gate) * (x up)

The plain product is jax.experimental.pallas.ops.tpu.megablox (after MegaBlocks: Gale et al. 2023),
which wants whole tiles of rows and leaves rows of no group as they are: here they are 0. It has no
product of two weights at once, so `grouped_gate_up` is a kernel of its own, over the same list of
tiles (`make_group_metadata`), which is made on the device from the offsets:

A program has a tile of rows, a group that has rows in it, and a tile of columns; it adds up K by K,
for gate and up, reading x once, and stores those rows of silu(gate) * up that are the group's. A
tile of rows with several groups is visited once for each, one after the other, while its result
stays in VMEM. How many programs there are is known to the device alone: a dynamic grid.

Products are added up in float32, and rounded once; float32 is multiplied as float32.

Not handled: quantized weights, gradients.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, make_group_metadata

TILE = (128, 1024, 512)
"""Rows, K and columns of a tile, at most; experts seldom have more rows."""

LANES = 128


def grouped_matmul(
    x: jax.Array, w: jax.Array, offsets: jax.Array, *, transposed: bool = False
) -> jax.Array:
    """Rows offsets[e] to offsets[e + 1] of x times w[e]: reference.grouped_matmul.

    Args:
        x: bfloat16 or float32 [T, K].
        w: x's dtype [E, K, N]; [E, N, K] if transposed.
        offsets: int32 [E + 1], not decreasing, of which the first is 0.

    Returns:
        x's dtype [T, N]; rows of no group are 0.

    Raises:
        ValueError: shapes that do not go together.
    """
    rows, columns = _check(x, w, offsets, transposed)
    if not len(x):
        return jnp.zeros((0, columns), x.dtype)
    sizes = jnp.diff(offsets).astype(jnp.int32)
    tiling = _tiling(rows.shape[0], rows.shape[1], columns)
    with jax.default_matmul_precision("highest" if x.dtype == jnp.float32 else "default"):
        out = gmm(rows, w, sizes, x.dtype, tiling, transpose_rhs=transposed)
    return _known(out, x, offsets)


def grouped_gate_up(
    x: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    offsets: jax.Array,
    *,
    transposed: bool = False,
) -> jax.Array:
    """silu(x gate[e]) * (x up[e]) for rows offsets[e] to offsets[e + 1] of x: the first half of
    SwiGLU experts (Shazeer 2020).

    Args:
        gate, up: as w of `grouped_matmul`, which see for the rest.
    """
    rows, columns = _check(x, gate, offsets, transposed)
    if up.shape != gate.shape:
        raise ValueError(f"gate is {gate.shape} and up {up.shape}; they must be alike")
    if not len(x):
        return jnp.zeros((0, columns), x.dtype)
    return _known(_gate_up(rows, gate, up, offsets, transposed), x, offsets)


def _check(
    x: jax.Array, w: jax.Array, offsets: jax.Array, transposed: bool
) -> tuple[jax.Array, int]:
    """The rows in whole tiles, and how many columns the result has."""
    groups, k, columns = w.shape if not transposed else (w.shape[0], w.shape[2], w.shape[1])
    if x.shape[1] != k or offsets.shape != (groups + 1,):
        raise ValueError(
            f"x is {x.shape}, w {w.shape}{' transposed' * transposed} and offsets "
            f"{offsets.shape}; they must be [T, K], [E, K, N] ([E, N, K] transposed) and [E + 1]"
        )
    tall = _tiling(len(x), k, columns)[0]
    return jnp.pad(x, ((0, -len(x) % tall), (0, 0))), columns


def _tiling(rows: int, k: int, columns: int) -> tuple[int, int, int]:
    """A tile's rows, K and columns; columns that do not divide are cut off at the end."""
    tall, deep, wide = TILE
    deep = next((size for size in range(deep, 0, -LANES) if k % size == 0), k)
    return min(tall, pl.cdiv(rows, 16) * 16), deep, min(wide, columns)


def _known(out: jax.Array, x: jax.Array, offsets: jax.Array) -> jax.Array:
    """What x's rows have given, and 0 for those of no group."""
    some = jnp.arange(len(x)) < offsets[-1]
    return jnp.where(some[:, None], out[: len(x)], 0)


def _gate_up(
    x: jax.Array, gate: jax.Array, up: jax.Array, offsets: jax.Array, transposed: bool
) -> jax.Array:
    (rows, k), groups = x.shape, len(gate)
    columns = gate.shape[1 if transposed else 2]
    tall, deep, wide = _tiling(rows, k, columns)
    (starts, ids, places), programs = make_group_metadata(
        group_sizes=jnp.diff(offsets).astype(jnp.int32),
        m=rows,
        tm=tall,
        start_group=jnp.int32(0),
        num_nonzero_groups=groups,
        visit_empty_groups=False,
    )
    steps = k // deep

    def kernel(
        starts: jax.Ref,  # int32 [E + 1]
        ids: jax.Ref,  # int32 [programs]; the group
        places: jax.Ref,  # int32 [programs]; the tile of rows
        x: jax.Ref,  # [tall, deep]
        gate: jax.Ref,  # [1, deep, wide], or [1, wide, deep]
        up: jax.Ref,
        out: jax.Ref,  # [tall, wide]
        gates: jax.Ref,  # float32 [tall, wide]
        ups: jax.Ref,
    ) -> None:
        i, step = pl.program_id(1), pl.program_id(2)
        for total, weight in ((gates, gate), (ups, up)):
            product = lax.dot_general(
                *(x[...], weight[0]),
                (((1,), (1 if transposed else 0,)), ((), ())),
                precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
                preferred_element_type=jnp.float32,
            )
            total[...] = jnp.where(step == 0, 0, total[...]) + product

        @pl.when(step == steps - 1)
        def _() -> None:
            row = places[i] * tall + lax.broadcasted_iota(jnp.int32, (tall, 1), 0)
            own = (row >= starts[ids[i]]) & (row < starts[ids[i] + 1])
            result = gates[...] * jax.nn.sigmoid(gates[...]) * ups[...]
            before = out[...].astype(jnp.float32)
            out[...] = jnp.where(own, result, before).astype(out.dtype)

    def weight_at(n: jax.Array, i: jax.Array, step: jax.Array, _: jax.Ref, ids: jax.Ref,
                  __: jax.Ref) -> tuple[jax.Array, ...]:  # fmt: skip
        return (ids[i], n, step) if transposed else (ids[i], step, n)

    weight = pl.BlockSpec((1, wide, deep) if transposed else (1, deep, wide), weight_at)
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((rows, columns), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(columns, wide), programs, steps),
            in_specs=[
                pl.BlockSpec((tall, deep), lambda n, i, step, _, __, places: (places[i], step)),
                weight,
                weight,
            ],
            out_specs=pl.BlockSpec((tall, wide), lambda n, i, step, _, __, places: (places[i], n)),
            scratch_shapes=[pltpu.VMEM((tall, wide), jnp.float32)] * 2,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * rows * k * columns,
            bytes_accessed=gate.nbytes + up.nbytes + x.nbytes + rows * columns * x.dtype.itemsize,
            transcendentals=rows * columns,
        ),
        name="grouped_gate_up",
    )(starts, ids, places, x, gate, up)
