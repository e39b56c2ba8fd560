"""How large everything is, on a GPU and in the interpreter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class Tiling(NamedTuple):
    """How a product is cut, and compiled."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, Any]:
        """As the ops take it."""
        blocks = (self.block_m, self.block_n, self.block_k)
        return {"blocks": blocks, "warps": self.warps, "stages": self.stages}

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}x{self.block_k}, {self.warps} warps, {self.stages}"


class Shape(NamedTuple):
    """A product of a model on one of `Scale.world` ranks.

    Attributes:
        op: that it is part of.
        rows: M, of all ranks together.
        n, k: of the weight on one rank.
    """

    model: str
    op: str
    rows: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.model} {self.rows} x {self.n} x {self.k}"


@dataclass(frozen=True, slots=True)
class Scale:
    """How large everything is.

    Attributes:
        device, dtype: of the tensors.
        worlds: numbers of ranks that ops are checked on.
        checked: m, n and k of these checks, on one rank; and their tile.
        world: ranks of `waiting` and `overlap`.
        shapes: that are timed.
        tilings: that are tried for each of them; the fastest counts.
        programs: of a product that has the device for itself.
        decoded: products of `few_rows`, with each number of rows in `few`.
        few_tilings: that are tried for them.
        few: rows.
    """

    tiny: bool
    device: str
    dtype: torch.dtype
    worlds: tuple[int, ...]
    checked: tuple[int, int, int]
    checked_tile: tuple[int, int, int]
    world: int
    shapes: tuple[Shape, ...]
    tilings: tuple[Tiling, ...]
    programs: int
    decoded: tuple[Shape, ...]
    few_tilings: tuple[Tiling, ...]
    few: tuple[int, ...]


def _model(name: str, hidden: int, heads: int, kv_heads: int, inner: int, rows: int) -> list[Shape]:
    """Its products on one rank of 8, with heads of 128: prefill, and one decode of 64 requests."""
    attention, mlp, qkv = heads * 128 // 8, inner // 8, (heads + 2 * kv_heads) * 128 // 8
    return [
        Shape(f"{name} qkv", "all_gather_matmul", rows, qkv, hidden),
        Shape(f"{name} o", "matmul_reduce_scatter", rows, hidden, attention),
        Shape(f"{name} gate, up", "all_gather_matmul", rows, 2 * mlp, hidden),
        Shape(f"{name} down", "matmul_reduce_scatter", rows, hidden, mlp),
        Shape(f"{name} down", "matmul_all_reduce", 64, hidden, mlp),
    ]


TILINGS = (
    Tiling(128, 256, 64, 8, 3),
    Tiling(128, 256, 64, 8, 4),
    Tiling(128, 128, 64, 8, 4),
    Tiling(64, 128, 64, 4, 4),
)
"""For an H100."""

FEW_TILINGS = (
    Tiling(16, 16, 256, 4, 5),
    Tiling(16, 32, 128, 4, 5),
    Tiling(16, 64, 128, 4, 5),
    Tiling(64, 32, 128, 4, 5),
    Tiling(64, 64, 64, 4, 5),
)
"""For few rows: many narrow tiles keep more of the device's processors busy."""

DECODED = (
    Shape("Llama-8B qkv", "matmul", 0, 6144, 4096),
    Shape("Llama-8B o", "matmul", 0, 4096, 4096),
    Shape("Llama-8B gate, up", "matmul", 0, 28672, 4096),
    Shape("Llama-8B down", "matmul", 0, 4096, 14336),
    Shape("Llama-70B, 1 of 8 ranks, qkv", "matmul", 0, 1280, 8192),
)


def full() -> Scale:
    """For the GPU that this process has."""
    return Scale(
        tiny=False,
        device="cuda:0",
        dtype=torch.bfloat16,
        worlds=(2, 4, 8),
        checked=(100, 160, 128),
        checked_tile=(64, 64, 32),
        world=8,
        shapes=(
            Shape("square", "all_gather_matmul", 8192, 8192, 8192),
            *_model("Llama-70B", 8192, 64, 8, 28672, 8192),
            *_model("Qwen3-32B", 5120, 64, 8, 25600, 8192),
        ),
        tilings=TILINGS,
        programs=torch.cuda.get_device_properties(0).multi_processor_count,
        decoded=DECODED,
        few_tilings=FEW_TILINGS,
        few=(1, 16, 64, 256),
    )


TINY = Scale(
    tiny=True,
    device="cpu",
    dtype=torch.float32,
    worlds=(3,),
    checked=(5, 17, 16),
    checked_tile=(16, 16, 16),
    world=2,
    shapes=(
        Shape("tiny", "all_gather_matmul", 32, 32, 16),
        Shape("tiny", "matmul_reduce_scatter", 32, 16, 32),
        Shape("tiny", "matmul_all_reduce", 16, 16, 16),
    ),
    tilings=(Tiling(16, 16, 16, 4, 2), Tiling(16, 32, 16, 4, 2)),
    programs=2,
    decoded=(Shape("tiny", "matmul", 0, 32, 16),),
    few_tilings=(Tiling(16, 32, 16, 4, 2),),
    few=(3,),
)
