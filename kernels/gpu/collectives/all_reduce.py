"""All-reduce: the sum over all ranks, on each of them, with the same bits everywhere.

    all_reduce(x [...]) -> [...]

Numbers travel in the dtype of x, are added in float32 and rounded once.

Protocols, in call n; the slot is n mod 2:

- one_shot. Every rank pushes x to all ranks (`push_chunks` in chunks.py). Each rank adds the W rows
  of its slot in the order of the ranks (`add_rows` in reduce_scatter.py). One trip, W times the
  traffic: for little data.
- ll. The same by stores that carry their own flag (low_latency.py), in one launch. A program sends
  its blocks of x to all ranks, then receives the same blocks from every rank in order, and adds.
  It waits only for programs with the same number.
- two_shot. x is cut into W parts. Every rank pushes part p to rank p (`push_chunks`). For chunk c,
  `reduce_and_send` waits until all ranks have sent it and adds in their order. It stores the sum to
  row r of the second buffer of all ranks and sets their second signal [c, r]. `collect_parts` waits
  for these signals. Two trips, twice the traffic of one x: for much data.
- multimem. Like two_shot, through the switch (multimem.py). Rank r copies x to its own slot and
  sets signal [c, r] of rank p when chunk c of part p is there. Program c of rank r waits for this
  signal from every rank and asks the switch for the sum of chunk c of part r. It stores the sum
  through the switch to all ranks, over its own inputs, which nobody else requests. Then it sets
  second signal [c, r] of all ranks, and they copy the sums out of their own slot. One rank requests
  each sum. So all ranks have the same bits, whatever order the switch adds in.

Every rank hears from every other rank, so two slots are enough: runtime/workspace.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.collectives.chunks import BLOCK, CHUNK, copy_chunk, push_chunks, sum_rows
from weft.kernels.gpu.collectives.collective import (
    MAX_ONE_TRIP_BYTES,
    ONE_TRIP,
    RESIDENT_BLOCK,
    RESIDENT_WARPS,
    CollectiveWorkspace,
    count_chunks,
)
from weft.kernels.gpu.collectives.reduce_scatter import add_rows
from weft.kernels.gpu.runtime.low_latency import LL_BLOCK, get_ll, load_words, put_ll, store_words
from weft.kernels.gpu.runtime.multimem import multimem_fence, multimem_store, multimem_sum
from weft.kernels.gpu.runtime.peers import SLOTS, Slots
from weft.kernels.gpu.runtime.signals import (
    notify,
    notify_all,
    peer_pointer,
    slot_of,
    wait,
    wait_all,
)
from weft.kernels.gpu.runtime.workspace import triton_type
from weft.kernels.symmetric.memory import Home, SymmetricTensor


@triton.jit(do_not_specialize=["rank"])
def reduce_and_send(
    peers,  # buffers [2, W, numel]; signals int64 [first + chunks * W]
    sums,  # Slots [2, W, numel]
    rank,
    length,  # numbers in this rank's part; at most numel
    numel,
    chunk,
    first,  # the first of the second signals
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add chunks of this rank's part, send them to all ranks and notify them. Grid: (programs,),
    persistent.
    """
    call = tl.load(peers.calls)
    rows = peer_pointer(peers.buffers, rank, dtype) + slot_of(call) * peers.slot_numel
    place = slot_of(call) * sums.numel + rank * numel
    for index in range(tl.program_id(0), tl.cdiv(numel, chunk), tl.num_programs(0)):
        wait_all(peers, rank, index * WORLD, call, WORLD)
        begin = index * chunk
        end = tl.minimum(begin + chunk, length)
        for start in range(begin, end, BLOCK):
            at = start + tl.arange(0, BLOCK)
            total = sum_rows(rows, at, numel, end, WORLD, BLOCK).to(dtype)
            for step in range(WORLD):
                to = peer_pointer(sums.addresses, (rank + 1 + step) % WORLD, dtype) + place
                tl.store(to + at, total, mask=at < end)
        notify_all(peers, first + index * WORLD + rank, call, WORLD)


@triton.jit(do_not_specialize=["rank"])
def collect_parts(
    out,  # [total]
    peers,  # buffers [2, W, numel], of sums; signals int64 [first + chunks * W]
    rank,
    total,
    numel,  # numbers in a part
    chunk,
    first,  # the first of the second signals
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Wait for chunks of the summed parts and copy them out. Grid: (programs,), persistent."""
    call = tl.load(peers.calls)
    for item in range(tl.program_id(0), WORLD * tl.cdiv(numel, chunk), tl.num_programs(0)):
        part = (rank + WORLD - item % WORLD) % WORLD
        index = item // WORLD
        wait(peers, rank, first + index * WORLD + part, call)
        come = peer_pointer(peers.buffers, rank, dtype) + slot_of(call) * peers.slot_numel
        come += part * numel
        length = tl.minimum(numel, total - part * numel)
        copy_chunk(out + part * numel, come, index, length, chunk, BLOCK)


@triton.jit(do_not_specialize=["rank"])
def reduce_ll(
    x,  # int32 or int16 [numel], the bits of dtype
    out,  # the same
    peers,  # buffers int64 [2, W, words]
    rank,
    numel,
    words,  # 4-byte words in x
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Send blocks to all ranks, receive the same blocks from all, add. Grid: (programs,),
    persistent.
    """
    WIDE: tl.constexpr = dtype == tl.float32
    call = tl.load(peers.calls)
    slot = slot_of(call) * peers.slot_numel + rank * words
    for block in range(tl.program_id(0), tl.cdiv(words, BLOCK), tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        mine = load_words(x, at, numel, WIDE)
        for step in range(WORLD):
            to = peer_pointer(peers.buffers, (rank + 1 + step) % WORLD, tl.int64) + slot
            put_ll(to + at, mine, call, at < words)
    come = peer_pointer(peers.buffers, rank, tl.int64) + slot_of(call) * peers.slot_numel
    for block in range(tl.program_id(0), tl.cdiv(words, BLOCK), tl.num_programs(0)):
        first = block * BLOCK
        at = first + tl.arange(0, BLOCK)
        low = tl.zeros((BLOCK,), tl.float32)
        high = tl.zeros((BLOCK,), tl.float32)
        for source in range(WORLD):
            row = source * words
            got = get_ll(come + row + at, call, at < words, peers, rank, row + first)
            if WIDE:
                low += got.to(tl.float32, bitcast=True)
            else:
                low += (got & 0xFFFF).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
                high += (got >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        if WIDE:
            total = low.to(tl.int32, bitcast=True)
        else:
            total = low.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
            total |= high.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16
        store_words(out, at, total, numel, WIDE)


@triton.jit(do_not_specialize=["rank"])
def publish_parts(
    x,  # [total]
    peers,  # buffers [2, W, numel]; signals int64 [chunks, W]
    rank,
    total,
    numel,  # numbers in a part
    chunk,
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy a chunk of a part to this rank's own slot and notify the part's rank. Grid: (chunks *
    W,).
    """
    part = (rank + 1 + tl.program_id(0)) % WORLD
    index = tl.program_id(0) // WORLD
    call = tl.load(peers.calls)
    to = peer_pointer(peers.buffers, rank, dtype) + slot_of(call) * peers.slot_numel + part * numel
    length = tl.minimum(numel, total - part * numel)
    copy_chunk(to, x + part * numel, index, length, chunk, BLOCK)
    notify(peers, part, index * WORLD + rank, call)


@triton.jit(do_not_specialize=["rank"])
def reduce_multimem(
    multicast,  # int64; address of [2, W, numel] of all ranks
    peers,  # signals int64 [first + chunks * W]
    rank,
    length,  # 16-byte units in this rank's part; at most `units`
    units,  # units in a part
    slot_units,  # units in a slot of the buffer
    chunk,  # units in a chunk
    first,  # the first of the second signals
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Let the switch add chunks of this rank's part, and notify all ranks. Grid: (programs,),
    persistent.
    """
    call = tl.load(peers.calls)
    part = multicast + 16 * (slot_of(call) * tl.cast(slot_units, tl.int64) + rank * units)
    for index in range(tl.program_id(0), tl.cdiv(units, chunk), tl.num_programs(0)):
        wait_all(peers, rank, index * WORLD, call, WORLD)
        multimem_fence()
        begin = index * chunk
        end = tl.minimum(begin + chunk, length)
        for start in range(begin, end, BLOCK):
            at = start + tl.arange(0, BLOCK)
            a, b, c, d = multimem_sum(part + 16 * at, at < end, dtype)
            multimem_store(part + 16 * at, a, b, c, d, at < end)
        multimem_fence()
        notify_all(peers, first + index * WORLD + rank, call, WORLD)


class AllReduceWorkspace(CollectiveWorkspace):
    """The workspace of `all_reduce` on one rank; see `all_reduce_workspace`."""

    def __init__(
        self, home: Home, max_numel: int, dtype: torch.dtype, methods: Sequence[str], chunk: int
    ) -> None:
        size = home.world_size
        part = part_numel(max_numel, size)
        one_trip = min(max_numel, MAX_ONE_TRIP_BYTES // dtype.itemsize)
        row = -(-one_trip // 8) * 8 if "one_shot" in methods else part
        row = max(row, part)
        chunks = count_chunks(row, chunk)
        super().__init__(
            *(home, "all_reduce", size * row, dtype),
            num_signals=size * (chunks + count_chunks(part, chunk)),
            max_numel=max_numel,
            methods=methods,
            known=METHODS,
            chunk=chunk,
        )
        self.second = size * chunks  # the first of the second signals
        self.sums_numel = size * part if "two_shot" in methods else 0
        self.sums: SymmetricTensor = home.empty("all_reduce.sums", (SLOTS, self.sums_numel), dtype)
        self.ll_words = -(-one_trip * dtype.itemsize // 4) if "ll" in methods else 0
        self.ll = home.zeros("all_reduce.ll", (SLOTS, size, self.ll_words), torch.int64)


def part_numel(numel: int, world_size: int) -> int:
    """Return the size of each rank's part, except the last parts. Units of 16 bytes stay whole."""
    return -(-numel // (8 * world_size)) * 8


def all_reduce_workspace(
    home: Home,
    max_numel: int,
    dtype: torch.dtype,
    methods: Sequence[str] = ("one_shot", "two_shot"),
    *,
    chunk: int = CHUNK,
) -> AllReduceWorkspace:
    """Create a workspace for tensors of at most `max_numel` numbers. Collective.

    Args:
        home: this rank's.
        max_numel: numbers in a tensor. one_shot and ll need 2 W and 4 W times a tensor's memory,
            for tensors up to MAX_ONE_TRIP_BYTES; the other methods need 2 to 4 times.
        dtype: float32, float16 or bfloat16.
        methods: the methods it will be used with, from METHODS.
        chunk: numbers per signal; a multiple of 8.

    Raises:
        KernelError: on every rank, if a method is unknown on one of them or the ranks' arguments
            differ.
    """
    return AllReduceWorkspace(home, max_numel, dtype, methods, chunk)


def all_reduce(x: Tensor, workspace: AllReduceWorkspace, *, method: str | None = None) -> Tensor:
    """Return the sum over all ranks, on each of them. Collective.

    Args:
        x: any shape, contiguous, the workspace's dtype; the same shape on all ranks. Its size must
            be a multiple of 16 bytes for multimem.
        workspace: from `all_reduce_workspace`.
        method: one of the workspace's methods, the same on all ranks. If None, the tuned method for
            this device, world size, shape and dtype, or else the cost model's choice.

    Returns:
        x's shape, added in float32; the same bits on all ranks.

    Raises:
        KernelError: the tensor does not fit the workspace or the method on one rank, or differs
            between ranks.
    """
    asked: dict[str, object] = {}
    with workspace.agreed("all_reduce", asked):
        workspace.require_tensor("x", x)
        if method is None:
            method = workspace.choose_method(x, len(x) if x.dim() else 1)
        asked |= {"method": repr(method), "x's shape": tuple(x.shape)}
        workspace.require_method(method)
        workspace.require_max_numel("x", x)
        if method in ONE_TRIP:
            workspace.require_few_bytes("x", x, MAX_ONE_TRIP_BYTES, method)
        if method == "multimem":
            must = "be a multiple of 16 for multimem"
            workspace.require("x's size", f"{x.nbytes} bytes", x.nbytes % 16 == 0, must)
    out = torch.empty_like(x)
    if x.numel():
        METHODS[method](x, out, workspace)
    return out


def _one_shot(x: Tensor, out: Tensor, workspace: AllReduceWorkspace) -> None:
    numel = x.numel()
    workspace.begin()
    _push(x, workspace, numel, stride=0)
    add_rows(out, workspace)


def _push(x: Tensor, workspace: AllReduceWorkspace, numel: int, stride: int) -> None:
    size = workspace.world_size
    push_chunks[(size * count_chunks(numel, workspace.chunk),)](
        x=x,
        peers=workspace.peers(),
        rank=workspace.rank,
        numel=numel,
        chunk=workspace.chunk,
        stride=stride,
        total=x.numel(),
        dtype=triton_type(x.dtype),
        WORLD=size,
        BLOCK=BLOCK,
    )


def _two_shot(x: Tensor, out: Tensor, workspace: AllReduceWorkspace) -> None:
    size, rank, total = workspace.world_size, workspace.rank, x.numel()
    chunk, numel = workspace.chunk, part_numel(total, size)
    workspace.begin()
    _push(x, workspace, numel, stride=numel)
    reduce_and_send[(workspace.resident(count_chunks(numel, chunk)),)](
        peers=workspace.peers(),
        sums=Slots.of(workspace.sums),
        rank=rank,
        length=max(0, min(numel, total - rank * numel)),
        numel=numel,
        chunk=chunk,
        first=workspace.second,
        dtype=triton_type(x.dtype),
        WORLD=size,
        BLOCK=RESIDENT_BLOCK // 2,
        num_warps=RESIDENT_WARPS,
    )
    _collect(out, workspace, numel, workspace.sums)


def _collect(
    out: Tensor, workspace: AllReduceWorkspace, numel: int, sums: SymmetricTensor | None = None
) -> None:
    size, chunk = workspace.world_size, workspace.chunk
    collect_parts[(workspace.resident(size * count_chunks(numel, chunk)),)](
        out=out,
        peers=workspace.peers(sums),
        rank=workspace.rank,
        total=out.numel(),
        numel=numel,
        chunk=chunk,
        first=workspace.second,
        dtype=triton_type(out.dtype),
        WORLD=size,
        BLOCK=RESIDENT_BLOCK,
        num_warps=RESIDENT_WARPS,
    )


def _ll(x: Tensor, out: Tensor, workspace: AllReduceWorkspace) -> None:
    bits = torch.int32 if x.itemsize == 4 else torch.int16
    words = -(-x.nbytes // 4)
    workspace.begin()
    reduce_ll[(workspace.resident(-(-words // LL_BLOCK)),)](
        x=x.view(bits),
        out=out.view(bits),
        peers=workspace.peers(workspace.ll),
        rank=workspace.rank,
        numel=x.numel(),
        words=words,
        dtype=triton_type(x.dtype),
        WORLD=workspace.world_size,
        BLOCK=LL_BLOCK,
    )


def _multimem(x: Tensor, out: Tensor, workspace: AllReduceWorkspace) -> None:
    size, rank, total = workspace.world_size, workspace.rank, x.numel()
    chunk, numel = workspace.chunk, part_numel(total, size)
    chunks, length = count_chunks(numel, chunk), max(0, min(numel, total - rank * numel))
    unit = 16 // x.itemsize
    workspace.begin()
    publish_parts[(size * chunks,)](
        x=x,
        peers=workspace.peers(),
        rank=rank,
        total=total,
        numel=numel,
        chunk=chunk,
        dtype=triton_type(x.dtype),
        WORLD=size,
        BLOCK=BLOCK,
    )
    reduce_multimem[(workspace.resident(chunks),)](
        multicast=workspace.buffer.multicast,
        peers=workspace.peers(),
        rank=rank,
        length=length // unit,
        units=numel // unit,
        slot_units=workspace.numel // unit,
        chunk=chunk // unit,
        first=workspace.second,
        dtype=triton_type(x.dtype),
        WORLD=size,
        BLOCK=RESIDENT_BLOCK // 8,
        num_warps=RESIDENT_WARPS,
    )
    _collect(out, workspace, numel)


METHODS: dict[str, Callable[[Tensor, Tensor, AllReduceWorkspace], None]] = {
    "one_shot": _one_shot,
    "two_shot": _two_shot,
    "ll": _ll,
    "multimem": _multimem,
}
