"""Counts of one scheduler since it started, for /metrics."""

from __future__ import annotations

from dataclasses import dataclass

from weft.models.interface import StepOutput
from weft.serving.engine.protocol import EngineStats
from weft.serving.engine.scheduler.request import Request


@dataclass(slots=True)
class Counters:
    """Totals that only grow.

    Attributes:
        requests: requests that were added.
        submitted, finished: steps that were scheduled, and steps that have come back.
        step_seconds: time that finished steps took on the device.
        compilations: kernels or programs compiled during these steps.
        busiest_expert_rows, mean_expert_rows: see StepOutput.expert_rows.
        preemptions: number of times that a request lost its blocks to an earlier one.
        prefix_queries: tokens of admitted requests that were looked up in the prefix cache.
        prefix_hits: number of these tokens that were found.
        prompt_tokens, generation_tokens: prompt tokens of admitted requests, and sampled tokens.
    """

    requests: int = 0
    submitted: int = 0
    finished: int = 0
    step_seconds: float = 0.0
    compilations: int = 0
    busiest_expert_rows: float = 0.0
    mean_expert_rows: float = 0.0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0

    def finish(self, result: StepOutput) -> None:
        """Count a step that has come back."""
        self.finished += 1
        self.step_seconds += result.seconds
        self.compilations += result.compilations
        busiest, mean = result.expert_rows
        self.busiest_expert_rows += busiest
        self.mean_expert_rows += mean

    def prefix_lookup(self, request: Request) -> None:
        """Count a lookup for a request; its `computed` tokens were found."""
        self.prefix_queries += len(request)
        self.prefix_hits += request.computed

    def stats(self, *, running: int, waiting: int, blocks_used: int, blocks: int) -> EngineStats:
        """Return the counts as a message, beside the present state of requests and blocks."""
        return EngineStats(
            running=running,
            waiting=waiting,
            kv_blocks_used=blocks_used,
            kv_blocks_total=blocks,
            prefix_queries=self.prefix_queries,
            prefix_hits=self.prefix_hits,
            preemptions=self.preemptions,
            steps=self.finished,
            step_seconds=self.step_seconds,
            compilations=self.compilations,
            busiest_expert_rows=self.busiest_expert_rows,
            mean_expert_rows=self.mean_expert_rows,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
        )
