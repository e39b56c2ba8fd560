"""Every TPU op at its checked shapes: small ones to interpret, real ones to compile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from weft.kernels.check.tpu import oracles
from weft.kernels.check.tpu.batch import Batch
from weft.kernels.check.tpu.case import Case, Input
from weft.kernels.tpu.attention.cache import write_pages
from weft.kernels.tpu.attention.distributed_decode import distributed_decode_attention
from weft.kernels.tpu.attention.paged import ragged_paged_attention
from weft.kernels.tpu.collectives.all_gather import all_gather
from weft.kernels.tpu.collectives.all_reduce import all_reduce
from weft.kernels.tpu.collectives.all_to_all import all_to_all
from weft.kernels.tpu.collectives.permute import permute
from weft.kernels.tpu.collectives.reduce_scatter import reduce_scatter
from weft.kernels.tpu.experts.dispatch import moe_combine, moe_dispatch
from weft.kernels.tpu.experts.grouped_matmul import grouped_gate_up, grouped_matmul
from weft.kernels.tpu.matmul.all_gather_matmul import all_gather_matmul
from weft.kernels.tpu.matmul.matmul_reduce_scatter import matmul_reduce_scatter

P = PartitionSpec


def _ring(axis: str, direction: int) -> list[tuple[int, int]]:
    size = lax.axis_size(axis)
    return [(i, (i + direction) % size) for i in range(size)]


def collectives(
    axes: dict[str, int], rows: int, columns: int, dtype: Any, slots: int = 2
) -> list[Case]:
    """List the ops that move or add, over all axes; each device has [rows, columns]."""
    order = tuple(axes)
    devices = int(np.prod(list(axes.values())))
    mine = Input((devices * rows, columns), P(order), dtype)
    parts = Input((devices * devices, rows, columns), P(order), dtype)
    summed = Input((devices * devices * rows, columns), P(order), dtype)
    one = len(order) == 1
    return [
        *(
            Case(
                "permute",
                axes,
                partial(permute, axis=order[0], direction=direction),
                lambda x, d=direction: lax.ppermute(x, order[0], _ring(order[0], d)),
                [mine],
                P(order),
                note="down" if direction < 0 else "",
            )
            for direction in (1, -1)
            if one
        ),
        Case(
            "all_gather",
            axes,
            partial(all_gather, axes=order),
            partial(lax.all_gather, axis_name=order, tiled=True),
            [mine],
            P(),
        ),
        Case(
            "reduce_scatter",
            axes,
            partial(reduce_scatter, axes=order, slots=slots),
            partial(lax.psum_scatter, axis_name=order, tiled=True),
            [summed],
            P(order),
        ),
        Case(
            "all_reduce",
            axes,
            partial(all_reduce, axes=order, slots=slots),
            partial(lax.psum, axis_name=order),
            [mine],
            P(order),
        ),
        Case(
            "all_to_all",
            axes,
            partial(all_to_all, axes=order),
            partial(lax.all_to_all, axis_name=order, split_axis=0, concat_axis=0),
            [parts],
            P(order),
        ),
    ]


def products(axes: dict[str, int], m: int, k: int, n: int, dtype: Any) -> list[Case]:
    """List the products, over all axes.

    Each device has rows [m, k] before, or [m, n] after. Its part of the weight has n columns in the
    first op, and k rows in the second.
    """
    order = tuple(axes)
    devices = int(np.prod(list(axes.values())))
    x, w = Input((devices * m, k), P(order), dtype), Input((k, devices * n), P(None, order), dtype)

    def gather(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = lax.all_gather(x, order, tiled=True)
        return oracles.times(rows, w).astype(x.dtype), rows

    def scatter(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.psum_scatter(oracles.times(x, w), order, tiled=True).astype(x.dtype)

    return [
        Case(
            "all_gather_matmul",
            axes,
            partial(all_gather_matmul, axes=order, gathered=True),
            gather,
            [x, w],
            (P(None, order), P()),
        ),
        Case(
            "matmul_reduce_scatter",
            axes,
            partial(matmul_reduce_scatter, axes=order),
            scatter,
            [
                Input((devices * m, devices * k), P(None, order), dtype),
                Input((devices * k, n), P(order), dtype),
            ],
            P(order),
        ),
    ]


def attention(
    batch: Batch, devices: int, dtype: Any, note: str = "", alike: int = 1, **options: Any
) -> Case:
    """Make an attention case: on devices that share the batch, on one, or `alike` on several."""
    axes, options = {"x": max(devices, alike)}, {"scale": batch.depth**-0.5} | options
    plain = {name: value for name, value in options.items() if name not in ("block_q", "block_k")}
    inputs = [
        Input((batch.tokens, batch.heads, batch.depth), P(), dtype),
        *batch.inputs(dtype, "x" if devices > 1 else None, devices),
    ]
    if devices == 1:
        op, kernel, oracle = (
            "ragged_paged_attention",
            partial(ragged_paged_attention, **options),
            partial(oracles.paged_attention, **plain),
        )
    else:
        op, kernel, oracle = (
            "distributed_decode_attention",
            partial(distributed_decode_attention, axes=("x",), **options),
            partial(oracles.shared_attention, axes=("x",), **plain),
        )
    return Case(op, axes, kernel, oracle, inputs, (P(), P()), note=note)


def writing(batch: Batch, dtype: Any, note: str = "", alike: int = 1) -> Case:
    """Make a case that writes a batch's new keys and values into its pages."""
    pages, *lengths = batch.inputs(dtype, None, 1)
    new = Input((batch.tokens, batch.kv_heads, batch.depth), P(), dtype)
    inputs = [replace(pages, draw=None), new, new, *lengths]
    axes = {"x": alike}
    ops = write_pages, oracles.write_pages
    return Case("write_pages", axes, *ops, inputs, P(), note=note, donated=(0,))


def experts(
    axes: dict[str, int],
    tokens: int,
    k: int,
    n: int,
    count: int,
    choices: int,
    dtype: Any,
    idle: bool = False,
) -> list[Case]:
    """Make cases with experts [k, n], shared by devices; `idle` sends all tokens to the first."""
    order = tuple(axes)
    devices = int(np.prod(list(axes.values())))
    rows = devices * tokens

    def draw_ids(rng: np.random.Generator) -> np.ndarray:
        if idle:
            return np.zeros((rows, choices), np.int32)
        return rng.permuted(np.tile(np.arange(count), (rows, 1)), axis=1)[:, :choices]

    def draw_offsets(rng: np.random.Generator) -> np.ndarray:
        return np.concatenate([[0], np.sort(rng.integers(0, rows, count))])

    note = "idle" if idle else ""
    x = Input((rows, k), P(order), dtype)
    ids = Input((rows, choices), P(order), jnp.int32, draw_ids)
    w = Input((count, k, n), P(order), dtype)

    def dispatch(x: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        came, routing = moe_dispatch(x, ids, count, order)
        return came, routing.offsets

    def all_of_it(x: jax.Array, ids: jax.Array, weights: jax.Array, w: jax.Array) -> jax.Array:
        came, routing = moe_dispatch(x, ids, count, order)
        made = grouped_matmul(came, w, routing.offsets)
        return moe_combine(made, weights, routing, order)

    moe = [
        Case(
            "moe_dispatch",
            axes,
            dispatch,
            partial(oracles.moe_dispatch, experts=count, axes=order),
            [x, ids],
            (P(order), P(order)),
            note=note,
        ),
        Case(
            "moe_combine",
            axes,
            all_of_it,
            partial(oracles.experts, axes=order),
            [x, ids, Input((rows, choices), P(order)), w],
            P(order),
            note=note,
        ),
    ]
    if idle:
        return moe
    lengths = Input((count + 1,), P(), jnp.int32, draw_offsets)
    rows_of_all = Input((rows, k), P(), dtype)
    weight, transposed = (Input((count, *shape), P(), dtype) for shape in ((k, n), (n, k)))
    return [
        *moe,
        Case(
            "grouped_matmul",
            axes,
            grouped_matmul,
            oracles.grouped_matmul,
            [rows_of_all, weight, lengths],
            P(),
        ),
        Case(
            "grouped_gate_up",
            axes,
            partial(grouped_gate_up, transposed=True),
            partial(oracles.grouped_gate_up, transposed=True),
            [rows_of_all, transposed, transposed, lengths],
            P(),
        ),
    ]


def on_two_cores(cases: Sequence[Case]) -> list[Case]:
    """Copy cases, with two cores per device."""
    return [replace(case, cores=2, note=f"{case.note} megacore".strip()) for case in cases]


RAGGED = Batch(queries=[5, 1, 0, 7], contexts=[21, 40, 9, 7], padding=3)
DECODES = Batch(queries=[1, 1, 1], contexts=[1, 33, 70])
NARROW = Batch([3, 1, 6], [40, 90, 6], padding=2, heads=7, kv_heads=1, depth=64, page=32)
LONG = Batch([40, 1, 33], [77, 33, 33], padding=6, depth=64)

INTERPRETED = [
    *collectives({"x": 2}, 16, 128, jnp.float32),
    *collectives({"x": 4}, 32, 256, jnp.float32),
    *collectives({"x": 8}, 16, 128, jnp.float32, slots=3),
    *collectives({"x": 2, "y": 2}, 16, 128, jnp.float32),
    *on_two_cores(collectives({"x": 4}, 32, 128, jnp.float32)),
    *products({"x": 2}, 64, 256, 128, jnp.float32),
    *products({"x": 4}, 64, 128, 256, jnp.bfloat16),
    *products({"x": 2, "y": 2}, 64, 128, 128, jnp.float32),
    *on_two_cores(products({"x": 4}, 64, 128, 128, jnp.float32)),
    *on_two_cores(products({"x": 2, "y": 2}, 64, 128, 128, jnp.float32)),
    attention(RAGGED, 1, jnp.float32, "", block_q=4, block_k=32),
    attention(RAGGED, 1, jnp.float32, "window", block_q=4, block_k=16, sliding_window=10),
    attention(DECODES, 1, jnp.bfloat16, "decode softcap", softcap=5.0),
    attention(NARROW, 1, jnp.bfloat16, "64 numbers a head", block_k=32),
    attention(RAGGED, 1, jnp.float32, "sinks", sinks=np.linspace(-1, 2, RAGGED.heads)),
    attention(replace(RAGGED, page=128), 1, jnp.float32, "pages of 128"),
    attention(replace(RAGGED, page=1024), 1, jnp.float32, "pages of 1024"),
    *on_two_cores([attention(RAGGED, 1, jnp.float32, "", block_q=2, block_k=32)]),
    attention(DECODES, 2, jnp.float32),
    attention(DECODES, 4, jnp.float32, "window", sliding_window=40, block_k=16),
    attention(NARROW, 4, jnp.bfloat16, "64 numbers a head", block_q=3),
    *on_two_cores([attention(DECODES, 2, jnp.float32, "", block_k=16)]),
    writing(RAGGED, jnp.float32),
    writing(replace(RAGGED, page=1024), jnp.float32, "pages of 1024"),
    writing(LONG, jnp.bfloat16, "whole pages"),
    *experts({"x": 2}, 4, 128, 128, 4, 2, jnp.float32),
    *experts({"x": 4}, 4, 128, 128, 8, 1, jnp.float32, idle=True),
    *experts({"x": 4}, 5, 256, 128, 8, 3, jnp.float32),
]

TOPOLOGIES: dict[str, dict[str, int]] = {
    "v5e:2x4": {"x": 2, "y": 4},
    "v5p:2x2x1": {"x": 2, "y": 2},
    "v6e:2x4": {"x": 2, "y": 4},
    "tpu7x:2x2x1": {"x": 4, "y": 2},  # a device for each of a chip's two cores
}
"""Topologies for compilation, and their two mesh axes."""


MIXED = Batch([512] + [1] * 63, [4096] * 64, 0, 32, 8, 128, 64)
SMALL = Batch([1] * 16, [1024] * 16, 0, 14, 2, 64, 16)


def compiled(topology: str) -> list[Case]:
    """List the ops at an 8-billion-parameter model's sizes, over one axis and over two."""
    two = TOPOLOGIES[topology]
    one = {"x": int(np.prod(list(two.values())))}
    return [
        case
        for axes in (one, two)
        for case in (
            *collectives(axes, 1024, 4096, jnp.bfloat16),
            *products(axes, 512, 4096, 1792, jnp.bfloat16),
        )
    ] + [
        *experts(one, 128, 2048, 768, 128, 8, jnp.bfloat16),
        attention(MIXED, 1, jnp.bfloat16, "", one["x"]),
        attention(SMALL, 1, jnp.float32, "64 numbers a head", one["x"], sliding_window=512),
        writing(MIXED, jnp.bfloat16, "", one["x"]),
        writing(SMALL, jnp.float32, "64 numbers a head", one["x"]),
        attention(Batch([1] * 8, [32768] * 8, 0, 32, 8, 128, 64), one["x"], jnp.bfloat16),
    ]


def named(name: str, topology: str | None = None) -> Case:
    """Return a case by name, from the interpreted cases or from those for a topology."""
    cases = INTERPRETED if topology is None else compiled(topology)
    return next(case for case in cases if case.name == name)
