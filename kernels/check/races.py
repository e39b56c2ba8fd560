"""Finds races between ranks: accesses to symmetric memory with no order between them.

Every program of a launch is a thread of its own here, as on a GPU, whatever the
order in which the interpreter ran them. Order comes from three things (vector
clocks; Lamport 1978, FastTrack: Flanagan and Freund 2009):

- a rank's launches on one stream follow each other: a program comes after all
  programs of the launches before it. What is launched beside is on a second
  stream, until they join (Home.beside), though the interpreter runs it at once;
- a release on a signal, and every acquire that sees it or something later;
- where ranks meet on the host.

Two accesses to the same bytes, one of them a store, from programs without an
order between them are a race, also when the values came out right. Reported
too: memory that is loaded before anyone has stored to it, and signals that
order nothing because they are relaxed or reach only this GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from weft.kernels.check import interpreter
from weft.kernels.check.interpreter import Array, Kind, Program
from weft.kernels.symmetric.memory import SymmetricTensor

Int32 = npt.NDArray[np.int32]
Stream = tuple[int, int]
"""(rank, 0 or 1)."""

Task = tuple[Stream, int, Program]
"""A program: (stream, launch, index)."""

ACQUIRES = ("acquire", "acquire_release")
RELEASES = ("release", "acquire_release")
NOBODY = -1
MAX_FINDINGS = 20


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
    """A load or a store: which program's, the how manieth, and where in its code."""

    task: Task
    time: int
    kind: str
    where: str

    def __str__(self) -> str:
        (rank, second), launch, program = self.task
        beside = " beside" if second else ""
        return (
            f"{self.kind} by rank {rank} (launch {launch}{beside}, program {program}) "
            f"at {self.where}"
        )


@dataclass(slots=True)
class _Watched:
    """One rank's symmetric tensor: for each element the event that last touched it.

    Attributes:
        seen: of a word that carries its own signal, who first loaded what is there now.
    """

    start: int
    end: int
    rank: int
    name: str
    itemsize: int
    writer: Int32
    readers: dict[int, Int32]
    seen: Int32
    initialised: npt.NDArray[np.bool_]


class RaceDetector:
    """Told of everything that the ranks do; `findings` is what is wrong with it."""

    def __init__(self) -> None:
        self.findings: list[str] = []
        self._watched: list[_Watched] = []
        self._events: list[Event] = []
        self._host: dict[int, Clock] = {}  # of the stream that the rank launches on
        self._other: dict[int, Clock] = {}  # of its other stream
        self._stream: dict[int, Stream] = {}
        self._launch: dict[Stream, int] = {}
        self._now: dict[int, tuple[Task, Clock]] = {}
        self._after_launch: dict[int, Clock] = {}
        self._signals: dict[int, Clock] = {}
        self._carried: dict[int, Clock] = {}
        self._seen: set[tuple[str, str]] = set()

    def watch(self, rank: int, tensor: SymmetricTensor) -> None:
        """Look at all accesses to a tensor from now on."""
        local = tensor.local
        start, count = local.data_ptr(), local.numel()
        self._watched.append(
            _Watched(
                start=start,
                end=start + local.nbytes,
                rank=rank,
                name=tensor.name,
                itemsize=local.element_size(),
                writer=np.full(count, NOBODY, np.int32),
                readers={},
                seen=np.full(count, NOBODY, np.int32),
                initialised=np.zeros(count, bool),
            )
        )

    def written_by_host(self, tensor: SymmetricTensor) -> None:
        """All of it holds something."""
        for watched in self._watched:
            if watched.start == tensor.local.data_ptr():
                watched.initialised[:] = True

    def met(self) -> None:
        """All ranks were in one place on the host: what was before is over for everyone."""
        together = Clock()
        for clock in (*self._host.values(), *self._other.values()):
            together.join(clock)
        for rank in self._host:
            self._host[rank] = together.copy()

    def fork(self, rank: int) -> None:
        """The rank's next launches are beside the first stream, after what is there."""
        first = self._host.setdefault(rank, Clock())
        second = self._other.get(rank, Clock())
        second.join(first)
        self._host[rank], self._other[rank] = second, first
        self._stream[rank] = (rank, 1)

    def back(self, rank: int) -> None:
        """The rank launches on the first stream again."""
        self._host[rank], self._other[rank] = self._other[rank], self._host[rank]
        self._stream[rank] = (rank, 0)

    def join(self, rank: int) -> None:
        """The first stream goes on after the second."""
        self._host[rank].join(self._other.get(rank, Clock()))

    def launched(self, rank: int) -> None:
        """A kernel is launched, knowing what its stream knows."""
        self._host.setdefault(rank, Clock())
        stream = self._stream.setdefault(rank, (rank, 0))
        self._launch[stream] = self._launch.get(stream, -1) + 1
        self._after_launch[rank] = self._host[rank].copy()

    def finished(self, rank: int) -> None:
        """The stream goes on knowing what each program knew."""
        self._end_program(rank)
        stream, clock = self._stream[rank], self._after_launch.pop(rank)
        clock.launches[stream] = self._launch[stream] + 1
        clock.tasks = {task: time for task, time in clock.tasks.items() if task[0] != stream}
        self._host[rank] = clock

    def program(self, rank: int, index: Program) -> None:
        """A program begins, knowing what was known at the launch."""
        self._end_program(rank)
        stream = self._stream[rank]
        task = (stream, self._launch[stream], index)
        clock = self._host[rank].copy()
        clock.tasks[task] = 0
        self._now[rank] = (task, clock)

    def _end_program(self, rank: int) -> None:
        if rank in self._now:
            _, clock = self._now.pop(rank)
            self._after_launch[rank].join(clock)

    def access(self, rank: int, kind: Kind, addresses: Array, itemsize: int) -> None:
        if rank not in self._now or not len(addresses):
            return
        task, clock = self._now[rank]
        event = Event(task, clock.tasks[task], kind, interpreter.where())
        number = NOBODY
        for watched in self._watched:
            inside = addresses[(addresses >= watched.start) & (addresses < watched.end)]
            if not len(inside):
                continue
            if number == NOBODY:
                number = len(self._events)
                self._events.append(event)
            cells = np.unique((inside - watched.start).astype(np.int64) // watched.itemsize)
            self._check(watched, cells, event, clock)
            if kind == "store":
                watched.writer[cells] = number
                watched.initialised[cells] = True
            else:
                readers = watched.readers.setdefault(
                    rank, np.full(len(watched.writer), NOBODY, np.int32)
                )
                readers[cells] = number

    def atomic(
        self, rank: int, address: int, itemsize: int, sem: str, scope: str, *, changed: bool
    ) -> None:
        """Signals: a release adds what its program knows; an acquire takes what was added."""
        if rank not in self._now:
            return
        watched = next((w for w in self._watched if w.start <= address < w.end), None)
        if watched is None:
            return
        task, clock = self._now[rank]
        signal = self._signals.setdefault(address, Clock())
        if sem in ACQUIRES and scope == "system":
            clock.join(signal)
        if changed and sem in RELEASES and scope == "system":
            signal.join(clock)
            clock.tasks[task] += 1
        elif changed and watched.rank != rank:
            self._report(
                f"{watched.name} of rank {watched.rank}: a signal to another rank is {sem} with "
                f"scope {scope}; it orders nothing there unless it is a release with scope sys",
                interpreter.where(),
            )

    def words(self, rank: int, kind: Kind, addresses: Array, itemsize: int) -> None:
        """Words that carry their own signal (gpu/low_latency.py) are loaded or stored.

        They may be loaded while they are stored: their flags tell. But what is in one may be
        stored over only by who knows that it has been loaded. Between the ends of launches they
        order, too: after the launch that loads a word comes what is after all the launches before
        the one that stored it.
        """
        if rank not in self._now or not len(addresses):
            return
        task, clock = self._now[rank]
        number = len(self._events)
        self._events.append(Event(task, clock.tasks[task], kind, interpreter.where()))
        if kind == "store":
            self._carried[number] = self._host[rank].copy()
        for watched in self._watched:
            inside = addresses[(addresses >= watched.start) & (addresses < watched.end)]
            cells = np.unique((inside - watched.start).astype(np.int64) // watched.itemsize)
            if kind == "store":
                self._check_stored_over(watched, cells, self._events[number], clock)
                watched.writer[cells] = number
                watched.seen[cells] = NOBODY
                watched.initialised[cells] = True
            else:
                for writer in _distinct(watched.writer[cells]):
                    if writer in self._carried:
                        self._after_launch[rank].join(self._carried[writer])
                first = (watched.writer[cells] != NOBODY) & (watched.seen[cells] == NOBODY)
                watched.seen[cells[first]] = number

    def _check_stored_over(
        self, watched: _Watched, cells: Array, event: Event, clock: Clock
    ) -> None:
        cells = cells[watched.writer[cells] != NOBODY]
        unseen = cells[watched.seen[cells] == NOBODY]
        if len(unseen):
            self._report(
                f"{watched.name}[{int(unseen[0])}] of rank {watched.rank} is stored over before "
                f"anyone has loaded it: {event}",
                event.where,
            )
        for number in _distinct(watched.seen[cells]):
            other = self._events[number]
            if other.task != event.task and not clock.knows(other):
                cell = int(cells[watched.seen[cells] == number][0])
                self._report(
                    f"{watched.name}[{cell}] of rank {watched.rank}: no order between\n"
                    f"    {other}\n    {event}",
                    f"{other.where} {event.where}",
                )

    def _check(self, watched: _Watched, cells: Array, event: Event, clock: Clock) -> None:
        if event.kind == "load" and not watched.initialised[cells].all():
            first = int(cells[~watched.initialised[cells]][0])
            self._report(
                f"{watched.name}[{first}] of rank {watched.rank} is loaded, and nothing was ever "
                f"stored there: {event}",
                event.where,
            )
        columns = [watched.writer]
        if event.kind == "store":
            columns += watched.readers.values()
        for column in columns:
            for number in _distinct(column[cells]):
                other = self._events[number]
                if other.task != event.task and not clock.knows(other):
                    cell = int(cells[column[cells] == number][0])
                    self._report(
                        f"{watched.name}[{cell}] of rank {watched.rank}: no order between\n"
                        f"    {other}\n    {event}",
                        f"{other.where} {event.where}",
                    )

    def _report(self, message: str, places: str) -> None:
        """Once for each pair of places, and not without end."""
        key = (message.split("[")[0], places)
        if key not in self._seen and len(self.findings) < MAX_FINDINGS:
            self._seen.add(key)
            self.findings.append(message)


def _distinct(numbers: Int32) -> Iterable[int]:
    return (int(number) for number in np.unique(numbers) if number != NOBODY)
