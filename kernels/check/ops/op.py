"""An op's description for the checks: a call's sizes, and how to make one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weft.kernels.gpu.runtime.workspace import Workspace
from weft.kernels.symmetric.memory import Home

Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """One call's sizes.

    Attributes:
        world: number of ranks.
        m: rows per rank, before or after the op.
        n, k: one rank's weight, its columns and rows.
        dtype: the operands' dtype.
        tile: BLOCK_M, BLOCK_N, BLOCK_K; the op's default if empty.
        programs: programs for the product; the op's default if 0.
        chunk: numbers per signal; the op's default if 0.
    """

    world: int
    m: int
    n: int
    k: int
    dtype: torch.dtype
    tile: tuple[int, ...] = ()
    programs: int = 0
    chunk: int = 0

    @property
    def chunks(self) -> dict[str, int]:
        """Keyword arguments for workspaces with a chunk size."""
        return {"chunk": self.chunk} if self.chunk else {}


@dataclass(frozen=True, slots=True)
class Op:
    """One op, and how to call it at any sizes.

    Attributes:
        name: the entry's name.
        function: (*tensors, workspace, **options) -> result, on each rank.
        oracle: a list by rank for each tensor -> results by rank.
        shapes: one rank's tensor shapes.
        workspace: makes each rank's workspace.
        tiled: whether it takes `blocks` and `programs`.
        options: further options.
        targets: aot.py's targets with the needed hardware; all if empty.
        far: ranks have no addresses on other nodes, and put to them.
        tolerance: absolute and relative tolerance, if larger than suite.py's.
    """

    name: str
    function: Callable[..., Tensor]
    oracle: Callable[..., list[Tensor]]
    shapes: Callable[[Sizes], Shapes]
    workspace: Callable[[Home, Sizes], Workspace]
    tiled: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    targets: tuple[str, ...] = ()
    far: bool = False
    tolerance: float = 0.0

    def reach(self, world_size: int) -> int | None:
        """Return how many ranks on a node have addresses; None for all."""
        return node_size(world_size) if self.far else None

    def call(self, tensors: Sequence[Tensor], workspace: Workspace, sizes: Sizes) -> Tensor:
        """Run one rank's call."""
        options = dict(self.options)
        if self.tiled and sizes.tile:
            options |= {"blocks": sizes.tile, "programs": sizes.programs}
        return self.function(*tensors, workspace, **options)


NVIDIA = ("sm_80", "sm_90", "sm_100")
HOPPER = ("sm_90", "sm_100")
CONVERTS = (*HOPPER, "gfx942")
"""Targets with fp8, at least for storage."""
FP8_TOLERANCE = 0.07
"""Tolerance for numbers rounded to 3 bits after the leading one."""


def node_size(world_size: int) -> int:
    """Return the ranks per node for multi-node methods, with as many nodes as possible."""
    return 2 if world_size % 2 == 0 and world_size > 2 else 1
