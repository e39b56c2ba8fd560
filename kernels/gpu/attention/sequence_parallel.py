"""Prefill attention for a sequence that is split over ranks: keys arrive during the computation.

    sequence_parallel_attention(q [m, H, D], k [m, Hk, D], v [m, Hk, D]) -> [m, H, D]

Causal attention among the W * m tokens of all ranks. Each rank has m tokens and gets their results.
The tokens are cut into consecutive parts:

    contiguous    rank r has part r of W
    zigzag        rank r has parts r and 2 W - 1 - r of 2 W: as much work as any other rank

A query tile in part g needs keys from g and from earlier parts, within its own sequence. It
takes the rank's own parts first, then those from ranks r - 1, r - 2 .. This follows Ring Attention
(Liu et al. 2023), but each shard is sent at once to all ranks that need it, as in
Triton-distributed (Zheng et al. 2025). The softmax is online, so the order is free.

Protocol. Slot n mod 2 of each rank's buffer is [K or V, W, m, Hk, D]. Signals: one for each chunk
of a rank's parts and each source rank, and one `met` signal for each rank. In call n, rank r does
the following:

1. `push_parts` announces call n: it sets signal `met` + r to n on every other rank. It then writes
   chunks to row r of the slots on ranks r + 1, r + 2 .., and after each chunk it sets signal
   [chunk, r] there to n. It skips parts that the receiver does not need. Before the first write to
   a rank it waits until this rank is in call n - 1.
2. `attend_parts` is persistent. Before it reads another rank's chunk, it waits for the chunk's
   signal. It reads the rank's own parts in place.

Slot reuse: earlier ranks need no data from later ones, so a rank does not wait for every other
rank. The argument in runtime/workspace.py therefore does not apply, and `met` replaces it. A rank
in call n - 1 has finished call n - 2, and call n overwrites only the slot of call n - 2.

Sender and receiver use the same function, `is_needed`, to decide about each part. A wrong
query_start therefore cannot make a rank wait for data that never comes.

On a GPU the copies run on their own stream. `attend_parts` leaves them a processor, as in
matmul/all_gather_matmul.py. A copying program that waits for `met` waits for an earlier call, so
there is no cycle.

Not supported: keys already in a cache, windows, softcap, sinks, gradients.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.attention.inputs import MAX_HEAD_DIM, check_heads, check_queries
from weft.kernels.gpu.attention.kernel import LN2, LOG2E, load_block, soften
from weft.kernels.gpu.attention.tile import Tile, asked_tile, choose_tile
from weft.kernels.gpu.collectives.chunks import copy_chunk
from weft.kernels.gpu.matmul.epilogue import RESULTS
from weft.kernels.gpu.runtime.arguments import require_counts, require_tensor
from weft.kernels.gpu.runtime.signals import notify, notify_all, peer_pointer, slot_of, wait
from weft.kernels.gpu.runtime.target import target
from weft.kernels.gpu.runtime.workspace import Workspace, agreed, triton_type
from weft.kernels.gpu.tuning.search import Choice
from weft.kernels.symmetric.memory import Home

CHUNK = 256
"""Default number of tokens per signal."""

BLOCK = 4096
"""Numbers that a program copies at a time."""


@triton.jit
def part_of(rank, index, WORLD: tl.constexpr, PARTS: tl.constexpr):
    """Return the global index for a rank's first or second part."""
    part = rank
    if PARTS == 2:
        part = tl.where(index == 0, rank, 2 * WORLD - 1 - rank)
    return part


@triton.jit
def beginning_of(position, query_start, entries):
    """Find the first token in each token's sequence; never after the token itself.

    Args:
        position: index of each token among all tokens; one token or a block.
        query_start: int32 [entries], or None if there is one sequence.
    """
    begin = position * 0
    if query_start is not None:
        left = entries
        while left > 1:  # the last entry at or before the token is within `left` from here
            half = left // 2
            not_behind = tl.load(query_start + begin + half) <= position
            begin = tl.where(not_behind, begin + half, begin)
            left -= half
        begin = tl.minimum(tl.maximum(tl.load(query_start + begin), 0), position)
    return begin


@triton.jit
def is_needed(part, reader, begin, length):
    """Return whether queries in part `reader`, with its first sequence at `begin`, see a part."""
    return (part < reader) & (begin < (part + 1) * length)


@triton.jit(do_not_specialize=["rank", "entries"])
def push_parts(
    keys,  # [PARTS * length, row]; this rank's keys
    values,  # [PARTS * length, row]
    query_start,  # int32 [entries], or None
    peers,  # buffers [2, 2, half]; signals int64 [met + W]
    rank,
    entries,
    length,  # tokens in a part
    row,  # numbers in a token's keys: KV_HEADS * D
    half,  # numbers in a slot's keys, at least W * PARTS * length * row
    chunk,  # tokens in a chunk
    met,  # first of W signals with each rank's current call
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Send other ranks the parts they need, one chunk at a time. Grid: (programs,), persistent."""
    call = tl.load(peers.calls)
    if tl.program_id(0) == 0:
        notify_all(peers, met + rank, call, WORLD)
    chunks = tl.cdiv(length, chunk)
    for item in range(tl.program_id(0), (WORLD - 1) * PARTS * chunks, tl.num_programs(0)):
        peer = (rank + 1 + item // (PARTS * chunks)) % WORLD
        index, number = item // chunks % PARTS, item % chunks
        part = part_of(rank, index, WORLD, PARTS)
        begin = beginning_of(peer * length, query_start, entries)
        needed = is_needed(part, peer, begin, length)
        if PARTS == 2:
            second = 2 * WORLD - 1 - peer
            begin = beginning_of(second * length, query_start, entries)
            needed = needed | is_needed(part, second, begin, length)
        if needed:
            wait(peers, rank, met + peer, call - 1)
            own = tl.cast(index * length, tl.int64) * row
            there = tl.cast(rank * PARTS * length, tl.int64) * row + own
            to = peer_pointer(peers.buffers, peer, dtype) + slot_of(call) * 2 * tl.cast(
                half, tl.int64
            )
            to += there
            copy_chunk(to, keys + own, number, length * row, chunk * row, BLOCK)
            copy_chunk(to + half, values + own, number, length * row, chunk * row, BLOCK)
            notify(peers, peer, (index * chunks + number) * WORLD + rank, call)


@triton.jit
def attend_keys(
    q,  # [BLOCK_M, BLOCK_D]
    total,  # float32 [BLOCK_M, BLOCK_D]; weighted sum over values
    top,  # float32 [BLOCK_M]; the largest score so far
    weight,  # float32 [BLOCK_M]; the weights' sum, in units of 2^top
    keys,  # keys from the block's first token on
    values,  # values from the block's first token on
    first,  # index of the block's first token among all tokens
    begin,  # first token that is here and seen by a query, among all tokens
    end,  # end of these tokens
    seen_from,  # int32 [BLOCK_M]; the first token that each row's query sees
    position,  # int32 [BLOCK_M]; each row's position
    scale,  # in units of log 2
    ROW: tl.constexpr,
    D: tl.constexpr,
    EDGE: tl.constexpr,  # some rows may not see some keys
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Process one block with an online softmax step."""
    n = tl.arange(0, BLOCK_N)
    needed = (first + n >= begin) & (first + n < end)
    k = load_block(keys, n * ROW, needed, D, EDGE, BLOCK_D)
    scores = tl.dot(q, k.T, input_precision="ieee") * scale
    if EDGE:
        key = (first + n)[None, :]
        seen = needed[None, :] & (key <= position[:, None]) & (key >= seen_from[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    weights, fade, top, weight = soften(scores, top, weight)
    v = load_block(values, n * ROW, needed, D, EDGE, BLOCK_D)
    total = tl.dot(weights.to(q.dtype), v, total * fade[:, None], input_precision="ieee")
    return total, top, weight


@triton.jit(do_not_specialize=["rank", "entries"])
def attend_parts(
    q,  # [PARTS * length, HEADS, D]; consecutive tokens are q_stride numbers apart
    keys,  # [PARTS * length, KV_HEADS, D]; this rank's keys
    values,  # [PARTS * length, KV_HEADS, D]
    query_start,  # int32 [entries], or None
    out,  # [PARTS * length, HEADS, D]
    lse,  # float32 [PARTS * length, HEADS], or None
    peers,  # buffers [2, 2, half]; signals int64 [chunks, W], then `met`
    scale,
    rank,
    entries,
    length,  # tokens in a part
    q_stride,
    half,  # numbers in a slot's keys
    chunk,  # tokens in a chunk
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute tiles of the result, each with one KV head. Grid: (programs,), persistent."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    ROW: tl.constexpr = KV_HEADS * D
    call = tl.load(peers.calls)
    gathered = peer_pointer(peers.buffers, rank, dtype) + slot_of(call) * 2 * tl.cast(
        half, tl.int64
    )
    tiles, chunks = tl.cdiv(length, BLOCK_Q), tl.cdiv(length, chunk)
    row, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    for item in range(tl.program_id(0), PARTS * tiles * KV_HEADS, tl.num_programs(0)):
        # Tiles that see most keys come first: a rank's second part is the later one.
        head, tile = item % KV_HEADS, PARTS * tiles - 1 - item // KV_HEADS
        index, first = tile // tiles, tile % tiles * BLOCK_Q
        part = part_of(rank, index, WORLD, PARTS)
        query, q_head = first + row // GROUP, head * GROUP + row % GROUP
        stored = (row < BLOCK_Q * GROUP) & (query < length)
        token, position = index * length + query, part * length + query
        first_position = part * length + first
        last_position = part * length + tl.minimum(first + BLOCK_Q, length) - 1
        seen_from = beginning_of(position, query_start, entries)
        begin = beginning_of(first_position, query_start, entries)
        inner_begin = beginning_of(last_position, query_start, entries)
        part_seen_from = beginning_of(part * length, query_start, entries)
        q_rows = token.to(tl.int64) * q_stride + q_head * D
        block_q = load_block(q, q_rows, stored, D, True, BLOCK_D)

        total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        weight = tl.zeros((BLOCK_M,), tl.float32)
        for turn in range(WORLD * PARTS):
            step, of_source = turn // PARTS, turn % PARTS
            source = (rank + WORLD - step) % WORLD
            other = part_of(source, of_source, WORLD, PARTS)
            part_begin = other * length
            low = tl.maximum(begin - part_begin, 0)
            high = tl.minimum(last_position + 1 - part_begin, length)
            needed = (other == part) | is_needed(other, part, part_seen_from, length)
            needed = needed & (low < high)
            low, high = tl.where(needed, low, 0), tl.where(needed, high, 0)
            own = tl.cast(of_source * length, tl.int64) * ROW + head * D
            come = tl.cast(source * PARTS * length, tl.int64) * ROW + own
            from_keys = tl.where(step > 0, gathered + come, keys + own)
            from_values = tl.where(step > 0, gathered + half + come, values + own)
            for number in range(low // chunk, tl.cdiv(high, chunk)):
                if step > 0:
                    signal = (of_source * chunks + number) * WORLD + source
                    wait(peers, rank, signal, call)
                # Not flattened: loads must stay after the wait. Blocks start at the chunk's start.
                base = number * chunk
                low_here, high_here = tl.maximum(low, base), tl.minimum(high, base + chunk)
                first_block = (low_here - base) // BLOCK_N
                end_block = tl.cdiv(high_here - base, BLOCK_N)
                inner = tl.cdiv(tl.maximum(inner_begin - part_begin - base, 0), BLOCK_N)
                inner_first = tl.minimum(tl.maximum(inner, first_block), end_block)
                inner = tl.minimum(high_here, first_position + 1 - part_begin) - base
                inner_last = tl.minimum(tl.maximum(inner // BLOCK_N, inner_first), end_block)
                for block in range(inner_first, inner_last):
                    at = base + block * BLOCK_N
                    place = tl.cast(at, tl.int64) * ROW
                    total, top, weight = attend_keys(
                        block_q, total, top, weight, from_keys + place, from_values + place,
                        part_begin + at, part_begin + low_here, part_begin + high_here,
                        seen_from, position, scale * LOG2E, ROW, D, False, BLOCK_N, BLOCK_D,
                    )  # fmt: skip
                interior = inner_last - inner_first
                for edge in range(first_block, end_block - interior):
                    at = base + (edge + tl.where(edge >= inner_first, interior, 0)) * BLOCK_N
                    place = tl.cast(at, tl.int64) * ROW
                    total, top, weight = attend_keys(
                        block_q, total, top, weight, from_keys + place, from_values + place,
                        part_begin + at, part_begin + low_here, part_begin + high_here,
                        seen_from, position, scale * LOG2E, ROW, D, True, BLOCK_N, BLOCK_D,
                    )  # fmt: skip

        place = token.to(tl.int64) * HEADS + q_head
        inside = stored[:, None] & (d < D)[None, :]
        weight = tl.where(stored, weight, 1.0)
        total = total / weight[:, None]
        tl.store(out + place[:, None] * D + d[None, :], total.to(dtype), mask=inside)
        if lse is not None:
            tl.store(lse + place, (top + tl.log2(weight)) * LN2, mask=stored)


class SequenceParallelWorkspace(Workspace):
    """Workspace for `sequence_parallel_attention` on one rank; see its `_workspace` function."""

    def __init__(
        self,
        home: Home,
        max_tokens: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        chunk: int,
    ) -> None:
        name, size = "sequence_parallel_attention", home.world_size
        asked = {"max_tokens": max_tokens, "kv_heads": kv_heads, "head_dim": head_dim}
        with agreed(name, {**asked, "dtype": dtype, "chunk": chunk}, home.exchange) as check:
            require_counts(check, 0, max_tokens=max_tokens)
            require_counts(check, 1, kv_heads=kv_heads, head_dim=head_dim, chunk=chunk)
            numel = max_tokens * kv_heads * head_dim
            must = "be below 2**31: kernels use 32-bit counts"
            check("number of elements in a rank's keys", numel, numel < 2**31, must)
            fits = head_dim <= MAX_HEAD_DIM
            check("head_dim", head_dim, fits, f"be at most {MAX_HEAD_DIM}")
            check("dtype", dtype, dtype in RESULTS, f"be one of {', '.join(map(str, RESULTS))}")
        self.max_tokens, self.kv_heads, self.head_dim = max_tokens, kv_heads, head_dim
        self.chunk = chunk
        row = kv_heads * head_dim
        self.half = -(-size * max_tokens * row // 16) * 16  # values begin at a multiple of 16
        self.met = size * (-(-max_tokens // chunk) + 1)  # two parts may need an extra chunk
        super().__init__(home, name, 2 * self.half, dtype, self.met + size)
        self.choice = Choice(home, name)


def sequence_parallel_attention_workspace(
    home: Home,
    max_tokens: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    chunk: int = CHUNK,
) -> SequenceParallelWorkspace:
    """Create a workspace for at most `max_tokens` tokens on each rank. Collective.

    Args:
        home: this rank's home.
        max_tokens: maximum m.
        kv_heads, head_dim: Hk and D of k and v.
        dtype: dtype of all operands; float32, float16 or bfloat16.
        chunk: tokens per signal; best a multiple of 128.

    Raises:
        KernelError: on every rank, if a rank refuses an argument or the ranks' arguments differ.
    """
    return SequenceParallelWorkspace(home, max_tokens, kv_heads, head_dim, dtype, chunk)


def choose_part_tile(group: int, queries: int, head_dim: int, itemsize: int) -> Tile:
    """Choose a tile like `choose_tile`, with fewer keys where its tiles would spill registers.

    This kernel keeps more values in registers.
    """
    tile = choose_tile(group, queries, head_dim, itemsize, cast=False)
    backend, capability = target()
    if head_dim > 64 and (backend == "hip" or capability >= 100):
        tile = tile._replace(block_n=max(16, tile.block_n // 2))
    if head_dim > 128 and tile.block_m >= 64 and backend == "cuda" and capability >= 100:
        tile = tile._replace(stages=1)
    return tile


def sequence_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    workspace: SequenceParallelWorkspace,
    *,
    scale: float,
    query_start: Tensor | None = None,
    zigzag: bool = False,
    lse: Tensor | None = None,
    blocks: tuple[int, int] | None = None,
    warps: int = 0,
    stages: int = 0,
    programs: int = 0,
    senders: int = 0,
) -> Tensor:
    """Compute causal attention among the tokens of all ranks. Collective.

    Args:
        q: [m, H, D], the workspace's dtype; a token's heads contiguous. Query head h reads KV head
            h // (H / Hk). H / Hk is at most 128.
        k, v: [m, Hk, D], contiguous, q's dtype; m is the same on all ranks.
        workspace: from `sequence_parallel_attention_workspace`.
        scale: multiplies the scores.
        query_start: int32 [B + 1], the same on all ranks, ascending from 0: the beginnings of the B
            sequences among the W * m tokens, then the end of the last one. Tokens after this end
            form one more sequence, so ranks with too few tokens can pad. None means one sequence.
        zigzag: this rank has parts r and 2 W - 1 - r of 2 W, with m / 2 tokens each; otherwise part
            r of W.
        lse: float32 [m, H], written: the log of the sum of exp(score).
        blocks: BLOCK_M and BLOCK_N of a tile; None to use the tuned tile, or else to choose.
        warps, stages: compile options of the kernel; 0 to choose.
        programs: number of attention programs; 0 for all processors without senders.
        senders: number of copying programs; devices.SENDERS if 0.

    Returns:
        [m, H, D], q's dtype.

    Raises:
        KernelError: on every rank, if a rank refuses its arguments or the ranks' arguments differ.
    """
    size, require = workspace.world_size, workspace.require
    asked: dict[str, object] = {"scale": scale, "zigzag": zigzag, "blocks": blocks}
    asked |= {"warps": warps, "stages": stages, "programs": programs, "senders": senders}
    with workspace.agreed("sequence_parallel_attention", asked):
        check_queries(require, q)
        asked["q's shape"] = tuple(q.shape)
        (m, heads, dim), made = q.shape, (workspace.kv_heads, workspace.head_dim)
        must = f"be {workspace.dtype}, the workspace's"
        require("q's dtype", q.dtype, q.dtype == workspace.dtype, must)
        require("q's device", q.device, q.device == workspace.device, f"be {workspace.device}")
        for name, tensor in (("k", k), ("v", v)):
            require_tensor(require, name, tensor, (m, *made), q.device, q.dtype)
        must = f"be {workspace.head_dim}, the workspace's"
        require("D", dim, dim == workspace.head_dim, must)
        check_heads(require, "k's heads", q, workspace.kv_heads)
        must = f"be at most {workspace.max_tokens}, the workspace's maximum"
        require("m", m, m <= workspace.max_tokens, must)
        require("m", m, not zigzag or m % 2 == 0, "be even with zigzag: a rank has two parts")
        entries = 0
        if query_start is not None:
            require_tensor(require, "query_start", query_start, None, q.device, torch.int32)
            shape = list(query_start.shape)
            fits = len(shape) == 1 and shape[0] > 0
            require("query_start's shape", shape, fits, "be [B + 1]")
            entries = shape[0]
        asked["query_start's length"] = entries
        if lse is not None:
            require_tensor(require, "lse", lse, [m, heads], q.device, torch.float32)
        group = heads // workspace.kv_heads
        chosen = choose_part_tile(group, m, dim, q.element_size())
        config = None
        if blocks is None:
            config = workspace.choice.of_attention(q, k, size * m, size * m)
        if config:  # no more rows than there are
            low = min(config.block_m, chosen.block_m)
            chosen = Tile(low, config.block_n, config.warps, config.stages)
            senders = senders or config.senders
        tile = asked_tile(require, chosen, blocks, warps, stages, group)
        available = max(1, workspace.processors - (size > 1))
        why = "copies to other ranks need a processor"
        workspace.require_programs(programs, available, why)
        require("senders", senders, senders >= 0, "be positive, or 0 for the default")
    out = torch.empty((m, heads, dim), dtype=q.dtype, device=q.device)
    if not m:
        return out
    parts = 2 if zigzag else 1
    length = m // parts
    dtype = triton_type(q.dtype)
    pieces = (size - 1) * parts * -(-length // workspace.chunk)
    copying, computing = workspace.divide(pieces, senders)
    with workspace.beside():
        workspace.begin()
        peers = workspace.peers()
        begun = workspace.record_event()
        if size > 1:
            push_parts[(copying,)](
                keys=k,
                values=v,
                query_start=query_start,
                peers=peers,
                rank=workspace.rank,
                entries=entries,
                length=length,
                row=k.stride(0),
                half=workspace.half,
                chunk=workspace.chunk,
                met=workspace.met,
                dtype=dtype,
                WORLD=size,
                PARTS=parts,
                BLOCK=BLOCK,
            )
    workspace.wait_event(begun)
    items = parts * -(-length // (tile.block_m // group)) * workspace.kv_heads
    attend_parts[(min(items, programs or computing),)](
        q=q,
        keys=k,
        values=v,
        query_start=query_start,
        out=out,
        lse=lse,
        peers=peers,
        scale=scale,
        rank=workspace.rank,
        entries=entries,
        length=length,
        q_stride=q.stride(0),
        half=workspace.half,
        chunk=workspace.chunk,
        dtype=dtype,
        WORLD=size,
        PARTS=parts,
        HEADS=heads,
        KV_HEADS=workspace.kv_heads,
        D=dim,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    workspace.rejoin()
    return out
