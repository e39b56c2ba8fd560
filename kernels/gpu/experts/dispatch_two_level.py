"""Dispatch of tokens to the ranks of their experts, and combination: for prefill and several nodes.

    moe_dispatch_two_level(x [T, K], expert_ids int32 [T, k], weights float32 [T, k])
                                          -> rows [R, K], offsets int32 [L + 1]
    moe_combine_two_level(y [R, K])       -> [T, K]

Like dispatch.py, with the same rows, slots, `status` and wire, but for bandwidth. A token crosses
once to each node that has one of its experts. There it is passed on once to each rank that has one.
On the way back, each rank weighs and adds its outputs for a token, each node adds its ranks' sums,
and one sum per node crosses. So the router's weights travel with the tokens. With one node, a token
goes once to each rank and one sum returns from each, as in DeepEP's kernels (DeepSeek-AI 2025) for
training and prefill.

A token's sum has the same bits whatever the other tokens are. It is added in float32: on a rank in
the order of its choices, then in the order of a node's ranks, then of the nodes. Numbers are
rounded to x's dtype before they travel, so two roundings precede the last one. The order of
additions depends on where the experts are.

Rank (a, l) is the l-th of node a, with NODE ranks. Tokens cross from (a, l) to (b, l), and a
chunk's
tokens are packed: the i-th token of a chunk that goes there is row i of the chunk. Own tokens take
the same way, through the own memory. (b, l) has, in slot n mod 2 (expert_tokens.py describes
`buffer`, `wanted` and their use):

    crossed [NODES, C, K]         packed; from (a, l), with scales if it is fp8
    names int32 [NODES, C, 2, k]  for each token: the slot on this node of each choice, or -1;
                                  and the bits of its weight
    shares float32 [W, C, k]      the weights, beside `wanted`
    returned [W, C, K]            row [(a, m), t]: sum from (b, m) for token t of (a, l)
    homecoming [NODES, C, K]      packed; sum from node a for own tokens

Protocol, in call n. `dispatch`:

- cross. Program (c, d) of (a, l) stores names and tokens of chunk c for node b = a + 1 + d to
  (b, l), and sets its signal crossed [c, a]. All chunks are sent, as in moe_dispatch. `packed`
  [NODES, C] notes where each token went.
- pass on. Item (c, d, e) of (b, l) waits for chunk c of (a, l), a = b - d, and stores it to (b, m),
  m = l + 1 + e. Choices on (b, m) and their weights go to rows [(a, l), c] of `wanted` and
  `shares`, the tokens with such a choice to `buffer`. Then it sets signal passed [c, (a, l)].
  `kept` [NODES, NODE, C] notes which token went to which rank.
- count. The same program then waits for item (c, d, e) of (b, l - 1 - e), from the program with its
  number there, and counts it. Programs pass on all their items first. For these they wait only for
  `cross`, which waits for nobody. So there is no cycle.
- place, in a separate launch.

`combine`, with the same n:

- return. Program (c, d, e) of (b, m) adds its outputs for chunk c of (a, l) into row [(a, m), c] of
  (b, l)'s `returned`, and sets signal returned [c, (a, m)].
- cross back. Item (c, d) of (b, l) waits for its node's sums for chunk c of (a, l) on another node.
  It adds them, stores the sum to (a, l)'s `homecoming`, and sets signal home [c, b]. Each of these
  three launches waits only for the one before it.
- sum. Each own chunk waits for the ranks of the own node and for the other nodes that its tokens
  went to, and is added.

For a rank without an address here (beyond NVLink), `cross` and `cross back` store to the own `sent`
[NODES, C, K] and put it from there (nvshmem.py): names, and if there are tokens also rows and
scales. Each put is followed by its own signal of that rank's `across` [4, chunks, NODES], because
puts do not order each other. `sent` has one slot, so a `quiet` precedes each launch that stores
to it.

Two slots are enough. (a, l) in dispatch n + 2 has waited in its dispatch n + 1 for names from (b,
l), for all b, and for tokens passed on by (a, m), for all m. They sent these after their dispatch n
was over. So `crossed` and `names` of (b, l), and `buffer`, `wanted` and `shares` of (a, m), are
free. A rank that stores in combine n + 2 has waited for the same data of dispatch n + 2. Before it,
combine n was over on all ranks that it stores to. This requires that at most one other dispatch
comes between a dispatch and its combine; the host enforces it.

Bad ids, and numbers that are never trusted: as in dispatch.py.

Not handled: a grid of ranks in which (a, l) and (b, l) are not connected; tokens of one rank that
reach a node through several of its ranks; a `sent` smaller than all chunks.
"""

from __future__ import annotations

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
from weft.kernels.gpu.experts.placement import Placement
from weft.kernels.gpu.runtime import nvshmem
from weft.kernels.gpu.runtime.arguments import require, require_tensor
from weft.kernels.gpu.runtime.peers import SLOTS
from weft.kernels.gpu.runtime.signals import notify, peer_pointer, wait
from weft.kernels.gpu.runtime.workspace import triton_type
from weft.kernels.symmetric.memory import Home, SymmetricTensor

CHUNK = 16
"""Tokens per signal."""

WARPS = 8
"""For kernels with one program on a processor, which keeps much data in flight."""

NAMES, ROWS, SCALES, HOME = (tl.constexpr(kind) for kind in range(4))
"""The signals that follow puts of names, rows and scales, and of sums."""


class Sent(NamedTuple):
    """The source of `cross_nodes`' puts: symmetric memory of this rank (peers.py).

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
    to,  # [*, ...]; the destination, as this rank's own address
    source,  # [*, ...]; this rank's
    row,  # the first row
    count,  # number of rows
    width,  # bytes in a row
    across,  # int64 [W]; addresses of int64 [4, chunks, NODES]
    signal,  # number of the signal there
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
    peers,  # signals int32 [chunks, NODES], and more
    across,  # int64 [W]; addresses of int64 [4, chunks, NODES]
    rank,
    num_tokens,  # T
    K,
    chunks,
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    NODE: tl.constexpr,  # ranks per node
    FAR: tl.constexpr,  # some ranks have no address
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

    row = (call % 2) * (nodes * capacity) + own * capacity  # of the peer's
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
    kept,  # int32 [NODES, NODE, C]; 1 for tokens that went to a rank of this node
    tokens_of,  # int32 [W, chunks, L]
    crossed,  # int64 [W]; addresses of [2, NODES, C, K], 0 for ranks beyond NVLink
    crossed_scales,  # int64 [W]; addresses of float32 [2, NODES, C, ceil(K / COLUMNS)], or None
    names,  # int64 [W]; addresses of int32 [2, NODES, C, 2, k]
    peers,  # buffers [2, W, C, K]; signals int32 [chunks, NODES], and [chunks, W] from `passed` on
    scales,  # int64 [W]; addresses of float32 [2, W, C, ceil(K / COLUMNS)], or None
    wanted,  # int64 [W]; addresses of int32 [2, W, C, k]
    shares,  # int64 [W]; addresses of float32 [2, W, C, k]
    across,  # int64 [W]; addresses of int64 [4, chunks, NODES]
    rank,
    K,
    num_slots,  # L
    chunks,
    passed,  # the first signal to set
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    NODE: tl.constexpr,
    FAR: tl.constexpr,
    FORM: tl.constexpr,
):
    """Pass chunks on in this node; then wait for the other ranks' chunks and count. Grid:
    (programs,).
    """
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
    slot = (call % 2) * (WORLD * capacity)  # rows before this call's
    for item in range(tl.program_id(0), chunks * WORLD, tl.num_programs(0)):
        node = (own + nodes - item % WORLD // NODE) % nodes
        local = (mine + 1 + item % NODE) % NODE
        index = item // WORLD
        source, peer = node * NODE + mine, own * NODE + local
        at = index * nodes + node
        nvshmem.wait_across(names, source, peers, at, across, NAMES * kinds + at, rank, call, FAR)
        begin = (call % 2) * (nodes * capacity) + node * capacity
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
    peers,  # signals int32 [first + chunks * W]
    rank,
    K,
    chunks,
    first,  # the first signal
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    NODE: tl.constexpr,
    FORM: tl.constexpr,
):
    """Weigh and add this rank's outputs for one chunk, and store the sum to the rank that passed it
    on.

    Grid: (chunks * W,). Other nodes come first, because their data has further to go.
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
    row = (call % 2) * (WORLD * capacity) + (node * NODE + mine) * capacity
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
    parts,  # [NODE, C, K]; sums from the ranks of this node
    kept,  # int32 [NODE, C]; their tokens
    tokens,  # int32 [TOKENS]
    at,  # int32 [1, BLOCK]
    K,
    capacity,  # C
    NODE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add some columns of the ranks' sums for tokens, in the order of the ranks: float32."""
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
    sent,  # [NODES, C, K]; symmetric, this rank's; source of the puts
    peers,  # signals int32 [home + chunks * NODES]
    across,  # int64 [W]; addresses of int64 [4, chunks, NODES]
    rank,
    K,
    chunks,
    first,  # the first signal to wait for
    home,  # the first signal to set
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    NODE: tl.constexpr,
    FAR: tl.constexpr,
    FORM: tl.constexpr,
):
    """Add this node's sums for chunks of other nodes, and send them. Grid: (programs,)."""
    TOKENS: tl.constexpr = FORM.tokens
    BLOCK: tl.constexpr = FORM.block
    nodes: tl.constexpr = WORLD // NODE
    others: tl.constexpr = nodes - 1
    call = tl.load(peers.calls)
    own, mine = rank // NODE, rank % NODE
    capacity = chunks * TOKENS
    size: tl.constexpr = dtype.primitive_bitwidth // 8
    row = (call % 2) * (nodes * capacity) + own * capacity  # of the rank's whose it is
    for item in range(tl.program_id(0), chunks * others, tl.num_programs(0)):
        node = (own + 1 + item % others) % nodes
        index = item // others
        peer = node * NODE + mine
        came = tl.zeros((TOKENS,), tl.int32)
        tokens = index * TOKENS + tl.arange(0, TOKENS)
        for local in range(NODE):
            sender = node * NODE + local
            wait(peers, rank, first + index * WORLD + sender, call)
            came |= tl.load(kept + sender * capacity + tokens)
        place = index * TOKENS + tl.cumsum(came, axis=0) - came
        begin = node * NODE * capacity
        parts = peer_pointer(returned, rank, dtype)
        parts += ((call % 2) * (WORLD * capacity) + begin) * K
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
    peers,  # signals int32 [home + chunks * NODES]
    across,  # int64 [W]; addresses of int64 [4, chunks, NODES]
    rank,
    num_tokens,  # T
    K,
    chunks,
    first,  # the first signal of this node's ranks
    home,  # the first signal of other nodes
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    NODE: tl.constexpr,
    FAR: tl.constexpr,
    FORM: tl.constexpr,
):
    """Wait for all sums of a chunk, and add some columns. Grid: (programs,), persistent."""
    TOKENS: tl.constexpr = FORM.tokens
    BLOCK: tl.constexpr = FORM.block
    nodes: tl.constexpr = WORLD // NODE
    call = tl.load(peers.calls)
    own, mine = rank // NODE, rank % NODE
    capacity = chunks * TOKENS
    begin = own * NODE * capacity
    parts = peer_pointer(returned, rank, dtype) + ((call % 2) * (WORLD * capacity) + begin) * K
    came = peer_pointer(homecoming, rank, dtype) + (call % 2) * (nodes * capacity) * K
    columns = tl.cdiv(K, BLOCK)
    for item in range(tl.program_id(0), tl.cdiv(num_tokens, TOKENS) * columns, tl.num_programs(0)):
        index = item // columns
        tokens = index * TOKENS + tl.arange(0, TOKENS)
        at = item % columns * BLOCK + tl.arange(0, BLOCK)[None, :]
        total = tl.zeros((TOKENS, BLOCK), tl.float32)
        for node in range(nodes):
            if node == own:
                for local in range(NODE):
                    signal = first + index * WORLD + own * NODE + local
                    wait(peers, rank, signal, call)
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
    """The workspace of `moe_dispatch_two_level` and `moe_combine_two_level`; see
    `moe_two_level_workspace`.
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
        self.passed = chunks * nodes  # the first signal of each kind; crossed starts at 0
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

    def quiet(self) -> None:
        """Let the next launch overwrite the sources of earlier puts."""
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
    """Create a workspace for `moe_dispatch_two_level` and `moe_combine_two_level`. Collective.

    Args:
        ranks_per_node: ranks that have addresses of each other; all if None.

    For the other arguments and the errors see ExpertWorkspace.
    """
    return TwoLevelExpertWorkspace(
        home, max_tokens, width, top_k, dtype, placement, ranks_per_node, chunk, wire
    )


@dataclass(frozen=True, slots=True)
class DispatchedTwoLevel(Arrived):
    """The result of moe_dispatch_two_level, which moe_combine_two_level needs.

    Attributes:
        row_weights: float32 [R]; the router's weight of each row.
        packed: int32 [NODES, C]; the row of this rank's tokens on each node, or -1.
        kept: int32 [NODES, NODE, C]; the ranks of this node to which a token was passed on.
    """

    row_weights: Tensor
    packed: Tensor
    kept: Tensor


def moe_dispatch_two_level(
    x: Tensor, expert_ids: Tensor, weights: Tensor, workspace: TwoLevelExpertWorkspace
) -> DispatchedTwoLevel:
    """Send each token once to each node of its experts, and there once to each rank. Collective.

    Args:
        x: [T, K], contiguous; ranks may differ in T.
        expert_ids: int32 [T, k], contiguous; -1 for no expert.
        weights: float32 [T, k], contiguous; the router's.
        workspace: made for at least T tokens.

    Raises:
        KernelError: an argument does not fit; raised on the same ranks as in moe_dispatch.
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
        routing=workspace.routing(expert_ids),
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
    arrived, row_weights = workspace.place(tokens_of, shares)
    own: dict[str, Any] = {"status": status, "row_weights": row_weights}
    own |= {"packed": packed, "kept": kept}
    return DispatchedTwoLevel(**arrived, **own)


def moe_combine_two_level(
    y: Tensor, sent: DispatchedTwoLevel, workspace: TwoLevelExpertWorkspace
) -> Tensor:
    """Return the experts' outputs, weighed and added on the way. Collective.

    Args:
        y: [R, K], contiguous, x's dtype; each output in the place of its token in `sent.rows`.
        sent: the result of moe_dispatch_two_level, at most one call ago.
        workspace: the one it was dispatched with.

    Returns:
        [T, K]; the sums of a token's outputs times their weights. Unknown experts add nothing.

    Raises:
        KernelError: an argument does not fit; raised on the same ranks as in moe_dispatch.
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
