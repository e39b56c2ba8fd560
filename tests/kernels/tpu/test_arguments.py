"""What ops refuse, and what they do where there is nothing to send."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from weft.kernels.tpu.all_gather import all_gather
from weft.kernels.tpu.all_gather_matmul import all_gather_matmul
from weft.kernels.tpu.all_reduce import all_reduce
from weft.kernels.tpu.all_to_all import all_to_all
from weft.kernels.tpu.attention import ragged_paged_attention
from weft.kernels.tpu.distributed_decode_attention import combine
from weft.kernels.tpu.grouped_matmul import grouped_matmul
from weft.kernels.tpu.matmul_reduce_scatter import matmul_reduce_scatter
from weft.kernels.tpu.moe_dispatch import moe_dispatch
from weft.kernels.tpu.permute import permute
from weft.kernels.tpu.reduce_scatter import reduce_scatter


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
        (grouped_matmul, [(8, 128), (2, 128, 128), (2,)], r"offsets \[2\]; they must be"),
        (
            partial(ragged_paged_attention, scale=1.0),
            [(4, 3, 128), (2, 2, 16, 128), (2, 2, 16, 128), (2,), (1,), (1, 2)],
            "with Hk a divisor of H",
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


def test_parts_of_attention_are_joined() -> None:
    rng = np.random.default_rng(3)
    scores, values = rng.standard_normal((2, 5, 4)), rng.standard_normal((2, 4, 8))
    scores[1, 2] = -np.inf  # the second part has no key for query 2

    def part(scores: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        weights = np.exp(scores)
        total = weights.sum(-1)
        return weights @ values / np.maximum(total, 1e-30)[:, None], np.log(total)

    with np.errstate(divide="ignore"):
        outs, lses = zip(*map(part, scores, values), strict=True)
    out, lse = combine(jnp.stack(outs), jnp.stack(lses))
    want, want_lse = part(np.concatenate(scores, axis=-1), np.concatenate(values))
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5)
    nothing, nowhere = combine(jnp.zeros((2, 1, 8)), jnp.full((2, 1), -jnp.inf))
    assert not nothing.any()
    assert nowhere[0] == -jnp.inf
