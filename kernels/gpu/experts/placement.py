"""Which rank has which expert: a table that kernels read, so that it can change under them.

Each of W ranks has L slots, and each slot the weights of one expert: slot s is
the (s mod L)-th of rank s // L. An expert may be in several slots, on several
ranks, if many tokens want it: its replicas. Token t of rank r goes to the
((r + t) mod count)-th of an expert's replicas, in the order of their slots, which
spreads the tokens of one rank as well as those that stand alike on all ranks. The
choice does not depend on any other token, and replicas compute the same.

On the device it is `replicas` int32 [E, n], the slots of each expert, and `counts`
int32 [E], how many there are. A workspace keeps them where they are when they
change, and so a captured CUDA graph sees the change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.kernels.gpu.runtime.arguments import require


@dataclass(frozen=True, slots=True)
class Placement:
    """The experts of a layer, and the slots that they are in.

    Attributes:
        slots: the expert in each slot, rank by rank.
        world_size: ranks; each has as many slots.

    Raises:
        KernelError: ranks have different numbers of slots, or an expert has none.
    """

    slots: tuple[int, ...]
    world_size: int

    def __post_init__(self) -> None:
        size, slots = self.world_size, self.slots
        require("placement", "world_size", size, size > 0, "be at least 1")
        divided = len(slots) > 0 and len(slots) % size == 0
        must = f"be as many for each of {size} ranks, and at least one"
        require("placement", "slots", f"{len(slots)} in all", divided, must)
        require("placement", "the least expert", min(slots), min(slots) >= 0, "be 0")
        missing = set(range(max(slots) + 1)) - set(slots)
        must = f"be none: each of {max(slots) + 1} experts needs a slot"
        shown = f"expert {min(missing)}" if missing else "none"
        require("placement", "what has no slot", shown, not missing, must)

    @property
    def num_experts(self) -> int:
        return max(self.slots) + 1

    @property
    def slots_per_rank(self) -> int:
        return len(self.slots) // self.world_size

    @property
    def max_replicas(self) -> int:
        """Of an expert, in any placement of so many experts in so many slots."""
        return len(self.slots) - self.num_experts + 1

    def replicas(self, expert: int) -> list[int]:
        """The slots of an expert, in their order."""
        return [slot for slot, other in enumerate(self.slots) if other == expert]

    def ranks(self, expert: int) -> list[int]:
        """The ranks of an expert's replicas, in their order; one that has two is there twice."""
        return [slot // self.slots_per_rank for slot in self.replicas(expert)]

    def experts(self, rank: int) -> tuple[int, ...]:
        """Those whose weights a rank has, by its slots."""
        return self.slots[rank * self.slots_per_rank : (rank + 1) * self.slots_per_rank]

    def tables(self) -> tuple[Tensor, Tensor]:
        """What kernels read: int32 [E, max_replicas], whose rows end in -1; int32 [E]."""
        rows = [self.replicas(expert) for expert in range(self.num_experts)]
        padded = [row + [-1] * (self.max_replicas - len(row)) for row in rows]
        counts = [len(row) for row in rows]
        return torch.tensor(padded, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32)


def even(num_experts: int, world_size: int) -> Placement:
    """Each expert once, the first ones on the first rank.

    Raises:
        KernelError: the ranks do not divide the experts.
    """
    divided = 0 < world_size <= num_experts and num_experts % world_size == 0
    must = f"be a positive multiple of {world_size} ranks, or be placed with replicas"
    require("placement", "num_experts", num_experts, divided, must)
    return Placement(tuple(range(num_experts)), world_size)


def balanced(loads: Sequence[float], world_size: int, slots_per_rank: int) -> Placement:
    """Hot experts several times, and ranks with about the same load; greedily.

    As DeepSeek's EPLB (2025) without its groups: every slot beyond one for each expert goes to the
    expert with the highest load per replica; then replicas, the heaviest first, go each to the
    least loaded rank that has room, if possible one without that expert. Ties go to the lower
    number, so that all ranks find the same.

    Args:
        loads: of each expert: tokens that wanted it.
        world_size: ranks.
        slots_per_rank: of each.

    Raises:
        KernelError: there are more experts than slots.
    """
    slots = world_size * slots_per_rank
    fits = 0 < len(loads) <= slots
    require(
        "placement", "loads", f"of {len(loads)} experts", fits, f"be of 1 to {slots}, the slots"
    )
    counts = [1] * len(loads)
    for _ in range(slots - len(loads)):
        counts[max(range(len(loads)), key=lambda e: (loads[e] / counts[e], -e))] += 1
    shares = [load / count for load, count in zip(loads, counts, strict=True)]
    order = [e for e, count in enumerate(counts) for _ in range(count)]
    order.sort(key=lambda e: -shares[e])
    held: list[list[int]] = [[] for _ in range(world_size)]
    for expert in order:
        open_ranks = [rank for rank in range(world_size) if len(held[rank]) < slots_per_rank]
        chosen = min(
            open_ranks,
            key=lambda rank: (expert in held[rank], sum(shares[e] for e in held[rank]), rank),
        )
        held[chosen].append(expert)
    return Placement(tuple(e for experts in held for e in sorted(experts)), world_size)
