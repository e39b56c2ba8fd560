"""Rotary positions, and what else happens to queries, keys and values before attention.

The heads of queries and keys are normalised, if the model has norms for them,
and rotated; keys and values go to their pages of the cache. On CPUs with
AVX-512 BF16 that is one call of csrc/attention.cpp, elsewhere torch's operators.
"""

from __future__ import annotations

from ctypes import byref
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from weft.kernels.cpu import native
from weft.kernels.cpu.attention import AttentionPlan, write_kv


class Rotation(NamedTuple):
    """Where a step's tokens are turned to, shared by all layers: [T, D] each, contiguous.

    `sin` is negative in its first half: x * cos + (x with its halves swapped) * sin.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, positions: Tensor, inv_freq: Tensor, dtype: torch.dtype) -> Rotation:
        """Of tokens at `positions`, int [T]; inv_freq float32 [D / 2], radians per position.

        They are computed for the tokens at hand, and not looked up: a table would be as long as
        the context.
        """
        angles = positions[:, None].float() * inv_freq
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        return cls(torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1))


class HeadNorms(NamedTuple):
    """RMSNorms of each query head and each key head (Qwen3); weights [D]."""

    q: Tensor
    k: Tensor
    eps: float


def rotate_into_cache(
    qkv: Tensor,
    rotation: Rotation,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    *,
    heads: int,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Rotate queries and keys; write keys and values to their pages, those that this rank has.

    Args:
        qkv: [T, (H + 2 Hk) * D], contiguous: the query heads, the keys, the values. It may be
            written over.
        rotation: of the step's tokens.
        keys, values: [num_blocks, Hk, block_size, D], the layer's cache.
        plan: the step's plan.
        heads: H.
        norms: come before the rotation.

    Returns:
        The queries, [T, H, D].
    """
    _, kv_heads, block_size, dim = keys.shape
    tokens = len(qkv)
    split = qkv.view(tokens, heads + 2 * kv_heads, dim)
    if (
        plan.world_size == 1
        and native.supports(qkv.dtype)
        and native.takes_heads(heads, kv_heads, dim)
    ):
        native.kernels().weft_rope(
            byref(
                native.RopeStep(
                    qkv=qkv.data_ptr(),
                    cos=rotation.cos.data_ptr(),
                    sin=rotation.sin.data_ptr(),
                    q_norm=None if norms is None else norms.q.data_ptr(),
                    k_norm=None if norms is None else norms.k.data_ptr(),
                    keys=keys.data_ptr(),
                    values=values.data_ptr(),
                    page=plan.pages.data_ptr(),
                    slot=plan.slots.data_ptr(),
                    tokens=tokens,
                    heads=heads,
                    kv_heads=kv_heads,
                    dim=dim,
                    block_size=block_size,
                    eps=0.0 if norms is None else norms.eps,
                )
            )
        )
        return split[:, :heads]
    q, k, v = split.tensor_split((heads, heads + kv_heads), dim=1)
    if norms is not None:
        q = rms_norm(q, (dim,), norms.q, norms.eps)
        k = rms_norm(k, (dim,), norms.k, norms.eps)
    write_kv(rotate(k, rotation), v, keys, values, plan)
    return rotate(q, rotation)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn each pair (x[d], x[d + D/2]) of x [T, H, D] by its token's angles (Su et al. 2021)."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * rotation.cos[:, None], swapped, rotation.sin[:, None])
