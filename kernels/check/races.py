"""Finds races: accesses to a tensor, by ranks, streams or programs, without an order between them.

Watched are symmetric tensors, and all other tensors that a kernel is given. Of these plain ones
only their rank's programs know the address. A plain tensor is watched from the first launch that
gets it, with its whole storage; torch's operators on it count from then on, and not before.

Every program in a launch counts as its own thread, as on a GPU, whatever order the interpreter
used. Order comes from four sources (vector clocks: clocks.py):

- A rank's launches on one stream follow each other: a program comes after all programs in earlier
  launches. Launches made beside are on a second stream until the streams join or one waits for an
  event of the other (Home.beside, rejoin, wait_event), although the interpreter runs them at once.
- A release on a signal, and every acquire that sees it or a later value. Their scope must be the
  system; in a plain tensor, which only one GPU has, the GPU is enough.
- A put over the network, its signal, and a quiet (network.py).
- A home's barrier, which also waits for the device.

Two accesses to the same bytes, at least one of them a store, are a race if their programs have no
order, even if the values came out right. So are an atomic and a plain access, if one of them
changes the value. Also reported, in symmetric memory alone: loads of memory before any store,
accesses just outside a tensor, signals that order nothing because they are relaxed or reach only
this GPU, and signals set again too early.

Each cell keeps enough to find the first race on it (FastTrack, sections 3 and 4). Of the stores, it
keeps the last one: earlier stores are ordered before it, or a race was found then. Any access
unordered with an earlier store is therefore unordered with the last one. Of the loads, it keeps all
that are not ordered before another kept load. There may be one from each program, and a store must
come after every one of them. A store drops them and stands for them from then on. Atomics are kept
like loads. Accesses within one program are in order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from weft.kernels.check.clocks import (
    NETWORK,
    READS_SOURCE,
    SETS_SIGNAL,
    STORES_DATA,
    Access,
    Clock,
    Event,
    Put,
    Stream,
    Task,
)
from weft.kernels.interpreter import gpu as interpreter
from weft.kernels.interpreter.gpu import Array, Atomic, Kind, Program
from weft.kernels.symmetric.memory import SymmetricTensor

Int32 = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]

CONFLICTS: dict[Access, tuple[Access, ...]] = {
    "load": ("store", "atomic"),
    "store": ("store", "load", "atomic", "poll", "take"),
    "atomic": ("store", "load"),
    "poll": ("store",),
    "take": ("store",),
}
"""Earlier accesses with which each kind of access needs an order."""

ACQUIRES = ("acquire", "acquire_release")
RELEASES = ("release", "acquire_release")
NOBODY = -1
MAX_FINDINGS = 20

GUARD = 1 << 16
"""Bytes before and after each tensor that belong to nobody."""


@dataclass(slots=True)
class _WatchedTensor:
    """One rank's tensor, and the last accesses to each of its elements.

    Attributes:
        start, end: its addresses.
        guard: bytes before and after it that belong to nobody.
        rank, name, itemsize: its owner, name and element size.
        plain: the tensor, if it is not symmetric: while it lives, no other gets its addresses.
        launches: launches with accesses, if it is plain.
        last: for each kind of access, columns of event numbers; an element's entries are the events
            without a later one among them.
        polling: for each rank, its running program's load of words with their own signal. The
            program may still find that they have not arrived, and load them again.
        initialised: elements with a store so far.
    """

    start: int
    end: int
    guard: int
    rank: int
    name: str
    itemsize: int
    plain: Tensor | None
    launches: set[tuple[Stream, int]]
    last: dict[Access, list[Int32]]
    polling: dict[int, Int32]
    initialised: Bools

    def column(self) -> Int32:
        """Return a column without events."""
        return np.full(len(self.initialised), NOBODY, np.int32)


@dataclass(slots=True)
class _PendingOverwrite:
    """Words that were overwritten after a running program had loaded them.

    It is a race unless the program loads them again, because then it did not take these words.
    """

    watched: _WatchedTensor
    cells: Array
    take: int
    store: Event


class RaceDetector:
    """Receives every operation of the ranks.

    Attributes:
        findings: the problems.
        plain: by address, the storages of tensors that kernels were given, without symmetric ones.
    """

    def __init__(self) -> None:
        self.findings: list[str] = []
        self.plain: dict[int, _WatchedTensor] = {}
        self._watched: list[_WatchedTensor] = []  # by address
        self._starts: list[int] = []  # of the bytes before them
        self._polled: dict[int, list[_WatchedTensor]] = {}  # by the loading program's rank
        self._events: list[Event] = []
        self._host: dict[int, Clock] = {}  # clock of the rank's current stream
        self._other: dict[int, Clock] = {}  # clock of its other stream
        self._stream: dict[int, Stream] = {}
        self._launch: dict[Stream, int] = {}
        self._now: dict[int, tuple[Task, Clock]] = {}
        self._after_launch: dict[int, Clock] = {}
        self._signals: dict[int, Clock] = {}
        self._barriers: list[Clock] = []
        self._arrivals: dict[int, int] = {}
        self._carried: dict[int, Clock] = {}
        self._pending: dict[int, list[_PendingOverwrite]] = {}  # by the loading program's rank
        self._puts: list[Put] = []
        self._seen: set[tuple[str, str]] = set()

    def watch(self, rank: int, tensor: SymmetricTensor) -> None:
        """Check all accesses to a tensor from now on, and to GUARD bytes on either side."""
        start, local = int(tensor.addresses[rank]), tensor.local
        uninitialised = np.zeros(local.numel(), bool)
        self._add(start, local, GUARD, rank, tensor.name, uninitialised)

    def _watch_plain(self, rank: int, name: str, tensor: Tensor) -> None:
        """Check all accesses to a tensor's storage from now on, unless it is symmetric.

        Nobody tells which of its elements have a number, so all count as initialised.
        """
        storage = tensor.untyped_storage()
        watched = self.plain.get(storage.data_ptr())
        if watched is not None:
            self._forget_known(rank, watched)
        elif tensor.numel() and not self._near(np.array([tensor.data_ptr()], np.uint64), 1):
            whole = tensor.new_empty(0).set_(storage)
            initialised = np.ones(whole.numel(), bool)
            self.plain[storage.data_ptr()] = self._add(
                *(storage.data_ptr(), whole, 0, rank, name, initialised)
            )

    def _forget_known(self, rank: int, watched: _WatchedTensor) -> None:
        """Drop a plain tensor's accesses if all are known to the first stream, and so to whatever
        the rank launches from now on.
        """
        beside = self._stream[rank] != (rank, 0)
        known = (self._other if beside else self._host)[rank].launches
        if all(known.get(stream, 0) > launch for stream, launch in watched.launches):
            watched.launches.clear()
            for columns in watched.last.values():
                columns.clear()

    def _add(
        self, start: int, tensor: Tensor, guard: int, rank: int, name: str, initialised: Bools
    ) -> _WatchedTensor:
        watched = _WatchedTensor(
            start=start,
            end=start + tensor.nbytes,
            guard=guard,
            rank=rank,
            name=name,
            itemsize=tensor.element_size(),
            plain=None if guard else tensor,
            launches=set(),
            last={"load": [], "store": [], "atomic": [], "poll": [], "take": []},
            polling={},
            initialised=initialised,
        )
        at = bisect_right(self._starts, start - guard)
        self._starts.insert(at, start - guard)
        self._watched.insert(at, watched)
        return watched

    def arrived(self, rank: int) -> None:
        """A rank reached a barrier, with all its launches."""
        number = self._arrivals[rank] = self._arrivals.get(rank, 0) + 1
        if number > len(self._barriers):
            self._barriers.append(Clock())
        for clocks in (self._host, self._other):
            self._barriers[number - 1].join(clocks.setdefault(rank, Clock()))

    def met(self, rank: int) -> None:
        """All ranks reached the rank's last barrier; everything before is over for it."""
        self._host[rank].join(self._barriers[self._arrivals[rank] - 1])

    def fork(self, rank: int) -> None:
        """The rank's next launches are beside the first stream, after its current launches."""
        first = self._host.setdefault(rank, Clock())
        second = self._other.get(rank, Clock())
        second.join(first)
        self._host[rank], self._other[rank] = second, first
        self._stream[rank] = (rank, 1)

    def unfork(self, rank: int) -> None:
        """The rank launches on the first stream again."""
        self._host[rank], self._other[rank] = self._other[rank], self._host[rank]
        self._stream[rank] = (rank, 0)

    def join(self, rank: int) -> None:
        """The first stream waits for the second."""
        self._host[rank].join(self._other.get(rank, Clock()))

    def recorded(self, rank: int) -> object:
        """Return an event: what the rank's current stream knows after its launches so far."""
        return self._host.setdefault(rank, Clock()).copy()

    def waited(self, rank: int, event: object) -> None:
        """The rank's current stream waits for an event."""
        assert isinstance(event, Clock)
        self._host.setdefault(rank, Clock()).join(event)

    def launched(self, rank: int, tensors: Mapping[str, Tensor]) -> None:
        """A kernel is launched on these tensors, by name, with its stream's knowledge."""
        self._host.setdefault(rank, Clock())
        stream = self._stream.setdefault(rank, (rank, 0))
        for name, tensor in tensors.items():
            self._watch_plain(rank, name, tensor)
        self._launch[stream] = self._launch.get(stream, -1) + 1
        self._after_launch[rank] = self._host[rank].copy()

    def finished(self, rank: int) -> None:
        """The stream continues with every program's knowledge."""
        self._end_program(rank)
        stream, clock = self._stream[rank], self._after_launch.pop(rank)
        clock.launches[stream] = self._launch[stream] + 1
        clock.tasks = {task: time for task, time in clock.tasks.items() if task[0] != stream}
        self._host[rank] = clock

    def program(self, rank: int, index: Program) -> None:
        """A program begins, with the launch's knowledge."""
        self._end_program(rank)
        stream = self._stream[rank]
        task = (stream, self._launch[stream], index)
        clock = self._host[rank].copy()
        clock.tasks[task] = 0
        self._now[rank] = (task, clock)

    def _end_program(self, rank: int) -> None:
        if rank not in self._now:
            return
        _, clock = self._now.pop(rank)
        self._after_launch[rank].join(clock)
        for overwrite in self._pending.pop(rank, ()):
            self._report_pair(overwrite.watched, overwrite.cells, overwrite.take, overwrite.store)
        for watched in self._polled.pop(rank, ()):
            column = watched.polling.pop(rank)
            for number in _distinct(column):
                self._remember(watched, "take", np.flatnonzero(column == number), number, clock)

    def access(self, rank: int, kind: Kind, addresses: Array, itemsize: int) -> None:
        """A load or a store is about to happen: uint64 addresses [n]."""
        assert kind != "atomic"
        if rank in self._now and (near := self._near(addresses, itemsize)):
            self._access(self._event(rank, kind), self._now[rank][1], near)

    def _access(self, event: Event, clock: Clock, near: list[tuple[_WatchedTensor, Array]]) -> None:
        """Check and record a load or a store by a program with this clock."""
        number = self._add_event(event)
        for watched, places in near:
            cells = self._cells(watched, places, number)
            self._check(watched, cells, number, clock)
            self._record(watched, cells, number, clock)

    def atomic(self, rank: int, atomic: Atomic) -> None:
        """A signal: a release adds its program's knowledge; an acquire takes that knowledge."""
        if rank not in self._now:
            return
        task, clock = self._now[rank]
        address = np.array([atomic.address], np.uint64)
        for watched, places in self._near(address, atomic.itemsize):
            signal = self._signals.setdefault(atomic.address, Clock())
            reaches = atomic.scope == "system" or (
                watched.plain is not None and atomic.scope == "gpu"
            )
            if atomic.sem in ACQUIRES and reaches:
                clock.join(signal)
            event = self._event(rank, "atomic" if atomic.changed else "poll")
            if not self._atomic(event, clock, watched, places, atomic):
                continue
            if atomic.changed and atomic.sem in RELEASES and reaches:
                signal.join(clock)
                clock.tasks[task] += 1
            elif atomic.changed and watched.rank != rank:
                self._report(
                    f"{watched.name} of rank {watched.rank}: a signal to another rank is "
                    f"{atomic.sem} with scope {atomic.scope}; it orders nothing there unless it is "
                    f"a release with scope sys",
                    interpreter.where(),
                )

    def _atomic(
        self, event: Event, clock: Clock, watched: _WatchedTensor, places: Array, atomic: Atomic
    ) -> bool:
        """Check and record an atomic by a program with this clock; return whether it is in the
        tensor.
        """
        number = self._add_event(event)
        cells = self._cells(watched, places, number)
        if not len(cells):
            return False
        self._check(watched, cells, number, clock, reads=not atomic.sets)
        if atomic.sets and atomic.changed:
            self._check_set_again(watched, cells, number, clock, atomic)
        self._record(watched, cells, number, clock)
        return True

    def _check_set_again(
        self, watched: _WatchedTensor, cells: Array, number: int, clock: Clock, atomic: Atomic
    ) -> None:
        """Check a signal that is set: it may only grow, so that waits for earlier values see it.

        The setter must know about the last set. This set then also ends a wait for the earlier
        value, and makes everything before either visible. Otherwise the two may come in any order,
        and one's wait may be ended by the other. Lowering a signal requires knowing that all waits
        are over. Adding to a signal takes nothing from its waits.
        """
        kinds: tuple[Access, ...] = ("atomic", "poll") if atomic.now < atomic.was else ("atomic",)
        for other in self._without_order(watched, kinds, cells, number, clock):
            what = "it was last set" if self._events[other].kind == "atomic" else "the last wait"
            self._report(
                f"{watched.name}[{int(cells[0])}] of rank {watched.rank} is reused: a signal that "
                f"is set from {atomic.was} to {atomic.now} with no order after {what}\n"
                f"    {self._events[other]}\n    {self._events[number]}",
                f"{self._events[other].where} {self._events[number].where}",
            )

    def put(self, rank: int, addresses: Array, signal: int) -> int:
        """The running program begins a put to these addresses; return the put's number."""
        task, clock = self._now[rank]
        number = len(self._puts)
        put = Put((rank, NETWORK), number, clock.copy(), interpreter.where())
        self._puts.append(put)
        clock.tasks[task] += 1
        return number

    def source_read(self, number: int, addresses: Array) -> None:
        """A put's source has been read."""
        put = self._puts[number]
        self._access(put.event(READS_SOURCE, "load"), put.clock, self._near(addresses, 1))

    def data_stored(self, number: int, addresses: Array) -> None:
        """A put's data is stored."""
        put = self._puts[number]
        self._access(put.event(STORES_DATA, "store"), put.clock, self._near(addresses, 1))

    def signalled(self, number: int, atomic: Atomic) -> None:
        """A put's signal is set; acquiring it implies the data, but not that the source is free."""
        put = self._puts[number]
        known = put.after(STORES_DATA, SETS_SIGNAL)
        address = np.array([atomic.address], np.uint64)
        for watched, places in self._near(address, atomic.itemsize):
            self._atomic(put.event(SETS_SIGNAL, "atomic"), known, watched, places, atomic)
        self._signals.setdefault(atomic.address, Clock()).join(known)

    def quiet(self, rank: int) -> None:
        """All the rank's puts have arrived."""
        _, clock = self._now[rank]
        for put in self._puts:
            if put.stream[0] == rank:
                clock.join(put.after(READS_SOURCE, STORES_DATA, SETS_SIGNAL))

    def words(self, rank: int, kind: Kind, addresses: Array, itemsize: int) -> None:
        """Words that carry their own signal (gpu/runtime/low_latency.py) are loaded or stored.

        They may be loaded while they are stored, because their flags tell. But a word may be
        overwritten only by a program that knows it has been taken. The last load by each loading
        program counts, because earlier loads were in vain or saw the same. Words also order across
        the ends of launches. Consider the launch that loads a word: whatever comes after it comes
        after all launches before the one that stored the word.
        """
        if rank not in self._now or not (near := self._near(addresses, itemsize)):
            return
        _, clock = self._now[rank]
        number = self._add_event(self._event(rank, "store" if kind == "store" else "take"))
        for watched, places in near:
            cells = self._cells(watched, places, number)
            writers = watched.last["store"][0][cells] if watched.last["store"] else None
            carried = np.zeros(len(cells), bool)
            for writer in () if writers is None else _distinct(writers):
                if writer in self._carried:
                    carried |= writers == writer
                    if kind == "load":
                        self._after_launch[rank].join(self._carried[writer])
            if kind == "store":
                self._carried[number] = self._host[rank].copy()
                self._check(watched, cells[~carried], number, clock)
                self._check_stored_over(watched, cells[carried], number, clock)
                self._record(watched, cells, number, clock)
            else:
                for overwrite in self._pending.get(rank, ()):
                    if overwrite.watched is watched:
                        overwrite.cells = np.setdiff1d(overwrite.cells, cells)
                self._check(watched, cells[~carried], number, clock, reads=True)
                if rank not in watched.polling:
                    watched.polling[rank] = watched.column()
                    self._polled.setdefault(rank, []).append(watched)
                watched.polling[rank][cells[carried]] = number

    def _check_stored_over(
        self, watched: _WatchedTensor, cells: Array, number: int, clock: Clock
    ) -> None:
        """Check words stored over words: the old ones were taken, and all takers are known."""
        store = self._events[number]
        taken = np.zeros(len(cells), bool)
        for column in watched.last["take"]:
            taken |= column[cells] != NOBODY
        for other in self._without_order(watched, ("take",), cells, number, clock):
            self._report_pair(
                watched, self._where_last(watched, "take", cells, other), other, store
            )
        pending = []
        for rank, column in watched.polling.items():
            for other in _distinct(column[cells]):
                here = column[cells] == other
                if self._in_order(other, number, clock):
                    taken |= here
                else:
                    pending.append((rank, other, here))
        for rank, other, here in pending:
            if not taken[here].all():  # without an order, taken or not
                self._report_pair(watched, cells[here & ~taken], other, store)
            overwrite = _PendingOverwrite(watched, cells[here & taken], other, store)
            self._pending.setdefault(rank, []).append(overwrite)
            taken |= here
        for column in watched.polling.values():
            column[cells] = NOBODY
        if not taken.all():
            self._report(
                f"{watched.name}[{int(cells[~taken][0])}] of rank {watched.rank} is stored over "
                f"before anyone has loaded it: {store}",
                store.where,
            )

    def _near(self, addresses: Array, itemsize: int) -> list[tuple[_WatchedTensor, Array]]:
        """Return the tensors at or near an access, with one address per element.

        Args:
            addresses: uint64 [n].
            itemsize: bytes at each address; may cover several elements.
        """
        if not len(addresses):
            return []
        near = []
        first, last = int(addresses.min()), int(addresses.max()) + itemsize
        for at in range(max(0, bisect_right(self._starts, first) - 1), len(self._watched)):
            watched = self._watched[at]
            start, end = watched.start - watched.guard, watched.end + watched.guard
            if last <= start:
                break
            places = addresses
            if itemsize > watched.itemsize:
                inside = np.arange(0, itemsize, watched.itemsize, dtype=np.uint64)
                places = (addresses[:, None] + inside).ravel()
            if first < start or last > end:
                places = places[(places >= start) & (places < end)]
            if len(places):
                near.append((watched, places))
        return near

    def _event(self, rank: int, kind: Access) -> Event:
        """Return the event for a rank's running program at this point."""
        task, clock = self._now[rank]
        return Event(task, clock.tasks[task], kind, interpreter.where())

    def _add_event(self, event: Event) -> int:
        """Store a new event; return its number."""
        self._events.append(event)
        return len(self._events) - 1

    def _cells(self, watched: _WatchedTensor, places: Array, number: int) -> Array:
        """Return the tensor's elements at these addresses; report addresses outside."""
        inside = (places >= watched.start) & (places < watched.end)
        if not inside.all():
            place = int(places[~inside][0])
            after = place - watched.end
            where = (
                f"{after} bytes after" if after >= 0 else f"{watched.start - place} bytes before"
            )
            event = self._events[number]
            self._report(
                f"{watched.name} of rank {watched.rank}: access outside, at {place:#x}, {where} "
                f"its {'end' if after >= 0 else 'beginning'}: {event}",
                event.where,
            )
            places = places[inside]
        cells = (places - watched.start).astype(np.int64) // watched.itemsize
        if (cells[1:] > cells[:-1]).all():  # mostly so, and faster than to sort them
            return cells
        return np.unique(cells)

    def _check(
        self,
        watched: _WatchedTensor,
        cells: Array,
        number: int,
        clock: Clock,
        *,
        reads: bool | None = None,
    ) -> None:
        """Report accesses without an order to this one, and `reads` of elements without a store."""
        event = self._events[number]
        if reads is None:
            reads = event.kind == "load"
        if reads and not watched.initialised[cells].all():
            first = int(cells[~watched.initialised[cells]][0])
            self._report(
                f"{watched.name}[{first}] of rank {watched.rank} is loaded, and nothing was ever "
                f"stored there: {event}",
                event.where,
            )
        for kind in CONFLICTS[event.kind]:
            for other in self._without_order(watched, (kind,), cells, number, clock):
                here = self._where_last(watched, kind, cells, other)
                self._report_pair(watched, here, other, event)

    def _record(self, watched: _WatchedTensor, cells: Array, number: int, clock: Clock) -> None:
        """Record this event as the last access to these elements."""
        event = self._events[number]
        if watched.plain is not None:
            watched.launches.add(event.task[:2])
        if event.kind == "store":
            for columns in watched.last.values():
                for column in columns:
                    column[cells] = NOBODY
        if event.kind in ("store", "atomic"):
            watched.initialised[cells] = True
        self._remember(watched, event.kind, cells, number, clock)

    def _remember(
        self, watched: _WatchedTensor, kind: Access, cells: Array, number: int, clock: Clock
    ) -> None:
        """Store an event among the last ones of its kind, replacing all earlier ones."""
        columns = watched.last[kind]
        for column in columns:
            for other in _distinct(column[cells]):
                if clock.knows(self._events[other]):
                    column[cells[column[cells] == other]] = NOBODY
        for column in columns:
            free = column[cells] == NOBODY
            column[cells[free]] = number
            cells = cells[~free]
        if len(cells):
            columns.append(watched.column())
            columns[-1][cells] = number

    def _without_order(
        self,
        watched: _WatchedTensor,
        kinds: Iterable[Access],
        cells: Array,
        number: int,
        clock: Clock,
    ) -> list[int]:
        """Return the last events of these kinds that are not known to be over."""
        columns = [column for kind in kinds for column in watched.last[kind]]
        others = {other for column in columns for other in _distinct(column[cells])}
        return sorted(other for other in others if not self._in_order(other, number, clock))

    def _in_order(self, other: int, number: int, clock: Clock) -> bool:
        event = self._events[other]
        return event.task == self._events[number].task or clock.knows(event)

    def _where_last(
        self, watched: _WatchedTensor, kind: Access, cells: Array, number: int
    ) -> Array:
        """Return the elements for which an event was the last of its kind."""
        return next(
            found for column in watched.last[kind] if len(found := cells[column[cells] == number])
        )

    def _report_pair(
        self, watched: _WatchedTensor, cells: Array, number: int, event: Event
    ) -> None:
        if len(cells):
            other = self._events[number]
            self._report(
                f"{watched.name}[{int(cells[0])}] of rank {watched.rank}: no order between\n"
                f"    {other}\n    {event}",
                f"{other.where} {event.where}",
            )

    def _report(self, message: str, places: str) -> None:
        """Report a finding once for each pair of places, up to MAX_FINDINGS."""
        key = (message.split("[")[0], places)
        if key not in self._seen and len(self.findings) < MAX_FINDINGS:
            self._seen.add(key)
            self.findings.append(message)


def _distinct(numbers: Int32) -> Iterable[int]:
    if len(numbers) and (numbers == numbers[0]).all():  # mostly so, and much faster
        return (int(numbers[0]),) if numbers[0] != NOBODY else ()
    return (int(number) for number in np.unique(numbers) if number != NOBODY)
