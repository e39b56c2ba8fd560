"""Queries, keys and values on their way to attention, against the oracle and the CPU's kernel."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.faults import planted
from support.overlapped import DTYPES, FP8, SEEDS
from support.rows import Fenced, bounded, finds, same
from torch import Tensor

from weft.kernels import reference
from weft.kernels.cpu import rope as on_cpu
from weft.kernels.cpu.attention import AttentionPlan
from weft.kernels.cpu.rope import HeadNorms, Rotation
from weft.kernels.gpu.rowwise import rope, rows
from weft.kernels.gpu.rowwise.norm import mean_squares
from weft.kernels.gpu.rowwise.rope import CacheScales, rotate_into_cache
from weft.kernels.gpu.runtime.arguments import KernelError

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2, FP8: 7e-2}
EPS = 1e-5


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    with bounded():
        yield


def near(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.float(), expected.float(), atol=tolerance, rtol=tolerance)


def expected(
    qkv: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    heads: int,
    dim: int,
    norms: HeadNorms | None,
    *,
    over_all: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys, values of each token: float32 [T, heads, D]."""
    count = qkv.shape[1] // dim
    parts = (heads, heads + (count - heads) // 2)
    q, k, v = qkv.view(len(qkv), count, dim).tensor_split(parts, dim=1)
    if norms is not None and norms.is_centered:
        q, k = (
            reference.layer_norm(part, weight, EPS) for part, weight in ((q, norms.q), (k, norms.k))
        )
    elif norms is not None:
        parts = ((q, norms.q), (k, norms.k))
        q, k = (
            reference.rms_norm(part.flatten(1) if over_all else part, weight, EPS).view(part.shape)
            for part, weight in parts
        )
    return reference.rope(q, positions, inv_freq), reference.rope(k, positions, inv_freq), v.float()


@settings(max_examples=50, deadline=None)
@given(
    tokens=st.integers(0, 9),
    heads=st.sampled_from([(1, 1), (4, 2), (7, 1), (6, 6), (32, 4)]),
    dim=st.sampled_from([2, 8, 24, 64, 80, 128, 256]),
    block_size=st.sampled_from([1, 4, 32]),
    norm=st.sampled_from(["none", "head", "each head", "centered", "heads"]),
    fp8=st.sampled_from(["no", "scaled", "plain"]),
    wide=st.booleans(),
    bad=st.booleans(),
    dtype=DTYPES,
    seed=SEEDS,
)
def test_equals_the_reference(
    tokens: int,
    heads: tuple[int, int],
    dim: int,
    block_size: int,
    norm: str,
    fp8: str,
    wide: bool,
    bad: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    num_heads, kv_heads = heads
    num_blocks = 2 + tokens // block_size
    place = torch.randperm(num_blocks * block_size)[:tokens]
    pages, slots = place // block_size, place % block_size
    if not wide:
        pages, slots = pages.int(), slots.int()
    is_bad = torch.zeros(tokens, dtype=torch.bool)
    for token in range(0, tokens if bad else 0, 2):
        is_bad[token] = True
        far = 2**40 if wide else 2**31 - 1
        if token % 4:
            slots[token] = (-1, block_size, far, -far)[token // 2 % 4]
        else:
            pages[token] = (-1, num_blocks, far, -far)[token // 4 % 4]
    positions, inv_freq = torch.randint(0, 1000, (tokens,)), torch.rand(dim // 2)
    qkv = torch.randn(tokens, (num_heads + 2 * kv_heads) * dim).to(dtype)
    before = qkv.clone()
    norms = means = None
    if norm == "head":
        norms = HeadNorms(torch.rand(dim).to(dtype), torch.rand(dim), EPS)
    elif norm == "centered":
        norms = HeadNorms(torch.rand(dim).to(dtype), torch.rand(dim), EPS, is_centered=True)
    elif norm == "each head":
        q_norm, k_norm = torch.rand(num_heads, dim).to(dtype), torch.rand(kv_heads, dim)
        norms = HeadNorms(q_norm, k_norm, EPS, is_centered=seed % 2 == 0)
    elif norm == "heads":
        widths = num_heads * dim, kv_heads * dim
        norms = HeadNorms(torch.rand(widths[0]).to(dtype), torch.rand(widths[1]), EPS)
        means = mean_squares(qkv, *widths)
    cache_dtype = dtype if fp8 == "no" else FP8
    shape = (num_blocks, kv_heads, block_size, dim)
    keys, values = Fenced(*shape, dtype=cache_dtype), Fenced(*shape, dtype=cache_dtype)
    scales = None
    if fp8 == "scaled":
        scales = CacheScales(torch.rand(kv_heads) + 0.1, torch.rand(kv_heads) + 0.1)

    queries, status = rotate_into_cache(
        *(qkv, Rotation.of(positions, inv_freq, torch.float32), keys.inside, values.inside),
        *(pages, slots),
        heads=num_heads,
        norms=norms,
        means=means,
        scales=scales,
    )
    same(qkv, before)
    same(status, is_bad.int())
    over_all = norm == "heads"
    q, k, v = expected(qkv, positions, inv_freq, num_heads, dim, norms, over_all=over_all)
    assert queries.dtype == dtype
    near(queries, q, dtype)
    good = ~is_bad
    untouched = torch.ones(num_blocks, block_size, dtype=torch.bool)
    untouched[pages[good].long(), slots[good].long()] = False
    for cache, came, scale in ((keys, k, 0), (values, v, 1)):
        assert cache.is_whole()
        written = cache.inside.float()[pages[good].long(), :, slots[good].long()]
        if scales is not None:
            written = written * scales[scale][:, None]
        near(written, came[good], cache_dtype)
        left = cache.inside.float().transpose(1, 2)[untouched]
        assert (left == cache.poison.float()[0, 0]).all()
    if fp8 == "no":
        same(values.inside[pages[good].long(), :, slots[good].long()], v[good].to(dtype))


@pytest.mark.parametrize(
    "norms",
    [
        None,
        HeadNorms(torch.rand(16), torch.rand(16), EPS),
        HeadNorms(torch.rand(4, 16), torch.rand(2, 16), EPS, is_centered=True),
    ],
    ids=["none", "head", "each head"],
)
def test_equals_the_cpus(norms: HeadNorms | None) -> None:
    plan = AttentionPlan.build(
        *(np.array([0, 5, 6], np.int32), np.array([9, 3], np.int32)),
        np.array([[4, 1, 0], [2, 3, 5]]),
        block_size=4,
    )
    positions, inv_freq = torch.tensor([4, 5, 6, 7, 8, 2]), torch.rand(8)
    qkv = torch.randn(6, (4 + 2 * 2) * 16)
    rotation = Rotation.of(positions, inv_freq, torch.float32)
    ours, theirs = ([torch.zeros(6, 2, 4, 16) for _ in range(2)] for _ in range(2))
    queries, status = rotate_into_cache(
        qkv, rotation, *ours, plan.pages, plan.slots, heads=4, norms=norms
    )
    assert not status.any()
    near(
        queries,
        on_cpu.rotate_into_cache(qkv.clone(), rotation, *theirs, plan, heads=4, norms=norms),
        torch.float32,
    )
    for mine, other in zip(ours, theirs, strict=True):
        near(mine, other, torch.float32)


def test_what_is_too_large_for_an_fp8_cache_is_its_largest_number() -> None:
    qkv = torch.tensor([[0.0, 0.0, 1e6, -1e6, 1e6, torch.nan]])
    keys, values = torch.zeros(1, 1, 1, 2, dtype=FP8), torch.zeros(1, 1, 1, 2, dtype=FP8)
    rotation = Rotation.of(torch.tensor([0]), torch.ones(1), torch.float32)
    zero, one = torch.zeros(1, dtype=torch.int64), torch.ones(1)
    rotate_into_cache(
        qkv, rotation, keys, values, zero, zero, heads=1, scales=CacheScales(one, one)
    )
    assert keys.float().flatten().tolist() == [448, -448]
    assert values.float().flatten()[0] == 448
    assert values.float().flatten()[1].isnan()


BASE = {"heads": 2}


def arguments(**changes: object) -> dict[str, object]:
    table = torch.zeros(3, 4)
    return {
        "qkv": torch.zeros(3, 16),
        "rotation": Rotation(table, table),
        "keys": torch.zeros(2, 1, 4, 4),
        "values": torch.zeros(2, 1, 4, 4),
        "pages": torch.zeros(3, dtype=torch.int64),
        "slots": torch.arange(3),
        "heads": 2,
    } | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"keys": torch.zeros(2, 4, 4)},
            r"keys's shape is \[2, 4, 4\]; it must be \[num_blocks, Hk",
        ),
        (
            {"keys": torch.zeros(2, 1, 4, 3)},
            "keys's last axis is 3; it must be even, from 2 to 1024",
        ),
        ({"values": torch.zeros(2, 1, 4, 8)}, r"values's shape is \[2, 1, 4, 8\]"),
        ({"values": torch.zeros(2, 1, 4, 4).half()}, "values's dtype is torch.float16"),
        ({"qkv": torch.zeros(3, 20)}, r"qkv's shape is \[3, 20\]; it must be \[3, 16\]"),
        ({"heads": -1}, "heads is -1; it must be at least 0"),
        ({"pages": torch.zeros(2, dtype=torch.int64)}, r"pages's shape is \[2\]; it must be \[3\]"),
        ({"slots": torch.zeros(3)}, "slots's dtype is torch.float32"),
        ({"rotation": Rotation(torch.zeros(3, 4), torch.zeros(3, 2))}, "rotation.sin's shape"),
        ({"norms": HeadNorms(torch.zeros(4), torch.zeros(3), EPS)}, "norms.k's shape"),
        (
            {"norms": HeadNorms(torch.zeros(2, 4), torch.zeros(2, 4), EPS)},
            r"norms.k's shape is \[2, 4\]; it must be \[1, 4\]",
        ),
        (
            {
                "norms": HeadNorms(torch.zeros(8), torch.zeros(4), EPS, is_centered=True),
                "means": torch.zeros(3, 2),
            },
            "means is given; it must not be: the norms are centered",
        ),
        (
            {"norms": HeadNorms(torch.zeros(4), torch.zeros(4), EPS), "means": torch.zeros(3, 2)},
            r"norms.q's shape is \[4\]; it must be \[8\]",
        ),
        ({"means": torch.zeros(3, 2)}, "means is given; it must not be: there are no norms"),
        (
            {"norms": HeadNorms(torch.zeros(8), torch.zeros(4), EPS), "means": torch.zeros(2, 2)},
            r"means's shape is \[2, 2\]; it must be \[3, 2\]",
        ),
        (
            {"scales": CacheScales(torch.ones(1), torch.ones(1))},
            "keys's dtype is torch.float32; it must be torch.float8_e4m3fn",
        ),
        (
            {
                "keys": torch.zeros(2, 1, 4, 4).to(FP8),
                "values": torch.zeros(2, 1, 4, 4).to(FP8),
                "scales": CacheScales(torch.ones(1), torch.ones(2)),
            },
            "scales.v's shape",
        ),
        (
            {"keys": torch.zeros(2, 1, 4, 4).to(FP8)},
            "values's dtype is torch.float32; it must be torch.float8_e4m3fn",
        ),
        (
            {"keys": torch.zeros(2, 1, 4, 4).bfloat16()},
            "keys's dtype is torch.bfloat16; it must be torch.float32 or torch.float8_",
        ),
    ],
)
def test_what_does_not_go_together(changes: dict[str, object], message: str) -> None:
    with pytest.raises(KernelError, match=f"^rotate_into_cache: {message}"):
        rotate_into_cache(**arguments(**changes))  # type: ignore[arg-type]


def test_older_gpus_have_no_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "target", lambda: ("cuda", 80))
    cache = torch.zeros(2, 1, 4, 4).to(FP8)
    with pytest.raises(KernelError, match="fp8 is requested; it must not be: sm_80"):
        rotate_into_cache(**arguments(keys=cache, values=cache.clone()))  # type: ignore[arg-type]


# Planted faults.


def check(module: ModuleType, *, over_all: bool = False, by_head: bool = False) -> None:
    torch.manual_seed(0)
    positions, inv_freq = torch.tensor([0, 3, 900, 7]), torch.rand(20)
    qkv = torch.randn(4, (40 + 2 * 3) * 40)
    q_heads, k_heads = (40, 3) if over_all else (1, 1)
    norms = HeadNorms(torch.rand(q_heads * 40), torch.rand(k_heads * 40), EPS)
    if by_head:
        norms = HeadNorms(torch.rand(40, 40), torch.rand(3, 40), EPS, is_centered=True)
    means = mean_squares(qkv, 40 * 40, 3 * 40) if over_all else None
    pages, slots = torch.tensor([1, -1, 2, 0]), torch.tensor([4, 0, 5, 2])
    keys, values = (
        Fenced(3, 3, 5, 40, dtype=torch.float32),
        Fenced(3, 3, 5, 40, dtype=torch.float32),
    )
    queries, status = module.rotate_into_cache(
        *(qkv, Rotation.of(positions, inv_freq, torch.float32), keys.inside, values.inside),
        *(pages, slots),
        heads=40,
        norms=norms,
        means=means,
    )
    assert status.tolist() == [0, 1, 1, 0]
    q, k, v = expected(qkv, positions, inv_freq, 40, 40, norms, over_all=over_all)
    near(queries, q, torch.float32)
    for cache, came in ((keys, k), (values, v)):
        assert cache.is_whole()
        right = torch.full((3, 3, 5, 40), 77.0)
        right[1, :, 4], right[0, :, 2] = came[0], came[3]
        near(cache.inside, right, torch.float32)


def test_nothing_is_found_without_a_fault() -> None:
    assert not finds(check, rope)
    assert not finds(partial(check, over_all=True), rope)
    assert not finds(partial(check, by_head=True), rope)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("turned * c - other * s", "turned * c + other * s"),
        ("sin + token * dim + half", "sin + token * dim"),
        ("tl.where(is_query, q_second, k_second)", "q_second"),
        ("squares / dim", "squares / half"),
        ("(page >= 0) &", ""),
        ("& (slot < block_size)", ""),
        ("tl.where(there, 0, 1)", "0"),
        ("value_head = key_head - kv_heads", "value_head = key_head"),
        ("* block_size + slot", "* block_size"),
        ("(head >= heads) & (head < heads + kv_heads)", "head >= heads"),
        ("tl.store(values + to, cast(first", "tl.store(values + to, cast(turned"),
        ("-(-count // block_h)", "count // block_h"),
    ],
)
def test_a_fault_is_found(old: str, new: str, tmp_path: Path) -> None:
    assert finds(check, planted(rope, tmp_path, (old, new)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tl.where(is_query, 0, 1)) + eps", "1) + eps"),
        ("means + 2 * token", "means + token"),
        ("k_norm + (head[:, None] - heads) * dim", "k_norm + head[:, None] * 0"),
        ("q_norm + head[:, None] * dim", "q_norm + head[:, None] * half"),
        ("tl.load(of_q + half,", "tl.load(of_q,"),
        ("tl.load(of_k + half,", "tl.load(of_k,"),
    ],
)
def test_a_fault_in_norms_over_all_heads_is_found(old: str, new: str, tmp_path: Path) -> None:
    assert finds(partial(check, over_all=True), planted(rope, tmp_path, (old, new)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[:, None] / dim", "[:, None] / half"),
        ("tl.sum(first, axis=1) + tl.sum(second, axis=1)", "2 * tl.sum(first, axis=1)"),
        ("tl.where(inside[None, :], first - mean, 0.0)", "first - mean"),
        ("tl.where(inside[None, :], second - mean, 0.0)", "second"),
        ("k_norm + (head[:, None] - heads) * dim", "k_norm + head[:, None] * 0"),
        ("CENTERED=norms is not None and norms.is_centered", "CENTERED=False"),
        ("or norms.q.dim() == 2)", ")"),
    ],
)
def test_a_fault_in_layer_norms_of_each_head_is_found(old: str, new: str, tmp_path: Path) -> None:
    assert finds(partial(check, by_head=True), planted(rope, tmp_path, (old, new)))


def test_a_fault_in_the_rounding_is_found(tmp_path: Path) -> None:
    x = torch.tensor([[1e4]])

    def saturates(module: ModuleType) -> None:
        faulty = planted(rope, tmp_path)
        faulty.cast = module.cast  # type: ignore[attr-defined]
        keys, values = (torch.zeros(1, 1, 1, 2, dtype=FP8) for _ in range(2))
        zero, one = torch.zeros(1, dtype=torch.int64), torch.ones(1)
        rotation = Rotation.of(zero, torch.ones(1), torch.float32)
        scales = CacheScales(one, one)
        faulty.rotate_into_cache(
            x.expand(1, 4).contiguous(), rotation, keys, values, zero, zero, heads=0, scales=scales
        )
        assert (values.float() == 448).all()

    assert not finds(saturates, rows)
    assert finds(
        saturates,
        planted(rows, tmp_path, ("tl.where(y > FP8_MAX, FP8_MAX,", "tl.where(y > FP8_MAX, 0.0,")),
    )
