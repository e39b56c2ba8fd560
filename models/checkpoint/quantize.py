"""Float matrices -> packed numbers, scales and zero points, as dequantize.py reads them.

Each number is divided by its block's scale and rounded to the nearest code, ties to even. Scales
come from the smallest and largest number in a block, with the formulas of the package
compressed-tensors 0.20 (`calculate_qparams`). A scale has the original matrix's dtype, as
llm-compressor writes it, and it is rounded before the division. The error is therefore at most half
a step, or one step at the end of a range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from weft.models.spec.quantization import QuantSpec

CHUNK = 2**24
"""Numbers that are rounded at a time; bounds the memory for intermediate results."""
FP8_MAX = 448.0


def quantize(
    spec: QuantSpec, name: str, weight: Tensor, scale_dtype: torch.dtype
) -> dict[str, Tensor]:
    """Round a matrix to the nearest codes.

    Args:
        spec: the format; `Scheme.unit` divides the columns.
        name: the matrix's name, which ends in ".weight".
        weight: [out, in], bfloat16, float16 or float32.
        scale_dtype: one of the same; the dtype of the original.

    Returns:
        The matrix's tensors by name, contiguous.
    """
    rounded = round_matrix(spec, weight, scale_dtype)
    tensors = {f"{name}_scale": rounded.scales}
    if spec.format != "packed":
        return tensors | {name: rounded.codes}
    tensors[f"{name}_packed"] = _words(rounded.codes, spec.bits)
    tensors[f"{name}_shape"] = torch.tensor(weight.shape)
    if rounded.zeros is not None:
        # Zero points are packed along the rows.
        tensors[f"{name}_zero_point"] = _words(rounded.zeros.t(), spec.bits).t().contiguous()
    return tensors


@dataclass(frozen=True, slots=True)
class Rounded:
    """A rounded matrix, not packed.

    Attributes:
        codes: int8 or float8 [out, in].
        scales: [row blocks, column blocks], in the dtype of the file.
        zeros: int8, the same shape; None for zero points of 0.
        block: rows and columns with one scale.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    block: tuple[int, int]

    def values(self) -> Tensor:
        """Return the numbers that it stands for, float32 [out, in]."""
        blocks = _in_blocks(self.codes.float(), self.block)
        if self.zeros is not None:
            blocks = blocks - _wide(self.zeros)
        return _joined(blocks * _wide(self.scales), self.codes.shape)


def round_matrix(spec: QuantSpec, weight: Tensor, scale_dtype: torch.dtype) -> Rounded:
    """Round a matrix [out, in] of any float dtype to the nearest codes; see `quantize`."""
    rows, columns = weight.shape
    block = spec.block[0] or rows, spec.block[1] or columns
    step = max(1, CHUNK // columns // block[0]) * block[0]
    parts = [
        _round(spec, weight[start : start + step].float(), block, scale_dtype)
        for start in range(0, rows, step)
    ]
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return Rounded(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(zeros) if zeros else None,
        block,
    )


def _round(
    spec: QuantSpec, weight: Tensor, block: tuple[int, int], scale_dtype: torch.dtype
) -> Rounded:
    """Round float32 rows whose number is a multiple of the block's, but for the last rows."""
    blocks = _in_blocks(weight, block)
    low, high = blocks.amin((1, 3)).clamp(max=0), blocks.amax((1, 3)).clamp(min=0)
    half = 1 << spec.bits - 1
    if spec.zero_points:
        exact = (high - low) / (2 * half - 1)
    else:
        exact = torch.maximum(high, -low) / (FP8_MAX if spec.format == "fp8" else half - 0.5)
    scales = exact.to(scale_dtype)
    # A block of zeros, or of tiny numbers, has codes of 0 with any scale.
    scales[scales == 0] = torch.finfo(scale_dtype).eps
    numbers = blocks / _wide(scales)
    zeros = None
    if spec.zero_points:
        zeros = (-half - low / scales.float()).round().clamp(-half, half - 1)
        numbers += _wide(zeros)
    numbers = _joined(numbers, weight.shape)
    if spec.format == "fp8":
        codes = numbers.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    else:
        codes = numbers.round().clamp(-half, half - 1).to(torch.int8)
    return Rounded(codes, scales, None if zeros is None else zeros.to(torch.int8), block)


def _in_blocks(matrix: Tensor, block: tuple[int, int]) -> Tensor:
    """[R, C] -> [row blocks, rows in one, column blocks, columns in one], padded with 0."""
    (rows, columns), (height, width) = matrix.shape, block
    padded = pad(matrix, (0, -columns % width, 0, -rows % height))
    return padded.view(-(-rows // height), height, -1, width)


def _joined(blocks: Tensor, shape: Sequence[int]) -> Tensor:
    """Undo `_in_blocks`: -> [R, C], contiguous."""
    return blocks.flatten(2).flatten(0, 1)[: shape[0], : shape[1]].contiguous()


def _wide(grid: Tensor) -> Tensor:
    """[row blocks, column blocks] -> float32 that broadcasts over `_in_blocks`."""
    return grid.float()[:, None, :, None]


def _words(codes: Tensor, bits: int) -> Tensor:
    """Pack int8 codes on the last axis into int32 words, the lowest bits first."""
    numbers = (codes + (1 << bits - 1)).to(torch.uint8) if bits < 8 else codes.view(torch.uint8)
    if bits == 8:
        numbers = numbers ^ 128  # adds 128, without the carry
    numbers = pad(numbers, (0, -numbers.shape[1] % (32 // bits)))
    if bits == 4:
        numbers = numbers[:, 0::2] | numbers[:, 1::2] << 4
    return numbers.contiguous().view(torch.int32)
