"""Decode steps as CUDA graphs: recorded once for each size, and then launched as one.

A step in which each request has one token takes the same kernels with the same shapes, but
for the number of requests. That is padded to one of a few sizes (`buckets`), for each of
which the model was run once while its launches were recorded. A step copies its numbers to
the buffers that the recording reads, and replays it.

What a replay must not depend on:
- how many requests there are. Rows beyond them are tokens with page -1, of which nothing is
  written to the cache, of requests with a context of 0, which read nothing from it and are
  given zeros. Rows never look at each other, but for experts' sorting, which drops none.
- how long contexts are. Kernels read lengths on the device; grids and splits of the keys are
  those of the longest context that there may be.
- the host. Whether a wait for another rank has run out is read after the replay, with its
  results; and workspaces' counts of calls are on the device, so that a replay is a call as
  any other (kernels/gpu/runtime/workspace.py).

All graphs share one pool of memory, for they run one after the other, the largest one first; and
they copy their results to the same memory, for what a graph returns is nobody else's while it is
there: with 35 sizes up to 256 requests that would be 4231 rows of logits.
On a CPU there is nothing to record: a replay calls the model on the same buffers.

Not handled: stages, copies of attention and context parallel: steps of these are not recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from weft.kernels.cpu.attention import AttentionPlan
from weft.kernels.gpu.attention.inputs import PagedBatch
from weft.models.interface import StepInput
from weft.models.spec.layout import Layout
from weft.models.torch.inputs import PagedPlan, StepTensors, put, rows_of
from weft.models.torch.logits import Logits

STEP = 8
"""Between buckets."""

MOST_REQUESTS = 256
"""Of the largest: with more, launches no longer count."""

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Forward:
    """What the model makes of a step's tokens.

    Attributes:
        hidden: [T, hidden].
        logits: [T, vocab_size].
    """

    hidden: Tensor
    logits: Logits


def buckets(layout: Layout, max_num_seqs: int, max_num_batched_tokens: int) -> list[int]:
    """Numbers of requests to record a step for; none in layouts that are not handled.

    Up to the first that is not below `max_num_seqs`, and none above `max_num_batched_tokens`, for
    which the ranks' workspaces are made.
    """
    if not layout.pp == layout.dp_size == layout.cp == 1:
        return []
    sizes = [1, 2, 4, *range(STEP, MOST_REQUESTS + 1, STEP)]
    enough = (size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1] < max_num_seqs)
    return [size for size in enough if size <= max_num_batched_tokens]


class Graphs:
    """Recorded steps.

    Args:
        forward: runs the model. Reads nothing from the device.
        device: of the model.
        sizes: numbers of requests that steps are recorded for.
        block_size: tokens in a page.
        max_model_len: most tokens of a request.
        log: whether this rank tells how far recording is.
    """

    def __init__(
        self,
        forward: Callable[[StepTensors], Forward],
        device: torch.device,
        *,
        sizes: Sequence[int],
        block_size: int,
        max_model_len: int,
        log: bool = True,
    ) -> None:
        width = -(-max_model_len // block_size)
        self._inputs = {size: _inputs(size, width, max_model_len, device) for size in sorted(sizes)}
        self._forward, self._device, self._log = forward, device, log
        self._replays: dict[int, Callable[[], Forward]] = {}
        self._results: list[Tensor] = []

    def record(self) -> None:
        """Record all sizes, after the KV cache has been allocated. Collective."""
        pool = None
        if self._device.type == "cuda":
            pool = torch.cuda.graph_pool_handle()
        for number, (size, inputs) in enumerate(reversed(self._inputs.items()), 1):
            run = partial(self._run, inputs)
            self._replays[size] = run if pool is None else recorded(run, pool)
            if pool is not None and self._log:
                logger.info("CUDA graph %d of %d: %d requests", number, len(self._inputs), size)

    def _run(self, inputs: StepTensors) -> Forward:
        """The model's result, in memory that all sizes share."""
        out = self._forward(inputs)
        made, rows = (out.hidden, out.logits.local), len(out.hidden)
        if not self._results or len(self._results[0]) < rows:
            self._results = [torch.empty_like(x) for x in made]
        for kept, x in zip(self._results, made, strict=True):
            kept[:rows].copy_(x)
        hidden, logits = (kept[:rows] for kept in self._results)
        return Forward(hidden, Logits(logits, out.logits.shape[1], out.logits.group))

    def replay(self, batch: StepInput, plan: AttentionPlan) -> Forward | None:
        """Run a step; None if it is none that was recorded.

        Returns:
            of the requests of the step; valid until the next step.
        """
        requests = len(batch.context_len)
        size = next((size for size in self._inputs if size >= requests), None)
        if size is None or size not in self._replays or (np.diff(plan.query_start) != 1).any():
            return None
        to, paged = self._inputs[size], self._inputs[size].plan.batch
        width = plan.block_table.shape[1]
        if width > paged.block_table.shape[1]:
            return None
        table = rows_of(plan.block_table, size, 0)
        staged = put(
            self._device,
            rows_of(batch.token_ids, size, 0),
            rows_of(batch.positions, size, 0),
            rows_of(plan.pages.numpy(), size, -1),
            rows_of(plan.slots.numpy(), size, 0),
            rows_of(plan.context_len, size, 0),
            table,
        )
        places = (to.token_ids, to.positions, to.plan.pages, to.plan.slots, paged.context_len)
        for place, numbers in zip((*places, paged.block_table[:, :width]), staged, strict=True):
            place.copy_(numbers)
        out = self._replays[size]()
        return Forward(out.hidden[:requests], out.logits.some(slice(requests)))


def recorded(run: Callable[[], Result], pool: object) -> Callable[[], Result]:
    """A CUDA graph of a call: it returns the same memory, with new contents, each time."""
    run()  # loads the kernels, and has ranks agree on what they call
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads of this process (NCCL's, another rank's) may go on as they like.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # type: ignore[arg-type]
        result = run()

    def replay() -> Result:
        graph.replay()
        return result

    return replay


def _inputs(size: int, width: int, max_context: int, device: torch.device) -> StepTensors:
    """Buffers of so many requests, none of which is there."""

    def filled(value: int, *shape: int) -> Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=device)

    starts = torch.from_numpy(np.arange(size + 1, dtype=np.int32)).to(device)
    paged = PagedBatch(
        *(starts, filled(0, size), filled(0, size, width), filled(0, size)),
        max_queries=1,
        max_context=max_context,
    )
    plan = PagedPlan(filled(-1, size), filled(0, size), paged)
    return StepTensors(filled(0, size), filled(0, size), plan)
