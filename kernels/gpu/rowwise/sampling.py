"""Sampling on the device, one program per row, and nothing that the host waits for.

    edit(x [S, V], changes)      -> float32 [E, V], some rows with penalties, biases and masks
    draw(x [S, V], rows, how)    -> tokens [D], from some rows

Both follow the rule of models/torch/draw.py to the bit, so a GPU draws the CPU's tokens from equal
logits. A token's weight is floor(2**(40 + log2)), from a polynomial of fused multiply-adds
(kernels/cpu/csrc/vector.h). Weights are integers, so their sums do not depend on an order.

draw: The first pass over a row finds the largest number. The second counts tokens in 256 bins of
their logarithm, and sums all weights. The third collects the likeliest bins with at most CANDIDATES
tokens. Top-k, top-p and min-p each end at some key (a float's bits; smaller is likelier). Each end
is searched bit by bit among the candidates, in registers. If the candidates do not reach far
enough, the search takes 31 passes over the row. The token is where the running sum of kept weights,
in the order of the vocabulary, passes the random number's share of their sum.

edit: A program copies its row, then goes through the lists of tokens to change. Tokens may occur
several times in a history, and with the same value. Between two lists, a barrier orders the
program's own stores.

Not handled: V above 2**23, where the sum of weights could overflow.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.rowwise.rows import require_rows
from weft.kernels.gpu.runtime.arguments import require, require_tensor
from weft.kernels.gpu.runtime.target import target

BLOCK = 1 << 12
"""Columns that a program reads at a time."""

CANDIDATES = 1024
"""Maximum number of tokens that a program holds."""

MAX_VOCABULARY = 1 << 23

BINS = tl.constexpr(256)
BINS_PER_HALVING = tl.constexpr(6.0)
LOWEST = tl.constexpr(-42.0)
"""log2 of the weight below which a weight is 0."""

NO_KEY = tl.constexpr(0x7FFFFFFF)
NO_COLUMN = tl.constexpr(1 << 30)


class How(NamedTuple):
    """How to draw from each of D rows; see models/torch/draw.py.

    Attributes:
        temperature: float32 [D]; one logit less halves a weight at 1. 0 takes the largest number.
        min_log_weight: float32 [D]; log2 of the weight that min-p requires.
        top_k: int32 [D]; V keeps all tokens.
        tail: int64 [D]; the fraction that top-p cuts off, in units of 2**-48.
        u: int64 [D]; the uniform number, in the same units.
    """

    temperature: Tensor
    min_log_weight: Tensor
    top_k: Tensor
    tail: Tensor
    u: Tensor


class Changes(NamedTuple):
    """Changes to E rows of logits.

    Attributes:
        rows: int32 [E]; the rows.
        history: int32 [slots, n]; each slot's distinct prompt tokens, then its output tokens.
        slot: int32 [E]; each row's slot.
        prompt_end, output_end: int32 [E]; where both parts end; 0 without penalties.
        penalties: float32 [3, E]; repetition, presence and frequency.
        tokens: int32 [F]; tokens with a bias, and tokens that cannot be drawn.
        bias: float32 [F]; added to their logits; -inf for the latter.
        tokens_end: int32 [E + 1]; row e has the tokens from its entry to before the next one.
        masks: int32 [M, ceil(V / 32)]; bit t % 32 of number t // 32 allows token t.
        mask: int32 [E]; each row's mask, or -1.
    """

    rows: Tensor
    history: Tensor
    slot: Tensor
    prompt_end: Tensor
    output_end: Tensor
    penalties: Tensor
    tokens: Tensor
    bias: Tensor
    tokens_end: Tensor
    masks: Tensor
    mask: Tensor


@triton.jit
def weigh(log2):
    """Return floor(2**(40 + log2)) as int64, for float32 numbers of at most 0; 0 below LOWEST."""
    x = tl.maximum(log2, LOWEST)
    n = (x + 12582912.0) - 12582912.0  # to the nearest whole number
    r = x - n
    y = tl.zeros_like(x) + 1.3333558e-3
    y = tl.fma(y, r, tl.zeros_like(x) + 9.6181291e-3)
    y = tl.fma(y, r, tl.zeros_like(x) + 5.5504109e-2)
    y = tl.fma(y, r, tl.zeros_like(x) + 2.4022651e-1)
    y = tl.fma(y, r, tl.zeros_like(x) + 6.9314718e-1)
    y = tl.fma(y, r, tl.zeros_like(x) + 1.0)
    power = ((n.to(tl.int32) + (127 + 40)) << 23).to(tl.float32, bitcast=True)
    return tl.where(log2 >= LOWEST, (y * power).to(tl.int64), 0)


@triton.jit
def share_of(share, total):
    """Return share * 2**-48 of a total, rounded down, by long multiplication: int64."""
    DIGIT: tl.constexpr = (1 << 24) - 1
    high, low = share >> 24, share & DIGIT
    top, middle, bottom = total >> 48, (total >> 24) & DIGIT, total & DIGIT
    carried = (high * bottom + low * middle + ((low * bottom) >> 24)) >> 24
    return ((high * top) << 24) + high * middle + low * top + carried


@triton.jit
def load_logits(numbers, column, V):
    """Load logits as float32; NaN counts as -inf, and +inf as the largest number."""
    x = tl.load(numbers + column, mask=column < V, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, tl.minimum(x, 3.4028234663852886e38), float("-inf"))


@triton.jit
def load_log2(numbers, column, V, largest, temperature):
    """Load logits as the logarithms of their weights: 0 at most."""
    x = load_logits(numbers, column, V) - largest
    return tl.math.div_rn(x, tl.zeros_like(x) + temperature)


@triton.jit
def key_of(log2):
    """Map numbers of at most 0 to int32 keys with the opposite order; -0 maps like 0."""
    return log2.to(tl.int32, bitcast=True) & NO_KEY


@triton.jit
def bin_of(log2):
    """Map numbers of at most 0 to bins with the opposite order."""
    return tl.minimum(log2 * -BINS_PER_HALVING, 255.0).to(tl.int32)


@triton.jit
def find_key(keys, mass, target):
    """Find the smallest key such that the mass up to it reaches the target; NO_KEY if none does.

    Args:
        keys: int32 [n].
        mass: int64 [n].
        target: int64.
    """
    low = 0
    for level in range(31):
        half = 1 << (30 - level)
        below = tl.sum(tl.where(keys <= low + (half - 1), mass, 0), axis=0)
        low = tl.where(below >= target, low, low + half)
    return low


@triton.jit
def sum_of_row(numbers, V, largest, temperature, end, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the weights of tokens with keys up to `end`, or count these tokens: int64."""
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        log2 = load_log2(numbers, column, V, largest, temperature)
        mass = (column < V).to(tl.int64) if COUNT else weigh(log2)
        total += tl.where(key_of(log2) <= end, mass, 0)
    return tl.sum(total, axis=0)


@triton.jit
def find_key_of_row(
    numbers, V, largest, temperature, target, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """Find a row's key as `find_key` does, with a pass over the row for each bit."""
    low = 0
    for level in range(31):
        half = 1 << (30 - level)
        below = sum_of_row(numbers, V, largest, temperature, low + (half - 1), COUNT, BLOCK)
        low = tl.where(below >= target, low, low + half)
    return low


@triton.jit
def draw_tokens(
    tokens,  # int64 [D]
    x,  # [S, V]
    stride,
    V,
    rows,  # int32 [D]
    temperature,  # float32 [D]
    min_log_weight,  # float32 [D]
    top_k,  # int32 [D]
    tail,  # int64 [D]
    u,  # int64 [D]
    collected,  # float32 [D, N]
    columns,  # int32 [D, N]
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Draw one token. Grid: (D,)."""
    at = tl.program_id(0)
    numbers = x + tl.load(rows + at).to(tl.int64) * stride
    t, number = tl.load(temperature + at), tl.load(u + at)

    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_column = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = load_logits(numbers, column, V)
        best_column = tl.where(logit > best, column, best_column)
        best = tl.maximum(best, logit)
    largest = tl.max(best, axis=0)
    token = tl.min(tl.where(best == largest, best_column, NO_COLUMN), axis=0)

    if (t > 0) & (largest > float("-inf")):
        counts = tl.zeros((BINS,), tl.int32)
        sums = tl.zeros((BLOCK,), tl.int64)
        for start in range(0, V, BLOCK):
            column = start + tl.arange(0, BLOCK)
            log2 = load_log2(numbers, column, V, largest, t)
            counts += tl.histogram(bin_of(log2), BINS, mask=column < V)
            sums += weigh(log2)
        total = tl.sum(sums, axis=0)

        k, p = tl.load(top_k + at), tl.load(tail + at)
        least = tl.load(min_log_weight + at)
        end = key_of(least)
        by_k, by_p = k < V, p > 0
        settled = False
        if by_k | by_p | (least > LOWEST):
            # The likeliest bins whose tokens fit.
            up_to = tl.cumsum(counts, axis=0)
            bins = tl.sum((up_to <= N).to(tl.int32), axis=0)
            count = tl.max(tl.where(up_to <= N, up_to, 0), axis=0)
            place = at.to(tl.int64) * N
            for start in range(0, V, BLOCK):
                column = start + tl.arange(0, BLOCK)
                log2 = load_log2(numbers, column, V, largest, t)
                kept = (column < V) & (bin_of(log2) < bins)
                to = place + tl.cumsum(kept.to(tl.int32), axis=0) - 1
                tl.store(collected + to, log2, mask=kept)
                tl.store(columns + to, column, mask=kept)
                place += tl.sum(kept.to(tl.int32), axis=0)
            tl.debug_barrier()
            index = tl.arange(0, N)
            own = at.to(tl.int64) * N + index
            log2 = tl.load(collected + own, mask=index < count, other=float("-inf"))
            column = tl.load(columns + own, mask=index < count, other=0)
            keys, weights = key_of(log2), weigh(log2)

            if by_k:
                if count >= k:
                    kth = find_key(keys, (index < count).to(tl.int64), k.to(tl.int64))
                    total = tl.sum(tl.where(keys <= kth, weights, 0), axis=0)
                else:
                    kth = find_key_of_row(numbers, V, largest, t, k.to(tl.int64), True, BLOCK)
                    total = sum_of_row(numbers, V, largest, t, kth, False, BLOCK)
                end = tl.minimum(end, kth)
            if by_p:
                mass = tl.minimum(tl.maximum(total - share_of(p, total), 1), total)
                if tl.sum(weights, axis=0) >= mass:
                    nucleus = find_key(keys, weights, mass)
                else:
                    nucleus = find_key_of_row(numbers, V, largest, t, mass, False, BLOCK)
                end = tl.minimum(end, nucleus)

            # All tokens up to `end` are candidates if its bin was collected.
            settled = bin_of(end.to(tl.float32, bitcast=True) * -1.0) < bins
            if settled:
                weights = tl.where(keys <= end, weights, 0)
                total = tl.sum(weights, axis=0)
                before = tl.cumsum(weights, axis=0) <= share_of(number, total)
                chosen = tl.sum(before.to(tl.int32), axis=0)
                token = tl.sum(tl.where(index == chosen, column, 0), axis=0)
            else:
                total = sum_of_row(numbers, V, largest, t, end, False, BLOCK)

        if not settled:
            target, running = share_of(number, total), tl.zeros_like(total)
            for start in range(0, V, BLOCK):
                column = start + tl.arange(0, BLOCK)
                log2 = load_log2(numbers, column, V, largest, t)
                weights = tl.where(key_of(log2) <= end, weigh(log2), 0)
                here = tl.sum(weights, axis=0)
                if (running <= target) & (running + here > target):
                    before = (running + tl.cumsum(weights, axis=0)) <= target
                    token = start + tl.sum(before.to(tl.int32), axis=0)
                running += here
    tl.store(tokens + at, token.to(tl.int64))


def draw(x: Tensor, rows: Tensor, how: How) -> Tensor:
    """Draw one token from each of some rows, as models/torch/draw.py does.

    Args:
        x: [S, V], V up to 2**23, with contiguous rows; float32, float16 or bfloat16.
        rows: int32 [D].
        how: for each of D rows.

    Returns:
        int64 [D]; in [0, V) for any numbers in x. 0 if all are -inf.

    Raises:
        KernelError: an argument has another shape, dtype or device.
    """
    check = functools.partial(require, "draw")
    require_rows(check, "x", x[:0], MAX_VOCABULARY)
    check("x's stride", x.stride(), x.stride(1) == 1 or x.shape[1] == 1, "have contiguous rows")
    count, device = len(rows), x.device
    for name, tensor, dtype in (
        ("rows", rows, torch.int32),
        ("temperature", how.temperature, torch.float32),
        ("min_log_weight", how.min_log_weight, torch.float32),
        ("top_k", how.top_k, torch.int32),
        ("tail", how.tail, torch.int64),
        ("u", how.u, torch.int64),
    ):
        require_tensor(check, name, tensor, [count], device, dtype)
    tokens = torch.empty(count, dtype=torch.int64, device=device)
    if count:
        draw_tokens[(count,)](
            tokens=tokens,
            x=x,
            stride=x.stride(0),
            V=x.shape[1],
            rows=rows,
            temperature=how.temperature,
            min_log_weight=how.min_log_weight,
            top_k=how.top_k,
            tail=how.tail,
            u=how.u,
            collected=torch.empty(count, CANDIDATES, device=device),
            columns=torch.empty(count, CANDIDATES, dtype=torch.int32, device=device),
            N=CANDIDATES,
            BLOCK=BLOCK,
            num_warps=8 if target()[0] == "hip" else 16,  # 512 threads
        )
    return tokens


@triton.jit
def edit_rows(
    out,  # float32 [E, V]
    x,  # [S, V]
    stride,
    V,
    rows,  # int32 [E]
    history,  # int32 [slots, n]
    history_stride,
    slot,  # int32 [E]
    prompt_end,  # int32 [E]
    output_end,  # int32 [E]
    penalties,  # float32 [3, E]
    tokens,  # int32 [F]
    bias,  # float32 [F]
    tokens_end,  # int32 [E + 1]
    masks,  # int32 [M, words]
    words,
    mask,  # int32 [E]
    BLOCK: tl.constexpr,
    LISTED: tl.constexpr,
):
    """Copy a row, and change it. Grid: (E,)."""
    at, count = tl.program_id(0), tl.num_programs(0)
    numbers, result = x + tl.load(rows + at).to(tl.int64) * stride, out + at.to(tl.int64) * V
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = tl.load(numbers + column, mask=column < V, other=0.0).to(tl.float32)
        tl.store(result + column, logit, mask=column < V)

    repetition = tl.load(penalties + at)
    presence, frequency = tl.load(penalties + count + at), tl.load(penalties + 2 * count + at)
    prompt, output = tl.load(prompt_end + at), tl.load(output_end + at)
    listed = history + tl.load(slot + at).to(tl.int64) * history_stride
    # The prompt's tokens, then the sampled ones: the second value wins.
    for part in tl.static_range(2):
        tl.debug_barrier()
        first = prompt if part else 0
        last = output if part else prompt
        for start in range(first, last, LISTED):
            index = start + tl.arange(0, LISTED)
            token = tl.load(listed + index, mask=index < last, other=0)
            logit = tl.load(numbers + token, mask=index < last, other=0.0).to(tl.float32)
            divided = tl.math.div_rn(logit, tl.zeros_like(logit) + repetition)
            repeated = tl.where(logit > 0, divided, logit * repetition)
            repeated = tl.minimum(repeated, 3.4028234663852886e38)
            if part:
                repeated -= presence
            tl.store(result + token, repeated, mask=index < last)
    tl.debug_barrier()
    for start in range(prompt, output, LISTED):
        index = start + tl.arange(0, LISTED)
        token = tl.load(listed + index, mask=index < output, other=0)
        less = tl.zeros((LISTED,), tl.float32) - frequency
        tl.atomic_add(result + token, less, mask=index < output, sem="relaxed")
    tl.debug_barrier()
    first, last = tl.load(tokens_end + at), tl.load(tokens_end + at + 1)
    # A token may have a bias, and be impossible, too: an infinite addend wins in any order.
    for start in range(first, last, LISTED):
        index = start + tl.arange(0, LISTED)
        token = tl.load(tokens + index, mask=index < last, other=0)
        addend = tl.load(bias + index, mask=index < last, other=0.0)
        tl.atomic_add(result + token, addend, mask=index < last, sem="relaxed")
    tl.debug_barrier()
    allowed_by = tl.load(mask + at)
    if allowed_by >= 0:
        bits = masks + allowed_by.to(tl.int64) * words
        for start in range(0, V, BLOCK):
            column = start + tl.arange(0, BLOCK)
            word = tl.load(bits + column // 32, mask=column < V, other=-1)
            allowed = ((word >> (column % 32)) & 1) != 0
            infinite = tl.full((BLOCK,), float("-inf"), tl.float32)
            tl.store(result + column, infinite, mask=(column < V) & (allowed == 0))


def edit(x: Tensor, changes: Changes) -> Tensor:
    """Copy rows with penalties, then biases, then masks applied, as models/torch/edits.py does.

    Args:
        x: [S, V], with contiguous rows; float32, float16 or bfloat16.
        changes: to E rows; all tokens are in [0, V).

    Returns:
        float32 [E, V].

    Raises:
        KernelError: an argument has another shape, dtype or device.
    """
    check = functools.partial(require, "edit")
    require_rows(check, "x", x[:0], MAX_VOCABULARY)
    check("x's stride", x.stride(), x.stride(1) == 1 or x.shape[1] == 1, "have contiguous rows")
    count, device, columns = len(changes.rows), x.device, x.shape[1]
    words = -(-columns // 32)
    for name, shape, dtype in (
        ("rows", [count], torch.int32),
        ("history", list(changes.history.shape), torch.int32),
        ("slot", [count], torch.int32),
        ("prompt_end", [count], torch.int32),
        ("output_end", [count], torch.int32),
        ("penalties", [3, count], torch.float32),
        ("tokens", list(changes.bias.shape), torch.int32),
        ("bias", list(changes.bias.shape), torch.float32),
        ("tokens_end", [count + 1], torch.int32),
        ("masks", [len(changes.masks), words], torch.int32),
        ("mask", [count], torch.int32),
    ):
        require_tensor(check, name, getattr(changes, name), shape, device, dtype)
    out = torch.empty(count, columns, device=device)
    if count:
        edit_rows[(count,)](
            out=out,
            x=x,
            stride=x.stride(0),
            V=columns,
            rows=changes.rows,
            history=changes.history,
            history_stride=changes.history.stride(0),
            slot=changes.slot,
            prompt_end=changes.prompt_end,
            output_end=changes.output_end,
            penalties=changes.penalties,
            tokens=changes.tokens,
            bias=changes.bias,
            tokens_end=changes.tokens_end,
            masks=changes.masks,
            words=words,
            mask=changes.mask,
            BLOCK=BLOCK,
            LISTED=512,
            num_warps=8,
        )
    return out
