"""A dense layer for the CPU with a weight of 4 bits, and one bfloat16 scale per group of 32 inputs.

This is weight-only quantization, as in int8.py, with symmetric groups along the input as in
llama.cpp's Q4_0 (ggml/src/ggml-quants.c, quantize_row_q4_0_ref). A weight takes 4.5 bits, 0.28 of
bfloat16. Of a group's scales in SCALES, the one with the least squared error is kept: 7% less error
than Q4_0's on normal numbers. Zero points would save another 11%, but take 5 bits.

quantized.py makes the layers. With compiled kernels, a bfloat16 layer is a NativeLinear: it widens
the integers to bfloat16 as it reads them, which is exact, and multiplies each group's sum by its
scale in float32. With AVX2 but not AVX-512 BF16, it rounds activations to int8. Elsewhere, it is an
Int4Linear.

If the input's size is not a multiple of GROUP, the last group is shorter. Each rank of a tensor
parallel group rounds its own part, so its groups begin with its first input.

Not handled: gradients, zero points.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from weft.kernels.cpu import native
from weft.kernels.cpu.linear import (
    BLOCK_ELEMENTS,
    TorchLinear,
    check_linear,
    matmul_transposed,
)

GROUP = native.GROUP
"""Consecutive inputs of a row that share a scale."""

SCALES = (8 / 7, 1.0, 0.93, 0.86)
"""Scales that are tried for a group, as a fraction of -1/8 of its number of the largest size. The
first one suits a group with numbers of that size on both sides; the last ones clip it.
"""

ZERO = 8
"""The code for zero."""

TORCH_COLUMNS = 16
"""torch's kernel needs an output size that is a multiple of this."""


class Int4Linear(TorchLinear):
    """`x @ weight.T + bias`, with the weight rounded to 4 bits by `quantize`.

    In bfloat16, the product is torch's kernel for such weights. It needs multiples of GROUP inputs
    and TORCH_COLUMNS outputs; zeros fill them up. In float32, that kernel is slower than blocks of
    the weight that are widened and multiplied by oneDNN.

    Args:
        weight: bfloat16 or float32 [N, K] (out, in), on the CPU; not kept. [2 N, K] if gated.
        bias: [N], the weight's dtype.
        gated: see linear.Linear.

    Raises:
        ValueError: the shapes or dtypes do not match.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> None:
        check_linear(weight, bias, gated=gated)
        super().__init__(gated)
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        codes, scale = quantize(weight.detach())
        self._fill = -self.in_features % GROUP
        codes = pad(codes, (0, self._fill), value=ZERO)
        self._scale, self._codes = scale, codes[:, ::2] | codes[:, 1::2] << 4
        self._in_torch = weight.dtype == torch.bfloat16
        if self._in_torch:
            rows = -self.out_features % TORCH_COLUMNS
            codes = pad(codes, (0, 0, 0, rows), value=ZERO).to(torch.int32)
            self._codes = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
            zeros = torch.zeros_like(scale)
            self._scale = pad(torch.stack((scale, zeros), -1), (0, 0, 0, 0, 0, rows))
            self._scale = self._scale.transpose(0, 1).contiguous()

    def product(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N], in the original weight's dtype, for any T from 0."""
        x = pad(x, (0, self._fill))
        if not self._in_torch:
            out = self._by_blocks(x)
        elif len(x):
            out = torch._weight_int4pack_mm_for_cpu(
                x.contiguous(), self._codes, GROUP, self._scale
            )[:, : self.out_features]
        else:
            out = x.new_empty(0, self.out_features)
        return out if self._bias is None else out + self._bias

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and scales."""
        return self._codes.nbytes + self._scale.nbytes

    def _by_blocks(self, x: Tensor) -> Tensor:
        out = x.new_empty(len(x), self.out_features)
        step = max(1, BLOCK_ELEMENTS // max(1, x.shape[1]))
        for start in range(0, self.out_features, step):
            block = slice(start, start + step)
            codes = self._codes[block]
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
            out[:, block] = matmul_transposed(x, dequantize(codes, self._scale[block]))
        return out


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round each group of a row to integers from -8 to 7 times a scale.

    Scales are rounded before they divide, so their rounding adds no further error.

    Args:
        weight: bfloat16 or float32 [N, K].

    Returns:
        codes, uint8 [N, K]: the integers plus ZERO. Scales, weight's dtype [N, ceil(K / GROUP)].
    """
    rows, width = weight.shape
    groups = -(-width // GROUP)
    codes = torch.empty(rows, width, dtype=torch.uint8)
    scales = torch.empty(rows, groups, dtype=weight.dtype)
    step = max(1, BLOCK_ELEMENTS // max(1, width))
    for start in range(0, rows, step):
        block = slice(start, start + step)
        numbers = pad(weight[block].float(), (0, groups * GROUP - width))
        numbers = numbers.view(len(numbers), groups, GROUP)
        best, scale = _round(numbers, weight.dtype)
        codes[block] = best.add_(ZERO).to(torch.uint8).flatten(1)[:, :width]
        scales[block] = scale
    return codes, scales


def _round(numbers: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Find the scales and integers with the least squared error: float32 [..., GROUP]."""
    largest = numbers.gather(-1, numbers.abs().argmax(dim=-1, keepdim=True))
    least = scale = integers = None
    for fraction in SCALES:
        # A group of zeros may have any scale, but must not divide by zero. NaN stays NaN.
        tried = (largest * (-fraction / 8)).to(dtype).float()
        tried = torch.where(tried == 0, torch.ones_like(tried), tried)
        rounded = (numbers / tried).round_().clamp_(-8, 7)
        error = (rounded * tried - numbers).square_().sum(dim=-1, keepdim=True)
        if least is None or scale is None or integers is None:
            least, scale, integers = error, tried, rounded
            continue
        better = error < least
        least = torch.where(better, error, least)
        scale = torch.where(better, tried, scale)
        integers = torch.where(better, rounded, integers)
    assert scale is not None
    assert integers is not None
    # A scale without a number would only widen the range of its row's scales.
    scale = scale.masked_fill((integers == 0).all(dim=-1, keepdim=True), 0)
    return integers.nan_to_num_(), scale.squeeze(-1)


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """Undo `quantize`: [N, K] -> [N, K], in the scales' dtype."""
    each = scale.float().repeat_interleave(GROUP, dim=1)[:, : codes.shape[1]]
    return ((codes.float() - ZERO) * each).to(scale.dtype)
