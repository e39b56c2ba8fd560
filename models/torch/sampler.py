"""Logits to tokens, for a whole batch at once.

Per row: penalties, logit bias and suppressed end tokens change the logits;
then temperature, top-k, top-p and min-p shape the distribution, in this order;
then one uniform number picks a token by inverse CDF, in the order of the
vocabulary. `weft.kernels.reference.sampling_distribution` is the oracle.

A row's token is a function of its own logits, settings, seed and output index,
bit for bit: no step of the computation depends on what else is in the batch.
The uniform number is SplitMix64's finaliser (Steele, Lea and Flood 2014)
applied to (seed, output index), so there is no generator state to keep, move
or replay.

The tokens that penalties look at are kept here, on the device, because the
next step is dispatched before the host has seen the newest token.

Speed: a batch of greedy rows is one max. A full sort happens only for a row
whose nucleus has more than NUCLEUS_WIDTHS[-1] tokens.

Not handled: grammars and beam search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from weft.models.interface import FINITE, NOT_FINITE, Logprobs, SlotSampling

TOP_K_WIDTHS = (64, 256, 1024)
"""A row with top-k is cut to the smallest of these widths that is at least twice its k."""

NUCLEUS_WIDTHS = (256, 4096)
"""How many of the most likely tokens are sorted, in turn, to find where top-p ends."""

CDF_BLOCK = 512
LOGPROB_NUMBERS = 1 << 24
"""Log probabilities in one piece of work; bounds temporary memory at 64 MiB."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Attributes:
    token_ids: int64 [S]; in [0, V) even where the row has failed.
    status: int32 [S]; FINITE, or NOT_FINITE where the logits held NaN, +inf or only -inf.
    logprobs: when a row asked; zeros in the rows that did not.
    """

    token_ids: Tensor
    status: Tensor
    logprobs: Logprobs | None


class Sampler:
    """Samples the next token of up to `max_num_seqs` requests, each in its slot.

    Args:
        vocab_size: V, columns of the logits.
        max_num_seqs: number of slots.
        device: where the logits are.
    """

    def __init__(
        self, vocab_size: int, max_num_seqs: int, device: torch.device | str = "cpu"
    ) -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._settings = [SlotSampling(slot) for slot in range(max_num_seqs)]
        self._end_tokens: list[list[int]] = [[] for _ in range(max_num_seqs)]
        # Row: the slot's distinct prompt tokens, then its output tokens. Widened on demand.
        self._history = torch.zeros(max_num_seqs, 0, dtype=torch.int64, device=self._device)
        self._prompt_len = [0] * max_num_seqs

    def set_slots(self, new_slots: tuple[SlotSampling, ...]) -> None:
        """Put new requests, or requests that come back after a preemption, in their slots."""
        for settings in new_slots:
            self._settings[settings.slot] = settings
            # An id beyond the vocabulary cannot be sampled, and must not be an index either.
            self._end_tokens[settings.slot] = [
                token for token in settings.end_token_ids if 0 <= token < self._vocab_size
            ]
            if settings.needs_history:
                prompt = sorted(set(settings.prompt_token_ids))
                tokens = torch.tensor([*prompt, *settings.output_token_ids], dtype=torch.int64)
                self._prompt_len[settings.slot] = len(prompt)
                self._reserve_history(len(tokens))
                self._history[settings.slot, : len(tokens)] = tokens.to(self._device)

    def sample(self, logits: Tensor, slots: Tensor, output_index: Tensor) -> SampledTokens:
        """Sample one token per row.

        Args:
            logits: [S, V], any float dtype; left as it is.
            slots: int64 [S]; each row's slot, no slot twice.
            output_index: int [S]; tokens that the slot's request has sampled before.
        """
        if logits.shape[1] != self._vocab_size:
            raise ValueError(f"logits have {logits.shape[1]} columns, not {self._vocab_size}")
        settings = [self._settings[slot] for slot in slots.tolist()]
        index: list[int] = output_index.tolist()
        # max propagates NaN, and is several times faster than argmax in bfloat16.
        largest, token_ids = logits.max(dim=-1)
        finite = largest.isfinite()
        status = torch.where(finite, FINITE, NOT_FINITE).to(torch.int32)

        rows = [i for i, s in enumerate(settings) if not _is_plain_greedy(s, index[i])]
        if rows:
            chosen = logits[rows].float() if len(rows) < len(settings) else logits.float().clone()
            chosen.masked_fill_(~finite[rows, None], 0.0)
            token_ids[rows] = self._choose(
                chosen, [settings[i] for i in rows], [index[i] for i in rows]
            )
        self._remember(token_ids, settings, index)
        return SampledTokens(token_ids, status, _sampled_logprobs(logits, token_ids, settings))

    def prompt_logprobs(self, logits: Tensor, targets: Tensor, top: int) -> Logprobs:
        """Log probabilities of given tokens: logits [P, V], targets int64 [P]."""
        return _logprobs(logits, targets, top)

    def _choose(
        self, logits: Tensor, settings: Sequence[SlotSampling], index: Sequence[int]
    ) -> Tensor:
        """float32 [R, V], which is overwritten -> int64 [R]."""
        self._penalise(logits, settings, index)
        _add_bias(logits, settings)
        for i, s in enumerate(settings):
            if index[i] < s.min_tokens:
                logits[i, self._end_tokens[s.slot]] = -torch.inf
        token_ids = logits.argmax(dim=-1)
        random = [i for i, s in enumerate(settings) if s.temperature > 0.0]
        if random:
            token_ids[random] = _draw(
                logits if len(random) == len(settings) else logits[random],
                [settings[i] for i in random],
                uniform([settings[i].seed for i in random], [index[i] for i in random]),
            )
        return token_ids

    def _penalise(
        self, logits: Tensor, settings: Sequence[SlotSampling], index: Sequence[int]
    ) -> None:
        """Apply the penalties in place, at the tokens of the rows' histories only."""
        rows = [i for i, s in enumerate(settings) if s.needs_history]
        if not rows:
            return
        prompt_len = [self._prompt_len[settings[i].slot] for i in rows]
        length = [n + index[i] for n, i in zip(prompt_len, rows, strict=True)]
        # One entry per (row, token in its history): flat vectors, as long as all histories.
        entry = torch.repeat_interleave(torch.tensor(length))
        start = torch.tensor([0, *length]).cumsum(0)[:-1]
        column = torch.arange(len(entry)) - start[entry]
        is_output = (column >= torch.tensor(prompt_len)[entry]).to(self._device)
        slot = torch.tensor([settings[i].slot for i in rows])[entry]
        token = self._history[slot.to(self._device), column.to(self._device)]
        row = torch.tensor(rows)[entry].to(self._device)
        repetition, presence, frequency = (
            torch.tensor(
                [
                    (s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
                    for s in (settings[i] for i in rows)
                ]
            )[entry]
            .to(self._device)
            .unbind(-1)
        )
        logit = logits[row, token]
        repeated = torch.where(logit > 0, logit / repetition, logit * repetition)
        # A token that occurs twice is written twice, with the same value; outputs go last, so
        # that theirs stays. Only the frequency penalty counts the occurrences.
        logits[row, token] = repeated
        row, token = row[is_output], token[is_output]
        logits[row, token] = repeated[is_output] - presence[is_output]
        logits.index_put_((row, token), -frequency[is_output], accumulate=True)

    def _remember(
        self, token_ids: Tensor, settings: Sequence[SlotSampling], index: Sequence[int]
    ) -> None:
        rows = [i for i, s in enumerate(settings) if s.needs_history]
        if not rows:
            return
        slots = [settings[i].slot for i in rows]
        columns = [self._prompt_len[slot] + index[i] for slot, i in zip(slots, rows, strict=True)]
        self._reserve_history(max(columns) + 1)
        self._history[slots, columns] = token_ids[rows]

    def _reserve_history(self, length: int) -> None:
        slots, width = self._history.shape
        if length > width:
            wider = self._history.new_zeros(slots, max(length, 2 * width, 256))
            wider[:, :width] = self._history
            self._history = wider


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


def _is_plain_greedy(settings: SlotSampling, index: int) -> bool:
    return (
        settings.temperature == 0.0
        and not settings.needs_history
        and not settings.logit_bias
        and (index >= settings.min_tokens or not settings.end_token_ids)
    )


def _add_bias(logits: Tensor, settings: Sequence[SlotSampling]) -> None:
    entries = [(i, t, bias) for i, s in enumerate(settings) for t, bias in s.logit_bias.items()]
    if entries:
        rows, tokens, biases = zip(*entries, strict=True)
        logits[list(rows), list(tokens)] += torch.tensor(biases, device=logits.device)


def _draw(logits: Tensor, settings: Sequence[SlotSampling], u: Tensor) -> Tensor:
    """Draw from float32 [R, V], which is overwritten, with u [R]: int64 [R].

    A row with a small top-k is first cut to its most likely tokens: a fixed number of them for
    a given k, so that the result does not depend on the other rows.
    """
    token_ids = torch.empty(len(settings), dtype=torch.int64, device=logits.device)
    whole = []
    groups: dict[int, list[int]] = {}
    for i, s in enumerate(settings):
        width = next((w for w in TOP_K_WIDTHS if 2 * s.top_k <= w < logits.shape[1]), 0)
        if s.top_k and width:
            groups.setdefault(width, []).append(i)
        else:
            whole.append(i)
    u = u.to(logits.device)
    for width, rows in groups.items():
        values, ids = (logits if len(rows) == len(settings) else logits[rows]).topk(width)
        k = torch.tensor([settings[i].top_k for i in rows], device=logits.device)
        kth = values.gather(1, k[:, None] - 1)
        # Tokens that tie with the k-th stay in; were there more than fit, use the whole row.
        fits = (values[:, -1:] < kth).flatten().tolist()
        whole += [i for i, fit in zip(rows, fits, strict=True) if not fit]
        ids, order = ids.sort()
        picked = _draw_from(values.gather(1, order), [settings[i] for i in rows], u[rows])
        token_ids[rows] = ids.gather(1, picked[:, None]).flatten()
    if whole:
        token_ids[whole] = _draw_from(
            logits if len(whole) == len(settings) else logits[whole],
            [settings[i] for i in whole],
            u[whole],
        )
    return token_ids


def _draw_from(logits: Tensor, settings: Sequence[SlotSampling], u: Tensor) -> Tensor:
    """Draw from float32 [R, N] by temperature, top-k, top-p and min-p: int64 [R] in [0, N)."""
    device, n = logits.device, logits.shape[1]
    if any(0 < s.top_k < n for s in settings):
        k = torch.tensor([min(s.top_k, n) or n for s in settings], device=device)
        widest = int(k[k < n].max())
        sorted_logits = logits.topk(widest).values
        kth = sorted_logits.gather(1, (k[:, None] - 1).clamp(max=widest - 1))
        kth.masked_fill_(k[:, None] >= n, -torch.inf)
        logits = logits.masked_fill(logits < kth, -torch.inf)
    temperature = torch.tensor([s.temperature for s in settings], device=device)
    temperature.clamp_(min=torch.finfo(torch.float32).tiny)
    # The largest goes to 0 first: a tiny temperature must not turn it into inf.
    probs = ((logits - logits.amax(-1, keepdim=True)) / temperature[:, None]).softmax(-1)
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
    floor = torch.zeros(len(probs), device=probs.device)
    rows = torch.arange(len(probs), device=probs.device)
    for width in (*(w for w in NUCLEUS_WIDTHS if w < probs.shape[1]), probs.shape[1]):
        most_likely = probs[rows].topk(width).values
        mass = most_likely.cumsum(-1, dtype=torch.float64)
        last = (mass < top_p[rows, None]).sum(-1)
        # Rounding may leave the sum of all tokens just short of top_p: the last one ends it.
        done = (last < width) | (width == probs.shape[1])
        end = last.clamp(max=width - 1)[:, None]
        floor[rows[done]] = most_likely.gather(1, end).flatten()[done]
        rows = rows[~done]
        if not len(rows):
            break
    return floor


def _inverse_cdf(probs: Tensor, u: Tensor) -> Tensor:
    """The first token at which the running sum exceeds u x total: [R, N], float64 [R] -> [R].

    In two levels, blocks and then tokens of one block: a running sum over a whole vocabulary
    in float64 would take longer than everything else here.
    """
    padding = -probs.shape[1] % CDF_BLOCK
    blocks = pad(probs, (0, padding)).view(len(probs), -1, CDF_BLOCK)
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


def _sampled_logprobs(
    logits: Tensor, token_ids: Tensor, settings: Sequence[SlotSampling]
) -> Logprobs | None:
    """Log probabilities of the rows that asked; zeros in the others."""
    rows = [i for i, s in enumerate(settings) if s.logprobs >= 0]
    if not rows:
        return None
    asked = _logprobs(logits[rows], token_ids[rows], max(s.logprobs for s in settings))

    def spread(part: npt.NDArray[Any]) -> npt.NDArray[Any]:
        whole = np.zeros((len(settings), *part.shape[1:]), part.dtype)
        whole[rows] = part
        return whole

    return Logprobs(
        spread(asked.chosen), spread(asked.rank), spread(asked.top_ids), spread(asked.top)
    )


def _logprobs(logits: Tensor, token_ids: Tensor, top: int) -> Logprobs:
    """Log probabilities of the logits as they are: [N, V], int64 [N].

    Raises:
        ValueError: top is not in [0, V].
    """
    n, vocab_size = logits.shape
    if not 0 <= top <= vocab_size:
        raise ValueError(f"top is {top}; it must be in [0, {vocab_size}]")
    chosen = torch.empty(n, dtype=torch.float32)
    rank = torch.empty(n, dtype=torch.int32)
    top_ids = torch.empty(n, top, dtype=torch.int32)
    top_logprobs = torch.empty(n, top, dtype=torch.float32)
    step = max(1, LOGPROB_NUMBERS // vocab_size)
    for start in range(0, n, step):
        rows = slice(start, start + step)
        logprobs = logits[rows].float().log_softmax(-1)
        own = logprobs.gather(1, token_ids[rows, None])
        chosen[rows] = own.flatten()
        rank[rows] = (logprobs > own).sum(-1) + 1
        top_logprobs[rows], top_ids[rows] = logprobs.topk(top)
    return Logprobs(chosen.numpy(), rank.numpy(), top_ids.numpy(), top_logprobs.numpy())
