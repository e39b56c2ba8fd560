"""Tokens to the ranks of their experts, and the experts' outputs back: for decode.

    moe_dispatch(x [T, K], expert_ids int32 [T, k]) -> rows [R, K], offsets int32 [L + 1]
    moe_combine(y [R, K], weights float32 [T, k])   -> [T, K]

A rank has T tokens, another number than the others' if need be, and L of the
experts, in slots (placement.py). `rows[offsets[e] : offsets[e + 1]]` are the tokens
for its slot e, in the order of (source rank, token, choice); what comes after them
is nothing. The experts' outputs stand where their tokens stood. A token's sum is
added in float32 in the order of its choices and rounded once: it has the same bits
whatever the other tokens are, and wherever the experts are.

Nothing about the routing is read by the host: buffers are as large as the worst one
needs, and no token is dropped. A token crosses once to each rank that it is for,
however many experts it has there.

Slot n mod 2 of each rank's buffer is [W, C, K], C being `max_tokens` rounded up to
chunks; row [r, t] of it is for token t of rank r. Beside it stands what names the
tokens' slots: `wanted` int32 [W, C, k], the number of the slot on this rank for each
choice, or -1 if it is elsewhere. So it is the count of tokens, too.

Protocol, of call n. `dispatch`:

- send. Item (c, d) of rank r is chunk c of its tokens, for rank p = r + 1 + d: the
  choices that are on p go to row [r, c] of p's `wanted`, the tokens that have one to
  row [r, c] of its buffer, and then signal [c, r] of p is set to n. All chunks are
  sent, those beyond T with -1 throughout, so that p knows where the tokens end.
- count. The same program then waits for item (c, d) of rank r - 1 - d, which is the
  program of its number there, and stores how many tokens it has for each slot. A
  program sends all its items before it waits, so there is no cycle.
- place, in a launch of its own. Where a token goes is the number of tokens for slots
  before its own, and of those for its own in chunks before, both of which each program
  adds up from the counts, and of those before it in its chunk. It is copied there, and
  noted in `positions` [W, C, k].

`combine`, of the same n, which is kept with what dispatch has returned:

- return. Program (c, d) of rank r stores the outputs for chunk c of rank p = r + 1 + d
  to p's `returned`, [C, k, K] in slot n mod 2, and then sets signal combined [c, r].
- sum. For each of its own chunks a rank waits for all ranks, and adds.

Why two slots are enough. A rank in dispatch n + 2 has seen signals that every other
one sent in dispatch n + 1, after its own dispatch n was over, reading included. For
combine the same signals do it: a rank that stores in combine n + 2 has seen those of
dispatch n + 2, before which combine n was over on every rank. That is, if a dispatch
is followed by at most one other before its combine, which is held to on the host.

An id that is no expert's goes nowhere, adds nothing and is flagged in its token's
`status`; -1 stands for none, and is not. Numbers that a peer has stored are never
trusted with an address: after a wait has run out they may be anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.arguments import require, require_counts, require_tensor
from weft.kernels.gpu.collective import DTYPES, MAX_NUMEL
from weft.kernels.gpu.placement import Placement
from weft.kernels.gpu.signals import notify, peer_pointer, wait
from weft.kernels.gpu.tune import Choice
from weft.kernels.gpu.workspace import SLOTS, Workspace, agreed, triton_type
from weft.kernels.symmetric.memory import Home

TILE = 4096
"""Numbers that a program moves at a time."""

MAX_TOP_K = 32

EXPERTS, BLOCKS = tl.constexpr(16), tl.constexpr(16)
"""Slots that are counted at a time, and chunks whose counts are added up at a time."""


@triton.jit
def chunk_entries(index, TOKENS: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr):
    """The tokens of a chunk [TOKENS], their choices' places in [C, k], and which are choices.

    CHOICES is k rounded up to a power of 2.
    """
    tokens = index * TOKENS + tl.arange(0, TOKENS)
    choices = tl.arange(0, CHOICES)[None, :]
    entries = tokens[:, None] * TOP_K + choices
    return tokens, entries, (choices < TOP_K) & (tokens[:, None] >= 0)


@triton.jit
def choose_slots(
    ids,  # int32 [TOKENS, CHOICES]; experts
    tokens,  # int32 [TOKENS]
    replicas,  # int32 [E, width]
    counts,  # int32 [E]
    rank,  # of the tokens
    num_experts,
    width,
):
    """The slot that each choice goes to, among all ranks'; -1 for what is no expert."""
    known = (ids >= 0) & (ids < num_experts)
    count = tl.load(counts + ids, mask=known, other=1)
    turn = (rank + tokens[:, None]) % count
    return tl.load(replicas + ids * width + turn, mask=known, other=-1)


@triton.jit
def send_chunk(
    x,  # [T, K]
    expert_ids,  # int32 [T, k]
    replicas,  # int32 [E, width]
    counts,  # int32 [E]
    status,  # int32 [T]
    to,  # [C, K]; this rank's part of the peer's slot
    wanted,  # int32 [C, k]; likewise
    index,  # of the chunk
    peer,
    rank,
    num_tokens,  # T
    K,
    num_experts,
    width,
    num_slots,  # of a rank
    TOKENS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store at a peer which choices of a chunk are its own, and the tokens that have one."""
    tokens, entries, asked = chunk_entries(index, TOKENS, TOP_K, CHOICES)
    given = asked & (tokens[:, None] < num_tokens)
    ids = tl.load(expert_ids + entries, mask=given, other=-1)
    slots = choose_slots(ids, tokens, replicas, counts, rank, num_experts, width)
    first = peer * num_slots
    theirs = (slots >= first) & (slots < first + num_slots)
    tl.store(wanted + entries, tl.where(theirs, slots - first, -1), mask=asked)
    goes = tl.max(theirs.to(tl.int32), axis=1)[:, None] > 0
    for start in range(0, K, BLOCK):
        at = start + tl.arange(0, BLOCK)[None, :]
        moved = goes & (at < K)
        place = tokens[:, None] * K + at
        tl.store(to + place, tl.load(x + place, mask=moved), mask=moved)
    if peer == rank:
        refused = ((ids < -1) | (ids >= num_experts)).to(tl.int32)
        tl.store(status + tokens, tl.max(refused, axis=1), mask=tokens < num_tokens)


@triton.jit(do_not_specialize=["rank"])
def exchange_tokens(
    x,  # [T, K]
    expert_ids,  # int32 [T, k]
    replicas,  # int32 [E, width]
    counts,  # int32 [E]
    status,  # int32 [T]
    tokens_of,  # int32 [W, chunks, L]
    buffers,  # int64 [W]; addresses of [2, W, C, K]
    wanted,  # int64 [W]; addresses of int32 [2, W, C, k]
    signals,  # int64 [W]; addresses of int32 [chunks, W]
    calls,  # int32 [1]
    fault,  # int32 [4]
    rank,
    num_tokens,  # T
    K,
    num_experts,
    width,
    num_slots,  # L
    chunks,  # C / TOKENS
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    TOKENS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
    max_polls,
):
    """Send chunks to all ranks; then wait for theirs and count. Grid: (programs,), persistent."""
    call = tl.load(calls)
    capacity = chunks * TOKENS
    slot_numel = WORLD * capacity * K
    slot_entries = WORLD * capacity * TOP_K
    for item in range(tl.program_id(0), chunks * WORLD, tl.num_programs(0)):
        peer = (rank + 1 + item) % WORLD
        index = item // WORLD
        to = peer_pointer(buffers, peer, dtype) + (call % 2) * slot_numel
        names = peer_pointer(wanted, peer, tl.int32) + (call % 2) * slot_entries
        send_chunk(
            x,
            expert_ids,
            replicas,
            counts,
            status,
            to + rank * capacity * K,
            names + rank * capacity * TOP_K,
            index,
            peer,
            rank,
            num_tokens,
            K,
            num_experts,
            width,
            num_slots,
            TOKENS,
            TOP_K,
            CHOICES,
            BLOCK,
        )
        notify(signals, peer, index * WORLD + rank, call)

    for item in range(tl.program_id(0), chunks * WORLD, tl.num_programs(0)):
        source = (rank + WORLD - 1 - item % WORLD) % WORLD
        index = item // WORLD
        wait(signals, rank, index * WORLD + source, call, fault, max_polls)
        names = peer_pointer(wanted, rank, tl.int32) + (call % 2) * slot_entries
        names += source * capacity * TOP_K
        _, entries, asked = chunk_entries(index, TOKENS, TOP_K, CHOICES)
        slots = tl.reshape(tl.load(names + entries, mask=asked, other=-1), (TOKENS * CHOICES,))
        for first in range(0, num_slots, EXPERTS):
            expert = first + tl.arange(0, EXPERTS)
            counted = tl.sum((slots[:, None] == expert[None, :]).to(tl.int32), axis=0)
            place = (source * chunks + index) * num_slots + expert
            tl.store(tokens_of + place, counted, mask=expert < num_slots)


@triton.jit(do_not_specialize=["rank"])
def place_tokens(
    rows,  # [R, K]
    offsets,  # int32 [L + 1]
    positions,  # int32 [W, C, k]
    number,  # int32 [1]; becomes the call's
    tokens_of,  # int32 [W, chunks, L]
    buffers,  # int64 [W]; addresses of [2, W, C, K]
    wanted,  # int64 [W]; addresses of int32 [2, W, C, k]
    calls,  # int32 [1]
    rank,
    num_rows,  # R
    K,
    num_slots,  # L
    chunks,
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    TOKENS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy one chunk from one rank to its places among all. Grid: (W * chunks,)."""
    block = tl.program_id(0)
    call = tl.load(calls)
    capacity = chunks * TOKENS
    names = peer_pointer(wanted, rank, tl.int32) + (call % 2) * (WORLD * capacity * TOP_K)
    tokens, entries, asked = chunk_entries(block, TOKENS, TOP_K, CHOICES)  # of all ranks' tokens
    slots = tl.reshape(tl.load(names + entries, mask=asked, other=-1), (TOKENS * CHOICES,))
    here = (slots >= 0) & (slots < num_slots)

    place = tl.zeros((TOKENS * CHOICES,), tl.int32)
    passed = tl.zeros((), tl.int32)
    for first in range(0, num_slots, EXPERTS):
        expert = first + tl.arange(0, EXPERTS)
        total = tl.zeros((EXPERTS,), tl.int32)
        before = tl.zeros((EXPERTS,), tl.int32)
        for other in range(0, WORLD * chunks, BLOCKS):
            others = other + tl.arange(0, BLOCKS)[:, None]
            inside = (others < WORLD * chunks) & (expert[None, :] < num_slots)
            counted = tl.load(tokens_of + others * num_slots + expert[None, :], inside, other=0)
            total += tl.sum(counted, axis=0)
            before += tl.sum(tl.where(others < block, counted, 0), axis=0)
        begin = passed + tl.cumsum(total, axis=0) - total
        passed += tl.sum(total, axis=0)
        chosen = (slots[:, None] == expert[None, :]).to(tl.int32)
        earlier = tl.cumsum(chosen, axis=0) - chosen
        place += tl.sum(chosen * ((begin + before)[None, :] + earlier), axis=1)
        if block == 0:
            tl.store(offsets + expert, begin, mask=expert < num_slots)
    if block == 0:
        tl.store(offsets + num_slots, passed)
        tl.store(number, call)

    place = tl.reshape(tl.where(here & (place < num_rows), place, -1), (TOKENS, CHOICES))
    tl.store(positions + entries, place, mask=asked)
    came = peer_pointer(buffers, rank, dtype) + (call % 2) * (WORLD * capacity * K)
    for choice in range(TOP_K):
        row = pick(place, choice, CHOICES)[:, None]
        to = rows + row.to(tl.int64) * K
        for start in range(0, K, BLOCK):
            at = start + tl.arange(0, BLOCK)[None, :]
            mask = (row >= 0) & (at < K)
            tl.store(to + at, tl.load(came + tokens[:, None] * K + at, mask=mask), mask=mask)


@triton.jit
def pick(table, column, COLUMNS: tl.constexpr):
    """One column of int32 [n, COLUMNS]: [n]."""
    return tl.sum(tl.where(tl.arange(0, COLUMNS)[None, :] == column, table, 0), axis=1)


@triton.jit(do_not_specialize=["rank"])
def return_tokens(
    y,  # [R, K]
    positions,  # int32 [W, C, k]
    returned,  # int64 [W]; addresses of [2, C, k, K]
    signals,  # int64 [W]; addresses of int32 [combined + chunks * W]
    number,  # int32 [1]; of the call
    rank,
    K,
    chunks,
    combined,  # the first of the signals
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    TOKENS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the outputs for one chunk of one rank's tokens there. Grid: (chunks * W,)."""
    call = tl.load(number)
    peer = (rank + 1 + tl.program_id(0)) % WORLD
    index = tl.program_id(0) // WORLD
    capacity = chunks * TOKENS
    tokens, entries, asked = chunk_entries(index, TOKENS, TOP_K, CHOICES)
    place = tl.load(positions + peer * capacity * TOP_K + entries, mask=asked, other=-1)
    to = peer_pointer(returned, peer, dtype) + (call % 2) * (capacity * TOP_K * K)
    for choice in range(TOP_K):
        row = pick(place, choice, CHOICES)[:, None]
        output = y + row.to(tl.int64) * K
        home = to + (tokens[:, None] * TOP_K + choice) * K
        for start in range(0, K, BLOCK):
            at = start + tl.arange(0, BLOCK)[None, :]
            mask = (row >= 0) & (at < K)
            tl.store(home + at, tl.load(output + at, mask=mask), mask=mask)
    notify(signals, peer, combined + index * WORLD + rank, call)


@triton.jit(do_not_specialize=["rank"])
def sum_tokens(
    out,  # [T, K]
    weights,  # float32 [T, k]
    expert_ids,  # int32 [T, k]
    returned,  # int64 [W]; addresses of [2, C, k, K]
    signals,  # int64 [W]; addresses of int32 [combined + chunks * W]
    number,  # int32 [1]; of the call
    fault,  # int32 [4]
    rank,
    num_tokens,  # T
    K,
    num_experts,
    chunks,
    combined,
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    TOKENS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    max_polls,
):
    """Wait for all outputs of a chunk, and add some columns. Grid: (programs,), persistent."""
    call = tl.load(number)
    came = peer_pointer(returned, rank, dtype) + (call % 2) * (chunks * TOKENS * TOP_K * K)
    columns = tl.cdiv(K, BLOCK)
    for item in range(tl.program_id(0), tl.cdiv(num_tokens, TOKENS) * columns, tl.num_programs(0)):
        index = item // columns
        for step in range(WORLD):
            source = (rank + step) % WORLD
            wait(signals, rank, combined + index * WORLD + source, call, fault, max_polls)
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


class ExpertWorkspace(Workspace):
    """Of moe_dispatch and moe_combine, on one rank. Made by all ranks together.

    Args:
        home: of this rank.
        max_tokens: of a rank, in a call.
        width: K, numbers of a token.
        top_k: k, experts of a token.
        dtype: of tokens and outputs.
        placement: of the experts.
        chunk: tokens that have a signal of their own; what was tuned for this device, or what the
            cost model prefers, if 0.

    Attributes:
        placement: the present one; `move` changes it.
        max_rows: R, that dispatch may give.

    Raises:
        KernelError: on every rank, if an argument is refused on one or not the same on all.
    """

    def __init__(
        self,
        home: Home,
        max_tokens: int,
        width: int,
        top_k: int,
        dtype: torch.dtype,
        placement: Placement,
        chunk: int = 0,
    ) -> None:
        size = home.world_size
        asked = {
            "max_tokens": max_tokens,
            "width": width,
            "top_k": top_k,
            "dtype": dtype,
            "placement": placement,
            "chunk": chunk,
        }
        with agreed("moe", asked, home.exchange) as check:
            require_counts(check, 1, max_tokens=max_tokens, width=width, top_k=top_k)
            require_counts(check, 0, chunk=chunk)
            check("top_k", top_k, top_k <= MAX_TOP_K, f"be at most {MAX_TOP_K}")
            fits = chunk & (chunk - 1) == 0 and chunk <= TILE
            check("chunk", chunk, fits, f"be a power of 2, and at most {TILE}")
            allowed = ", ".join(map(str, DTYPES))
            check("dtype", dtype, dtype in DTYPES, f"be one of {allowed}")
            ranks = placement.world_size
            check("placement", f"for {ranks} ranks", ranks == size, f"be for {size}")
        if not chunk:
            rows, choose = size * max_tokens * top_k, Choice(home, "moe_dispatch")
            groups = placement.num_experts
            config = choose(dtype, rows, width, methods=("push",), groups=groups, top_k=top_k)
            chunk = config.block_m
        with agreed("moe", {}, home.exchange) as check:
            self.chunks = -(-max_tokens // chunk)
            capacity = self.chunks * chunk
            largest = SLOTS * capacity * max(size, top_k) * max(width, top_k)
            must = f"be at most {MAX_NUMEL}: make it for fewer tokens"
            check("the buffer's size", f"{largest} numbers", largest <= MAX_NUMEL, must)
        signals = 2 * self.chunks * size
        super().__init__(home, "moe", size * capacity * width, dtype, signals)
        self.wanted = home.empty("moe.wanted", (SLOTS, size, capacity, top_k), torch.int32)
        self.returned = home.empty("moe.returned", (SLOTS, capacity, top_k, width), dtype)
        self.max_tokens, self.width, self.top_k = max_tokens, width, top_k
        self.capacity, self.chunk = capacity, chunk
        self.max_rows = size * max_tokens * top_k
        self.combined = self.chunks * size
        self.placement = placement
        self.replicas, self.replica_counts = (t.to(self.device) for t in placement.tables())
        self.dispatches = 0

    def move(self, placement: Placement) -> None:
        """Use another placement from the next dispatch on, which may be a captured one. Collective.

        The weights in the slots must have been moved, too.

        Raises:
            KernelError: on every rank, if it is for other ranks, experts or slots than the present
                one, or not the same on all ranks.
        """
        with agreed("moe", {"placement": placement}, self.compare) as check:
            for what in ("world_size", "num_experts", "slots_per_rank"):
                new, old = getattr(placement, what), getattr(self.placement, what)
                check(f"the placement's {what}", new, new == old, f"stay {old}")
        for table, values in zip(
            (self.replicas, self.replica_counts), placement.tables(), strict=True
        ):
            table.copy_(values)
        self.placement = placement

    @property
    def constants(self) -> dict[str, Any]:
        """Of all kernels."""
        return {
            "dtype": triton_type(self.dtype),
            "WORLD": self.world_size,
            "TOKENS": self.chunk,
            "TOP_K": self.top_k,
            "BLOCK": min(triton.next_power_of_2(self.width), TILE // self.chunk),
        }


def moe_workspace(
    home: Home,
    max_tokens: int,
    width: int,
    top_k: int,
    dtype: torch.dtype,
    placement: Placement,
    *,
    chunk: int = 0,
) -> ExpertWorkspace:
    """For `moe_dispatch` and `moe_combine`. Collective; arguments as of ExpertWorkspace."""
    return ExpertWorkspace(home, max_tokens, width, top_k, dtype, placement, chunk)


@dataclass(frozen=True, slots=True)
class Dispatched:
    """What has come to a rank, and what moe_combine needs to send it back.

    Attributes:
        rows: [R, K]; the tokens by slot. From offsets[L] on, nothing is said of them.
        offsets: int32 [L + 1]; slot e has the rows offsets[e] : offsets[e + 1].
        status: int32 [T]; of this rank's own tokens: 1 if an id was no expert's, and not -1.
        expert_ids: int32 [T, k]; as given, and not to be changed before they are combined.
        positions: int32 [W, C, k]; the row of each rank's tokens' choices, -1 if elsewhere.
        call: int32 [1]; the number of the dispatch, on the device.
        number: the same on the host, where a captured graph does not count.
    """

    rows: Tensor
    offsets: Tensor
    status: Tensor
    expert_ids: Tensor
    positions: Tensor
    call: Tensor
    number: int


def moe_dispatch(x: Tensor, expert_ids: Tensor, workspace: ExpertWorkspace) -> Dispatched:
    """Send each token to the ranks of its experts. Collective; ranks may differ in T.

    The low-latency kernels of DeepEP (DeepSeek-AI 2025) do the same over RDMA.

    Args:
        x: [T, K], contiguous.
        expert_ids: int32 [T, k], contiguous; -1 for none.
        workspace: made for at least T tokens.

    Raises:
        KernelError: an argument does not fit; on this rank only, for ranks may differ: the waits
            of the others run out.
    """
    check = partial(require, "moe_dispatch")
    require_tensor(check, "x", x, None, workspace.device, workspace.dtype)
    most, width = workspace.max_tokens, workspace.width
    fits = x.dim() == 2 and len(x) <= most and x.shape[1] == width
    must = f"be at most {most} tokens of {width} numbers, which the workspace was made for"
    check("x's shape", list(x.shape), fits, must)
    tokens, top_k = len(x), workspace.top_k
    ids_shape = [tokens, top_k]
    require_tensor(check, "expert_ids", expert_ids, ids_shape, workspace.device, torch.int32)
    size, chunks = workspace.world_size, workspace.chunks
    slots, experts = workspace.placement.slots_per_rank, workspace.placement.num_experts
    status = expert_ids.new_empty(tokens)
    tokens_of = expert_ids.new_empty(size, chunks, slots)
    offsets, call = expert_ids.new_empty(slots + 1), expert_ids.new_empty(1)
    positions = expert_ids.new_empty(size, workspace.capacity, top_k)
    rows = x.new_empty(workspace.max_rows, width)
    tables = (workspace.buffer.addresses, workspace.wanted.addresses)
    constants = {**workspace.constants, "CHOICES": triton.next_power_of_2(top_k)}
    workspace.begin()
    exchange_tokens[(workspace.resident(chunks * size),)](
        *(x, expert_ids, workspace.replicas, workspace.replica_counts, status, tokens_of, *tables),
        *(workspace.signals.addresses, workspace.calls, workspace.fault, workspace.rank, tokens),
        *(width, experts, workspace.replicas.shape[1], slots, chunks),
        **constants,
        max_polls=workspace.max_polls,
    )
    place_tokens[(size * chunks,)](
        *(rows, offsets, positions, call, tokens_of, *tables, workspace.calls, workspace.rank),
        *(len(rows), width, slots, chunks),
        **constants,
    )
    workspace.dispatches += 1
    return Dispatched(rows, offsets, status, expert_ids, positions, call, workspace.dispatches)


def moe_combine(y: Tensor, weights: Tensor, sent: Dispatched, workspace: ExpertWorkspace) -> Tensor:
    """Send the experts' outputs back, and add them up. Collective.

    Args:
        y: [R, K], contiguous; where the tokens of `sent.rows` stood.
        weights: float32 [T, k], contiguous; the router's.
        sent: what moe_dispatch has returned, at most one call ago.
        workspace: that it was dispatched with.

    Returns:
        [T, K]; a token's outputs times their weights, added in the order of its choices. Of
        choices that are no expert's, nothing is added.

    Raises:
        KernelError: an argument does not fit; on this rank only.
    """
    check, device = partial(require, "moe_combine"), workspace.device
    require_tensor(check, "y", y, sent.rows.shape, device, workspace.dtype)
    require_tensor(check, "weights", weights, sent.expert_ids.shape, device, torch.float32)
    age = workspace.dispatches - sent.number
    check("sent", f"{age} dispatches old", 0 <= age <= 1, "be at most 1 old")
    size, chunks, width = workspace.world_size, workspace.chunks, workspace.width
    tokens = len(weights)
    out = y.new_empty(tokens, width)
    constants = workspace.constants
    tables = (workspace.returned.addresses, workspace.signals.addresses, sent.call)
    return_tokens[(chunks * size,)](
        *(y, sent.positions, *tables, workspace.rank, width, chunks, workspace.combined),
        **{**constants, "CHOICES": triton.next_power_of_2(workspace.top_k)},
    )
    items = -(-tokens // workspace.chunk) * -(-width // constants["BLOCK"])
    sum_tokens[(workspace.resident(items),)](
        *(out, weights, sent.expert_ids, *tables, workspace.fault, workspace.rank, tokens, width),
        *(workspace.placement.num_experts, chunks, workspace.combined),
        **constants,
        max_polls=workspace.max_polls,
    )
    return out
