"""What virtual ranks tell each other in a step, apart from what overlapped kernels do.

    rank 0                          rank 1
    puts x down, and an event       puts x down, and an event        of their streams
    ─────────────────────────── meet ───────────────────────────
    waits for the events            waits for the events
    copies all x; an event          copies all x; an event
    ─────────────────────────── meet ───────────────────────────
    waits for these: from here on x may change

They are threads on one device, which torch.distributed would take for one rank. Streams wait for
the events, and threads for each other only until all have launched.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels.gpu.runtime.launches import is_loading
from weft.kernels.symmetric.memory import Home
from weft.models.torch.group import ALONE, Group, Groups

Table = dict[int, tuple[Tensor, torch.cuda.Event | None]]
"""What each rank has put down last."""


class VirtualGroup(Group):
    """All ranks of a world of threads.

    Args:
        home: this rank's.
        table: of all of them.
    """

    def __init__(self, home: Home, table: Table) -> None:
        super().__init__(range(home.world_size), home.rank, None)
        self._home, self._table = home, table

    def sum(self, x: Tensor) -> Tensor:
        """See Group.sum."""
        return self.gather(x).sum(0, dtype=x.dtype)

    def gather(self, x: Tensor) -> Tensor:
        """See Group.gather. While kernels are only loaded, no rank waits for another."""
        if is_loading():
            return torch.stack([x] * self.size)
        every = torch.stack(self._meet(x))
        self._meet(every)
        return every

    def exchange(self, x: Tensor) -> Tensor:
        """See Group.exchange."""
        return self.gather(x)[:, self.index]

    def _meet(self, x: Tensor) -> list[Tensor]:
        """What all ranks bring, once the device will have it."""
        event = None
        if x.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._table[self.index] = (x, event)
        self._home.exchange("here")
        brought = [self._table[rank] for rank in range(self.size)]
        self._home.exchange("seen")  # nobody brings the next before
        for _, event in brought:
            if event is not None:
                event.wait()
        return [each for each, _ in brought]


def virtual_groups(home: Home, table: Table) -> Groups:
    """Of a rank that has a part of everything, as with --tp alone."""
    group = VirtualGroup(home, table)
    return Groups(group, ALONE.data, group, ALONE.context, ALONE.pipe)
