"""Steps as CUDA graphs: recorded once for each size, then launched as one.

There are two kinds of recordings. In a decode step each request has one token, and the number of
requests is padded to one of a few sizes. Any other step with few tokens is padded to one of
MIXED_TOKENS: decodes beside the rest of a prompt, for example. Without a recording, the host takes
longer to launch such a step than the device to run it. A step copies its numbers to the buffers
that the recording reads, and replays it.

A replay must not depend on:
- the number of requests and tokens. Padding tokens have page -1, so nothing is written to the
  cache. They belong to requests with an empty context, so they read nothing from it and get zeros.
  In a mixed step, one request more than there can be has all padding tokens; missing requests have
  none. Rows never look at each other, except when experts sort them, and sorting drops none.
- the contexts' and chunks' lengths. Kernels read lengths on the device; grids and key splits are
  those for the maximum.
- the host. Faults (a wait for another rank timed out) are read after the replay, with its results.
  Workspaces count their calls on the device, so a replay is an ordinary call
  (kernels/gpu/runtime/workspace.py).

All graphs share their inputs and one memory pool, because they run in turn, the largest one first.
They also copy their results to the same memory, because a graph would otherwise keep its own: 35
sizes up to 512 requests would hold 5895 rows of logits. A mixed step ends with its hidden states,
since few of them are sampled. On a CPU there is nothing to record: a replay calls the model on the
same buffers.

With data-parallel attention, groups replay steps with different sizes: each recorded layer sends
its tokens to their experts once, and so do the other groups' layers. A step in which any group has
more tokens is dispatched in parts, and no group replays it.

Not handled: pipeline stages, context parallel, and data-parallel attention with plain collectives,
where the numbers of tokens shape the exchanges. Such steps are not recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from weft.kernels.cpu.attention import AttentionPlan
from weft.kernels.gpu.attention.inputs import PagedBatch
from weft.models.interface import StepInput
from weft.models.memory.plan import Recordings
from weft.models.spec.layout import Layout
from weft.models.torch.inputs import ALIGN, PagedPlan, StepTensors, put, rows_of
from weft.models.torch.logits import Logits
from weft.models.torch.overlapped import DISPATCH_TOKENS

DECODE_REQUESTS = (1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, 513, 32))
"""Sizes of decode steps: padding is at most 7 requests or an eighth of the size. With more
requests, launch time no longer matters."""

MIXED_TOKENS = (16, 32, 64, 128, 192, 256, 384, 512)
"""Sizes of mixed steps; with more tokens, the device takes longer than the host."""

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Forward:
    """The model's output for a step's tokens.

    Attributes:
        hidden: [T, hidden].
        logits: [T, vocab_size]; None in a mixed step.
    """

    hidden: Tensor
    logits: Logits | None


def recordings(
    layout: Layout, max_num_seqs: int, max_num_batched_tokens: int, *, overlapped: bool
) -> Recordings:
    """Return the sizes to record; none for unsupported layouts.

    Sizes of decodes end at the first one that reaches `max_num_seqs`. No size exceeds
    `max_num_batched_tokens`, because the ranks' workspaces are made for that.
    """
    if not layout.pp == layout.cp == 1 or (layout.dp_size > 1 and not overlapped):
        return Recordings()
    if layout.dp_size > 1:
        max_num_batched_tokens = min(max_num_batched_tokens, DISPATCH_TOKENS)
    return Recordings(DECODE_REQUESTS, MIXED_TOKENS).within(max_num_seqs, max_num_batched_tokens)


class Graphs:
    """Recorded steps.

    Args:
        forward: runs the model; must not read from the device. A step whose batch has one query at
            most for each request also gets logits.
        device: the model's device.
        sizes: to record.
        max_num_seqs: maximum number of requests in a step.
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
        sizes: Recordings,
        max_num_seqs: int,
        block_size: int,
        max_model_len: int,
        dp_size: int = 1,
        log: bool = True,
    ) -> None:
        pages = -(-max_model_len // block_size)
        self._buffers = Buffers.make(sizes, max_num_seqs, pages, device)
        self._decodes = {
            size: self._buffers.decodes(size, max_model_len) for size in sorted(sizes.decodes)
        }
        self._mixed = {
            size: self._buffers.mixed(size, max_model_len) for size in sorted(sizes.mixed)
        }
        self._forward, self._device, self._log = forward, device, log
        self._max_num_seqs = max_num_seqs
        self._most = DISPATCH_TOKENS if dp_size > 1 else None
        self._replays: dict[tuple[str, int], Callable[[], Forward]] = {}
        self._results: dict[str, Tensor] = {}

    def record(self) -> None:
        """Record all sizes, after the KV cache has been allocated. Collective."""
        pool = None
        if self._device.type == "cuda":
            pool = torch.cuda.graph_pool_handle()
        steps = [("tokens", *step) for step in self._mixed.items()]
        steps += [("requests", *step) for step in self._decodes.items()]
        steps.sort(key=lambda step: step[1], reverse=True)
        for number, (kind, size, inputs) in enumerate(steps, 1):
            run = partial(self._run, inputs)
            self._replays[kind, size] = run if pool is None else capture(run, pool)
            if pool is not None and self._log:
                logger.info("CUDA graph %d of %d: %d %s", number, len(steps), size, kind)

    def _run(self, inputs: StepTensors) -> Forward:
        """Run the model and copy its result to memory that all sizes share."""
        out = self._forward(inputs)
        hidden = self._kept("hidden", out.hidden)
        if out.logits is None:
            return Forward(hidden, None)
        logits = self._kept("logits", out.logits.local)
        return Forward(hidden, Logits(logits, out.logits.shape[1], out.logits.group))

    def _kept(self, name: str, x: Tensor) -> Tensor:
        """Copy a result to the memory for its kind."""
        if name not in self._results or len(self._results[name]) < len(x):
            self._results[name] = torch.empty_like(x)
        return self._results[name][: len(x)].copy_(x)

    def replay(self, batch: StepInput, plan: AttentionPlan) -> Forward | None:
        """Run a recorded step; None if no recording fits.

        Returns:
            the result for the step's tokens; valid until the next step.
        """
        tokens, requests = len(batch.token_ids), len(batch.context_len)
        if self._most and max(size.tokens for size in batch.group_sizes) > self._most:
            return None
        if plan.block_table.shape[1] > self._buffers.table.shape[1]:
            return None
        decodes = tokens == requests
        size = _smallest(self._decodes if decodes else self._mixed, tokens)
        if not size or requests > self._max_num_seqs:
            return None
        if decodes:
            self._buffers.fill(batch, plan, size, size)
            out = self._replays["requests", size]()
            assert out.logits is not None
            return Forward(out.hidden[:requests], out.logits.select(slice(requests)))
        self._buffers.fill(batch, plan, size, _requests(size, self._max_num_seqs))
        return Forward(self._replays["tokens", size]().hidden[:tokens], None)


def _requests(tokens: int, max_num_seqs: int) -> int:
    """Return the requests in a recorded mixed step: as many as there can be, and the padding's."""
    return min(tokens, max_num_seqs) + 1


def _smallest(sizes: Iterable[int], least: int) -> int:
    """Return the first of ascending sizes that is at least `least`; 0 if none is."""
    return next((size for size in sizes if size >= least), 0)


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


@dataclass(frozen=True, slots=True)
class Buffers:
    """Inputs of all recordings, which are never replayed side by side.

    Attributes:
        vectors: int32 [4, >= tokens]; token ids, positions, pages and offsets in them.
        lengths: int32 [2, > requests]; starts of the requests' queries, and contexts.
        table: int32 [requests, pages]; block tables.
        status: int32 [requests].
        each: int32 [tokens + 1]; 0, 1, 2, ...: starts of queries in decodes.
        max_num_seqs: maximum number of requests in a step.
    """

    vectors: Tensor
    lengths: Tensor
    table: Tensor
    status: Tensor
    each: Tensor
    max_num_seqs: int

    @classmethod
    def make(
        cls, sizes: Recordings, max_num_seqs: int, pages: int, device: torch.device
    ) -> Buffers:
        """Allocate them for these recordings; all tokens are padding."""
        tokens = max((*sizes.decodes, *sizes.mixed), default=0)
        mixed = (_requests(size, max_num_seqs) for size in sizes.mixed)
        requests = max((*sizes.decodes, *mixed), default=0)
        zeros = partial(torch.zeros, dtype=torch.int32, device=device)
        vectors = zeros(4, -(-tokens // ALIGN) * ALIGN)
        vectors[2] = -1
        return cls(
            vectors,
            zeros(2, -(-(requests + 1) // ALIGN) * ALIGN),
            zeros(requests, pages),
            zeros(requests),
            torch.arange(tokens + 1, dtype=torch.int32, device=device),
            max_num_seqs,
        )

    def decodes(self, requests: int, max_model_len: int) -> StepTensors:
        """Return the inputs for a decode step."""
        return self._step(requests, requests, self.each, 1, max_model_len)

    def mixed(self, tokens: int, max_model_len: int) -> StepTensors:
        """Return the inputs for another step."""
        requests = _requests(tokens, self.max_num_seqs)
        return self._step(tokens, requests, self.lengths[0], tokens, max_model_len)

    def _step(
        self, tokens: int, requests: int, starts: Tensor, max_queries: int, max_model_len: int
    ) -> StepTensors:
        token_ids, positions, pages, slots = (vector[:tokens] for vector in self.vectors)
        batch = PagedBatch(
            starts[: requests + 1],
            self.lengths[1, :requests],
            self.table[:requests],
            self.status[:requests],
            max_queries=max_queries,
            max_context=max_model_len,
            decodes=requests,
        )
        return StepTensors(token_ids, positions, PagedPlan(pages, slots, batch))

    def fill(self, batch: StepInput, plan: AttentionPlan, tokens: int, requests: int) -> None:
        """Copy a step, padded to these numbers, from the host in one piece."""
        vectors = np.stack(
            (
                rows_of(batch.token_ids, tokens, 0),
                rows_of(batch.positions, tokens, 0),
                rows_of(plan.pages.numpy(), tokens, -1),
                rows_of(plan.slots.numpy(), tokens, 0),
            )
        )
        lengths = np.zeros((2, requests + 1), np.int32)
        lengths[0] = len(batch.token_ids)
        lengths[0, : len(plan.query_start)] = plan.query_start
        lengths[0, requests] = tokens
        lengths[1, : len(plan.context_len)] = plan.context_len
        table = rows_of(plan.block_table, requests, 0)
        staged = put(self.table.device, vectors, lengths, table)
        self.vectors[:, :tokens].copy_(staged[0])
        self.lengths[:, : requests + 1].copy_(staged[1])
        self.table[:requests, : table.shape[1]].copy_(staged[2])
