"""Rotary position embedding, head norms and the write to the paged KV cache, in one launch.

    rotate_into_cache(qkv [T, (H + 2 Hk) D]) -> queries [T, H, D]; keys and values in their pages

This is the GPU's counterpart of kernels/cpu/rope.py. A program takes several heads of one
token: queries, keys, values or a mix. It stores a query to the result, and a key or value to the
token's slot in the cache. Exactly one program writes each number, so the programs need no signals.

If a token's page or slot is not in the cache, the kernel writes no key or value and sets the
token's status word. It still computes the token's queries. Tokens that only pad a batch may
therefore have page -1.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.cpu.rope import HeadNorms, Rotation
from weft.kernels.gpu.matmul.epilogue import FP8, RESULTS
from weft.kernels.gpu.rowwise.rows import cast, require_fp8
from weft.kernels.gpu.runtime.arguments import require, require_tensor

MAX_DIM = 1024
"""Maximum size of a head."""

TILE = 1024
"""Numbers in one half of each of a program's heads; both halves are 16 numbers per thread."""


class CacheScales(NamedTuple):
    """Scales of an fp8 cache, which stores keys / k and values / v; float32 [Hk], one per head."""

    k: Tensor
    v: Tensor


@triton.jit
def rotate_heads(
    queries,  # [T, H, D]
    keys,  # [num_blocks, Hk, block_size, D]
    values,  # [num_blocks, Hk, block_size, D]
    status,  # int32 [T]
    qkv,  # [T, (H + 2 Hk) * D]
    cos,  # [T, D]
    sin,  # [T, D]; the first half is negated
    pages,  # int32 or int64 [T]
    slots,  # int32 or int64 [T]
    q_norm,  # [D], or None; BY_HEAD [H * D]
    k_norm,  # [D], or None; BY_HEAD [Hk * D]
    means,  # float32 [T, 2], or None
    k_scale,  # float32 [Hk], or None
    v_scale,  # float32 [Hk], or None
    eps,
    heads,  # H
    kv_heads,  # Hk
    num_blocks,
    block_size,
    half,  # D / 2
    CENTERED: tl.constexpr,
    BY_HEAD: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Process some heads of a token. Grid: (T, ceil((H + 2 Hk) / BLOCK_H))."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    lane = tl.arange(0, BLOCK_D)
    is_query = (head < heads)[:, None]
    is_key = ((head >= heads) & (head < heads + kv_heads))[:, None]
    is_value = ((head >= heads + kv_heads) & (head < heads + 2 * kv_heads))[:, None]
    inside = lane < half
    real = (head < heads + 2 * kv_heads)[:, None] & inside[None, :]
    dim = 2 * half
    at = (token * (heads + 2 * kv_heads) + head[:, None]) * dim + lane[None, :]
    first = tl.load(qkv + at, mask=real, other=0.0).to(tl.float32)
    second = tl.load(qkv + at + half, mask=real, other=0.0).to(tl.float32)
    turned, other = first, second
    if CENTERED:
        mean = (tl.sum(first, axis=1) + tl.sum(second, axis=1))[:, None] / dim
        turned = tl.where(inside[None, :], first - mean, 0.0)
        other = tl.where(inside[None, :], second - mean, 0.0)
    if q_norm is not None:
        if means is not None:
            inverse = tl.rsqrt(tl.load(means + 2 * token + tl.where(is_query, 0, 1)) + eps)
        else:
            squares = tl.sum(turned * turned, axis=1) + tl.sum(other * other, axis=1)
            inverse = tl.rsqrt(squares / dim + eps)[:, None]
        turned, other = turned * inverse, other * inverse
    if BY_HEAD:
        of_q = q_norm + head[:, None] * dim + lane[None, :]
        of_k = k_norm + (head[:, None] - heads) * dim + lane[None, :]
        q_mask, k_mask = is_query & inside[None, :], is_key & inside[None, :]
        q_first = tl.load(of_q, mask=q_mask, other=0.0).to(tl.float32)
        q_second = tl.load(of_q + half, mask=q_mask, other=0.0).to(tl.float32)
        k_first = tl.load(of_k, mask=k_mask, other=0.0).to(tl.float32)
        k_second = tl.load(of_k + half, mask=k_mask, other=0.0).to(tl.float32)
        turned = turned * (q_first + k_first)
        other = other * (q_second + k_second)
    elif q_norm is not None:
        q_first = tl.load(q_norm + lane, mask=inside, other=0.0).to(tl.float32)[None, :]
        q_second = tl.load(q_norm + half + lane, mask=inside, other=0.0).to(tl.float32)[None, :]
        k_first = tl.load(k_norm + lane, mask=inside, other=0.0).to(tl.float32)[None, :]
        k_second = tl.load(k_norm + half + lane, mask=inside, other=0.0).to(tl.float32)[None, :]
        turned = turned * tl.where(is_query, q_first, k_first)
        other = other * tl.where(is_query, q_second, k_second)
    c = tl.load(cos + token * dim + lane, mask=inside, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * dim + half + lane, mask=inside, other=0.0).to(tl.float32)[None, :]
    turned, other = turned * c - other * s, other * c + turned * s

    to = (token * heads + head[:, None]) * dim + lane[None, :]
    mask = is_query & inside[None, :]
    tl.store(queries + to, turned.to(queries.dtype.element_ty), mask=mask)
    tl.store(queries + to + half, other.to(queries.dtype.element_ty), mask=mask)

    page, slot = tl.load(pages + token).to(tl.int64), tl.load(slots + token).to(tl.int64)
    there = (page >= 0) & (page < num_blocks) & (slot >= 0) & (slot < block_size)
    if tl.program_id(1) == 0:
        tl.store(status + token, tl.where(there, 0, 1))
    if there:
        key_head = head - heads
        value_head = key_head - kv_heads
        if k_scale is not None:
            divisor = tl.load(k_scale + key_head[:, None], mask=is_key, other=1.0)
            turned, other = turned / divisor, other / divisor
            divisor = tl.load(v_scale + value_head[:, None], mask=is_value, other=1.0)
            first, second = first / divisor, second / divisor
        dtype: tl.constexpr = keys.dtype.element_ty
        to = ((page * kv_heads + key_head[:, None]) * block_size + slot) * dim + lane[None, :]
        mask = is_key & inside[None, :]
        tl.store(keys + to, cast(turned, dtype), mask=mask)
        tl.store(keys + to + half, cast(other, dtype), mask=mask)
        to = ((page * kv_heads + value_head[:, None]) * block_size + slot) * dim + lane[None, :]
        mask = is_value & inside[None, :]
        tl.store(values + to, cast(first, dtype), mask=mask)
        tl.store(values + to + half, cast(second, dtype), mask=mask)


def rotate_into_cache(
    qkv: Tensor,
    rotation: Rotation,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    slots: Tensor,
    *,
    heads: int,
    norms: HeadNorms | None = None,
    means: Tensor | None = None,
    scales: CacheScales | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys (Su et al. 2021); write keys and values to their pages.

    Args:
        qkv: [T, (H + 2 Hk) * D], contiguous: the query heads, the keys, the values; float32,
            float16 or bfloat16. It is not modified.
        rotation: the rotation for each token, float32 or any of those dtypes.
        keys, values: [num_blocks, Hk, block_size, D], the layer's cache; qkv's dtype, or
            float8_e4m3fn, which saturates. Only the tokens' slots are written.
        pages, slots: int32 or int64 [T]; where to write each token. No two tokens may have the same
            page and slot.
        heads: H.
        norms: head norms, applied before the rotation; contiguous weights in any of those dtypes.
        means: for norms over all heads together: the mean squares of each token's queries and keys,
            float32 [T, 2], as from `mean_squares`. The weights are [H * D] and [Hk * D].
        scales: of an fp8 cache; None for 1. Refused for any other cache.

    Returns:
        the queries [T, H, D], qkv's dtype; and status int32 [T]: 1 if the token's page or slot is
        not in the cache and nothing was written, else 0.

    Raises:
        KernelError: the tensors do not match, or the GPU has no fp8.
    """
    check = functools.partial(require, "rotate_into_cache")
    check("keys's shape", list(keys.shape), keys.dim() == 4, "be [num_blocks, Hk, block_size, D]")
    num_blocks, kv_heads, block_size, dim = keys.shape
    fits = dim % 2 == 0 and 2 <= dim <= MAX_DIM
    check("keys's last axis", dim, fits, f"be even, from 2 to {MAX_DIM}")
    check("heads", heads, heads >= 0, "be at least 0")
    check("qkv's shape", list(qkv.shape), qkv.dim() == 2, "be a matrix")
    tokens = len(qkv)
    require_tensor(check, "qkv", qkv, (tokens, (heads + 2 * kv_heads) * dim), qkv.device, *RESULTS)
    for name, table in (("cos", rotation.cos), ("sin", rotation.sin)):
        require_tensor(check, f"rotation.{name}", table, (tokens, dim), qkv.device, *RESULTS)
    kept = (qkv.dtype, FP8) if scales is None else (FP8,)
    require_tensor(check, "keys", keys, tuple(keys.shape), qkv.device, *kept)
    require_tensor(check, "values", values, tuple(keys.shape), qkv.device, keys.dtype)
    if keys.dtype == FP8:
        require_fp8(check)
    for name, index in (("pages", pages), ("slots", slots)):
        require_tensor(check, name, index, (tokens,), qkv.device, torch.int32, torch.int64)
    if norms is not None:
        q_shape, k_shape = ((heads, dim), (kv_heads, dim)) if norms.q.dim() == 2 else ((dim,),) * 2
        if means is not None:
            q_shape, k_shape = (heads * dim,), (kv_heads * dim,)
        require_tensor(check, "norms.q", norms.q, q_shape, qkv.device, *RESULTS)
        require_tensor(check, "norms.k", norms.k, k_shape, qkv.device, *RESULTS)
    if means is not None:
        check("means", "given", norms is not None, "not be: there are no norms")
        centered = norms is not None and norms.is_centered
        check("means", "given", not centered, "not be: the norms are centered")
        require_tensor(check, "means", means, (tokens, 2), qkv.device, torch.float32)
    if scales is not None:
        require_tensor(check, "scales.k", scales.k, (kv_heads,), qkv.device, torch.float32)
        require_tensor(check, "scales.v", scales.v, (kv_heads,), qkv.device, torch.float32)
    queries = qkv.new_empty(tokens, heads, dim)
    status = torch.empty(tokens, dtype=torch.int32, device=qkv.device)
    if not tokens:
        return queries, status
    block_d = triton.next_power_of_2(dim // 2)
    count = heads + 2 * kv_heads
    block_h = min(max(1, TILE // block_d), triton.next_power_of_2(max(1, count)))
    rotate_heads[(tokens, max(1, -(-count // block_h)))](
        queries=queries,
        keys=keys,
        values=values,
        status=status,
        qkv=qkv,
        cos=rotation.cos,
        sin=rotation.sin,
        pages=pages,
        slots=slots,
        q_norm=None if norms is None else norms.q,
        k_norm=None if norms is None else norms.k,
        means=means,
        k_scale=None if scales is None else scales.k,
        v_scale=None if scales is None else scales.v,
        eps=0.0 if norms is None else float(norms.eps),
        heads=heads,
        kv_heads=kv_heads,
        num_blocks=num_blocks,
        block_size=block_size,
        half=dim // 2,
        CENTERED=norms is not None and norms.is_centered,
        BY_HEAD=norms is not None and (means is not None or norms.q.dim() == 2),
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        num_warps=min(4, max(1, block_h * block_d // 256)),
    )
    return queries, status
