"""One token from each row of logits: the shape of the distribution, and the draw.

Temperature, top-k, top-p and min-p shape the distribution, in this order; then
one uniform number picks a token by inverse CDF, in the order of the
vocabulary. `weft.kernels.reference.sampling_distribution` is the oracle.

The uniform number is SplitMix64's finaliser (Steele, Lea and Flood 2014)
applied to (seed, index), so there is no generator state to keep, move or
replay. A row's token is a function of its own logits, settings and number, bit
for bit: no step of the computation depends on the other rows.

The whole vocabulary is never sorted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from weft.models.interface import SlotSampling

TOP_K_WIDTHS = (64, 256, 1024)
"""A row with top-k is cut to the smallest of these widths that is at least twice its k."""

NUCLEUS_WIDTH = 256
"""How many of the most likely tokens are sorted to find where top-p ends; mostly enough."""

CDF_BLOCK = 128
"""Tokens that the first level of the inverse CDF looks at as one."""


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


def draw(logits: Tensor, settings: Sequence[SlotSampling], u: Tensor) -> Tensor:
    """Draw from float32 [R, V], which is overwritten, with u [R]: int64 [R].

    A row with a small top-k is first cut to its most likely tokens: a fixed number of them for
    a given k, so that the result does not depend on the other rows.
    """
    vocab_size = logits.shape[1]
    token_ids = torch.empty(len(settings), dtype=torch.int64, device=logits.device)
    groups: dict[int, list[int]] = {}
    for i, s in enumerate(settings):
        width = next((w for w in TOP_K_WIDTHS if 2 * s.top_k <= w < vocab_size), vocab_size)
        groups.setdefault(width if s.top_k else vocab_size, []).append(i)
    whole = groups.pop(vocab_size, [])
    for width, rows in groups.items():
        values, ids = logits[rows].topk(width)
        k = torch.tensor([settings[i].top_k for i in rows], device=logits.device)
        kth = values.gather(1, k[:, None] - 1)
        # Tokens that tie with the k-th stay in; were there more than fit, use the whole row.
        fits = (values[:, -1:] < kth).flatten().tolist()
        whole += [i for i, fit in zip(rows, fits, strict=True) if not fit]
        values.masked_fill_(values < kth, -torch.inf)
        ids, order = ids.sort()
        picked = _draw_from(values.gather(1, order), [settings[i] for i in rows], u[rows])
        token_ids[rows] = ids.gather(1, picked[:, None]).flatten()
    for i in whole:
        if 0 < (top_k := settings[i].top_k) < vocab_size:
            row = logits[i]
            row.masked_fill_(row < row.kthvalue(vocab_size - top_k + 1).values, -torch.inf)
    if whole:
        token_ids[whole] = _draw_from(logits[whole], [settings[i] for i in whole], u[whole])
    return token_ids


def _draw_from(logits: Tensor, settings: Sequence[SlotSampling], u: Tensor) -> Tensor:
    """Draw from float32 [R, N], which is overwritten, with u [R]: int64 [R] in [0, N)."""
    device = logits.device
    temperature = torch.tensor([s.temperature for s in settings], device=device)
    temperature.clamp_(min=torch.finfo(torch.float32).tiny)
    # The largest goes to 0 first: a tiny temperature must not turn it into inf.
    probs = logits.sub_(logits.amax(-1, keepdim=True)).div_(temperature[:, None]).softmax(-1)
    floor = torch.zeros(len(settings), device=device)
    if any(s.min_p > 0.0 for s in settings):
        floor = probs.amax(-1) * torch.tensor([s.min_p for s in settings], device=device)
    nucleus = [i for i, s in enumerate(settings) if s.top_p < 1.0]
    if nucleus:
        top_p = torch.tensor([settings[i].top_p for i in nucleus], dtype=torch.float64)
        floor[nucleus] = floor[nucleus].maximum(_nucleus_floor(probs[nucleus], top_p.to(device)))
    if floor.any():
        probs.masked_fill_(probs < floor[:, None], 0.0)
    return _inverse_cdf(probs, u)


def _nucleus_floor(probs: Tensor, top_p: Tensor) -> Tensor:
    """The probability of the last token in each row's nucleus: [R, N], float64 [R] -> [R].

    The nucleus is the smallest set of the most likely tokens that reaches top_p.
    """
    width = min(NUCLEUS_WIDTH, probs.shape[1])
    most_likely = probs.topk(width).values
    mass = most_likely.cumsum(-1, dtype=torch.float64)
    last = (mass < top_p[:, None]).sum(-1)
    floor = most_likely.gather(1, last.clamp(max=width - 1)[:, None]).flatten()
    for i in (last == width).nonzero().flatten().tolist():
        floor[i] = _wide_nucleus_floor(probs[i], top_p[i])
    return floor


def _wide_nucleus_floor(probs: Tensor, top_p: Tensor) -> Tensor:
    """The same for one row [N] of many likely tokens, without sorting them all.

    Positive floats are ordered like their bits: the leading bits are a bucket, and only the
    bucket in which the sum, from the most likely one down, reaches top_p is sorted.
    """
    bucket_of = probs.view(torch.int32) >> 15
    mass = torch.bincount(bucket_of, weights=probs.double()).flip(0).cumsum(0)
    nth = int(torch.searchsorted(mass, top_p))
    if nth == len(mass):  # rounding: all tokens together are just short of top_p
        return torch.zeros_like(top_p, dtype=probs.dtype)
    before = mass[nth - 1] if nth else torch.zeros_like(top_p)
    inside = probs[bucket_of == len(mass) - 1 - nth].sort(descending=True).values
    last = (before + inside.cumsum(0, dtype=torch.float64) < top_p).sum()
    return inside[last.clamp(max=len(inside) - 1)]


def _inverse_cdf(probs: Tensor, u: Tensor) -> Tensor:
    """The first token at which the running sum exceeds u x total: [R, N], float64 [R] -> [R].

    In two levels, blocks and then tokens of one block: a running sum over a whole vocabulary
    in float64 would take longer than everything else here.
    """
    padding = -probs.shape[1] % CDF_BLOCK
    blocks = (pad(probs, (0, padding)) if padding else probs).view(len(probs), -1, CDF_BLOCK)
    ends = blocks.sum(-1).double().cumsum(-1)
    target = u[:, None] * ends[:, -1:]
    # The clamps matter for NaN only: a row without any token left must not index out of bounds.
    block = torch.searchsorted(ends, target, right=True).clamp(max=ends.shape[1] - 1)
    before = ends.gather(1, (block - 1).clamp(min=0)).masked_fill_(block == 0, 0.0)
    rows = torch.arange(len(probs), device=probs.device)
    inner = blocks[rows, block.flatten()].cumsum(-1, dtype=torch.float64)
    # The block's sum in float32 may exceed this one: stay on its last token that can occur.
    below_end = torch.nextafter(inner[:, -1:], torch.zeros_like(inner[:, -1:]))
    place = torch.searchsorted(inner, (target - before).minimum(below_end), right=True)
    return (block * CDF_BLOCK + place).flatten().clamp(max=probs.shape[1] - 1)


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
