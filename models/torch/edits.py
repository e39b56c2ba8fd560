"""Changes to few logits in each row: penalties, logit biases, and suppressed end tokens.

An edit is one logit and one reason to change it, so a logit may have several. They are stored by
reason, in the order in which they apply:

    seen      repetition penalty, then presence and frequency penalty if it was sampled
    biased    a bias is added
    ended     -inf, while the output is shorter than min_tokens

The edits of a batch are flat vectors. They need not know whether the logits are a whole matrix, or
only the changed ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft.models.interface import SlotSampling


class Edits(NamedTuple):
    """E edits in R rows; the first vectors have an entry for each.

    Attributes:
        rows, columns: int64 [E]; the logits.
        sizes: numbers of edits for each of the three reasons.
        penalties: float32 [3, seen]; repetition, presence and frequency.
        is_output: bool [seen]; the token was sampled, and is not only in the prompt.
        bias: float32 [biased].
    """

    rows: Tensor
    columns: Tensor
    sizes: tuple[int, int, int]
    penalties: Tensor
    is_output: Tensor
    bias: Tensor

    def apply(self, values: Tensor, at: Tensor) -> None:
        """Change values in place.

        Args:
            values: float32 [N]; with at least the logits that change.
            at: int64 [E]; each edit's place in `values`.
        """
        seen, biased, ended = torch.split(at, list(self.sizes))
        if len(seen):
            repetition, presence, frequency = self.penalties
            logit = values[seen]
            repeated = torch.where(logit > 0, logit / repetition, logit * repetition)
            repeated.clamp_(max=torch.finfo(torch.float32).max)
            # A token that occurs twice is written twice with the same value. Outputs come last, so
            # their values win. Only the frequency penalty counts occurrences.
            values[seen] = repeated
            sampled, out = seen[self.is_output], self.is_output
            values[sampled] = repeated[out] - presence[out]
            values.index_put_((sampled,), -frequency[out], accumulate=True)
        if len(biased):
            values[biased] += self.bias
        values[ended] = -torch.inf


def find_edits(
    own: range,
    settings: Sequence[SlotSampling],
    index: Sequence[int],
    history: Tensor,
    prompt_lengths: Sequence[int],
    end_tokens: Sequence[Sequence[int]],
) -> Edits:
    """Find the edits in R rows.

    Args:
        own: this rank's part of the vocabulary.
        settings: the rows' settings.
        index: number of tokens that each row's request has sampled before.
        history: int64 [slots, n]; each slot's distinct prompt tokens, then its output tokens.
        prompt_lengths: for each slot, the number of prompt tokens in its history.
        end_tokens: for each slot, the tokens that `min_tokens` suppresses.
    """
    device = history.device
    rows, columns, penalties, is_output = _seen(settings, index, history, prompt_lengths)
    biases = [
        (i, token, bias) for i, s in enumerate(settings) for token, bias in s.logit_bias.items()
    ]
    ends = [
        (i, token)
        for i, s in enumerate(settings)
        if index[i] < s.min_tokens
        for token in end_tokens[s.slot]
    ]
    listed = [(i, token) for i, token, _ in biases] + ends
    more = torch.tensor(listed, dtype=torch.int64).view(-1, 2).to(device)
    bias = torch.tensor([bias for *_, bias in biases], dtype=torch.float32).to(device)
    rows, columns = torch.cat((rows, more[:, 0])), torch.cat((columns, more[:, 1]))
    sizes = (len(is_output), len(biases), len(ends))
    # More than one rank: some tokens are elsewhere.
    here = (columns >= own.start) & (columns < own.stop)
    seen, biased, ended = torch.split(here, list(sizes))
    return Edits(
        rows[here],
        columns[here] - own.start,
        (int(seen.sum()), int(biased.sum()), int(ended.sum())),
        penalties[:, seen],
        is_output[seen],
        bias[biased],
    )


def _seen(
    settings: Sequence[SlotSampling],
    index: Sequence[int],
    history: Tensor,
    prompt_lengths: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return rows and columns, penalties and `is_output`, with an entry per token in a history."""
    device = history.device
    rows = [i for i, s in enumerate(settings) if s.needs_history]
    slots = [settings[i].slot for i in rows]
    prompts = torch.tensor([prompt_lengths[slot] for slot in slots], dtype=torch.int64)
    lengths = prompts + torch.tensor([index[i] for i in rows], dtype=torch.int64)
    entry = torch.repeat_interleave(lengths)
    column = torch.arange(len(entry)) - (lengths.cumsum(0) - lengths)[entry]
    penalties = torch.tensor(
        [
            (s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
            for s in (settings[i] for i in rows)
        ],
        dtype=torch.float32,
    ).view(-1, 3)
    penalties[:, 0].clamp_(min=torch.finfo(torch.float32).tiny)  # avoids -inf x 0
    slot = torch.tensor(slots, dtype=torch.int64)[entry].to(device)
    return (
        torch.tensor(rows, dtype=torch.int64)[entry].to(device),
        history[slot, column.to(device)],
        penalties[entry].T.to(device),
        (column >= prompts[entry]).to(device),
    )
