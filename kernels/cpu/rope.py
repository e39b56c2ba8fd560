"""Rotary positions, and the other operations on queries, keys and values before attention.

Query and key heads are normalised, if the model has norms for them, and rotated. Keys and values go
to their pages in the cache. With compiled kernels that is one call to csrc/attention.cpp,
elsewhere torch operators.
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
    """Cosine and sine for a step's tokens, shared by all layers: [T, D] each, contiguous.

    `sin` is negative in its first half: x * cos + (x with its halves swapped) * sin.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(
        cls,
        positions: Tensor,
        inv_freq: Tensor,
        dtype: torch.dtype,
        amplitudes: Tensor | None = None,
    ) -> Rotation:
        """Compute the rotation for tokens at `positions`.

        It is computed for these tokens and not looked up, because a table would be as long as the
        context.

        Args:
            positions: int [T].
            inv_freq: float32 [D / 2], radians per position.
            dtype: the result's dtype.
            amplitudes: float32 [D / 2], multiply the rotated pairs; None for 1.
        """
        angles = positions[:, None].float() * inv_freq
        cos, sin = angles.cos(), angles.sin()
        if amplitudes is not None:
            cos, sin = cos * amplitudes, sin * amplitudes
        cos, sin = cos.to(dtype), sin.to(dtype)
        return cls(torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1))


class HeadNorms(NamedTuple):
    """RMSNorms for each query head and each key head (Qwen3), or layer norms if centered.

    Weights are [D], or each head's: [H, D] and [Hk, D] (Command R+).
    """

    q: Tensor
    k: Tensor
    eps: float
    is_centered: bool = False

    @property
    def is_plain(self) -> bool:
        """True for RMSNorms whose weights all heads share."""
        return self.q.dim() == 1 and not self.is_centered

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalize heads, [T, H, D] to the same shape, with one of the weights."""
        if self.is_plain:
            return rms_norm(x, weight.shape, weight, self.eps)
        wide = x.float()
        if self.is_centered:
            wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (wide * weight.float()).to(x.dtype)


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
    """Rotate queries and keys; write keys and values to this rank's pages.

    Args:
        qkv: [T, (H + 2 Hk) * D], contiguous: the query heads, the keys, the values. May be
            overwritten.
        rotation: for the step's tokens.
        keys, values: [num_blocks, Hk, block_size, D], the layer's cache.
        plan: the step's plan.
        heads: H.
        norms: applied before the rotation.

    Returns:
        The queries, [T, H, D].
    """
    _, kv_heads, block_size, dim = keys.shape
    tokens = len(qkv)
    by_head = qkv.view(tokens, heads + 2 * kv_heads, dim)
    q, k, v = by_head.tensor_split((heads, heads + kv_heads), dim=1)
    if norms is not None and not norms.is_plain:
        q.copy_(norms(q, norms.q))
        k.copy_(norms(k, norms.k))
        norms = None
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
        return q
    if norms is not None:
        q, k = norms(q, norms.q), norms(k, norms.k)
    write_kv(rotate(k, rotation), v, keys, values, plan)
    return rotate(q, rotation)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate each pair (x[d], x[d + D/2]) of x [T, H, D] by its token's angles (Su et al. 2021)."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * rotation.cos[:, None], swapped, rotation.sin[:, None])
