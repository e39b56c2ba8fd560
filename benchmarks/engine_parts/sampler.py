"""The sampler alone: milliseconds for 16, 64 and 256 rows of 151,936 bfloat16 logits.

The logits are normal with a standard deviation of 3. That is flatter than what
models say: 0.95 of the probability is spread over 13,000 tokens, the slow case
of top-p.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from engine_parts.measure import Case, per_call
from engine_parts.mock import VOCAB_SIZE
from weft.models.interface import SlotSampling
from weft.models.torch.logits import Logits
from weft.models.torch.sampler import Sampler

ROWS = (16, 64, 256)
HISTORY = 256  # tokens that penalties look at: half prompt, half output
KINDS = {
    "greedy": SlotSampling(0),
    "top-k 50, top-p 0.95": SlotSampling(0, temperature=0.8, top_k=50, top_p=0.95),
    "top-p 0.95": SlotSampling(0, temperature=0.8, top_p=0.95),
    "penalties, greedy": SlotSampling(
        0, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5
    ),
}


def _sample(logits: torch.Tensor, kind: SlotSampling) -> Callable[[], object]:
    rows = len(logits)
    sampler = Sampler(VOCAB_SIZE, rows)
    half = HISTORY // 2
    sampler.set_slots(
        tuple(
            replace(
                kind,
                slot=slot,
                seed=slot,
                prompt_token_ids=range(half),
                output_token_ids=range(half, HISTORY),
            )
            for slot in range(rows)
        )
    )
    slots = torch.arange(rows)
    output_index = torch.full((rows,), half)
    return lambda: sampler.sample(Logits.whole(logits), slots, output_index)


@contextmanager
def cases() -> Iterator[list[Case]]:
    """See the module's text."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(max(ROWS), VOCAB_SIZE, generator=generator).mul_(3).bfloat16()

    def case(name: str, rows: int, kind: SlotSampling) -> Case:
        call = _sample(logits[:rows], kind)
        return Case(
            f"{name}, {rows} rows", "ms/step", lambda seconds: per_call(call, seconds) * 1e3
        )

    yield [case(name, rows, kind) for name, kind in KINDS.items() for rows in ROWS]
