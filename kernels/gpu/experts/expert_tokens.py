"""Shared parts of moe_dispatch and moe_dispatch_two_level: chunks of tokens, and their rows.

For call n, a rank uses slot n mod 2 [W, C, K] of its buffer; row [r, t] is for token t from
rank r. Beside the buffer is `wanted` int32 [W, C, k]: for each choice of the token its slot
on this rank, or -1 if the expert is elsewhere. C is `max_tokens` rounded up to chunks. The
dispatch op writes both and orders them with its signals; its file has this protocol, and
explains why slots are not reused early. All later steps are the same for both ops:

- `count_chunk` stores how many tokens in a chunk each slot gets.
- `place_tokens`, in a separate launch, computes each token's row. The row number is the sum
  of three counts: all tokens for earlier slots, tokens for its slot in earlier chunks, and
  earlier tokens for its slot in its chunk. Each program adds up the first two from the
  stored counts. The token is copied to its row, and the row is noted in `positions`
  [W, C, k].

Tokens may be sent in fp8 (`wire`). Each 128 columns then have a float32 scale, as `quantize`
in activation.py makes them. Scales travel beside the rows, in `scales` [W, C, ceil(K / 128)],
and the same signals announce them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.collectives.collective import DTYPES, MAX_NUMEL
from weft.kernels.gpu.experts.placement import Placement, Tables
from weft.kernels.gpu.matmul.epilogue import FP8
from weft.kernels.gpu.rowwise.activation import GROUP
from weft.kernels.gpu.rowwise.rows import cast, fp8_scale, require_fp8
from weft.kernels.gpu.runtime.arguments import Require, require_counts, require_tensor
from weft.kernels.gpu.runtime.peers import SLOTS
from weft.kernels.gpu.runtime.signals import peer_pointer, slot_of
from weft.kernels.gpu.runtime.workspace import Workspace, agreed, triton_type
from weft.kernels.gpu.tuning.search import Choice
from weft.kernels.symmetric.memory import Home, SymmetricTensor

TILE = 4096
"""Block size, in numbers, that a program moves at a time."""

MAX_TOP_K = 32

EXPERTS, BLOCKS = tl.constexpr(16), tl.constexpr(16)
"""Number of slots counted at a time, and of chunks added up at a time."""

COLUMNS, GROUPS = tl.constexpr(GROUP), tl.constexpr(64)
"""Columns with a shared scale; scales in a token moved at a time."""


class Routing(NamedTuple):
    """The slots for a rank's tokens: one kernel argument (peers.py).

    Attributes:
        expert_ids: int32 [T, k].
        replicas: int32 [E, width]; the slots of each expert.
        counts: int32 [E]; number of slots for each expert.
        num_experts: E.
        width: number of columns in replicas.
        num_slots: L, number of slots on a rank.
    """

    expert_ids: Tensor
    replicas: Tensor
    counts: Tensor
    num_experts: int
    width: int
    num_slots: int


class ChunkForm(NamedTuple):
    """Constants for kernels that move chunks of tokens: FORM, one argument (peers.py).

    Attributes:
        tokens: number of tokens in a chunk.
        top_k: k, number of choices for a token.
        choices: k rounded up to a power of two.
        block: number of columns moved at a time.
    """

    tokens: int
    top_k: int
    choices: int
    block: int


@triton.jit
def chunk_entries(index, TOKENS: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr):
    """Compute a chunk's tokens [TOKENS], their choices' places in [C, k], and a mask for choices.

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
    routing,  # Routing
    rank,  # the tokens' rank
):
    """Choose a slot, among those on all ranks, for each choice; -1 if the id is no expert."""
    known = (ids >= 0) & (ids < routing.num_experts)
    count = tl.load(routing.counts + ids, mask=known, other=1)
    turn = (rank + tokens[:, None]) % count
    return tl.load(routing.replicas + ids * routing.width + turn, mask=known, other=-1)


@triton.jit
def flag_tokens(
    status,  # int32 [T]
    ids,  # int32 [TOKENS, CHOICES]
    tokens,  # int32 [TOKENS]
    num_tokens,  # T
    num_experts,
):
    """Flag the tokens with an id below -1 or not below num_experts."""
    refused = ((ids < -1) | (ids >= num_experts)).to(tl.int32)
    tl.store(status + tokens, tl.max(refused, axis=1), mask=tokens < num_tokens)


@triton.jit
def pick(table, column, COLUMNS: tl.constexpr):
    """Take one column from int32 [n, COLUMNS]: [n]."""
    return tl.sum(tl.where(tl.arange(0, COLUMNS)[None, :] == column, table, 0), axis=1)


@triton.jit
def copy_rows(
    to,  # [*, K]
    to_rows,  # int32 [TOKENS]
    x,  # [*, K]
    rows,  # int32 [TOKENS]
    copied,  # bool [TOKENS]
    K,
    BLOCK: tl.constexpr,
):
    """Copy some rows from x to rows of `to`."""
    to += to_rows.to(tl.int64)[:, None] * K
    x += rows.to(tl.int64)[:, None] * K
    for start in range(0, K, BLOCK):
        at = start + tl.arange(0, BLOCK)[None, :]
        mask = copied[:, None] & (at < K)
        tl.store(to + at, tl.load(x + at, mask=mask), mask=mask)


@triton.jit
def send_rows(
    to,  # [*, K]
    to_scales,  # float32 [*, ceil(K / COLUMNS)], or None
    to_rows,  # int32 [TOKENS]
    x,  # [*, K]
    rows,  # int32 [TOKENS]
    copied,  # bool [TOKENS]
    K,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy some rows from x to `to`; in fp8 if there are scales: then COLUMNS must divide BLOCK."""
    if to_scales is None:
        copy_rows(to, to_rows, x, rows, copied, K, BLOCK)
    else:
        to += to_rows.to(tl.int64)[:, None] * K
        x += rows.to(tl.int64)[:, None] * K
        groups = tl.cdiv(K, COLUMNS)
        to_scales += to_rows[:, None] * groups
        for start in range(0, K, BLOCK):
            at = start + tl.arange(0, BLOCK)[None, :]
            mask = copied[:, None] & (at < K)
            y = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
            y = tl.reshape(y, (TOKENS, BLOCK // COLUMNS, COLUMNS))
            divisor = fp8_scale(y, 2)
            y = tl.reshape(y / divisor[:, :, None], (TOKENS, BLOCK))
            tl.store(to + at, cast(y, to.dtype.element_ty), mask=mask)
            group = start // COLUMNS + tl.arange(0, BLOCK // COLUMNS)[None, :]
            tl.store(to_scales + group, divisor, mask=copied[:, None] & (group < groups))


@triton.jit
def count_chunk(
    tokens_of,  # int32 [W, chunks, L]
    wanted,  # int32 [C, k]; from the source
    source,
    index,  # the chunk's index
    num_slots,  # L
    chunks,
    TOKENS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
):
    """Store how many tokens in a received chunk each slot on this rank gets."""
    _, entries, asked = chunk_entries(index, TOKENS, TOP_K, CHOICES)
    slots = tl.reshape(tl.load(wanted + entries, mask=asked, other=-1), (TOKENS * CHOICES,))
    for first in range(0, num_slots, EXPERTS):
        expert = first + tl.arange(0, EXPERTS)
        counted = tl.sum((slots[:, None] == expert[None, :]).to(tl.int32), axis=0)
        place = (source * chunks + index) * num_slots + expert
        tl.store(tokens_of + place, counted, mask=expert < num_slots)


@triton.jit(do_not_specialize=["rank"])
def place_tokens(
    rows,  # [R, K]
    row_scales,  # float32 [R, ceil(K / COLUMNS)], or None
    row_weights,  # float32 [R], or None
    offsets,  # int32 [L + 1]
    positions,  # int32 [W, C, k]
    number,  # int64 [1]; is set to the call's number
    counted_rows,  # int64 [L]; each slot's rows are added. Or None
    peers,  # buffers [2, W, C, K]
    tokens_of,  # int32 [W, chunks, L]
    scales,  # int64 [W]; addresses of float32 [2, W, C, ceil(K / COLUMNS)], or None
    weights,  # int64 [W]; addresses of float32 [2, W, C, k], or None
    wanted,  # int64 [W]; addresses of int32 [2, W, C, k]
    rank,
    num_rows,  # R
    K,
    num_slots,  # L
    chunks,
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    FORM: tl.constexpr,
):
    """Copy one chunk from one rank to its final rows. Grid: (W * chunks,)."""
    TOKENS: tl.constexpr = FORM.tokens
    TOP_K: tl.constexpr = FORM.top_k
    CHOICES: tl.constexpr = FORM.choices
    BLOCK: tl.constexpr = FORM.block
    block = tl.program_id(0)
    call = tl.load(peers.calls)
    slot = slot_of(call) * (WORLD * chunks * TOKENS)  # rows before this call's slot
    tokens, entries, asked = chunk_entries(block, TOKENS, TOP_K, CHOICES)  # over all ranks' tokens
    names = peer_pointer(wanted, rank, tl.int32) + slot * TOP_K
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
            if counted_rows is not None:
                so_far = tl.load(counted_rows + expert, mask=expert < num_slots, other=0)
                tl.store(counted_rows + expert, so_far + total, mask=expert < num_slots)
    if block == 0:
        tl.store(offsets + num_slots, passed)
        tl.store(number, call)

    place = tl.reshape(tl.where(here & (place < num_rows), place, -1), (TOKENS, CHOICES))
    tl.store(positions + entries, place, mask=asked)
    if row_weights is not None:
        share = peer_pointer(weights, rank, tl.float32) + slot * TOP_K + entries
        placed = asked & (place >= 0)
        tl.store(row_weights + place, tl.load(share, mask=placed), mask=placed)
    came = peer_pointer(peers.buffers, rank, dtype) + slot * K
    for choice in range(TOP_K):
        row = pick(place, choice, CHOICES)
        copy_rows(rows, row, came, tokens, row >= 0, K, BLOCK)
        if row_scales is not None:
            groups = tl.cdiv(K, COLUMNS)
            came_scales = peer_pointer(scales, rank, tl.float32) + slot * groups
            copy_rows(row_scales, row, came_scales, tokens, row >= 0, groups, BLOCK)


class ExpertWorkspace(Workspace):
    """A workspace for ops that send tokens to experts, on one rank. All ranks make it together.

    Args:
        home: this rank's home.
        name: the workspace's name in messages.
        ops: names of the ops that accept it.
        max_tokens: maximum number of tokens on a rank in a call.
        width: K, number of columns in a token.
        top_k: k, number of experts for a token.
        dtype: dtype of tokens and outputs.
        placement: the experts' placement.
        chunk: number of tokens with a shared signal; if 0, the tuned value for `tuned`.
        wire: dtype in which tokens are sent, and of their rows: `dtype` or float8_e4m3fn.
        node: number of ranks on a node.
        of_world, of_node: number of signals that a chunk has for each rank, and for each node.
        tuned: the op whose tuned chunk is used; if there is none, the cost model's choice for it.

    Attributes:
        tables: the placement for calls that give none; `move` changes it.
        max_rows: R, the maximum number of rows from a dispatch.

    Raises:
        KernelError: on every rank, if any rank refuses an argument, if an argument differs between
            ranks, or if a rank has no address for a rank on its node.
    """

    def __init__(
        self,
        home: Home,
        name: str,
        ops: tuple[str, ...],
        max_tokens: int,
        width: int,
        top_k: int,
        dtype: torch.dtype,
        placement: Placement,
        *,
        chunk: int,
        wire: torch.dtype | None,
        node: int,
        of_world: int,
        of_node: int = 0,
        tuned: str = "",
    ) -> None:
        size, wire = home.world_size, wire or dtype
        most = TILE // GROUP if wire == FP8 else TILE
        asked = {
            "max_tokens": max_tokens,
            "width": width,
            "top_k": top_k,
            "dtype": dtype,
            "placement": placement,
            "chunk": chunk,
            "wire": wire,
            "ranks_per_node": node,
        }
        with agreed(name, asked, home.exchange) as check:
            require_counts(check, 1, max_tokens=max_tokens, width=width, top_k=top_k)
            require_counts(check, 0 if tuned else 1, chunk=chunk)
            check("top_k", top_k, top_k <= MAX_TOP_K, f"be at most {MAX_TOP_K}")
            fits = chunk & (chunk - 1) == 0 and chunk <= most
            check("chunk", chunk, fits, f"be a power of 2, and at most {most}")
            allowed = ", ".join(map(str, DTYPES))
            check("dtype", dtype, dtype in DTYPES, f"be one of {allowed}")
            check("wire", wire, wire in (dtype, FP8), f"be {dtype} or {FP8}")
            if wire == FP8:
                require_fp8(check)
            fits = node > 0 and size % node == 0
            check("ranks_per_node", node, fits, f"divide the {size} ranks")
            ranks = placement.world_size
            check("placement", f"for {ranks} ranks", ranks == size, f"be for {size}")
        if not chunk:
            rows, groups = size * max_tokens * top_k, placement.num_experts
            config = Choice(home, tuned)(
                dtype, rows, width, methods=("push",), groups=groups, top_k=top_k
            )
            chunk = min(config.block_m, most)
        with agreed(name, {}, home.exchange) as check:
            self.chunks = -(-max_tokens // chunk)
            capacity = self.chunks * chunk
            largest = SLOTS * capacity * max(size, top_k) * max(width, 2 * top_k)
            must = f"be at most {MAX_NUMEL}: make it for fewer tokens"
            check("the buffer's size", f"{largest} numbers", largest <= MAX_NUMEL, must)
        signals = self.chunks * (of_world * size + of_node * (size // node))
        first = home.rank // node * node
        near = None if node == size else range(first, first + node)
        super().__init__(home, name, size * capacity * width, wire, signals, near)
        self.ops = ops
        self.dtype, self.wire = dtype, wire
        self.wanted = home.empty(f"{name}.wanted", (SLOTS, size, capacity, top_k), torch.int32)
        self.groups = -(-width // GROUP) if wire == FP8 else 0
        self.scales = self.of_groups(home, "scales", (SLOTS, size, capacity))
        self.max_tokens, self.width, self.top_k = max_tokens, width, top_k
        self.capacity, self.chunk = capacity, chunk
        self.max_rows = size * max_tokens * top_k
        self.tables = Tables(placement, self.device)
        self.dispatches = 0

    @property
    def placement(self) -> Placement:
        """The placement for calls that give none; all others have as many slots and experts."""
        return self.tables.placement

    def of_groups(self, home: Home, what: str, shape: Sequence[int]) -> SymmetricTensor | None:
        """Allocate scales for rows of this shape, if tokens are sent in fp8. Collective."""
        if not self.groups:
            return None
        return home.empty(f"{self.name}.{what}", (*shape, self.groups), torch.float32)

    def move(self, placement: Placement, tables: Tables | None = None) -> None:
        """Use another placement from the next dispatch on, also in captured graphs. Collective.

        Move the weights to their new slots as well.

        Args:
            placement: the new placement.
            tables: the tables to change; the workspace's own if None.

        Raises:
            KernelError: on every rank, if the numbers of ranks, experts or slots differ from the
                current placement, or if the ranks pass different placements.
        """
        tables = tables or self.tables
        with agreed(self.name, {"placement": placement}, self.compare) as check:
            for what in ("world_size", "num_experts", "slots_per_rank"):
                new, old = getattr(placement, what), getattr(tables.placement, what)
                check(f"the placement's {what}", new, new == old, f"stay {old}")
        tables.set(placement)

    def form(self, dtype: torch.dtype) -> ChunkForm:
        """Compute the constants for kernels that move rows with this dtype."""
        least = GROUP if dtype == FP8 else 1
        return ChunkForm(
            tokens=self.chunk,
            top_k=self.top_k,
            choices=triton.next_power_of_2(self.top_k),
            block=max(least, min(triton.next_power_of_2(self.width), TILE // self.chunk)),
        )

    def routing(self, expert_ids: Tensor, tables: Tables | None = None) -> Routing:
        """Make the routing argument for tokens with these experts: int32 [T, k]."""
        tables = tables or self.tables
        return Routing(
            expert_ids=expert_ids,
            replicas=tables.replicas,
            counts=tables.counts,
            num_experts=tables.placement.num_experts,
            width=tables.replicas.shape[1],
            num_slots=tables.placement.slots_per_rank,
        )

    def require_tokens(self, check: Require, x: Tensor, expert_ids: Tensor) -> None:
        """Check x [T, K] and expert_ids [T, k], with T at most `max_tokens`."""
        require_tensor(check, "x", x, None, self.device, self.dtype)
        most, width = self.max_tokens, self.width
        fits = x.dim() == 2 and len(x) <= most and x.shape[1] == width
        must = f"be at most {most} tokens of {width} numbers, the limits of the workspace"
        check("x's shape", list(x.shape), fits, must)
        ids_shape = [len(x), self.top_k]
        require_tensor(check, "expert_ids", expert_ids, ids_shape, self.device, torch.int32)

    def require_sent(self, check: Require, y: Tensor, sent: Arrived) -> None:
        """Check that y fits the received rows, and that their dispatch is recent enough."""
        require_tensor(check, "y", y, sent.rows.shape, self.device, self.dtype)
        age = self.dispatches - sent.number
        check("sent", f"{age} dispatches old", 0 <= age <= 1, "be at most 1 old")

    def place(
        self,
        tokens_of: Tensor,
        weights: SymmetricTensor | None = None,
        counted_rows: Tensor | None = None,
    ) -> tuple[dict[str, Any], Tensor | None]:
        """Launch `place_tokens`, the last step in a dispatch.

        Args:
            tokens_of: int32 [W, chunks, L].
            weights: float32 [2, W, C, k], received with the tokens.
            counted_rows: int64 [L]; the number of each slot's rows is added.

        Returns:
            rows, scales, offsets, positions, call and number for an Arrived, by name; and each
            row's weight, float32 [R], if there are weights.
        """
        size, chunks, slots = tokens_of.shape
        empty = tokens_of.new_empty
        rows = empty(self.max_rows, self.width, dtype=self.wire)
        offsets, call = empty(slots + 1), empty(1, dtype=torch.int64)
        positions = empty(size, self.capacity, self.top_k)
        scales = empty(len(rows), self.groups, dtype=torch.float32) if self.scales else None
        row_weights = empty(len(rows), dtype=torch.float32) if weights else None
        place_tokens[(size * chunks,)](
            rows=rows,
            row_scales=scales,
            row_weights=row_weights,
            offsets=offsets,
            positions=positions,
            number=call,
            counted_rows=counted_rows,
            peers=self.peers(),
            tokens_of=tokens_of,
            scales=addresses(self.scales),
            weights=addresses(weights),
            wanted=self.wanted.addresses,
            rank=self.rank,
            num_rows=len(rows),
            K=self.width,
            num_slots=slots,
            chunks=chunks,
            dtype=triton_type(self.wire),
            WORLD=size,
            FORM=self.form(self.wire),
        )
        self.dispatches += 1
        arrived = {"rows": rows, "scales": scales, "offsets": offsets, "positions": positions}
        return arrived | {"call": call, "number": self.dispatches}, row_weights


def addresses(tensor: SymmetricTensor | None) -> Tensor | None:
    """Get the address of each rank's copy; None for None."""
    return tensor.addresses if tensor else None


@dataclass(frozen=True, slots=True)
class Arrived:
    """The tokens that a rank has received.

    Attributes:
        rows: [R, K]; the tokens by slot. Rows from offsets[L] on are undefined.
        scales: float32 [R, ceil(K / 128)] for fp8 rows; None otherwise.
        offsets: int32 [L + 1]; slot e has the rows offsets[e] : offsets[e + 1].
        positions: int32 [W, C, k]; the row for each choice of each rank's tokens, -1 if elsewhere.
        call: int64 [1]; the number of the dispatch, on the device.
        number: the same on the host, where replays of a captured graph do not count.
        status: int32 [T]; for this rank's own tokens: 1 if an id is outside [-1, E), else 0.
    """

    rows: Tensor
    scales: Tensor | None
    offsets: Tensor
    positions: Tensor
    call: Tensor
    number: int
    status: Tensor
