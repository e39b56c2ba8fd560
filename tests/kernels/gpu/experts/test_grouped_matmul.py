"""Products of groups of rows: every routing, layout and epilogue; faults; bad offsets and input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.faults import planted
from support.overlapped import BLOCKS, DTYPES, FP8, SEEDS, close
from torch import Tensor

from weft.kernels import reference
from weft.kernels.check.ranks import run
from weft.kernels.gpu.experts import grouped_matmul as module
from weft.kernels.gpu.experts.grouped_matmul import LEAST_GROUPS, grouped_matmul
from weft.kernels.gpu.matmul import tile
from weft.kernels.gpu.matmul.epilogue import Epilogue
from weft.kernels.gpu.runtime.arguments import KernelError
from weft.kernels.gpu.tuning import table as tuned
from weft.kernels.gpu.tuning.costs import Config, Problem
from weft.kernels.gpu.tuning.search import Choice
from weft.kernels.gpu.tuning.table import Entry
from weft.kernels.interpreter import gpu as interpreter

NAN = float("nan")


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    with interpreter.installed():
        yield


def offsets_of(sizes: Sequence[int], before: int = 0) -> Tensor:
    return torch.tensor([before, *sizes]).cumsum(0).int()


SIZES = st.lists(st.integers(0, 40) | st.just(0), min_size=1, max_size=5)


@settings(max_examples=15, deadline=None)
@given(
    sizes=SIZES,
    before=st.integers(0, 3),
    after=st.integers(0, 20),
    widths=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    k=st.integers(1, 40),
    blocks=st.sampled_from([BLOCKS, (32, 16, 16), (16, 32, 32)]),
    dtype=DTYPES,
    transposed=st.booleans(),
    programs=st.integers(0, 5),
    seed=SEEDS,
)
def test_any_groups(
    sizes: list[int],
    before: int,
    after: int,
    widths: list[int],
    k: int,
    blocks: tuple[int, int, int],
    dtype: torch.dtype,
    transposed: bool,
    programs: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    offsets, rows = offsets_of(sizes, before), before + sum(sizes) + after
    x = torch.randn(rows, k).to(dtype)
    x[:before], x[rows - after :] = NAN, NAN  # of no group: neither read nor written
    ws = [torch.randn(len(sizes), k, n).to(dtype) for n in widths]
    given_ws = [w.mT.contiguous().mT if transposed else w for w in ws]
    out, status = torch.full((rows, sum(widths)), NAN, dtype=dtype), torch.zeros(1).int()
    got = grouped_matmul(
        x,
        given_ws if len(ws) > 1 else given_ws[0],
        offsets,
        out=out,
        status=status,
        blocks=blocks,
        programs=programs,
    )
    assert got is out
    assert status.item() == 0
    inside = slice(before, rows - after)
    close(out[inside], reference.grouped_matmul(x, torch.cat(ws, dim=2), offsets)[inside], dtype)
    assert out[:before].isnan().all()
    assert out[rows - after :].isnan().all()


@settings(max_examples=15, deadline=None)
@given(
    tokens=st.integers(1, 20),
    top_k=st.integers(1, 3),
    k=st.integers(1, 40),
    gate_up=st.booleans(),
    bias=st.booleans(),
    dtype=DTYPES,
    programs=st.integers(0, 5),
    seed=SEEDS,
)
def test_rows_in_an_order(
    tokens: int,
    top_k: int,
    k: int,
    gate_up: bool,
    bias: bool,
    dtype: torch.dtype,
    programs: int,
    seed: int,
) -> None:
    """They are what copies of the tokens in this order give; some pairs have no group."""
    torch.manual_seed(seed)
    groups, pairs = 3, tokens * top_k
    x, order = torch.randn(tokens, k).to(dtype), torch.randperm(pairs).int()
    cuts = torch.randint(pairs + 1, (groups,)).sort().values.int()
    offsets = torch.cat([torch.zeros(1).int(), cuts])
    ws = [torch.randn(groups, k, 9).to(dtype) for _ in range(2 if gate_up else 1)]
    epilogue = Epilogue(
        bias=torch.randn(groups, 9 * len(ws)) if bias else None, silu_multiply=gate_up
    )
    options = {"epilogue": epilogue, "blocks": BLOCKS, "programs": programs}
    got = grouped_matmul(x, ws, offsets, order=order, top_k=top_k, **options)
    copied = grouped_matmul(x[order // top_k], ws, offsets, **options)
    close(got[: offsets[-1]], copied[: offsets[-1]].float(), dtype)


@pytest.mark.parametrize(
    ("order", "top_k", "epilogue", "message"),
    [
        (torch.zeros(4).long(), 1, Epilogue(), "order's dtype"),
        (torch.zeros(4).int(), 0, Epilogue(), "top_k is 0; it must be at least 1"),
        (
            *(torch.zeros(4).int(), 1, Epilogue(residual=torch.zeros(4, 4))),
            "no x_scale and no residual with an order",
        ),
    ],
)
def test_orders_that_are_refused(
    order: Tensor, top_k: int, epilogue: Epilogue, message: str
) -> None:
    x, w = torch.randn(2, 8), torch.randn(1, 8, 4)
    with pytest.raises(KernelError, match=message):
        grouped_matmul(x, w, offsets_of([4]), order=order, top_k=top_k, epilogue=epilogue)


@pytest.mark.parametrize("full", [0, 3, LEAST_GROUPS + 9])
def test_one_of_many_groups_has_all_rows(full: int) -> None:
    sizes = [0] * (LEAST_GROUPS + 10)
    sizes[full] = 21
    x, w, offsets = torch.randn(21, 8), torch.randn(len(sizes), 8, 4), offsets_of(sizes)
    close(grouped_matmul(x, w, offsets, blocks=BLOCKS), x @ w[full], torch.float32)


@settings(max_examples=15, deadline=None)
@given(
    sizes=SIZES,
    n=st.integers(1, 12),
    gate_up=st.sampled_from(["", "alternate", "halves"]),
    bias=st.booleans(),
    residual=st.booleans(),
    seed=SEEDS,
)
def test_epilogues(
    sizes: list[int], n: int, gate_up: str, bias: bool, residual: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    k, rows, offsets = 24, sum(sizes), offsets_of(sizes)
    x, w = torch.randn(rows, k).bfloat16(), torch.randn(len(sizes), k, 2 * n).bfloat16() / 4
    biases = torch.randn(len(sizes), 2 * n) if bias else None
    added = torch.randn(rows, n if gate_up else 2 * n) if residual else None
    epilogue = Epilogue(
        bias=biases, silu_multiply=bool(gate_up), residual=added, out_dtype=torch.float32
    )
    halves = [half.contiguous() for half in w.split(n, dim=2)]
    ws = halves if gate_up == "halves" else w
    got = grouped_matmul(x, ws, offsets, epilogue=epilogue, blocks=BLOCKS)
    expected = reference.grouped_matmul(x, w, offsets)
    if biases is not None:
        expected += biases.repeat_interleave(torch.tensor(sizes), dim=0)
    expected = reference.epilogue(expected, gate_up=gate_up, residual=added)
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-4)


@settings(max_examples=15, deadline=None)
@given(
    sizes=SIZES,
    n=st.integers(1, 20),
    by_row=st.none() | st.booleans(),
    by=st.sampled_from(["nothing", "one", "group", "column"]),
    seed=SEEDS,
)
def test_scales_of_fp8(sizes: list[int], n: int, by_row: bool | None, by: str, seed: int) -> None:
    torch.manual_seed(seed)
    k, rows, groups, offsets = 16, sum(sizes), len(sizes), offsets_of(sizes)
    x, w = torch.randn(rows, k).to(FP8), torch.randn(groups, n, k).to(FP8).mT
    x_scale = None if by_row is None else torch.rand(rows if by_row else 1) + 0.5
    shapes = {"one": (1,), "group": (groups, 1), "column": (groups, n)}
    w_scale = None if by == "nothing" else torch.rand(shapes[by]) + 0.5
    epilogue = Epilogue(x_scale=x_scale, w_scale=w_scale)
    got = grouped_matmul(x, w, offsets, epilogue=epilogue, blocks=BLOCKS)
    left = x.float() if x_scale is None else x.float() * x_scale[:, None]
    right = w.float()
    if w_scale is not None:
        right = right * (w_scale if by == "one" else w_scale[:, None, :])
    close(got, reference.grouped_matmul(left, right, offsets), torch.bfloat16)


@settings(max_examples=15, deadline=None)
@given(
    sizes=SIZES,
    k=st.sampled_from([1, 100, 128, 130, 300]),
    n=st.integers(1, 20),
    gate_up=st.booleans(),
    by_column=st.booleans(),
    block_k=st.sampled_from([16, 64, 128]),
    seed=SEEDS,
)
def test_scales_of_128_columns(
    sizes: list[int], k: int, n: int, gate_up: bool, by_column: bool, block_k: int, seed: int
) -> None:
    torch.manual_seed(seed)
    rows, groups, offsets = sum(sizes), len(sizes), offsets_of(sizes)
    x = (torch.randn(rows, k) * k**-0.5).to(FP8)
    x_scale = torch.rand(rows, -(-k // 128)) + 0.5
    ws = [torch.randn(groups, n, k).to(FP8).mT for _ in range(1 + gate_up)]
    w_scale = torch.rand(groups, len(ws) * n) + 0.5 if by_column else None
    got = grouped_matmul(
        x,
        ws,
        offsets,
        epilogue=Epilogue(x_scale, w_scale, silu_multiply=gate_up, out_dtype=torch.float32),
        blocks=(16, 16, block_k),
    )
    expected = reference.grouped_matmul(x, torch.cat(ws, dim=2), offsets, x_scale)
    if w_scale is not None:
        expected *= w_scale.repeat_interleave(torch.tensor(sizes), dim=0)
    expected = reference.epilogue(expected, gate_up="halves" if gate_up else "")
    torch.testing.assert_close(got, expected, atol=1e-2, rtol=1e-4)


@pytest.mark.parametrize("expected", [0, 9])
def test_the_tiling_that_it_chooses(expected: int) -> None:
    sizes = [70, 0, 5]
    x, w, offsets = torch.randn(80, 40), torch.randn(3, 40, 140), offsets_of(sizes)
    got = grouped_matmul(x, w, offsets, expected=expected)[:75]
    close(got, reference.grouped_matmul(x, w, offsets)[:75], torch.float32)


def test_it_takes_what_was_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem("grouped_matmul", 1, 64, 48, 32, "float16", groups=3)
    key = tuned.key_of(problem, "CPU")
    fields = {field: getattr(key, field) for field in key.__struct_fields__}
    config = Config("local", 32, 16, 16, stages=4, warps=2)
    tuned.record(tmp_path / "t", {key: Entry(**fields, config=config, microseconds=1.0)})
    choice = run(lambda home: Choice(home, "grouped_matmul", path=tmp_path / "t"), 1)[0]
    seen = {}
    kernel = module.multiply_groups.run

    def noted(*args: object, **kwargs: object) -> object:
        seen.update(kwargs, **kwargs["FORM"]._asdict())
        return kernel(*args, **kwargs)

    monkeypatch.setattr(module.multiply_groups, "run", noted)
    x, w, offsets = torch.randn(60, 32).half(), torch.randn(3, 32, 48).half(), offsets_of([9] * 3)
    grouped_matmul(x, w, offsets, choice=choice)
    names = ("block_m", "block_n", "block_k", "num_stages", "num_warps")
    assert [seen[name] for name in names] == [32, 16, 16, 4, 2]
    grouped_matmul(x, w[:2], offsets[:3], choice=choice)  # of other groups nothing is known
    assert [seen[name] for name in names] != [32, 16, 16, 4, 2]


# Faults.


def wrong(faulty: ModuleType) -> bool:
    """Whether a module's numbers are not the oracle's, or stand where none should."""
    torch.manual_seed(0)
    offsets = offsets_of([33, 0, 17, 20], 4)
    x, w = torch.randn(160, 16)[:80], torch.randn(16, 16, 32)[:4]  # what follows is ours, too
    out = torch.full((160, 32), NAN)[:80]
    faulty.grouped_matmul(x, w, offsets, out=out, blocks=BLOCKS, programs=3)
    expected = reference.grouped_matmul(x, w, offsets)
    expected[:4], expected[74:] = NAN, NAN
    if not torch.allclose(out, expected, atol=1e-4, equal_nan=True):
        return True
    order, tokens = torch.randperm(80).int(), torch.randn(60, 16)[:40]
    stray = order.clone()
    stray[40] = 2 * 45  # a token that does not exist
    out.fill_(NAN)
    faulty.grouped_matmul(tokens, w, offsets, order=stray, top_k=2, out=out, blocks=BLOCKS)
    stray[40] = 0
    expected = reference.grouped_matmul(tokens[stray // 2], w, offsets)
    expected[:4], expected[74:] = NAN, NAN
    return not torch.allclose(out, expected, atol=1e-4, equal_nan=True)


FAULTS = {
    "the group before": ("before = through <= row", "before = through < row"),
    "tiles of groups run together": ("tl.cdiv(size, BLOCK_M), 0)", "size // BLOCK_M, 0)"),
    "no mask of rows": ("even_m=False", "even_m=True"),
    "another group's weight": (
        "each = tl.cast(group, tl.int64)",
        "each = tl.cast(before, tl.int64)",
    ),
    "rows from the start": ("first = tl.cast(begin, tl.int64)", "first = tl.cast(row, tl.int64)"),
    "the order from the start": ("order + begin + at", "order + at"),
    "one choice for each token": ("other=0) // top_k", "other=0)"),
    "tokens that do not exist": ("(token >= 0) & (token < tokens)", "token >= 0"),
    "results from the start": ("out + (first + at) * out_columns", "out + at * out_columns"),
    "no end of a group": ("rows -= row * BLOCK_M", "rows -= 0"),
    "tiles left out": ("tl.num_programs(0), flatten", "tl.num_programs(0) + 1, flatten"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, tmp_path: Path) -> None:
    assert not wrong(module)
    assert wrong(planted(module, tmp_path, FAULTS[fault]))


SCALED_FAULTS = {
    "one scale of a row": ("+ start // SCALE_GROUP", "+ start * 0"),
    "another group's scales": ("epilogue.x_scale + first * scales_of_row", "epilogue.x_scale"),
    "one scale of each row": ("tl.cdiv(K, SCALE_GROUP) if SCALE_GROUP > 0 else", "1 if True else"),
    "scales that count twice": (
        "row_scale = None if FORM.scale_group > 0 else x_scale",
        "row_scale = x_scale",
    ),
    "the gate's scales alone": (
        "add_product(second, left, right, of_x)",
        "add_product(second, left, right, None)",
    ),
}


def wrongly_scaled(faulty: ModuleType) -> bool:
    torch.manual_seed(0)
    offsets, x_scale = offsets_of([17, 0, 20]), torch.rand(40, 3)[:37] + 0.5
    x = torch.randn(37, 300).to(FP8)
    ws = [torch.randn(3, 16, 300).to(FP8).mT for _ in range(2)]
    epilogue = Epilogue(x_scale, silu_multiply=True, out_dtype=torch.float32)
    got = faulty.grouped_matmul(x, ws, offsets, epilogue=epilogue, blocks=(16, 16, 64))
    expected = reference.grouped_matmul(x, torch.cat(ws, dim=2), offsets, x_scale)
    return not torch.allclose(
        got, reference.epilogue(expected, gate_up="halves"), atol=1e-2, rtol=1e-4
    )


@pytest.mark.parametrize("fault", SCALED_FAULTS)
def test_faults_of_scales_are_found(fault: str, tmp_path: Path) -> None:
    assert not wrongly_scaled(module)
    assert wrongly_scaled(planted(module, tmp_path, SCALED_FAULTS[fault], parts=[tile]))


# Bad offsets and input.


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 20), min_size=2, max_size=5),
    place=st.integers(0, 5),
    value=st.sampled_from([-(2**31), -5, -1, 61, 62, 1000, 2**31 - 1]),
)
def test_bad_offsets_are_flagged_and_nothing_is_touched(
    sizes: list[int], place: int, value: int
) -> None:
    offsets = offsets_of(sizes).clamp(max=60)
    place = min(place, len(sizes))
    offsets[place] = value
    x, w = torch.randn(60, 8), torch.randn(len(sizes), 8, 4)
    out, status = torch.full((60, 4), NAN), torch.zeros(1, dtype=torch.int32)
    for _ in range(2):  # what a word says stays
        grouped_matmul(x, w, offsets, out=out, status=status, blocks=BLOCKS)
        assert out.isnan().all()
        assert status.item() == 1 + max(0, place - 1)


def test_offsets_that_decrease_are_flagged() -> None:
    status = torch.zeros(1, dtype=torch.int32)
    offsets = torch.tensor([0, 9, 8, 20], dtype=torch.int32)
    x, w = torch.randn(20, 8), torch.randn(3, 8, 4)
    grouped_matmul(x, w, offsets, status=status, blocks=BLOCKS)
    assert status.item() == 2


SCALED: dict[str, object] = {
    "x": torch.randn(20, 8).to(FP8),
    "w": torch.randn(3, 4, 8).to(FP8).mT,
    "epilogue": Epilogue(torch.ones(20, 1)),
}
WIDELY_SCALED = SCALED | {"epilogue": Epilogue(torch.ones(20, 2))}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.randn(20, 8, 1)}, r"x's shape is \[20, 8, 1\]; it must be a matrix"),
        ({"x": torch.randn(20, 0), "w": torch.randn(3, 0, 4)}, "x's columns is 0"),
        ({"w": torch.randn(8, 4)}, r"w's shape is \[8, 4\]; it must be 3 matrices"),
        ({"w": torch.randn(2, 8, 4)}, r"w's shape is \[2, 8, 4\]; it must be 3 matrices"),
        ({"w": torch.randn(3, 7, 4)}, r"w's shape is \[3, 7, 4\]; it must have 8 rows"),
        ({"w": torch.randn(3, 8, 4).half()}, "w's dtype is torch.float16"),
        ({"w": torch.randn(3, 8, 8)[:, :, ::2]}, "w's strides"),
        ({"w": [torch.randn(3, 8, 4)] * 4}, "w is 4 weights"),
        ({"offsets": torch.zeros(4)}, "offsets' dtype is torch.float32; it must be torch.int32"),
        ({"offsets": torch.zeros(1).int()}, r"offsets' shape is \[1\]; it must be \[E \+ 1\]"),
        ({"offsets": torch.zeros(8).int()[::2]}, "offsets' stride"),
        ({"out": torch.empty(20, 5)}, r"out is \[20, 5\] torch.float32; it must be \[20, 4\]"),
        ({"status": torch.zeros(1)}, r"status is \[1\] torch.float32; it must be \[1\] torch.int3"),
        ({"epilogue": Epilogue(bias=torch.zeros(4))}, r"bias's shape is \[4\]; it must be \[3, 4"),
        (
            SCALED | {"blocks": (16, 16, 256)},
            "blocks is \\(16, 16, 256\\); it must have a BLOCK_K of",
        ),
        (SCALED | {"x": torch.randn(20, 8).half()}, "w's dtype is torch.float8_e4m3fn"),
        ({"epilogue": SCALED["epilogue"]}, "x_scale is given with torch.float32"),
        (WIDELY_SCALED, r"x_scale's shape is \[20, 2\]; it must be \[20\] or \[1\] or \[20, 1\]"),
        ({"blocks": (16, 24, 16)}, r"blocks is \(16, 24, 16\)"),
        ({"programs": -1}, "programs is -1"),
        ({"expected": -1}, "expected is -1"),
    ],
)
def test_bad_input_is_named(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "x": torch.randn(20, 8),
        "w": torch.randn(3, 8, 4),
        "offsets": torch.zeros(4, dtype=torch.int32),
    }
    with pytest.raises(KernelError, match=f"grouped_matmul: {message}"):
        grouped_matmul(**arguments | changes)  # type: ignore[arg-type]
