"""Queries, keys and values on their way to attention, against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import compiled_kernels

from weft.kernels import reference
from weft.kernels.cpu.attention import AttentionPlan
from weft.kernels.cpu.rope import HeadNorms, Rotation, rotate_into_cache

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


@settings(max_examples=80, deadline=None)
@given(
    new=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    old=st.integers(0, 40),
    heads=st.sampled_from([(1, 1), (4, 2), (7, 1), (6, 6)]),
    dim=st.sampled_from([2, 8, 24, 64, 80, 128, 256, 320]),
    block_size=st.sampled_from([1, 4, 32]),
    with_norms=st.sampled_from(["none", "head", "each head"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    compiled=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_the_reference(
    new: list[int],
    old: int,
    heads: tuple[int, int],
    dim: int,
    block_size: int,
    with_norms: str,
    dtype: torch.dtype,
    compiled: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    num_heads, kv_heads = heads
    tokens = sum(new)
    width = -(-(old + max(new)) // block_size)
    table = np.random.default_rng(seed).permutation(len(new) * width).astype(np.int32)
    table = table.reshape(len(new), width)
    plan = AttentionPlan.build(
        np.cumsum([0, *new], dtype=np.int32),
        np.array([old + n for n in new], np.int32),
        table,
        block_size=block_size,
    )
    positions = torch.cat([torch.arange(old, old + n) for n in new])
    inv_freq = torch.rand(dim // 2)
    qkv = torch.randn(tokens, (num_heads + 2 * kv_heads) * dim).to(dtype)
    norms = None
    if with_norms == "head":
        norms = HeadNorms(torch.rand(dim).to(dtype), torch.rand(dim).to(dtype), 1e-5)
    elif with_norms == "each head":
        q_norm, k_norm = torch.rand(num_heads, dim), torch.rand(kv_heads, dim)
        norms = HeadNorms(q_norm.to(dtype), k_norm.to(dtype), 1e-5, is_centered=True)
    keys = torch.full((table.size, kv_heads, block_size, dim), torch.nan, dtype=dtype)
    values = keys.clone()

    q, k, v = (
        qkv.view(tokens, -1, dim).clone().tensor_split((num_heads, num_heads + kv_heads), dim=1)
    )
    if norms is not None:
        norm = reference.layer_norm if norms.is_centered else reference.rms_norm
        q, k = norm(q, norms.q, norms.eps), norm(k, norms.k, norms.eps)
    q, k = (reference.rope(x, positions, inv_freq) for x in (q, k))

    with compiled_kernels(compiled):
        rotation = Rotation.of(positions, inv_freq, dtype)
        got = rotate_into_cache(qkv, rotation, keys, values, plan, heads=num_heads, norms=norms)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.float(), q.float(), atol=tolerance, rtol=tolerance)
    request = np.repeat(np.arange(len(new)), new)
    for token, position in enumerate(positions.tolist()):
        page = table[request[token], position // block_size]
        slot = position % block_size
        cached = keys[page, :, slot].float()
        torch.testing.assert_close(cached, k[token].float(), atol=tolerance, rtol=tolerance)
        assert torch.equal(values[page, :, slot], v[token])


@pytest.mark.parametrize("compiled", [True, False])
def test_no_other_slot_is_written(compiled: bool) -> None:
    plan = AttentionPlan.build(
        np.array([0, 1], np.int32), np.array([6], np.int32), np.array([[1, 2]]), block_size=4
    )
    keys = torch.full((4, 2, 4, 8), 7.0).bfloat16()
    values = keys.clone()
    with compiled_kernels(compiled):
        rotation = Rotation.of(torch.tensor([5]), torch.rand(4), torch.bfloat16)
        rotate_into_cache(torch.randn(1, 48).bfloat16(), rotation, keys, values, plan, heads=2)
    for cache in (keys, values):
        assert (cache[2, :, 1] != 7).any()
        cache[2, :, 1] = 7
        assert (cache == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_other_ranks_have_is_not_written(dtype: torch.dtype) -> None:
    """Six tokens in pages of two: the second page belongs to the second rank."""
    step = np.array([0, 6], np.int32), np.array([6], np.int32), np.array([[1, 2]], np.int32)
    plan = AttentionPlan.build(*step, block_size=2, rank=1, world_size=2)
    qkv = torch.randn(6, 48).to(dtype)
    keys = torch.full((4, 2, 2, 8), 7.0, dtype=dtype)
    values = keys.clone()
    rotation = Rotation.of(torch.arange(6), torch.rand(4), dtype)
    v = qkv.view(6, 6, 8)[:, 4:].clone()
    rotate_into_cache(qkv, rotation, keys, values, plan, heads=2)
    assert torch.equal(values[1].transpose(0, 1), v[2:4])
    for cache in (keys, values):
        assert (cache[1] != 7).all()
        cache[1] = 7
        assert (cache == 7).all()
