"""The largest and the k largest of rows, and draws, against oracles and the CPU's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from support.faults import planted
from support.overlapped import DTYPES, SEEDS
from support.rows import bounded, finds, same

from weft.kernels import reference
from weft.kernels.cpu.sampling import argmax as argmax_on_cpu
from weft.kernels.gpu.rowwise import sampling
from weft.kernels.gpu.rowwise.sampling import argmax, top_k, uniform
from weft.kernels.gpu.runtime.arguments import KernelError
from weft.models.interface import SlotSampling
from weft.models.torch import draw as cpu_draw
from weft.models.torch.logits import Logits

SIZES = st.one_of(st.integers(1, 60), st.sampled_from([4095, 4097, 8193, 20000]))


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    with bounded():
        yield


def numbers(rows: int, columns: int, dtype: torch.dtype, seed: int, *, ties: bool) -> torch.Tensor:
    torch.manual_seed(seed)
    x = torch.randn(rows, columns)
    return (x.round() if ties else x).to(dtype)


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(0, 4),
    columns=SIZES,
    dtype=DTYPES,
    ties=st.booleans(),
    odd=st.sampled_from([None, torch.nan, torch.inf, -torch.inf]),
    seed=SEEDS,
)
def test_argmax(
    rows: int, columns: int, dtype: torch.dtype, ties: bool, odd: float | None, seed: int
) -> None:
    x = numbers(rows, columns, dtype, seed, ties=ties)
    if odd is not None:
        x[:, torch.randint(0, columns, (3,))] = odd
        x[1:2] = -torch.inf
    largest, index = argmax(x)
    for row, one, at in zip(x.float(), largest, index, strict=True):
        whole = row.numpy()
        first = int(np.argmax(whole))  # of NaN too
        assert at == first
        np.testing.assert_equal(one.item(), whole[first].item())
    if odd is None:
        for got, expected in zip((largest, index), argmax_on_cpu(x), strict=True):
            same(got, expected)


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(0, 3),
    columns=SIZES,
    data=st.data(),
    dtype=DTYPES,
    ties=st.booleans(),
    seed=SEEDS,
)
def test_top_k(
    rows: int, columns: int, data: st.DataObject, dtype: torch.dtype, ties: bool, seed: int
) -> None:
    x = numbers(rows, columns, dtype, seed, ties=ties)
    k = data.draw(st.integers(1, min(columns, 300)))
    for got, expected in zip(top_k(x, k), reference.top_k(x, k), strict=True):
        same(got, expected)


def test_signs_infinities_and_zeros_have_their_order() -> None:
    x = torch.tensor([[-torch.inf, -1.0, -0.0, 0.0, 1e-45, -1e-45, 1.0, torch.inf, 3e38, -3e38]])
    for k in range(1, 11):
        for got, expected in zip(top_k(x, k), reference.top_k(x, k), strict=True):
            same(got, expected)


def test_nan_gives_ids_that_are_there() -> None:
    x = torch.full((2, 9), torch.nan)
    x[1, 4:] = 1.0
    _, ids = top_k(x, 5)
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 2


@pytest.mark.parametrize(
    ("x", "k", "message"),
    [
        (torch.zeros(3), 1, r"x's shape is \[3\]; it must be a matrix"),
        (torch.zeros(3, 0), 1, "x's columns is 0; it must be from 1"),
        (torch.zeros(2, 3), 0, "k is 0; it must be a whole number of at least 1"),
        (torch.zeros(2, 3), 4, "k is 4; it must be at most 3, the number of columns"),
        (torch.zeros(3, 2).T, 1, "x's stride"),
        (torch.zeros(3, 2, dtype=torch.int64), 1, "x's dtype is torch.int64"),
    ],
)
def test_what_cannot_be_taken(x: torch.Tensor, k: int, message: str) -> None:
    with pytest.raises(KernelError, match=f"^top_k: {message}"):
        top_k(x, k)
    if message.startswith("x"):
        with pytest.raises(KernelError, match=f"^argmax: {message}"):
            argmax(x)


# The draw.


@triton.jit
def store_numbers(out, seeds, index):
    """Grid: (n,)."""
    at = tl.program_id(0)
    tl.store(out + at, uniform(tl.load(seeds + at), tl.load(index + at)))


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40)), min_size=1))
def test_the_number_of_a_seed_is_the_cpus_to_the_bit(streams: list[tuple[int, int]]) -> None:
    seeds, index = torch.tensor(streams).T.contiguous()
    out = torch.empty(len(streams), dtype=torch.float64)
    store_numbers[(len(streams),)](out, seeds, index)
    assert out.tolist() == [reference.uniform(*stream) for stream in streams]
    assert out.tolist() == cpu_draw.uniform(*zip(*streams, strict=True)).tolist()


DRAWS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1e-30, 0.3, 1.0, 4.0]),
        "top_k": st.sampled_from([0, 1, 2, 7, 2000]),
        "top_p": st.sampled_from([1e-6, 0.37, 0.8123, 1.0]),
        "min_p": st.sampled_from([0.0, 0.0123, 0.51, 1.0]),
    }
)
KINDS = {"top_k": torch.int32, "top_p": torch.float64}


def drawn(
    module: ModuleType, logits: torch.Tensor, shaped: list[dict[str, float]], seed: int
) -> tuple[list[int], list[float]]:
    """Tokens that are drawn among all columns, and the numbers that they are drawn with."""
    rows, columns = logits.shape
    ids = torch.arange(columns, dtype=torch.int32).repeat(rows, 1) * 3
    seeds, index = torch.arange(rows) + seed, torch.arange(rows)
    tensors = {
        name: torch.tensor([one[name] for one in shaped], dtype=KINDS.get(name, torch.float32))
        for name in ("temperature", "top_k", "top_p", "min_p")
    }
    tokens = module.draw(logits, ids, seeds, index, **tensors).tolist()
    assert all(token % 3 == 0 for token in tokens)
    return [token // 3 for token in tokens], [
        reference.uniform(*one) for one in zip(seeds.tolist(), index.tolist(), strict=True)
    ]


def near(logits: torch.Tensor, u: float, **shaped: Any) -> set[int]:
    """The oracle's token, and those whose border with it is as near as a rounding to u."""
    around = (max(0.0, u - 1e-5), u, min(u + 1e-5, 1 - 1e-9))
    return {reference.draw(logits, number, **shaped) for number in around}


@settings(max_examples=12, deadline=None)
@given(
    shaped=st.lists(DRAWS, max_size=4),
    columns=st.one_of(st.integers(1, 40), st.sampled_from([129, 1024])),
    ties=st.booleans(),
    seed=st.integers(-1000, 1000),
)
def test_draw(shaped: list[dict[str, float]], columns: int, ties: bool, seed: int) -> None:
    logits = numbers(len(shaped), columns, torch.float32, seed, ties=ties)
    logits[1:2, columns // 2 + 1 :] = -torch.inf
    tokens, us = drawn(sampling, logits, shaped, seed)
    for row, token, u, one in zip(logits, tokens, us, shaped, strict=True):
        assert token in near(row, u, **one)


def test_draws_of_the_k_largest_are_those_of_the_whole_vocabulary() -> None:
    """As the CPU draws them, whose top-k is the row's own."""
    rows, seed = 20, 5
    logits = numbers(rows, 3000, torch.float32, seed, ties=False) * 2
    shaped = [
        {"temperature": 0.8, "top_k": 1 + i, "top_p": 0.9123, "min_p": 0.01} for i in range(rows)
    ]
    values, ids = top_k(logits, 2 * rows)
    at, us = drawn(sampling, values, shaped, seed)
    tokens = ids.gather(1, torch.tensor(at)[:, None]).flatten().tolist()
    slots = [SlotSampling(slot=i, **one) for i, one in enumerate(shaped)]  # type: ignore[arg-type]
    whole, u = Logits.whole(logits.clone()), torch.tensor(us, dtype=torch.float64)
    expected = cpu_draw.draw(whole, slots, u).tolist()
    differ = [i for i in range(rows) if tokens[i] != expected[i]]
    assert all(tokens[i] in near(logits[i], us[i], **shaped[i]) for i in differ)
    assert len(differ) < 2


def test_a_row_without_numbers_gives_a_token_that_is_there() -> None:
    logits = torch.full((3, 5), torch.nan)
    logits[1], logits[2] = -torch.inf, torch.inf
    shaped: list[dict[str, float]] = [
        {"temperature": 1.0, "top_k": 2, "top_p": 0.5, "min_p": 0.1}
    ] * 3
    tokens, _ = drawn(sampling, logits, shaped, 1)
    assert all(0 <= token < 5 for token in tokens)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"values": torch.zeros(2, 1025)}, "values's columns is 1025; it must be from 1 to 1024"),
        ({"ids": torch.zeros(2, 4, dtype=torch.int32)}, r"ids's shape is \[2, 4\]"),
        ({"seeds": torch.zeros(2)}, "seeds's dtype is torch.float32; it must be torch.int64"),
        ({"top_p": torch.ones(2)}, "top_p's dtype is torch.float32; it must be torch.float64"),
        ({"top_k": torch.ones(3, dtype=torch.int32)}, r"top_k's shape is \[3\]"),
    ],
)
def test_what_cannot_be_drawn(changes: dict[str, torch.Tensor], message: str) -> None:
    operands: dict[str, torch.Tensor] = {
        "values": torch.zeros(2, 3),
        "ids": torch.zeros(2, 3, dtype=torch.int32),
        **{name: torch.zeros(2, dtype=torch.int64) for name in ("seeds", "index")},
        **{name: torch.ones(2) for name in ("temperature", "min_p")},
        "top_k": torch.ones(2, dtype=torch.int32),
        "top_p": torch.ones(2, dtype=torch.float64),
    }
    with pytest.raises(KernelError, match=f"^draw: {message}"):
        sampling.draw(**operands | changes)  # type: ignore[arg-type]


# Planted faults.


def check(module: ModuleType) -> None:
    x = numbers(3, 9000, torch.float32, 0, ties=True)
    x[2, 8500] = torch.nan
    largest, index = module.argmax(x)
    assert index.tolist() == [int(row.argmax()) for row in x.numpy()]
    assert largest[2].isnan()
    x = numbers(2, 5000, torch.float32, 0, ties=False)
    x[1] = x[1].round()
    for k in (1, 40, 2500, 4999):
        for got, expected in zip(module.top_k(x, k), reference.top_k(x, k), strict=True):
            same(got, expected)


def test_nothing_is_found_without_a_fault() -> None:
    assert not finds(check, sampling)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("nan = inside & (x != x)", "nan = inside & (x > x)"),
        (
            "tl.where(inside & (x == largest), column, NONE)",
            "tl.where(x == largest, column + 1, NONE)",
        ),
        ("span * SPAN + tl.arange", "tl.arange"),
        ("bits ^ 0x7FFFFFFF", "bits"),
        ("tl.where(x == 0.0, 0.0, x)", "x"),
        ("numbers = x + row * V", "numbers = x + row * 0"),
        ("<= missing)))", "< missing)))"),
        ("missing -= tl.minimum(missing, tl.sum(equal, axis=0))", "missing -= missing"),
        ("place += tl.sum", "place += 0 * tl.sum"),
    ],
)
def test_a_fault_is_found(old: str, new: str, tmp_path: Path) -> None:
    assert finds(check, planted(sampling, tmp_path, (old, new)))


def check_draw(module: ModuleType) -> None:
    logits = numbers(40, 60, torch.float32, 0, ties=False)
    shaped = [
        {
            "temperature": 0.5 + i % 3,
            "top_k": (0, 5, 20)[i % 3],
            "top_p": (0.51, 1.0)[i % 2],
            "min_p": (0.0, 0.0512, 0.3)[i % 5 % 3],
        }
        for i in range(len(logits))
    ]
    tokens, us = drawn(module, logits, shaped, 3)
    for row, token, u, one in zip(logits, tokens, us, shaped, strict=True):
        assert token in near(row, u, **one)


def test_nothing_is_found_in_the_draw_without_a_fault() -> None:
    assert not finds(check_draw, sampling)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("state ^ (state >> 30)", "state ^ (state >> 29)"),
        ("(index + 1)", "(index + 2)"),
        ("tl.where(k > 0, k, BLOCK + 1)", "tl.where(k > 0, k + 1, BLOCK + 1)"),
        ("(order >= kth)", "(order > kth)"),
        ("below / tl.maximum(tl.load(temperature + row), TINY)", "below"),
        ("tl.load(min_p + row)", "0.0"),
        ("range(31)", "range(8)"),
        ("tl.where(wanted < 1, wanted, 2.0)", "2.0"),
        ("mass > u * tl.max(mass, axis=0)", "mass > u"),
        ("tl.where(beyond, place, last)", "tl.where(beyond, place + 1, last)"),
        ("values + row * N", "values"),
    ],
)
def test_a_fault_of_the_draw_is_found(old: str, new: str, tmp_path: Path) -> None:
    assert finds(check_draw, planted(sampling, tmp_path, (old, new)))
