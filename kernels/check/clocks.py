"""Vector clocks: event order, and each program's knowledge about it.

A program in a launch is a thread of its own, as on a GPU. Launches on one stream follow each other,
so knowledge about one launch includes all earlier ones. A clock therefore counts
launches. It names single programs only in launches not known to be over (Lamport 1978;
FastTrack: Flanagan and Freund 2009).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from weft.kernels.interpreter.gpu import Program

Stream = tuple[int, int]
"""(rank, 0 or 1); or (rank, NETWORK), whose launches are the rank's puts."""

NETWORK = 2
READS_SOURCE, STORES_DATA, SETS_SIGNAL = (0, 0, 0), (1, 0, 0), (2, 0, 0)
"""A put's programs: reading its source, storing its data, and setting its signal."""

Task = tuple[Stream, int, Program]
"""A program: (stream, launch, index)."""

Access = Literal["load", "store", "atomic", "poll", "take"]
"""A poll is an atomic that changes nothing; a take loads words that carry their own signal."""


@dataclass(slots=True)
class Clock:
    """One program's knowledge about earlier events.

    Attributes:
        launches: for each stream, how many launches are over.
        tasks: for each program in a launch not known to be over, how many events it had.
    """

    launches: dict[Stream, int] = field(default_factory=dict)
    tasks: dict[Task, int] = field(default_factory=dict)

    def join(self, other: Clock) -> None:
        """Add the knowledge of `other`."""
        for stream, count in other.launches.items():
            self.launches[stream] = max(count, self.launches.get(stream, 0))
        for task, time in other.tasks.items():
            self.tasks[task] = max(time, self.tasks.get(task, 0))

    def copy(self) -> Clock:
        return Clock(dict(self.launches), dict(self.tasks))

    def knows(self, event: Event) -> bool:
        """True if the event is known to be over."""
        stream, launch, _ = event.task
        return self.launches.get(stream, 0) > launch or self.tasks.get(event.task, -1) >= event.time


@dataclass(frozen=True, slots=True)
class Event:
    """An access: its program, its number in that program, and its place in the code."""

    task: Task
    time: int
    kind: Access
    where: str

    def __str__(self) -> str:
        (rank, second), launch, program = self.task
        if second == NETWORK:
            return f"{self.kind} by put {launch} of rank {rank} at {self.where}"
        beside = " beside" if second else ""
        return (
            f"{self.kind} by rank {rank} (launch {launch}{beside}, program {program}) "
            f"at {self.where}"
        )


@dataclass(frozen=True, slots=True)
class Put:
    """A put over the network, with the clock at its start."""

    stream: Stream
    number: int
    clock: Clock
    where: str

    def event(self, program: Program, kind: Access) -> Event:
        return Event((self.stream, self.number, program), 0, kind, self.where)

    def after(self, *programs: Program) -> Clock:
        """Return the clock after these put programs."""
        clock = self.clock.copy()
        clock.tasks.update(((self.stream, self.number, program), 0) for program in programs)
        return clock
