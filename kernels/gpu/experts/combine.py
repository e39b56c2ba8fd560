"""Adds up each token's expert outputs, with the weights of the routing.

    combine(rows [R, N], places int32 [T, k], weights float32 [T, k]) -> [T, N]

Row `places[t, c]` is the output for choice c of token t; -1 means that another rank has it. The sum
is float32, in the order of the choices, and is rounded once.

Protocol. The kernel runs on one rank, without signals. Each program writes its own columns of one
token.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.matmul.epilogue import RESULTS
from weft.kernels.gpu.runtime.arguments import require, require_tensor

COLUMNS = 1024
"""Columns for one program."""


@triton.jit(do_not_specialize=["rows"])
def combine_rows(
    out,  # [T, N]
    outputs,  # [R, N]
    places,  # int32 [T, TOP_K]
    weights,  # float32 [T, TOP_K]
    rows,  # R
    N,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up some columns for one token. Grid: (T, cdiv(N, BLOCK))."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        place = tl.load(places + token * TOP_K + choice)
        here = (place >= 0) & (place < rows)
        weight = tl.load(weights + token * TOP_K + choice)
        at = outputs + place.to(tl.int64) * N + column
        output = tl.load(at, mask=column < tl.where(here, N, 0), other=0.0).to(tl.float32)
        total += weight * output
    tl.store(out + token * N + column, total.to(out.dtype.element_ty), mask=column < N)


def combine(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Add up each token's expert outputs.

    Args:
        rows: [R, N], contiguous; float32, float16 or bfloat16.
        places: int32 [T, k]; a row for each choice, or -1 for none.
        weights: float32 [T, k].

    Returns:
        [T, N], rows' dtype.

    Raises:
        KernelError: the tensors do not fit together.
    """
    check = functools.partial(require, "combine")
    check("rows's shape", list(rows.shape), rows.dim() == 2, "be a matrix")
    require_tensor(check, "rows", rows, tuple(rows.shape), rows.device, *RESULTS)
    check("places's shape", list(places.shape), places.dim() == 2, "be a matrix")
    (tokens, top_k), columns = places.shape, rows.shape[1]
    require_tensor(check, "places", places, (tokens, top_k), rows.device, torch.int32)
    require_tensor(check, "weights", weights, (tokens, top_k), rows.device, torch.float32)
    out = rows.new_empty(tokens, columns)
    if out.numel():
        block = min(COLUMNS, triton.next_power_of_2(columns))
        combine_rows[(tokens, triton.cdiv(columns, block))](
            out=out,
            outputs=rows,
            places=places,
            weights=weights,
            rows=len(rows),
            N=columns,
            TOP_K=top_k,
            BLOCK=block,
            num_warps=4,
        )
    return out
