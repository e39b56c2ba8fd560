"""One token from each row of logits: the shape of the distribution, and the draw.

Temperature, top-k, top-p and min-p shape the distribution, in this order; then
one uniform number picks a token by inverse CDF, in the order of the
vocabulary. `weft.kernels.reference.sampling_distribution` is the oracle.

A token's weight is exp((logit - largest) / temperature), rounded down to a
multiple of 2**-40 and held as a whole number: sums are exact in any order. Which
tokens are kept is decided by the weights' logarithms, which are as exact. A
row's token is a function of its own logits, settings and number, bit for bit,
however many ranks share the vocabulary, and whatever else is in the batch.

Where few tokens can be drawn, they are among each rank's most likely ones, which
all ranks get to know. Otherwise ranks exchange the sums of their weights, and
the one in whose part the number falls says which token that is.

The uniform number is SplitMix64's finaliser (Steele, Lea and Flood 2014)
applied to (seed, index), so there is no generator state to keep, move or
replay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from weft.kernels.cpu.weigh import BITS, weigh
from weft.models.interface import SlotSampling
from weft.models.torch.logits import Logits

MIN_HEAD, MAX_HEAD = 32, 1024
"""Tokens of each rank that a row with top-k is looked for in: about twice its k, within these."""

NUCLEUS_HEAD = 256
"""The same with top-p or min-p alone; mostly enough."""

BUCKETS_PER_HALVING = 6
"""Of which 256 then hold all tokens that have a weight."""

CDF_BLOCK = 128
"""Tokens that the first level of the inverse CDF looks at as one."""

WHOLE = 1 << 48
"""What shares of a row's mass are counted in: whole numbers, too, as TPUs have no float64."""


def uniform(seeds: Sequence[int], index: Sequence[int]) -> Tensor:
    """The index-th number of each seed's stream: float64 [R] in [0, 1), multiples of 2**-48.

    mix(mix(seed) + (index + 1) * gamma): hashing the seed first keeps the streams of nearby
    seeds from being shifted copies of each other.
    """
    # Seeds may be given as signed or unsigned 64-bit numbers.
    signed = [(seed + (1 << 63)) % (1 << 64) - (1 << 63) for seed in seeds]
    state = _mix(torch.tensor(signed, dtype=torch.int64))
    bits = _mix(state + (torch.tensor(index, dtype=torch.int64) + 1) * _SPLITMIX_GAMMA)
    return _shift_right(bits, 16).double() * 2.0**-48


def share_of(share: Tensor, total: Tensor) -> Tensor:
    """share / WHOLE of a total, rounded down: int64 [R], of at most WHOLE and of any that is not
    negative. Long multiplication, of digits of 24 bits.
    """
    digit = (1 << 24) - 1
    high, low = share >> 24, share & digit
    top, middle, bottom = total >> 48, total >> 24 & digit, total & digit
    carried = high * bottom + low * middle + (low * bottom >> 24) >> 24
    return (high * top << 24) + high * middle + low * top + carried


@dataclass(frozen=True, slots=True)
class _Rows:
    """R rows, and what is to be drawn from them.

    Attributes:
        logits: float32 [R, V].
        temperature: float32 [R]; in units in which a logit less makes a token half as likely.
        top_k: int64 [R]; V if all are kept.
        tail: int64 [R]; what top-p cuts off, of WHOLE.
        least: float32 [R]; log2 of the weight that min-p asks for.
        u: int64 [R]; of WHOLE, less than that.
    """

    logits: Logits
    temperature: Tensor
    top_k: Tensor
    tail: Tensor
    least: Tensor
    u: Tensor

    def some(self, rows: list[int]) -> _Rows:
        """Of these rows alone."""
        if rows == list(range(len(self.u))):
            return self
        return _Rows(
            self.logits.rows(rows),
            self.temperature[rows],
            self.top_k[rows],
            self.tail[rows],
            self.least[rows],
            self.u[rows],
        )

    def scale(self, logits: Tensor, largest: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits [R, N] of the rows, of which the largest is given: log2 of the weights, 0 at most.

        A row of which all are -inf stays so.
        """
        largest = largest.masked_fill(largest == -torch.inf, 0.0)
        return torch.sub(logits, largest[:, None], out=out).div_(self.temperature[:, None])

    def target(self, total: Tensor) -> Tensor:
        """The sum at which the token is drawn, of so much: int64 [R], in [0, total), or 0."""
        return share_of(self.u, total)

    def nucleus(self, total: Tensor) -> Tensor:
        """The sum that top-p asks for, of so much: int64 [R], in [1, total]; 0 of nothing."""
        return (total - share_of(self.tail, total)).clamp(min=1).minimum(total)


def draw(logits: Logits, settings: Sequence[SlotSampling], u: Tensor) -> Tensor:
    """Draw one token from each row.

    Args:
        logits: float32 [R, V], which is written over; finite, or -inf.
        settings: of each row; temperatures are above 0.
        u: float64 [R]; in [0, 1).

    Returns:
        int64 [R]; the same on all ranks. 0 where all logits are -inf.
    """
    vocab_size, device = logits.shape[1], u.device
    temperature = torch.tensor([s.temperature for s in settings], device=device)
    top_k = [s.top_k if 0 < s.top_k < vocab_size else vocab_size for s in settings]
    rows = _Rows(
        logits,
        temperature.mul_(math.log(2)).clamp_(min=torch.finfo(torch.float32).tiny),
        torch.tensor(top_k, device=device),
        torch.tensor([round((1 - s.top_p) * WHOLE) for s in settings], device=device),
        torch.tensor([math.log2(s.min_p or 2.0**-149) for s in settings], device=device),
        (u * WHOLE).long(),
    )
    widths = [_head(k, s, vocab_size) for k, s in zip(top_k, settings, strict=True)]
    few = [i for i, width in enumerate(widths) if width]
    rest = [i for i, width in enumerate(widths) if not width]
    token_ids = torch.empty(len(settings), dtype=torch.int64, device=device)
    if few:
        token_ids[few], settled, wide = _draw_from_heads(rows.some(few), max(widths))
        if wide is not None:
            some = [few[i] for i in wide.rows]
            token_ids[some] = _draw_from_all(rows.some(some), wide)
            settled[wide.rows] = True
        rest += [i for i, drawn in zip(few, settled.tolist(), strict=True) if not drawn]
    if rest:
        rest.sort()
        token_ids[rest] = _draw_from_all(rows.some(rest))
    return token_ids.clamp_(0, vocab_size - 1)  # an index, whatever the logits are


def _head(top_k: int, settings: SlotSampling, vocab_size: int) -> int:
    """In how many tokens of each rank to look for the row's; 0: in all."""
    if top_k < vocab_size:
        width = max(MIN_HEAD, 1 << (3 * top_k // 2).bit_length())
        return width if width <= MAX_HEAD else 0
    return NUCLEUS_HEAD if settings.top_p < 1.0 or settings.min_p > 0.0 else 0


@dataclass(frozen=True, slots=True)
class _Whole:
    """What this rank has of whole rows.

    Attributes:
        rows: which these are.
        scaled, weights: float32 and int64 [R, n].
    """

    rows: list[int]
    scaled: Tensor
    weights: Tensor

    @classmethod
    def of(cls, rows: list[int], some: _Rows, largest: Tensor) -> _Whole:
        """Of `rows`, which are `some`, and whose logits are written over."""
        scaled = some.scale(some.logits.local, largest, out=some.logits.local)
        return cls(rows, scaled, weigh(scaled))

    def those(self, rows: list[int]) -> _Whole | None:
        """Those of them that are in `rows`, if any."""
        kept = [i for i, row in enumerate(self.rows) if row in rows]
        if not kept:
            return None
        return _Whole(
            [self.rows[i] for i in kept], _pick(self.scaled, kept), _pick(self.weights, kept)
        )


def _pick(x: Tensor, rows: list[int]) -> Tensor:
    """Some rows; x itself if these are all."""
    return x if rows == list(range(len(x))) else x[rows]


def _draw_from_heads(rows: _Rows, width: int) -> tuple[Tensor, Tensor, _Whole | None]:
    """Draw from each rank's most likely tokens.

    Returns:
        int64 [R], the tokens; bool [R], whether no other token could have been drawn: if not,
        the token means nothing; and of those rows, what had to be computed of whole ones.
    """
    logits, vocab_size = rows.logits, rows.logits.shape[1]
    values, ids, unlisted = logits.heads(width)
    largest, last_place = values[:, 0], values.shape[1] - 1
    scaled = rows.scale(values, largest)
    other = rows.scale(unlisted[:, None], largest)[:, 0]  # what others have at most
    weights = weigh(scaled)
    by_k = rows.top_k < vocab_size
    kth = scaled.gather(1, (rows.top_k - 1).clamp(max=last_place)[:, None])[:, 0]
    floor = kth.masked_fill(~by_k, -torch.inf)
    weights.mul_(scaled >= floor[:, None])
    whole = None
    if (by_p := rows.tail > 0).any():
        total = weights.sum(-1)
        if open_ended := (by_p & ~by_k).nonzero().flatten().tolist():
            whole = _Whole.of(open_ended, rows.some(open_ended), largest[open_ended])
            total[open_ended] = logits.group.sum(whole.weights.sum(-1))
        last = (weights.cumsum(-1) < rows.nucleus(total)[:, None]).sum(-1)
        nth = scaled.gather(1, last.clamp(max=last_place)[:, None])[:, 0]
        floor = floor.maximum(nth.masked_fill(~by_p | (last > last_place), -torch.inf))
    floor = floor.maximum(rows.least)
    weights.mul_(scaled >= floor[:, None])
    ids, order = ids.sort(dim=-1)
    ends = weights.gather(1, order).cumsum(-1)
    place = torch.searchsorted(ends, rows.target(ends[:, -1])[:, None], right=True)
    # Of those that tie with the k-th largest, some may be missing, in the sum for top-p, too.
    settled = torch.where(by_k, other < kth, (other < floor) | (other < -BITS - 1))
    settled &= ends[:, -1] > 0
    if whole is not None:
        whole = whole.those((~settled).nonzero().flatten().tolist())
    return ids.gather(1, place.clamp(max=last_place)).flatten(), settled, whole


def _draw_from_all(rows: _Rows, whole: _Whole | None = None) -> Tensor:
    """Draw from whole rows, what is here of which may be at hand: int64 [R]."""
    logits = rows.logits
    whole = whole or _Whole.of([], rows, logits.amax())
    scaled, weights = whole.scaled, whole.weights
    by_k = (rows.top_k < logits.shape[1]).nonzero().flatten().tolist()
    by_p = (rows.tail > 0).nonzero().flatten().tolist()
    for cut, is_nucleus in ((by_k, False), (by_p, True)):
        if not cut:
            continue
        some, kept = _pick(scaled, cut), _pick(weights, cut)
        if is_nucleus:
            targets, mass = rows.some(cut).nucleus(logits.group.sum(kept.sum(-1))), kept
        else:
            targets, mass = rows.top_k[cut], torch.ones_like(kept)
        kept.mul_(some >= _floors(some, mass, targets, logits)[:, None])
        if kept is not weights:
            weights[cut] = kept
    if (rows.least > -BITS - 1).any():
        weights.mul_(scaled >= rows.least[:, None])
    return _inverse_cdf(weights, rows)


def _floors(scaled: Tensor, mass: Tensor, targets: Tensor, logits: Logits) -> Tensor:
    """The largest number of each row that, with all that are not smaller, has that much mass.

    A radix select, of numbers of which each rank has some: ranks exchange the mass in 256
    buckets, and go on in the one that counts. First the buckets are of equal width; then they
    are the digits of the float's bits, from the top.

    Args:
        scaled: float32 [R, n]; 0 at most.
        mass: int64 [R, n]; none below 0.
        targets: int64 [R]; from 1 to the row's mass on all ranks.
        logits: whose ranks these are.

    Returns:
        float32 [R].
    """
    # Without their sign, floats are in the order of their bits: from the likeliest token on.
    keys = list(scaled.view(torch.int32).unbind())
    digits = list((scaled * -BUCKETS_PER_HALVING).clamp_(max=255).int().unbind())
    masses = list(mass.unbind())
    found = torch.zeros_like(targets)
    for shift in (None, 24, 16, 8, 0):
        if shift is not None:
            digits = [(key & 0x7FFFFFFF) >> shift & 255 for key in keys]
        count = targets.new_zeros(len(keys), 256)
        for row, digit, weights in zip(count, digits, masses, strict=True):
            row.index_add_(0, digit, weights)
        count = logits.group.sum(count)
        reached = count.cumsum(1)
        nth = torch.searchsorted(reached, targets[:, None])
        targets = targets - (reached - count).gather(1, nth).flatten()
        for row, (digit, chosen) in enumerate(zip(digits, nth.flatten().tolist(), strict=True)):
            kept = (digit == chosen).nonzero().flatten()
            keys[row], masses[row] = keys[row][kept], masses[row][kept]
        if shift is not None:
            found |= nth.flatten() << shift
    return -found.int().view(torch.float32)


def _inverse_cdf(weights: Tensor, rows: _Rows) -> Tensor:
    """The first token at which the running sum exceeds u x total: int64 [R, n] -> [R].

    In three levels: ranks, blocks of one of them, and tokens of one block.
    """
    own, group = rows.logits.own, rows.logits.group
    count = max(1, -(-len(own) // CDF_BLOCK))
    padding = count * CDF_BLOCK - len(own)
    blocks = (pad(weights, (0, padding)) if padding else weights).view(-1, count, CDF_BLOCK)
    ends = blocks.sum(-1).cumsum(-1)
    parts = group.gather(ends[:, -1])
    target = rows.target(parts.sum(0)) - parts[: group.index].sum(0)
    here = (target >= 0) & (target < ends[:, -1])
    target = torch.where(here, target, 0)[:, None]
    block = torch.searchsorted(ends, target, right=True).clamp(max=count - 1)
    inner = blocks[torch.arange(len(blocks), device=block.device), block.flatten()].cumsum(-1)
    before = ends.gather(1, block) - inner[:, -1:]
    place = torch.searchsorted(inner, target - before, right=True)
    token = own.start + (block * CDF_BLOCK + place).flatten()
    return group.sum(torch.where(here, token, 0))


# SplitMix64's constants, as signed 64-bit numbers; products wrap as they do in the original.
_SPLITMIX_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_SPLITMIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_SPLITMIX_2 = 0x94D049BB133111EB - (1 << 64)


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's finaliser, a bijection of int64 that flips half of the bits on average."""
    z = (z ^ _shift_right(z, 30)) * _SPLITMIX_1
    z = (z ^ _shift_right(z, 27)) * _SPLITMIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift; int64's own keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
