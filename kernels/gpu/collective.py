"""What the workspaces of all_gather, reduce_scatter and all_reduce have in common.

Each of these ops has several methods. A workspace is made for those that it will
be used with, and each call says which.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from weft.kernels.gpu.workspace import SLOTS, Workspace
from weft.kernels.symmetric.memory import Home

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""That are added, and packed into words."""

MAX_NUMEL = 2**31 - 1
"""Of a buffer: kernels count its numbers in 32 bits."""


class CollectiveWorkspace(Workspace):
    """Of one op, on one rank. Made by all ranks together.

    Args:
        home, name, numel, dtype: as of a Workspace.
        num_signals: of this rank.
        methods: that it will be used with.
        known: all methods of the op.
        chunk: numbers that have a signal of their own.

    Raises:
        KernelError: a method or a dtype that there is not, or not on this home.
    """

    def __init__(
        self,
        home: Home,
        name: str,
        numel: int,
        dtype: torch.dtype,
        *,
        num_signals: int,
        methods: Sequence[str],
        known: Collection[str],
        chunk: int,
    ) -> None:
        self.name = name
        for method in methods:
            self._require_method(method, method in known, f"be one of {', '.join(known)}")
        allowed = ", ".join(map(str, DTYPES))
        self.require("dtype", dtype, dtype in DTYPES, f"be one of {allowed}")
        self.require("chunk", chunk, chunk > 0 and chunk % 8 == 0, "be a positive multiple of 8")
        self.require(
            "the buffer's size",
            f"{SLOTS * numel} numbers",
            SLOTS * numel <= MAX_NUMEL,
            f"be at most {MAX_NUMEL}: make it for less",
        )
        super().__init__(home, name, numel, dtype, num_signals)
        self.methods = tuple(methods)
        self.chunk = chunk
        if "multimem" in methods:
            self._require_method(
                "multimem",
                self.buffer.multicast != 0,
                "be another one here: the buffer has no multicast address, which takes GPUs of "
                "compute capability 9.0 on an NVLink switch",
            )

    def require_method(self, method: str) -> None:
        """Refuse a method that the workspace was not made for."""
        self._require_method(
            method,
            method in self.methods,
            f"be one that the workspace was made for: {', '.join(self.methods)}",
        )

    def _require_method(self, method: str, allowed: bool, must: str) -> None:
        self.require("method", repr(method), allowed, must)

    def require_nodes(self, ranks_per_node: int) -> None:
        """Refuse nodes that are not of one size."""
        self.require(
            "ranks_per_node",
            ranks_per_node,
            ranks_per_node > 0 and self.world_size % ranks_per_node == 0,
            f"divide the {self.world_size} ranks",
        )


def count_chunks(numel: int, chunk: int) -> int:
    """How many chunks a row is cut into; 0 if `chunk` is none that a workspace takes."""
    return -(-numel // chunk) if chunk > 0 else 0
