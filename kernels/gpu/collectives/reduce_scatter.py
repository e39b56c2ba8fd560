"""Reduce-scatter: each rank's rows of the sum over all ranks.

    reduce_scatter(x [M, ...]) -> [M / W, ...]

Part p of x, of numel numbers, is for rank p. Slot n mod 2 of each rank's buffer is [W, numel]: a
part from every rank. A part is cut into chunks. Signal [c, r] of a rank is set to n when chunk c of
its part from rank r is in row r. Only one rank may set a given signal, whatever the method
(all_gather.py), so two_level has its own signals. Numbers travel in the dtype of x, as in NCCL, are
added in float32 in the order of the ranks, and rounded once. A sum has the same bits in every run.

Protocols, in call n:

- push. Program (c, d) of rank r copies chunk c of part r + 1 + d to row r of that rank's slot, its
  own part last, then sets its signal. Program c of `reduce_chunks` waits for chunk c from every
  rank and adds.
- two_level, for several nodes. Each number crosses to each other node once, as a sum over a node:
  reduce_scatter_two_level.py.

Every rank hears from every other rank, directly or through a third, so two slots are enough:
runtime/workspace.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.collectives.chunks import BLOCK, CHUNK, add_chunk, push_chunks
from weft.kernels.gpu.collectives.collective import (
    RESIDENT_BLOCK,
    RESIDENT_WARPS,
    CollectiveWorkspace,
    count_chunks,
)
from weft.kernels.gpu.collectives.reduce_scatter_two_level import run_two_level
from weft.kernels.gpu.runtime.peers import SLOTS
from weft.kernels.gpu.runtime.signals import peer_pointer, slot_of, wait_all
from weft.kernels.gpu.runtime.workspace import triton_type
from weft.kernels.symmetric.memory import Home, SymmetricTensor


@triton.jit(do_not_specialize=["rank"])
def reduce_chunks(
    out,  # [length]
    peers,  # buffers [2, COUNT, numel]; signals int64 [first + chunks * COUNT]
    rank,
    length,  # numbers in the sum; at most numel
    numel,
    chunk,
    first,  # the first signal
    dtype: tl.constexpr,
    COUNT: tl.constexpr,  # rows
    BLOCK: tl.constexpr,
):
    """Wait for chunks of all rows and add them. Grid: (programs,), persistent."""
    call = tl.load(peers.calls)
    rows = peer_pointer(peers.buffers, rank, dtype) + slot_of(call) * peers.slot_numel
    for index in range(tl.program_id(0), tl.cdiv(length, chunk), tl.num_programs(0)):
        wait_all(peers, rank, first + index * COUNT, call, COUNT)
        add_chunk(out, rows, index, length, numel, chunk, dtype, COUNT, BLOCK)


class ReduceScatterWorkspace(CollectiveWorkspace):
    """The workspace of `reduce_scatter` on one rank; see `reduce_scatter_workspace`."""

    def __init__(
        self,
        home: Home,
        max_numel: int,
        dtype: torch.dtype,
        methods: Sequence[str],
        chunk: int,
        ranks_per_node: int | None,
    ) -> None:
        size, chunks = home.world_size, count_chunks(max_numel, chunk)
        nodes = size // ranks_per_node if ranks_per_node and ranks_per_node > 0 else 1
        of_two_level = (size + nodes) * chunks if "two_level" in methods else 0
        super().__init__(
            *(home, "reduce_scatter", size * max_numel, dtype),
            num_signals=size * chunks + of_two_level,
            max_numel=max_numel,
            methods=methods,
            known=METHODS,
            chunk=chunk,
            ranks_per_node=ranks_per_node,
        )
        self.scattered = size * chunks  # the first signal of `scatter_local`
        self.second = 2 * size * chunks  # the first of the second signals
        self.sums_numel = nodes * max_numel if "two_level" in methods else 0
        self.sums: SymmetricTensor = home.empty(
            "reduce_scatter.sums", (SLOTS, self.sums_numel), dtype
        )
        puts = nodes * chunks if self.far else 0
        self.across = home.zeros("reduce_scatter.across", (puts,), torch.int64)
        self.sent = home.empty("reduce_scatter.sent", (self.sums_numel if self.far else 0,), dtype)

    @property
    def counting(self) -> Sequence[Tensor]:
        """See Workspace."""
        return (*super().counting, self.across.local)


def reduce_scatter_workspace(
    home: Home,
    max_numel: int,
    dtype: torch.dtype,
    methods: Sequence[str] = ("push",),
    *,
    chunk: int = CHUNK,
    ranks_per_node: int | None = None,
) -> ReduceScatterWorkspace:
    """Create a workspace for results of at most `max_numel` numbers per rank. Collective.

    Args:
        home: this rank's.
        max_numel: numbers in a rank's result.
        dtype: float32, float16 or bfloat16.
        methods: the methods it will be used with, from METHODS.
        chunk: numbers per signal; a multiple of 8.
        ranks_per_node: for two_level: ranks 0 to ranks_per_node - 1 are on one node, and so on. All
            ranks are on one node if None. Ranks without an address must be on other nodes, and
            two_level must then be the only method.

    Raises:
        KernelError: on every rank, if a method is unknown on one of them, ranks_per_node does not
            divide the world size, or the ranks' arguments differ.
    """
    return ReduceScatterWorkspace(home, max_numel, dtype, methods, chunk, ranks_per_node)


def reduce_scatter(
    x: Tensor, workspace: ReduceScatterWorkspace, *, method: str | None = None
) -> Tensor:
    """Return this rank's rows of the sum over all ranks. Collective.

    Args:
        x: [M, ...], contiguous, the workspace's dtype; the same shape on all ranks; M a multiple of
            W.
        workspace: from `reduce_scatter_workspace`.
        method: one of the workspace's methods, the same on all ranks. If None, the tuned method for
            this device, world size, shape and dtype, or else the cost model's choice.

    Returns:
        [M / W, ...], added in float32.

    Raises:
        KernelError: the shape does not fit the ranks, the workspace or the method on one rank, or
            differs between ranks.
    """
    size = workspace.world_size
    asked: dict[str, object] = {}
    with workspace.agreed("reduce_scatter", asked):
        workspace.require_tensor("x", x)
        shape = tuple(x.shape)
        if method is None:
            method = workspace.choose_method(x, len(x) if x.dim() else 1)
        asked |= {"method": repr(method), "x's shape": tuple(x.shape)}
        workspace.require_method(method)
        workspace.require("x's shape", shape, x.dim() > 0, "have at least one axis")
        workspace.require("x's rows", len(x), len(x) % size == 0, f"be a multiple of {size} ranks")
        workspace.require_room("x", x.numel())
    out = x.new_empty(len(x) // size, *x.shape[1:])
    if out.numel():
        METHODS[method](x, out, workspace)
    return out


def add_rows(out: Tensor, workspace: CollectiveWorkspace) -> None:
    """Launch the sum of all ranks' rows; each has as many numbers as `out`."""
    numel, chunk = out.numel(), workspace.chunk
    # With one rank there is nothing to add, and copying this much at once spills registers.
    block = RESIDENT_BLOCK if workspace.world_size > 1 else RESIDENT_BLOCK // 2
    reduce_chunks[(workspace.resident(count_chunks(numel, chunk)),)](
        out=out,
        peers=workspace.peers(),
        rank=workspace.rank,
        length=numel,
        numel=numel,
        chunk=chunk,
        first=0,
        dtype=triton_type(out.dtype),
        COUNT=workspace.world_size,
        BLOCK=block,
        num_warps=RESIDENT_WARPS,
    )


def _push(x: Tensor, out: Tensor, workspace: ReduceScatterWorkspace) -> None:
    size, numel = workspace.world_size, out.numel()
    workspace.begin()
    push_chunks[(size * count_chunks(numel, workspace.chunk),)](
        x=x,
        peers=workspace.peers(),
        rank=workspace.rank,
        numel=numel,
        chunk=workspace.chunk,
        stride=numel,
        total=x.numel(),
        dtype=triton_type(x.dtype),
        WORLD=size,
        BLOCK=BLOCK,
    )
    add_rows(out, workspace)


METHODS: dict[str, Callable[[Tensor, Tensor, ReduceScatterWorkspace], None]] = {
    "push": _push,
    "two_level": run_two_level,
}
