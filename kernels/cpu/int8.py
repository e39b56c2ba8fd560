"""A dense layer for the CPU whose weight is int8 with one scale per output channel.

Weight-only: activations stay as they are, so nothing depends on their range.
A row of the weight is rounded to 127 steps on each side of zero, symmetric
(absmax; Dettmers et al. 2022, section 2). Decoding one request reads all
weights once per token, and int8 halves what is read.

On CPUs with AVX-512 BF16 the layer is a NativeLinear, which widens the integers to
bfloat16, in which they are exact, as it reads them. Int8Linear is for others:
up to FEW_ROWS rows run in torch's weight-only kernel, which goes by whole
vectors: other widths must not be given to it (it does not check, and reads past
the end). With more rows, products are what costs, and that kernel has no fast
ones: blocks of the weight are then converted to the type of the activations and
multiplied by oneDNN; the scales go on the result.

Not handled: gradients, activations in int8, scales per group of inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels.cpu import native
from weft.kernels.cpu.linear import (
    Linear,
    NativeLinear,
    TorchLinear,
    Weight,
    check_linear,
    matmul_transposed,
    whole,
)

FEW_ROWS = 24
"""Up to so many rows, converting on the fly beats converting block by block."""

WHOLE_VECTORS = 64
"""Numbers of inputs and outputs that the kernel for few rows takes are multiples of it."""

BLOCK_NUMBERS = 1 << 21
"""Weights that are converted at once: 4 MiB of bfloat16, which stay in cache."""


def make_int8_linear(weight: Weight, bias: Tensor | None = None, *, gated: bool = False) -> Linear:
    """The fastest int8 layer that there is here; see Int8Linear for the arguments.

    The weight may be in parts, one above the other.
    """
    check_linear(weight, bias, gated=gated)
    weight = whole(weight)
    if not native.supports(weight.dtype):
        return Int8Linear(weight, bias, gated=gated)
    integers, scale = quantize(weight.detach())
    return NativeLinear(integers, bias, scale=scale, gated=gated)


class Int8Linear(TorchLinear):
    """`x @ weight.T + bias`, the weight rounded to int8 by `quantize`.

    Args:
        weight: bfloat16 or float32 [N, K] (out, in), on the CPU; not kept. [2 N, K] if gated.
        bias: [N], the weight's dtype.
        gated: see linear.Linear.

    Raises:
        ValueError: the shapes or dtypes do not go together.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> None:
        check_linear(weight, bias, gated=gated)
        super().__init__(gated)
        self.out_features, self.in_features = weight.shape
        self._weight, self._scale = quantize(weight.detach())
        self._bias = bias
        self._fits_kernel = not any(size % WHOLE_VECTORS for size in weight.shape)

    def product(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N], in the dtype of the weight that was given, for any T from 0."""
        if self._fits_kernel and 0 < len(x) <= FEW_ROWS:
            out: Tensor = torch._weight_int8pack_mm(x.contiguous(), self._weight, self._scale)
        else:
            out = self._by_blocks(x)
        return out if self._bias is None else out.add_(self._bias)

    def _by_blocks(self, x: Tensor) -> Tensor:
        out = x.new_empty(len(x), self.out_features)
        step = max(1, BLOCK_NUMBERS // self.in_features)
        for start in range(0, self.out_features, step):
            block = slice(start, start + step)
            product = matmul_transposed(x, self._weight[block].to(x.dtype))
            torch.mul(product, self._scale[block], out=out[:, block])
        return out


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row to integers in [-127, 127] times a scale.

    The scale is rounded to the weight's dtype before it divides, so that its rounding adds no
    error of its own.

    Args:
        weight: bfloat16 or float32 [N, K].

    Returns:
        int8 [N, K], and the scales, weight's dtype [N]; weight is about their product.
    """
    largest = weight.abs().amax(dim=1) if weight.shape[1] else weight.new_zeros(len(weight))
    scale = largest / 127
    # A row of zeros has any scale; no row may divide by zero.
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    integers = torch.empty(weight.shape, dtype=torch.int8)
    step = max(1, BLOCK_NUMBERS // max(1, weight.shape[1]))
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        steps = weight[rows].float() / scale[rows, None].float()
        integers[rows] = steps.round_().clamp_(-127, 127).to(torch.int8)
    return integers, scale
