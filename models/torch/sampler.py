"""Logits to tokens on a CPU, for a whole batch at once; gpu_sampler.py does the same on GPUs.

For each row, penalties change the logits, then logit bias, then the suppression of end tokens, then
the grammar's mask. Finally draw.py shapes the distribution and draws from it.

A row's token is a function of its own logits, settings, seed and output index, bit for bit,
whatever else is in the batch.

The tokens that penalties look at are stored here, on the device, because the next step is
dispatched before the host has seen the newest token. Penalties only touch the logits of those
tokens (edits.py); nothing except the logits is as wide as a vocabulary. A batch of greedy rows is
one max. If ranks share the vocabulary, each changes its own logits, and all sample the same tokens.

Not handled: beam search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from weft.models.interface import FINITE, NOT_FINITE, Logprobs, SlotSampling
from weft.models.memory.activations import CHUNK_LOGITS
from weft.models.torch.draw import draw, draw_in_place, draws_in_place, uniform
from weft.models.torch.edits import Edits, find_edits
from weft.models.torch.logits import Logits

HISTORY_STEP = 256
"""Columns by which the history of all slots grows."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Log probabilities of N tokens; see Logprobs.

    Attributes:
        chosen: float32 [N].
        rank: int32 [N].
        top_ids: int32 [N, k].
        top: float32 [N, k].
    """

    chosen: Tensor
    rank: Tensor
    top_ids: Tensor
    top: Tensor

    def each(self, change: Callable[[Tensor], Tensor]) -> Scores:
        """Change all four tensors."""
        return Scores(*map(change, (self.chosen, self.rank, self.top_ids, self.top)))

    def on_host(self) -> Logprobs:
        """Convert tensors on a CPU; shares their memory."""
        parts = (self.chosen, self.rank, self.top_ids, self.top)
        return Logprobs(*(part.numpy() for part in parts))


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token for each of S rows, on the logits' device.

    Attributes:
        token_ids: int64 [S]; in [0, V) even if the row has failed.
        status: int32 [S]; FINITE, or NOT_FINITE if the logits had NaN, +inf or only -inf.
        logprobs: None if no row asked; zeros in rows that did not ask.
    """

    token_ids: Tensor
    status: Tensor
    logprobs: Scores | None


@dataclass(frozen=True, slots=True)
class Masks:
    """Allowed tokens for some rows.

    Attributes:
        rows: R row indices of the logits, without duplicates.
        bits: int32 [R, ceil(V / 32)], on the logits' device; see `StepInput.token_mask`.
    """

    rows: list[int]
    bits: Tensor

    def select(self, which: Sequence[tuple[int, int]]) -> Masks:
        """Select masks for other logits; pairs are (row in those logits, index of the mask)."""
        rows, numbers = zip(*which, strict=True)
        return Masks(list(rows), self.bits[list(numbers)])

    def apply(self, logits: Logits) -> None:
        """Make all other tokens impossible, in place."""
        own = logits.own
        first = own.start // 32
        words = self.bits[:, first : -(-own.stop // 32)]
        shifts = torch.arange(32, dtype=torch.int32, device=words.device)
        allowed = (words[:, :, None] >> shifts & 1).bool().flatten(1)
        allowed = allowed[:, own.start - first * 32 :][:, : len(own)]
        rows = logits.local[self.rows]
        logits.local[self.rows] = rows.masked_fill_(~allowed, -torch.inf)


class Sampler:
    """Samples the next token for up to `max_num_seqs` requests, each in its slot.

    Args:
        vocab_size: V, columns in the logits.
        max_num_seqs: number of slots.
        device: the logits' device.
    """

    HISTORY = torch.int64

    def __init__(
        self, vocab_size: int, max_num_seqs: int, device: torch.device | str = "cpu"
    ) -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._settings = [SlotSampling(slot) for slot in range(max_num_seqs)]
        self._end_tokens: list[list[int]] = [[] for _ in range(max_num_seqs)]
        # A row has the slot's distinct prompt tokens, then its output tokens. Widened on demand.
        self._history = torch.zeros(max_num_seqs, 0, dtype=self.HISTORY, device=self._device)
        self._prompt_len = [0] * max_num_seqs

    def set_slots(self, new_slots: tuple[SlotSampling, ...]) -> None:
        """Store new requests in their slots, and requests that resume after a preemption."""
        for settings in new_slots:
            self._settings[settings.slot] = settings
            # An id beyond the vocabulary can neither be sampled nor be used as an index.
            self._end_tokens[settings.slot] = [
                token for token in settings.end_token_ids if 0 <= token < self._vocab_size
            ]
            if settings.needs_history:
                prompt = sorted(set(settings.prompt_token_ids))
                tokens = [*prompt, *settings.output_token_ids]
                self._prompt_len[settings.slot] = len(prompt)
                self._reserve_history(len(tokens))
                self._history[settings.slot, : len(tokens)] = self._put(tokens)

    def sample(
        self, logits: Logits, slots: Tensor, output_index: Tensor, masks: Masks | None = None
    ) -> SampledTokens:
        """Sample one token per row.

        Args:
            logits: [S, V].
            slots: int64 [S]; each row's slot, without duplicates.
            output_index: int [S]; tokens that the slot's request has sampled before.
            masks: for rows whose tokens are restricted.
        """
        if logits.shape[1] != self._vocab_size:
            raise ValueError(f"logits have {logits.shape[1]} columns, not {self._vocab_size}")
        settings = [self._settings[slot] for slot in slots.tolist()]
        index: list[int] = output_index.tolist()
        largest, token_ids = logits.argmax()
        finite = largest.isfinite()
        self._choose(logits, settings, index, masks, finite, token_ids)
        self._remember(token_ids, settings, index)
        return SampledTokens(
            token_ids,
            torch.where(finite, FINITE, NOT_FINITE).to(torch.int32),
            sampled_scores(logits, token_ids, settings, self._put),
        )

    def _choose(
        self,
        logits: Logits,
        settings: Sequence[SlotSampling],
        index: Sequence[int],
        masks: Masks | None,
        finite: Tensor,
        token_ids: Tensor,
    ) -> None:
        """Replace the likeliest tokens, int64 [S], in rows that choose otherwise.

        Args:
            logits: [S, V].
            settings: the rows' settings.
            index: tokens that the rows' requests have sampled before.
            masks: as in `sample`.
            finite: bool [S]; rows that have not failed.
            token_ids: int64 [S].
        """
        masked = {} if masks is None else {row: i for i, row in enumerate(masks.rows)}
        special = [
            i
            for i, s in enumerate(settings)
            if s.temperature > 0.0 or i in masked or changes_logits(s, index[i])
        ]
        if draws_in_place(logits):  # no copy of the logits
            is_finite = finite.tolist()
            if rows := [i for i in special if is_finite[i]]:
                chosen, at = [settings[i] for i in rows], [index[i] for i in rows]
                token_ids[rows] = draw_in_place(
                    *(logits, rows, chosen, uniform([s.seed for s in chosen], at)),
                    edits=self._edits(logits.own, chosen, at),
                    masks=None if masks is None else masks.bits,
                    mask_of=[masked.get(row, -1) for row in rows],
                )
            special = [i for i in special if not is_finite[i]]
        step = max(1, CHUNK_LOGITS[logits.local.device.type] // logits.each)
        for start in range(0, len(special), step):
            rows = special[start : start + step]
            selected = Logits(logits.local[rows].float(), self._vocab_size, logits.group)  # a copy
            if not finite[rows].all():
                selected.local.masked_fill_(~finite[rows, None], 0.0)
            masked_rows = [(i, masked[row]) for i, row in enumerate(rows) if row in masked]
            token_ids[rows] = self._choose_from_copy(
                selected,
                [settings[i] for i in rows],
                [index[i] for i in rows],
                None if masks is None or not masked_rows else masks.select(masked_rows),
            )

    def _choose_from_copy(
        self,
        logits: Logits,
        settings: Sequence[SlotSampling],
        index: Sequence[int],
        masks: Masks | None,
    ) -> Tensor:
        """Choose tokens: float32 [R, V], overwritten -> int64 [R]."""
        edits = self._edits(logits.own, settings, index)
        edits.apply(logits.local.view(-1), edits.rows * len(logits.own) + edits.columns)
        if masks is not None:
            masks.apply(logits)
        token_ids = torch.empty(len(settings), dtype=torch.int64, device=self._device)
        greedy = [i for i, s in enumerate(settings) if s.temperature == 0.0]
        if greedy:
            _, token_ids[greedy] = logits.float_rows(greedy).argmax()
        random = [i for i, s in enumerate(settings) if s.temperature > 0.0]
        if random:
            u = uniform([settings[i].seed for i in random], [index[i] for i in random])
            chosen = [settings[i] for i in random]
            token_ids[random] = draw(logits.float_rows(random), chosen, u.to(self._device))
        return token_ids

    def _put(self, numbers: Sequence[int]) -> Tensor:
        """Copy numbers to the device, as int64."""
        return torch.tensor(numbers, dtype=torch.int64)

    def _edits(self, own: range, settings: Sequence[SlotSampling], index: Sequence[int]) -> Edits:
        return find_edits(own, settings, index, self._history, self._prompt_len, self._end_tokens)

    def _remember(
        self, token_ids: Tensor, settings: Sequence[SlotSampling], index: Sequence[int]
    ) -> None:
        rows = [i for i, s in enumerate(settings) if s.needs_history]
        if not rows:
            return
        slots = [settings[i].slot for i in rows]
        columns = [self._prompt_len[slot] + index[i] for slot, i in zip(slots, rows, strict=True)]
        self._reserve_history(max(columns) + 1)
        at = self._put(slots), self._put(columns)
        self._history[at] = token_ids[self._put(rows)].to(self.HISTORY)

    def _reserve_history(self, length: int) -> None:
        slots, width = self._history.shape
        if length > width:
            # In steps: for a stride that is no multiple of 16, Triton compiles a kernel anew.
            columns = -(-max(length, 2 * width) // HISTORY_STEP) * HISTORY_STEP
            wider = self._history.new_zeros(slots, columns)
            wider[:, :width] = self._history
            self._history = wider


def changes_logits(settings: SlotSampling, index: int) -> bool:
    """True if a request's settings change its logits, at this output index."""
    return bool(
        settings.needs_history
        or settings.logit_bias
        or (index < settings.min_tokens and settings.end_token_ids)
    )


def sampled_scores(
    logits: Logits,
    token_ids: Tensor,
    settings: Sequence[SlotSampling],
    put: Callable[[Sequence[int]], Tensor],
) -> Scores | None:
    """Score sampled tokens for the rows that asked; zeros in the others.

    Args:
        logits: [S, V], unchanged.
        token_ids: int64 [S].
        settings: the rows' settings.
        put: copies numbers to the device, as int64.
    """
    rows = [i for i, s in enumerate(settings) if s.logprobs >= 0]
    if not rows:
        return None
    at = put(rows)
    found = score(logits.select(at), token_ids[at], max(s.logprobs for s in settings))

    def spread(part: Tensor) -> Tensor:
        whole = part.new_zeros(len(settings), *part.shape[1:])
        return whole.index_copy_(0, at, part)

    return found.each(spread)


def score(logits: Logits, token_ids: Tensor, top: int) -> Scores:
    """Return log probabilities from unchanged logits: [N, V], int64 [N].

    Raises:
        ValueError: top is not in [0, V].
    """
    n, vocab_size = logits.shape
    if not 0 <= top <= vocab_size:
        raise ValueError(f"top is {top}; it must be in [0, {vocab_size}]")
    device = token_ids.device
    floats, ints = (
        partial(torch.empty, dtype=d, device=device) for d in (torch.float32, torch.int32)
    )
    out = Scores(floats(n), ints(n), ints(n, top), floats(n, top))
    step = max(1, CHUNK_LOGITS[device.type] // logits.each)
    for start in range(0, n, step):
        rows = slice(start, start + step)
        selected = logits.float_rows(rows)
        logit, log_sum, out.rank[rows] = selected.score(token_ids[rows])
        out.chosen[rows] = logit - log_sum
        if top:
            largest, out.top_ids[rows] = selected.top(top)
            out.top[rows] = largest - log_sum[:, None]
    return out
