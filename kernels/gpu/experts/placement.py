"""Expert placement on ranks: a table that kernels read, so that it can change under them.

There are W ranks, each with L slots. A slot holds the weights for one expert; slot s is
slot s mod L on rank s // L. An expert with many tokens may have several slots, on
several ranks: its replicas. Token t on rank r goes to replica (r + t) mod count, in
slot order. This spreads the tokens within a rank, and also tokens with the same number
on different ranks. The choice does not depend on any other token, and all replicas
compute the same result.

Two tables on the device hold the placement: `replicas` int32 [E, n] lists the slots for
each expert, and `counts` int32 [E] tells how many there are. Both stay at their addresses
when a placement changes, so a captured CUDA graph sees the change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.kernels.gpu.runtime.arguments import require


@dataclass(frozen=True, slots=True)
class Placement:
    """The experts in a layer and their slots.

    Attributes:
        slots: the expert in each slot, rank by rank.
        world_size: number of ranks; each has equally many slots.

    Raises:
        KernelError: ranks have different numbers of slots, or an expert has none.
    """

    slots: tuple[int, ...]
    world_size: int

    def __post_init__(self) -> None:
        size, slots = self.world_size, self.slots
        require("placement", "world_size", size, size > 0, "be at least 1")
        divided = len(slots) > 0 and len(slots) % size == 0
        must = f"be the same number for each of {size} ranks, and at least one"
        require("placement", "slots", f"{len(slots)} in all", divided, must)
        require("placement", "the lowest expert number", min(slots), min(slots) >= 0, "be 0")
        missing = set(range(max(slots) + 1)) - set(slots)
        must = f"be none: each of {max(slots) + 1} experts needs a slot"
        shown = f"expert {min(missing)}" if missing else "none"
        require("placement", "the first without a slot", shown, not missing, must)

    @property
    def num_experts(self) -> int:
        return max(self.slots) + 1

    @property
    def slots_per_rank(self) -> int:
        return len(self.slots) // self.world_size

    @property
    def max_replicas(self) -> int:
        """Maximum replicas for one expert, with these numbers of experts and slots."""
        return len(self.slots) - self.num_experts + 1

    def replicas(self, expert: int) -> list[int]:
        """List an expert's slots, in ascending order."""
        return [slot for slot, other in enumerate(self.slots) if other == expert]

    def ranks(self, expert: int) -> list[int]:
        """List the rank of each replica, in slot order; a rank with two replicas is there twice."""
        return [slot // self.slots_per_rank for slot in self.replicas(expert)]

    def experts(self, rank: int) -> tuple[int, ...]:
        """List the experts whose weights a rank holds, slot by slot."""
        return self.slots[rank * self.slots_per_rank : (rank + 1) * self.slots_per_rank]

    def tables(self) -> tuple[Tensor, Tensor]:
        """Make the tables for kernels: int32 [E, max_replicas], padded with -1; int32 [E]."""
        rows = [self.replicas(expert) for expert in range(self.num_experts)]
        padded = [row + [-1] * (self.max_replicas - len(row)) for row in rows]
        counts = [len(row) for row in rows]
        return torch.tensor(padded, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32)


class Tables:
    """A placement for kernels, on a device.

    Args:
        placement: the first placement.
        device: the device.
        rows: see the attribute.

    Attributes:
        placement: the placement.
        replicas, counts: see `Placement.tables`; they stay at their addresses.
        rows: int64 [L]; dispatches add the number of rows that each slot of this rank receives.
            None if they do not count.
    """

    def __init__(
        self, placement: Placement, device: torch.device, rows: Tensor | None = None
    ) -> None:
        self.placement, self.rows = placement, rows
        self.replicas, self.counts = (table.to(device) for table in placement.tables())

    def set(self, placement: Placement) -> None:
        """Change the placement; it has as many ranks, experts and slots."""
        for table, numbers in zip((self.replicas, self.counts), placement.tables(), strict=True):
            table.copy_(numbers)
        self.placement = placement


def even(num_experts: int, world_size: int) -> Placement:
    """Place each expert once, the first ones on the first rank.

    Raises:
        KernelError: the experts do not divide evenly among the ranks.
    """
    divided = 0 < world_size <= num_experts and num_experts % world_size == 0
    must = f"be a positive multiple of {world_size} ranks, or be placed with replicas"
    require("placement", "num_experts", num_experts, divided, must)
    return Placement(tuple(range(num_experts)), world_size)


def doubled(placement: Placement, copies: int) -> Placement:
    """Add slots to each rank, for the rank's own experts in turn."""
    ranks = (placement.experts(rank) for rank in range(placement.world_size))
    slots = (
        expert
        for own in ranks
        for expert in (*own, *(own[copy % len(own)] for copy in range(copies)))
    )
    return Placement(tuple(slots), placement.world_size)


def balanced(loads: Sequence[float], world_size: int, slots_per_rank: int) -> Placement:
    """Place hot experts several times, so that ranks have about the same load; greedily.

    This is DeepSeek's EPLB (2025) without its groups. Each expert gets one slot; each remaining
    slot goes to the expert with the highest load per replica. Then replicas are assigned, the
    heaviest first. Each goes to the least loaded rank with room, if possible to one without
    that expert. Ties go to the lower number, so all ranks compute the same placement.

    Args:
        loads: tokens routed to each expert.
        world_size: number of ranks.
        slots_per_rank: slots on each rank.

    Raises:
        KernelError: there are more experts than slots.
    """
    slots = world_size * slots_per_rank
    fits = 0 < len(loads) <= slots
    require(
        "placement", "loads", f"of {len(loads)} experts", fits, f"be of 1 to {slots}, one per slot"
    )
    counts = [1] * len(loads)
    for _ in range(slots - len(loads)):
        counts[max(range(len(loads)), key=lambda e: (loads[e] / counts[e], -e))] += 1
    shares = [load / count for load, count in zip(loads, counts, strict=True)]
    order = [e for e, count in enumerate(counts) for _ in range(count)]
    order.sort(key=lambda e: -shares[e])
    held: list[list[int]] = [[] for _ in range(world_size)]
    totals = [0.0] * world_size
    for expert in order:
        open_ranks = [rank for rank in range(world_size) if len(held[rank]) < slots_per_rank]
        chosen = min(open_ranks, key=lambda rank: (expert in held[rank], totals[rank], rank))
        held[chosen].append(expert)
        totals[chosen] += shares[expert]
    return Placement(tuple(e for experts in held for e in sorted(experts)), world_size)
