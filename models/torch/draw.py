"""Draws one token from each row of logits.

Temperature, top-k, top-p and min-p shape the distribution, in this order. Then one uniform number
picks a token by inverse CDF, in vocabulary order. `weft.kernels.reference.sampling_distribution` is
the oracle.

A token's weight is exp((logit - largest) / temperature), rounded down to a multiple of 2**-40 and
stored as an integer, so sums are exact in any order. The weights' logarithms, which are just as
exact, decide which tokens are kept. A row's token is therefore a function of its own logits,
settings and number, bit for bit. It depends neither on the number of ranks that share the
vocabulary nor on the rest of the batch.

On CPUs with compiled kernels and a whole vocabulary, csrc/draw.cpp computes the same in place.
Elsewhere torch does. If few tokens can be drawn, they are among each rank's most likely ones, and
all ranks gather these. Otherwise ranks exchange the sums of their weights; the rank whose part
contains the number names the token.

The uniform number is SplitMix64's finaliser (Steele, Lea and Flood 2014) applied to (seed, index).
There is no generator state to keep, move or replay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from weft.kernels.cpu import sampling
from weft.kernels.cpu.sampling import BITS, DRAW, weigh
from weft.models.interface import SlotSampling
from weft.models.torch.edits import Edits
from weft.models.torch.logits import Logits

MIN_CANDIDATES, MAX_CANDIDATES = 32, 1024
"""Candidates taken from each rank for a row with top-k: about twice its k, within these bounds."""

NUCLEUS_CANDIDATES = 256
"""Candidates with top-p or min-p alone; usually enough."""

BUCKETS_PER_HALVING = 6
"""With this number, 256 buckets hold all tokens with a weight above 0."""

CDF_BLOCK = 128
"""Tokens in a block, the inverse CDF's first level."""

ONE = 1 << 48
"""Unit for fractions of a row's mass. They are integers, too, because TPUs have no float64."""


def uniform(seeds: Sequence[int], index: Sequence[int]) -> Tensor:
    """Return each seed's index-th number: float64 [R] in [0, 1), multiples of 2**-48.

    This is mix(mix(seed) + (index + 1) * gamma). Hashing the seed first keeps nearby seeds from
    having shifted copies of one stream.
    """
    # Seeds may be signed or unsigned 64-bit numbers.
    signed = [(seed + (1 << 63)) % (1 << 64) - (1 << 63) for seed in seeds]
    state = _mix(torch.tensor(signed, dtype=torch.int64))
    bits = _mix(state + (torch.tensor(index, dtype=torch.int64) + 1) * _SPLITMIX_GAMMA)
    return _shift_right(bits, 16).double() * 2.0**-48


def share_of(share: Tensor, total: Tensor) -> Tensor:
    """Return share / ONE of a total, rounded down: int64 [R].

    This is long multiplication with 24-bit digits. `share` is at most ONE; `total` is not negative.
    """
    digit = (1 << 24) - 1
    high, low = share >> 24, share & digit
    top, middle, bottom = total >> 48, total >> 24 & digit, total & digit
    carried = high * bottom + low * middle + (low * bottom >> 24) >> 24
    return (high * top << 24) + high * middle + low * top + carried


class Shaping(NamedTuple):
    """How to draw from each of R rows.

    Attributes:
        temperature: float32 [R]; scaled so that one logit less halves a token's weight.
        min_log_weight: float32 [R]; log2 of the weight that min-p requires.
        top_k: int64 [R]; V keeps all tokens.
        tail: int64 [R]; the fraction that top-p cuts off, in units of 1 / ONE.
        u: int64 [R]; the uniform number, in units of 1 / ONE, less than ONE.
    """

    temperature: Tensor
    min_log_weight: Tensor
    top_k: Tensor
    tail: Tensor
    u: Tensor

    @classmethod
    def of(cls, settings: Sequence[SlotSampling], u: Tensor, columns: int) -> Shaping:
        """Prepare settings for rows with V `columns`, on the device of u, float64 [R]."""
        device = u.device
        temperature = torch.tensor(
            [s.temperature for s in settings], dtype=torch.float32, device=device
        )
        top_k = [s.top_k if 0 < s.top_k < columns else columns for s in settings]
        tail = [round((1 - s.top_p) * ONE) for s in settings]
        return cls(
            temperature.mul_(math.log(2)).clamp_(min=torch.finfo(torch.float32).tiny),
            torch.tensor([math.log2(s.min_p or 2.0**-149) for s in settings], device=device),
            torch.tensor(top_k, dtype=torch.int64, device=device),
            torch.tensor(tail, dtype=torch.int64, device=device),
            (u * ONE).long(),
        )


@dataclass(frozen=True, slots=True)
class _Rows:
    """R rows, and how to draw from them.

    Attributes:
        logits: float32 [R, V].
        how: for each row.
    """

    logits: Logits
    how: Shaping

    def select(self, rows: list[int]) -> _Rows:
        """Select rows."""
        if rows == list(range(len(self.how.u))):
            return self
        return _Rows(
            self.logits.float_rows(rows), Shaping(*(numbers[rows] for numbers in self.how))
        )

    def scale(self, logits: Tensor, largest: Tensor, out: Tensor | None = None) -> Tensor:
        """Scale logits [R, N] to log2 of their weights, 0 at most; `largest` is each row's maximum.

        A row with only -inf stays so.
        """
        largest = largest.masked_fill(largest == -torch.inf, 0.0)
        return torch.sub(logits, largest[:, None], out=out).div_(self.how.temperature[:, None])

    def target(self, total: Tensor) -> Tensor:
        """Return the running sum at which the token is drawn: int64 [R], in [0, total), or 0."""
        return share_of(self.how.u, total)

    def nucleus(self, total: Tensor) -> Tensor:
        """Return the mass that top-p keeps: int64 [R], in [1, total]; 0 if the total is 0."""
        return (total - share_of(self.how.tail, total)).clamp(min=1).minimum(total)


def draws_in_place(logits: Logits) -> bool:
    """True if `draw_in_place` takes these logits."""
    return logits.group.size == 1 and sampling.draws(logits.local)


def draw_in_place(
    logits: Logits,
    rows: Sequence[int],
    settings: Sequence[SlotSampling],
    u: Tensor,
    *,
    edits: Edits | None = None,
    masks: Tensor | None = None,
    mask_of: Sequence[int] = (),
) -> Tensor:
    """Choose one token from each of some rows, as `draw` does; the logits stay as they are.

    Args:
        logits: [S, V]; `draws_in_place` is true.
        rows: D of the rows, whose logits are finite or -inf.
        settings, u: as for `draw`, one entry per row; a temperature of 0 takes the largest logit.
        edits: to these D rows, before the draw.
        masks: int32 [R, ceil(V / 32)]; see `StepInput.token_mask`. Masks come after edits.
        mask_of: for each of D rows, its mask, or -1.

    Returns:
        int64 [D].
    """
    shaping = Shaping.of(settings, u, logits.shape[1])
    how = np.zeros(len(rows), DRAW)
    how["row"] = rows
    for name in ("min_log_weight", "top_k", "tail", "u"):
        how[name] = getattr(shaping, name).numpy()
    greedy = np.array([s.temperature == 0.0 for s in settings])
    how["temperature"] = np.where(greedy, 0.0, shaping.temperature.numpy())
    how["mask"] = mask_of or -1
    changes = None
    if edits is not None and len(edits.rows):
        width = logits.shape[1]
        places, at = torch.unique(edits.rows * width + edits.columns, return_inverse=True)
        row, column = places // width, places % width
        values = logits.local[torch.tensor(rows)[row], column].float()
        edits.apply(values, at)
        ends = np.searchsorted(row.numpy(), np.arange(len(rows)), side="right")
        how["last_edit"], how["first_edit"] = ends, np.concatenate(([0], ends[:-1]))
        changes = column, values
    return sampling.draw(logits.local, how, changes, masks)


def draw(logits: Logits, settings: Sequence[SlotSampling], u: Tensor) -> Tensor:
    """Draw one token from each row.

    Args:
        logits: float32 [R, V], finite or -inf; overwritten.
        settings: one entry per row; temperatures are above 0.
        u: float64 [R]; in [0, 1).

    Returns:
        int64 [R]; the same on all ranks. 0 if all logits are -inf.
    """
    if draws_in_place(logits):
        return draw_in_place(logits, range(len(logits)), settings, u)
    vocab_size, device = logits.shape[1], u.device
    rows = _Rows(logits, Shaping.of(settings, u, vocab_size))
    top_k: list[int] = rows.how.top_k.tolist()
    widths = [_num_candidates(k, s, vocab_size) for k, s in zip(top_k, settings, strict=True)]
    narrow = [i for i, width in enumerate(widths) if width]
    whole_rows = [i for i, width in enumerate(widths) if not width]
    token_ids = torch.empty(len(settings), dtype=torch.int64, device=device)
    if narrow:
        token_ids[narrow], settled, wide = _draw_from_candidates(rows.select(narrow), max(widths))
        if wide is not None:
            selected = [narrow[i] for i in wide.rows]
            token_ids[selected] = _draw_from_whole_rows(rows.select(selected), wide)
            settled[wide.rows] = True
        whole_rows += [i for i, drawn in zip(narrow, settled.tolist(), strict=True) if not drawn]
    if whole_rows:
        whole_rows.sort()
        token_ids[whole_rows] = _draw_from_whole_rows(rows.select(whole_rows))
    return token_ids.clamp_(0, vocab_size - 1)  # a valid index, whatever the logits are


def _num_candidates(top_k: int, settings: SlotSampling, vocab_size: int) -> int:
    """Return how many candidates to take from each rank for a row; 0 takes whole rows."""
    if top_k < vocab_size:
        width = max(MIN_CANDIDATES, 1 << (3 * top_k // 2).bit_length())
        return width if width <= MAX_CANDIDATES else 0
    return NUCLEUS_CANDIDATES if settings.top_p < 1.0 or settings.min_p > 0.0 else 0


@dataclass(frozen=True, slots=True)
class _WholeRows:
    """This rank's part of whole rows.

    Attributes:
        rows: the rows' indices.
        scaled, weights: float32 and int64 [R, n].
    """

    rows: list[int]
    scaled: Tensor
    weights: Tensor

    @classmethod
    def compute(cls, rows: list[int], selected: _Rows, largest: Tensor) -> _WholeRows:
        """Compute the weights of `selected`, the rows with these indices; overwrites its logits."""
        scaled = selected.scale(selected.logits.local, largest, out=selected.logits.local)
        return cls(rows, scaled, weigh(scaled))

    def select(self, rows: list[int]) -> _WholeRows | None:
        """Select those entries that are in `rows`; None if there are none."""
        kept = [i for i, row in enumerate(self.rows) if row in rows]
        if not kept:
            return None
        return _WholeRows(
            [self.rows[i] for i in kept], _pick(self.scaled, kept), _pick(self.weights, kept)
        )


def _pick(x: Tensor, rows: list[int]) -> Tensor:
    """Select rows; x itself if all are selected."""
    return x if rows == list(range(len(x))) else x[rows]


def _draw_from_candidates(rows: _Rows, width: int) -> tuple[Tensor, Tensor, _WholeRows | None]:
    """Draw from each rank's most likely tokens.

    Returns:
        int64 [R], the tokens;
        bool [R], whether no other token could have been drawn; if False, the token is meaningless;
        the whole rows computed so far, for the unsettled rows.
    """
    logits, vocab_size = rows.logits, rows.logits.shape[1]
    values, ids, unlisted = logits.candidates(width)
    largest, last_place = values[:, 0], values.shape[1] - 1
    scaled = rows.scale(values, largest)
    other = rows.scale(unlisted[:, None], largest)[:, 0]  # upper bound for all other tokens
    weights = weigh(scaled)
    by_k = rows.how.top_k < vocab_size
    kth = scaled.gather(1, (rows.how.top_k - 1).clamp(max=last_place)[:, None])[:, 0]
    floor = kth.masked_fill(~by_k, -torch.inf)
    weights.mul_(scaled >= floor[:, None])
    whole = None
    if (by_p := rows.how.tail > 0).any():
        total = weights.sum(-1)
        if open_ended := (by_p & ~by_k).nonzero().flatten().tolist():
            whole = _WholeRows.compute(open_ended, rows.select(open_ended), largest[open_ended])
            total[open_ended] = logits.group.sum(whole.weights.sum(-1))
        last = (weights.cumsum(-1) < rows.nucleus(total)[:, None]).sum(-1)
        nth = scaled.gather(1, last.clamp(max=last_place)[:, None])[:, 0]
        floor = floor.maximum(nth.masked_fill(~by_p | (last > last_place), -torch.inf))
    floor = floor.maximum(rows.how.min_log_weight)
    weights.mul_(scaled >= floor[:, None])
    ids, order = ids.sort(dim=-1)
    ends = weights.gather(1, order).cumsum(-1)
    place = torch.searchsorted(ends, rows.target(ends[:, -1])[:, None], right=True)
    # Tokens that tie with the k-th largest may be missing, also from the sum for top-p.
    settled = torch.where(by_k, other < kth, (other < floor) | (other < -BITS - 1))
    settled &= ends[:, -1] > 0
    if whole is not None:
        whole = whole.select((~settled).nonzero().flatten().tolist())
    return ids.gather(1, place.clamp(max=last_place)).flatten(), settled, whole


def _draw_from_whole_rows(rows: _Rows, whole: _WholeRows | None = None) -> Tensor:
    """Draw from whole rows, int64 [R]; `whole` passes on rows that were already computed."""
    logits = rows.logits
    whole = whole or _WholeRows.compute([], rows, logits.amax())
    scaled, weights = whole.scaled, whole.weights
    by_k = (rows.how.top_k < logits.shape[1]).nonzero().flatten().tolist()
    by_p = (rows.how.tail > 0).nonzero().flatten().tolist()
    for cut, is_nucleus in ((by_k, False), (by_p, True)):
        if not cut:
            continue
        selected, kept = _pick(scaled, cut), _pick(weights, cut)
        if is_nucleus:
            targets, mass = rows.select(cut).nucleus(logits.group.sum(kept.sum(-1))), kept
        else:
            targets, mass = rows.how.top_k[cut], torch.ones_like(kept)
        kept.mul_(selected >= _floors(selected, mass, targets, logits)[:, None])
        if kept is not weights:
            weights[cut] = kept
    if (rows.how.min_log_weight > -BITS - 1).any():
        weights.mul_(scaled >= rows.how.min_log_weight[:, None])
    return _inverse_cdf(weights, rows)


def _floors(scaled: Tensor, mass: Tensor, targets: Tensor, logits: Logits) -> Tensor:
    """Find each row's largest number such that it and all larger ones have the target mass.

    This is a radix select over numbers that are split over ranks. Ranks exchange the mass in 256
    buckets and continue in the decisive one. The first buckets have equal width; the next ones are
    the digits of the float's bits, from the top.

    Args:
        scaled: float32 [R, n]; 0 at most.
        mass: int64 [R, n]; not negative.
        targets: int64 [R]; from 1 to the row's mass on all ranks.
        logits: gives the ranks.

    Returns:
        float32 [R].
    """
    # Without their sign, floats sort like their bits, the likeliest token first.
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
        running = count.cumsum(1)
        nth = torch.searchsorted(running, targets[:, None])
        targets = targets - (running - count).gather(1, nth).flatten()
        for row, (digit, chosen) in enumerate(zip(digits, nth.flatten().tolist(), strict=True)):
            kept = (digit == chosen).nonzero().flatten()
            keys[row], masses[row] = keys[row][kept], masses[row][kept]
        if shift is not None:
            found |= nth.flatten() << shift
    return -found.int().view(torch.float32)


def _inverse_cdf(weights: Tensor, rows: _Rows) -> Tensor:
    """Find the first token at which the running sum exceeds u x total: int64 [R, n] -> [R].

    The search has three levels: ranks, blocks on one rank, and tokens in one block.
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


# SplitMix64's constants as signed 64-bit numbers; products wrap as in the original.
_SPLITMIX_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_SPLITMIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_SPLITMIX_2 = 0x94D049BB133111EB - (1 << 64)


def _mix(z: Tensor) -> Tensor:
    """Apply SplitMix64's finaliser, a bijection of int64 that flips half of the bits on average."""
    z = (z ^ _shift_right(z, 30)) * _SPLITMIX_1
    z = (z ^ _shift_right(z, 27)) * _SPLITMIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Shift logically; int64's own shift keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
