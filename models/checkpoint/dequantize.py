"""Packed numbers, scales and zero points -> float32 matrices.

In every format a number's value is (code - zero point) * scale, computed in float32: scale and zero
point belong to the number's block. Formats differ in how they pack codes and zero points:

- fp8, int8: one float8 e4m3 or int8 number each; compressed-tensors also packs int4 and int8 into
  int32 words along a row, the lowest bits first, with an offset of half their range.
- AWQ packs eight columns of [in, out] into a word, in the order 0 2 4 6 1 3 5 7 (AutoAWQ, "gemm").
- GPTQ packs eight or four rows of [in, out] into a word; its first version stores the zero point
  less one (AutoGPTQ, GPTQModel).
- mxfp4 packs two fp4 e2m1 numbers into a byte, the lower bits first, and has one power of two for
  32 columns (OCP Microscaling Formats 1.0).
- nvfp4 packs the same, and has one float8 e4m3 scale for 16 columns. The matrix's global scale
  multiplies it (ModelOpt) or divides it (compressed-tensors).

All functions take a part of a matrix, which may begin and end inside a block or a word.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.models.spec.quantization import QuantSpec

CHUNK = 2**22
"""Elements that are computed at a time; bounds the memory for intermediate results."""
WORD_BITS = 32
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1_PAIRS = torch.tensor(
    [
        [sign * E2M1[code & 7] for code in (byte & 15, byte >> 4) for sign in [1 - (code >> 3) * 2]]
        for byte in range(256)
    ]
)
"""The two numbers in each byte, [256, 2]."""
FP4 = ("mxfp4", "mxfp4_packed", "nvfp4", "nvfp4_modelopt")


def dequantize(
    spec: QuantSpec,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    rows: slice,
    columns: slice,
) -> Tensor:
    """Compute a part of a matrix [out, in].

    Args:
        spec: the matrix's format.
        codes: the whole matrix's codes, as in the checkpoint.
        scales: each block's scale, float32 [row blocks, column blocks]; see `scale_grid`.
        zeros: each block's zero point, likewise; see `zero_grid`.
        rows, columns: the part, with a start and a stop.

    Returns:
        float32 [rows, columns].
    """
    width, height = columns.stop - columns.start, rows.stop - rows.start
    if not width or not height:
        return torch.empty(height, width)
    block, blocks, left = width, slice(0, 1), 0
    if scales.shape[1] > 1:  # compute whole blocks, then cut them at the part's ends
        block = spec.block[1]
        blocks = words_of(columns, block)
        left = columns.start - blocks.start * block
    padded = (blocks.stop - blocks.start) * block
    result = torch.zeros(height, padded)
    step = max(8, CHUNK // padded // 8 * 8)
    for start in range(rows.start, rows.stop, step):
        part = slice(start, min(start + step, rows.stop))
        values = result[part.start - rows.start : part.stop - rows.start]
        values[:, left : left + width] = numbers_of(spec, codes, part, columns)
        in_blocks = values.view(len(values), -1, block)
        if zeros is not None:
            in_blocks -= _of_rows(zeros[:, blocks], spec.block[0], part)
        in_blocks *= _of_rows(scales[:, blocks], spec.block[0], part)
    return result[:, left : left + width]


def scale_grid(
    spec: QuantSpec, scales: Tensor, blocks: tuple[int, int], global_scale: Tensor | None = None
) -> Tensor:
    """Convert a matrix's stored scales to float32 [row blocks, column blocks].

    Args:
        spec: the matrix's format.
        scales: the stored scales.
        blocks: how many blocks the matrix has in each direction.
        global_scale: nvfp4's, float32 with one element.
    """
    if spec.format in ("mxfp4", "mxfp4_packed"):
        scales = scales.view(torch.float8_e8m0fnu)
    if _is_transposed(spec):
        scales = scales.t()
    grid = scales.to(torch.float32).reshape(blocks)
    if global_scale is None:
        return grid
    return grid / global_scale if spec.format == "nvfp4" else grid * global_scale


def zero_grid(spec: QuantSpec, zeros: Tensor | None, blocks: tuple[int, int]) -> Tensor | None:
    """Convert a matrix's stored zero points to float32 [row blocks, column blocks].

    Args:
        spec: the matrix's format.
        zeros: the stored zero points; None if the matrix has none.
        blocks: how many blocks the matrix has in each direction.
    """
    if zeros is None:
        return None
    if spec.format == "packed":
        grid = _signed(_unpack(zeros.t(), spec.bits)[:, : blocks[0]].t(), spec.bits)
    elif spec.format == "awq":
        grid = _awq_order(_unpack(zeros, spec.bits)).t()
    elif spec.format in ("gptq", "gptq_v2"):
        # The sum wraps: a zero point of 0 is stored as the largest code.
        stored = _unpack(zeros, spec.bits).t().to(torch.int32)
        grid = stored + 1 & (1 << spec.bits) - 1 if spec.format == "gptq" else stored
    else:
        grid = zeros
    return grid.to(torch.float32).reshape(blocks)


def _is_transposed(spec: QuantSpec) -> bool:
    """True if codes and scales are stored as [in, out]."""
    return spec.format in ("awq", "gptq", "gptq_v2")


def numbers_of(spec: QuantSpec, codes: Tensor, rows: slice, columns: slice) -> Tensor:
    """Unpack a part of the codes: [rows, columns] of any dtype, without zero points or scales.

    Codes of AWQ and GPTQ are uint8, from 0; of compressed-tensors int8, around 0.
    """
    if spec.format in ("fp8", "int8", "fp8_torchao", "int8_torchao"):
        return codes[rows, columns]
    if spec.format in FP4:
        pairs = codes.flatten(1)[rows, columns.start // 2 : -(-columns.stop // 2)]
        numbers = E2M1_PAIRS.index_select(0, pairs.flatten().to(torch.int32))
        numbers = numbers.view(len(pairs), -1)
        return _trimmed(numbers, columns, 2)
    per_word = WORD_BITS // spec.bits
    if spec.format == "awq":
        words = codes[columns, words_of(rows, per_word)]
        return _trimmed(_awq_order(_unpack(words, spec.bits)), rows, per_word).t()
    inner = words_of(columns, per_word)
    words = codes[rows, inner] if spec.format == "packed" else codes[inner, rows].t()
    numbers = _trimmed(_unpack(words, spec.bits), columns, per_word)
    return _signed(numbers, spec.bits) if spec.format == "packed" else numbers


def _signed(numbers: Tensor, bits: int) -> Tensor:
    """Subtract the offset of compressed-tensors' numbers, half their range: uint8 -> int8."""
    return (numbers - (1 << bits - 1)).view(torch.int8)


def words_of(part: slice, per_word: int) -> slice:
    """Return the words, or blocks, that hold a part."""
    return slice(part.start // per_word, -(-part.stop // per_word))


def _trimmed(numbers: Tensor, part: slice, per_word: int) -> Tensor:
    """Cut what `words_of` has in excess, on the last axis."""
    first = part.start % per_word
    return numbers[:, first : first + part.stop - part.start]


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 words on the last axis, the lowest bits first: uint8 [rows, numbers]."""
    each = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 4:
        each = torch.stack((each & 15, each >> 4), dim=-1).flatten(1)
    return each


def _awq_order(numbers: Tensor) -> Tensor:
    """Put unpacked AWQ numbers into the order of the columns: 0 4 1 5 2 6 3 7 of each eight."""
    return numbers.view(len(numbers), -1, 2, 4).transpose(2, 3).flatten(1)


def _of_rows(grid: Tensor, block: int, rows: slice) -> Tensor:
    """Take the rows' blocks from a grid: [rows, column blocks, 1]; one row stands for all."""
    if grid.shape[0] > 1 and block > 1:
        grid = grid.index_select(0, torch.arange(rows.start, rows.stop) // block)
    elif grid.shape[0] > 1:
        grid = grid[rows]
    return grid.unsqueeze(-1)
