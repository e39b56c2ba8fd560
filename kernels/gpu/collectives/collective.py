"""The common part of the workspaces of all_gather, reduce_scatter and all_reduce.

Each of these ops has several methods. A workspace is made for the methods you list, and each call
picks one of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from weft.kernels.gpu.runtime import nvshmem
from weft.kernels.gpu.runtime.arguments import require_counts
from weft.kernels.gpu.runtime.peers import SLOTS
from weft.kernels.gpu.runtime.workspace import Workspace, agreed
from weft.kernels.gpu.tuning.search import Choice
from weft.kernels.symmetric.memory import Home

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that are added and packed into words."""

ONE_TRIP = ("ll", "ll128", "one_shot")
MAX_ONE_TRIP_BYTES = 1 << 20
"""Maximum payload for these methods: they send more bytes, to save a trip or a signal."""

UNITS = {"ll128": 8, "multimem": 16}
"""Bytes that a method carries together: data must be a multiple of them."""

MAX_NUMEL = 2**31 - 1
"""Maximum size of a buffer: kernels count its numbers in 32 bits."""

RESIDENT_BLOCK, RESIDENT_WARPS = 8192, 16
"""For kernels that wait: each has one program on a processor, which keeps much data in flight."""


class CollectiveWorkspace(Workspace):
    """The workspace of one collective on one rank. All ranks create it together.

    Args:
        home, name, numel, dtype, num_signals: as for a Workspace.
        max_numel: the size it is made for, as the op's callers count.
        methods: the methods it will be used with.
        known: all methods of the op.
        chunk: numbers per signal.
        ranks_per_node: for two_level, the only method that supports ranks without an address, if
            they are on other nodes. All ranks are on one node if None.

    Raises:
        KernelError: on every rank, if one rank gives an unknown method or dtype, a method that its
            home lacks, or other arguments than the rest.
    """

    def __init__(
        self,
        home: Home,
        name: str,
        numel: int,
        dtype: torch.dtype,
        *,
        num_signals: int,
        max_numel: int,
        methods: Sequence[str],
        known: Collection[str],
        chunk: int,
        ranks_per_node: int | None = None,
    ) -> None:
        size = home.world_size
        node = size if ranks_per_node is None else ranks_per_node
        asked = {
            "max_numel": max_numel,
            "dtype": dtype,
            "methods": ", ".join(map(str, methods)),
            "chunk": chunk,
            "ranks_per_node": node,
        }
        with agreed(name, asked, home.exchange) as check:
            require_counts(check, 0, max_numel=max_numel)
            for method in methods:
                check("method", repr(method), method in known, f"be one of {', '.join(known)}")
            allowed = ", ".join(map(str, DTYPES))
            check("dtype", dtype, dtype in DTYPES, f"be one of {allowed}")
            check("chunk", chunk, chunk > 0 and chunk % 8 == 0, "be a positive multiple of 8")
            fits = node > 0 and size % node == 0
            check("ranks_per_node", node, fits, f"divide the {size} ranks")
            check(
                "the buffer's size",
                f"{SLOTS * numel} numbers",
                SLOTS * numel <= MAX_NUMEL,
                f"be at most {MAX_NUMEL}: make it for less",
            )
        first = home.rank // node * node
        near = range(first, first + node) if set(methods) == {"two_level"} else None
        super().__init__(home, name, numel, dtype, num_signals, near)
        self.extern_libs = nvshmem.link_options() if self.far else None
        if self.far and home.device.type == "cuda":
            nvshmem.register_modules()
        self.max_numel = max_numel
        self.methods = tuple(methods)
        self.chunk = chunk
        self.choice = Choice(home, name)
        self.ranks_per_node = node
        able = {
            "multimem": (
                self.buffer.multicast != 0,
                "be another one here: the buffer has no multicast address, which takes GPUs of "
                "compute capability 9.0 on an NVLink switch",
            ),
            "copy_engine": (bool(self.buffer.peers), "be another one on this home"),
            "ll128": (torch.version.hip is None, "be another one on AMD's GPUs"),
        }
        with agreed(name, {}, home.exchange) as check:
            for method in self.methods:
                check("method", repr(method), *able.get(method, (True, "")))

    def choose_method(self, x: Tensor, rows: int) -> str:
        """Choose the tuned method for this device, world size, shape and dtype, or the cost model's
        choice.

        It is one of the workspace's methods. The choice is two_level if the workspace has that
        method, because no other method handles several nodes. All ranks choose alike: x's address
        is ignored.

        Args:
            rows: as in a `costs.Problem`.
        """
        if len(self.methods) == 1 or "two_level" in self.methods or not x.numel():
            return "two_level" if "two_level" in self.methods else self.methods[0]
        able = tuple(
            method
            for method in self.methods
            if x.nbytes % UNITS.get(method, 1) == 0
            and (method not in ONE_TRIP or x.nbytes <= MAX_ONE_TRIP_BYTES)
        )
        width = x.numel() // len(x) if x.dim() else 1
        return self.choice(x.dtype, rows, width, methods=able or self.methods).method

    def require_method(self, method: str) -> None:
        """Refuse a method that the workspace was not made for."""
        self.require(
            "method",
            repr(method),
            method in self.methods,
            f"be one that the workspace was made for: {', '.join(self.methods)}",
        )

    def require_max_numel(self, argument: str, tensor: Tensor) -> None:
        """Refuse a tensor larger than the workspace was made for."""
        self.require(
            f"{argument}'s size",
            f"{tensor.numel()} numbers",
            tensor.numel() <= self.max_numel,
            f"be at most {self.max_numel}, which the workspace was made for",
        )

    def require_few_bytes(self, argument: str, tensor: Tensor, most: int, method: str) -> None:
        """Refuse a tensor too large for a method in ONE_TRIP."""
        nbytes = tensor.nbytes
        must = f"be at most {most} for {method}"
        self.require(f"{argument}'s size", f"{nbytes} bytes", nbytes <= most, must)

    def require_units(self, argument: str, tensor: Tensor, nbytes: int, method: str) -> None:
        """Refuse a tensor whose size or address is not a multiple of `nbytes`."""
        size, address, must = tensor.nbytes, tensor.data_ptr(), f"be a multiple of {nbytes}"
        for part, value, shown in (("size", size, f"{size} bytes"), ("address", address, address)):
            self.require(f"{argument}'s {part}", shown, value % nbytes == 0, f"{must} for {method}")


def count_chunks(numel: int, chunk: int) -> int:
    """Count the chunks of a row; 0 if `chunk` is not positive."""
    return -(-numel // chunk) if chunk > 0 else 0
