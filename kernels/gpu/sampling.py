"""What sampling looks for in rows of logits: the largest, and the k largest; both exactly.

    argmax(x [R, V])    -> largest [R], index [R]
    top_k(x [R, V], k)  -> values [R, k], ids [R, k], in the order of the vocabulary

Both only compare numbers, so the results are those of kernels/cpu/argmax.py and of
a sort on any device, and a row's do not depend on the others.

The draw itself (models/torch/draw.py) is left to torch, on the k columns that are
left of V. A token is drawn where a sum of probabilities passes a number, and
probabilities have an exponential in them, which no two libraries round alike: a
kernel could repeat the draw's steps but not its bits, and a request would be
answered by other tokens than on a CPU.

argmax: a program finds the first largest of SPAN columns; a second launch finds
the first largest of those.

top_k: one program for a row. A float's bits, with the others flipped where the sign
is set, are in the order of floats. Four times round the row the numbers that agree
with the threshold so far are counted by their next 8 bits, and the threshold gets 8
more; the fifth time the columns above it are written out as they come, and of those
equal to it as many as are missing. So nothing is sorted.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.arguments import Require, require, require_counts
from weft.kernels.gpu.rows import require_rows

SPAN, BLOCK = 1 << 13, 1 << 12
"""Columns of a program of argmax; columns that top_k looks at together."""

MAX_VOCABULARY = 1 << 26
"""Columns: so that the first launch's results are a row that one program holds."""

NONE = tl.constexpr(1 << 30)
"""No column."""


@triton.jit
def first_largest(x, column, inside):
    """The largest number, or NaN if there is one, and the lowest column of it; all [n]."""
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
    """Of a part of a row. Grid: (R, spans)."""
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
    """Of all parts of a row. Grid: (R,)."""
    row = tl.program_id(0).to(tl.int64)
    span = tl.arange(0, BLOCK)
    inside = span < spans
    numbers = tl.load(largest + row * spans + span, mask=inside, other=0.0)
    column = tl.load(columns + row * spans + span, mask=inside, other=NONE)
    number, at = first_largest(numbers, column, inside)
    tl.store(out + row, number)
    tl.store(index + row, at.to(tl.int64))


def argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest number of each row and where it is first; NaN, and where, if there is one.

    Args:
        x: [R, V], contiguous, V from 1 to 2**26; float32, float16 or bfloat16.

    Returns:
        float32 [R], int64 [R].

    Raises:
        KernelError: x cannot be taken.
    """
    _require_logits(functools.partial(require, "argmax"), x)
    rows, columns = x.shape
    out = torch.empty(rows, device=x.device)
    index = torch.empty(rows, dtype=torch.int64, device=x.device)
    if rows:
        spans = -(-columns // SPAN)
        largest = torch.empty(rows, spans, device=x.device)
        at = torch.empty(rows, spans, dtype=torch.int32, device=x.device)
        find_largest_of_spans[(rows, spans)](largest, at, x, columns, SPAN=SPAN, num_warps=8)
        block = triton.next_power_of_2(spans)
        find_largest_of_rows[(rows,)](out, index, largest, at, spans, BLOCK=block, num_warps=1)
    return out, index


@triton.jit
def sortable(x):
    """float32 as int32 that are in the same order, if compared as signed ones; -0 is as 0."""
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
    """The K largest of one row. Grid: (R,)."""
    SIGN: tl.constexpr = -(1 << 31)
    row = tl.program_id(0).to(tl.int64)
    numbers = x + row * V
    digit = tl.arange(0, 256)
    threshold = 0  # as `sortable`, but for the sign
    missing = K  # of the numbers that agree with it so far
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
    """The k largest numbers of each row, in the order of their columns.

    Of those that tie with the k-th largest, the lowest columns. NaN is larger than all numbers,
    or smaller where its sign is set.

    Args:
        x: [R, V], contiguous, V from 1 to 2**26; float32, float16 or bfloat16.
        k: from 1 to V.

    Returns:
        float32 [R, k], int32 [R, k].

    Raises:
        KernelError: x or k cannot be taken.
    """
    check = functools.partial(require, "top_k")
    _require_logits(check, x)
    rows, columns = x.shape
    require_counts(check, 1, k=k)
    check("k", k, k <= columns, f"be at most {columns}, the columns")
    values = torch.empty(rows, k, device=x.device)
    ids = torch.empty(rows, k, dtype=torch.int32, device=x.device)
    if rows:
        select_top_k[(rows,)](values, ids, x, columns, k, BLOCK=BLOCK, num_warps=8)
    return values, ids


def _require_logits(check: Require, x: Tensor) -> None:
    require_rows(check, "x", x, MAX_VOCABULARY)
