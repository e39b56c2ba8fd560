"""Decode steps as CUDA graphs: recorded once for each size, then launched as one.

Steps in which each request has one token launch the same kernels; only the number of requests
changes the shapes. That number is padded to one of a few sizes (`buckets`), and for each size the
model's launches are recorded once. A step copies its numbers to the buffers that the recording
reads, and replays it.

A replay must not depend on:
- the number of requests. Padding rows are tokens with page -1, so nothing is written to the cache.
  Their requests have an empty context, so they read nothing from it and get zeros. Rows never look
  at each other, except when experts sort them, and sorting drops none.
- the contexts' lengths. Kernels read lengths on the device; grids and key splits are those for the
  maximum context.
- the host. Faults (a wait for another rank timed out) are read after the replay, with its results.
  Workspaces count their calls on the device, so a replay is an ordinary call
  (kernels/gpu/runtime/workspace.py).

All graphs share one memory pool, because they run in turn, the largest one first. They also copy
their results to the same memory, because a graph would otherwise keep its own: 35 sizes up to 256
requests would hold 4231 rows of logits. On a CPU there is nothing to record: a replay calls the
model on the same buffers.

With data-parallel attention, groups replay steps with different sizes: each recorded layer sends
its tokens to their experts once, and so do the other groups' layers. A step in which any group has
more tokens is dispatched in parts, and no group replays it.

Not handled: pipeline stages, context parallel, and data-parallel attention with plain collectives,
where the numbers of tokens shape the exchanges. Such steps are not recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from weft.kernels.cpu.attention import AttentionPlan
from weft.kernels.gpu.attention.inputs import PagedBatch
from weft.models.interface import StepInput
from weft.models.spec.layout import Layout
from weft.models.torch.inputs import ALIGN, PagedPlan, StepTensors, put, rows_of
from weft.models.torch.logits import Logits
from weft.models.torch.overlapped import DISPATCH_TOKENS

BUCKET_STEP = 8
"""Distance between large buckets."""

MAX_REQUESTS = 256
"""Largest bucket; with more requests, launch time no longer matters."""

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Forward:
    """The model's output for a step's tokens.

    Attributes:
        hidden: [T, hidden].
        logits: [T, vocab_size].
    """

    hidden: Tensor
    logits: Logits


def buckets(
    layout: Layout, max_num_seqs: int, max_num_batched_tokens: int, *, overlapped: bool
) -> list[int]:
    """List the numbers of requests to record steps for; empty for unsupported layouts.

    The list ends at the first bucket that reaches `max_num_seqs`. No bucket exceeds
    `max_num_batched_tokens`, because the ranks' workspaces are made for that.
    """
    if not layout.pp == layout.cp == 1 or (layout.dp_size > 1 and not overlapped):
        return []
    if layout.dp_size > 1:
        max_num_batched_tokens = min(max_num_batched_tokens, DISPATCH_TOKENS)
    sizes = [1, 2, 4, *range(BUCKET_STEP, MAX_REQUESTS + 1, BUCKET_STEP)]
    needed = (size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1] < max_num_seqs)
    return [size for size in needed if size <= max_num_batched_tokens]


def recorded_inputs(
    device: torch.device, sizes: Sequence[int], block_size: int, max_model_len: int
) -> tuple[Tensor, dict[int, StepTensors]]:
    """Make the buffers that recordings read; see Graphs.

    Returns:
        the vectors in the largest ones; see `_inputs`;
        the buffers by number of requests.
    """
    width = -(-max_model_len // block_size)
    vectors, most = _inputs(max(sizes, default=0), width, max_model_len, device)
    return vectors, {size: _first(size, most) for size in sorted(sizes)}


class Graphs:
    """Recorded steps.

    Args:
        forward: runs the model; must not read from the device.
        device: the model's device.
        sizes: numbers of requests to record steps for.
        block_size: tokens in a page.
        max_model_len: maximum number of tokens in a request.
        dp_size: number of data-parallel attention groups.
        log: whether this rank logs the progress.
    """

    def __init__(
        self,
        forward: Callable[[StepTensors], Forward],
        device: torch.device,
        *,
        sizes: Sequence[int],
        block_size: int,
        max_model_len: int,
        dp_size: int = 1,
        log: bool = True,
    ) -> None:
        self._vectors, self._inputs = recorded_inputs(device, sizes, block_size, max_model_len)
        self._forward, self._device, self._log = forward, device, log
        self._most = DISPATCH_TOKENS if dp_size > 1 else None
        self._replays: dict[int, Callable[[], Forward]] = {}
        self._results: list[Tensor] = []

    def record(self) -> None:
        """Record all sizes, after the KV cache has been allocated. Collective."""
        pool = None
        if self._device.type == "cuda":
            pool = torch.cuda.graph_pool_handle()
        for number, (size, inputs) in enumerate(reversed(self._inputs.items()), 1):
            run = partial(self._run, inputs)
            self._replays[size] = run if pool is None else capture(run, pool)
            if pool is not None and self._log:
                logger.info("CUDA graph %d of %d: %d requests", number, len(self._inputs), size)

    def _run(self, inputs: StepTensors) -> Forward:
        """Run the model and copy its result to memory that all sizes share."""
        out = self._forward(inputs)
        made, rows = (out.hidden, out.logits.local), len(out.hidden)
        if not self._results or len(self._results[0]) < rows:
            self._results = [torch.empty_like(x) for x in made]
        for kept, x in zip(self._results, made, strict=True):
            kept[:rows].copy_(x)
        hidden, logits = (kept[:rows] for kept in self._results)
        return Forward(hidden, Logits(logits, out.logits.shape[1], out.logits.group))

    def replay(self, batch: StepInput, plan: AttentionPlan) -> Forward | None:
        """Run a recorded step; None if no recording fits.

        Returns:
            the result for the step's requests; valid until the next step.
        """
        requests = len(batch.context_len)
        if self._most and max(size.tokens for size in batch.group_sizes) > self._most:
            return None
        size = next((size for size in self._inputs if size >= requests), None)
        if size is None or size not in self._replays or (np.diff(plan.query_start) != 1).any():
            return None
        paged = self._inputs[size].plan.batch
        width = plan.block_table.shape[1]
        if width > paged.block_table.shape[1]:
            return None
        numbers = (
            rows_of(batch.token_ids, size, 0),
            rows_of(batch.positions, size, 0),
            rows_of(plan.pages.numpy(), size, -1),
            rows_of(plan.slots.numpy(), size, 0),
            rows_of(plan.context_len, size, 0),
        )
        vectors, table = put(self._device, np.stack(numbers), rows_of(plan.block_table, size, 0))
        self._vectors[:, :size].copy_(vectors)
        paged.block_table[:, :width].copy_(table)
        out = self._replays[size]()
        return Forward(out.hidden[:requests], out.logits.select(slice(requests)))


def capture(run: Callable[[], Result], pool: object) -> Callable[[], Result]:
    """Record a call as a CUDA graph; each call returns the same memory with new contents."""
    run()  # loads the kernels, and lets the ranks agree on their calls
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads in this process (NCCL's, another rank's) may continue undisturbed.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # type: ignore[arg-type]
        result = run()

    def replay() -> Result:
        graph.replay()
        return result

    return replay


def _first(size: int, inputs: StepTensors) -> StepTensors:
    """Return the first requests' part of buffers: recordings are never replayed side by side."""
    plan, paged = inputs.plan, inputs.plan.batch
    batch = replace(
        paged,
        query_start=paged.query_start[: size + 1],
        context_len=paged.context_len[:size],
        block_table=paged.block_table[:size],
        status=paged.status[:size],
    )
    return StepTensors(
        inputs.token_ids[:size],
        inputs.positions[:size],
        PagedPlan(plan.pages[:size], plan.slots[:size], batch),
    )


def _inputs(
    size: int, width: int, max_context: int, device: torch.device
) -> tuple[Tensor, StepTensors]:
    """Make buffers for `size` requests, all of them padding.

    Returns:
        int32 [5, >= size], the vectors that each step fills: token ids, positions, pages, slots and
        contexts;
        the buffers, which contain these vectors.
    """

    def filled(value: int, *shape: int) -> Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=device)

    vectors = filled(0, 5, -(-size // ALIGN) * ALIGN)
    token_ids, positions, pages, slots, context_len = (vector[:size] for vector in vectors)
    pages.fill_(-1)
    starts = torch.from_numpy(np.arange(size + 1, dtype=np.int32)).to(device)
    paged = PagedBatch(
        *(starts, context_len, filled(0, size, width), filled(0, size)),
        max_queries=1,
        max_context=max_context,
    )
    return vectors, StepTensors(token_ids, positions, PagedPlan(pages, slots, paged))
