"""Sampling from rows of logits: the largest, the k largest, and a draw among them.

    argmax(x [R, V])                  -> largest [R], index [R]
    top_k(x [R, V], k)                -> values [R, k], ids [R, k], in the order of the vocabulary
    draw(values, ids, seeds, index)   -> tokens [R]

The first two ops only compare numbers. On every device their results equal those from
kernels/cpu/sampling.py and from a sort. Each row is independent of the others.

The draw takes the steps of models/torch/draw.py, with the same random number u to the bit. It picks
the token where the cumulative probability passes u. Probabilities contain an exponential, and no
two libraries round exponentials alike. Another device can therefore draw another token if u is
within one rounding of the border between two tokens. This happens about once in 10^6 tokens.

argmax: A program finds the first largest number among SPAN columns. A second launch finds the first
largest among the results. The order of launches on the stream is the only synchronization.

top_k: One program per row. Flip all bits but the sign if a float's sign is set: the bits then sort
like the floats. Four passes over the row find the threshold, 8 bits in each. A pass takes the
numbers that match the threshold so far, and counts them by their next 8 bits. The fifth pass writes
out the columns above the threshold in order, together with as many columns equal to it as are
missing. Nothing is sorted.

draw: One program per row. A bitwise search finds where top-k and top-p end: it tests whether the
candidates at or above a trial number have enough weight. Nothing is sorted here either. Sums are
float64 (models/torch/draw.py sums integers instead). A token that top_k cut off cannot return: a
row without its own top-k draws among the candidates only. If tokens tie with the k-th largest, the
last ones may be missing.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.rowwise.rows import require_rows
from weft.kernels.gpu.runtime.arguments import Require, require, require_counts, require_tensor

SPAN, BLOCK = 1 << 13, 1 << 12
"""Columns per program in argmax; columns that top_k reads at a time."""

MAX_VOCABULARY = 1 << 26
"""Maximum columns: one program can then hold the first launch's results for a row."""

MAX_CANDIDATES = 1024
"""Maximum candidates in a draw: one program holds them."""

NONE = tl.constexpr(1 << 30)
"""Marks the absence of a column."""


@triton.jit
def first_largest(x, column, inside):
    """Return the largest number, or NaN if there is one, and its lowest column; inputs are [n]."""
    nan = inside & (x != x)
    largest = tl.max(tl.where(inside & (x == x), x, float("-inf")), axis=0)
    nan_at = tl.min(tl.where(nan, column, NONE), axis=0)
    largest_at = tl.min(tl.where(inside & (x == largest), column, NONE), axis=0)
    has_nan = nan_at < NONE
    return tl.where(has_nan, float("nan"), largest), tl.where(has_nan, nan_at, largest_at)


@triton.jit
def find_largest_of_spans(
    largest,  # float32 [R, spans]
    columns,  # int32 [R, spans]
    x,  # [R, V]
    V,
    SPAN: tl.constexpr,
):
    """Find the largest number in a span of a row. Grid: (R, spans)."""
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = span * SPAN + tl.arange(0, SPAN)
    numbers = tl.load(x + row * V + column, mask=column < V, other=0.0).to(tl.float32)
    number, at = first_largest(numbers, column, column < V)
    place = row * tl.num_programs(1) + span
    tl.store(largest + place, number)
    tl.store(columns + place, at)


@triton.jit
def find_largest_of_rows(
    out,  # float32 [R]
    index,  # int64 [R]
    largest,  # float32 [R, spans]
    columns,  # int32 [R, spans]
    spans,
    BLOCK: tl.constexpr,
):
    """Find the largest number among a row's spans. Grid: (R,)."""
    row = tl.program_id(0).to(tl.int64)
    span = tl.arange(0, BLOCK)
    inside = span < spans
    numbers = tl.load(largest + row * spans + span, mask=inside, other=0.0)
    column = tl.load(columns + row * spans + span, mask=inside, other=NONE)
    number, at = first_largest(numbers, column, inside)
    tl.store(out + row, number)
    tl.store(index + row, at.to(tl.int64))


def argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Find each row's largest number and its first column, or its first NaN if there is one.

    Args:
        x: [R, V], contiguous, V from 1 to 2**26; float32, float16 or bfloat16.

    Returns:
        float32 [R], int64 [R].

    Raises:
        KernelError: x is invalid.
    """
    _require_logits(functools.partial(require, "argmax"), x)
    rows, columns = x.shape
    out = torch.empty(rows, device=x.device)
    index = torch.empty(rows, dtype=torch.int64, device=x.device)
    if rows:
        spans = -(-columns // SPAN)
        largest = torch.empty(rows, spans, device=x.device)
        at = torch.empty(rows, spans, dtype=torch.int32, device=x.device)
        find_largest_of_spans[(rows, spans)](
            largest=largest, columns=at, x=x, V=columns, SPAN=SPAN, num_warps=8
        )
        block = triton.next_power_of_2(spans)
        find_largest_of_rows[(rows,)](
            out=out,
            index=index,
            largest=largest,
            columns=at,
            spans=spans,
            BLOCK=block,
            num_warps=1,
        )
    return out, index


@triton.jit
def sortable(x):
    """Map float32 to int32 with the same order under signed comparison; -0 maps like 0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def select_top_k(
    values,  # float32 [R, K]
    ids,  # int32 [R, K]
    x,  # [R, V]
    V,
    K,
    BLOCK: tl.constexpr,
):
    """Find the K largest numbers of one row. Grid: (R,)."""
    SIGN: tl.constexpr = -(1 << 31)
    row = tl.program_id(0).to(tl.int64)
    numbers = x + row * V
    digit = tl.arange(0, 256)
    threshold = 0  # like `sortable`, with the sign bit flipped
    missing = K  # still to take among the numbers that match it so far
    for level in tl.static_range(4):
        shift = 24 - 8 * level
        count = tl.zeros((256,), tl.int32)
        for start in range(0, V, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < V
            number = tl.load(numbers + column, mask=inside, other=0.0).to(tl.float32)
            bits = sortable(number) ^ SIGN
            if level > 0:
                inside = inside & ((bits >> (shift + 8)) == (threshold >> (shift + 8)))
            count += tl.histogram((bits >> shift) & 255, 256, mask=inside)
        larger = tl.sum(count, axis=0) - tl.cumsum(count, axis=0)
        is_next = (larger < missing) & (larger + count >= missing)
        threshold = threshold | (tl.sum(tl.where(is_next, digit, 0), axis=0) << shift)
        missing -= tl.sum(tl.where(is_next, larger, 0), axis=0)
    limit = threshold ^ SIGN
    place = row * K
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < V
        number = tl.load(numbers + column, mask=inside, other=0.0).to(tl.float32)
        bits = sortable(number)
        equal = (inside & (bits == limit)).to(tl.int32)
        kept = inside & ((bits > limit) | ((equal > 0) & (tl.cumsum(equal, axis=0) <= missing)))
        missing -= tl.minimum(missing, tl.sum(equal, axis=0))
        at = place + tl.cumsum(kept.to(tl.int32), axis=0) - 1
        tl.store(values + at, number, mask=kept)
        tl.store(ids + at, column, mask=kept)
        place += tl.sum(kept.to(tl.int32), axis=0)


def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Find the k largest numbers of each row, in the order of their columns.

    Among numbers that tie with the k-th largest, the lowest columns win. NaN is larger than all
    numbers, or smaller if its sign is set.

    Args:
        x: [R, V], contiguous, V from 1 to 2**26; float32, float16 or bfloat16.
        k: from 1 to V.

    Returns:
        float32 [R, k], int32 [R, k].

    Raises:
        KernelError: x or k is invalid.
    """
    check = functools.partial(require, "top_k")
    _require_logits(check, x)
    rows, columns = x.shape
    require_counts(check, 1, k=k)
    check("k", k, k <= columns, f"be at most {columns}, the number of columns")
    values = torch.empty(rows, k, device=x.device)
    ids = torch.empty(rows, k, dtype=torch.int32, device=x.device)
    if rows:
        select_top_k[(rows,)](values=values, ids=ids, x=x, V=columns, K=k, BLOCK=BLOCK, num_warps=8)
    return values, ids


@triton.jit
def mix(state):
    """Apply SplitMix64's finalizer to uint64 (Steele, Lea and Flood 2014)."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def uniform(seed, index):
    """Return number `index` in a seed's stream: float64 in [0, 1), as in models/torch/draw.py."""
    state = mix(seed.to(tl.uint64)) + (index + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    return (mix(state) >> 16).to(tl.float64) * (1.0 / (1 << 48))


@triton.jit
def find_threshold(bits, weights, wanted):
    """Find the largest threshold such that the weights at or above it sum to at least `wanted`.

    Args:
        bits: int32 [n], from `sortable`.
        weights: float64 [n], none below 0.
        wanted: float64.

    Returns:
        int32; the smallest int32 if the sum of all weights is below `wanted`.
    """
    SMALLEST: tl.constexpr = -(1 << 31)
    reached = tl.sum(tl.where(bits >= 0, weights, 0.0), axis=0) >= wanted
    threshold = tl.where(reached, 0, SMALLEST)
    for level in range(31):
        higher = threshold | (1 << (30 - level))
        reached = tl.sum(tl.where(bits >= higher, weights, 0.0), axis=0) >= wanted
        threshold = tl.where(reached, higher, threshold)
    return threshold


@triton.jit
def draw_tokens(
    out,  # int64 [R]
    values,  # float32 [R, N]
    ids,  # int32 [R, N]
    seeds,  # int64 [R]
    index,  # int64 [R]
    temperature,  # float32 [R]
    top_k,  # int32 [R]
    top_p,  # float64 [R]
    min_p,  # float32 [R]
    N,
    BLOCK: tl.constexpr,
):
    """Draw one token for each row. Grid: (R,)."""
    TINY: tl.constexpr = 1.1754943508222875e-38
    LARGE: tl.constexpr = 1e38
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < N
    x = tl.load(values + row * N + place, mask=inside, other=float("-inf"))
    x = tl.where(x == x, tl.where(x > LARGE, LARGE, x), float("-inf"))
    u = uniform(tl.load(seeds + row), tl.load(index + row))

    k = tl.load(top_k + row)
    fewest = tl.where(k > 0, k, BLOCK + 1).to(tl.float64)  # 0: keep all
    order = sortable(x)
    kth = find_threshold(order, tl.where(inside, 1.0, 0.0).to(tl.float64), fewest)
    top = tl.max(x, axis=0)
    # Subtract the maximum first: a tiny temperature would turn it into inf.
    below = x - tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp(below / tl.maximum(tl.load(temperature + row), TINY))
    weights = tl.where(inside & (order >= kth), weights, 0.0)
    total = tl.sum(weights, axis=0)
    probs = weights / tl.where(total == 0, 1.0, total)

    wanted = tl.load(top_p + row)
    wanted = tl.where(wanted < 1, wanted, 2.0)  # 1: keep all, since their sum stays below 2
    order = sortable(probs)
    kept = (order >= find_threshold(order, probs.to(tl.float64), wanted)) & (probs > 0)
    kept = kept & (probs >= tl.max(probs, axis=0) * tl.load(min_p + row))

    mass = tl.cumsum(tl.where(kept, probs, 0.0).to(tl.float64), axis=0)
    beyond = kept & (mass > u * tl.max(mass, axis=0))
    # Rounding may leave no token beyond u: take the last kept one. Without numbers, take the first.
    last = tl.max(tl.where(kept, place, 0), axis=0)
    chosen = tl.min(tl.where(beyond, place, last), axis=0)
    tl.store(out + row, tl.load(ids + row * N + chosen).to(tl.int64))


def draw(
    values: Tensor,
    ids: Tensor,
    seeds: Tensor,
    index: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> Tensor:
    """Draw one token for each row from the candidates left by `top_k`.

    Temperature, top-k, top-p and min-p shape the distribution over the candidates, in this order.
    Number `index` in the seed's stream then picks a candidate by inverse CDF. The steps are those
    of models/torch/draw.py, and the random number is equal to the bit.

    Args:
        values: float32 [R, N], contiguous, N from 1 to 1024; logits.
        ids: int32 [R, N], contiguous; their tokens, in the order of the vocabulary.
        seeds, index: int64 [R].
        temperature: float32 [R].
        top_k: int32 [R]; keeps the candidates not below the k-th largest, or all if 0.
        top_p: float64 [R], in (0, 1]; 1 keeps all.
        min_p: float32 [R], in [0, 1].

    Returns:
        int64 [R]; always one of the row's ids, for any values.

    Raises:
        KernelError: a tensor has another shape, dtype or device.
    """
    check = functools.partial(require, "draw")
    require_rows(check, "values", values, MAX_CANDIDATES)
    (rows, columns), device = values.shape, values.device
    for name, tensor, shape, dtype in (
        ("values", values, [rows, columns], torch.float32),
        ("ids", ids, [rows, columns], torch.int32),
        ("seeds", seeds, [rows], torch.int64),
        ("index", index, [rows], torch.int64),
        ("temperature", temperature, [rows], torch.float32),
        ("top_k", top_k, [rows], torch.int32),
        ("top_p", top_p, [rows], torch.float64),
        ("min_p", min_p, [rows], torch.float32),
    ):
        require_tensor(check, name, tensor, shape, device, dtype)
    out = torch.empty(rows, dtype=torch.int64, device=device)
    if rows:
        block = max(16, triton.next_power_of_2(columns))
        draw_tokens[(rows,)](
            out=out,
            values=values,
            ids=ids,
            seeds=seeds,
            index=index,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            N=columns,
            BLOCK=block,
            num_warps=max(1, min(8, block // 128)),
        )
    return out


def _require_logits(check: Require, x: Tensor) -> None:
    require_rows(check, "x", x, MAX_VOCABULARY)
