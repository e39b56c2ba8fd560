"""Builds a step's arrays from the scheduler's choice, and takes prompt log probabilities back out.

Rows are in the scheduler's order: first decodes with one token each, then chunks of known tokens.
A decode's newest token may not have come back yet, so its slot always names it (see
models/interface.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from weft.models.interface import NO_MASK, NONE, Int32, Logprobs, StepInput
from weft.serving.engine.grammar.matcher import Matcher
from weft.serving.engine.scheduler.block_manager import BlockManager, Slots
from weft.serving.engine.scheduler.request import Request, token_logprob
from weft.serving.engine.scheduler.slot_table import SlotTable


@dataclass(frozen=True, slots=True)
class Chunk:
    """A request's known tokens `start` to `stop`, computed in one step."""

    request: Request
    start: int
    stop: int

    @property
    def samples(self) -> bool:
        """True if the chunk reaches the last known token, so the next one is sampled."""
        return self.stop == len(self.request) and self.request.pooling is None


@dataclass(frozen=True, slots=True)
class Part:
    """A request's prompt tokens `start` to `stop`, which a step scores or pools."""

    request: Request
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A submitted step without a result yet.

    Attributes:
        batch: the step's input.
        slots: `batch.slot` in NumPy's index type, which indexes faster.
        sampled: `batch.sample_slot` in the same type.
        reaches_limit: bool[S]; the sampled token is the last one that the request may have.
        chunks: known tokens that it computes.
        scores: prompt tokens that it scores, in the order of `batch.prompt_logprob_index`.
        sums: prompt tokens whose hidden states it sums, in the order of `batch.pool_count`.
    """

    batch: StepInput
    slots: Slots
    sampled: Slots
    reaches_limit: npt.NDArray[np.bool_]
    chunks: list[Chunk]
    scores: list[Part]
    sums: list[Part]


def build_step(
    step: int, decodes: Slots, chunks: list[Chunk], table: SlotTable, kv: BlockManager
) -> StepInFlight:
    """Build a step's arrays.

    Args:
        step: the step's number.
        decodes: int[D]; slots that compute the token they sampled last.
        chunks: known tokens to compute.
        table: counts and grammar matchers by slot.
        kv: block tables, which hold all these tokens.
    """
    n = len(decodes)
    rows = n + len(chunks)
    slots = decodes
    query_start = np.arange(rows + 1, dtype=np.int32)
    if chunks:
        slots = np.empty(rows, np.intp)
        slots[:n] = decodes
        slots[n:] = [c.request.slot for c in chunks]
        query_start[n:] = list(accumulate((c.stop - c.start for c in chunks), initial=n))
    context_len = table.length[slots]
    token_ids = np.empty(query_start[-1], np.int32)
    positions = np.empty_like(token_ids)
    token_ids[:n] = -1 - decodes
    positions[:n] = context_len[:n] - 1
    sampled, sample_index = slots, query_start[1:] - 1
    begins: list[int] = []
    if chunks:
        context_len[n:] = [c.stop for c in chunks]
        begins = query_start[n:-1].tolist()
        for chunk, begin in zip(chunks, begins, strict=True):
            end = begin + chunk.stop - chunk.start
            token_ids[begin:end] = chunk.request.token_ids[chunk.start : chunk.stop]
            positions[begin:end] = np.arange(chunk.start, chunk.stop, dtype=np.int32)
        if not all(c.samples for c in chunks):
            samples = np.ones(rows, np.bool_)
            samples[n:] = [c.samples for c in chunks]
            sampled, sample_index = slots[samples], sample_index[samples]

    masked, token_mask = _mask(sampled, table.matchers) if table.matchers else (NONE, NO_MASK)
    scores, score_index = _score(chunks, begins)
    sums, pool_index = _pool(chunks, begins)
    targets = [t for s in scores for t in s.request.token_ids[s.start : s.stop]]
    batch = StepInput(
        step=step,
        token_ids=token_ids,
        positions=positions,
        query_start=query_start,
        context_len=context_len,
        block_table=kv.table[slots, : kv.num_blocks[slots].max()],
        slot=slots.astype(np.int32),
        sample_index=sample_index,
        sample_slot=sampled.astype(np.int32),
        output_index=table.length[sampled] - table.prompt_length[sampled],
        new_slots=tuple(c.request.sampling() for c in chunks if c.samples),
        prompt_logprob_index=score_index,
        prompt_logprob_target=np.array(targets, np.int32) if targets else NONE,
        prompt_logprob_top=max((s.request.prompt_top for s in scores), default=0),
        pool_index=pool_index,
        pool_count=np.array([s.stop - s.start for s in sums], np.int32) if sums else NONE,
        masked=masked,
        token_mask=token_mask,
    )
    reaches_limit = table.length[sampled] + 1 == table.limit[sampled]
    return StepInFlight(batch, slots, sampled, reaches_limit, chunks, scores, sums)


def _mask(sampled: Slots, matchers: Mapping[int, Matcher]) -> tuple[Int32, Int32]:
    """Return the sampled rows with a grammar, and a token mask for each."""
    rows = [row for row, slot in enumerate(sampled.tolist()) if slot in matchers]
    if not rows:
        return NONE, NO_MASK
    masks = [matchers[slot].mask for slot in sampled[rows].tolist()]
    return np.array(rows, np.int32), np.stack(masks)


def _score(chunks: list[Chunk], begins: list[int]) -> tuple[list[Part], Int32]:
    """Return prompt tokens to score, and their rows: token p's row scores token p + 1.

    Args:
        chunks: known tokens that the step computes.
        begins: each chunk's first row.
    """
    scores = []
    rows: list[int] = []
    for chunk, begin in zip(chunks, begins, strict=True):
        request = chunk.request
        if request.prompt_logprobs is None:
            continue
        first = max(chunk.start, request.scored)
        end = min(chunk.stop, request.prompt_length - 1)
        if first < end:
            rows += range(first - chunk.start + begin, end - chunk.start + begin)
            scores.append(Part(request, first + 1, end + 1))
            request.scored = end
    return scores, np.array(rows, np.int32) if rows else NONE


def _pool(chunks: list[Chunk], begins: list[int]) -> tuple[list[Part], Int32]:
    """Return prompt tokens for pooling, and their rows; see `_score`."""
    sums = []
    rows: list[int] = []
    for chunk, begin in zip(chunks, begins, strict=True):
        request = chunk.request
        if request.pooling is None:
            continue
        first = max(chunk.start, request.pooled)
        if first < chunk.stop:
            rows += range(first - chunk.start + begin, chunk.stop - chunk.start + begin)
            sums.append(Part(request, first, chunk.stop))
            request.pooled = chunk.stop
    return sums, np.array(rows, np.int32) if rows else NONE


def take_scores(scores: list[Part], logprobs: Logprobs) -> None:
    """Give each request its prompt tokens' log probabilities."""
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
