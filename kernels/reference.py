"""Oracles: every op in plain torch, written to be obviously right.

The kernels are tested against this file. It therefore prefers loops over one token at a time to
anything clever, computes in float32 or better, and never serves a request. Each function has the
shapes of its kernel, which may return a lower precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply x [T, K] by weight [N, K] transposed and add bias [N]: float32 [T, N]."""
    out = x.float() @ weight.float().T
    return out if bias is None else out + bias.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize by the root mean square over the last axis (Zhang and Sennrich 2019): float32."""
    x = x.float()
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight.float()


def layer_norm(x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
    """Subtract the mean, then normalize as `rms_norm`, and add bias (Ba et al. 2016): float32."""
    x = x.float()
    out = rms_norm(x - x.mean(dim=-1, keepdim=True), weight, eps)
    return out if bias is None else out + bias.float()


def rope(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Apply rotary positions (Su et al. 2021), in Hugging Face's half-split layout.

    Args:
        x: [T, H, D]; coordinates i and i + D/2 rotate together.
        positions: int [T].
        inv_freq: float [D/2], radians per position.

    Returns:
        float32 [T, H, D].
    """
    out = torch.empty(x.shape, dtype=torch.float32)
    half = x.shape[-1] // 2
    for t, position in enumerate(positions.tolist()):
        angle = position * inv_freq.float()
        first, second = x[t, :, :half].float(), x[t, :, half:].float()
        out[t, :, :half] = first * angle.cos() - second * angle.sin()
        out[t, :, half:] = second * angle.cos() + first * angle.sin()
    return out


def quantize(x: Tensor, group: int = 0) -> tuple[Tensor, Tensor]:
    """Quantize to float8_e4m3fn, with a scale for each row or for each `group` columns of a row.

    A scale is the largest magnitude divided by 448, the format's largest number; 1 for zeros.

    Args:
        x: [T, N].
        group: columns that share a scale; 0 takes whole rows.

    Returns:
        float8_e4m3fn [T, N], and float32 [T], or [T, ceil(N / group)].
    """
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    parts = range(0, x.shape[1], group or x.shape[1])
    scale = torch.ones(len(x), len(parts))
    for t in range(len(x)):
        for i, first in enumerate(parts):
            columns = slice(first, first + (group or x.shape[1]))
            part = x[t, columns].float()
            if part.any():
                scale[t, i] = part.abs().max() / 448.0
            out[t, columns] = (part / scale[t, i]).to(out.dtype)
    return out, scale if group else scale[:, 0]


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    query_start: Sequence[int],
    context_len: Sequence[int],
    block_table: Sequence[Sequence[int]],
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Compute causal attention for a ragged batch over a paged KV cache.

    Request b owns the query rows query_start[b]:query_start[b + 1], which end its context_len[b]
    tokens. Its token j lies in page block_table[b][j // block_size] at offset j % block_size. With
    a window, token i sees the tokens j with i - window < j <= i.

    Args:
        q: [T, H, D].
        keys, values: [num_blocks, Hk, block_size, D]; query head h reads head h // (H / Hk).
        query_start: [B + 1].
        context_len: [B].
        block_table: [B, n].
        scale: multiplies the scores.
        sliding_window: size of the window; None sees all.
        softcap: scores become softcap * tanh(score / softcap) (Gemma 2).
        sinks: [H], an additional score per head without a value (gpt-oss).
        k_scale, v_scale: [Hk]; multiply keys and values.
        lse: float32 [T, H], written: the log of the sum of exp(score), including the sink's.

    Returns:
        float32 [T, H, D].
    """
    block_size = keys.shape[2]
    group = q.shape[1] // keys.shape[1]
    out = torch.empty(*q.shape[:2], values.shape[3])
    for b, context in enumerate(context_len):
        queries = query_start[b + 1] - query_start[b]
        for n in range(queries):
            row, last = query_start[b] + n, context - queries + n
            first = 0 if sliding_window is None else max(0, last - sliding_window + 1)
            tokens = [
                (block_table[b][j // block_size], j % block_size) for j in range(first, last + 1)
            ]
            for head in range(q.shape[1]):
                kv = head // group
                k = torch.stack([keys[page, kv, offset] for page, offset in tokens]).float()
                v = torch.stack([values[page, kv, offset] for page, offset in tokens]).float()
                k = k if k_scale is None else k * k_scale[kv]
                v = v if v_scale is None else v * v_scale[kv]
                scores = k @ q[row, head].float() * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head, None].float()])
                out[row, head] = torch.softmax(scores, dim=0)[: len(v)] @ v
                if lse is not None:
                    lse[row, head] = torch.logsumexp(scores, dim=0)
    return out


def mla_decode_attention(
    q: Tensor,
    latents: Tensor,
    query_start: Sequence[int],
    context_len: Sequence[int],
    block_table: Sequence[Sequence[int]],
    *,
    kv_lora_rank: int,
    scale: float,
    kv_scale: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Compute multi-head latent attention with absorbed projections: float32 [T, H, kv_lora_rank].

    Latents [num_blocks, block_size, D] are all heads' keys, and their first kv_lora_rank numbers
    are the values. All other arguments are as in `paged_attention`.
    """
    keys = latents[:, None]
    values, step = keys[..., :kv_lora_rank], (query_start, context_len, block_table)
    return paged_attention(
        *(q, keys, values, *step), scale=scale, k_scale=kv_scale, v_scale=kv_scale, lse=lse
    )


def route(
    logits: Tensor,
    top_k: int,
    *,
    normalize: bool,
    scoring: str = "softmax",
    bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose each token's best experts (Shazeer et al. 2017), from its best groups only.

    A group's score is its best expert's score, or with a bias the sum of its two best (DeepSeek-V3,
    section 2.1.2). The bias only affects the choice. Among equals, the lowest index wins.

    Args:
        logits: [T, E].
        top_k: experts per token.
        normalize: divide a token's weights by their sum.
        scoring: "softmax" over the experts, or "sigmoid" for each.
        bias: [E].
        groups: number of groups, each with E / groups consecutive experts.
        top_groups: number of groups to choose from.
        scale: multiplies the final weights.

    Returns:
        ids int32 [T, top_k], best first, and weights float32 [T, top_k].
    """
    tokens, experts = logits.shape
    ids = torch.empty(tokens, top_k, dtype=torch.int32)
    weights = torch.empty(tokens, top_k)
    for t in range(tokens):
        logit = logits[t].double()
        scores = logit.softmax(0) if scoring == "softmax" else logit.sigmoid()
        # A softmax keeps the logits' order, but can make different logits equal.
        biased = scores.float() if bias is None else scores.float() + bias.float()
        if scoring == "softmax" and bias is None:
            biased = logit
        ranking = biased.tolist()
        members = list(torch.arange(experts).chunk(groups))
        quality = [
            sum(
                sorted((ranking[e] for e in group.tolist()), reverse=True)[
                    : 1 if bias is None else 2
                ]
            )
            for group in members
        ]
        best_groups = sorted(range(groups), key=lambda g: (-quality[g], g))[:top_groups]
        allowed = [e for g in best_groups for e in members[g].tolist()]
        chosen = sorted(allowed, key=lambda e: (-ranking[e], e))[:top_k]
        ids[t] = torch.tensor(chosen)
        weight = scores[chosen]
        weights[t] = scale * (weight / weight.sum() if normalize else weight)
    return ids, weights


def sort_by_expert(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort the (token, expert) pairs by expert; stable.

    Args:
        ids: int [T, k].
        experts: E; pairs with an id outside [0, E) come last.

    Returns:
        offsets int32 [E + 1], the start of each expert's pairs;
        order int32 [T * k], the pair at each position;
        inverse int32 [T, k], each pair's position, or -1;
        status int32 [T], 1 for tokens with an id out of range.
    """
    flat = ids.flatten().tolist()
    valid = [0 <= e < experts for e in flat]
    order = sorted(range(len(flat)), key=lambda i: flat[i] if valid[i] else experts)
    offsets = [sum(valid[i] and flat[i] < e for i in order) for e in range(experts + 1)]
    inverse = [order.index(i) if valid[i] else -1 for i in range(len(flat))]
    status = ((ids < 0) | (ids >= experts)).any(dim=1)
    as_int = [torch.tensor(numbers, dtype=torch.int32) for numbers in (offsets, order, inverse)]
    return as_int[0], as_int[1], as_int[2].view(ids.shape), status.to(torch.int32)


def moe(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
) -> Tensor:
    """Run a mixture of SwiGLU experts, one token and expert at a time.

    Args:
        x: [T, K].
        gate, up: [E, I, K].
        down: [E, K, I].
        expert_ids: int [T, k].
        expert_weights: float [T, k].

    Returns:
        float32 [T, K].
    """
    out = torch.zeros(x.shape, dtype=torch.float32)
    for t in range(x.shape[0]):
        for expert, weight in zip(expert_ids[t].tolist(), expert_weights[t], strict=True):
            g, u = linear(x[t], gate[expert]), linear(x[t], up[expert])
            out[t] += weight * linear(g * torch.sigmoid(g) * u, down[expert])
    return out


def moe_routes(
    expert_ids: Sequence[Tensor], slots: Sequence[int]
) -> list[list[tuple[int, int, int]]]:
    """List the tokens for each expert slot: (rank, token, choice), in this order.

    Token t on rank r goes to the ((r + t) mod count)-th slot with its expert. An id without a slot
    goes nowhere.

    Args:
        expert_ids: int [T, k] for each rank.
        slots: the expert in each slot; a rank's slots are consecutive.
    """
    routes: list[list[tuple[int, int, int]]] = [[] for _ in slots]
    for rank, ids in enumerate(expert_ids):
        for token in range(len(ids)):
            for choice, expert in enumerate(ids[token].tolist()):
                replicas = [slot for slot, other in enumerate(slots) if other == expert]
                if replicas:
                    slot = replicas[(rank + token) % len(replicas)]
                    routes[slot].append((rank, token, choice))
    return routes


def moe_dispatch(
    xs: Sequence[Tensor], expert_ids: Sequence[Tensor], slots: Sequence[int]
) -> list[tuple[Tensor, list[int]]]:
    """Send tokens to their experts' ranks: (rows [R, K], offsets [L + 1]) for each rank.

    A rank's slot e has the rows offsets[e]:offsets[e + 1], in the order of `moe_routes`.

    Args:
        xs: [T, K] for each rank; T may differ.
        expert_ids, slots: as in `moe_routes`.
    """
    routes = moe_routes(expert_ids, slots)
    local = len(slots) // len(xs)
    out = []
    for rank in range(len(xs)):
        rows, offsets = [xs[0].new_empty(0, xs[0].shape[1])], [0]
        for route in routes[rank * local : (rank + 1) * local]:
            rows += [xs[source][token : token + 1] for source, token, _ in route]
            offsets.append(offsets[-1] + len(route))
        out.append((torch.cat(rows), offsets))
    return out


def moe_combine(
    ys: Sequence[Tensor],
    expert_ids: Sequence[Tensor],
    weights: Sequence[Tensor],
    slots: Sequence[int],
) -> list[Tensor]:
    """Sum the experts' outputs times the router's weights, for each token in the order of choices.

    Args:
        ys: [R, K] for each rank, in the row order of `moe_dispatch`; more rows may follow.
        expert_ids, slots: as in `moe_routes`.
        weights: float [T, k] for each rank.

    Returns:
        float32 [T, K] for each rank.
    """
    outputs: dict[tuple[int, int, int], Tensor] = {}
    local = len(slots) // len(ys)
    for rank, y in enumerate(ys):
        routes = moe_routes(expert_ids, slots)[rank * local : (rank + 1) * local]
        outputs.update(zip((place for route in routes for place in route), y, strict=False))
    sums = [torch.zeros(len(each), ys[0].shape[1]) for each in weights]
    for (rank, token, choice), output in sorted(outputs.items(), key=lambda item: item[0]):
        sums[rank][token] += weights[rank][token, choice] * output.float()
    return sums


def sampling_distribution(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Tensor:
    """Return the probabilities for sampling from one row of logits: float64 [V].

    Temperature comes first. Then top-k keeps the k most likely tokens (all if top_k is 0). Top-p
    keeps the smallest set of the most likely remaining tokens with a renormalised probability of at
    least top_p (Holtzman et al. 2020). Min-p keeps tokens at least min_p times as likely as the
    most likely one. Tokens that tie with the last kept token are kept.
    """
    if temperature == 0.0:
        return torch.nn.functional.one_hot(logits.argmax(), logits.numel()).double()
    probs = torch.softmax(logits.double() / temperature, dim=0)
    if 0 < top_k < probs.numel():
        probs = _at_least(probs, probs.topk(top_k).values[-1].item())
    if top_p < 1.0:
        mass, threshold = 0.0, 0.0
        for threshold in probs.sort(descending=True).values.tolist():
            mass += threshold
            if mass >= top_p:
                break
        probs = _at_least(probs, threshold)
    return _at_least(probs, min_p * probs.max().item())


def _at_least(probs: Tensor, threshold: float) -> Tensor:
    kept = torch.where(probs >= threshold, probs, 0.0)
    return kept / kept.sum()


def uniform(seed: int, index: int) -> float:
    """Return a seed's index-th number, in [0, 1): SplitMix64 (Steele, Lea and Flood 2014).

    It uses Python's integers, cut to 64 bits after each product.
    """

    def mix(state: int) -> int:
        for bits, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            state = (state ^ (state >> bits)) * factor % 2**64
        return state ^ (state >> 31)

    state = (mix(seed % 2**64) + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    return (mix(state) >> 16) / 2**48


def edit_logits(
    logits: Tensor,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    bias: Mapping[int, float] | None = None,
    ended: Sequence[int] = (),
    allowed: Sequence[int] | None = None,
) -> Tensor:
    """Return one row of logits with penalties, biases and masks applied in this order: float32 [V].

    The repetition penalty divides positive logits of all earlier tokens, and multiplies negative
    ones (Keskar et al. 2019, section 4.1). The others are subtracted for tokens in the output:
    presence once, frequency for each occurrence. Tokens in `ended`, or outside `allowed`, get -inf.
    """
    out = logits.float().clone()
    for token in {*prompt, *output}:
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
        if token in output:
            out[token] = out[token] - presence - frequency * list(output).count(token)
    for token, value in (bias or {}).items():
        out[token] += value
    out[list(ended)] = -torch.inf
    if allowed is not None:
        kept = torch.full_like(out, -torch.inf)
        kept[list(allowed)] = out[list(allowed)]
        out = kept
    return out


def draw(logits: Tensor, u: float, **settings: Any) -> int:
    """Return the first token at which the cumulative `sampling_distribution` exceeds u."""
    mass = sampling_distribution(logits, **settings).cumsum(dim=0)
    return int((mass <= u * mass[-1]).sum())


# Ops over several ranks: inputs and results are lists with one element per rank.


def all_gather(shards: Sequence[Tensor]) -> list[Tensor]:
    """[m, ...] on each rank -> [W * m, ...] on each rank, in rank order."""
    return [torch.cat(list(shards))] * len(shards)


def reduce_scatter(xs: Sequence[Tensor]) -> list[Tensor]:
    """[M, ...] on each rank -> on rank r, the r-th M / W rows of the sum: float32."""
    total = torch.stack([x.float() for x in xs]).sum(dim=0)
    return list(total.chunk(len(xs)))


def all_reduce(xs: Sequence[Tensor]) -> list[Tensor]:
    """Any shape -> the sum over the ranks, on each rank: float32."""
    return [torch.stack([x.float() for x in xs]).sum(dim=0)] * len(xs)


def all_reduce_rms_norm(
    xs: Sequence[Tensor], residuals: Sequence[Tensor], weight: Tensor, eps: float
) -> list[tuple[Tensor, Tensor]]:
    """Add the ranks' sum of xs to the residual, then normalize; all are [T, N].

    Returns:
        for each rank the norm, and the new residual stream, rounded to xs' dtype; float32 [T, N]
            each.
    """
    totals = [
        (total + residual.float()).to(xs[0].dtype).float()
        for total, residual in zip(all_reduce(xs), residuals, strict=True)
    ]
    return [(rms_norm(total, weight, eps), total) for total in totals]


def all_gather_matmul(x_shards: Sequence[Tensor], ws: Sequence[Tensor]) -> list[Tensor]:
    """x_shards [M / W, K] and ws [K, N / W] on each rank -> float32 [M, N / W] on each rank."""
    return [x.float() @ w.float() for x, w in zip(all_gather(x_shards), ws, strict=True)]


def matmul_reduce_scatter(xs: Sequence[Tensor], ws: Sequence[Tensor]) -> list[Tensor]:
    """xs [M, K / W] and ws [K / W, N] on each rank -> float32 [M / W, N] on each rank."""
    return reduce_scatter([x.float() @ w.float() for x, w in zip(xs, ws, strict=True)])


def matmul_all_reduce(xs: Sequence[Tensor], ws: Sequence[Tensor]) -> list[Tensor]:
    """xs [M, K / W] and ws [K / W, N] on each rank -> float32 [M, N] on each rank."""
    return all_reduce([x.float() @ w.float() for x, w in zip(xs, ws, strict=True)])


def epilogue(
    total: Tensor,
    *,
    bias: Tensor | None = None,
    gate_up: str = "",
    residual: Tensor | None = None,
) -> Tensor:
    """Apply the operations after a product: + bias [N], silu(gate) * up, + residual.

    Args:
        total: [M, N].
        bias: [N].
        gate_up: layout of the columns: "alternate" interleaves gate and up, "halves" puts the gate
            first. Empty for neither.
        residual: [M, N], or [M, N / 2] after silu(gate) * up.

    Returns:
        float32, in residual's shape.
    """
    total = total.float()
    if bias is not None:
        total = total + bias.float()
    if gate_up:
        columns = range(total.shape[1] // 2)
        pairs = [
            (2 * i, 2 * i + 1) if gate_up == "alternate" else (i, len(columns) + i) for i in columns
        ]
        gates, ups = total[:, [g for g, _ in pairs]], total[:, [u for _, u in pairs]]
        total = gates * torch.sigmoid(gates) * ups
    return total if residual is None else total + residual.float()


def grouped_matmul(x: Tensor, w: Tensor, offsets: Tensor, x_scale: Tensor | None = None) -> Tensor:
    """Multiply rows offsets[e]:offsets[e + 1] of x [T, K] by w[e], w [E, K, N]: float32 [T, N].

    x may have scales [T, ceil(K / 128)], one per 128 columns. Rows outside all groups are 0.
    """
    if x_scale is not None:
        x = x.float() * x_scale.repeat_interleave(128, dim=1)[:, : x.shape[1]]
    out = torch.zeros(len(x), w.shape[2])
    for e, matrix in enumerate(w):
        begin, end = int(offsets[e]), int(offsets[e + 1])
        out[begin:end] = x[begin:end].float() @ matrix.float()
    return out


def all_gather_grouped_matmul(
    x_shards: Sequence[Tensor], ws: Sequence[Tensor], plans: Sequence[Tensor], top_k: int
) -> list[Tensor]:
    """Multiply all ranks' tokens by each rank's columns of the experts.

    Args:
        x_shards: [m, K] for each rank.
        ws: [E, K, N / W] for each rank.
        plans: int32 [E + 1 + 2 P] for each rank, with P = m * top_k. A plan has E + 1 offsets of
            experts among the pairs, then the pairs (token, choice) as token * top_k + choice, then
            the bits of their weights.
        top_k: experts per token.

    Returns:
        float32 [W * P, N / W] on each rank: for each rank's plan, a row for each pair.
    """
    results = []
    for w in ws:
        parts = []
        for x, plan in zip(x_shards, plans, strict=True):
            pairs = len(x) * top_k
            offsets, order = plan[: len(w) + 1], plan[len(w) + 1 :][:pairs]
            parts.append(grouped_matmul(x[order // top_k], w, offsets))
        results.append(torch.cat(parts))
    return results


def grouped_matmul_reduce_scatter(
    xs: Sequence[Tensor], ws: Sequence[Tensor], plans: Sequence[Tensor], top_k: int
) -> list[Tensor]:
    """Sum all ranks' parts of the experts' results for each rank's tokens: float32 [m, N] each.

    Args:
        xs: [W * P, K / W] for each rank, in the row order of all_gather_grouped_matmul.
        ws: [E, K / W, N] for each rank.
        plans: as in all_gather_grouped_matmul.
        top_k: experts per token.
    """
    experts, size = len(ws[0]), len(xs)
    pairs = len(xs[0]) // size
    results = []
    for rank, plan in enumerate(plans):
        offsets, order = plan[: experts + 1], plan[experts + 1 :][:pairs]
        weights = plan[experts + 1 + pairs :].view(torch.float32)
        parts = [x[rank * pairs :][:pairs] for x in xs]
        products = [grouped_matmul(x, w, offsets) for x, w in zip(parts, ws, strict=True)]
        rows = torch.stack(products).sum(dim=0)
        out = torch.zeros(pairs // top_k, ws[0].shape[2])
        for i in range(int(offsets[0]), int(offsets[-1])):
            pair = int(order[i])
            out[pair // top_k] += weights[pair] * rows[i]
        results.append(out)
    return results


def distributed_decode_attention(
    qs: Sequence[Tensor],
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    context_len: Sequence[int],
    block_tables: Sequence[Sequence[Sequence[int]]],
    query_start: Sequence[int] | None = None,
    **options: Any,
) -> list[Tensor]:
    """Attend with the same queries on all ranks, over pages that are assigned to the ranks in turn.

    Args:
        qs: [T, H, D] for each rank, all alike.
        keys, values: [num_blocks, Hk, block_size, D] for each rank.
        context_len: [B].
        block_tables: [B, n] for each rank; a request's page p is entry p // W on rank p % W.
        query_start: as in `paged_attention`; None means one query per request.
        options: as in `paged_attention`.

    Returns:
        float32 [T, H, D] for each rank.
    """
    size, block_size = len(qs), keys[0].shape[2]
    first = [sum(len(pool) for pool in keys[:rank]) for rank in range(size)]  # in one pool
    table = [
        [first[p % size] + block_tables[p % size][b][p // size] for p in range(pages)]
        for b, pages in enumerate(-(-context // block_size) for context in context_len)
    ]
    starts = query_start or range(len(context_len) + 1)
    pools = torch.cat(list(keys)), torch.cat(list(values))
    return [paged_attention(qs[0], *pools, starts, context_len, table, **options)] * size


def sequence_parallel_attention(
    qs: Sequence[Tensor],
    ks: Sequence[Tensor],
    vs: Sequence[Tensor],
    *,
    scale: float,
    query_start: Sequence[int] | None = None,
    zigzag: bool = False,
    lses: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Compute causal attention among the tokens of all ranks, in rank order.

    Args:
        qs: [m, H, D] for each rank.
        ks, vs: [m, Hk, D] for each rank.
        scale: multiplies the scores.
        query_start: [B + 1]; the starts of the sequences among all tokens, and the end of the last
            one. Later tokens form one more sequence. None means a single sequence.
        zigzag: cut the tokens into 2 W parts, and give rank r the parts r and 2 W - 1 - r.
        lses: float32 [m, H] for each rank, written; as in `paged_attention`.

    Returns:
        float32 [m, H, D] for each rank.
    """
    size, m = len(qs), len(qs[0])
    parts = torch.arange(size * m).chunk(2 * size if zigzag else size)
    rank_tokens = [
        torch.cat([parts[rank], parts[2 * size - 1 - rank]]) if zigzag else parts[rank]
        for rank in range(size)
    ]
    order = torch.cat(rank_tokens).argsort()
    q, k, v = (torch.cat(list(shards))[order] for shards in (qs, ks, vs))
    starts = list(query_start or [0])
    starts += [len(q)] if starts[-1] < len(q) else []
    tables = [list(range(*pair)) for pair in pairwise(starts)]  # in pages of one token
    lengths, lse = [len(table) for table in tables], torch.empty(q.shape[:2])
    pools = k[:, :, None], v[:, :, None]
    out = paged_attention(q, *pools, starts, lengths, tables, scale=scale, lse=lse)
    for rank_lse, tokens in zip(lses or (), rank_tokens, strict=False):
        rank_lse.copy_(lse[tokens])
    return [out[tokens] for tokens in rank_tokens]
