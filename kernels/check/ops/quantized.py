"""Check entries for products with quantised weights (kernels/packed.py), on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.kernels import reference
from weft.kernels.check.ops.experts import EXPERTS, grouped, grouped_oracle
from weft.kernels.check.ops.op import Op, Shapes, Sizes
from weft.kernels.gpu.matmul.matmul import matmul
from weft.kernels.gpu.matmul.packed_tile import dequantize
from weft.kernels.gpu.runtime.workspace import Workspace
from weft.kernels.packed import PAIRED, Kind, PackedMatrix

FORMS: dict[Kind, tuple[tuple[int, int], bool]] = {
    "fp8": ((128, 128), False),
    "int8": ((1, 0), False),
    "int4": ((1, 32), True),
    "fp4": ((1, 16), False),
}
"""Each kind's block in the checks, and whether it has zero points."""


def packed(numbers: Tensor, kind: Kind) -> PackedMatrix:
    """Make a quantised matrix whose codes are a function of numbers [..., N, K]."""
    block, has_zeros = FORMS[kind]
    codes = (numbers.float() * 64).to(torch.int32) % 127  # not 127, which is NaN in fp8
    if kind in PAIRED:
        codes = codes[..., ::2] % 16 + codes[..., 1::2] % 16 * 16
    *leading, rows, columns = numbers.shape
    blocks = [-(-n // (size or n)) for n, size in zip((rows, columns), block, strict=True)]
    count = torch.arange(blocks[0] * blocks[1], device=numbers.device).view(blocks)
    scales = (
        ((1 + count % 5) / (8 if kind == "fp4" else 512)).expand(*leading, *blocks).contiguous()
    )
    zeros = (count % 7 - 3).to(torch.int8).expand(*leading, *blocks).contiguous()
    return PackedMatrix(kind, codes.to(torch.uint8), scales, zeros if has_zeros else None, block)


def _wide(k: int) -> int:
    """Round up to whole blocks of all kinds but fp8, whose last one is then cut off."""
    return -(-k // 32) * 32


def _shapes(s: Sizes) -> Shapes:
    return [(s.m, _wide(s.k)), (s.n, _wide(s.k))]


def _group_shapes(s: Sizes) -> Shapes:
    return [(s.m, _wide(s.k)), *[(EXPERTS, s.n, _wide(s.k))] * 2]


def _workspace(home: Any, s: Sizes) -> Workspace:
    return Workspace(home, "packed", 1, s.dtype, 1)


def _ops(kind: Kind) -> list[Op]:
    def numbers(w: Tensor) -> Tensor:
        return packed(w, kind).dequantize(w.dtype)

    def product(x: Tensor, w: Tensor, _: Workspace, **options: Any) -> Tensor:
        return matmul(x, packed(w, kind), **options)

    def products(xs: Sequence[Tensor], ws: Sequence[Tensor]) -> list[Tensor]:
        return [reference.linear(x, numbers(w)) for x, w in zip(xs, ws, strict=True)]

    def gate_up(x: Tensor, gate: Tensor, up: Tensor, workspace: Any, **options: Any) -> Tensor:
        return grouped(x, packed(gate, kind), packed(up, kind), workspace, **options)

    def gates_up(
        xs: Sequence[Tensor], gates: Sequence[Tensor], ups: Sequence[Tensor]
    ) -> list[Tensor]:
        both = ([numbers(w).float().mT for w in each] for each in (gates, ups))
        return grouped_oracle([x.float() for x in xs], *both)

    def written(x: Tensor, _: Workspace) -> Tensor:
        return dequantize(packed(x, kind), torch.empty_like(x))

    return [
        Op(f"matmul_{kind}_weight", product, products, _shapes, _workspace, tiled=True),
        Op(f"grouped_{kind}_weight", gate_up, gates_up, _group_shapes, _workspace, tiled=True),
        Op(
            f"dequantize_{kind}",
            written,
            lambda xs: [numbers(x).float() for x in xs],
            lambda s: [(s.n, _wide(s.k))],
            _workspace,
        ),
    ]


PACKED = tuple(op for kind in FORMS for op in _ops(kind))
