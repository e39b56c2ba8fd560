"""Every epilogue of the plain product against its oracle, the same with torch, and bad input."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.overlapped import DTYPES, FP8, SEEDS, close

from weft.kernels import reference
from weft.kernels.gpu.matmul.epilogue import Epilogue
from weft.kernels.gpu.matmul.matmul import matmul
from weft.kernels.gpu.runtime.arguments import KernelError
from weft.kernels.interpreter import gpu as interpreter


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    with interpreter.installed():
        yield


@settings(max_examples=50, deadline=None)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 24).map(lambda half: 2 * half),
    k=st.integers(0, 40),
    gate_up=st.sampled_from(["", "alternate", "halves"]),
    bias=st.none() | DTYPES,
    residual=st.none() | DTYPES,
    dtype=DTYPES,
    out_dtype=DTYPES,
    seed=SEEDS,
)
def test_any_epilogue(
    m: int,
    n: int,
    k: int,
    gate_up: str,
    bias: torch.dtype | None,
    residual: torch.dtype | None,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    x, w = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype) / 4
    columns = n // 2 if gate_up else n
    b = None if bias is None else torch.randn(n).to(bias)
    r = None if residual is None else torch.randn(m, columns).to(residual)
    epilogue = Epilogue(bias=b, silu_multiply=bool(gate_up), residual=r, out_dtype=out_dtype)
    product = x.float() @ w.float()
    expected = reference.epilogue(product, bias=b, gate_up=gate_up, residual=r)
    ws = [half.contiguous() for half in w.split(n // 2, dim=1)] if gate_up == "halves" else w
    got = matmul(x, ws, epilogue=epilogue, blocks=(16, 32, 16))
    close(got, expected, out_dtype)
    with_torch = epilogue.apply(product, dtype, side_by_side=gate_up == "halves")
    close(with_torch, expected, out_dtype)


@settings(max_examples=30, deadline=None)
@given(
    m=st.integers(1, 40),
    widths=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    silu=st.booleans(),
    by_row=st.none() | st.booleans(),
    by_column=st.none() | st.booleans(),
    seed=SEEDS,
)
def test_scales_of_fp8(
    m: int,
    widths: list[int],
    silu: bool,
    by_row: bool | None,
    by_column: bool | None,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    k = 40
    if silu:
        widths = [widths[0]] * 2
    x = torch.randn(m, k).to(FP8)
    ws = [torch.randn(n, k).to(FP8).T for n in widths]
    n = sum(widths)
    x_scale = None if by_row is None else torch.rand(m if by_row else 1) + 0.5
    w_scale = None if by_column is None else torch.rand(n if by_column else 1) + 0.5
    left = x.float() * (1 if x_scale is None else x_scale[:, None])
    right = torch.cat([w.float() for w in ws], dim=1) * (1 if w_scale is None else w_scale)
    bias = torch.randn(n)
    epilogue = Epilogue(x_scale, w_scale, bias=bias, silu_multiply=silu, out_dtype=torch.float32)
    got = matmul(x, ws, epilogue=epilogue, blocks=(16, 16, 32))
    expected = reference.epilogue(left @ right, bias=bias, gate_up="halves" if silu else "")
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-4)


# On a GPU e^300 is infinite without a word.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_silu_of_what_is_far_from_zero() -> None:
    x, w = torch.tensor([[300.0, -300.0]]), torch.tensor([[1.0, 1.0, 0, 0], [0, 0, 1.0, 1.0]])
    got = matmul(x, w, epilogue=Epilogue(silu_multiply=True), blocks=(16, 16, 16))
    assert got.tolist() == [[90_000.0, 0.0]]


M, N = 6, 8
BAD = {
    "bias's shape is [7]; it must be [8]": Epilogue(bias=torch.zeros(7)),
    "bias's dtype is torch.int32": Epilogue(bias=torch.zeros(8, dtype=torch.int32)),
    "bias's stride is (2,)": Epilogue(bias=torch.zeros(16)[::2]),
    "bias's device is meta": Epilogue(bias=torch.zeros(8, device="meta")),
    "residual's shape is [6, 8]; it must be [6, 4]": Epilogue(
        silu_multiply=True, residual=torch.zeros(M, N)
    ),
    "residual's stride is (1, 6)": Epilogue(residual=torch.zeros(N, M).T),
    "out_dtype is torch.int8; it must be one of torch.float32": Epilogue(out_dtype=torch.int8),
    "x_scale is given with torch.float32": Epilogue(x_scale=torch.ones(M)),
    "w_scale is given with torch.float32": Epilogue(w_scale=torch.ones(1)),
}


@pytest.mark.parametrize("message", BAD)
def test_what_does_not_go_with_the_product_is_refused(message: str) -> None:
    with pytest.raises(KernelError) as error:
        matmul(torch.zeros(M, 4), torch.zeros(4, N), epilogue=BAD[message])
    assert str(error.value).startswith(f"matmul: {message}")


@pytest.mark.parametrize(
    ("epilogue", "message"),
    [
        (Epilogue(x_scale=torch.ones(5)), "x_scale's shape is [5]; it must be [6] or [1]"),
        (Epilogue(w_scale=torch.ones(6)), "w_scale's shape is [6]; it must be [8] or [1]"),
        (Epilogue(x_scale=torch.ones(6).half()), "x_scale's dtype is torch.float16"),
    ],
)
def test_scales_that_do_not_fit_are_refused(epilogue: Epilogue, message: str) -> None:
    with pytest.raises(KernelError) as error:
        matmul(torch.zeros(M, 4).to(FP8), torch.zeros(4, N).to(FP8), epilogue=epilogue)
    assert message in str(error.value)


@pytest.mark.parametrize("widths", [[7], [4, 6], [2, 2, 2]])
def test_gate_and_up_of_different_widths_are_refused(widths: list[int]) -> None:
    ws = [torch.zeros(4, width) for width in widths]
    with pytest.raises(KernelError, match="matmul: w's columns"):
        matmul(torch.zeros(M, 4), ws, epilogue=Epilogue(silu_multiply=True))
