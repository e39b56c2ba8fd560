"""The mixture of experts against its oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.kernels import reference
from weft.kernels.cpu.moe import PackedExperts

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def random_experts(count: int, inner: int, hidden: int, dtype: torch.dtype) -> list[Tensor]:
    shapes = ((count, inner, hidden), (count, inner, hidden), (count, hidden, inner))
    return [(torch.randn(shape) / shape[-1] ** 0.5).to(dtype) for shape in shapes]


def random_routes(tokens: int, experts: int, k: int) -> tuple[Tensor, Tensor]:
    """Distinct experts for each token; the first ones are the more popular."""
    popularity = torch.arange(experts, 0, -1).float().expand(tokens, -1) ** 2
    ids = popularity.multinomial(k) if tokens else torch.empty(0, k, dtype=torch.int64)
    return ids, torch.rand(tokens, k)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 40),
    experts=st.integers(1, 9),
    k=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_equals_the_reference(
    tokens: int, experts: int, k: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    weights = random_experts(experts, 24, 16, dtype)
    x = torch.randn(tokens, 16).to(dtype)
    ids, scale = random_routes(tokens, experts, min(k, experts))
    got = PackedExperts(*weights)(x, ids, scale)
    assert got.dtype == dtype
    expected = reference.moe(x, *weights, ids, scale)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.float(), expected, atol=tolerance, rtol=tolerance)


def test_experts_without_tokens_do_not_matter() -> None:
    gate, up, down = random_experts(4, 24, 16, torch.float32)
    x, ids, scale = torch.randn(6, 16), torch.tensor([[1, 3]] * 6), torch.rand(6, 2)
    expected = PackedExperts(gate, up, down)(x, ids, scale)
    for weight in (gate, up, down):
        weight[[0, 2]] = torch.nan
    assert torch.equal(PackedExperts(gate, up, down)(x, ids, scale), expected)


def test_a_token_that_is_not_finite_stays_alone() -> None:
    layer = PackedExperts(*random_experts(4, 24, 16, torch.float32))
    x = torch.randn(6, 16)
    ids, scale = random_routes(6, 4, 2)
    expected = layer(x, ids, scale)
    x[2] = torch.nan
    got = layer(x, ids, scale)
    others = [0, 1, 3, 4, 5]
    assert got[2].isnan().all()
    assert torch.equal(got[others], expected[others])


def test_shapes_that_do_not_fit_are_refused() -> None:
    gate, up, down = random_experts(3, 24, 16, torch.float32)
    with pytest.raises(ValueError, match=r"expert 0 has .* and down \(24, 16\)"):
        PackedExperts(gate, up, up)
    with pytest.raises(ValueError, match="shorter"):
        PackedExperts(gate, up[:2], down)
