"""Matrix products for row groups, each group with its own weight: the experts on a chip.

    grouped_matmul(x [T, K], w [E, K, N], offsets int32 [E + 1]) -> [T, N]
    grouped_gate_up(x [T, K], gate, up [E, K, N], offsets)       -> [T, N]   silu(x gate) * (x up)

The plain product is jax.experimental.pallas.ops.tpu.megablox (after MegaBlocks: Gale et al. 2023).
It needs whole row tiles and leaves rows outside all groups undefined; here they are 0. It
cannot multiply two weights at once, so `grouped_gate_up` has its own kernel over the same list of
tiles (`make_group_metadata`), which the device computes from the offsets.

A program has a row tile, a group with rows in it, and a column tile. It accumulates over K
for gate and up, reading x once, and stores silu(gate) * up for the group's rows. A row tile with
several groups is visited once per group, in sequence, while its result stays in VMEM. Only the
device knows the number of programs, so the grid is dynamic.

Products are accumulated in float32 and rounded once; float32 is multiplied as float32.

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
"""A tile's maximum rows, K and columns; experts seldom have more rows."""

LANES = 128


def grouped_matmul(
    x: jax.Array, w: jax.Array, offsets: jax.Array, *, transposed: bool = False
) -> jax.Array:
    """Multiply x's rows offsets[e]:offsets[e + 1] by w[e]; see reference.grouped_matmul.

    Args:
        x: bfloat16 or float32 [T, K].
        w: x's dtype [E, K, N]; [E, N, K] if transposed.
        offsets: int32 [E + 1], not decreasing, starting with 0.
        transposed: whether w is.

    Returns:
        x's dtype [T, N]; rows outside all groups are 0.

    Raises:
        ValueError: the shapes do not match.
    """
    rows, columns = _check(x, w, offsets, transposed)
    if not len(x):
        return jnp.zeros((0, columns), x.dtype)
    sizes = jnp.diff(offsets).astype(jnp.int32)
    tiling = _tiling(rows.shape[0], rows.shape[1], columns)
    with jax.default_matmul_precision("highest" if x.dtype == jnp.float32 else "default"):
        out = gmm(rows, w, sizes, x.dtype, tiling, transpose_rhs=transposed)
    return _zero_ungrouped(out, x, offsets)


def grouped_gate_up(
    x: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    offsets: jax.Array,
    *,
    transposed: bool = False,
) -> jax.Array:
    """Compute silu(x gate[e]) * (x up[e]) for x's rows offsets[e]:offsets[e + 1].

    This is the first half of SwiGLU experts (Shazeer 2020).

    Args:
        x, offsets, transposed: as in `grouped_matmul`.
        gate, up: as w in `grouped_matmul`.
    """
    rows, columns = _check(x, gate, offsets, transposed)
    if up.shape != gate.shape:
        raise ValueError(f"gate is {gate.shape} and up {up.shape}; they must be alike")
    if not len(x):
        return jnp.zeros((0, columns), x.dtype)
    return _zero_ungrouped(_gate_up(rows, gate, up, offsets, transposed), x, offsets)


def _check(
    x: jax.Array, w: jax.Array, offsets: jax.Array, transposed: bool
) -> tuple[jax.Array, int]:
    """Pad the rows to whole tiles; return them and the result's number of columns."""
    groups, k, columns = w.shape if not transposed else (w.shape[0], w.shape[2], w.shape[1])
    if x.shape[1] != k or offsets.shape != (groups + 1,):
        raise ValueError(
            f"x is {x.shape}, w {w.shape}{' transposed' * transposed} and offsets "
            f"{offsets.shape}; they must be [T, K], [E, K, N] ([E, N, K] transposed) and [E + 1]"
        )
    tall = _tiling(len(x), k, columns)[0]
    return jnp.pad(x, ((0, -len(x) % tall), (0, 0))), columns


def _tiling(rows: int, k: int, columns: int) -> tuple[int, int, int]:
    """Choose a tile's rows, K and columns; the last columns are cut off if they do not divide."""
    tall, deep, wide = TILE
    deep = next((size for size in range(deep, 0, -LANES) if k % size == 0), k)
    return min(tall, pl.cdiv(rows, 16) * 16), deep, min(wide, columns)


def _zero_ungrouped(out: jax.Array, x: jax.Array, offsets: jax.Array) -> jax.Array:
    """Cut the result to x's rows, and set rows outside all groups to 0."""
    in_group = jnp.arange(len(x)) < offsets[-1]
    return jnp.where(in_group[:, None], out[: len(x)], 0)


def _gate_up(
    x: jax.Array, gate: jax.Array, up: jax.Array, offsets: jax.Array, transposed: bool
) -> jax.Array:
    (rows, k), groups = x.shape, len(gate)
    columns = gate.shape[1 if transposed else 2]
    tall, deep, wide = _tiling(rows, k, columns)
    (starts, ids, row_tiles), programs = make_group_metadata(
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
        row_tiles: jax.Ref,  # int32 [programs]; the tile of rows
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
            row = row_tiles[i] * tall + lax.broadcasted_iota(jnp.int32, (tall, 1), 0)
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
                pl.BlockSpec(
                    (tall, deep), lambda n, i, step, _, __, row_tiles: (row_tiles[i], step)
                ),
                weight,
                weight,
            ],
            out_specs=pl.BlockSpec(
                (tall, wide), lambda n, i, step, _, __, row_tiles: (row_tiles[i], n)
            ),
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
    )(starts, ids, row_tiles, x, gate, up)
