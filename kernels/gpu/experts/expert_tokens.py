"""The common part of dispatch.py and dispatch_two_level.py: a chunk of tokens, and its way to its
rows.

For call n a rank has a slot n mod 2 [W, C, K] of a buffer. Row [r, t] is for token t of rank r.
Beside it is `wanted` int32 [W, C, k]. For each choice of the token it holds the expert slot on this
rank, or -1 if the choice is elsewhere. C is `max_tokens` rounded up to chunks. The next steps are
the same for both ops:

- `count_chunk` stores the number of a chunk's tokens for each slot.
- `place_tokens`, in a separate launch. A token's place is the number of tokens for lower slots,
  plus those for its own slot in earlier chunks and earlier in its chunk. Each program adds up the
  first two from the counts. It copies the token there and notes the place in `positions` [W, C, k].

Tokens may travel as fp8 (`wire`), with a float32 scale for each 128 columns, as `quantize` in
rowwise/activation.py makes them. Scales travel beside the rows, in `scales` [W, C, ceil(K / 128)],
under the same signals.
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
from weft.kernels.gpu.experts.placement import Placement
from weft.kernels.gpu.matmul.epilogue import FP8
from weft.kernels.gpu.rowwise.activation import GROUP
from weft.kernels.gpu.rowwise.rows import cast, fp8_scale, require_fp8
from weft.kernels.gpu.runtime.arguments import Require, require_counts, require_tensor
from weft.kernels.gpu.runtime.peers import SLOTS
from weft.kernels.gpu.runtime.signals import peer_pointer
from weft.kernels.gpu.runtime.workspace import Workspace, agreed, triton_type
from weft.kernels.gpu.tuning.search import Choice
from weft.kernels.symmetric.memory import Home, SymmetricTensor

TILE = 4096
"""Numbers that a program moves at a time."""

MAX_TOP_K = 32

EXPERTS, BLOCKS = tl.constexpr(16), tl.constexpr(16)
"""Slots that are counted at a time, and chunks whose counts are added at a time."""

COLUMNS, GROUPS = tl.constexpr(GROUP), tl.constexpr(64)
"""Columns that share a scale; scales of a token that are moved at a time."""


class Routing(NamedTuple):
    """The slots that a rank's tokens go to: one argument of a kernel (peers.py).

    Attributes:
        expert_ids: int32 [T, k].
        replicas: int32 [E, width]; the slots of each expert.
        counts: int32 [E]; number of slots of each expert.
        num_experts: E.
        width: columns of replicas.
        num_slots: L, slots per rank.
    """

    expert_ids: Tensor
    replicas: Tensor
    counts: Tensor
    num_experts: int
    width: int
    num_slots: int


class ChunkForm(NamedTuple):
    """The constants of kernels that move chunks of tokens: FORM, one argument (peers.py).

    Attributes:
        tokens: tokens in a chunk.
        top_k: k, choices of a token.
        choices: k rounded up to a power of two.
        block: columns that are moved at a time.
    """

    tokens: int
    top_k: int
    choices: int
    block: int


@triton.jit
def chunk_entries(index, TOKENS: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr):
    """Return a chunk's tokens [TOKENS], their choices' places in [C, k], and a mask of real
    choices.

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
    """Return each choice's slot, counted over all ranks; -1 for an unknown expert."""
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
    """Flag tokens that have an unknown expert other than -1."""
    refused = ((ids < -1) | (ids >= num_experts)).to(tl.int32)
    tl.store(status + tokens, tl.max(refused, axis=1), mask=tokens < num_tokens)


@triton.jit
def pick(table, column, COLUMNS: tl.constexpr):
    """Return one column of int32 [n, COLUMNS]: [n]."""
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
    """Copy rows of x to other rows of `to`."""
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
    """Copy rows; in fp8 if there are scales. COLUMNS must then divide BLOCK."""
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
    wanted,  # int32 [C, k]; the source's part
    source,
    index,  # number of the chunk
    num_slots,  # L
    chunks,
    TOKENS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
):
    """Store the number of an arrived chunk's tokens for each slot of this rank."""
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
    number,  # int32 [1]; receives the call's number
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
    """Copy one chunk of one rank to its places among all tokens. Grid: (W * chunks,)."""
    TOKENS: tl.constexpr = FORM.tokens
    TOP_K: tl.constexpr = FORM.top_k
    CHOICES: tl.constexpr = FORM.choices
    BLOCK: tl.constexpr = FORM.block
    block = tl.program_id(0)
    call = tl.load(peers.calls)
    slot = (call % 2) * (WORLD * chunks * TOKENS)  # rows before this call's slot
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
    """The workspace of ops that send tokens to experts, on one rank. All ranks create it together.

    Args:
        home: this rank's.
        name: the workspace's name, for messages.
        ops: names of the ops that take it.
        max_tokens: maximum number of a rank's tokens in a call.
        width: K, numbers in a token.
        top_k: k, experts per token.
        dtype: of tokens and outputs.
        placement: of the experts.
        chunk: tokens per signal; if 0, the tuned number for `tuned`.
        wire: dtype in which tokens travel and arrive: `dtype`, or float8_e4m3fn.
        node: ranks per node.
        of_world, of_node: signals per chunk for each rank, and for each node.
        tuned: the op whose tuned chunk is used, or else the cost model's choice for it.

    Attributes:
        placement: the present one; `move` changes it.
        max_rows: R, the maximum number of rows from dispatch.

    Raises:
        KernelError: on every rank, if one rank refuses an argument, the ranks differ, or a rank has
            no address of a rank on its node.
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
        self.placement = placement
        self.replicas, self.replica_counts = (t.to(self.device) for t in placement.tables())
        self.dispatches = 0

    def of_groups(self, home: Home, what: str, shape: Sequence[int]) -> SymmetricTensor | None:
        """Create scales for rows of this shape, if tokens travel in fp8. Collective."""
        if not self.groups:
            return None
        return home.empty(f"{self.name}.{what}", (*shape, self.groups), torch.float32)

    def move(self, placement: Placement) -> None:
        """Use another placement from the next dispatch on, captured or not. Collective.

        The weights in the slots must have been moved too.

        Raises:
            KernelError: on every rank, if the placement has other numbers of ranks, experts or
                slots, or differs between ranks.
        """
        with agreed(self.name, {"placement": placement}, self.compare) as check:
            for what in ("world_size", "num_experts", "slots_per_rank"):
                new, old = getattr(placement, what), getattr(self.placement, what)
                check(f"the placement's {what}", new, new == old, f"stay {old}")
        for table, values in zip(
            (self.replicas, self.replica_counts), placement.tables(), strict=True
        ):
            table.copy_(values)
        self.placement = placement

    def form(self, dtype: torch.dtype) -> ChunkForm:
        """Return the constants of kernels that move rows of this dtype."""
        least = GROUP if dtype == FP8 else 1
        return ChunkForm(
            tokens=self.chunk,
            top_k=self.top_k,
            choices=triton.next_power_of_2(self.top_k),
            block=max(least, min(triton.next_power_of_2(self.width), TILE // self.chunk)),
        )

    def routing(self, expert_ids: Tensor) -> Routing:
        """Return the argument `routing` for tokens with these experts: int32 [T, k]."""
        return Routing(
            expert_ids=expert_ids,
            replicas=self.replicas,
            counts=self.replica_counts,
            num_experts=self.placement.num_experts,
            width=self.replicas.shape[1],
            num_slots=self.placement.slots_per_rank,
        )

    def require_tokens(self, check: Require, x: Tensor, expert_ids: Tensor) -> None:
        """Refuse anything but [T, K] and [T, k] with at most `max_tokens` tokens."""
        require_tensor(check, "x", x, None, self.device, self.dtype)
        most, width = self.max_tokens, self.width
        fits = x.dim() == 2 and len(x) <= most and x.shape[1] == width
        must = f"be at most {most} tokens of {width} numbers, which the workspace was made for"
        check("x's shape", list(x.shape), fits, must)
        ids_shape = [len(x), self.top_k]
        require_tensor(check, "expert_ids", expert_ids, ids_shape, self.device, torch.int32)

    def require_sent(self, check: Require, y: Tensor, sent: Arrived) -> None:
        """Refuse outputs that do not fit the arrived tokens, or a dispatch that is too old."""
        require_tensor(check, "y", y, sent.rows.shape, self.device, self.dtype)
        age = self.dispatches - sent.number
        check("sent", f"{age} dispatches old", 0 <= age <= 1, "be at most 1 old")

    def place(
        self, tokens_of: Tensor, weights: SymmetricTensor | None = None
    ) -> tuple[dict[str, Any], Tensor | None]:
        """Launch `place_tokens`, the last step of a dispatch.

        Args:
            tokens_of: int32 [W, chunks, L].
            weights: float32 [2, W, C, k], received with the tokens.

        Returns:
            rows, scales, offsets, positions, call and number of an Arrived, by name; and float32
            [R], each row's weight, if there are weights.
        """
        size, chunks, slots = tokens_of.shape
        empty = tokens_of.new_empty
        rows = empty(self.max_rows, self.width, dtype=self.wire)
        offsets, call = empty(slots + 1), empty(1)
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
    """Return the address of each rank's part; None for None."""
    return tensor.addresses if tensor else None


@dataclass(frozen=True, slots=True)
class Arrived:
    """The tokens that have arrived on a rank.

    Attributes:
        rows: [R, K]; the tokens by slot. Rows from offsets[L] on are undefined.
        scales: float32 [R, ceil(K / 128)] for rows in fp8; None otherwise.
        offsets: int32 [L + 1]; slot e has the rows offsets[e] : offsets[e + 1].
        positions: int32 [W, C, k]; the row of each choice of each rank's tokens, -1 if elsewhere.
        call: int32 [1]; number of the dispatch, on the device.
        number: the same on the host, where a captured graph does not count.
        status: int32 [T], for this rank's own tokens: 1 if an id is unknown and not -1.
    """

    rows: Tensor
    scales: Tensor | None
    offsets: Tensor
    positions: Tensor
    call: Tensor
    number: int
    status: Tensor
