"""A dense layer for the CPU with an int8 weight and one scale per output channel.

This is weight-only quantization: activations stay as they are, so nothing depends on their range. A
weight row is rounded to 127 steps on each side of zero, symmetric (absmax; Dettmers et al. 2022,
section 2). Decoding one request reads all weights once per token, and int8 halves these bytes.

quantized.py makes the layers. With compiled kernels, a bfloat16 layer is a NativeLinear. It widens
the integers to bfloat16 as it reads them, which is exact. Int8Linear serves other CPUs. Up to
FEW_ROWS rows run in torch's weight-only kernel. That kernel works on whole vectors and does not
check: other widths would make it read out of bounds. With more rows, products dominate, and that
kernel has no fast ones. Blocks of the weight are then converted to the activations' dtype and
multiplied by oneDNN, and the scales are applied to the result.

Not handled: gradients, int8 activations, scales per input group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels.cpu.linear import (
    BLOCK_ELEMENTS,
    TorchLinear,
    check_linear,
    matmul_transposed,
)

FEW_ROWS = 24
"""Maximum number of rows for which converting on the fly beats converting block by block."""

WHOLE_VECTORS = 64
"""The kernel for few rows needs in- and output sizes that are multiples of this."""


class Int8Linear(TorchLinear):
    """`x @ weight.T + bias`, with the weight rounded to int8 by `quantize`.

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
        self._weight, self._scale = quantize(weight.detach())
        self._bias = bias
        self._fits_kernel = not any(size % WHOLE_VECTORS for size in weight.shape)

    def product(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N], in the original weight's dtype, for any T from 0."""
        if self._fits_kernel and 0 < len(x) <= FEW_ROWS:
            out: Tensor = torch._weight_int8pack_mm(x.contiguous(), self._weight, self._scale)
        else:
            out = self._by_blocks(x)
        return out if self._bias is None else out.add_(self._bias)

    def _by_blocks(self, x: Tensor) -> Tensor:
        out = x.new_empty(len(x), self.out_features)
        step = max(1, BLOCK_ELEMENTS // self.in_features)
        for start in range(0, self.out_features, step):
            block = slice(start, start + step)
            product = matmul_transposed(x, self._weight[block].to(x.dtype))
            torch.mul(product, self._scale[block], out=out[:, block])
        return out


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row to integers in [-127, 127] times a scale.

    The scale is rounded to the weight's dtype before it divides, so its rounding adds no further
    error.

    Args:
        weight: bfloat16 or float32 [N, K].

    Returns:
        int8 [N, K], and the scales, weight's dtype [N]; their product approximates the weight.
    """
    largest = weight.abs().amax(dim=1) if weight.shape[1] else weight.new_zeros(len(weight))
    scale = largest / 127
    # A row of zeros may have any scale, but must not divide by zero. NaN stays NaN.
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    integers = torch.empty(weight.shape, dtype=torch.int8)
    step = max(1, BLOCK_ELEMENTS // max(1, weight.shape[1]))
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        steps = weight[rows].float() / scale[rows, None].float()
        integers[rows] = steps.round_().clamp_(-127, 127).to(torch.int8)
    return integers, scale
