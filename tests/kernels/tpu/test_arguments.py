"""Arguments that ops refuse, and results when there is nothing to send."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from weft.kernels.tpu.attention.cache import write_pages
from weft.kernels.tpu.attention.distributed_decode import distributed_decode_attention
from weft.kernels.tpu.attention.paged import ragged_paged_attention
from weft.kernels.tpu.collectives.all_gather import all_gather
from weft.kernels.tpu.collectives.all_reduce import all_reduce
from weft.kernels.tpu.collectives.all_to_all import all_to_all
from weft.kernels.tpu.collectives.permute import permute
from weft.kernels.tpu.collectives.reduce_scatter import reduce_scatter
from weft.kernels.tpu.experts.dispatch import moe_dispatch
from weft.kernels.tpu.experts.grouped_matmul import grouped_gate_up, grouped_matmul
from weft.kernels.tpu.matmul.all_gather_matmul import all_gather_matmul
from weft.kernels.tpu.matmul.matmul_reduce_scatter import matmul_reduce_scatter


def zeros(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.zeros(shape, dtype)


def alone(function: Callable[..., Any], *arguments: jax.Array) -> Any:
    """Run on a mesh of one device."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    spec = PartitionSpec()
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )(*arguments)


@pytest.mark.parametrize(
    ("function", "shapes", "message"),
    [
        (partial(permute, axis="x", direction=2), [(8, 128)], "direction is 2; it must be 1 or -1"),
        (partial(reduce_scatter, axes="x", slots=1), [(8, 128)], "slots is 1; it must be at least"),
        (partial(all_reduce, axes="x", slots=0), [(8, 128)], "slots is 0; it must be at least 2"),
        (partial(all_to_all, axes="x"), [(2, 8, 128)], "x has 2 parts; it must have one for each"),
        (
            partial(all_gather_matmul, axes="x"),
            [(8, 128), (64, 128)],
            r"w is \[64, 128\]; they",
        ),
        (partial(matmul_reduce_scatter, axes="x"), [(8, 64), (128, 8)], r"x is \[8, 64\] and w is"),
        (partial(moe_dispatch, experts=4, axes="x"), [(8, 100), (8, 2)], "K a multiple of 128"),
        (grouped_matmul, [(8, 128), (2, 128, 128), (2,)], r"offsets \(2,\); they must be"),
        (
            grouped_gate_up,
            [(8, 128), (2, 128, 64), (2, 128, 32), (3,)],
            r"up \(2, 128, 32\); they must be alike",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    function: Callable[..., Any], shapes: list[tuple[int, ...]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        alone(function, *(zeros(*shape) for shape in shapes))


def test_one_device_sends_nothing() -> None:
    x = jnp.arange(16 * 128, dtype=jnp.float32).reshape(16, 128)
    for op in (all_gather, reduce_scatter, all_reduce):
        assert jnp.array_equal(alone(partial(op, axes="x"), x), x)
    assert jnp.array_equal(alone(partial(permute, axis="x"), x), x)
    w = jnp.eye(128)
    for product in (all_gather_matmul, matmul_reduce_scatter):
        assert jnp.array_equal(alone(partial(product, axes="x"), x, w), x)


@pytest.mark.parametrize(
    ("function", "shapes", "message"),
    [
        (
            partial(ragged_paged_attention, scale=1.0),
            [(4, 3, 128), (2, 2, 16, 256), (2,), (1,), (1, 2)],
            "heads=3 must be a multiple of kv_heads=2",
        ),
        (
            partial(ragged_paged_attention, scale=1.0),
            [(4, 4, 80), (2, 2, 16, 160), (2,), (1,), (1, 2)],
            "heads must be multiples of 64",
        ),
        (
            partial(ragged_paged_attention, scale=1.0),
            [(4, 4, 64), (2, 2, 24, 128), (2,), (1,), (1, 2)],
            "page=24 must be a multiple of 16",
        ),
        (
            partial(distributed_decode_attention, axes="x", scale=1.0, block_q=40),
            [(80, 4, 64), (2, 1, 16, 128), (2,), (1,), (1, 2)],
            "40 queries of 4 heads are more than 128 rows",
        ),
        (
            write_pages,
            [(2, 2, 16, 128), (4, 2, 64), (4, 1, 64), (2,), (1,), (1, 2)],
            "v \\(4, 1, 64",
        ),
    ],
)
def test_what_attention_does_not_take_is_refused(
    function: Callable[..., Any], shapes: list[tuple[int, ...]], message: str
) -> None:
    with pytest.raises(NotImplementedError, match=message):
        alone(function, *(zeros(*shape) for shape in shapes))


def test_other_dtypes_than_the_cache_are_refused() -> None:
    arguments = zeros(4, 4, 64), zeros(2, 2, 16, 128, dtype=jnp.bfloat16), *map(zeros, (2, 1))
    with pytest.raises(NotImplementedError, match="q is float32 and kv_pages bfloat16"):
        alone(partial(ragged_paged_attention, scale=1.0), *arguments, zeros(1, 2))
