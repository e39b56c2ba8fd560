"""The plain persistent product: every shape, layout and way to load, the tile order, bad input."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.overlapped import BLOCKS, DTYPES, FP8, SEEDS, close

from weft.kernels.gpu.matmul.matmul import matmul, takes_tma
from weft.kernels.gpu.matmul.operands import Weights
from weft.kernels.gpu.matmul.tile import tile_at
from weft.kernels.gpu.runtime.arguments import KernelError
from weft.kernels.interpreter import gpu as interpreter


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    with interpreter.installed():
        yield


@settings(max_examples=16, deadline=None)
@given(
    m=st.integers(1, 70),
    widths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    k=st.integers(0, 70),
    blocks=st.sampled_from([BLOCKS, (32, 16, 16), (16, 32, 32)]),
    dtype=DTYPES,
    transposed=st.booleans(),
    programs=st.integers(0, 5),
    seed=SEEDS,
)
def test_any_shape(
    m: int,
    widths: list[int],
    k: int,
    blocks: tuple[int, int, int],
    dtype: torch.dtype,
    transposed: bool,
    programs: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    x = torch.randn(m, k).to(dtype)
    ws = [torch.randn(k, n).to(dtype) for n in widths]
    given_ws = [w.T.contiguous().T if transposed else w for w in ws]
    got = matmul(x, given_ws[0] if len(ws) == 1 else given_ws, blocks=blocks, programs=programs)
    close(got, x.float() @ torch.cat(ws, dim=1).float(), dtype)


@settings(max_examples=20, deadline=None)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 5),
    k=st.integers(1, 5),
    dtype=DTYPES,
    transposed=st.booleans(),
    seed=SEEDS,
)
def test_loads_through_descriptors(
    m: int, n: int, k: int, dtype: torch.dtype, transposed: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    x, w = torch.randn(m, 8 * k).to(dtype), torch.randn(8 * k, 8 * n).to(dtype)
    stored = w.T.contiguous().T if transposed else w
    got = matmul(x, stored, blocks=(16, 16, 32), tma=True)
    close(got, x.float() @ w.float(), dtype)


def test_rows_that_are_not_at_multiples_of_16_bytes_take_no_descriptor() -> None:
    x, w = torch.ones(4, 7), torch.ones(7, 8)
    assert not takes_tma(x, Weights((w,), [8], False), False)
    with pytest.raises(KernelError, match="matmul: tma is True; it must be false"):
        matmul(x, w, tma=True)


def test_fp8_becomes_bfloat16() -> None:
    x, w = torch.randn(20, 40).to(FP8), torch.randn(30, 40).to(FP8).T
    close(matmul(x, w, blocks=(16, 16, 32)), x.float() @ w.float(), torch.bfloat16)


@pytest.mark.parametrize("m", [1, 20, 130])
def test_the_tiling_that_it_chooses(m: int) -> None:
    x, w = torch.randn(m, 80), torch.randn(80, 140)
    close(matmul(x, w), x @ w, torch.float32)


@triton.jit
def list_tiles(out, rows, columns, GROUP: tl.constexpr):
    for index in range(rows * columns):
        row, column = tile_at(index, rows, columns, GROUP)
        tl.store(out + 2 * index, row)
        tl.store(out + 2 * index + 1, column)


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 20), columns=st.integers(1, 12), group=st.integers(1, 24))
def test_every_tile_comes_once_and_a_group_before_the_next(
    rows: int, columns: int, group: int
) -> None:
    out = torch.full((rows * columns, 2), -1, dtype=torch.int32)
    list_tiles[(1,)](out, rows, columns, GROUP=group)
    tiles = [(row, column) for row, column in out.tolist()]
    assert sorted(tiles) == [(row, column) for row in range(rows) for column in range(columns)]
    assert tiles == sorted(tiles, key=lambda tile: (tile[0] // group, tile[1], tile[0]))


FAULTS = ["rank", "rows", "dtype", "mixed", "x stride", "w stride", "none", "many", "blocks"]
FAULTS += ["warps", "stages", "programs"]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_bad_input_is_named_and_nothing_is_launched(data: st.DataObject) -> None:
    x, w = torch.randn(8, 16), torch.randn(16, 32)
    options: dict[str, object] = {}
    fault = data.draw(st.sampled_from(FAULTS))
    ws: object = w
    match fault:
        case "rank":
            x, named = torch.randn(*data.draw(st.sampled_from([(8,), (2, 8, 16)]))), "x's shape"
        case "rows":
            rows = data.draw(st.integers(0, 40))
            assume(rows != 16)
            ws, named = torch.randn(rows, 32), f"w's shape is [{rows}, 32]; it must have 16 rows"
        case "dtype":
            dtype = data.draw(st.sampled_from([torch.int8, torch.float64, torch.float8_e5m2]))
            x, ws, named = x.to(dtype), w.to(dtype), f"x's dtype is {dtype}"
        case "mixed":
            ws, named = w.half(), "w's dtype is torch.float16; it must be torch.float32"
        case "x stride":
            x, named = torch.randn(16, 8).T, "x's stride"
        case "w stride":
            ws, named = torch.randn(16, 64)[:, ::2], "w's strides"
        case "none":
            ws, named = [], "w is 0 weights; it must be 1 to 3"
        case "many":
            ws, named = [w] * 4, "w is 4 weights"
        case "blocks":
            blocks = tuple(data.draw(st.lists(st.integers(-64, 64), min_size=3, max_size=3)))
            assume(any(side not in (16, 32, 64) for side in blocks))
            options, named = {"blocks": blocks}, f"blocks is {blocks}"
        case _:
            value = data.draw(st.integers(-9, -1) if fault != "warps" else st.sampled_from([3, 64]))
            options, named = {fault: value}, f"{fault} is {value}"
    with pytest.raises(KernelError) as error:
        matmul(x, ws, **options)  # type: ignore[arg-type]
    assert str(error.value).startswith("matmul: ")
    assert named in str(error.value)
