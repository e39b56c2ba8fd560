"""Pipeline stages: hidden states go forward, sampled tokens go back.

    stage 0 ──hidden──► stage 1 ──hidden──► ... last stage
       ▲                                        │
       └──────────── sampled tokens ────────────┘

A rank sends to its peer: the rank at the same position in the other stage. Hidden states go through
a group of the two ranks (gloo between CPUs, NCCL between GPUs). Tokens go through gloo, because the
last stage's host reads them anyway. All ranks receive the same steps and derive the messages from
them. The data therefore travels without headers, in step order. A stage begins its next step while
later stages run this one (Huang et al. 2019, section 2.2, with steps for different requests as
micro-batches; Narayanan et al. 2021, section 2.2).

Between GPUs, NCCL sends and receives on its own streams, one for each rank pair and direction. A
stage computes while its earlier results travel. Only the stream with the step's kernels waits, not
the host.

No deadlock: a rank waits only for data from earlier steps or, from the stage before, from the same
step. Each receive is posted before that wait. The first stage posts a receive for every step's
sampled tokens, and takes them when a later step names them.
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
"""Message tags."""

MAX_PENDING_SENDS = 2
"""Maximum number of pending sends to a slow stage; more would only fill memory."""


class Pipe:
    """This rank's connection to its peers in other stages.

    Args:
        layout: this rank's layout.
        count: called when this rank reaches an exchange with the others.
        device: device of the hidden states.
        before, after: groups with the peer in the stage before and after; None uses the group of
            all ranks.

    Attributes:
        stages: number of stages.
        is_first, is_last: whether tokens are embedded here, and whether they are sampled here.
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
        self._expected: deque[tuple[dist.Work, Tensor, Tensor]] = deque()

    @property
    def waited(self) -> float:
        """Seconds that this rank has waited for other stages; a GPU counts finished waits only."""
        while self._stalls and self._stalls[0][1].query():  # type: ignore[no-untyped-call]
            begin, end = self._stalls.popleft()
            self._waited += begin.elapsed_time(end) / 1000
        return self._waited

    def receive(self, tokens: int, width: int, dtype: torch.dtype) -> Tensor:
        """Receive [tokens, width] in this step, from the stage before."""
        hidden = torch.empty(tokens, width, dtype=dtype, device=self._device)
        self._wait(_not_none(dist.irecv(hidden, self._before, self._group_before, HIDDEN)))
        return hidden

    def send(self, hidden: Tensor) -> None:
        """Send [T, hidden] to the next stage; nobody may write to it any more."""
        self._send(hidden.contiguous(), self._after, self._group_after, HIDDEN)

    def send_back(self, token_ids: Tensor) -> None:
        """Send the last stage's sampled tokens to the first stage: int64 [S], on a CPU."""
        self._send(token_ids, self._first, None, TOKENS)

    def expect_tokens(self, slots: Tensor) -> None:
        """In the first stage: expect this step's tokens for the slots, int64 [S]."""
        if len(slots):
            tokens = torch.empty_like(slots)
            work = _not_none(dist.irecv(tokens, self._last, tag=TOKENS))
            self._expected.append((work, slots, tokens))

    def receive_tokens(self, needed: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """In the first stage: yield slots and their tokens by step, both int64 [S] on a CPU.

        Stops after the newest token for each slot in `needed`. Tokens that arrived long ago are
        yielded as well.
        """
        count = len(self._expected) - self.stages - 1
        for number, (_, slots, _) in enumerate(self._expected, 1):
            if torch.isin(needed, slots).any():
                count = max(count, number)
        for _ in range(count):
            work, slots, tokens = self._expected.popleft()
            self._wait(work)
            yield slots, tokens

    def close(self) -> None:
        """Wait for pending messages; they arrive once all stages have run the same steps."""
        for work in (
            *(sent[0] for sent in self._sent),
            *(expected[0] for expected in self._expected),
        ):
            work.wait()

    def _send(self, x: Tensor, rank: int, group: dist.ProcessGroup | None, tag: int) -> None:
        while len(self._sent) >= MAX_PENDING_SENDS:
            self._wait(self._sent.popleft()[0])
        self._sent.append((_not_none(dist.isend(x, rank, group, tag)), x))

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


def _not_none(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank belongs to the group"
    return work
