"""Logits to tokens on a GPU, without a wait for the device: see sampler.py.

The host knows all settings, but not the last tokens. It prepares one number per row and setting,
copies them at once, and launches kernels (kernels/gpu/rowwise/sampling.py). The tokens that
penalties look at stay on the device.

Ranks that share the vocabulary deal out the rows: each one draws from its share of whole rows, and
all ranks gather the tokens. Rows with penalties, biases or masks are copied to float32, a chunk at
a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from weft.kernels.gpu.rowwise.sampling import Changes, How, draw, edit
from weft.models.interface import SlotSampling
from weft.models.memory.activations import CHUNK_LOGITS
from weft.models.torch.draw import Shaping, uniform
from weft.models.torch.inputs import put_as_is
from weft.models.torch.logits import Logits
from weft.models.torch.sampler import Masks, Sampler, changes_logits


class GpuSampler(Sampler):
    """A Sampler whose results stay on the device."""

    HISTORY = torch.int32

    def _put(self, numbers: Sequence[int]) -> Tensor:
        return put_as_is(self._device, np.array(numbers, np.int64))[0]

    def _choose(
        self,
        logits: Logits,
        settings: Sequence[SlotSampling],
        index: Sequence[int],
        masks: Masks | None,
        finite: Tensor,
        token_ids: Tensor,
    ) -> None:
        mask_of = {} if masks is None else {row: i for i, row in enumerate(masks.rows)}
        edited = [i for i, s in enumerate(settings) if i in mask_of or changes_logits(s, index[i])]
        is_edited = {*edited}
        plain = [i for i, s in enumerate(settings) if s.temperature > 0.0 and i not in is_edited]
        rows = plain + edited
        if not rows:
            return
        at, group = self._put(rows), logits.group
        x, place, own = logits.local, rows, rows
        if group.size > 1:
            x = logits.deal(at)
            own = rows[group.index * len(x) : (group.index + 1) * len(x)]
            place = list(range(len(own)))
        drawn = token_ids.new_zeros(len(own) if group.size == 1 else len(x))
        chosen, indices = [settings[i] for i in own], [index[i] for i in own]
        masks_of = [mask_of.get(i, -1) for i in own]
        end = sum(i not in is_edited for i in own)
        if end:
            drawn[:end] = self._draw(x, place[:end], chosen[:end], indices[:end])
        step = max(1, CHUNK_LOGITS[self._device.type] // self._vocab_size)
        for start in range(end, len(own), step):
            part = slice(start, min(start + step, len(own)))
            of = place[part], chosen[part], indices[part]
            changed = edit(x, self._changes(*of, masks_of[part], masks))
            drawn[part] = self._draw(changed, range(len(changed)), chosen[part], indices[part])
        if group.size > 1:
            drawn = group.gather(drawn).flatten()[: len(rows)]
        token_ids.index_copy_(0, at, drawn)

    def _draw(
        self,
        x: Tensor,
        rows: Sequence[int],
        settings: Sequence[SlotSampling],
        index: Sequence[int],
    ) -> Tensor:
        """Draw from rows of x: int64 [D]."""
        how = Shaping.of(settings, uniform([s.seed for s in settings], index), self._vocab_size)
        greedy = torch.tensor([s.temperature == 0.0 for s in settings])
        numbers = (
            np.array(rows, np.int32),
            how.temperature.masked_fill_(greedy, 0.0).numpy(),
            how.min_log_weight.numpy(),
            how.top_k.int().numpy(),
            how.tail.numpy(),
            how.u.numpy(),
        )
        at, *on_device = put_as_is(self._device, *numbers)
        return draw(x, at, How(*on_device))

    def _changes(
        self,
        rows: Sequence[int],
        settings: Sequence[SlotSampling],
        index: Sequence[int],
        mask: Sequence[int],
        masks: Masks | None,
    ) -> Changes:
        """Prepare the changes to rows; `mask` has each one's mask, or -1."""
        prompt_end, output_end = np.zeros((2, len(rows)), np.int32)
        penalties = np.ones((3, len(rows)), np.float32)
        tokens: list[int] = []
        bias: list[float] = []
        ends = [0]
        for i, s in enumerate(settings):
            if s.needs_history:
                prompt_end[i] = self._prompt_len[s.slot]
                output_end[i] = prompt_end[i] + index[i]
                penalties[:, i] = s.repetition_penalty, s.presence_penalty, s.frequency_penalty
            inside = {t: b for t, b in s.logit_bias.items() if 0 <= t < self._vocab_size}
            ended = self._end_tokens[s.slot] if index[i] < s.min_tokens else []
            tokens += [*inside, *ended]
            bias += [*inside.values(), *(-math.inf for _ in ended)]
            ends.append(len(tokens))
        if self._history.shape[1] == 0:
            self._reserve_history(1)
        if masks is None:
            bits = torch.zeros(
                1, -(-self._vocab_size // 32), dtype=torch.int32, device=self._device
            )
        else:
            bits = masks.bits
        smallest = float(np.finfo(np.float32).tiny)  # avoids -inf x 0
        penalties[0] = penalties[0].clip(min=smallest)
        on_device = put_as_is(
            self._device,
            np.array(rows, np.int32),
            np.array([s.slot for s in settings], np.int32),
            prompt_end,
            output_end,
            penalties,
            np.array(tokens or [0], np.int32),
            np.array(bias or [0.0], np.float32),
            np.array(ends, np.int32),
            np.array(mask, np.int32),
        )
        at, *lists, of_row = on_device
        return Changes._make([at, self._history, *lists, bits, of_row])
