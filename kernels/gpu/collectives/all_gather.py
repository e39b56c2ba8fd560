"""All-gather: every rank's shard on every rank, in several ways.

    all_gather(x_shard [M / W, ...]) -> [M, ...]

Slot n mod 2 of each rank's buffer is [W, numel]. In call n its row r receives the shard of rank r.
A shard is cut into chunks. Signal [c, r] of a rank is set to n when that rank can read chunk c of
rank r's shard. Only one rank may set a given signal, whatever the method. Otherwise a rank that is
late in call n could set a signal back after another rank has set it in call n + 1. So data that
arrives through a third rank has its own signals (two_level). The layout of the signals does not
depend on a call's shape: a rank one call ahead may already set signals of the next call, and they
must not stand for other data in this call.

Protocols, in call n:

- push. Program (c, d) of rank r copies chunk c of r's shard to row r of the slot of rank
  (r + 1 + d) mod W, then sets that rank's signal [c, r] (`push_chunks`). `collect_chunks` waits
  for each chunk and copies it out.
- pull. Like push, but a rank copies its shard to its own slot only and notifies all ranks, which
  fetch it from there.
- copy_engine. Like push, by copies that the host queues, which need no processors of the GPU. A
  queued copy cannot choose its slot by the call's number, because a CUDA graph replays the same
  addresses. So there is one slot, and all ranks meet (`meet`) before it is overwritten.
- ll, ll128. Like push, but data carries its own flag: all_gather_ll.py.
- multimem. A rank stores its shard to all ranks at once through the switch (multimem.py), then
  sets signal [c, r] of each.
- two_level, for several nodes. A shard crosses to each other node once and is passed on within
  it: all_gather_two_level.py.

In each protocol a rank hears from every other rank in every call, directly or through a third.
Two slots are therefore enough, and calls may differ in method: runtime/workspace.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.collectives.all_gather_ll import run_ll, run_ll128
from weft.kernels.gpu.collectives.all_gather_two_level import send_two_level
from weft.kernels.gpu.collectives.chunks import BLOCK, CHUNK, copy_chunk, push_chunks
from weft.kernels.gpu.collectives.collective import (
    MAX_ONE_TRIP_BYTES,
    ONE_TRIP,
    RESIDENT_BLOCK,
    RESIDENT_WARPS,
    UNITS,
    CollectiveWorkspace,
    count_chunks,
)
from weft.kernels.gpu.runtime.multimem import load_16_bytes, multimem_fence, multimem_store
from weft.kernels.gpu.runtime.peers import SLOTS
from weft.kernels.gpu.runtime.signals import (
    meet,
    notify_all,
    peer_pointer,
    slot_of,
    tell,
    wait,
    wait_all,
)
from weft.kernels.gpu.runtime.workspace import triton_type
from weft.kernels.symmetric.memory import Home


@triton.jit(do_not_specialize=["rank"])
def publish_chunks(
    x,  # [numel]; this rank's shard
    peers,  # buffers [2, W, numel]; signals int64 [chunks, W]
    rank,
    numel,
    chunk,
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy one chunk to this rank's own slot and notify all ranks. Grid: (chunks,)."""
    index = tl.program_id(0)
    call = tl.load(peers.calls)
    to = peer_pointer(peers.buffers, rank, dtype) + slot_of(call) * peers.slot_numel + rank * numel
    copy_chunk(to, x, index, numel, chunk, BLOCK)
    notify_all(peers, index * WORLD + rank, call, WORLD)


@triton.jit(do_not_specialize=["rank"])
def collect_chunks(
    out,  # [W, numel]
    # buffers [2, W, numel]; signals int64 [chunks, W], and as many again from `passed` on
    peers,
    rank,
    numel,
    chunk,
    passed,  # the first signal for chunks that arrive through another rank of the node
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    NODE: tl.constexpr,  # ranks of a node, all of which pass on; 1 if none does
    PULL: tl.constexpr,  # read the slot of the shard's rank, not the own slot
    BLOCK: tl.constexpr,
):
    """Wait for chunks and copy them out of the buffer. Grid: (programs,), persistent.

    It takes chunks in the order of arrival: rank r - d sends to rank r at its d-th step, and to
    itself last.
    """
    call = tl.load(peers.calls)
    for item in range(tl.program_id(0), WORLD * tl.cdiv(numel, chunk), tl.num_programs(0)):
        source = (rank + WORLD - 1 - item % WORLD) % WORLD
        index = item // WORLD
        first = tl.where(source % NODE == rank % NODE, 0, passed)
        wait(peers, rank, first + index * WORLD + source, call)
        holder = source if PULL else rank
        shard = peer_pointer(peers.buffers, holder, dtype) + slot_of(call) * peers.slot_numel
        shard += source * numel
        copy_chunk(out + source * numel, shard, index, numel, chunk, BLOCK)


@triton.jit(do_not_specialize=["rank"])
def multicast_chunks(
    x,  # int32 [words]; this rank's shard, in words of 4 bytes
    multicast,  # int64; address of int32 [2, W, words] of all ranks
    peers,  # signals int64 [chunks, W]
    rank,
    words,  # words in a shard; a multiple of 4
    slot_words,  # words in a slot of the buffer; a multiple of 4
    chunk,  # words in a chunk; a multiple of 4
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store one chunk to all ranks and notify them. Grid: (chunks,)."""
    index = tl.program_id(0)
    call = tl.load(peers.calls)
    to = multicast + 4 * (slot_of(call) * tl.cast(slot_words, tl.int64) + rank * words)
    begin = index * chunk // 4
    end = tl.minimum(begin + chunk // 4, words // 4)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a, b, c, d = load_16_bytes(x, at, at < end)
        multimem_store(to + 16 * at, a, b, c, d, at < end)
    multimem_fence()
    notify_all(peers, index * WORLD + rank, call, WORLD)


@triton.jit(do_not_specialize=["rank"])
def wait_for_all(
    peers,  # signals int64 [W]
    rank,
    WORLD: tl.constexpr,
):
    """Wait for each rank's first chunk. Grid: (1,)."""
    wait_all(peers, rank, 0, tl.load(peers.calls), WORLD)


class AllGatherWorkspace(CollectiveWorkspace):
    """The workspace of `all_gather` on one rank; see `all_gather_workspace`."""

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
        passed = size * chunks if "two_level" in methods else 0
        super().__init__(
            *(home, "all_gather"),
            size * -(-max_numel // 8) * 8,  # each slot starts at a multiple of 16 bytes
            dtype,
            num_signals=size * (chunks + 1) + passed,
            max_numel=max_numel,
            methods=methods,
            known=METHODS,
            chunk=chunk,
            ranks_per_node=ranks_per_node,
        )
        nbytes = min(max_numel * dtype.itemsize, MAX_ONE_TRIP_BYTES)
        self.met = size * chunks  # the first signal of `meet`
        self.passed = self.met + size  # the first signal for chunks that are passed on
        puts = size // self.ranks_per_node * chunks if self.far else 0
        self.across = home.zeros("all_gather.across", (puts,), torch.int64)
        self.ll_words = -(-nbytes // 4) if "ll" in methods else 0
        self.ll128_lines = -(-nbytes // 120) if "ll128" in methods else 0
        self.ll = home.zeros("all_gather.ll", (SLOTS, size, self.ll_words), torch.int64)
        self.ll128 = home.zeros(
            "all_gather.ll128", (SLOTS, size, self.ll128_lines, 16), torch.int64
        )
        copied = size * max_numel if "copy_engine" in methods else 0
        self.copied = home.empty("all_gather.copied", (copied,), dtype)

    @property
    def counting(self) -> Sequence[Tensor]:
        """See Workspace."""
        return (*super().counting, self.across.local)


def all_gather_workspace(
    home: Home,
    max_numel: int,
    dtype: torch.dtype,
    methods: Sequence[str] = ("push",),
    *,
    chunk: int = CHUNK,
    ranks_per_node: int | None = None,
) -> AllGatherWorkspace:
    """Create a workspace for shards of at most `max_numel` numbers. Collective.

    Args:
        home: this rank's.
        max_numel: numbers in a shard.
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
    return AllGatherWorkspace(home, max_numel, dtype, methods, chunk, ranks_per_node)


def all_gather(
    x_shard: Tensor, workspace: AllGatherWorkspace, *, method: str | None = None
) -> Tensor:
    """Return the shards of all ranks, in the order of the ranks. Collective.

    Args:
        x_shard: [M / W, ...], contiguous, the workspace's dtype; the same shape on all ranks. Its
            size must be a multiple of 8 bytes for ll128 and of 16 for multimem.
        workspace: from `all_gather_workspace`.
        method: one of the workspace's methods, the same on all ranks. If None, the tuned method for
            this device, world size, shape and dtype, or else the cost model's choice.

    Returns:
        [M, ...].

    Raises:
        KernelError: the shard does not fit the workspace or the method on one rank, or differs
            between ranks.
    """
    size = workspace.world_size
    asked: dict[str, object] = {}
    with workspace.agreed("all_gather", asked):
        workspace.require_tensor("x_shard", x_shard)
        shape = tuple(x_shard.shape)
        if method is None:
            method = workspace.choose_method(x_shard, size * len(x_shard) if x_shard.dim() else 1)
            if x_shard.data_ptr() % UNITS.get(method, 1):
                x_shard = x_shard.clone()
        asked |= {"method": repr(method), "x_shard's shape": shape}
        workspace.require_method(method)
        workspace.require("x_shard's shape", shape, x_shard.dim() > 0, "have at least one axis")
        workspace.require_max_numel("x_shard", x_shard)
        if method in ONE_TRIP:
            workspace.require_few_bytes("x_shard", x_shard, MAX_ONE_TRIP_BYTES, method)
        if method in UNITS:
            workspace.require_units("x_shard", x_shard, UNITS[method], method)
    out = x_shard.new_empty(size * x_shard.shape[0], *x_shard.shape[1:])
    if x_shard.numel():
        METHODS[method](x_shard, out, workspace)
    return out


def _push(x: Tensor, out: Tensor, workspace: AllGatherWorkspace) -> None:
    size, numel = workspace.world_size, x.numel()
    workspace.begin()
    push_chunks[(size * count_chunks(numel, workspace.chunk),)](
        x=x,
        peers=workspace.peers(),
        rank=workspace.rank,
        numel=numel,
        chunk=workspace.chunk,
        stride=0,
        total=numel,
        dtype=triton_type(x.dtype),
        WORLD=size,
        BLOCK=BLOCK,
    )
    _collect(out, workspace, numel)


def _pull(x: Tensor, out: Tensor, workspace: AllGatherWorkspace) -> None:
    numel = x.numel()
    workspace.begin()
    publish_chunks[(count_chunks(numel, workspace.chunk),)](
        x=x,
        peers=workspace.peers(),
        rank=workspace.rank,
        numel=numel,
        chunk=workspace.chunk,
        dtype=triton_type(x.dtype),
        WORLD=workspace.world_size,
        BLOCK=BLOCK,
    )
    _collect(out, workspace, numel, pull=True)


def _collect(
    out: Tensor, workspace: AllGatherWorkspace, numel: int, *, pull: bool = False, node: int = 1
) -> None:
    size, chunks = workspace.world_size, count_chunks(numel, workspace.chunk)
    collect_chunks[(workspace.resident(size * chunks),)](
        out=out,
        peers=workspace.peers(),
        rank=workspace.rank,
        numel=numel,
        chunk=workspace.chunk,
        passed=workspace.passed,
        dtype=triton_type(out.dtype),
        WORLD=size,
        NODE=node,
        PULL=pull,
        BLOCK=RESIDENT_BLOCK,
        num_warps=RESIDENT_WARPS,
    )


def _copy_engine(x: Tensor, out: Tensor, workspace: AllGatherWorkspace) -> None:
    size, rank, numel = workspace.world_size, workspace.rank, x.numel()
    workspace.begin()
    peers = workspace.peers()
    meet[(1,)](peers=peers, rank=rank, first=workspace.met, WORLD=size)
    for step in range(size):
        peer = (rank + step) % size
        row = workspace.copied.peers[peer][rank * numel : (rank + 1) * numel]
        row.copy_(x.view(-1), non_blocking=True)
        tell[(1,)](peers=peers, peer=peer, index=rank)
    wait_for_all[(1,)](peers=peers, rank=rank, WORLD=size)
    out.view(-1).copy_(workspace.copied.local[: size * numel], non_blocking=True)


def _multimem(x: Tensor, out: Tensor, workspace: AllGatherWorkspace) -> None:
    numel, itemsize = x.numel(), x.itemsize
    workspace.begin()
    multicast_chunks[(count_chunks(numel, workspace.chunk),)](
        x=x.view(-1).view(torch.int32),
        multicast=workspace.buffer.multicast,
        peers=workspace.peers(),
        rank=workspace.rank,
        words=numel * itemsize // 4,
        slot_words=workspace.numel * itemsize // 4,
        chunk=workspace.chunk * itemsize // 4,
        WORLD=workspace.world_size,
        BLOCK=BLOCK // 4,
    )
    _collect(out, workspace, numel)


def _two_level(x: Tensor, out: Tensor, workspace: AllGatherWorkspace) -> None:
    workspace.begin()
    send_two_level(x, workspace)
    _collect(out, workspace, x.numel(), node=workspace.ranks_per_node)


METHODS: dict[str, Callable[[Tensor, Tensor, AllGatherWorkspace], None]] = {
    "push": _push,
    "pull": _pull,
    "copy_engine": _copy_engine,
    "ll": run_ll,
    "ll128": run_ll128,
    "multimem": _multimem,
    "two_level": _two_level,
}
