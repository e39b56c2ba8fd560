"""Weights that are rounded while they are read: `--quantization` on GPUs.

The numbers are those of the CPU's layers (kernels/cpu/int8.py, int4.py). A weight that the
checkpoint stores quantised stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from weft.kernels.cpu import int4, int8
from weft.kernels.packed import PackedForm, PackedMatrix
from weft.models.spec.layout import Layout
from weft.models.spec.spec import WeightSpec
from weft.models.torch.gpu_layers import WeightSource

FORMS: dict[str, PackedForm] = {
    "int8": ("int8", (1, 0), False),
    "int4": ("int4", (1, int4.GROUP), False),
}


class Rounded:
    """A WeightSource whose products' weights are quantised.

    Args:
        weights: the source.
        quantization: "int8" or "int4".
        dtype: compute dtype, to which numbers are rounded first.
    """

    def __init__(self, weights: WeightSource, quantization: str, dtype: torch.dtype) -> None:
        self._weights, self._quantization, self._dtype = weights, quantization, dtype
        self.read, self.read_each, self.parts = weights.read, weights.read_each, weights.parts
        self.cache_scale = weights.cache_scale

    @property
    def layout(self) -> Layout:
        """See WeightSource."""
        return self._weights.layout

    def packed_form(self, weight: WeightSpec) -> PackedForm | None:
        """See WeightSource; odd numbers of columns stay plain with int4."""
        if weight.stored is not None:
            return self._weights.packed_form(weight)
        return rounded_form(self._quantization, self.parts(weight))

    def read_packed(self, weight: WeightSpec) -> Iterator[PackedMatrix]:
        """See WeightSource."""
        if weight.stored is not None:
            yield from self._weights.read_packed(weight)
            return
        for tensor in self.read_each(weight):
            yield rounded(tensor.to(self._dtype), self._quantization)


def rounded_form(quantization: str, parts: tuple[slice, ...]) -> PackedForm | None:
    """Return the form of a rounded part of a weight; None if it stays plain."""
    columns = parts[-1].stop - parts[-1].start
    return None if quantization == "none" or columns % 2 else FORMS[quantization]


def rounded(weight: Tensor, quantization: str) -> PackedMatrix:
    """Round a matrix [N, K]: float32 or bfloat16."""
    kind, block, _ = FORMS[quantization]
    if kind == "int8":
        integers, scale = int8.quantize(weight)
        return PackedMatrix(kind, integers.view(torch.uint8), scale.float()[:, None], None, block)
    codes, scales = int4.quantize(weight)
    pairs = codes[:, ::2] | codes[:, 1::2] << 4
    return PackedMatrix(kind, pairs, scales.float(), None, block)
