"""Expert choice for each token, and a sort that orders tokens by expert.

    route(logits [T, E], k)     -> ids [T, k], weights [T, k]
    sort_by_expert(ids [T, k])  -> offsets [E + 1], order [T * k], inverse [T, k], status [T]

Everything stays on the device: the host never learns how many tokens an expert has.

Protocol. Both run on one rank, without signals. A launch orders its writes before the
next launch on the same stream, and each output element has one writing program.

route: one program, with one warp, for each token. Its experts form a tile with one
group per row, so group scores are sums over rows. The best expert is taken k times.

sort_by_expert: a counting sort in two launches, or in one for few pairs. Both have at most
MAX_TILES token tiles. `count_pairs` counts the pairs for each expert in a tile. `place_pairs` adds
up these counts: over all tiles for the offsets, and over earlier tiles for its own first places. It
then places its pairs block by block. Within a block, a pair's place is its expert's next place plus
the count of earlier pairs in the block with that expert. Pairs thus stay in order within an expert.
The result is the same in every run, because it does not depend on the order in which programs run.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.matmul.epilogue import RESULTS
from weft.kernels.gpu.runtime.arguments import require, require_counts, require_tensor

MAX_EXPERTS, MAX_TOP_K = 1024, 32
MAX_PAIRS = 2**31 - 1
"""Maximum pairs: places are 32-bit integers."""

MAX_TILES, TILE_PAIRS = 128, 64
"""Maximum tiles, and minimum pairs in a tile."""

FEW_PAIRS = 128
"""Maximum pairs that one program counts and places: a second launch would take longer."""

MATRIX = 4096
"""Block size: pairs times experts."""

Scoring = Literal["softmax", "sigmoid"]


@triton.jit
def find_largest(value, free, number, NONE: tl.constexpr):
    """Find the largest free value and return its number; the lowest number if tied.

    The arguments are [n] or [m, n]. Values must not be NaN, and each number must be less than NONE.
    """
    kept = tl.where(free, value, float("-inf"))
    largest = tl.max(kept, axis=0)
    if len(value.shape) == 2:
        largest = tl.max(largest, axis=0)
    found = tl.where(free & (value == largest), number, NONE)
    first = tl.min(found, axis=0)
    if len(value.shape) == 2:
        first = tl.min(first, axis=0)
    return first


@triton.jit
def choose_experts(
    ids,  # int32 [T, TOP_K]
    weights,  # float32 [T, TOP_K]
    logits,  # [T, E]
    bias,  # float32 [E], or None
    size,  # experts in a group: E / GROUPS
    scale,  # float32
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Choose the experts for one token. Grid: (T,)."""
    NONE: tl.constexpr = 1 << 30
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_E)
    expert = group[:, None] * size + member[None, :]
    free = (group < GROUPS)[:, None] & (member < size)[None, :]
    x = tl.load(logits + token * (GROUPS * size) + expert, mask=free, other=float("-inf"))
    x = x.to(tl.float32)
    if SIGMOID:
        score = tl.sigmoid(x)
    else:
        powers = tl.exp(x - tl.max(tl.max(x, axis=1), axis=0))
        score = powers / tl.sum(tl.sum(powers, axis=1), axis=0)
    choice = score
    if bias is not None:
        choice += tl.load(bias + expert, mask=free, other=0.0)
    elif not SIGMOID:
        choice = x  # the same order as the scores, without rounding
    choice = tl.where(choice == choice, choice, float("-inf"))  # NaN sorts last
    if TOP_GROUPS < GROUPS:
        best = tl.max(tl.where(free, choice, float("-inf")), axis=1)
        if bias is not None:
            of_best = tl.min(tl.where(free & (choice == best[:, None]), expert, NONE), axis=1)
            others = free & (expert != of_best[:, None])
            best += tl.max(tl.where(others, choice, float("-inf")), axis=1)
        best = tl.where(best == best, best, float("-inf"))
        left = group < GROUPS
        for _ in range(TOP_GROUPS):
            left = left & (group != find_largest(best, left, group, NONE))
        free = free & (left == 0)[:, None]
    place = tl.arange(0, BLOCK_K)
    chosen = tl.zeros((BLOCK_K,), tl.int32)
    weight = tl.zeros((BLOCK_K,), tl.float32)
    for k in range(TOP_K):
        first = find_largest(choice, free, expert, NONE)
        its_score = tl.sum(tl.sum(tl.where(expert == first, score, 0.0), axis=1), axis=0)
        chosen = tl.where(place == k, first, chosen)
        weight = tl.where(place == k, its_score, weight)
        free = free & (expert != first)
    if NORMALIZE:
        weight = weight / tl.sum(weight, axis=0)
    at = token * TOP_K + place
    tl.store(ids + at, chosen, mask=place < TOP_K)
    tl.store(weights + at, weight * scale, mask=place < TOP_K)


def route(
    logits: Tensor,
    top_k: int,
    *,
    normalize: bool,
    scoring: Scoring = "softmax",
    bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose each token's experts and their weights (Shazeer et al. 2017).

    With groups, experts are chosen only from the `top_groups` best groups. A group's score is its
    best expert's or, with a bias, the sum of its two best (DeepSeek-V3, arXiv:2412.19437, section
    2.1.2; DeepSeek's own inference code).

    Args:
        logits: [T, E], contiguous; float32, float16 or bfloat16.
        top_k: experts for each token.
        normalize: divide a token's weights by their sum.
        scoring: how logits become scores: softmax over all experts, or a sigmoid each.
        bias: float32 [E], added to the scores for the choice, but not for the weights.
        groups: number of groups, each with E / groups consecutive experts.
        top_groups: how many groups experts are chosen from.
        scale: multiplies the weights after they are normalised.

    Returns:
        ids int32 [T, top_k], best first, ties with the lowest first; and weights float32
        [T, top_k]. A token's ids are always distinct and in [0, E), whatever the logits are. With
        softmax, NaN in a token's logits makes its weights NaN.

    Raises:
        KernelError: the arguments do not fit together.
    """
    check = functools.partial(require, "route")
    check("logits's shape", list(logits.shape), logits.dim() == 2, "be a matrix")
    tokens, experts = logits.shape
    require_tensor(check, "logits", logits, (tokens, experts), logits.device, *RESULTS)
    check("experts", experts, 1 <= experts <= MAX_EXPERTS, f"be from 1 to {MAX_EXPERTS}")
    require_counts(check, 1, top_k=top_k, groups=groups, top_groups=top_groups)
    check("scoring", repr(scoring), scoring in ("softmax", "sigmoid"), "be softmax or sigmoid")
    check("groups", groups, experts % groups == 0, f"divide the {experts} experts")
    check("top_groups", top_groups, top_groups <= groups, f"be at most {groups}, the groups")
    size = experts // groups
    most = top_groups * size
    check("top_k", top_k, top_k <= most, f"be at most {most}, the experts of {top_groups} groups")
    check("top_k", top_k, top_k <= MAX_TOP_K, f"be at most {MAX_TOP_K}")
    if bias is not None:
        require_tensor(check, "bias", bias, (experts,), logits.device, torch.float32)
        pairs = top_groups == groups or size > 1
        check("groups", groups, pairs, "have at least two experts each, so that two can be scored")
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, top_k, device=logits.device)
    if tokens:
        choose_experts[(tokens,)](
            ids=ids,
            weights=weights,
            logits=logits,
            bias=bias,
            size=size,
            scale=float(scale),
            TOP_K=top_k,
            GROUPS=groups,
            TOP_GROUPS=top_groups,
            SIGMOID=scoring == "sigmoid",
            NORMALIZE=normalize,
            BLOCK_G=triton.next_power_of_2(groups),
            BLOCK_E=triton.next_power_of_2(size),
            BLOCK_K=triton.next_power_of_2(top_k),
            num_warps=1,
        )
    return ids, weights


@triton.jit
def count_tile(
    status,  # int32 [T]
    ids,  # int32 [T, K]
    first,  # lowest id
    begin,  # the tile's tokens
    end,
    k,  # K
    experts,  # E
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Count a tile's pairs for each expert, int32 [BLOCK_E]; flag tokens with an unknown expert."""
    expert, choice = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_E,), tl.int32)
    for start in range(begin, end, BLOCK_T):
        token = start + tl.arange(0, BLOCK_T)
        inside = (token < end)[:, None] & (choice < k)[None, :]
        id = tl.load(ids + token[:, None] * k + choice[None, :], mask=inside, other=0) - first
        bad = inside & ((id < 0) | (id >= experts))
        tl.store(status + token, tl.max(bad.to(tl.int32), axis=1), mask=token < end)
        flat = tl.reshape(tl.where(inside, id, -1), (BLOCK_T * BLOCK_K,))
        total += tl.sum((flat[:, None] == expert[None, :]).to(tl.int32), axis=0)
    return tl.where(expert < experts, total, 0)


@triton.jit(do_not_specialize=["first", "tokens", "span"])
def count_pairs(
    counts,  # int32 [tiles, E]
    status,  # int32 [T]
    ids,  # int32 [T, K]
    first,  # lowest id
    tokens,  # T
    k,  # K
    experts,  # E
    span,  # tokens in a tile
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Count the pairs for each expert in a tile. Grid: (tiles,)."""
    tile = tl.program_id(0)
    end = tl.minimum((tile + 1) * span, tokens)
    total = count_tile(
        status, ids, first, tile * span, end, k, experts, BLOCK_T, BLOCK_K, BLOCK_E
    )  # fmt: skip
    expert = tl.arange(0, BLOCK_E)
    tl.store(counts + tile * experts + expert, total, mask=expert < experts)


@triton.jit(do_not_specialize=["first", "pairs", "span"])
def place_pairs(
    offsets,  # int32 [E + 1]
    order,  # int32 [pairs]
    inverse,  # int32 [pairs]
    counts,  # int32 [tiles, E]; None for one tile, which is counted here
    status,  # int32 [T]
    ids,  # int32 [pairs]
    first,  # lowest id
    pairs,  # T * K
    k,  # K
    experts,  # E
    span,  # pairs in a tile
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Assign a place to each pair in a tile. Grid: (tiles,)."""
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    expert = tl.arange(0, BLOCK_E)
    total = tl.zeros((BLOCK_E,), tl.int32)
    before = tl.zeros((BLOCK_E,), tl.int32)
    if counts is None:
        total = count_tile(
            status, ids, first, 0, pairs // k, k, experts, BLOCK_T, BLOCK_K, BLOCK_E
        )  # fmt: skip
    else:
        for start in range(0, tiles, BLOCK):
            other = start + tl.arange(0, BLOCK)
            mask = (other < tiles)[:, None] & (expert < experts)[None, :]
            count = tl.load(counts + other[:, None] * experts + expert[None, :], mask=mask, other=0)
            total += tl.sum(count, axis=0)
            before += tl.sum(tl.where((other < tile)[:, None], count, 0), axis=0)
    begin = tl.cumsum(total, axis=0) - total
    good_pairs = tl.sum(total, axis=0)
    if tile == 0:
        tl.store(offsets + expert, begin, mask=expert < experts)
        tl.store(offsets + experts, good_pairs)
    place_of_next = begin + before
    first_pair = tile * span
    place_of_bad = good_pairs + first_pair - tl.sum(before, axis=0)
    end = tl.minimum(first_pair + span, pairs)
    for start in range(first_pair, end, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        id = tl.load(ids + pair, mask=pair < end, other=0) - first
        good = (pair < end) & (id >= 0) & (id < experts)
        mine = (good[:, None] & (id[:, None] == expert[None, :])).to(tl.int32)
        above = tl.cumsum(mine, axis=0) - mine
        place = tl.sum(mine * (place_of_next[None, :] + above), axis=1)
        bad = ((pair < end) & (good == 0)).to(tl.int32)
        bad_place = place_of_bad + tl.cumsum(bad, axis=0) - bad
        tl.store(order + tl.where(good, place, bad_place), pair, mask=pair < end)
        tl.store(inverse + pair, tl.where(good, place, -1), mask=pair < end)
        place_of_next += tl.sum(mine, axis=0)
        place_of_bad += tl.sum(bad, axis=0)


class Permutation(NamedTuple):
    """The T * k pairs (token, expert), sorted by expert. Pair t * k + c is choice c of token t.

    Attributes:
        offsets: int32 [E + 1]; expert e has the places offsets[e] to offsets[e + 1] - 1.
        order: int32 [T * k]; the pair at each place. An expert's pairs keep their order; pairs with
            an unknown expert come last, from place offsets[E] on.
        inverse: int32 [T, k]; the place of each pair, or -1 if its expert does not exist.
        status: int32 [T]; 1 if any id of the token is outside [0, E), else 0.
    """

    offsets: Tensor
    order: Tensor
    inverse: Tensor
    status: Tensor


def sort_by_expert(ids: Tensor, experts: int, first: int = 0) -> Permutation:
    """Sort pairs (token, expert) by expert; the sort is stable.

    Args:
        ids: int32 [T, k], contiguous; any values. A token may have the same expert twice.
        experts: E.
        first: id of expert 0; the others follow.

    Raises:
        KernelError: the ids' shape or dtype, or the expert count, is not supported.
    """
    check = functools.partial(require, "sort_by_expert")
    shape = list(ids.shape)
    fits = len(shape) == 2 and 1 <= shape[1] <= MAX_TOP_K
    check("ids's shape", shape, fits, f"be [T, k], k from 1 to {MAX_TOP_K}")
    require_tensor(check, "ids", ids, tuple(shape), ids.device, torch.int32)
    require_counts(check, 1, experts=experts)
    require_counts(check, 0, first=first)
    check("experts", experts, experts <= MAX_EXPERTS, f"be at most {MAX_EXPERTS}")
    (tokens, k), pairs = shape, ids.numel()
    check("ids's size", pairs, pairs <= MAX_PAIRS, f"be at most {MAX_PAIRS}")
    inverse, status, order = torch.empty_like(ids), ids.new_empty(tokens), ids.new_empty(pairs)
    if not pairs:
        return Permutation(ids.new_zeros(experts + 1), order, inverse, status)
    offsets = ids.new_empty(experts + 1)
    few = pairs <= FEW_PAIRS
    span = tokens if few else max(-(-TILE_PAIRS // k), -(-tokens // MAX_TILES))
    tiles = -(-tokens // span)
    counts = None if few else ids.new_empty(tiles, experts)
    block_e, block_k = triton.next_power_of_2(experts), triton.next_power_of_2(k)
    block = min(128, max(16, MATRIX // block_e))
    block_t, warps = max(1, block // block_k), min(16, max(1, block * block_e // 1024))
    if counts is not None:
        count_pairs[(tiles,)](
            counts=counts,
            status=status,
            ids=ids,
            first=first,
            tokens=tokens,
            k=k,
            experts=experts,
            span=span,
            BLOCK_T=block_t,
            BLOCK_K=block_k,
            BLOCK_E=block_e,
            num_warps=warps,
        )
    place_pairs[(tiles,)](
        offsets=offsets,
        order=order,
        inverse=inverse,
        counts=counts,
        status=status,
        ids=ids,
        first=first,
        pairs=pairs,
        k=k,
        experts=experts,
        span=span * k,
        BLOCK=block,
        BLOCK_T=block_t,
        BLOCK_K=block_k,
        BLOCK_E=block_e,
        num_warps=warps,
    )
    return Permutation(offsets, order, inverse, status)
