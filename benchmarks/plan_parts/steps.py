"""Steps of a real executor, timed one at a time.

A step's requests have the contexts that a case asks for, in cache pages of their own. What the
pages hold does not matter for the time, so no prompt is computed to fill them.

A step runs again until its fastest runs agree, or the time is up. The figure is their median.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from itertools import count

import numpy as np

from weft.models.interface import NONE, StepInput
from weft.models.plan.batch import Batch
from weft.serving.executor.base import Executor

FASTEST = 4
"""Number of runs that must agree."""
FEWEST = 2
"""Number of runs at least."""
AGREE = 1.05
"""They agree if the slowest takes at most this many times as long as the fastest."""
PATIENCE = 3.0
"""Seconds for one case, if its runs do not agree."""
FILL_ROWS = 256
"""Requests in a step that fills pages."""


@dataclass(frozen=True, slots=True)
class Case:
    """A step to time.

    Attributes:
        decodes: requests with one token each.
        context: tokens in the cache after the step, for each of them.
        prompts: requests with several tokens.
        tokens: tokens in each of them.
        before: tokens that each of them has in the cache already.
    """

    decodes: int = 0
    context: int = 0
    prompts: int = 0
    tokens: int = 0
    before: int = 0

    @property
    def cached(self) -> int:
        """Tokens in the cache after the step."""
        return self.decodes * self.context + self.prompts * (self.before + self.tokens)


@dataclass(frozen=True, slots=True)
class Timed:
    """A case's seconds.

    Attributes:
        case: the step.
        batch: its work, as the planner sees it.
        seconds: median of the fastest runs.
    """

    case: Case
    batch: Batch
    seconds: float


class Steps:
    """Runs steps on an executor.

    Args:
        executor: nothing else may use it.
        block_size: tokens in a page.
        vocab_size: tokens are drawn from [0, vocab_size).
    """

    def __init__(self, executor: Executor, block_size: int, vocab_size: int) -> None:
        self._executor = executor
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(0)
        self._numbers = count()

    def fill(self, blocks: int) -> None:
        """Write a token to each page; before, pages are not in memory."""
        for start in range(0, blocks, FILL_ROWS):
            rows = min(FILL_ROWS, blocks - start)
            table = np.arange(start, start + rows, dtype=np.int32)[:, None]
            self._run(self._input(np.ones(rows, int), np.ones(rows, int), table, sampled=False))

    def time(self, case: Case) -> Timed:
        """Run a case until its fastest runs agree."""
        counts = np.array([1] * case.decodes + [case.tokens] * case.prompts)
        context = np.array(
            [case.context] * case.decodes + [case.before + case.tokens] * case.prompts
        )
        pages = -(-context // self._block_size)
        table = np.zeros((len(counts), pages.max()), np.int32)
        for row, (first, own) in enumerate(zip(np.cumsum(pages) - pages, pages, strict=True)):
            table[row, :own] = np.arange(first, first + own)
        runs: list[float] = []
        while len(runs) < FEWEST or (sum(runs) < PATIENCE and not _agree(runs)):
            step = self._input(counts, context, table, sampled=True)
            runs.append(self._run(step))
        return Timed(case, Batch.of([step]), statistics.median(sorted(runs)[:FASTEST]))

    def _run(self, step: StepInput) -> float:
        begin = time.perf_counter()
        self._executor.submit((step,)).result()
        return time.perf_counter() - begin

    def _input(
        self, counts: np.ndarray, context: np.ndarray, table: np.ndarray, *, sampled: bool
    ) -> StepInput:
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        total = int(starts[-1])
        positions = np.arange(total) - np.repeat(starts[:-1] + counts - context, counts)
        slots = np.arange(len(counts), dtype=np.int32)
        return StepInput(
            next(self._numbers),
            token_ids=self._random.integers(0, self._vocab_size, total, np.int32),
            positions=positions.astype(np.int32),
            query_start=starts,
            context_len=context.astype(np.int32),
            block_table=table,
            slot=slots,
            sample_index=starts[1:] - 1 if sampled else NONE,
            sample_slot=slots if sampled else NONE,
            output_index=np.zeros_like(slots) if sampled else NONE,
        )


def _agree(runs: list[float]) -> bool:
    fastest = sorted(runs)[:FASTEST]
    return len(fastest) == FASTEST and fastest[-1] <= AGREE * fastest[0]
