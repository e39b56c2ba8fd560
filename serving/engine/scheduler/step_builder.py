"""One step as arrays: made from what the scheduler chose, and the prompts' parts taken back out.

Rows are in the scheduler's order: decodes first, one token each, then chunks
of tokens that the host knows. The newest token of a decode may not be known
yet, so it is always named by its slot (see models/interface.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from weft.models.interface import NO_MASK, NONE, Int32, Logprobs, StepInput
from weft.serving.engine.grammar.matcher import GrammarMatcher
from weft.serving.engine.scheduler.block_manager import BlockManager, Slots
from weft.serving.engine.scheduler.request import Request, token_logprob


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` to `stop` of a request, which the host knows, in one step."""

    request: Request
    start: int
    stop: int

    @property
    def samples(self) -> bool:
        """Whether it reaches the last known token, so that the next one is sampled."""
        return self.stop == len(self.request) and self.request.pooling is None


@dataclass(frozen=True, slots=True)
class Part:
    """Prompt tokens `start` to `stop` of a request, of which a step tells something."""

    request: Request
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Flight:
    """A step under way.

    Attributes:
        batch: its input.
        scores: whose log probabilities it computes, in the order of `batch.prompt_logprob_index`.
        sums: whose hidden states it sums, in the order of `batch.pool_count`.
    """

    batch: StepInput
    scores: list[Part]
    sums: list[Part]


def build_step(
    step: int,
    decodes: Slots,
    chunks: list[Chunk],
    length: Int32,
    prompt_length: Int32,
    kv: BlockManager,
    guides: Mapping[int, GrammarMatcher],
) -> Flight:
    """Make a step's arrays.

    Args:
        step: its number.
        decodes: int[D]; slots that compute the token they sampled last.
        chunks: known tokens that are computed.
        length: int32[max_num_seqs]; by slot, tokens of the request, those under way included.
        prompt_length: int32[max_num_seqs]; by slot, tokens of the request's prompt.
        kv: whose block tables hold all these tokens.
        guides: by slot, of the requests that have one.
    """
    n = len(decodes)
    slots = np.empty(n + len(chunks), np.int32)
    slots[:n] = decodes
    slots[n:] = [c.request.slot for c in chunks]
    counts = np.ones_like(slots)
    counts[n:] = [c.stop - c.start for c in chunks]
    context_len = length[slots]
    context_len[n:] = [c.stop for c in chunks]
    samples = np.ones(len(slots), np.bool_)
    samples[n:] = [c.samples for c in chunks]
    query_start = np.zeros(len(slots) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])

    token_ids = np.empty(query_start[-1], np.int32)
    positions = np.empty_like(token_ids)
    token_ids[:n] = -1 - decodes
    positions[:n] = context_len[:n] - 1
    begins = query_start[n:-1].tolist()
    for chunk, begin in zip(chunks, begins, strict=True):
        end = begin + chunk.stop - chunk.start
        token_ids[begin:end] = chunk.request.token_ids[chunk.start : chunk.stop]
        positions[begin:end] = np.arange(chunk.start, chunk.stop)

    sample_slot = slots[samples]
    masked, token_mask = _mask(sample_slot, guides) if guides else (NONE, NO_MASK)
    scores, score_index = _score(chunks, begins)
    sums, pool_index = _pool(chunks, begins)
    batch = StepInput(
        step=step,
        token_ids=token_ids,
        positions=positions,
        query_start=query_start,
        context_len=context_len,
        block_table=kv.table[slots, : kv.num_blocks[slots].max()],
        slot=slots,
        sample_index=query_start[1:][samples] - 1,
        sample_slot=sample_slot,
        output_index=length[sample_slot] - prompt_length[sample_slot],
        new_slots=tuple(c.request.sampling() for c in chunks if c.samples),
        prompt_logprob_index=score_index,
        prompt_logprob_target=np.array(
            [t for s in scores for t in s.request.token_ids[s.start : s.stop]], np.int32
        ),
        prompt_logprob_top=max((s.request.prompt_top for s in scores), default=0),
        pool_index=pool_index,
        pool_count=np.array([s.stop - s.start for s in sums], np.int32),
        masked=masked,
        token_mask=token_mask,
    )
    return Flight(batch, scores, sums)


def _mask(sample_slot: Int32, guides: Mapping[int, GrammarMatcher]) -> tuple[Int32, Int32]:
    """The sampled rows whose requests have a guide, and the tokens that each may have."""
    rows = [row for row, slot in enumerate(sample_slot.tolist()) if slot in guides]
    if not rows:
        return NONE, NO_MASK
    masks = [guides[slot].mask for slot in sample_slot[rows].tolist()]
    return np.array(rows, np.int32), np.stack(masks)


def _score(chunks: list[Chunk], begins: list[int]) -> tuple[list[Part], Int32]:
    """Prompt tokens to score, and the rows that do it: token p's row scores token p + 1.

    Args:
        chunks: what the step computes.
        begins: the first row of each.
    """
    scores = []
    rows: list[int] = []
    for chunk, begin in zip(chunks, begins, strict=True):
        request = chunk.request
        first = max(chunk.start, request.scored)
        end = min(chunk.stop, request.prompt_length - 1)
        if request.prompt_logprobs is not None and first < end:
            rows += range(first - chunk.start + begin, end - chunk.start + begin)
            scores.append(Part(request, first + 1, end + 1))
            request.scored = end
    return scores, np.array(rows, np.int32)


def _pool(chunks: list[Chunk], begins: list[int]) -> tuple[list[Part], Int32]:
    """Prompt tokens whose hidden states are summed, and their rows; arguments as of `_score`."""
    sums = []
    rows: list[int] = []
    for chunk, begin in zip(chunks, begins, strict=True):
        request = chunk.request
        first = max(chunk.start, request.pooled)
        if request.pooling is not None and first < chunk.stop:
            rows += range(first - chunk.start + begin, chunk.stop - chunk.start + begin)
            sums.append(Part(request, first, chunk.stop))
            request.pooled = chunk.stop
    return sums, np.array(rows, np.int32)


def take_scores(scores: list[Part], logprobs: Logprobs) -> None:
    """Hand each request the log probabilities of its prompt tokens."""
    row = 0
    for score in scores:
        request = score.request
        tokens = request.token_ids[score.start : score.stop]
        if request.prompt_logprobs is not None:
            request.prompt_logprobs += [
                token_logprob(logprobs, row + i, token, request.prompt_top)
                for i, token in enumerate(tokens)
            ]
        row += len(tokens)
