"""Dispatch of tokens to experts, and return of summed outputs: for prefill, over several nodes.

    moe_dispatch_two_level(x [T, K], expert_ids int32 [T, k], weights float32 [T, k])
                                          -> rows [R, K], offsets int32 [L + 1]
    moe_combine_two_level(y [R, K])       -> [T, K]

These ops do the same as moe_dispatch (dispatch.py), with the same rows, slots, `status` and
wire, but they save bandwidth. A token crosses once to each node with an expert for it. On
that node it is passed on once to each rank with such an expert. On the way back, each rank
weighs and adds its outputs for a token. Each node adds its ranks' sums, and the result
crosses once. The router's weights therefore travel with the tokens. With one node, a token
goes once to each rank with an expert for it, and each such rank returns one sum, as in
DeepEP's kernels (DeepSeek-AI 2025) for training and prefill.

A token's sum has the same bits whatever the other tokens are. It is added in float32: first
on each rank in the order of the token's choices, then over a node's ranks in order, then
over the nodes in order. Numbers are rounded to x's dtype when they are sent, so two roundings
precede the last one. The placement decides which numbers are added first.

Rank (a, l) is rank l on node a, which has NODE ranks. Crossing data goes from (a, l) to
(b, l). The tokens in a chunk are packed: the chunk's i-th token for that node is in its row
i. A rank's own tokens take the same path through its own memory. Rank (b, l) has these
tensors for slot n mod 2 (for `buffer` and `wanted` see expert_tokens.py):

    crossed [NODES, C, K]         packed; from (a, l), with scales if it is fp8
    names int32 [NODES, C, 2, k]  for each token: each choice's slot on this node, or -1;
                                  and the bits of its weight
    shares float32 [W, C, k]      the weights, beside `wanted`
    returned [W, C, K]            row [(a, m), t]: the sum on (b, m) for token t of (a, l)
    homecoming [NODES, C, K]      packed; the sum on node a for own tokens

Protocol for call n. `dispatch`:

- cross. Program (c, d) on (a, l) stores names and tokens from chunk c for node b = a + 1 + d
  to (b, l), and sets that rank's signal crossed [c, a]. All chunks are sent, as in
  moe_dispatch. It notes each token's row on that node in `packed` [NODES, C].
- pass on. Item (c, d, e) on (b, l) waits for chunk c from (a, l), a = b - d. It passes the
  chunk on to (b, m), m = l + 1 + e: choices on (b, m) and weights to rows [(a, l), c] of
  `wanted` and `shares`, tokens with such a choice to `buffer`. Then it sets (b, m)'s signal
  passed [c, (a, l)]. It notes which token went to which rank in `kept` [NODES, NODE, C].
- count. The same program then waits for item (c, d, e) from (b, l - 1 - e), sent there by
  the program with the same number, and counts it. A program passes on all its items before
  it waits to count. Passing on waits only for `cross`, which waits for nothing. So there is
  no cycle.
- place, in a separate launch.

`combine`, with the same n:

- return. Program (c, d, e) on (b, m) adds its outputs for chunk c of (a, l). It stores the
  sums to row [(a, m), c] of (b, l)'s `returned`, and sets signal returned [c, (a, m)].
- cross back. Item (c, d) on (b, l) waits for its node's sums for chunk c of (a, l), on another
  node. It adds them, stores the result to (a, l)'s `homecoming`, and sets signal home [c, b].
  Each of the three launches waits only for the one before it.
- sum. Each own chunk waits for the own node's ranks and for the other nodes with its tokens.
  Then their sums are added.

Some ranks have no address here (they are beyond NVLink). For these, `cross` and `cross back`
store to the own `sent` [NODES, C, K] and put the data from there (nvshmem.py). They put the
names and, if there are tokens, their rows and scales. Puts are not ordered among each other,
so each has its own signal in the receiver's `across` [4, chunks, NODES]. `sent` has one slot:
a `quiet` runs before each launch that stores to it.

Two slots are enough. In its dispatch n + 1, (a, l) has waited for names from (b, l), for all
b, and for the chunks passed on by (a, m), for all m. Those ranks sent them after their
dispatch n was over. In dispatch n + 2, therefore, `crossed` and `names` on (b, l) are free, and
so are `buffer`, `wanted` and `shares` on (a, m). A rank that stores in combine n + 2 has waited
for the same signals in dispatch n + 2. Before these, combine n was over on all ranks that it
stores to. This requires at most one other dispatch between a dispatch and its combine; the
host checks it.

Bad ids and untrusted numbers: as in dispatch.py.

Not handled: rank grids where (a, l) and (b, l) are not connected; a token sent to one node
through several ranks; `sent` smaller than all chunks together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.experts.expert_tokens import (
    COLUMNS,
    GROUPS,
    Arrived,
    ExpertWorkspace,
    addresses,
    choose_slots,
    chunk_entries,
    copy_rows,
    count_chunk,
    flag_tokens,
    pick,
    send_rows,
)
from weft.kernels.gpu.experts.placement import Placement, Tables
from weft.kernels.gpu.runtime import nvshmem
from weft.kernels.gpu.runtime.arguments import require, require_tensor
from weft.kernels.gpu.runtime.peers import SLOTS
from weft.kernels.gpu.runtime.signals import notify, peer_pointer, slot_of, wait, wait_all
from weft.kernels.gpu.runtime.workspace import triton_type
from weft.kernels.symmetric.memory import Home, SymmetricTensor

CHUNK = 16
"""Number of tokens with a shared signal."""

WARPS = 8
"""Warps in kernels with one program per processor, to keep many transfers in flight."""

NAMES, ROWS, SCALES, HOME = (tl.constexpr(kind) for kind in range(4))
"""Kinds of signals, each after one kind of put: names, rows, scales and sums."""


class Sent(NamedTuple):
    """The source for puts in `cross_nodes`: this rank's symmetric memory (peers.py).

    Attributes:
        rows: [NODES, C, K].
        scales: float32 [NODES, C, ceil(K / COLUMNS)], or None.
        names: int32 [NODES, C, 2, k].
    """

    rows: Tensor
    scales: Tensor | None
    names: Tensor


@triton.jit
def put_rows(
    to,  # [*, ...]; this rank's copy of the target
    source,  # [*, ...]; on this rank
    row,  # first row
    count,  # number of rows
    width,  # bytes in a row
    across,  # int64 [W]; addresses of int64 [4, chunks, NODES]
    signal,  # index in `across`
    call,
    rank,
    peer,
):
    """Put rows to the same place on another rank, followed by a signal."""
    begin = row.to(tl.int64) * width
    address = tl.load(across + rank) + 8 * signal
    nvshmem.put_signal(
        to + begin, source + begin, count.to(tl.int64) * width, address, call.to(tl.int64), peer
    )


@triton.jit(do_not_specialize=["rank", "num_tokens"])
def cross_nodes(
    x,  # [T, K]
    routing,  # Routing
    weights,  # float32 [T, k]
    status,  # int32 [T]
    packed,  # int32 [NODES, C]; the row of a token on a node, or -1
    crossed,  # int64 [W]; addresses of [2, NODES, C, K], 0 for ranks beyond NVLink
    scales,  # int64 [W]; addresses of float32 [2, NODES, C, ceil(K / COLUMNS)], or None
    names,  # int64 [W]; addresses of int32 [2, NODES, C, 2, k]
    sent,  # Sent
    peers,  # signals int64 [chunks, NODES], and more
    across,  # int64 [W]; addresses of int64 [4, chunks, NODES]
    rank,
    num_tokens,  # T
    K,
    chunks,
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    NODE: tl.constexpr,  # number of ranks on a node
    FAR: tl.constexpr,  # some ranks have no address here
    FORM: tl.constexpr,
):
    """Send one chunk to one node, the next node first. Grid: (chunks * NODES,)."""
    TOKENS: tl.constexpr = FORM.tokens
    TOP_K: tl.constexpr = FORM.top_k
    CHOICES: tl.constexpr = FORM.choices
    BLOCK: tl.constexpr = FORM.block
    nodes: tl.constexpr = WORLD // NODE
    call = tl.load(peers.calls)
    own = rank // NODE
    node = (own + 1 + tl.program_id(0)) % nodes
    index = tl.program_id(0) // nodes
    peer = node * NODE + rank % NODE
    capacity = chunks * TOKENS
    groups = tl.cdiv(K, COLUMNS)
    size: tl.constexpr = dtype.primitive_bitwidth // 8

    tokens, entries, asked = chunk_entries(index, TOKENS, TOP_K, CHOICES)
    given = asked & (tokens[:, None] < num_tokens)
    ids = tl.load(routing.expert_ids + entries, mask=given, other=-1)
    slots = choose_slots(ids, tokens, routing, rank)
    first = node * NODE * routing.num_slots
    theirs = (slots >= first) & (slots < first + NODE * routing.num_slots)
    share = tl.load(weights + entries, mask=given & theirs, other=0.0)
    goes = tl.max(theirs.to(tl.int32), axis=1)
    place = index * TOKENS + tl.cumsum(goes, axis=0) - goes
    count = tl.sum(goes, axis=0)
    tl.store(packed + node * capacity + tokens, tl.where(goes > 0, place, -1))
    if peer == rank:
        flag_tokens(status, ids, tokens, num_tokens, routing.num_experts)

    row = slot_of(call) * (nodes * capacity) + own * capacity  # in the peer's slot
    address = tl.load(names + peer)
    to_names = peer_pointer(names, peer, tl.int32) + row * (2 * TOP_K)
    to = peer_pointer(crossed, peer, dtype) + row * K
    to_scales = None if scales is None else peer_pointer(scales, peer, tl.float32) + row * groups
    if FAR:
        staged = node * capacity
        if address == 0:
            to_names = sent.names + staged * (2 * TOP_K)
            to = sent.rows + staged * K
        if scales is not None:
            staged_scales = sent.scales + staged * groups
            if address == 0:
                to_scales = staged_scales
    name = entries + tokens[:, None] * TOP_K
    tl.store(to_names + name, tl.where(theirs, slots - first, -1), mask=asked)
    tl.store(to_names + name + TOP_K, share.to(tl.int32, bitcast=True), mask=asked)
    send_rows(to, to_scales, place, x, tokens, goes > 0, K, TOKENS, BLOCK)

    at = index * nodes + own
    if address != 0:
        notify(peers, peer, at, call)
    if FAR:
        begin = index * TOKENS
        kinds = chunks * nodes
        own_names = tl.load(names + rank) + row.to(tl.int64) * (8 * TOP_K)
        if address == 0:
            put_rows(
                own_names, to_names.to(tl.int64), begin, tl.full((), TOKENS, tl.int32),
                8 * TOP_K, across, NAMES * kinds + at, call, rank, peer,
            )  # fmt: skip
            if count > 0:
                own_rows = tl.load(crossed + rank) + row.to(tl.int64) * K * size
                put_rows(
                    own_rows, to.to(tl.int64), begin, count,
                    K * size, across, ROWS * kinds + at, call, rank, peer,
                )  # fmt: skip
                if to_scales is not None:
                    own_scales = tl.load(scales + rank) + row.to(tl.int64) * groups * 4
                    put_rows(
                        own_scales, to_scales.to(tl.int64), begin, count,
                        groups * 4, across, SCALES * kinds + at, call, rank, peer,
                    )  # fmt: skip


@triton.jit(do_not_specialize=["rank"])
def pass_on(
    kept,  # int32 [NODES, NODE, C]; 1 for tokens passed on to a rank on this node
    tokens_of,  # int32 [W, chunks, L]
    crossed,  # int64 [W]; addresses of [2, NODES, C, K], 0 for ranks beyond NVLink
    crossed_scales,  # int64 [W]; addresses of float32 [2, NODES, C, ceil(K / COLUMNS)], or None
    names,  # int64 [W]; addresses of int32 [2, NODES, C, 2, k]
    peers,  # buffers [2, W, C, K]; signals int64 [chunks, NODES], and [chunks, W] from `passed` on
    scales,  # int64 [W]; addresses of float32 [2, W, C, ceil(K / COLUMNS)], or None
    wanted,  # int64 [W]; addresses of int32 [2, W, C, k]
    shares,  # int64 [W]; addresses of float32 [2, W, C, k]
    across,  # int64 [W]; addresses of int64 [4, chunks, NODES]
    rank,
    K,
    num_slots,  # L
    chunks,
    passed,  # the first signal that this kernel sets
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    NODE: tl.constexpr,
    FAR: tl.constexpr,
    FORM: tl.constexpr,
):
    """Pass chunks on within this node; then wait for the others' and count. Grid: (programs,)."""
    TOKENS: tl.constexpr = FORM.tokens
    TOP_K: tl.constexpr = FORM.top_k
    CHOICES: tl.constexpr = FORM.choices
    BLOCK: tl.constexpr = FORM.block
    nodes: tl.constexpr = WORLD // NODE
    call = tl.load(peers.calls)
    own, mine = rank // NODE, rank % NODE
    capacity = chunks * TOKENS
    kinds = chunks * nodes
    groups = tl.cdiv(K, COLUMNS)
    slot = slot_of(call) * (WORLD * capacity)  # rows before this call's slot
    for item in range(tl.program_id(0), chunks * WORLD, tl.num_programs(0)):
        node = (own + nodes - item % WORLD // NODE) % nodes
        local = (mine + 1 + item % NODE) % NODE
        index = item // WORLD
        source, peer = node * NODE + mine, own * NODE + local
        at = index * nodes + node
        nvshmem.wait_across(names, source, peers, at, across, NAMES * kinds + at, rank, call, FAR)
        begin = slot_of(call) * (nodes * capacity) + node * capacity
        tokens, entries, asked = chunk_entries(index, TOKENS, TOP_K, CHOICES)
        name = peer_pointer(names, rank, tl.int32) + begin * (2 * TOP_K)
        name += entries + tokens[:, None] * TOP_K
        slots = tl.load(name, mask=asked, other=-1)
        came = tl.max(((slots >= 0) & (slots < NODE * num_slots)).to(tl.int32), axis=1)
        place = index * TOKENS + tl.cumsum(came, axis=0) - came
        if FAR:
            follows = tl.load(across + rank) + 8 * (ROWS * kinds + at)
            if (tl.load(names + source) == 0) & (tl.sum(came, axis=0) > 0):
                nvshmem.wait(follows, call.to(tl.int64), peers, rank, at)
                if scales is not None:
                    follows = tl.load(across + rank) + 8 * (SCALES * kinds + at)
                    nvshmem.wait(follows, call.to(tl.int64), peers, rank, at)

        first = local * num_slots
        theirs = (slots >= first) & (slots < first + num_slots)
        goes = tl.max(theirs.to(tl.int32), axis=1)
        tl.store(kept + (node * NODE + local) * capacity + tokens, goes)
        row = slot + source * capacity
        to_names = peer_pointer(wanted, peer, tl.int32) + row * TOP_K
        tl.store(to_names + entries, tl.where(theirs, slots - first, -1), mask=asked)
        share = tl.load(name + TOP_K, mask=theirs, other=0).to(tl.float32, bitcast=True)
        tl.store(peer_pointer(shares, peer, tl.float32) + row * TOP_K + entries, share, mask=theirs)
        came_rows = peer_pointer(crossed, rank, dtype) + begin * K
        to = peer_pointer(peers.buffers, peer, dtype) + row * K
        copy_rows(to, tokens, came_rows, place, goes > 0, K, BLOCK)
        if scales is not None:
            came_scales = peer_pointer(crossed_scales, rank, tl.float32) + begin * groups
            to_scales = peer_pointer(scales, peer, tl.float32) + row * groups
            copy_rows(to_scales, tokens, came_scales, place, goes > 0, groups, GROUPS)
        notify(peers, peer, passed + index * WORLD + source, call)

    for item in range(tl.program_id(0), chunks * WORLD, tl.num_programs(0)):
        node = (own + nodes - item % WORLD // NODE) % nodes
        source = node * NODE + (mine + NODE - 1 - item % NODE) % NODE
        index = item // WORLD
        wait(peers, rank, passed + index * WORLD + source, call)
        wanted_here = peer_pointer(wanted, rank, tl.int32) + (slot + source * capacity) * TOP_K
        count_chunk(
            tokens_of, wanted_here, source, index, num_slots, chunks, TOKENS, TOP_K, CHOICES
        )


@triton.jit(do_not_specialize=["rank"])
def return_sums(
    y,  # [R, K]
    row_weights,  # float32 [R]
    positions,  # int32 [W, C, k]
    returned,  # int64 [W]; addresses of [2, W, C, K]
    peers,  # signals int64 [first + chunks * W]
    rank,
    K,
    chunks,
    first,  # the first signal that this kernel sets
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    NODE: tl.constexpr,
    FORM: tl.constexpr,
):
    """Weigh and add this rank's outputs for one chunk, and store them to its forwarding rank.

    The forwarding rank is the one that passed the chunk on. Grid: (chunks * W,). Other nodes come
    first, because their sums have further to go.
    """
    TOKENS: tl.constexpr = FORM.tokens
    TOP_K: tl.constexpr = FORM.top_k
    CHOICES: tl.constexpr = FORM.choices
    BLOCK: tl.constexpr = FORM.block
    nodes: tl.constexpr = WORLD // NODE
    call = tl.load(peers.calls)
    own, mine = rank // NODE, rank % NODE
    node = (own + 1 + tl.program_id(0) % WORLD // NODE) % nodes
    local = (mine + 1 + tl.program_id(0) % NODE) % NODE
    index = tl.program_id(0) // WORLD
    peer, capacity = own * NODE + local, chunks * TOKENS
    tokens, entries, asked = chunk_entries(index, TOKENS, TOP_K, CHOICES)
    source = (node * NODE + local) * capacity
    place = tl.load(positions + source * TOP_K + entries, mask=asked, other=-1)
    some = tl.max(place, axis=1)[:, None] >= 0
    row = slot_of(call) * (WORLD * capacity) + (node * NODE + mine) * capacity
    to = peer_pointer(returned, peer, dtype) + row * K + tokens[:, None] * K
    for start in range(0, K, BLOCK):
        at = start + tl.arange(0, BLOCK)[None, :]
        total = tl.zeros((TOKENS, BLOCK), tl.float32)
        for choice in range(TOP_K):
            output = pick(place, choice, CHOICES)[:, None]
            weight = tl.load(row_weights + output, mask=output >= 0, other=0.0)
            mask = (output >= 0) & (at < K)
            row_of_y = y + output.to(tl.int64) * K + at
            total += weight * tl.load(row_of_y, mask=mask, other=0.0).to(tl.float32)
        tl.store(to + at, total.to(dtype), mask=some & (at < K))
    notify(peers, peer, first + index * WORLD + node * NODE + mine, call)


@triton.jit
def add_kept(
    parts,  # [NODE, C, K]; from the ranks on this node
    kept,  # int32 [NODE, C]; 1 for tokens that a rank has
    tokens,  # int32 [TOKENS]
    at,  # int32 [1, BLOCK]
    K,
    capacity,  # C
    NODE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add some columns of the ranks' sums for tokens, in rank order: float32."""
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    for local in range(NODE):
        row = local * capacity + tokens
        mask = (tl.load(kept + row) > 0)[:, None] & (at < K)
        total += tl.load(parts + row[:, None] * K + at, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["rank"])
def cross_back(
    kept,  # int32 [NODES, NODE, C]
    returned,  # int64 [W]; addresses of [2, W, C, K]
    homecoming,  # int64 [W]; addresses of [2, NODES, C, K], 0 for ranks beyond NVLink
    sent,  # [NODES, C, K]; symmetric, on this rank; the source for puts
    peers,  # signals int64 [home + chunks * NODES]
    across,  # int64 [W]; addresses of int64 [4, chunks, NODES]
    rank,
    K,
    chunks,
    first,  # the first signal that this kernel waits for
    home,  # the first signal that this kernel sets
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    NODE: tl.constexpr,
    FAR: tl.constexpr,
    FORM: tl.constexpr,
):
    """Add this node's sums for other nodes' chunks, and send them. Grid: (programs,)."""
    TOKENS: tl.constexpr = FORM.tokens
    BLOCK: tl.constexpr = FORM.block
    nodes: tl.constexpr = WORLD // NODE
    others: tl.constexpr = nodes - 1
    call = tl.load(peers.calls)
    own, mine = rank // NODE, rank % NODE
    capacity = chunks * TOKENS
    size: tl.constexpr = dtype.primitive_bitwidth // 8
    row = slot_of(call) * (nodes * capacity) + own * capacity  # on the tokens' rank
    for item in range(tl.program_id(0), chunks * others, tl.num_programs(0)):
        node = (own + 1 + item % others) % nodes
        index = item // others
        peer = node * NODE + mine
        came = tl.zeros((TOKENS,), tl.int32)
        tokens = index * TOKENS + tl.arange(0, TOKENS)
        wait_all(peers, rank, first + index * WORLD + node * NODE, call, NODE)
        for local in range(NODE):
            came |= tl.load(kept + (node * NODE + local) * capacity + tokens)
        place = index * TOKENS + tl.cumsum(came, axis=0) - came
        begin = node * NODE * capacity
        parts = peer_pointer(returned, rank, dtype)
        parts += (slot_of(call) * (WORLD * capacity) + begin) * K
        address = tl.load(homecoming + peer)
        to = peer_pointer(homecoming, peer, dtype) + row * K
        if FAR:
            staged = sent + node * capacity * K
            if address == 0:
                to = staged
        for start in range(0, K, BLOCK):
            at = start + tl.arange(0, BLOCK)[None, :]
            total = add_kept(parts, kept + begin, tokens, at, K, capacity, NODE, TOKENS, BLOCK)
            mask = (came > 0)[:, None] & (at < K)
            tl.store(to + place[:, None] * K + at, total.to(dtype), mask=mask)
        if address != 0:
            notify(peers, peer, home + index * nodes + own, call)
        if FAR:
            count = tl.sum(came, axis=0)
            if (address == 0) & (count > 0):
                own_rows = tl.load(homecoming + rank) + row.to(tl.int64) * K * size
                put_rows(
                    own_rows, to.to(tl.int64), index * TOKENS, count, K * size,
                    across, HOME * chunks * nodes + index * nodes + own, call, rank, peer,
                )  # fmt: skip


@triton.jit(do_not_specialize=["rank", "num_tokens"])
def sum_nodes(
    out,  # [T, K]
    packed,  # int32 [NODES, C]
    kept,  # int32 [NODES, NODE, C]
    returned,  # int64 [W]; addresses of [2, W, C, K]
    homecoming,  # int64 [W]; addresses of [2, NODES, C, K], 0 for ranks beyond NVLink
    peers,  # signals int64 [home + chunks * NODES]
    across,  # int64 [W]; addresses of int64 [4, chunks, NODES]
    rank,
    num_tokens,  # T
    K,
    chunks,
    first,  # the first signal from this node's ranks
    home,  # the first signal from other nodes
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    NODE: tl.constexpr,
    FAR: tl.constexpr,
    FORM: tl.constexpr,
):
    """Wait for all sums for a chunk, and add some columns. Grid: (programs,), persistent."""
    TOKENS: tl.constexpr = FORM.tokens
    BLOCK: tl.constexpr = FORM.block
    nodes: tl.constexpr = WORLD // NODE
    call = tl.load(peers.calls)
    own, mine = rank // NODE, rank % NODE
    capacity = chunks * TOKENS
    begin = own * NODE * capacity
    parts = peer_pointer(returned, rank, dtype) + (slot_of(call) * (WORLD * capacity) + begin) * K
    came = peer_pointer(homecoming, rank, dtype) + slot_of(call) * (nodes * capacity) * K
    columns = tl.cdiv(K, BLOCK)
    for item in range(tl.program_id(0), tl.cdiv(num_tokens, TOKENS) * columns, tl.num_programs(0)):
        index = item // columns
        tokens = index * TOKENS + tl.arange(0, TOKENS)
        at = item % columns * BLOCK + tl.arange(0, BLOCK)[None, :]
        total = tl.zeros((TOKENS, BLOCK), tl.float32)
        for node in range(nodes):
            if node == own:
                wait_all(peers, rank, first + index * WORLD + own * NODE, call, NODE)
                total += add_kept(parts, kept + begin, tokens, at, K, capacity, NODE, TOKENS, BLOCK)
            else:
                place = tl.load(packed + node * capacity + tokens)
                if tl.max(place, axis=0) >= 0:
                    sender, chunk = node * NODE + mine, index * nodes + node
                    put = HOME * chunks * nodes + chunk
                    nvshmem.wait_across(
                        homecoming, sender, peers, home + chunk, across, put, rank, call, FAR
                    )
                row = (node * capacity + place)[:, None]
                mask = (place >= 0)[:, None] & (at < K)
                total += tl.load(came + row * K + at, mask=mask, other=0.0).to(tl.float32)
        inside = (tokens[:, None] < num_tokens) & (at < K)
        tl.store(out + tokens[:, None] * K + at, total.to(dtype), mask=inside)


class TwoLevelExpertWorkspace(ExpertWorkspace):
    """A workspace for `moe_dispatch_two_level` and `moe_combine_two_level`.

    See `moe_two_level_workspace`.
    """

    def __init__(
        self,
        home: Home,
        max_tokens: int,
        width: int,
        top_k: int,
        dtype: torch.dtype,
        placement: Placement,
        ranks_per_node: int | None,
        chunk: int,
        wire: torch.dtype | None,
    ) -> None:
        name, size = "moe_two_level", home.world_size
        node = size if ranks_per_node is None else ranks_per_node
        super().__init__(
            home,
            name,
            ("moe_dispatch_two_level", "moe_combine_two_level"),
            max_tokens,
            width,
            top_k,
            dtype,
            placement,
            chunk=chunk,
            wire=wire,
            node=node,
            of_world=2,
            of_node=2,
        )
        nodes, chunks, capacity = size // node, self.chunks, self.capacity
        self.ranks_per_node, self.nodes = node, nodes
        self.passed = chunks * nodes  # each kind's first signal; `crossed` begins at 0
        self.back = self.passed + chunks * size
        self.home = self.back + chunks * size
        self.extern_libs = nvshmem.link_options() if self.far else None
        if self.far and home.device.type == "cuda":
            nvshmem.register_modules()

        def empty(what: str, shape: tuple[int, ...], dtype: torch.dtype) -> SymmetricTensor:
            return home.empty(f"{name}.{what}", shape, dtype)

        across, names = (SLOTS, nodes, capacity), (2, top_k)
        self.crossed = empty("crossed", (*across, width), self.wire)
        self.crossed_scales = self.of_groups(home, "crossed_scales", across)
        self.names = empty("names", (*across, *names), torch.int32)
        self.shares = empty("shares", (SLOTS, size, capacity, top_k), torch.float32)
        self.returned = empty("returned", (SLOTS, size, capacity, width), dtype)
        self.homecoming = empty("homecoming", (*across, width), dtype)
        staged = (nodes if self.far else 0, capacity)
        self.sent = empty("sent", (*staged, width), self.wire)
        self.sent_scales = self.of_groups(home, "sent_scales", staged)
        self.sent_names = empty("sent_names", (*staged, *names), torch.int32)
        self.sent_sums = empty("sent_sums", (*staged, width), dtype)
        self.across = home.zeros(f"{name}.across", (4, chunks, staged[0]), torch.int64)

    @property
    def counting(self) -> Sequence[Tensor]:
        """See Workspace."""
        return (*super().counting, self.across.local)

    def quiet(self) -> None:
        """Wait for all puts, so that the next launch may store to their sources."""
        if self.far:
            nvshmem.quiet[(1,)](num_warps=1, extern_libs=self.extern_libs)


def moe_two_level_workspace(
    home: Home,
    max_tokens: int,
    width: int,
    top_k: int,
    dtype: torch.dtype,
    placement: Placement,
    *,
    ranks_per_node: int | None = None,
    chunk: int = CHUNK,
    wire: torch.dtype | None = None,
) -> TwoLevelExpertWorkspace:
    """Make a workspace for `moe_dispatch_two_level` and `moe_combine_two_level`. Collective.

    Args:
        ranks_per_node: number of consecutive ranks with addresses for each other; all if None.

    Other arguments and errors: see ExpertWorkspace.
    """
    return TwoLevelExpertWorkspace(
        home, max_tokens, width, top_k, dtype, placement, ranks_per_node, chunk, wire
    )


@dataclass(frozen=True, slots=True)
class DispatchedTwoLevel(Arrived):
    """The received tokens, and everything moe_combine_two_level needs to return their sums.

    Attributes:
        row_weights: float32 [R]; the router's weight for each row.
        packed: int32 [NODES, C]; the row of each own token on each node, or -1.
        kept: int32 [NODES, NODE, C]; 1 where a token was passed on to a rank on this node.
    """

    row_weights: Tensor
    packed: Tensor
    kept: Tensor


def moe_dispatch_two_level(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    workspace: TwoLevelExpertWorkspace,
    *,
    tables: Tables | None = None,
) -> DispatchedTwoLevel:
    """Send each token once to each node of its experts, and there once to each rank. Collective.

    Args:
        x: [T, K], contiguous; ranks may differ in T.
        expert_ids: int32 [T, k], contiguous; -1 for no expert.
        weights: float32 [T, k], contiguous; from the router.
        workspace: made for at least T tokens.
        tables: as in moe_dispatch.

    Raises:
        KernelError: an argument does not fit; on the same ranks as in moe_dispatch.
    """
    op = "moe_dispatch_two_level"
    with workspace.agreed(op, {}):
        check = partial(require, op)
        workspace.require_tokens(check, x, expert_ids)
        require_tensor(check, "weights", weights, expert_ids.shape, workspace.device, torch.float32)
    tokens, size, node = len(x), workspace.world_size, workspace.ranks_per_node
    chunks, capacity, nodes = workspace.chunks, workspace.capacity, workspace.nodes
    slots = workspace.placement.slots_per_rank
    new = expert_ids.new_empty
    status, tokens_of = new(tokens), new(size, chunks, slots)
    packed, kept = new(nodes, capacity), new(nodes, node, capacity)
    names, shares, staged = workspace.names.addresses, workspace.shares, workspace.sent_scales
    dtype, form = triton_type(workspace.wire), workspace.form(workspace.wire)
    # As many bytes at a time as in 16 bits: with more, addresses spill on sm_100.
    few = form._replace(block=max(1, form.block // 2)) if workspace.wire.itemsize > 2 else form
    workspace.begin()
    workspace.quiet()
    cross_nodes[(chunks * nodes,)](
        x=x,
        routing=workspace.routing(expert_ids, tables),
        weights=weights,
        status=status,
        packed=packed,
        crossed=workspace.crossed.addresses,
        scales=addresses(workspace.crossed_scales),
        names=names,
        sent=Sent(
            rows=workspace.sent.local,
            scales=staged.local if staged else None,
            names=workspace.sent_names.local,
        ),
        peers=workspace.peers(),
        across=workspace.across.addresses,
        rank=workspace.rank,
        num_tokens=tokens,
        K=workspace.width,
        chunks=chunks,
        dtype=dtype,
        WORLD=size,
        NODE=node,
        FAR=workspace.far,
        FORM=form,
        num_warps=WARPS,
        extern_libs=workspace.extern_libs,
    )
    pass_on[(workspace.resident(chunks * size),)](
        kept=kept,
        tokens_of=tokens_of,
        crossed=workspace.crossed.addresses,
        crossed_scales=addresses(workspace.crossed_scales),
        names=names,
        peers=workspace.peers(),
        scales=addresses(workspace.scales),
        wanted=workspace.wanted.addresses,
        shares=shares.addresses,
        across=workspace.across.addresses,
        rank=workspace.rank,
        K=workspace.width,
        num_slots=slots,
        chunks=chunks,
        passed=workspace.passed,
        dtype=dtype,
        WORLD=size,
        NODE=node,
        FAR=workspace.far,
        FORM=few,
        num_warps=WARPS,
        extern_libs=workspace.extern_libs,
    )
    counted_rows = tables.rows if tables else None
    arrived, row_weights = workspace.place(tokens_of, shares, counted_rows)
    own: dict[str, Any] = {"status": status, "row_weights": row_weights}
    own |= {"packed": packed, "kept": kept}
    return DispatchedTwoLevel(**arrived, **own)


def moe_combine_two_level(
    y: Tensor, sent: DispatchedTwoLevel, workspace: TwoLevelExpertWorkspace
) -> Tensor:
    """Return the experts' outputs, weighed and added on the way. Collective.

    Args:
        y: [R, K], contiguous, with x's dtype; each output in the row where its token was in
            `sent.rows`.
        sent: the result of moe_dispatch_two_level, at most one dispatch old.
        workspace: the same as for the dispatch.

    Returns:
        [T, K]; for each token, the sum of its outputs times their weights. Choices outside [0, E)
        add nothing.

    Raises:
        KernelError: an argument does not fit; on the same ranks as in moe_dispatch.
    """
    op = "moe_combine_two_level"
    with workspace.agreed(op, {}):
        workspace.require_sent(partial(require, op), y, sent)
    size, chunks, width = workspace.world_size, workspace.chunks, workspace.width
    nodes, rank = workspace.nodes, workspace.rank
    tokens = len(sent.status)
    out = y.new_empty(tokens, width)
    dtype, form = triton_type(workspace.dtype), workspace.form(workspace.dtype)
    returned, homecoming = workspace.returned.addresses, workspace.homecoming.addresses
    peers, across = workspace.peers(calls=sent.call), workspace.across.addresses
    return_sums[(chunks * size,)](
        y=y,
        row_weights=sent.row_weights,
        positions=sent.positions,
        returned=returned,
        peers=peers,
        rank=rank,
        K=width,
        chunks=chunks,
        first=workspace.back,
        dtype=dtype,
        WORLD=size,
        NODE=workspace.ranks_per_node,
        FORM=form,
    )
    if nodes > 1:
        workspace.quiet()
        cross_back[(workspace.resident(chunks * (nodes - 1)),)](
            kept=sent.kept,
            returned=returned,
            homecoming=homecoming,
            sent=workspace.sent_sums.local,
            peers=peers,
            across=across,
            rank=rank,
            K=width,
            chunks=chunks,
            first=workspace.back,
            home=workspace.home,
            dtype=dtype,
            WORLD=size,
            NODE=workspace.ranks_per_node,
            FAR=workspace.far,
            FORM=form,
            num_warps=WARPS,
            extern_libs=workspace.extern_libs,
        )
    items = -(-tokens // workspace.chunk) * -(-width // form.block)
    sum_nodes[(workspace.resident(items),)](
        out=out,
        packed=sent.packed,
        kept=sent.kept,
        returned=returned,
        homecoming=homecoming,
        peers=peers,
        across=across,
        rank=rank,
        num_tokens=tokens,
        K=width,
        chunks=chunks,
        first=workspace.back,
        home=workspace.home,
        dtype=dtype,
        WORLD=size,
        NODE=workspace.ranks_per_node,
        FAR=workspace.far,
        FORM=form,
        num_warps=WARPS,
        extern_libs=workspace.extern_libs,
    )
    return out
