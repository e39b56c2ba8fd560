"""Layers and their halves in one call give the same results as their kernels in sequence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import compiled_kernels

from weft.kernels.cpu.attention import AttentionPlan, paged_attention
from weft.kernels.cpu.layer import NativeAttention, NativeLayers, NativeMlp
from weft.kernels.cpu.linear import NativeLinear, Norm
from weft.kernels.cpu.rope import HeadNorms, Rotation, rotate_into_cache


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def layer_norm(hidden: int) -> Norm:
    return Norm(normal(hidden), 1e-5, is_centered=True, bias=normal(hidden))


@settings(max_examples=60, deadline=None)
@given(
    new=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    old=st.integers(0, 40),
    heads=st.sampled_from([(1, 1), (4, 2), (7, 1)]),
    dim=st.sampled_from([2, 24, 64]),
    hidden=st.integers(1, 70),
    window=st.sampled_from([None, 5]),
    with_bias=st.booleans(),
    with_norms=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_attention(
    new: list[int],
    old: int,
    heads: tuple[int, int],
    dim: int,
    hidden: int,
    window: int | None,
    with_bias: bool,
    with_norms: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    num_heads, kv_heads = heads
    width, block_size = -(-(old + max(new)) // 4), 4
    table = np.random.default_rng(seed).permutation(len(new) * width).astype(np.int32)
    plan = AttentionPlan.build(
        np.cumsum([0, *new], dtype=np.int32),
        np.array([old + n for n in new], np.int32),
        table.reshape(len(new), width),
        block_size=block_size,
    )
    outputs = (num_heads + 2 * kv_heads) * dim
    norm = layer_norm(hidden) if with_bias else Norm(normal(hidden), 1e-5)
    head_norms = HeadNorms(normal(dim), normal(dim), 1e-6) if with_norms else None
    x = normal(sum(new), hidden)
    caches = [normal(table.size, kv_heads, block_size, dim) for _ in range(2)]
    with compiled_kernels(True):
        rotation = Rotation.of(
            torch.cat([torch.arange(old, old + n) for n in new]), torch.rand(dim // 2), x.dtype
        )
        qkv = NativeLinear(normal(outputs, hidden), normal(outputs) if with_bias else None)
        o = NativeLinear(normal(hidden, num_heads * dim))
        layer = NativeAttention(
            *(qkv, o, norm, head_norms),
            heads=num_heads,
            kv_heads=kv_heads,
            head_dim=dim,
            scale=dim**-0.5,
            sliding_window=window,
        )
        keys, values = (cache.clone() for cache in caches)
        got = layer(x, rotation, keys, values, plan)
        q = rotate_into_cache(
            qkv(x, norm=norm), rotation, *caches, plan, heads=num_heads, norms=head_norms
        )
        attended = paged_attention(q, *caches, plan, scale=dim**-0.5, sliding_window=window)
        wanted = o(attended.view(len(x), -1), residual=x)
    assert torch.equal(got, wanted)
    assert torch.equal(keys, caches[0])
    assert torch.equal(values, caches[1])


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 70),
    hidden=st.integers(1, 70),
    inner=st.integers(1, 130),
    seed=st.integers(0, 2**31),
)
def test_mlp(tokens: int, hidden: int, inner: int, seed: int) -> None:
    torch.manual_seed(seed)
    norm, x = layer_norm(hidden), normal(hidden, tokens).T
    with compiled_kernels(True):
        gate_up = NativeLinear(normal(2 * inner, hidden), gated=True)
        down = NativeLinear(normal(hidden, inner))
        stream = normal(hidden, tokens).T
        wanted = down(gate_up(x, norm=norm), residual=stream)
        assert torch.equal(NativeMlp(gate_up, down, norm)(x, stream), wanted)


def small_layer(
    hidden: int, window: int | None, *, is_parallel: bool
) -> tuple[NativeAttention, NativeMlp]:
    """Make a layer with two heads that share keys of 8 numbers."""
    norm = layer_norm(hidden)
    attention = NativeAttention(
        *(NativeLinear(normal(4 * 8, hidden)), NativeLinear(normal(hidden, 2 * 8))),
        *(norm, None),
        heads=2,
        kv_heads=1,
        head_dim=8,
        scale=0.3,
        sliding_window=window,
    )
    gate_up = NativeLinear(normal(2 * 12, hidden), gated=True)
    down = NativeLinear(normal(hidden, 12))
    return attention, NativeMlp(gate_up, down, norm, is_parallel=is_parallel)


@settings(max_examples=30, deadline=None)
@given(
    new=st.lists(st.integers(1, 9), max_size=3),
    windows=st.lists(st.sampled_from([None, 3]), min_size=1, max_size=4),
    hidden=st.integers(1, 40),
    is_parallel=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_layers(
    new: list[int], windows: list[int | None], hidden: int, is_parallel: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    plan = AttentionPlan.build(
        np.cumsum([0, *new], dtype=np.int32),
        np.array(new, np.int32),
        np.arange(len(new) * 3, dtype=np.int32).reshape(len(new), 3),
        block_size=4,
    )
    # Pages with their old contents: each layer must write its own.
    cache = [(normal(9, 1, 4, 8), normal(9, 1, 4, 8)) for _ in windows]
    other = [(keys.clone(), values.clone()) for keys, values in cache]
    x = normal(sum(new), hidden)
    with compiled_kernels(True):
        positions = torch.cat([torch.empty(0), *map(torch.arange, new)])
        rotation = Rotation.of(positions, torch.rand(4), x.dtype)
        layers = [small_layer(hidden, window, is_parallel=is_parallel) for window in windows]
        wanted = x
        for (attention, mlp), (keys, values) in zip(layers, other, strict=True):
            stream = attention(wanted, rotation, keys, values, plan)
            wanted = mlp(wanted if is_parallel else stream, stream)
        assert torch.equal(NativeLayers(layers)(x, rotation, cache, plan), wanted)
        for pair, other_pair in zip(cache, other, strict=True):
            assert all(map(torch.equal, pair, other_pair))
        with pytest.raises(ValueError, match="cache has"):
            NativeLayers(layers)(x, rotation, cache[1:], plan)


def test_other_shapes_are_refused() -> None:
    with compiled_kernels(True):
        mlp = NativeMlp(
            NativeLinear(normal(8, 6), gated=True),
            NativeLinear(normal(6, 4)),
            Norm(normal(6), 1e-5),
        )
        with pytest.raises(ValueError, match="residual is"):
            mlp(normal(3, 6), normal(2, 6))
        for x in (normal(3, 5), torch.zeros(3, 6)):
            with pytest.raises(ValueError, match="x is"):
                mlp(x, x)
