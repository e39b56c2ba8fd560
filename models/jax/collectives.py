"""Communication around products on a mesh, inside `shard_map`.

A step's activations between blocks have one of two layouts (Korthikanti et al. 2022, section
4.2.2):

- many tokens: each device has some. A block begins with an all-gather and ends with a
  reduce-scatter, both as rings. In each hop, a device multiplies the data that it has while this
  data, or the partial sum, travels on. Half of the tokens use each direction (Wang et al. 2023,
  "Overlap Communication with Dependent Computation via Decomposition").
- few tokens: every device has all, and a block ends with an all-reduce.

With very many tokens, a dense MLP leaves them where they are and moves its weights, because these
are then fewer bytes (Pope et al. 2022, section 3.2.3).

XLA schedules a ring's permutes around the products, but not its own all-gather and reduce-scatter.
Pallas kernels overlap inside (kernels/tpu/matmul/all_gather_matmul.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from weft.kernels.tpu.matmul import all_gather_matmul as gather_kernel
from weft.kernels.tpu.matmul import matmul_reduce_scatter as scatter_kernel
from weft.models.jax.kernels import Shape
from weft.models.jax.mesh import TENSOR


def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """[..., K] x [K, N] -> float32 [..., N]; float32 inputs are multiplied as float32, also on
    TPUs.
    """
    return lax.dot_general(
        *(x, weight),
        (((x.ndim - 1,), (0,)), ((), ())),
        precision=precision(x),
        preferred_element_type=jnp.float32,
    )


def precision(x: jax.Array) -> lax.Precision:
    """Return the precision for products with this dtype."""
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT


def gather_tokens(x: jax.Array) -> jax.Array:
    """[T / devices, K] -> [T, K]."""
    return lax.all_gather(x, TENSOR, tiled=True)


def scatter_sum(x: jax.Array) -> jax.Array:
    """[T, N] on each device -> the sum over all, [T / devices, N]."""
    return lax.psum_scatter(x, TENSOR, tiled=True)


def all_reduce(x: jax.Array) -> jax.Array:
    """Sum over all devices."""
    return lax.psum(x, TENSOR) if lax.axis_size(TENSOR) > 1 else x


def all_gather_matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """[T / devices, K] and this device's [K, N] -> [T, N] for all tokens, in x's dtype.

    T / devices must be even.
    """
    devices, own = lax.axis_size(TENSOR), lax.axis_index(TENSOR)
    rows = x.shape[0]
    half = rows // 2
    out = jnp.zeros((devices * rows, weight.shape[1]), x.dtype)
    up, down = x[:half], x[half:]
    for hop in range(devices):
        last = hop == devices - 1
        next_up = up if last else _pass_on(up, 1)
        next_down = down if last else _pass_on(down, -1)
        # Data that travels up comes from the devices before this one.
        for part, source, offset in ((up, own - hop, 0), (down, own + hop, half)):
            start = source % devices * rows + offset
            product = matmul(part, weight).astype(x.dtype)
            out = lax.dynamic_update_slice_in_dim(out, product, start, axis=0)
        up, down = next_up, next_down
    return out


def matmul_reduce_scatter(x: jax.Array, weight: jax.Array) -> jax.Array:
    """[T, K] and [K, N], cut along K -> this device's tokens, [T / devices, N].

    Partial sums travel in x's dtype. T / devices must be even.
    """
    devices, own = lax.axis_size(TENSOR), lax.axis_index(TENSOR)
    rows = x.shape[0] // devices
    half = rows // 2

    def travel(direction: int, offset: int) -> jax.Array:
        """Sum half of this device's tokens; the sum visits all other devices."""

        def product(x: jax.Array, target: jax.Array) -> jax.Array:
            start = target % devices * rows + offset
            part = matmul(lax.dynamic_slice_in_dim(x, start, half, axis=0), weight)
            # Without this barrier, XLA would fuse the product and the sum, and the product would
            # wait for the permute.
            return lax.optimization_barrier(part)

        total = product(x, own - direction).astype(x.dtype)
        for hop in range(2, devices + 1):
            # Without this barrier, XLA would merge all products, leaving nothing to overlap with
            # the hops.
            now, total = lax.optimization_barrier((x, total))
            added = product(now, own - direction * hop)
            total = (_pass_on(total, direction) + added).astype(x.dtype)
        return total

    return jnp.concatenate((travel(1, 0), travel(-1, half)))


class MlpPart(NamedTuple):
    """A device's part of an MLP.

    Attributes:
        gate, up: [hidden, width].
        gate_bias, up_bias: [width], or None.
        down: [width, hidden].
    """

    gate: jax.Array
    up: jax.Array
    gate_bias: jax.Array | None
    up_bias: jax.Array | None
    down: jax.Array


def weight_gathered_mlp(
    x: jax.Array, own: MlpPart, activate: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    """[T / devices, hidden] -> the same shape, from all devices' parts together, in float32.

    In each hop, a device multiplies its tokens by the parts that it has, while these travel on:
    half of a device's part goes up the ring, the other half down.

    Args:
        x: this device's tokens.
        own: this device's part.
        activate: combines the outputs of gate and up, both in x's dtype.
    """

    def halves(part: jax.Array | None, axis: int) -> tuple[Any, Any]:
        if part is None:
            return None, None
        first, second = jnp.split(part, [part.shape[axis] // 2], axis=axis)
        return first, second

    axes = MlpPart(gate=1, up=1, gate_bias=0, up_bias=0, down=0)  # where their width is
    up, down = (MlpPart(*parts) for parts in zip(*map(halves, own, axes), strict=True))

    def product(weight: jax.Array, bias: jax.Array | None) -> jax.Array:
        out = matmul(x, weight).astype(x.dtype)
        return out if bias is None else (out + bias.astype(jnp.float32)).astype(x.dtype)

    total = jnp.zeros(x.shape, jnp.float32)
    for hop in range(devices := lax.axis_size(TENSOR)):
        last = hop == devices - 1
        next_up = up if last else jax.tree.map(partial(_pass_on, direction=1), up)
        next_down = down if last else jax.tree.map(partial(_pass_on, direction=-1), down)
        for part in (up, down):
            inner = activate(product(part.gate, part.gate_bias), product(part.up, part.up_bias))
            total += matmul(inner, part.down)
        up, down = next_up, next_down
    return total


def _pass_on(x: jax.Array, direction: int) -> jax.Array:
    """Send to the next device in the ring, or to the one before."""
    devices = lax.axis_size(TENSOR)
    pairs = [(i, (i + direction) % devices) for i in range(devices)]
    return lax.ppermute(x, TENSOR, pairs)


def block_input(x: jax.Array, weight: jax.Array, bias: jax.Array | None, shape: Shape) -> jax.Array:
    """Begin a block: the product for all tokens, in x's dtype."""
    if shape.kernels.products:
        product = gather_kernel.all_gather_matmul(x, weight, TENSOR)
    else:
        product = all_gather_matmul(x, weight) if shape.sharded else matmul(x, weight)
    if bias is not None:
        product = product.astype(jnp.float32) + bias.astype(jnp.float32)
    return product.astype(x.dtype)


def block_output(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, shape: Shape
) -> jax.Array:
    """End a block: the sum of all devices' products, in x's dtype."""
    if shape.kernels.products:
        total = scatter_kernel.matmul_reduce_scatter(x, weight, TENSOR)
    elif shape.sharded:
        total = matmul_reduce_scatter(x, weight)
    else:
        total = all_reduce(matmul(x, weight).astype(x.dtype))
    return total if bias is None else total + bias
