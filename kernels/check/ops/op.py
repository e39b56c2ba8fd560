"""What the checks know of an op: the sizes of a call, and how to make one."""

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
    """What one call of an op is made for.

    Attributes:
        world: ranks.
        m: rows that a rank has, or will have.
        n, k: columns of the weight, and its rows, on one rank.
        tile: BLOCK_M, BLOCK_N, BLOCK_K; what the op takes by itself if empty.
        programs: of the product; what the op takes by itself if 0.
        chunk: numbers that have a signal of their own; what the op takes by itself if 0.
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
        """For the workspaces that are told of it."""
        return {"chunk": self.chunk} if self.chunk else {}


@dataclass(frozen=True, slots=True)
class Op:
    """One op, with what is needed to call it at any sizes.

    Attributes:
        function: (*tensors, workspace, **options) -> result, on each rank.
        oracle: of each tensor a list by rank -> results by rank.
        shapes: of the tensors, on one rank.
        workspace: made on each rank.
        tiled: takes `blocks` and `programs`.
        options: further ones.
        targets: of aot.py, that have what it takes; all if empty.
        far: ranks have no address of those of other nodes, and put to them.
        tolerance: absolute and relative, where it is more than suite.py's.
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
        """Of how many ranks, its node's, a rank has addresses; None for all."""
        return node_size(world_size) if self.far else None

    def call(self, tensors: Sequence[Tensor], workspace: Workspace, sizes: Sizes) -> Tensor:
        """One rank's result."""
        options = dict(self.options)
        if self.tiled and sizes.tile:
            options |= {"blocks": sizes.tile, "programs": sizes.programs}
        return self.function(*tensors, workspace, **options)


NVIDIA = ("sm_80", "sm_90", "sm_100")
HOPPER = ("sm_90", "sm_100")
CONVERTS = (*HOPPER, "gfx942")
"""That have fp8, be it to store it only."""
FP8_TOLERANCE = 0.07
"""Of numbers that are rounded to 3 bits behind the leading one."""


def node_size(world_size: int) -> int:
    """Ranks of a node, for the methods of several nodes: as many nodes as there can be."""
    return 2 if world_size % 2 == 0 and world_size > 2 else 1
