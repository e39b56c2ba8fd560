"""The mixture of experts against its oracle."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import compiled_kernels
from torch import Tensor

from weft.kernels import reference
from weft.kernels.cpu.linear import Norm
from weft.kernels.cpu.moe import PackedExperts, route
from weft.kernels.cpu.quantized import make_rounded_linear

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def random_experts(count: int, inner: int, hidden: int, dtype: torch.dtype) -> list[Tensor]:
    shapes = ((count, inner, hidden), (count, inner, hidden), (count, hidden, inner))
    return [(torch.randn(shape) / shape[-1] ** 0.5).to(dtype) for shape in shapes]


def random_routes(tokens: int, experts: int, k: int) -> tuple[Tensor, Tensor]:
    """Draw distinct experts for each token; the first experts are more popular."""
    popularity = torch.arange(experts, 0, -1).float().expand(tokens, -1) ** 2
    ids = popularity.multinomial(k) if tokens else torch.empty(0, k, dtype=torch.int64)
    return ids, torch.rand(tokens, k)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 40),
    experts=st.integers(1, 9),
    k=st.integers(1, 9),
    sizes=st.sampled_from([(24, 16), (40, 72), (17, 33)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    with_norm=st.booleans(),
    with_residual=st.booleans(),
    compiled=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_the_reference(
    tokens: int,
    experts: int,
    k: int,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    with_norm: bool,
    with_residual: bool,
    compiled: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    inner, hidden = sizes
    weights = random_experts(experts, inner, hidden, dtype)
    x = torch.randn(tokens, hidden).to(dtype)
    norm = Norm(torch.rand(hidden).to(dtype), 1e-5) if with_norm else None
    residual = torch.randn(tokens, hidden).to(dtype) if with_residual else None
    ids, scale = random_routes(tokens, experts, min(k, experts))
    with compiled_kernels(compiled):
        got = PackedExperts(*weights)(x, ids, scale, norm=norm, residual=residual)
    assert got.dtype == dtype
    normed = x if norm is None else reference.rms_norm(x, norm.weight, norm.eps).to(dtype)
    expected = reference.moe(normed, *weights, ids, scale)
    if residual is not None:
        expected = expected + residual.float()
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.float(), expected, atol=tolerance, rtol=tolerance)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 100),
    experts=st.integers(1, 40),
    k=st.integers(1, 8),
    normalize=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    compiled=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_routes_to_the_most_probable(
    tokens: int,
    experts: int,
    k: int,
    normalize: bool,
    dtype: torch.dtype,
    compiled: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    k = min(k, experts)
    # Distinct in bfloat16, so that the order is unique.
    logits = torch.rand(tokens, experts).argsort(dim=-1).to(dtype) / 8
    with compiled_kernels(compiled):
        ids, weights = route(logits, k, normalize=normalize)
    probabilities = logits.float().softmax(dim=-1)
    expected, order = probabilities.sort(dim=-1, descending=True)
    expected = expected[:, :k]
    if normalize:
        expected = expected / expected.sum(dim=-1, keepdim=True)
    assert torch.equal(ids.long(), order[:, :k])
    torch.testing.assert_close(weights, expected)


@settings(max_examples=80, deadline=None)
@given(
    tokens=st.integers(0, 20),
    groups=st.integers(1, 4),
    size=st.integers(1, 6),
    top_groups=st.integers(1, 4),
    k=st.integers(1, 8),
    scoring=st.sampled_from(["softmax", "sigmoid"]),
    biased=st.booleans(),
    normalize=st.booleans(),
    scale=st.sampled_from([1.0, 2.5]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    compiled=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_scores_biases_and_groups_are_those_of_the_reference(
    tokens: int,
    groups: int,
    size: int,
    top_groups: int,
    k: int,
    scoring: Literal["softmax", "sigmoid"],
    biased: bool,
    normalize: bool,
    scale: float,
    dtype: torch.dtype,
    compiled: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    top_groups = min(top_groups, groups)
    k, experts = min(k, top_groups * size), groups * size
    # Distinct in bfloat16, so that the order is unique; the bias keeps it so.
    logits = torch.rand(tokens, experts).argsort(dim=-1).to(dtype) / 8
    bias = torch.rand(experts) if biased else None
    options: dict[str, Any] = {
        "normalize": normalize,
        "scoring": scoring,
        "groups": groups,
        "scale": scale,
    }
    options |= {"top_groups": top_groups, "bias": bias}
    with compiled_kernels(compiled):
        ids, weights = route(logits, k, **options)
    expected_ids, expected = reference.route(logits, k, **options)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("parts", [(0, 2, 6), (0, 0, 5, 6)])
def test_experts_elsewhere_add_nothing(parts: tuple[int, ...], compiled: bool) -> None:
    """The results of each rank's experts then add up to the results of all."""
    gate, up, down = random_experts(6, 48, 64, torch.bfloat16)
    x = torch.randn(9, 64).bfloat16()
    ids, scale = random_routes(9, 6, 3)
    with compiled_kernels(compiled):
        whole = PackedExperts(gate, up, down)(x, ids, scale)
        total = torch.zeros(9, 64)
        for first, end in pairwise(parts):
            here = slice(first, end)
            if first == end:  # those of a rank that no token wants
                unwanted = torch.full_like(ids, 7)
                out = PackedExperts(gate, up, down)(x, unwanted, scale)
                assert not out.any()
                continue
            some = PackedExperts(gate[here], up[here], down[here], first=first)
            total += some(x, ids, scale).float()
    torch.testing.assert_close(total, whole.float(), atol=0.02, rtol=0.02)


@pytest.mark.parametrize(("rounding", "error"), [("int8", 0.02), ("int4", 0.2)])
@pytest.mark.parametrize("compiled", [True, False])
def test_rounded_experts_are_near_those_of_bfloat16(
    rounding: str, error: float, compiled: bool
) -> None:
    gate, up, down = random_experts(4, 48, 64, torch.bfloat16)
    x = torch.randn(20, 64).bfloat16()
    ids, scale = random_routes(20, 4, 2)
    with compiled_kernels(compiled):
        make = partial(make_rounded_linear, rounding)
        got = PackedExperts(gate, up, down, make)(x, ids, scale)
    expected = reference.moe(x, gate, up, down, ids, scale)
    assert (got.float() - expected).norm() < error * expected.norm()


def test_a_compiled_token_does_not_depend_on_its_company() -> None:
    with compiled_kernels(True):
        layer = PackedExperts(*random_experts(6, 40, 64, torch.bfloat16))
        x = torch.randn(50, 64).bfloat16()
        ids, scale = random_routes(50, 6, 3)
        together = layer(x, ids, scale)
        for start, end in ((0, 1), (7, 9), (30, 50)):
            part = layer(x[start:end], ids[start:end], scale[start:end])
            assert torch.equal(together[start:end], part)


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
