"""What the stages of a model send each other: hidden states on, sampled tokens back.

    stage 0 ──hidden──► stage 1 ──hidden──► ... last stage
       ▲                                        │
       └──────────── sampled tokens ────────────┘

A rank sends to the one that has its place in the other stage: hidden states through a group of
the two, gloo's between CPUs and NCCL's between GPUs; tokens, which the last stage's host reads in
any case, through gloo. All ranks are given the same steps and know from them what comes, so that
the numbers travel alone, in the order of the steps. A stage begins its next step while later
stages run this one (Huang et al. 2019, section 2.2, with steps of different requests for
micro-batches; Narayanan et al. 2021, section 2.2).

Between GPUs NCCL sends and receives on streams of its own, one for each pair of ranks, in one
direction: a stage computes while what it has made before is on its way. Who waits is the stream
that the step's kernels are launched on, and not the host.

No deadlock: a rank waits only for what others send in earlier steps or, from the stage before,
in the same step, and whoever receives has said so by then. The first stage says with each step
that it wants what is sampled in it, and takes it when a later step names it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from weft.models.spec.layout import Layout

CPU = torch.device("cpu")

HIDDEN, TOKENS = 0, 1
"""Tags of what travels."""

AHEAD = 2
"""Sends under way to a stage that lags, at most: more would be memory that waits."""


class Pipe:
    """The ranks that have this one's place in other stages.

    Args:
        layout: of this rank.
        count: to be called when this rank comes to an exchange with the others.
        device: of hidden states.
        before, after: groups with the rank in the stage before this one, and in the next one; None
            for that of all ranks.

    Attributes:
        stages: how many there are.
        is_first, is_last: whether tokens are looked up here; and whether they are sampled here.
    """

    def __init__(
        self,
        layout: Layout,
        count: Callable[[], None] = lambda: None,
        device: torch.device = CPU,
        before: dist.ProcessGroup | None = None,
        after: dist.ProcessGroup | None = None,
    ) -> None:
        size = layout.stage_size
        self.stages = layout.pp
        self.is_first, self.is_last = layout.stage == 0, layout.stage == layout.pp - 1
        self._before, self._after = layout.rank - size, layout.rank + size
        self._first = layout.rank % size
        self._last = self._first + (layout.pp - 1) * size
        self._count = count
        self._device = device
        self._group_before, self._group_after = before, after
        self._waited = 0.0
        self._stalls: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        self._coming: deque[tuple[dist.Work, Tensor, Tensor]] = deque()

    @property
    def waited(self) -> float:
        """Seconds that this rank has waited for other stages, in all; a GPU, as far as it is."""
        while self._stalls and self._stalls[0][1].query():  # type: ignore[no-untyped-call]
            begin, end = self._stalls.popleft()
            self._waited += begin.elapsed_time(end) / 1000
        return self._waited

    def receive(self, tokens: int, width: int, dtype: torch.dtype) -> Tensor:
        """[tokens, width], which the stage before this one sends in this step."""
        hidden = torch.empty(tokens, width, dtype=dtype, device=self._device)
        self._wait(_begun(dist.irecv(hidden, self._before, self._group_before, HIDDEN)))
        return hidden

    def send(self, hidden: Tensor) -> None:
        """Send [T, hidden], which nobody writes to any more, on to the next stage."""
        self._send(hidden.contiguous(), self._after, self._group_after, HIDDEN)

    def send_back(self, token_ids: Tensor) -> None:
        """Send what the last stage has sampled in this step to the first: int64 [S], of a CPU."""
        self._send(token_ids, self._first, None, TOKENS)

    def expect(self, slots: Tensor) -> None:
        """In the first stage: this step's tokens for the slots int64 [S] will be sent back."""
        if len(slots):
            tokens = torch.empty_like(slots)
            work = _begun(dist.irecv(tokens, self._last, tag=TOKENS))
            self._coming.append((work, slots, tokens))

    def sampled(self, named: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """In the first stage: slots and their tokens, int64 [S] of a CPU both, step by step.

        Until the newest token of every slot in `named` is there; what came long ago comes, too.
        """
        until = len(self._coming) - self.stages - 1
        for number, (_, slots, _) in enumerate(self._coming, 1):
            if torch.isin(named, slots).any():
                until = max(until, number)
        for _ in range(until):
            work, slots, tokens = self._coming.popleft()
            self._wait(work)
            yield slots, tokens

    def close(self) -> None:
        """Wait for what is under way: once all stages have run the same steps, it arrives."""
        for work in (*(sent[0] for sent in self._sent), *(coming[0] for coming in self._coming)):
            work.wait()

    def _send(self, x: Tensor, rank: int, group: dist.ProcessGroup | None, tag: int) -> None:
        while len(self._sent) >= AHEAD:
            self._wait(self._sent.popleft()[0])
        self._sent.append((_begun(dist.isend(x, rank, group, tag)), x))

    def _wait(self, work: dist.Work) -> None:
        self._count()
        if self._device.type == "cuda":
            begin, end = _event(), _event()
            begin.record()
            work.wait()
            end.record()
            self._stalls.append((begin, end))
            return
        started = time.perf_counter()
        work.wait()
        self._waited += time.perf_counter() - started


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is one of the group"
    return work
