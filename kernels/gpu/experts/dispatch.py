"""Dispatch of tokens to their experts' ranks, and return of the outputs: for decode.

    moe_dispatch(x [T, K], expert_ids int32 [T, k]) -> rows [R, K], offsets int32 [L + 1]
    moe_combine(y [R, K], weights float32 [T, k])   -> [T, K]

A rank has T tokens (T may differ between ranks) and L slots with experts (placement.py).
`rows[offsets[e] : offsets[e + 1]]` are the tokens for its slot e, ordered by (source
rank, token, choice); the rows after the last offset are undefined. The experts' outputs
take the places of their tokens. A token's outputs are added in float32 in the order of
its choices, and rounded once: the sum has the same bits whatever the other tokens are,
and wherever the experts are.

The host reads nothing about the routing: buffers have the worst-case size, and no token is
dropped. A token crosses once to each rank with an expert for it, however many experts it
has there. expert_tokens.py has the buffers, their scales for fp8 tokens, and the
processing of received tokens. Outputs come back in x's dtype.

Protocol for call n. `dispatch`:

- send. Item (c, d) on rank r handles chunk c of its tokens for rank p = r + 1 + d. It
  stores the choices on p to row [r, c] of p's `wanted`. It stores each token with such a
  choice, and its scales, to row [r, c] of p's buffer. Then it sets p's signal [c, r] to n.
  All chunks are sent, and beyond T every choice is -1, so p knows where the tokens end.
- count. The same program then waits for item (c, d) from rank r - 1 - d, sent there by the
  program with the same number, and counts it. A program sends all its items before it
  waits, so there is no cycle.
- place, in a separate launch.

`combine`, with the same n, kept in the result of dispatch:

- return. Program (c, d) on rank r stores the outputs for chunk c of rank p = r + 1 + d
  to p's `returned`, [C, k, K] in slot n mod 2. Then it sets p's signal combined [c, r].
- sum. For each of its own chunks, a rank waits for all ranks and adds the outputs.

Two slots are enough. A rank in dispatch n + 2 has seen all other ranks' signals for
dispatch n + 1. They sent these after their own dispatch n, reading included. For combine,
the same signals give the order: a rank that stores in combine n + 2 has seen all signals
for dispatch n + 2, and combine n was over on every rank before these were sent. This
requires at most one other dispatch between a dispatch and its combine; the host checks it.

An id outside [0, E) is sent nowhere, adds nothing and is flagged in its token's `status`.
The id -1 means no expert and is not flagged. Numbers that a peer stored never form an
unchecked address: after a timeout they may be anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.experts.expert_tokens import (
    COLUMNS,
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
from weft.kernels.gpu.runtime.arguments import require, require_tensor
from weft.kernels.gpu.runtime.peers import SLOTS
from weft.kernels.gpu.runtime.signals import notify, peer_pointer, slot_of, wait, wait_all
from weft.kernels.gpu.runtime.workspace import triton_type
from weft.kernels.symmetric.memory import Home


@triton.jit
def send_chunk(
    x,  # [T, K]
    routing,  # Routing
    status,  # int32 [T]
    to,  # [C, K]; this rank's part in the peer's slot
    to_scales,  # float32 [C, ceil(K / COLUMNS)], or None; in the same slot
    wanted,  # int32 [C, k]; in the same slot
    index,  # the chunk's index
    peer,
    rank,
    num_tokens,  # T
    K,
    FORM: tl.constexpr,
):
    """Store a chunk's choices on a peer, and the tokens with such a choice, in its memory."""
    TOKENS: tl.constexpr = FORM.tokens
    TOP_K: tl.constexpr = FORM.top_k
    CHOICES: tl.constexpr = FORM.choices
    BLOCK: tl.constexpr = FORM.block
    tokens, entries, asked = chunk_entries(index, TOKENS, TOP_K, CHOICES)
    given = asked & (tokens[:, None] < num_tokens)
    ids = tl.load(routing.expert_ids + entries, mask=given, other=-1)
    slots = choose_slots(ids, tokens, routing, rank)
    first = peer * routing.num_slots
    theirs = (slots >= first) & (slots < first + routing.num_slots)
    tl.store(wanted + entries, tl.where(theirs, slots - first, -1), mask=asked)
    goes = tl.max(theirs.to(tl.int32), axis=1) > 0
    send_rows(to, to_scales, tokens, x, tokens, goes, K, TOKENS, BLOCK)
    if peer == rank:
        flag_tokens(status, ids, tokens, num_tokens, routing.num_experts)


@triton.jit(do_not_specialize=["rank", "num_tokens"])
def exchange_tokens(
    x,  # [T, K]
    routing,  # Routing
    status,  # int32 [T]
    tokens_of,  # int32 [W, chunks, L]
    peers,  # buffers [2, W, C, K]; signals int64 [chunks, W]
    scales,  # int64 [W]; addresses of float32 [2, W, C, ceil(K / COLUMNS)], or None
    wanted,  # int64 [W]; addresses of int32 [2, W, C, k]
    rank,
    num_tokens,  # T
    K,
    chunks,  # C / FORM.tokens
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    FORM: tl.constexpr,
):
    """Send chunks to all ranks; then wait for theirs and count. Grid: (programs,), persistent."""
    TOKENS: tl.constexpr = FORM.tokens
    TOP_K: tl.constexpr = FORM.top_k
    CHOICES: tl.constexpr = FORM.choices
    call = tl.load(peers.calls)
    slot = slot_of(call) * (WORLD * chunks * TOKENS)  # rows before this call's slot
    own = slot + rank * chunks * TOKENS
    groups = tl.cdiv(K, COLUMNS)
    for item in range(tl.program_id(0), chunks * WORLD, tl.num_programs(0)):
        peer = (rank + 1 + item) % WORLD
        index = item // WORLD
        send_chunk(
            x,
            routing,
            status,
            peer_pointer(peers.buffers, peer, dtype) + own * K,
            None if scales is None else peer_pointer(scales, peer, tl.float32) + own * groups,
            peer_pointer(wanted, peer, tl.int32) + own * TOP_K,
            index,
            peer,
            rank,
            num_tokens,
            K,
            FORM,
        )
        notify(peers, peer, index * WORLD + rank, call)

    for item in range(tl.program_id(0), chunks * WORLD, tl.num_programs(0)):
        source = (rank + WORLD - 1 - item % WORLD) % WORLD
        index = item // WORLD
        wait(peers, rank, index * WORLD + source, call)
        names = peer_pointer(wanted, rank, tl.int32) + (slot + source * chunks * TOKENS) * TOP_K
        count_chunk(
            tokens_of, names, source, index, routing.num_slots, chunks, TOKENS, TOP_K, CHOICES
        )


@triton.jit(do_not_specialize=["rank"])
def return_tokens(
    y,  # [R, K]
    positions,  # int32 [W, C, k]
    returned,  # int64 [W]; addresses of [2, C, k, K]
    peers,  # signals int64 [combined + chunks * W]
    rank,
    K,
    chunks,
    combined,  # the first combine signal
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    FORM: tl.constexpr,
):
    """Store the outputs for one chunk on the rank with its tokens. Grid: (chunks * W,)."""
    TOKENS: tl.constexpr = FORM.tokens
    TOP_K: tl.constexpr = FORM.top_k
    CHOICES: tl.constexpr = FORM.choices
    BLOCK: tl.constexpr = FORM.block
    call = tl.load(peers.calls)
    peer = (rank + 1 + tl.program_id(0)) % WORLD
    index = tl.program_id(0) // WORLD
    capacity = chunks * TOKENS
    tokens, entries, asked = chunk_entries(index, TOKENS, TOP_K, CHOICES)
    place = tl.load(positions + peer * capacity * TOP_K + entries, mask=asked, other=-1)
    to = peer_pointer(returned, peer, dtype) + slot_of(call) * (capacity * TOP_K * K)
    for choice in range(TOP_K):
        row = pick(place, choice, CHOICES)
        copy_rows(to, tokens * TOP_K + choice, y, row, row >= 0, K, BLOCK)
    notify(peers, peer, combined + index * WORLD + rank, call)


@triton.jit(do_not_specialize=["rank", "num_tokens"])
def sum_tokens(
    out,  # [T, K]
    weights,  # float32 [T, k]
    expert_ids,  # int32 [T, k]
    returned,  # int64 [W]; addresses of [2, C, k, K]
    peers,  # signals int64 [combined + chunks * W]
    rank,
    num_tokens,  # T
    K,
    num_experts,
    chunks,
    combined,
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    FORM: tl.constexpr,
):
    """Wait for all outputs for a chunk, and add some columns. Grid: (programs,), persistent."""
    TOKENS: tl.constexpr = FORM.tokens
    TOP_K: tl.constexpr = FORM.top_k
    BLOCK: tl.constexpr = FORM.block
    call = tl.load(peers.calls)
    came = peer_pointer(returned, rank, dtype) + slot_of(call) * (chunks * TOKENS * TOP_K * K)
    columns = tl.cdiv(K, BLOCK)
    for item in range(tl.program_id(0), tl.cdiv(num_tokens, TOKENS) * columns, tl.num_programs(0)):
        index = item // columns
        wait_all(peers, rank, combined + index * WORLD, call, WORLD)
        tokens = index * TOKENS + tl.arange(0, TOKENS)
        at = item % columns * BLOCK + tl.arange(0, BLOCK)[None, :]
        total = tl.zeros((TOKENS, BLOCK), tl.float32)
        for choice in range(TOP_K):
            entries = tokens * TOP_K + choice
            expert = tl.load(expert_ids + entries, mask=tokens < num_tokens, other=-1)
            known = (expert >= 0) & (expert < num_experts)
            weight = tl.load(weights + entries, mask=known, other=0.0)[:, None]
            mask = known[:, None] & (at < K)
            output = tl.load(came + entries[:, None] * K + at, mask=mask, other=0.0)
            total += weight * output.to(tl.float32)
        inside = (tokens[:, None] < num_tokens) & (at < K)
        tl.store(out + tokens[:, None] * K + at, total.to(dtype), mask=inside)


class LowLatencyWorkspace(ExpertWorkspace):
    """A workspace for `moe_dispatch` and `moe_combine` on one rank; see `moe_workspace`."""

    def __init__(
        self,
        home: Home,
        max_tokens: int,
        width: int,
        top_k: int,
        dtype: torch.dtype,
        placement: Placement,
        chunk: int,
        wire: torch.dtype | None,
    ) -> None:
        super().__init__(
            home,
            "moe",
            ("moe_dispatch", "moe_combine"),
            max_tokens,
            width,
            top_k,
            dtype,
            placement,
            chunk=chunk,
            wire=wire,
            node=home.world_size,
            of_world=2,
            tuned="moe_dispatch",
        )
        self.combined = self.chunks * self.world_size  # the first combine signal
        self.returned = home.empty("moe.returned", (SLOTS, self.capacity, top_k, width), dtype)


def moe_workspace(
    home: Home,
    max_tokens: int,
    width: int,
    top_k: int,
    dtype: torch.dtype,
    placement: Placement,
    *,
    chunk: int = 0,
    wire: torch.dtype | None = None,
) -> LowLatencyWorkspace:
    """Make a workspace for `moe_dispatch` and `moe_combine`. Collective; see ExpertWorkspace."""
    return LowLatencyWorkspace(home, max_tokens, width, top_k, dtype, placement, chunk, wire)


@dataclass(frozen=True, slots=True)
class Dispatched(Arrived):
    """The received tokens, and everything moe_combine needs to return their outputs.

    Attributes:
        expert_ids: int32 [T, k]; as given; do not change them before the combine.
    """

    expert_ids: Tensor


def moe_dispatch(
    x: Tensor, expert_ids: Tensor, workspace: LowLatencyWorkspace, *, tables: Tables | None = None
) -> Dispatched:
    """Send each token to the ranks with its experts. Collective; ranks may differ in T.

    DeepEP's low-latency kernels (DeepSeek-AI 2025) do the same over RDMA.

    Args:
        x: [T, K], contiguous.
        expert_ids: int32 [T, k], contiguous; -1 for no expert.
        workspace: made for at least T tokens.
        tables: where the experts are, with the workspace's numbers of experts and slots; if None,
            the workspace's own.

    Raises:
        KernelError: an argument does not fit. In a workspace's first call, every rank raises. In
            later calls only the refusing ranks raise, because valid calls exchange nothing; the
            other ranks' waits time out.
    """
    with workspace.agreed("moe_dispatch", {}):
        workspace.require_tokens(partial(require, "moe_dispatch"), x, expert_ids)
    tokens, size, chunks = len(x), workspace.world_size, workspace.chunks
    slots = workspace.placement.slots_per_rank
    status = expert_ids.new_empty(tokens)
    tokens_of = expert_ids.new_empty(size, chunks, slots)
    workspace.begin()
    exchange_tokens[(workspace.resident(chunks * size),)](
        x=x,
        routing=workspace.routing(expert_ids, tables),
        status=status,
        tokens_of=tokens_of,
        peers=workspace.peers(),
        scales=addresses(workspace.scales),
        wanted=workspace.wanted.addresses,
        rank=workspace.rank,
        num_tokens=tokens,
        K=workspace.width,
        chunks=chunks,
        dtype=triton_type(workspace.wire),
        WORLD=size,
        FORM=workspace.form(workspace.wire),
    )
    arrived, _ = workspace.place(tokens_of, counted_rows=tables.rows if tables else None)
    return Dispatched(**arrived, status=status, expert_ids=expert_ids)


def moe_combine(
    y: Tensor, weights: Tensor, sent: Dispatched, workspace: LowLatencyWorkspace
) -> Tensor:
    """Return the experts' outputs to the tokens' ranks, and add them up. Collective.

    Args:
        y: [R, K], contiguous, with x's dtype; each output in the row where its token was in
            `sent.rows`.
        weights: float32 [T, k], contiguous; from the router.
        sent: the result of moe_dispatch, at most one dispatch old.
        workspace: the same as for the dispatch.

    Returns:
        [T, K]; each token's outputs times their weights, added in the order of its choices.
        Choices outside [0, E) add nothing.

    Raises:
        KernelError: an argument does not fit; on the same ranks as in moe_dispatch.
    """
    with workspace.agreed("moe_combine", {}):
        check = partial(require, "moe_combine")
        workspace.require_sent(check, y, sent)
        shape, device = sent.expert_ids.shape, workspace.device
        require_tensor(check, "weights", weights, shape, device, torch.float32)
    size, chunks, width = workspace.world_size, workspace.chunks, workspace.width
    tokens = len(weights)
    out = y.new_empty(tokens, width)
    form, peers = workspace.form(workspace.dtype), workspace.peers(calls=sent.call)
    return_tokens[(chunks * size,)](
        y=y,
        positions=sent.positions,
        returned=workspace.returned.addresses,
        peers=peers,
        rank=workspace.rank,
        K=width,
        chunks=chunks,
        combined=workspace.combined,
        dtype=triton_type(workspace.dtype),
        WORLD=size,
        FORM=form,
    )
    items = -(-tokens // workspace.chunk) * -(-width // form.block)
    sum_tokens[(workspace.resident(items),)](
        out=out,
        weights=weights,
        expert_ids=sent.expert_ids,
        returned=workspace.returned.addresses,
        peers=peers,
        rank=workspace.rank,
        num_tokens=tokens,
        K=width,
        num_experts=workspace.placement.num_experts,
        chunks=chunks,
        combined=workspace.combined,
        dtype=triton_type(workspace.dtype),
        WORLD=size,
        FORM=form,
    )
    return out
