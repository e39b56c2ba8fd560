"""What happened before what: events, and what each program knows of (vector clocks).

A program of a launch is a thread of its own, as on a GPU. Launches of one stream
follow each other, so a program that knows of one launch of a stream knows of all
that came before it: a clock counts launches, and names single programs only of
those launches that are not known to be over (Lamport 1978; FastTrack: Flanagan and
Freund 2009).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from weft.kernels.interpreter.gpu import Program

Stream = tuple[int, int]
"""(rank, 0 or 1); or (rank, NETWORK), whose launches are what the rank has put."""

NETWORK = 2
LEAVES, COMES, SIGNALS = (0, 0, 0), (1, 0, 0), (2, 0, 0)
"""Programs of a put: what reads its source, what stores its data, and what sets its signal."""

Task = tuple[Stream, int, Program]
"""A program: (stream, launch, index)."""

Access = Literal["load", "store", "atomic", "poll", "take"]
"""A poll is an atomic that changes nothing; a take loads words that carry their own signal."""


@dataclass(slots=True)
class Clock:
    """What has happened before, as far as one program knows.

    Attributes:
        launches: of each stream, how many launches are over.
        tasks: of programs in launches that are not known to be over, how many events.
    """

    launches: dict[Stream, int] = field(default_factory=dict)
    tasks: dict[Task, int] = field(default_factory=dict)

    def join(self, other: Clock) -> None:
        """Know what `other` knows, too."""
        for stream, count in other.launches.items():
            self.launches[stream] = max(count, self.launches.get(stream, 0))
        for task, time in other.tasks.items():
            self.tasks[task] = max(time, self.tasks.get(task, 0))

    def copy(self) -> Clock:
        return Clock(dict(self.launches), dict(self.tasks))

    def knows(self, event: Event) -> bool:
        """Whether the event is over."""
        stream, launch, _ = event.task
        return self.launches.get(stream, 0) > launch or self.tasks.get(event.task, -1) >= event.time


@dataclass(frozen=True, slots=True)
class Event:
    """An access: which program's, the how manieth, and where in its code."""

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
    """One over the network, knowing what was known when it was issued."""

    stream: Stream
    number: int
    clock: Clock
    where: str

    def event(self, program: Program, kind: Access) -> Event:
        return Event((self.stream, self.number, program), 0, kind, self.where)

    def after(self, *programs: Program) -> Clock:
        """What is known when these programs of it are through."""
        clock = self.clock.copy()
        clock.tasks.update(((self.stream, self.number, program), 0) for program in programs)
        return clock
