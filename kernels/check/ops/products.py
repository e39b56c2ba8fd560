"""Check entries for matrix products: overlapped, decomposed, and on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor

from weft.kernels import reference
from weft.kernels.check.ops.op import HOPPER, Op, Shapes, Sizes
from weft.kernels.gpu.matmul import decomposed
from weft.kernels.gpu.matmul.all_gather_matmul import (
    GatherWorkspace,
    all_gather_matmul,
    all_gather_matmul_workspace,
)
from weft.kernels.gpu.matmul.epilogue import FP8, Epilogue
from weft.kernels.gpu.matmul.matmul import matmul
from weft.kernels.gpu.matmul.matmul_reduce_scatter import (
    matmul_all_reduce,
    matmul_all_reduce_workspace,
    matmul_reduce_scatter,
    matmul_reduce_scatter_workspace,
)
from weft.kernels.gpu.runtime.workspace import Workspace


def _product_beside_rows(x: Tensor, w: Tensor, workspace: Any, **options: Any) -> Tensor:
    """Run all_gather_matmul, and append the gathered rows as columns on the right."""
    gathered = x.new_empty(workspace.world_size * len(x), x.shape[1])
    out = all_gather_matmul(x, w, workspace, gathered=gathered, **options)
    return torch.cat([out, gathered], dim=1)


def _product_beside_rows_oracle(xs: Sequence[Tensor], ws: Sequence[Tensor]) -> list[Tensor]:
    products, gathered = reference.all_gather_matmul(xs, ws), reference.all_gather(xs)
    return [torch.cat(pair, dim=1) for pair in zip(products, gathered, strict=True)]


def _gather_gate_up(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    residual: Tensor,
    workspace: GatherWorkspace,
    **options: Any,
) -> Tensor:
    """Run all_gather_matmul with two weights and all epilogues."""
    epilogue = Epilogue(silu_multiply=True, residual=residual)
    return all_gather_matmul(x, (gate, up), workspace, epilogue=epilogue, **options)


def _gather_gate_up_oracle(
    xs: Sequence[Tensor], gates: Sequence[Tensor], ups: Sequence[Tensor], added: Sequence[Tensor]
) -> list[Tensor]:
    ws = [torch.cat(pair, dim=1) for pair in zip(gates, ups, strict=True)]
    totals = reference.all_gather_matmul(xs, ws)
    return [
        reference.epilogue(total, gate_up="halves", residual=residual)
        for total, residual in zip(totals, added, strict=True)
    ]


def in_fp8(op: Op, *, gathers: bool) -> Op:
    """Convert an entry to e4m3 operands, scaled by row and by column, with a transposed weight.

    Args:
        op: the entry.
        gathers: x travels, and not a product.
    """

    def function(
        x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, workspace: Any, **options: Any
    ) -> Tensor:
        epilogue = Epilogue(_positive(x_scale), _positive(w_scale), out_dtype=x.dtype)
        w = w.T.contiguous().to(FP8).T
        return op.function(x.to(FP8), w, workspace, epilogue=epilogue, **options)

    def oracle(
        xs: Sequence[Tensor],
        ws: Sequence[Tensor],
        x_scales: Sequence[Tensor],
        w_scales: Sequence[Tensor],
    ) -> list[Tensor]:
        left = [
            x.to(FP8).float() * _positive(s)[:, None] for x, s in zip(xs, x_scales, strict=True)
        ]
        right = [w.to(FP8).float() * _positive(s) for w, s in zip(ws, w_scales, strict=True)]
        return op.oracle(left, right)

    def shapes(sizes: Sizes) -> Shapes:
        x, w = op.shapes(sizes)
        return [x, w, x[:1], w[1:]]

    return replace(
        op,
        name=f"{op.name}_fp8",
        function=function,
        oracle=oracle,
        shapes=shapes,
        workspace=lambda home, s: op.workspace(home, replace(s, dtype=FP8) if gathers else s),
        targets=HOPPER,
    )


def _positive(scale: Tensor) -> Tensor:
    """Make scales of at most 1, so that sums stay as exact as without: float32."""
    return scale.float().sigmoid()


OVERLAPPED = (
    Op(
        "all_gather_matmul",
        all_gather_matmul,
        reference.all_gather_matmul,
        lambda s: [(s.m, s.k), (s.k, s.n)],
        lambda home, s: all_gather_matmul_workspace(home, s.m, s.k, s.dtype, *s.tile[:1]),
        tiled=True,
    ),
    Op(
        "matmul_reduce_scatter",
        matmul_reduce_scatter,
        reference.matmul_reduce_scatter,
        lambda s: [(s.world * s.m, s.k), (s.k, s.n)],
        lambda home, s: matmul_reduce_scatter_workspace(home, s.m, s.n, s.dtype, *s.tile[:2]),
        tiled=True,
    ),
    Op(
        "matmul_all_reduce",
        matmul_all_reduce,
        reference.matmul_all_reduce,
        lambda s: [(s.m, s.k), (s.k, s.n)],
        lambda home, s: matmul_all_reduce_workspace(home, s.m, s.n, s.dtype, *s.tile[:2]),
        tiled=True,
    ),
)

PRODUCTS = (
    *OVERLAPPED,
    Op(
        "all_gather_matmul_mesh",
        _product_beside_rows,
        _product_beside_rows_oracle,
        lambda s: [(s.m, s.k), (s.k, s.n)],
        lambda home, s: all_gather_matmul_workspace(home, s.m, s.k, s.dtype, *s.tile[:1]),
        tiled=True,
        options={"topology": "mesh"},
    ),
    Op(
        "all_gather_gate_up",
        _gather_gate_up,
        _gather_gate_up_oracle,
        lambda s: [(s.m, s.k), (s.k, s.n), (s.k, s.n), (s.world * s.m, s.n)],
        lambda home, s: all_gather_matmul_workspace(home, s.m, s.k, s.dtype, *s.tile[:1]),
        tiled=True,
    ),
    *(in_fp8(op, gathers=op.name == "all_gather_matmul") for op in OVERLAPPED),
    Op(
        "matmul",
        lambda x, w, workspace, **options: matmul(x, w, **options),
        lambda xs, ws: [x.float() @ w.float() for x, w in zip(xs, ws, strict=True)],
        lambda s: [(s.m, s.k), (s.k, s.n)],
        lambda home, s: Workspace(home, "matmul", 1, s.dtype, 1),
        tiled=True,
    ),
    *(
        Op(
            f"decomposed_all_gather_matmul_{method}",
            decomposed.all_gather_matmul,
            reference.all_gather_matmul,
            lambda s: [(s.m, s.k), (s.k, s.n)],
            lambda home, s: decomposed.all_gather_matmul_workspace(home, s.m, s.k, s.dtype),
            options={"method": method},
        )
        for method in get_args(decomposed.Method)
    ),
    *(
        Op(
            f"decomposed_matmul_reduce_scatter_{method}",
            decomposed.matmul_reduce_scatter,
            reference.matmul_reduce_scatter,
            lambda s: [(s.world * s.m, s.k), (s.k, s.n)],
            lambda home, s: decomposed.matmul_reduce_scatter_workspace(home, s.m, s.n, s.dtype),
            options={"method": method},
        )
        for method in get_args(decomposed.Method)
    ),
    Op(
        "decomposed_matmul_all_reduce",
        decomposed.matmul_all_reduce,
        reference.matmul_all_reduce,
        lambda s: [(s.m, s.k), (s.k, s.n)],
        lambda home, s: decomposed.matmul_all_reduce_workspace(home, s.m, s.n, s.dtype),
    ),
)
