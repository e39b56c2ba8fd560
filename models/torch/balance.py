"""Moves experts between ranks, so that all ranks get about as many tokens.

This is expert parallelism load balancing (EPLB, DeepSeek-AI 2025). Each rank has slots for a few
more experts than its own share, so experts with many tokens are on several ranks. In turn:

    count     INTERVAL steps. Each dispatch adds the rows that each slot receives, on the device,
              in a kernel that it launches anyway
    measure   all ranks gather the counts. A copy to the host begins, and nobody waits for it
    read      READ_AFTER steps later the copy is long complete
    move      one layer before each step: if a better placement pays, experts go to their new slots

All ranks count the same steps, read the same counts and choose the same placements, so they do the
same things before the same steps. Weights and tables keep their addresses, so recorded CUDA graphs
stay valid. A token's outputs are the same wherever its experts are.

Experts go one weight at a time: a rank sends from its slots, receives in a buffer, and then copies
to its slots. The buffer has room for one weight of a layer's experts.

Not handled: counts of each engine apart (each balances alone); experts whose load has changed
within INTERVAL steps.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft.kernels.gpu.experts.placement import Placement, Tables, balanced
from weft.models.torch.gpu_layers import DispatchWorkspace, Experts
from weft.models.torch.group import Group
from weft.models.torch.results import Results

logger = logging.getLogger(__name__)

INTERVAL = 1024
"""Number of steps in which rows are counted."""

READ_AFTER = 16
"""Number of steps between the measurement and its reading."""

FEWEST_ROWS = 64
"""With fewer rows for each slot on average, chance alone makes them unequal."""

LEAST_GAIN = 0.1
"""A placement pays if the busiest rank gets fewer rows by this part of a rank's average."""


class Move(NamedTuple):
    """A slot that gets another expert.

    Attributes:
        source, source_slot: the rank that has the expert, and the slot there.
        rank, slot: the rank that gets it, and the slot there.
    """

    source: int
    source_slot: int
    rank: int
    slot: int


class Balancer:
    """Moves experts between the ranks of a stage. All ranks make it and call it together.

    Args:
        layers: the experts of each layer, placed as the workspace says.
        workspace: their workspace.
        group: the ranks.
    """

    def __init__(
        self, layers: Sequence[Experts], workspace: DispatchWorkspace, group: Group
    ) -> None:
        self._layers, self._workspace, self._group = layers, workspace, group
        placement = workspace.placement
        self._slots = placement.slots_per_rank
        # A row has a multiple of 16 bytes: see Workspace.
        width = self._slots + self._slots % 2
        self._rows = torch.zeros(len(layers), width, dtype=torch.int64, device=workspace.device)
        self._tables = [Tables(placement, workspace.device, rows) for rows in self._rows]
        for experts, tables in zip(layers, self._tables, strict=True):
            experts.tables = tables
        self._steps = 0
        self._reading: Results | None = None
        self._counts: Tensor | None = None  # [W, layers, L]
        self._taken = (0.0, 0.0)
        self._moved = 0

    def restart(self) -> None:
        """Forget what was counted, for example in a warm-up. Collective."""
        self._steps = 0
        self._reading = self._counts = None
        self._rows.zero_()

    def take(self) -> tuple[float, float]:
        """Return the rows of the busiest rank and of an average one, read since the last call."""
        taken, self._taken = self._taken, (0.0, 0.0)
        return taken

    def step(self) -> None:
        """Do what is due before a step. Collective."""
        self._steps += 1
        layer = self._steps - INTERVAL - READ_AFTER
        if self._steps == INTERVAL:
            self._reading = Results(self._rows.device)
            self._counts = self._reading.fetch(self._group.gather(self._rows))
            self._reading.end()
        elif layer == 0 and self._reading is not None:
            self._reading.wait()
        elif layer > 0 and self._counts is not None:
            self._balance(layer - 1, self._counts[:, layer - 1, : self._slots].tolist())
            if layer == len(self._layers):
                if self._moved and self._group.is_first:
                    logger.info("moved the experts of %d layers between ranks", self._moved)
                self._moved = 0
                self.restart()

    def _balance(self, layer: int, counts: list[list[int]]) -> None:
        """Move a layer's experts if it pays; `counts` are each rank's rows by slot."""
        tables = self._tables[layer]
        old, size = tables.placement, self._group.size
        mean, busiest = sum(map(sum, counts)) / size, max(map(sum, counts))
        self._taken = (self._taken[0] + busiest, self._taken[1] + mean)
        if mean < FEWEST_ROWS * self._slots:
            return
        loads = [0] * old.num_experts
        for expert, rows in zip(old.slots, (rows for each in counts for rows in each), strict=True):
            loads[expert] += rows
        new = arranged(old, balanced(loads, size, self._slots))
        if busiest - most_rows(loads, new) < LEAST_GAIN * mean:
            return
        self._moved += 1
        self._workspace.move(new, tables)
        moves = moves_between(old, new)
        for weight in self._layers[layer].weights:
            self._move(weight, moves)

    def _move(self, weight: Tensor, moves: Sequence[Move]) -> None:
        """Move experts to their new slots; `weight` is [L, ...], contiguous."""
        own = self._group.index
        sent = [(weight[m.source_slot], m.rank) for m in moves if m.source == own != m.rank]
        gets = [move for move in moves if move.rank == own]
        buffer = weight.new_empty(len(gets), *weight.shape[1:])
        received = []
        for place, move in zip(buffer, gets, strict=True):
            if move.source == own:
                place.copy_(weight[move.source_slot])
            else:
                received.append((place, move.source))
        self._group.move(sent, received)
        for place, move in zip(buffer, gets, strict=True):
            weight[move.slot].copy_(place)


def most_rows(loads: Sequence[float], placement: Placement) -> float:
    """Return the rows of the busiest rank, if each expert's replicas share its rows equally."""
    counts = Counter(placement.slots)
    shares = [load / counts[expert] for expert, load in enumerate(loads)]
    ranks = range(placement.world_size)
    return max(sum(shares[e] for e in placement.experts(rank)) for rank in ranks)


def arranged(old: Placement, new: Placement) -> Placement:
    """Reorder each rank's slots in `new`, so that experts which stay keep their slots."""
    slots: list[int] = []
    for rank in range(new.world_size):
        coming = list(new.experts(rank))
        kept: list[int | None] = []
        for expert in old.experts(rank):
            stays = expert in coming
            kept.append(expert if stays else None)
            if stays:
                coming.remove(expert)
        rest = iter(coming)
        slots += [next(rest) if expert is None else expert for expert in kept]
    return Placement(tuple(slots), new.world_size)


def moves_between(old: Placement, new: Placement) -> list[Move]:
    """List the slots that get another expert. A rank's own copy is the source if it has one."""
    moves = []
    each = old.slots_per_rank
    for place, (before, after) in enumerate(zip(old.slots, new.slots, strict=True)):
        if before == after:
            continue
        rank, slot = divmod(place, each)
        sources = old.replicas(after)
        near = [source for source in sources if source // each == rank]
        source = near[0] if near else sources[rank % len(sources)]
        moves.append(Move(*divmod(source, each), rank, slot))
    return moves
