"""Routing and the order of the experts, against their oracles; ties, NaN, ids out of range."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.faults import planted
from support.overlapped import DTYPES, SEEDS
from support.rows import bounded, finds, same

from weft.kernels import reference
from weft.kernels.cpu.moe import route as route_on_cpu
from weft.kernels.gpu.experts import routing
from weft.kernels.gpu.experts.routing import route, sort_by_expert
from weft.kernels.gpu.runtime.arguments import KernelError


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    with bounded():
        yield


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 10),
    experts=st.integers(1, 70),
    data=st.data(),
    ties=st.booleans(),
    normalize=st.booleans(),
    dtype=DTYPES,
    seed=SEEDS,
)
def test_softmax(
    tokens: int,
    experts: int,
    data: st.DataObject,
    ties: bool,
    normalize: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    top_k = data.draw(st.integers(1, min(experts, 12)))
    logits = torch.randn(tokens, experts).to(dtype) * 2
    if ties:
        logits = logits.round()
    ids, weights = route(logits, top_k, normalize=normalize)
    expected_ids, expected = reference.route(logits, top_k, normalize=normalize)
    same(ids, expected_ids)
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-5)
    if dtype == torch.float32 and not ties:
        same(ids, route_on_cpu(logits, top_k, normalize=normalize)[0])


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 6),
    groups=st.sampled_from([1, 2, 3, 8]),
    size=st.integers(2, 9),
    data=st.data(),
    scoring=st.sampled_from(["softmax", "sigmoid"]),
    biased=st.booleans(),
    normalize=st.booleans(),
    scale=st.sampled_from([1.0, 2.5]),
    seed=SEEDS,
)
def test_groups_and_bias(
    tokens: int,
    groups: int,
    size: int,
    data: st.DataObject,
    scoring: str,
    biased: bool,
    normalize: bool,
    scale: float,
    seed: int,
) -> None:
    """Rounding decides nothing: without a bias scores tie or are far apart, with one the latter."""
    torch.manual_seed(seed)
    top_groups = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, min(top_groups * size, 10)))
    logits = torch.randint(0, 9, (tokens, groups * size)) / 2
    bias = 2 * torch.rand(groups * size) if biased else None
    options = {"scoring": scoring, "bias": bias, "groups": groups, "top_groups": top_groups}
    options |= {"normalize": normalize, "scale": scale}
    ids, weights = route(logits, top_k, **options)  # type: ignore[arg-type]
    expected_ids, expected = reference.route(logits, top_k, **options)  # type: ignore[arg-type]
    same(ids, expected_ids)
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_whatever_the_logits_are_experts_are_different_and_there() -> None:
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    logits = torch.stack(
        [odd[torch.randint(0, 4, (12,))] for _ in range(20)] + [odd[:1].expand(12)]
    )
    for scoring in ("softmax", "sigmoid"):
        for bias in (None, odd.repeat(3)):
            ids, _ = route(
                *(logits, 6),
                normalize=True,
                scoring=scoring,
                bias=bias,  # type: ignore[arg-type]
                groups=3,
                top_groups=2,  # type: ignore[arg-type]
            )
            assert ((ids >= 0) & (ids < 12)).all()
            assert all(len(set(row)) == 6 for row in ids.tolist())


def test_a_token_with_nan_has_nan_weights_and_no_other_has() -> None:
    logits = torch.randn(3, 8)
    logits[1, 5] = torch.nan
    _, weights = route(logits, 2, normalize=True)
    assert weights[1].isnan().all()
    same(weights[2:], route(logits[2:], 2, normalize=True)[1])


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(0, 90),
    k=st.integers(1, 5),
    experts=st.sampled_from([1, 2, 5, 8, 33]),
    first=st.sampled_from([0, 7]),
    max_tiles=st.sampled_from([1, 3, 128]),
    strays=st.booleans(),
    one=st.booleans(),
    seed=SEEDS,
)
def test_order(
    tokens: int,
    k: int,
    experts: int,
    first: int,
    max_tiles: int,
    strays: bool,
    one: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    reach = 3 if strays else 0
    ids = torch.randint(-reach, experts + reach, (tokens, k), dtype=torch.int32)
    if one:
        ids.fill_(experts - 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "MAX_TILES", max_tiles)
        got = sort_by_expert(ids + first, experts, first)
    for part, expected in zip(got, reference.sort_by_expert(ids, experts), strict=True):
        same(part, expected)


@pytest.mark.parametrize("first", [0, 5])
def test_far_ids_are_flagged(first: int) -> None:
    ids = torch.tensor([[0, 2**31 - 1], [1, 0], [-(2**31), 1]], dtype=torch.int32)
    ids[ids.abs() < 2] += first
    offsets, order, inverse, status = sort_by_expert(ids, 2, first)
    assert status.tolist() == [1, 0, 1]
    assert offsets.tolist() == [0, 2, 4]
    assert order.tolist() == [0, 3, 2, 5, 1, 4]
    assert inverse.tolist() == [[0, -1], [2, 1], [-1, 3]]


# Refusals.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, "top_k is 0; it must be a whole number of at least 1"),
        ({"top_k": 13}, "top_k is 13; it must be at most 12, the experts of 1 groups"),
        ({"groups": 5}, "groups is 5; it must divide the 12 experts"),
        ({"groups": 3, "top_groups": 4}, "top_groups is 4; it must be at most 3"),
        ({"groups": 3, "top_k": 5}, "top_k is 5; it must be at most 4, the experts of 1 groups"),
        ({"scoring": "max"}, "scoring is 'max'; it must be softmax or sigmoid"),
        ({"bias": torch.zeros(11)}, r"bias's shape is \[11\]; it must be \[12\]"),
        ({"bias": torch.zeros(12).half()}, "bias's dtype is torch.float16; it must be torch.float"),
        (
            {"groups": 12, "bias": torch.zeros(12), "top_k": 1},
            "must have at least two experts",
        ),
        ({"logits": torch.zeros(4)}, r"logits's shape is \[4\]; it must be a matrix"),
        ({"logits": torch.zeros(12, 4).T}, "logits's stride"),
        ({"logits": torch.zeros(4, 0)}, "experts is 0; it must be from 1 to 1024"),
        ({"logits": torch.zeros(4, 40), "top_k": 33}, "top_k is 33; it must be at most 32"),
    ],
)
def test_what_cannot_be_routed(options: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"logits": torch.zeros(4, 12), "top_k": 2, "normalize": True}
    with pytest.raises(KernelError, match=f"^route: .*{message}"):
        route(**arguments | options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ids", "experts", "message"),
    [
        (torch.zeros(4, dtype=torch.int32), 2, r"ids's shape is \[4\]; it must be \[T, k\]"),
        (torch.zeros(4, 0, dtype=torch.int32), 2, r"ids's shape is \[4, 0\]"),
        (torch.zeros(4, 33, dtype=torch.int32), 2, "k from 1 to 32"),
        (torch.zeros(4, 2), 2, "ids's dtype is torch.float32; it must be torch.int32"),
        (torch.zeros(4, 2, dtype=torch.int32), 0, "experts is 0; it must be a whole number"),
        (torch.zeros(4, 2, dtype=torch.int32), 1025, "experts is 1025; it must be at most 1024"),
    ],
)
def test_what_cannot_be_sorted(ids: torch.Tensor, experts: int, message: str) -> None:
    with pytest.raises(KernelError, match=f"^sort_by_expert: .*{message}"):
        sort_by_expert(ids, experts)


# Planted faults.


def check_route(module: ModuleType) -> None:
    torch.manual_seed(0)
    logits, bias = torch.randint(0, 9, (12, 18)) / 2, torch.randint(0, 4, (18,)) / 2
    options = {"normalize": True, "scoring": "sigmoid", "bias": bias, "groups": 6, "top_groups": 2}
    got = module.route(logits, 4, **options)
    for part, expected in zip(got, reference.route(logits, 4, **options), strict=True):  # type: ignore[arg-type]
        torch.testing.assert_close(part, expected)
    nan = torch.full((1, 18), torch.nan)
    ids, _ = module.route(nan, 4, **options)
    assert ((ids >= 0) & (ids < 18)).all()


def check_order(module: ModuleType) -> None:
    """In many tiles, in one of several blocks, and in one launch."""
    torch.manual_seed(0)
    for tokens, max_tiles in ((150, 128), (150, 1), (40, 1)):
        ids = torch.randint(-1, 6, (tokens, 3), dtype=torch.int32)
        right = reference.sort_by_expert(ids, 5)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "MAX_TILES", max_tiles)
            got = module.sort_by_expert(ids + 2, 5, 2)
        for part, expected in zip(got, right, strict=True):
            same(part, expected)


def test_nothing_is_found_without_a_fault() -> None:
    assert not finds(check_route, routing)
    assert not finds(check_order, routing)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "first = tl.min(found, axis=0)",
            "first = tl.max(tl.where(found == NONE, -1, found), axis=0)",
        ),
        ("best += tl.max", "best = tl.max"),
        ("others = free & (expert != of_best[:, None])", "others = free"),
        ("free = free & (expert != first)", "free = free & (expert < NONE)"),
        ("tl.where(expert == first, score, 0.0)", "tl.where(expert == first, choice, 0.0)"),
        ('choice = tl.where(choice == choice, choice, float("-inf"))', "choice = choice"),
    ],
    ids=["last of equals", "second alone", "best twice", "taken twice", "biased weight", "order"],
)
def test_a_fault_in_routing_is_found(old: str, new: str, tmp_path: Path) -> None:
    assert finds(check_route, planted(routing, tmp_path, (old, new)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(id < 0) | (id >= experts)", "id >= experts"),
        ("good = (pair < end) & (id >= 0)", "good = (pair < end)"),
        ("other=0) - first\n        good", "other=0)\n        good"),
        ("other=0) - first\n        bad", "other=0)\n        bad"),
        ("tl.where(expert < experts, total, 0)", "total"),
        ("begin + before", "begin"),
        ("other < tile", "other <= tile"),
        ("tl.cumsum(mine, axis=0) - mine", "tl.cumsum(mine, axis=0, reverse=True) - mine"),
        ("        place_of_next += tl.sum(mine, axis=0)\n", ""),
        ("        place_of_bad += tl.sum(bad, axis=0)\n", ""),
        ("- tl.sum(before, axis=0)", ""),
    ],
)
def test_a_fault_in_the_order_is_found(old: str, new: str, tmp_path: Path) -> None:
    assert finds(check_order, planted(routing, tmp_path, (old, new)))
