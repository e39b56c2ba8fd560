"""Steps with all kernels: after them, Triton compiles nothing while a server serves.

A kernel's constants depend on a step's numbers in four ways:

- Products' tiles are chosen for buckets: up to 16 rows, and up to each power of two
  (kernels/gpu/tuning). Each tile has two variants: for multiples of its rows, and for others.
  Overlapped kernels count one rank's rows.
- Attention has other tiles for few queries, and its own variants for decodes, alone or beside
  prompts.
- Sampled tokens are drawn from the model's logits, or from edited ones in float32.
- Decodes' keys are split among 1, 2, 4, ... programs, by the number of requests and the model's
  longest context.

`tests/models/torch/test_warm_up.py` compares their kernels with those in many other steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec.structs import replace

from weft.models.interface import Int32, SlotSampling, StepInput
from weft.models.spec.layout import Layout

SHORT = 32
"""Maximum length of the first prompt on a GPU."""

SHORTEST = 2
"""Length of the first prompt on a CPU, where a prompt takes much of loading's time."""


def steps(
    layout: Layout,
    *,
    block_size: int,
    max_num_seqs: int,
    max_tokens: int,
    max_model_len: int,
    on_gpu: bool,
    recorded: int,
) -> Iterator[StepInput]:
    """Yield the steps of a warm-up: a short prompt and a decode; on a GPU, all others, too.

    They use block 0 only, before any request owns it.

    Args:
        layout: the rank's.
        block_size: tokens in a KV cache block.
        max_num_seqs: number of slots.
        max_tokens: maximum number of tokens in a step.
        max_model_len: maximum number of tokens in a request.
        on_gpu: Triton compiles the kernels.
        recorded: decodes of at most so many requests are replayed; see graphs.py. With data-
            parallel attention, none is while another group has many tokens.
    """
    tokens = min(SHORT if on_gpu else SHORTEST, block_size, max_tokens)
    changed = SlotSampling(slot=0, temperature=1.0, logit_bias={0: 1.0})
    found = [
        _equal_requests(range(tokens), SlotSampling(slot=0, temperature=1.0)),
        _equal_requests(range(tokens - 1, tokens), changed),
        _equal_requests(range(tokens - 1, tokens), SlotSampling(slot=0)),
    ]
    if on_gpu:
        from weft.models.torch.graphs import MIXED_TOKENS  # needs Triton

        chunks = [(1, range(tokens)) for tokens in prompts(max_tokens)]
        most = min(max_num_seqs, max_tokens)
        if most > recorded or layout.dp_size > 1:
            last = range(max_model_len - 1, max_model_len)
            chunks += [(requests, last) for requests in decodes(most)]
        for requests, positions in chunks:
            blocks = -(-positions.stop // block_size)
            found.append(_equal_requests(positions, requests=requests, blocks=blocks))
        for requests in decodes(min(max_num_seqs - 1, max_tokens - 2)):
            prompt = min(MIXED_TOKENS[-1] + 1, max_tokens - requests, max_model_len)
            queries = np.array([1] * requests + [prompt], np.int32)
            found.append(_step(queries, queries, -(-prompt // block_size)))
    for step in found:
        yield replace(step, group_sizes=layout.dp_size * (step.size,))


def prompts(max_tokens: int) -> list[int]:
    """Return the lengths of prompts to compute, ascending.

    Args:
        max_tokens: maximum number of tokens in a step.
    """
    found = {2, max_tokens}
    bucket = 4
    while bucket < 2 * max_tokens:
        found |= {bucket, bucket * 3 // 4 + 1}
        bucket *= 2
    return sorted(each for each in found if each <= max_tokens)


def decodes(max_requests: int) -> list[int]:
    """Return the numbers of requests with one token each to compute, ascending.

    Args:
        max_requests: maximum number of requests in a step.
    """
    powers = {1 << n for n in range(max_requests.bit_length())}
    return sorted(powers | {max_requests}) if max_requests > 0 else []


def _equal_requests(
    positions: range, *new_slots: SlotSampling, requests: int = 1, blocks: int = 1
) -> StepInput:
    """Make a step with equal requests."""
    each = np.ones(requests, np.int32)
    return _step(len(positions) * each, positions.stop * each, blocks, *new_slots)


def _step(queries: Int32, contexts: Int32, blocks: int, *new_slots: SlotSampling) -> StepInput:
    """Make a step with requests in the first slots; all tokens are 0, all blocks block 0."""
    requests = len(queries)
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    slots = np.arange(requests, dtype=np.int32)
    positions = [np.arange(c - q, c) for q, c in zip(queries, contexts, strict=True)]
    return StepInput(
        step=0,
        token_ids=np.zeros(starts[-1], np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        query_start=starts,
        context_len=contexts,
        block_table=np.zeros((requests, blocks), np.int32),
        slot=slots,
        sample_index=starts[1:] - 1,
        sample_slot=slots,
        output_index=np.zeros(requests, np.int32),
        new_slots=new_slots,
    )
