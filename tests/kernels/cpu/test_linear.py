"""Dense layers against the plain product, and against each other."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import compiled_kernels
from torch import Tensor
from torch.nn.functional import silu

from weft.kernels import reference
from weft.kernels.cpu import linear as module
from weft.kernels.cpu import native
from weft.kernels.cpu.linear import Linear, NativeLinear, Norm, PackedLinear, make_linear
from weft.kernels.cpu.quantized import FORMATS, make_rounded_linear

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def expected(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    residual: Tensor | None,
    *,
    gated: bool,
) -> Tensor:
    """Compute a layer's result in float32."""
    if norm is not None:
        x = (
            reference.rms_norm(x, norm.weight, norm.eps)
            if norm.bias is None
            else reference.layer_norm(x, norm.weight, norm.eps, norm.bias)
        ).to(x.dtype)
    out = reference.linear(x, weight, bias)
    if gated:
        gate, up = out.chunk(2, dim=-1)
        out = silu(gate) * up
    return out if residual is None else out + residual.float()


def test_rows_are_padded_to_few_sizes() -> None:
    padded = [module.pad_rows(torch.ones(rows, 2)) for rows in range(4097)]
    assert len({len(x) for x in padded}) == 16 + 8 * 8 + 1
    for rows, x in enumerate(padded):
        assert rows <= len(x) <= rows * 9 / 8
        assert int(x.sum()) == 2 * rows


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_memory_does_not_grow_with_the_numbers_of_rows(dtype: str) -> None:
    """Prompts have any length. Without padding, a layer takes 0.8 MB for each length."""
    program = f"""
import psutil, torch
from weft.kernels.cpu.linear import PackedLinear, matmul_transposed
layer = PackedLinear(torch.randn(512, 192, dtype=torch.{dtype}))
x = torch.randn(1000, 192, dtype=torch.{dtype})
layer.product(x)
before = psutil.Process().memory_info().rss
for rows in range(600):
    layer.product(x[:rows])
    matmul_transposed(x[:rows], x[:100])
print(psutil.Process().memory_info().rss - before)
"""
    command = [sys.executable, "-P", "-c", program]
    grown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert int(grown) < 150 * 2**20


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(0, 70) | st.sampled_from([97, 400, 800]),
    n=st.integers(1, 130),
    k=st.integers(1, 130) | st.sampled_from([700, 1100]),
    dtype=DTYPES,
    with_bias=st.booleans(),
    with_norm=st.sampled_from(["none", "rms", "layer"]),
    with_residual=st.booleans(),
    gated=st.booleans(),
    way=st.sampled_from(["compressed", "plain", "oneDNN", "torch"]),
)
def test_equals_the_reference(
    rows: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    with_bias: bool,
    with_norm: str,
    with_residual: bool,
    gated: bool,
    way: str,
) -> None:
    outputs = 2 * n if gated else n
    x = torch.randn(rows, k).to(dtype)
    weight = (torch.randn(outputs, k) / k**0.5).to(dtype)
    bias = torch.randn(outputs).to(dtype) if with_bias else None
    residual = torch.randn(rows, n).to(dtype) if with_residual else None
    layer: Linear
    if way in ("compressed", "plain"):
        x, weight = x.bfloat16(), weight.bfloat16()
        dtype = torch.bfloat16
        bias = None if bias is None else bias.bfloat16()
        residual = None if residual is None else residual.bfloat16()
        with compiled_kernels(True):
            layer = NativeLinear(weight, bias, gated=gated, compress=way == "compressed")
    else:
        with pytest.MonkeyPatch.context() as patch:
            if way == "torch":
                patch.setattr(module, "can_pack", lambda dtype: False)
            layer = PackedLinear(weight, bias, gated=gated)
    norm = None
    if with_norm != "none":
        shift = torch.rand(k).to(dtype) if with_norm == "layer" else None
        scale = torch.rand(k).to(dtype)
        norm = Norm(scale, 1e-5, is_centered=shift is not None, bias=shift)
    got = layer(x, norm=norm, residual=residual)
    assert got.dtype == dtype
    wanted = expected(x, weight, bias, norm, residual, gated=gated)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.float(), wanted, atol=tolerance, rtol=tolerance)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 100),
    n=st.integers(1, 100),
    k=st.integers(1, 700),
    gated=st.booleans(),
    compress=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_a_compiled_row_does_not_depend_on_its_company(
    rows: int, n: int, k: int, gated: bool, compress: bool, seed: int
) -> None:
    """Not even in its last bit."""
    torch.manual_seed(seed)
    weight = torch.randn(2 * n if gated else n, k).bfloat16()
    with compiled_kernels(True):
        layer = NativeLinear(weight, gated=gated, compress=compress)
    x, norm = torch.randn(rows, k).bfloat16(), Norm(torch.rand(k).bfloat16(), 1e-5)
    residual = torch.randn(rows, n).bfloat16()
    together = layer(x, norm=norm, residual=residual)
    start = int(torch.randint(rows, ()))
    end = int(torch.randint(start + 1, rows + 1, ()))
    part = layer(x[start:end], norm=norm, residual=residual[start:end])
    assert torch.equal(together[start:end], part)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_row_that_is_not_finite_stays_alone(compiled: bool) -> None:
    with compiled_kernels(compiled):
        layer = make_linear(torch.randn(48, 40).bfloat16(), gated=True)
        x = torch.randn(9, 40).bfloat16()
        wanted = layer(x)
        x[4, 3] = torch.nan
        got = layer(x)
    assert got[4].isnan().all()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(got[others], wanted[others])


@pytest.mark.parametrize("compiled", [True, False])
def test_input_may_be_a_view(compiled: bool) -> None:
    x, weight = torch.randn(9, 40).bfloat16(), torch.randn(7, 20).bfloat16()
    with compiled_kernels(compiled):
        layer = make_linear(weight)
        for view in (x[::2, 10:30], x.T[:20, :8].T, x[:1, 20:]):
            torch.testing.assert_close(layer(view), view @ weight.T, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("compiled", [True, False])
def test_weight_may_be_a_view(compiled: bool) -> None:
    x, weight = torch.randn(9, 5).bfloat16(), torch.randn(5, 7).bfloat16().T
    with compiled_kernels(compiled):
        torch.testing.assert_close(make_linear(weight)(x), x @ weight.T, atol=3e-2, rtol=3e-2)


@settings(max_examples=100, deadline=None)
@given(
    heights=st.lists(st.integers(0, 70), min_size=1, max_size=4).filter(any),
    k=st.integers(1, 130),
    rows=st.integers(1, 25),
    gated=st.booleans(),
    with_bias=st.booleans(),
    copied=st.booleans(),
    way=st.sampled_from(
        ["compressed", "plain", "int8", "int4", "torch", "torch int8", "torch int4"]
    ),
    dtype=DTYPES,
)
def test_a_weight_may_be_in_parts(
    heights: list[int],
    k: int,
    rows: int,
    gated: bool,
    with_bias: bool,
    copied: bool,
    way: str,
    dtype: torch.dtype,
) -> None:
    """The layer equals that of the whole weight bit by bit; `copied`: parts are not contiguous."""
    if gated:
        heights = [*heights, sum(heights)]
    if way in ("compressed", "plain", "int8", "int4"):
        dtype = torch.bfloat16
    n = sum(heights)
    weight = (torch.randn(n, k) * torch.exp2(torch.randint(-9, 1, (n, 1)))).to(dtype)
    bias = torch.randn(n).to(dtype) if with_bias else None
    parts = list((weight.T.contiguous().T if copied else weight).split(heights))
    x = torch.randn(rows, k).to(dtype)
    with compiled_kernels(not way.startswith("torch")):
        whole, joined = (
            make_rounded_linear(way[-4:], given, bias, gated=gated)
            if way[-4:] in FORMATS
            else NativeLinear(given, bias, gated=gated, compress=way == "compressed")
            if way != "torch"
            else make_linear(given, bias, gated=gated)
            for given in (weight, parts)
        )
        for part in parts:
            part.fill_(torch.nan)  # else the layer might be reading it
        if way == "torch" and not module.can_pack(dtype):
            return
        assert torch.equal(joined(x), whole(x))


@settings(max_examples=30, deadline=None)
@given(heights=st.lists(st.integers(0, 900), min_size=2, max_size=4), k=st.integers(33, 130))
def test_parts_are_compressed_as_the_whole_is(heights: list[int], k: int) -> None:
    """Also if the exponents are guessed from a sample."""
    n = sum(heights)
    weight = torch.randn(n, k) * torch.exp2(torch.randint(-14, 1, (n, 1)))
    with compiled_kernels(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_ESCAPES", 1.0)
        patch.setattr(module, "SAMPLE", 64)
        whole, joined = map(NativeLinear, (weight.bfloat16(), weight.bfloat16().split(heights)))
    assert joined.matrix.top == whole.matrix.top
    assert joined.nbytes == whole.nbytes


def test_parts_that_do_not_fit_are_refused() -> None:
    first = torch.zeros(3, 5).bfloat16()
    for other in (torch.zeros(3, 6).bfloat16(), torch.zeros(3, 5), torch.zeros(5).bfloat16()):
        for make in (make_linear, *(partial(make_rounded_linear, each) for each in FORMATS)):
            with pytest.raises(ValueError, match=r"weight has shape .* like a part of \(3, 5\)"):
                make((first, other))
    with pytest.raises(ValueError, match="weight has 5 rows; a gated layer"):
        make_linear((first, first[:2]), gated=True)
    with pytest.raises(ValueError, match=r"bias is torch.bfloat16 \(3,\).*\(6,\)"):
        make_linear((first, first), torch.zeros(3).bfloat16())


@pytest.mark.parametrize("compiled", [True, False])
def test_the_plain_weight_is_not_kept(compiled: bool) -> None:
    x, weight = torch.randn(3, 20).bfloat16(), torch.randn(7, 20).bfloat16()
    if not module.can_pack(torch.bfloat16):
        pytest.skip("this torch cannot pack")
    with compiled_kernels(compiled):
        layer, wanted = make_linear(weight), x @ weight.T
        weight.fill_(torch.nan)
        torch.testing.assert_close(layer(x), wanted, atol=3e-2, rtol=3e-2)


def test_the_compiled_layer_is_chosen_where_there_is_one() -> None:
    with compiled_kernels(True):
        if torch.cpu._is_amx_tile_supported():
            pytest.skip("oneDNN's products are faster here")
        assert isinstance(make_linear(torch.randn(4, 4).bfloat16()), NativeLinear)
        assert isinstance(make_linear(torch.randn(4, 4)), PackedLinear)
    with compiled_kernels(False):
        assert isinstance(make_linear(torch.randn(4, 4).bfloat16()), PackedLinear)


def test_a_layer_with_rows_is_compiled_even_beside_matrix_units() -> None:
    with compiled_kernels(True):
        weight = torch.randn(8, 4).bfloat16()
        layer = make_linear(weight.clone(), with_rows=True)
        assert isinstance(layer, NativeLinear)
        assert torch.equal(layer.weight_rows(torch.tensor([5, 0])), weight[[5, 0]])


@pytest.mark.parametrize("compiled", [True, False])
def test_shapes_that_do_not_fit_are_refused(compiled: bool) -> None:
    with compiled_kernels(compiled):
        with pytest.raises(ValueError, match=r"weight has shape \(3,\)"):
            make_linear(torch.zeros(3).bfloat16())
        with pytest.raises(ValueError, match=r"bias is torch.float32 \(4,\).*\(3,\)"):
            make_linear(torch.zeros(3, 5).bfloat16(), torch.zeros(4))
        with pytest.raises(ValueError, match="weight has 3 rows; a gated layer"):
            make_linear(torch.zeros(3, 5).bfloat16(), gated=True)


def test_other_types_are_not_packed() -> None:
    assert not module.can_pack(torch.float64)
    weight = torch.randn(3, 4, dtype=torch.float64)
    assert torch.equal(PackedLinear(weight)(weight), torch.nn.functional.linear(weight, weight))


@st.composite
def weights(draw: st.DrawFn) -> Tensor:
    """Draw bfloat16 [N, K]: normal, over many scales, with zeros, or any bits, including NaN."""
    n, k = draw(st.integers(1, 130)), draw(st.integers(1, 130))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    if draw(st.booleans()):
        return torch.randint(-(2**15), 2**15, (n, k), dtype=torch.int16).view(torch.bfloat16)
    weight = torch.randn(n, k) * 2.0 ** draw(st.integers(-120, 100))
    scales = torch.randint(-draw(st.integers(0, 30)), 1, (n, 1))
    kept = torch.rand(n, k) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    return (weight * torch.exp2(scales) * kept).bfloat16()


def bits(weight: Tensor) -> Tensor:
    return weight.contiguous().view(torch.int16)


@settings(max_examples=150, deadline=None)
@given(weight=weights(), compress=st.booleans())
def test_rows_of_a_packed_weight_are_those_that_were_packed(weight: Tensor, compress: bool) -> None:
    """Bit by bit, for any number of escapes; also the sign of a zero."""
    index = torch.randint(len(weight), (17,))
    with compiled_kernels(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_ESCAPES", 1.0)
        layer = NativeLinear(weight, compress=compress)
        assert (layer.format == native.Format.COMPRESSED) == compress
        assert torch.equal(bits(layer.weight_rows(index)), bits(weight[index]))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 100),
    n=st.integers(1, 100),
    k=st.integers(16, 300),
    gated=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_a_compressed_layer_computes_what_a_plain_one_does(
    rows: int, n: int, k: int, gated: bool, seed: int
) -> None:
    """Except for the order of adding escapes: here a tenth of the numbers, the large ones."""
    torch.manual_seed(seed)
    weight = torch.randn(2 * n if gated else n, k)
    weight = torch.where(torch.rand(weight.shape) < 0.1, weight, weight * 1e-6).bfloat16()
    x = torch.randn(rows, k).bfloat16()
    with compiled_kernels(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_ESCAPES", 1.0)
        plain, compressed = (
            NativeLinear(weight, gated=gated, compress=compress) for compress in (False, True)
        )
        wanted, got = plain(x).float(), compressed(x).float()
    scale = float(wanted.abs().max())
    torch.testing.assert_close(got, wanted, atol=scale * 1e-2, rtol=1e-2)


def test_a_normal_weight_is_stored_in_three_quarters() -> None:
    weight = torch.randn(640, 512).bfloat16()
    with compiled_kernels(True):
        layer = NativeLinear(weight)
    assert layer.format == native.Format.COMPRESSED
    assert 0.75 < layer.nbytes / weight.nbytes < 0.76


def test_a_weight_of_many_scales_is_not_compressed() -> None:
    """Packing stops at the first panels with too many escapes; all panels are then packed plain."""
    weight = (torch.randn(640, 64) * torch.exp2(torch.randint(-40, 0, (640, 1)))).bfloat16()
    with compiled_kernels(True):
        layer = NativeLinear(weight)
        rows = layer.weight_rows(torch.arange(640))
    assert layer.format == native.Format.PLAIN
    assert layer.nbytes == weight.nbytes
    assert rows.equal(weight)


@pytest.mark.parametrize("over", [0, 1])
def test_the_last_escape_that_is_allowed(over: int) -> None:
    """One more, in any panel, and the weight is stored as it is."""
    weight = torch.ones(320, 64)
    most = int(weight.numel() * module.MAX_ESCAPES)
    place = torch.randperm(weight.numel())[: most + over]
    weight.view(-1)[place] = 1e-30
    weight = weight.bfloat16()
    with compiled_kernels(True):
        layer = NativeLinear(weight)
        rows = layer.weight_rows(torch.arange(320))
    assert layer.format == (native.Format.PLAIN if over else native.Format.COMPRESSED)
    assert rows.equal(weight)


def test_rows_of_other_weights_are_refused() -> None:
    weight = torch.zeros(6, 16).bfloat16()
    with compiled_kernels(True):
        others = [make_rounded_linear(each, weight) for each in FORMATS]
        for layer in (NativeLinear(weight, gated=True), *others):
            assert isinstance(layer, NativeLinear)
            with pytest.raises(ValueError, match="not gated"):
                layer.weight_rows(torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("k", [33, 896])
def test_all_columns_tell_the_exponents(k: int) -> None:
    """Also if the sample's stride is a multiple of the row's length."""
    weight = torch.randn(16384, k)
    weight[:, 0] = 0
    with compiled_kernels(True):
        assert NativeLinear(weight.bfloat16()).format == native.Format.COMPRESSED


def test_a_row_that_is_not_there_is_refused() -> None:
    with compiled_kernels(True):
        layer = NativeLinear(torch.zeros(5, 16).bfloat16())
        for index in (-1, 5):
            with pytest.raises(IndexError, match=f"rows .*{index}.* of 5"):
                layer.weight_rows(torch.tensor([0, index]).sort().values)


@pytest.mark.parametrize(
    ("x", "residual", "named"),
    [
        (torch.zeros(2, 8).bfloat16(), None, "x is"),
        (torch.zeros(2, 16), None, "x is"),
        (torch.zeros(2, 3, 16).bfloat16(), None, "x is"),
        (torch.zeros(2, 16).bfloat16(), torch.zeros(3, 5).bfloat16(), "residual is"),
        (torch.zeros(2, 16).bfloat16(), torch.zeros(2, 5), "residual is"),
    ],
)
def test_other_shapes_and_types_are_refused(x: Tensor, residual: Tensor | None, named: str) -> None:
    with compiled_kernels(True):
        layer = NativeLinear(torch.zeros(5, 16).bfloat16())
        with pytest.raises(ValueError, match=named):
            layer(x, residual=residual)
