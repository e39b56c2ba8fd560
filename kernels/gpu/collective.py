"""What the workspaces of all_gather, reduce_scatter and all_reduce have in common.

Each of these ops has several methods. A workspace is made for those that it will
be used with, and each call says which.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from weft.kernels.gpu.tune import Choice
from weft.kernels.gpu.workspace import SLOTS, Workspace
from weft.kernels.symmetric.memory import Home

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""That are added, and packed into words."""

LOW_LATENCY = ("ll", "ll128")
MAX_LL_BYTES = 1 << 20
"""Of what they carry. Above, half the bandwidth costs more than a signal."""

UNITS = {"ll128": 8, "multimem": 16}
"""Bytes that methods carry together: data must be a multiple of them."""

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
        self.choice = Choice(home, name)
        if "multimem" in methods:
            self._require_method(
                "multimem",
                self.buffer.multicast != 0,
                "be another one here: the buffer has no multicast address, which takes GPUs of "
                "compute capability 9.0 on an NVLink switch",
            )

    def choose_method(self, x: Tensor, rows: int) -> str:
        """What was tuned for this device, world size, shape and dtype, else what the model prefers.

        Of those that the workspace was made for; two_level, if it was made for that, for no other
        method knows of several nodes. Equal on all ranks: it does not look at x's address.

        Args:
            rows: as of a `costs.Problem`.
        """
        if len(self.methods) == 1 or "two_level" in self.methods or not x.numel():
            return "two_level" if "two_level" in self.methods else self.methods[0]
        able = tuple(
            method
            for method in self.methods
            if x.nbytes % UNITS.get(method, 1) == 0
            and (method not in LOW_LATENCY or x.nbytes <= MAX_LL_BYTES)
        )
        width = x.numel() // len(x) if x.dim() else 1
        return self.choice(x.dtype, rows, width, methods=able or self.methods).method

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
