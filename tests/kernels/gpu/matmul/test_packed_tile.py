"""Products with quantised weights: every kind, block and shape; zero points; faults; bad input."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.faults import planted
from support.overlapped import SEEDS, close
from torch import Tensor

from weft.kernels import reference
from weft.kernels.gpu.experts.grouped_matmul import grouped_matmul
from weft.kernels.gpu.matmul import packed_tile as module
from weft.kernels.gpu.matmul.epilogue import FP8, Epilogue
from weft.kernels.gpu.matmul.matmul import matmul
from weft.kernels.gpu.matmul.packed_tile import dequantize
from weft.kernels.gpu.runtime.arguments import KernelError
from weft.kernels.interpreter import gpu as interpreter
from weft.kernels.packed import E2M1, KINDS, PAIRED, Kind, PackedMatrix

NAN = float("nan")


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    with interpreter.installed():
        yield


def made(
    kind: Kind, shape: tuple[int, ...], block: tuple[int, int] = (1, 16), zeros: bool = False
) -> PackedMatrix:
    """Make a matrix [..., N, K] of random codes, but NaN."""
    *leading, rows, columns = shape
    width = columns // 2 if kind in PAIRED else columns
    codes = torch.randint(0, 256, (*leading, rows, width), dtype=torch.uint8)
    if kind == "fp8":
        codes[(codes & 127) == 127] = 0
    grid = [-(-n // (size or n)) if n else 1 for n, size in zip(shape[-2:], block, strict=True)]
    points = torch.randint(-8, 8, (*leading, *grid)).to(torch.int8) if zeros else None
    scales = torch.rand(*leading, *grid) + 0.5  # of the largest number
    largest = {"fp8": 448, "int8": 128, "int4": 8, "fp4": 6}[kind]
    return PackedMatrix(kind, codes, scales / largest, points, block)


def numbers(matrix: PackedMatrix) -> Tensor:
    """Return a matrix's numbers, one by one: the oracle."""
    rows, columns = matrix.shape[-2:]
    height, width = (size or n for size, n in zip(matrix.block, (rows, columns), strict=True))
    out = torch.empty(rows, columns)
    for n in range(rows):
        for k in range(columns):
            if matrix.kind in PAIRED:
                code = int(matrix.codes[n, k // 2]) >> 4 * (k % 2) & 15
            else:
                code = int(matrix.codes[n, k])
            if matrix.kind == "fp8":
                value = float(torch.tensor(code, dtype=torch.uint8).view(FP8))
            elif matrix.kind == "int8":
                value = code - 256 * (code > 127)
            else:
                value = code - 8 if matrix.kind == "int4" else E2M1[code & 7] * (-1) ** (code >> 3)
            at = n // height, k // width
            zero = 0 if matrix.zeros is None else int(matrix.zeros[at])
            out[n, k] = torch.tensor(value - zero) * matrix.scales[at]
    return out


FORMS = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(KINDS),
        "block": st.tuples(st.sampled_from([0, 1, 3, 8, 64]), st.sampled_from([0, 16, 32, 128])),
        "zeros": st.booleans(),
    }
)


@settings(max_examples=40, deadline=None)
@given(form=FORMS, rows=st.integers(1, 40), pairs=st.integers(1, 80), seed=SEEDS)
def test_numbers_are_exact(form: dict[str, object], rows: int, pairs: int, seed: int) -> None:
    torch.manual_seed(seed)
    matrix = made(shape=(rows, 2 * pairs), **form)  # type: ignore[arg-type]
    expected = numbers(matrix)
    assert torch.equal(matrix.dequantize(), expected)
    assert torch.equal(dequantize(matrix, torch.full(matrix.shape, NAN)), expected)


@settings(max_examples=25, deadline=None)
@given(
    form=FORMS,
    m=st.integers(1, 40),
    n=st.integers(1, 40),
    pairs=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    gated=st.booleans(),
    biased=st.booleans(),
    blocks=st.sampled_from([(16, 16, 16), (16, 32, 64), None]),
    seed=SEEDS,
)
def test_products_are_those_of_the_rounded_numbers(
    form: dict[str, object],
    m: int,
    n: int,
    pairs: int,
    dtype: torch.dtype,
    gated: bool,
    biased: bool,
    blocks: tuple[int, int, int] | None,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    weights = [made(shape=(n, 2 * pairs), **form) for _ in range(1 + gated)]  # type: ignore[arg-type]
    x = torch.randn(m, 2 * pairs).to(dtype)
    bias = torch.randn(n * len(weights)).to(dtype) if biased else None
    epilogue = Epilogue(bias=bias, silu_multiply=gated, out_dtype=torch.float32)
    got = matmul(x, weights if gated else weights[0], epilogue=epilogue, blocks=blocks)
    dense = torch.cat([numbers(each).to(dtype) for each in weights])
    expected = reference.linear(x, dense, bias)
    close(got, reference.epilogue(expected, gate_up="halves" if gated else ""), torch.float32)


@settings(max_examples=20, deadline=None)
@given(
    form=FORMS,
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    n=st.integers(1, 40),
    pairs=st.integers(1, 40),
    gated=st.booleans(),
    programs=st.integers(0, 3),
    seed=SEEDS,
)
def test_groups_have_their_own_numbers_and_scales(
    form: dict[str, object],
    sizes: list[int],
    n: int,
    pairs: int,
    gated: bool,
    programs: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    shape = (len(sizes), n, 2 * pairs)
    weights = [made(shape=shape, **form) for _ in range(1 + gated)]  # type: ignore[arg-type]
    offsets = torch.tensor([0, *sizes]).cumsum(0).int()
    x = torch.randn(sum(sizes), 2 * pairs)
    epilogue = Epilogue(silu_multiply=gated)
    got = grouped_matmul(x, weights, offsets, epilogue=epilogue, programs=programs)
    dense = [dequantize(each, torch.full(each.shape, NAN)) for each in weights]
    for matrix, values in zip(weights, dense, strict=True):
        assert torch.equal(values, matrix.dequantize())
    product = reference.grouped_matmul(x, torch.cat([w.mT for w in dense], dim=2), offsets)
    close(got, reference.epilogue(product, gate_up="halves" if gated else ""), torch.float32)


FAULTS: dict[str, tuple[str, str]] = {
    "a zero point of the first block": (
        "zeros + at, mask=n < N, other=0",
        "zeros + top, mask=n < N, other=0",
    ),
    "the scale of the first block": ("start // COLUMNS if", "start // COLUMNS * 0 if"),
    "the first row's scale": ("n // ROWS if", "n * 0 if"),
    "codes in the wrong order": ("byte & 15, byte >> 4", "byte >> 4, byte & 15"),
    "an fp8 bias of 8": ("* 256.0", "* 128.0"),
    "fp4 without subnormals": ("(bits & 7) << 9)", "(bits & 6) << 9)"),
    "codes without a sign": ("code.to(tl.int8, bitcast=True)", "code"),
    "groups that are not repeated": ("start // COLUMNS + tl.arange", "0 * start + tl.arange"),
}


def wrong_with(tile: object) -> bool:
    """Tell whether numbers are wrong in one of a few matrices."""
    torch.manual_seed(0)
    for kind in KINDS:
        for block in ((1, 512), (8, 16)):
            matrix = made(kind, (24, 1024), block, zeros=True)
            got = tile.dequantize(matrix, torch.empty(matrix.shape))  # type: ignore[attr-defined]
            if not torch.equal(got, matrix.dequantize()):
                return True
    return False


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, tmp_path: Path) -> None:
    assert wrong_with(planted(module, tmp_path, FAULTS[fault]))


def test_without_a_fault_nothing_is_found() -> None:
    assert not wrong_with(module)


@pytest.mark.parametrize(
    ("weights", "x", "options", "problem"),
    [
        ([made("fp8", (8, 32))] * 3, torch.zeros(2, 32), {}, "w is 3 quantised weights"),
        ([made("fp8", (8, 32))] * 2, torch.zeros(2, 32), {}, "w is 2 quantised weights"),
        ([made("fp8", (8, 32)), torch.zeros(32, 8)], torch.zeros(2, 32), {}, "w is a Tensor"),
        ([made("fp8", (8, 32)), made("int8", (8, 32))], torch.zeros(2, 32), {}, "w's forms"),
        ([made("fp8", (8, 32))], torch.zeros(2, 16), {}, "w's shape is .8, 32.* 16 columns"),
        ([made("fp8", (2, 8, 32))], torch.zeros(2, 32), {}, "w's shape is .2, 8, 32"),
        ([made("fp8", (8, 32))], torch.zeros(2, 32).to(FP8), {}, "x's dtype is .*float8"),
        (
            [made("fp8", (8, 96), (1, 64))],
            torch.zeros(2, 96),
            {"blocks": (16, 16, 256)},
            None,
        ),
        ([made("fp8", (8, 96), (1, 48))], torch.zeros(2, 96), {"blocks": (16, 16, 32)}, "BLOCK_K"),
        ([made("fp8", (8, 32))], torch.zeros(2, 32), {"tma": True}, "tma is True"),
    ],
)
def test_bad_weights_are_refused(
    weights: list[PackedMatrix], x: Tensor, options: dict[str, object], problem: str | None
) -> None:
    if problem is None:
        matmul(x, weights, **options)  # type: ignore[arg-type]
        return
    with pytest.raises(KernelError, match=problem):
        matmul(x, weights, **options)  # type: ignore[arg-type]
