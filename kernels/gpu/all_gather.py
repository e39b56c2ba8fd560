"""All-gather: every rank's shard on every rank, in several ways.

    all_gather(x_shard [M / W, ...]) -> [M, ...]

Slot n mod 2 of each rank's buffer is [W, numel]; in call n, row r of it is for
the shard of rank r. A shard is cut into chunks, and signal [c, r] of a rank is
set to n when chunk c of rank r's shard can be read, by rank r. A signal must
have one rank that sets it, whatever the method, or one that is late in call n
would set it back after another has set it in call n + 1. So what comes through a
third has signals of its own (two_level). The layout of the signals does not
depend on the shape of a call: a rank that is one call ahead may set signals of
the next call already, and those must not stand for others of this.

Protocols, of call n:

- push. Program (d, c) of rank r copies chunk c of r's shard to row r of the slot
  of rank (r + d) mod W, and then sets that rank's signal [c, r]. Each rank
  begins with its own copy and goes round from there, so that no rank is sent to
  by all at once. `collect_chunks` waits for each chunk and copies it out.
- pull. The same, but a rank copies its shard to its own slot only, tells all
  ranks, and they fetch it from there.
- copy_engine. As push, by copies that the host has queued, which use no
  processors of the GPU. A queued copy cannot choose its slot by the number of
  the call (a CUDA graph replays the same addresses), so there is one slot, and
  all ranks meet (`meet`) before it is written to again.
- ll, ll128. As push, but data carries its own flag (low_latency.py): one launch,
  no signals. Item (b, d) is block b for rank r + d, and block b of rank r - d. A
  program first sends all its items, and then waits for the same ones, which the
  program of its number sends on the other ranks: there is no cycle.
- multimem. A rank stores its shard to all ranks at once through the switch
  (multimem.py), then sets signal [c, r] of each.
- two_level, for several nodes. A shard crosses to each other node once: rank l of
  a node sends its own to the ranks l of all nodes (`push_across`), which sets
  their signals [c, r], and passes on what it gets, and its own, to the other
  ranks of its node (`fan_out`), which sets their signals passed [c, r].
  To a rank that it has no address of (beyond NVLink) it sends chunk c by a put
  from row r of its own slot, which NVSHMEM follows with signal [c, a] of that
  rank's `across`, where a is r's node. Row r is stored to again two calls later,
  and each call begins with a `quiet`. Who gets chunk c sets its own signal
  [c, r], for `collect_chunks`, in r's stead: there, two_level is the only method.

In each of them a rank hears from every other one in every call, be it through a
third, so two slots are enough, and calls may differ in method: gpu/workspace.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu import nvshmem
from weft.kernels.gpu.collective import (
    LOW_LATENCY,
    MAX_LL_BYTES,
    UNITS,
    CollectiveWorkspace,
    count_chunks,
    waiting,
)
from weft.kernels.gpu.low_latency import (
    get_ll,
    get_ll128,
    load_words,
    put_ll,
    put_ll128,
    store_words,
)
from weft.kernels.gpu.multimem import load_16_bytes, multimem_store
from weft.kernels.gpu.signals import meet, notify, peer_pointer, tell, wait
from weft.kernels.gpu.workspace import SLOTS, triton_type
from weft.kernels.symmetric.memory import Home

CHUNK = 1 << 14
"""Numbers that have a signal of their own."""

BLOCK = 1024
"""Numbers that a program moves at a time."""

LL_BLOCK, LL128_LINES = 512, 32
"""Words of 4 bytes, and lines of 120, that a program of LL and LL128 moves."""


@triton.jit
def copy_chunk(to, x, index, numel, chunk, BLOCK: tl.constexpr):
    """Copy one chunk of x [numel] to `to` [numel]."""
    begin = index * chunk
    end = tl.minimum(begin + chunk, numel)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(to + at, tl.load(x + at, mask=at < end), mask=at < end)


@triton.jit(do_not_specialize=["rank"])
def push_chunks(
    x,  # [numel]; this rank's shard
    buffers,  # int64 [W]; addresses of [2, W, numel]
    signals,  # int64 [W]; addresses of int32 [chunks, W]
    calls,  # int32 [1]
    rank,
    numel,  # of a shard
    slot_numel,  # of a slot of the buffer
    chunk,  # numbers of a chunk
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy one chunk to one rank and tell it. Grid: (chunks * W,)."""
    peer = (rank + tl.program_id(0)) % WORLD
    index = tl.program_id(0) // WORLD
    call = tl.load(calls)
    to = peer_pointer(buffers, peer, dtype) + (call % 2) * slot_numel + rank * numel
    copy_chunk(to, x, index, numel, chunk, BLOCK)
    notify(signals, peer, index * WORLD + rank, call)


@triton.jit(do_not_specialize=["rank"])
def publish_chunks(
    x,  # [numel]; this rank's shard
    buffers,  # int64 [W]; addresses of [2, W, numel]
    signals,  # int64 [W]; addresses of int32 [chunks, W]
    calls,  # int32 [1]
    rank,
    numel,
    slot_numel,
    chunk,
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy one chunk to this rank's own slot and tell all ranks. Grid: (chunks,)."""
    index = tl.program_id(0)
    call = tl.load(calls)
    to = peer_pointer(buffers, rank, dtype) + (call % 2) * slot_numel + rank * numel
    copy_chunk(to, x, index, numel, chunk, BLOCK)
    for step in range(WORLD):
        notify(signals, (rank + step) % WORLD, index * WORLD + rank, call)


@triton.jit(do_not_specialize=["rank"])
def collect_chunks(
    out,  # [W, numel]
    buffers,  # int64 [W]; addresses of [2, W, numel]
    signals,  # int64 [W]; addresses of int32 [chunks, W], and from `passed` on of as many again
    calls,  # int32 [1]
    fault,  # int32 [4]
    rank,
    numel,
    slot_numel,
    chunk,
    passed,  # the first of the signals of what comes through another rank of the node
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    NODE: tl.constexpr,  # ranks of a node, each of which passes on; 1 if none does
    PULL: tl.constexpr,  # from the slot of the rank whose shard it is, not from the own slot
    BLOCK: tl.constexpr,
    max_polls,
):
    """Wait for chunks and copy them out of the buffer. Grid: (programs,), persistent.

    In the order in which they come: rank r - d sends to rank r in its d-th place.
    """
    call = tl.load(calls)
    for item in range(tl.program_id(0), WORLD * tl.cdiv(numel, chunk), tl.num_programs(0)):
        source = (rank + WORLD - item % WORLD) % WORLD
        index = item // WORLD
        first = tl.where(source % NODE == rank % NODE, 0, passed)
        wait(signals, rank, first + index * WORLD + source, call, fault, max_polls)
        holder = source if PULL else rank
        shard = peer_pointer(buffers, holder, dtype) + (call % 2) * slot_numel + source * numel
        copy_chunk(out + source * numel, shard, index, numel, chunk, BLOCK)


@triton.jit(do_not_specialize=["rank"])
def multicast_chunks(
    x,  # int32 [words]; this rank's shard, in words of 4 bytes
    multicast,  # int64; address of int32 [2, W, words] of all ranks
    signals,  # int64 [W]; addresses of int32 [chunks, W]
    calls,  # int32 [1]
    rank,
    words,  # of a shard; a multiple of 4
    slot_words,  # of a slot of the buffer; a multiple of 4
    chunk,  # words of a chunk; a multiple of 4
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store one chunk to all ranks and tell them. Grid: (chunks,)."""
    index = tl.program_id(0)
    call = tl.load(calls)
    to = multicast + 4 * ((call % 2) * tl.cast(slot_words, tl.int64) + rank * words)
    begin = index * chunk // 4
    end = tl.minimum(begin + chunk // 4, words // 4)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a, b, c, d = load_16_bytes(x, at, at < end)
        multimem_store(to + 16 * at, a, b, c, d, at < end)
    for step in range(WORLD):
        notify(signals, (rank + step) % WORLD, index * WORLD + rank, call)


@triton.jit(do_not_specialize=["rank"])
def gather_ll(
    x,  # int32 or int16 [numel]; this rank's shard
    out,  # the same [W, numel]
    buffers,  # int64 [W]; addresses of int64 [2, W, words]
    calls,  # int32 [1]
    fault,  # int32 [4]
    rank,
    numel,
    words,  # of 4 bytes, in a shard
    slot_words,
    WORLD: tl.constexpr,
    WIDE: tl.constexpr,  # elements of 4 bytes
    BLOCK: tl.constexpr,
    max_polls,
):
    """Send blocks to all ranks, then take theirs. Grid: (programs,), persistent."""
    call = tl.load(calls)
    slot = (call % 2) * slot_words
    items = WORLD * tl.cdiv(words, BLOCK)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        peer = (rank + item) % WORLD
        at = item // WORLD * BLOCK + tl.arange(0, BLOCK)
        to = peer_pointer(buffers, peer, tl.int64) + slot + rank * words
        put_ll(to + at, load_words(x, at, numel, WIDE), call, at < words)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        source = (rank + WORLD - item % WORLD) % WORLD
        first = item // WORLD * BLOCK
        at = first + tl.arange(0, BLOCK)
        come = peer_pointer(buffers, rank, tl.int64) + slot + source * words
        got = get_ll(come + at, call, at < words, fault, rank, source * words + first, max_polls)
        store_words(out + source * numel, at, got, numel, WIDE)


@triton.jit(do_not_specialize=["rank"])
def gather_ll128(
    x,  # int64 [words]; this rank's shard
    out,  # int64 [W, words]
    buffers,  # int64 [W]; addresses of int64 [2, W, lines, 16]
    calls,  # int32 [1]
    fault,  # int32 [4]
    rank,
    words,  # of 8 bytes, in a shard
    lines,  # of 15 words
    slot_lines,
    WORLD: tl.constexpr,
    LINES: tl.constexpr,
    max_polls,
):
    """Send lines to all ranks, then take theirs. Grid: (programs,), persistent."""
    call = tl.load(calls)
    column = tl.arange(0, 16)[None, :]
    slot = (call % 2) * slot_lines
    items = WORLD * tl.cdiv(lines, LINES)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        peer = (rank + item) % WORLD
        first = item // WORLD * LINES
        line = first + tl.arange(0, LINES)
        at = line[:, None] * 15 + column
        inside = (column < 15) & (at < words)
        to = peer_pointer(buffers, peer, tl.int64) + (slot + rank * lines + first) * 16
        put_ll128(to, tl.load(x + at, mask=inside, other=0), call, line < lines)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        source = (rank + WORLD - item % WORLD) % WORLD
        first = item // WORLD * LINES
        line = first + tl.arange(0, LINES)
        at = line[:, None] * 15 + column
        come = peer_pointer(buffers, rank, tl.int64) + (slot + source * lines + first) * 16
        got = get_ll128(come, call, line < lines, fault, rank, source * lines + first, max_polls)
        tl.store(out + source * words + at, got, mask=(column < 15) & (at < words))


@triton.jit(do_not_specialize=["rank"])
def wait_for_all(
    signals,  # int64 [W]; addresses of int32 [W]
    calls,  # int32 [1]
    fault,  # int32 [4]
    rank,
    WORLD: tl.constexpr,
    max_polls,
):
    """Wait for the first chunk of each rank. Grid: (1,)."""
    call = tl.load(calls)
    for source in range(WORLD):
        wait(signals, rank, source, call, fault, max_polls)


@triton.jit(do_not_specialize=["rank"])
def push_across(
    x,  # [numel]; this rank's shard
    buffers,  # int64 [W]; addresses of [2, W, numel], 0 for ranks that NVLink does not reach
    signals,  # int64 [W]; addresses of int32 [chunks, W]
    across,  # int64 [W]; addresses of int64 [chunks, W / NODE]
    calls,  # int32 [1]
    rank,
    numel,
    slot_numel,
    chunk,
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    NODE: tl.constexpr,  # ranks of a node
    FAR: tl.constexpr,  # there are ranks without an address
    BLOCK: tl.constexpr,
):
    """Copy one chunk to the same rank of all nodes and tell them. Grid: (chunks,).

    To the own slot first: puts send from there.
    """
    index = tl.program_id(0)
    call = tl.load(calls)
    row = (call % 2) * slot_numel + rank * numel
    own = peer_pointer(buffers, rank, dtype) + row
    copy_chunk(own, x, index, numel, chunk, BLOCK)
    notify(signals, rank, index * WORLD + rank, call)
    nodes: tl.constexpr = WORLD // NODE
    for distance in range(1, nodes):
        peer = (rank + distance * NODE) % WORLD
        address = tl.load(buffers + peer)
        if FAR:
            begin = index * chunk
            count = (tl.minimum(begin + chunk, numel) - begin).to(tl.int64)
            nbytes = count * (dtype.primitive_bitwidth // 8)
            source = (own + begin).to(tl.int64)
            signal = tl.load(across + rank) + 8 * (index * nodes + rank // NODE)
            if address == 0:
                nvshmem.put_signal(source, source, nbytes, signal, call.to(tl.int64), peer)
        if address != 0:
            copy_chunk(peer_pointer(buffers, peer, dtype) + row, x, index, numel, chunk, BLOCK)
            notify(signals, peer, index * WORLD + rank, call)


@triton.jit(do_not_specialize=["rank"])
def fan_out(
    buffers,  # int64 [W]; addresses of [2, W, numel], 0 for ranks that NVLink does not reach
    signals,  # int64 [W]; addresses of int32 [chunks, W], and from `passed` on of as many again
    across,  # int64 [W]; addresses of int64 [chunks, W / NODE]
    calls,  # int32 [1]
    fault,  # int32 [4]
    rank,
    numel,
    slot_numel,
    chunk,
    passed,  # the first of the signals of what is passed on
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    NODE: tl.constexpr,  # ranks of a node
    FAR: tl.constexpr,  # there are ranks without an address
    BLOCK: tl.constexpr,
    max_polls,
):
    """Pass chunks on to the other ranks of the node. Grid: (programs,), persistent.

    And tell this rank itself of what came by a put.
    """
    call = tl.load(calls)
    nodes: tl.constexpr = WORLD // NODE
    first: tl.constexpr = 0 if FAR else 1  # of the steps from this rank to the others of its node
    steps: tl.constexpr = NODE - first
    for item in range(tl.program_id(0), nodes * steps * tl.cdiv(numel, chunk), tl.num_programs(0)):
        distance = item // steps % nodes  # in nodes; they come in this order
        source = (rank + WORLD - distance * NODE) % WORLD
        peer = rank // NODE * NODE + (rank + first + item % steps) % NODE
        index = item // (nodes * steps)
        if (peer != rank) | (tl.load(buffers + source) == 0):
            at, at_across = index * WORLD + source, index * nodes + source // NODE
            nvshmem.wait_across(
                buffers, source, signals, at, across, at_across, rank, call, fault, FAR, max_polls
            )
            row = (call % 2) * slot_numel + source * numel
            shard = peer_pointer(buffers, rank, dtype) + row
            if peer != rank:
                to = peer_pointer(buffers, peer, dtype) + row
                copy_chunk(to, shard, index, numel, chunk, BLOCK)
            notify(signals, peer, at + tl.where(peer == rank, 0, passed), call)


class AllGatherWorkspace(CollectiveWorkspace):
    """Of `all_gather`, on one rank; see `all_gather_workspace`."""

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
            size * -(-max_numel // 8) * 8,  # each slot begins at a multiple of 16 bytes
            dtype,
            num_signals=size * (chunks + 1) + passed,
            max_numel=max_numel,
            methods=methods,
            known=METHODS,
            chunk=chunk,
            ranks_per_node=ranks_per_node,
        )
        nbytes = min(max_numel * dtype.itemsize, MAX_LL_BYTES)
        self.met = size * chunks  # the first of the signals of `meet`
        self.passed = self.met + size  # the first of the signals of what is passed on
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


def all_gather_workspace(
    home: Home,
    max_numel: int,
    dtype: torch.dtype,
    methods: Sequence[str] = ("push",),
    *,
    chunk: int = CHUNK,
    ranks_per_node: int | None = None,
) -> AllGatherWorkspace:
    """A workspace for shards of at most `max_numel` numbers. Collective.

    Args:
        home: of this rank.
        max_numel: of a shard.
        dtype: float32, float16 or bfloat16.
        methods: that it will be used with, of METHODS.
        chunk: numbers that have a signal of their own; a multiple of 8.
        ranks_per_node: for two_level: ranks 0 to ranks_per_node - 1 are on one node, and so on.
            All ranks are on one node if None. Ranks without an address must be of other nodes,
            and two_level the only method.

    Raises:
        KernelError: on every rank, if on one of them there is no such method, or a node's ranks
            do not divide the world's; or if the ranks' arguments differ.
    """
    return AllGatherWorkspace(home, max_numel, dtype, methods, chunk, ranks_per_node)


def all_gather(
    x_shard: Tensor, workspace: AllGatherWorkspace, *, method: str | None = None
) -> Tensor:
    """The shards of all ranks, one after the other. Collective.

    Args:
        x_shard: [M / W, ...], contiguous, the workspace's dtype; of the same shape on all ranks.
            For ll128 of a multiple of 8 bytes, for multimem of 16.
        workspace: from `all_gather_workspace`.
        method: of those that the workspace was made for; the same on all ranks. If None, what was
            tuned for this device, world size, shape and dtype, else what the cost model prefers.

    Returns:
        [M, ...].

    Raises:
        KernelError: the shard does not fit the workspace or the method, on one rank; or it is not
            the same on all of them.
    """
    size, numel, shape = workspace.world_size, x_shard.numel(), tuple(x_shard.shape)
    if method is None:
        method = workspace.choose_method(x_shard, size * len(x_shard) if x_shard.dim() else 1)
        if x_shard.data_ptr() % UNITS.get(method, 1):
            x_shard = x_shard.clone()
    with workspace.agreed({"method": repr(method), "x_shard's shape": shape}):
        workspace.require_method(method)
        workspace.require_tensor("x_shard", x_shard)
        workspace.require("x_shard's shape", shape, x_shard.dim() > 0, "have at least one axis")
        workspace.require_max_numel("x_shard", x_shard)
        if method in LOW_LATENCY:
            workspace.require_few_bytes("x_shard", x_shard, MAX_LL_BYTES, method)
        if method in UNITS:
            workspace.require_units("x_shard", x_shard, UNITS[method], method)
    out = x_shard.new_empty(size * x_shard.shape[0], *x_shard.shape[1:])
    if numel:
        METHODS[method](x_shard, out, workspace)
    return out


def _launch(
    workspace: AllGatherWorkspace, numel: int
) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
    """Chunks of a shard; the tables and the sizes that kernels take; their constants."""
    tables = (workspace.buffer.addresses, workspace.signals.addresses, workspace.calls)
    sizes = (workspace.rank, numel, workspace.numel, workspace.chunk)
    constants = {"dtype": triton_type(workspace.dtype), "WORLD": workspace.world_size}
    return -(-numel // workspace.chunk), (tables, sizes), {**constants, "BLOCK": BLOCK}


def _push(x: Tensor, out: Tensor, workspace: AllGatherWorkspace) -> None:
    chunks, (tables, sizes), constants = _launch(workspace, x.numel())
    workspace.begin()
    push_chunks[(workspace.world_size * chunks,)](x, *tables, *sizes, **constants)
    _collect(out, workspace, x.numel())


def _pull(x: Tensor, out: Tensor, workspace: AllGatherWorkspace) -> None:
    chunks, (tables, sizes), constants = _launch(workspace, x.numel())
    workspace.begin()
    publish_chunks[(chunks,)](x, *tables, *sizes, **constants)
    _collect(out, workspace, x.numel(), pull=True)


def _collect(
    out: Tensor, workspace: AllGatherWorkspace, numel: int, *, pull: bool = False, node: int = 1
) -> None:
    chunks, (tables, sizes), constants = _launch(workspace, numel)
    collect_chunks[(workspace.resident(workspace.world_size * chunks),)](
        *(out, *tables, workspace.fault, *sizes, workspace.passed),
        **{**constants, **waiting(workspace), "PULL": pull, "NODE": node},
    )


def _copy_engine(x: Tensor, out: Tensor, workspace: AllGatherWorkspace) -> None:
    size, rank, numel = workspace.world_size, workspace.rank, x.numel()
    signals, calls = workspace.signals.addresses, workspace.calls
    waits = (signals, calls, workspace.fault, rank)
    constants = {"WORLD": size, "max_polls": workspace.max_polls}
    workspace.begin()
    meet[(1,)](*waits, workspace.met, **constants)
    for step in range(size):
        peer = (rank + step) % size
        row = workspace.copied.peers[peer][rank * numel : (rank + 1) * numel]
        row.copy_(x.view(-1), non_blocking=True)
        tell[(1,)](signals, calls, peer, rank)
    wait_for_all[(1,)](*waits, **constants)
    out.view(-1).copy_(workspace.copied.local[: size * numel], non_blocking=True)


def _ll(x: Tensor, out: Tensor, workspace: AllGatherWorkspace) -> None:
    size, bits = workspace.world_size, torch.int32 if x.itemsize == 4 else torch.int16
    words = -(-x.nbytes // 4)
    workspace.begin()
    gather_ll[(workspace.resident(size * -(-words // LL_BLOCK)),)](
        *(x.view(bits), out.view(bits), workspace.ll.addresses, workspace.calls, workspace.fault),
        *(workspace.rank, x.numel(), words, size * workspace.ll_words),
        WORLD=size,
        WIDE=x.itemsize == 4,
        BLOCK=LL_BLOCK,
        max_polls=workspace.max_polls,
    )


def _ll128(x: Tensor, out: Tensor, workspace: AllGatherWorkspace) -> None:
    size, words = workspace.world_size, x.nbytes // 8
    lines = -(-words // 15)
    workspace.begin()
    gather_ll128[(workspace.resident(size * -(-lines // LL128_LINES)),)](
        *(x.view(-1).view(torch.int64), out.view(-1).view(torch.int64)),
        *(workspace.ll128.addresses, workspace.calls, workspace.fault),
        *(workspace.rank, words, lines, size * workspace.ll128_lines),
        WORLD=size,
        LINES=LL128_LINES,
        max_polls=workspace.max_polls,
    )


def _multimem(x: Tensor, out: Tensor, workspace: AllGatherWorkspace) -> None:
    numel, itemsize = x.numel(), x.itemsize
    chunks = -(-numel // workspace.chunk)
    workspace.begin()
    multicast_chunks[(chunks,)](
        *(x.view(-1).view(torch.int32), workspace.buffer.multicast),
        *(workspace.signals.addresses, workspace.calls, workspace.rank),
        *(n * itemsize // 4 for n in (numel, workspace.numel, workspace.chunk)),
        WORLD=workspace.world_size,
        BLOCK=BLOCK // 4,
    )
    _collect(out, workspace, numel)


def _two_level(x: Tensor, out: Tensor, workspace: AllGatherWorkspace) -> None:
    chunks, (tables, sizes), constants = _launch(workspace, x.numel())
    buffers, signals, calls = tables
    tables = (buffers, signals, workspace.across.addresses, calls)
    node, far = workspace.ranks_per_node, workspace.far
    constants |= {"NODE": node, "FAR": far, **workspace.link}
    workspace.begin()
    if far:
        nvshmem.quiet[(1,)](num_warps=1, **workspace.link)
    push_across[(chunks,)](x, *tables, *sizes, **constants)
    if steps := workspace.world_size if far else workspace.world_size // node * (node - 1):
        fan_out[(workspace.resident(steps * chunks),)](
            *(*tables, workspace.fault, *sizes, workspace.passed),
            **{**constants, **waiting(workspace)},
        )
    _collect(out, workspace, x.numel(), node=node)


METHODS: dict[str, Callable[[Tensor, Tensor, AllGatherWorkspace], None]] = {
    "push": _push,
    "pull": _pull,
    "copy_engine": _copy_engine,
    "ll": _ll,
    "ll128": _ll128,
    "multimem": _multimem,
    "two_level": _two_level,
}
