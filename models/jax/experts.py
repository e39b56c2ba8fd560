"""Mixture of experts on one device of a mesh, inside `shard_map`, in two ways.

- Each device has all tokens. It runs its experts, or its part of each, on rows sorted by expert
  (Gale et al. 2022). Rows for experts elsewhere count as zero. The final sum over devices is the
  same as in all other blocks.
- Each device has some tokens, and sends them only to the devices of their experts. These send a
  weighted sum back (kernels/tpu/experts/dispatch.py).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from weft.kernels.tpu.experts.dispatch import moe_combine, moe_dispatch
from weft.kernels.tpu.experts.grouped_matmul import grouped_gate_up, grouped_matmul
from weft.models.jax.collectives import (
    all_reduce,
    block_input,
    block_output,
    gather_tokens,
    matmul,
    precision,
    scatter_sum,
)
from weft.models.jax.kernels import Shape
from weft.models.jax.mesh import EXPERT, TENSOR
from weft.models.jax.parameters import Mlp, Moe
from weft.models.spec.spec import MoeSpec, RouterSpec


def run_experts(layer: MoeSpec, own: Moe, shape: Shape, x: jax.Array) -> jax.Array:
    """Run each token's experts, weighted by their probabilities.

    Args:
        layer: the whole layer, or a device's part.
        own: this device's part.
        shape: the step's shape.
        x: normed, [T, hidden], or this device's tokens.

    Returns:
        the same shape as x.
    """
    if shape.kernels.exchange:
        inputs, weights, experts = _route(layer, own, x)
        rows, routing = moe_dispatch(inputs, experts, own.router.shape[1], TENSOR)
        outputs = _run(own, rows, routing.offsets, kernel=True)
        mixed = moe_combine(outputs, weights, routing, TENSOR)
        if own.shared is None:
            return mixed
        return mixed + _gate_shared(own, x, dense(own.shared, shape, x))
    if shape.sharded:
        x = gather_tokens(x)
    total = _run_own(own, *_route(layer, own, x), kernel=shape.kernels.experts)
    if own.shared is not None:  # one sum over the devices has the experts' terms and these
        total += _gate_shared(own, x, _part_of_shared(own.shared, x))
    return scatter_sum(total) if shape.sharded else all_reduce(total)


def dense(own: Mlp, shape: Shape, x: jax.Array) -> jax.Array:
    """Compute down(silu(gate(x)) * up(x)) on all devices together; x is normed."""
    gate_up = block_input(x, *own.gate_up, shape)
    inner = gated(*jnp.split(gate_up, 2, axis=-1))
    return block_output(inner, *own.down, shape)


def _part_of_shared(own: Mlp, x: jax.Array) -> jax.Array:
    """Compute this device's term of the shared MLP's result, for all tokens [T, hidden]."""
    gate_up = matmul(x, own.gate_up.weight)
    if own.gate_up.bias is not None:
        gate_up += own.gate_up.bias.astype(jnp.float32)
    inner = gated(*jnp.split(gate_up.astype(x.dtype), 2, axis=-1))
    part = matmul(inner, own.down.weight)
    if own.down.bias is not None:
        part += jnp.where(lax.axis_index(TENSOR) == 0, own.down.bias.astype(jnp.float32), 0)
    return part.astype(x.dtype)


def _gate_shared(own: Moe, x: jax.Array, out: jax.Array) -> jax.Array:
    """Multiply the shared MLP's result by its gate, if it has one."""
    if own.shared_gate is None:
        return out
    return jax.nn.sigmoid(matmul(x, own.shared_gate)).astype(x.dtype) * out


def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up (Shazeer 2020), computed in float32 and rounded once."""
    product = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
    return product.astype(gate.dtype)


def _route(layer: MoeSpec, own: Moe, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Choose each token's experts.

    Returns:
        The experts' inputs, like x; their weights, float32 [T, top_k]; and ids, int32 [T, top_k].
    """
    router = layer.router
    if router.weight.in_float32:
        wide = matmul(x.astype(jnp.float32), own.router)
    else:
        wide = matmul(x, own.router).astype(x.dtype).astype(jnp.float32)
    score = jax.nn.sigmoid if router.scoring == "sigmoid" else jax.nn.softmax
    scores = score(wide)
    choice = scores if own.bias is None else scores + own.bias
    if router.top_groups < router.groups:
        choice = _in_best_groups(router, choice)
    _, experts = lax.top_k(choice, router.top_k)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if router.normalize:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    weights *= jnp.float32(router.scale)
    if router.scales_input:
        return x * weights.astype(x.dtype), jnp.ones_like(weights), experts
    return x, weights, experts


def _in_best_groups(router: RouterSpec, choice: jax.Array) -> jax.Array:
    """Set the scores outside each token's best groups to -inf; float32 [T, experts]."""
    by_group = choice.reshape(len(choice), router.groups, -1)
    counted = 1 if router.bias is None else min(2, by_group.shape[-1])
    quality = lax.top_k(by_group, counted)[0].sum(axis=-1)
    _, best = lax.top_k(quality, router.top_groups)
    kept = jax.nn.one_hot(best, router.groups, dtype=jnp.bool_).any(axis=1)
    return jnp.where(kept[..., None], by_group, -jnp.inf).reshape(choice.shape)


def _run_own(
    own: Moe, x: jax.Array, weights: jax.Array, experts: jax.Array, *, kernel: bool
) -> jax.Array:
    """Compute this device's share of the sum: [T, hidden] and [T, top_k] twice -> [T, hidden]."""
    here = own.gate.shape[0]
    local = experts - lax.axis_index(EXPERT) * here
    # Rows for experts elsewhere come last, outside all groups.
    local = jnp.where((local >= 0) & (local < here), local, here).reshape(-1)
    order = jnp.argsort(local, stable=True)
    ends = jnp.cumsum(jnp.bincount(local, length=here + 1)[:here]).astype(jnp.int32)
    rows = x[order // experts.shape[1]]
    outputs = _run(own, rows, jnp.append(jnp.int32(0), ends), kernel=kernel)
    out = outputs.astype(jnp.float32) * weights.reshape(-1)[order][:, None]
    out = jnp.where((local[order] < here)[:, None], out, 0.0)
    out = out[jnp.argsort(order)].reshape(*experts.shape, -1)
    return out.sum(axis=1).astype(x.dtype)


def _run(own: Moe, rows: jax.Array, offsets: jax.Array, *, kernel: bool) -> jax.Array:
    """Run rows [R, hidden] through their experts; expert e has rows offsets[e]:offsets[e + 1]."""
    if kernel:
        inner = grouped_gate_up(rows, own.gate, own.up, offsets)
        return grouped_matmul(inner, own.down, offsets)

    def grouped(rows: jax.Array, matrices: jax.Array) -> jax.Array:
        return lax.ragged_dot(
            *(rows, matrices, jnp.diff(offsets)),
            precision=precision(rows),
            preferred_element_type=jnp.float32,
        )

    inner = gated(*(grouped(rows, each).astype(rows.dtype) for each in (own.gate, own.up)))
    return grouped(inner, own.down)
