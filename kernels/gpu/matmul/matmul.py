"""Matrix product on one rank.

    matmul(x [M, K], w [K, N]) -> [M, N]

Protocol. `multiply` is persistent: the grid has as many programs as the device runs at the same
time, and each program loops over tiles of the result (tile.py). Each tile is computed and stored by
exactly one program. Ranks do not communicate, so there are no signals and no slots.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.kernels.gpu.matmul.epilogue import NOTHING, Epilogue
from weft.kernels.gpu.matmul.operands import Operand, Weights
from weft.kernels.gpu.matmul.tile import count_columns, multiply_and_finish, tile_at
from weft.kernels.gpu.matmul.tiling import Tiling, choose_tiling, form_of
from weft.kernels.gpu.runtime.arguments import require
from weft.kernels.gpu.runtime.target import target
from weft.kernels.gpu.tuning.costs import count_processors


@triton.jit(do_not_specialize=["M"])
def multiply(
    x,  # [M, K]; or TMA descriptor
    w0,  # [K, n0], or [n0, K] if FORM.transposed; or TMA descriptor
    w1,
    w2,
    widths,  # n0, n1, n2
    M,
    K,
    epilogue,  # EpilogueOperands
    out,  # [M, N']
    scales,  # of packed weights, w0's and w1's, or None: load_right
    zeros,
    FORM: tl.constexpr,
):
    """Compute all tiles of the result. Grid: (programs,), persistent."""
    BLOCK_M: tl.constexpr = FORM.block_m
    GROUP: tl.constexpr = FORM.group
    rows = tl.cdiv(M, BLOCK_M)
    columns = count_columns(widths, FORM)
    # Flattened: the next tile's first blocks are loaded while this tile is stored.
    for tile in tl.range(tl.program_id(0), rows * columns, tl.num_programs(0), flatten=True):
        row, column = tile_at(tile, rows, columns, GROUP)
        multiply_and_finish(
            x, row * BLOCK_M, M, column, w0, w1, w2, widths, epilogue.x_scale, epilogue.w_scale,
            epilogue.bias, epilogue.residual, out, K, FORM, scales[0], zeros[0], scales[1],
            zeros[1],
        )  # fmt: skip


def takes_tma(x: Tensor, weights: Weights, silu_multiply: bool) -> bool:
    """Tell if the tensor memory accelerator can load the operands.

    A TMA descriptor needs a tensor with elements, whose address and row stride are multiples of 16
    bytes. Kernels take descriptors for one weight, or for gate and up.
    """
    stored = [x, *(tensor.T if weights.transposed else tensor for tensor in weights.tensors)]
    return (
        not weights.packed
        and len(weights.tensors) <= (2 if silu_multiply else 1)
        and all(
            tensor.numel() > 0
            and tensor.data_ptr() % 16 == 0
            and tensor.shape[1] * tensor.element_size() % 16 == 0
            for tensor in stored
        )
    )


def matmul(
    x: Tensor,
    w: Operand | Sequence[Operand],
    *,
    epilogue: Epilogue = NOTHING,
    blocks: tuple[int, int, int] | None = None,
    warps: int = 0,
    stages: int = 0,
    programs: int = 0,
    tma: bool | None = None,
) -> Tensor:
    """Compute the product and its epilogue on one rank.

    Args:
        x: [M, K], contiguous; float32, float16, bfloat16 or float8_e4m3fn.
        w: [K, N], x's dtype, contiguous or the transpose of a contiguous matrix; or up to three
            such weights, which count as one with their columns side by side. Or a PackedMatrix
            [N, K], or two of one form with silu_multiply.
        epilogue: work after the product.
        blocks: BLOCK_M, BLOCK_N, BLOCK_K; chosen by M if None.
        warps, stages: compile options for the kernel; chosen if 0.
        programs: number of programs; if 0, the number of processors on the device.
        tma: load through TMA descriptors; if None, do so if the device and the operands allow it.

    Returns:
        [M, N], or [M, N / 2] after silu_multiply; see Epilogue.dtype.

    Raises:
        KernelError: the operands do not match, or one is not supported.
    """
    check = functools.partial(require, "matmul")
    weights = Weights.of(w, x, check)
    (m, k), n, silu = x.shape, sum(weights.widths), epilogue.silu_multiply
    tiling = choose_tiling(m, x, weights, blocks, warps, stages, check, silu)
    epilogue.check(check, x, weights.widths, m)
    check("programs", programs, programs >= 0, "be positive, or 0 for all processors")
    able = takes_tma(x, weights, silu)
    check("tma", tma, able or not tma, "be false for these operands")
    if tma is None:  # smaller tiles have too few rows for sm_90's tensor cores
        tma = able and target()[1] >= 90 and tiling.block_m >= 64
    if not k:  # the flattened loops need at least one iteration
        zeros = torch.zeros(m, n, device=x.device)
        return epilogue.apply(zeros, x.dtype, side_by_side=len(weights.tensors) == 2)
    out = x.new_empty(m, epilogue.columns(n), dtype=epilogue.dtype(x.dtype))
    if not out.numel():
        return out
    operands: tuple[Tensor | TensorDescriptor | None, ...] = (x, *weights.three)
    if tma:
        operands = _descriptors(x, weights, tiling)
    tiles = -(-m // tiling.block_m) * weights.column_tiles(tiling.block_n, silu)
    multiply[(min(tiles, programs or count_processors(x.device)),)](
        x=operands[0],
        w0=operands[1],
        w1=operands[2],
        w2=operands[3],
        widths=weights.three_widths,
        M=m,
        K=k,
        epilogue=epilogue.operands,
        out=out,
        scales=weights.scales,
        zeros=weights.zeros,
        FORM=form_of(tiling, weights, epilogue, m, k)._replace(tma=tma),
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return out


def _descriptors(
    x: Tensor, weights: Weights, tiling: Tiling
) -> tuple[TensorDescriptor | None, ...]:
    """Make TMA descriptors for x and three weights; None for missing weights."""
    rows, columns, depth = tiling.block_m, tiling.block_n, tiling.block_k
    block = [columns, depth] if weights.transposed else [depth, columns]
    stored = [
        None if w is None else TensorDescriptor.from_tensor(w.T if weights.transposed else w, block)
        for w in weights.three
    ]
    return (TensorDescriptor.from_tensor(x, [rows, depth]), *stored)
