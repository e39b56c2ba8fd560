"""Draws from rows of logits, and changes to rows, against the CPU's to the bit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from support.faults import planted
from support.overlapped import DTYPES, SEEDS
from support.rows import bounded, finds
from torch import Tensor

from weft.kernels import reference
from weft.kernels.cpu import sampling as cpu_sampling
from weft.kernels.gpu.rowwise import sampling
from weft.kernels.gpu.rowwise.sampling import CANDIDATES, Changes, How, draw, edit
from weft.kernels.gpu.runtime.arguments import KernelError
from weft.models.interface import SlotSampling
from weft.models.torch import draw as cpu_draw
from weft.models.torch.logits import Logits


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    with bounded():
        yield


@triton.jit
def store_weights(out, log2, module_weigh: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (n / BLOCK,)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, module_weigh(tl.load(log2 + at)))


def weights(module: ModuleType, log2: Tensor) -> Tensor:
    out = torch.empty(len(log2), dtype=torch.int64)
    store_weights[(len(log2) // 1024,)](out=out, log2=log2, module_weigh=module.weigh, BLOCK=1024)
    return out


@pytest.mark.parametrize("scale", [1e-3, 1.0, 43.0])
def test_weights_are_the_cpus_to_the_bit(scale: float) -> None:
    log2 = -scale * torch.rand(1 << 15, generator=torch.Generator().manual_seed(0))
    log2[:6] = torch.tensor([0.0, -0.0, -41.0, -42.0, -300.0, -torch.inf])
    assert torch.equal(weights(sampling, log2), cpu_sampling.weigh(log2))
    assert torch.equal(weights(sampling, log2), cpu_sampling._weigh_with_torch(log2))


def drawn(
    module: ModuleType, logits: Tensor, slots: list[SlotSampling], u: Tensor
) -> tuple[list[int], list[int]]:
    """Tokens of the kernel, and of the CPU."""
    count, columns = logits.shape
    how = cpu_draw.Shaping.of(slots, u, columns)
    rows = torch.arange(count, dtype=torch.int32).flip(0)
    tokens = module.draw(logits.flip(0), rows, How(*how[:2], how.top_k.int(), *how[3:]))
    return tokens.tolist(), cpu_draw.draw(Logits.whole(logits.float()), slots, u).tolist()


SHAPES = st.tuples(
    st.sampled_from([1e-30, 0.3, 1.0, 100.0]),
    st.sampled_from([0, 1, 7, 600, CANDIDATES + 1, 10**9]),
    st.sampled_from([1.0, 0.95, 0.5, 1e-9]),
    st.sampled_from([0.0, 0.05, 1.0]),
)


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(SHAPES, max_size=4),
    columns=st.sampled_from([1, 2, 60, CANDIDATES, 4096, 4097, 9000]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 5.0, 60.0]),
    impossible=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    dtype=DTYPES,
    seed=SEEDS,
)
def test_the_tokens_are_the_cpus(
    shapes: list[tuple[float, int, float, float]],
    columns: int,
    spread: float,
    impossible: float,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Flat, equal, peaked and impossible logits; nuclei of a few tokens, and of nearly all."""
    torch.manual_seed(seed)
    logits = (spread * torch.randn(len(shapes), columns)).to(dtype)
    logits[torch.rand(logits.shape) < impossible] = -torch.inf
    slots = [
        SlotSampling(i, temperature=t, top_k=k, top_p=p, min_p=m)
        for i, (t, k, p, m) in enumerate(shapes)
    ]
    u = torch.rand(len(shapes), dtype=torch.float64)
    u[:1] = (0.0, 1 - 2.0**-48)[seed % 2]
    got, expected = drawn(sampling, logits, slots, u)
    assert got == expected


def test_the_largest_is_the_first_one() -> None:
    logits = torch.zeros(3, 9000)
    logits[0, [8999, 4500]] = 2.0
    logits[1] = -torch.inf
    how = How(
        torch.zeros(3),
        torch.full((3,), -149.0),
        torch.full((3,), 9000, dtype=torch.int32),
        *(torch.zeros(3, dtype=torch.int64) for _ in range(2)),
    )
    assert draw(logits, torch.arange(3, dtype=torch.int32), how).tolist() == [4500, 0, 0]


def test_rows_that_are_not_finite_give_a_token_of_the_vocabulary() -> None:
    for odd in (torch.nan, torch.inf, -torch.inf):
        for temperature in (0.0, 1.0):
            logits = torch.randn(2, 50)
            logits[0], logits[1, 7] = odd, odd
            slots = [SlotSampling(i, temperature=1.0, top_k=5, top_p=0.5) for i in range(2)]
            how = cpu_draw.Shaping.of(slots, torch.rand(2, dtype=torch.float64), 50)
            rows = torch.arange(2, dtype=torch.int32)
            tokens = draw(
                logits,
                rows,
                How(torch.full((2,), temperature), how[1], how.top_k.int(), *how[3:]),
            )
            assert all(0 <= token < 50 for token in tokens.tolist())


HOW = How(
    torch.ones(2),
    torch.zeros(2),
    torch.ones(2, dtype=torch.int32),
    *(torch.zeros(2, dtype=torch.int64) for _ in range(2)),
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(3)}, r"x's shape is \[0\]; it must be a matrix"),
        ({"x": torch.zeros(3, 0)}, "x's columns is 0; it must be from 1"),
        ({"x": torch.zeros(3, 2).T}, "x's stride"),
        ({"x": torch.zeros(2, 3, dtype=torch.int64)}, "x's dtype is torch.int64"),
        ({"rows": torch.zeros(2)}, "rows's dtype is torch.float32; it must be torch.int32"),
        ({"how": HOW._replace(u=torch.zeros(2))}, "u's dtype is torch.float32"),
        ({"how": HOW._replace(top_k=torch.ones(3).int())}, r"top_k's shape is \[3\]"),
    ],
)
def test_what_cannot_be_drawn(changes: dict[str, Any], message: str) -> None:
    given = {"x": torch.zeros(2, 3), "rows": torch.zeros(2, dtype=torch.int32), "how": HOW}
    with pytest.raises(KernelError, match=f"^draw: {message}"):
        draw(**given | changes)


# Changes to rows.


def changes_of(edits: list[dict[str, Any]], columns: int) -> Changes:
    """Rows in reverse order, each with the history in its slot."""
    count = len(edits)
    words = -(-columns // 32)
    history = torch.zeros(count + 1, 40, dtype=torch.int32)
    prompt_end, output_end = torch.zeros(2, count, dtype=torch.int32)
    tokens, bias, ends, masks, mask = list[int](), list[float](), [0], list[Tensor](), list[int]()
    for i, each in enumerate(edits):
        listed = [*each["prompt"], *each["output"]]
        history[count - i, : len(listed)] = torch.tensor(listed, dtype=torch.int32)
        prompt_end[i], output_end[i] = len(each["prompt"]), len(listed)
        tokens += [*each["bias"], *each["ended"]]
        bias += [*each["bias"].values(), *([-math.inf] * len(each["ended"]))]
        ends.append(len(tokens))
        mask.append(-1)
        if each["allowed"] is not None:
            bits = torch.zeros(words * 32, dtype=torch.int64)
            bits[each["allowed"]] = 1
            mask[-1] = len(masks)
            masks.append((bits.view(-1, 32) << torch.arange(32)).sum(-1).to(torch.int32))
    names = ("repetition", "presence", "frequency")
    return Changes(
        rows=torch.arange(count, dtype=torch.int32).flip(0),
        history=history,
        slot=torch.arange(count, 0, -1, dtype=torch.int32),
        prompt_end=prompt_end,
        output_end=output_end,
        penalties=torch.tensor([[e[n] for e in edits] for n in names]).float().view(3, count),
        tokens=torch.tensor(tokens or [0], dtype=torch.int32),
        bias=torch.tensor(bias or [0.0]).float(),
        tokens_end=torch.tensor(ends, dtype=torch.int32),
        masks=torch.stack(masks) if masks else torch.zeros(1, words, dtype=torch.int32),
        mask=torch.tensor(mask, dtype=torch.int32),
    )


TOKENS = st.lists(st.integers(0, 39), max_size=15)
EDITS = st.fixed_dictionaries(
    {
        "prompt": TOKENS.map(lambda tokens: sorted({*tokens})),
        "output": TOKENS,
        "repetition": st.sampled_from([1.0, 1.3, 0.7]),
        "presence": st.sampled_from([0.0, 0.5, -2.0]),
        "frequency": st.sampled_from([0.0, 0.25, -1.0]),
        "bias": st.dictionaries(st.integers(0, 39), st.sampled_from([-100.0, 0.5, 9.0])),
        "ended": TOKENS.map(lambda tokens: [*{*tokens}]),
        "allowed": st.none() | st.lists(st.integers(0, 39), min_size=1),
    }
)


@settings(max_examples=40, deadline=None)
@given(
    edits=st.lists(EDITS, max_size=4),
    columns=st.sampled_from([40, 64, 65, 5000]),
    dtype=DTYPES,
    seed=SEEDS,
)
def test_changed_rows(
    edits: list[dict[str, Any]], columns: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    logits = (3 * torch.randn(len(edits), columns)).to(dtype)
    before = logits.clone()
    got = edit(logits, changes_of(edits, columns))
    assert torch.equal(logits, before)
    for row, one, each in zip(logits.flip(0), got, edits, strict=True):
        torch.testing.assert_close(one, reference.edit_logits(row, **each), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"penalties": torch.ones(2, 1)}, r"penalties's shape is \[2, 1\]"),
        ({"masks": torch.zeros(1, 1, dtype=torch.int32)}, r"masks's shape is \[1, 1\]"),
        ({"history": torch.zeros(2, 4)}, "history's dtype is torch.float32"),
    ],
)
def test_what_cannot_be_changed(changes: dict[str, Tensor], message: str) -> None:
    nothing = {"prompt": [], "output": [], "bias": {}, "ended": [], "allowed": None}
    given = changes_of([nothing | dict.fromkeys(("repetition", "presence", "frequency"), 1.0)], 40)
    with pytest.raises(KernelError, match=f"^edit: {message}"):
        edit(torch.zeros(1, 40), given._replace(**changes))


# Planted faults.


def check(module: ModuleType) -> None:
    torch.manual_seed(0)
    log2 = -43 * torch.rand(1 << 13)
    assert torch.equal(weights(module, log2), cpu_sampling.weigh(log2))
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.7},
        {"temperature": 1e-3},
        {"top_k": 9},
        {"top_k": 2000},
        {"top_p": 0.9},
        {"top_p": 0.9, "temperature": 100.0},
        {"min_p": 0.3},
        {"min_p": 0.3, "temperature": 100.0},
        {"min_p": 1e-3, "temperature": 2.0},
        {"top_k": 2000, "temperature": 100.0},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.05},
    ]
    slots = [SlotSampling(i, **({"temperature": 1.0} | kind)) for i, kind in enumerate(kinds * 6)]
    logits = 3 * torch.randn(len(slots), 5000)
    logits[::5] = logits[::5].round()
    u = torch.rand(len(slots), dtype=torch.float64)
    u[::7] = 0.0
    got, expected = drawn(module, logits, slots, u)
    assert got == expected


def test_nothing_is_found_without_a_fault() -> None:
    assert not finds(check, sampling)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tl.fma(y, r, tl.zeros_like(x) + 1.0)", "y * r + 1.0"),
        ("(x + 12582912.0) - 12582912.0", "x.to(tl.int32).to(tl.float32)"),
        ("numbers = x + tl.load(rows + at).to(tl.int64) * stride", "numbers = x + at * stride"),
        ("range(31)", "range(24)"),
        ("(up_to <= N).to(tl.int32)", "(up_to < 0).to(tl.int32) + (up_to <= N).to(tl.int32) - 1"),
        ("keys <= low + (half - 1)", "keys <= low + half"),
        ("if count >= k:", "if count >= 0:"),
        ("if tl.sum(weights, axis=0) >= mass:", "if total >= mass:"),
        ("total - share_of(p, total)", "total"),
        ("weights = tl.where(keys <= end, weights, 0)\n", "weights = weights\n"),
        ("settled = bin_of(end.to(tl.float32, bitcast=True) * -1.0) < bins", "settled = bins > 0"),
        ("(running <= target)", "(running < target)"),
        ("running += here", "running += 0 * here"),
        ("place += tl.sum", "place += 0 * tl.sum"),
    ],
)
def test_a_fault_is_found(old: str, new: str, tmp_path: Path) -> None:
    assert finds(check, planted(sampling, tmp_path, (old, new)))


def check_edits(module: ModuleType) -> None:
    torch.manual_seed(0)
    edits: list[dict[str, Any]] = [
        {
            "prompt": [1, 5, 10 + i],
            "output": [5, 7, 7, 7, 2][: 5 * (i % 2)],
            "repetition": (1.0, 1.4)[i % 3 > 0],
            "presence": 0.5 * (i % 2),
            "frequency": 0.25 * (i % 3),
            "bias": {3: 1.0, 7: -2.0} if i % 4 else {},
            "ended": [9, 5] if i % 3 else [],
            "allowed": [0, 3, 7, 20 + i] if i % 5 == 2 else None,
        }
        for i in range(12)
    ]
    logits = 3 * torch.randn(12, 4200)
    got = module.edit(logits, module.Changes(*changes_of(edits, 4200)))
    for row, one, each in zip(logits.flip(0), got, edits, strict=True):
        torch.testing.assert_close(one, reference.edit_logits(row, **each), atol=1e-6, rtol=1e-6)


def test_nothing_is_found_in_the_edits_without_a_fault() -> None:
    assert not finds(check_edits, sampling)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tl.where(logit > 0, divided, logit * repetition)", "divided"),
        ("            if part:\n                repeated -= presence\n", ""),
        ("first = prompt if part else 0", "first = 0"),
        ("for start in range(prompt, output, LISTED):", "for start in range(0, output, LISTED):"),
        ("tl.load(slot + at).to(tl.int64) * history_stride", "at * history_stride"),
        ("tl.load(tokens_end + at + 1)", "tl.load(tokens_end + at)"),
        ("word >> (column % 32)", "word >> (column % 31)"),
        ("allowed_by.to(tl.int64) * words", "allowed_by.to(tl.int64) * 0"),
    ],
)
def test_a_fault_of_the_edits_is_found(old: str, new: str, tmp_path: Path) -> None:
    assert finds(check_edits, planted(sampling, tmp_path, (old, new)))
