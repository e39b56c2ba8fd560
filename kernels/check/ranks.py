"""Runs overlapped kernels on N ranks in Triton's interpreter, taking turns by a seed.

Each rank is a thread, but only one thread runs at a time: it holds the turn. Before any memory
operation, it may lose the turn, by chance and by its rank's slowness. It always loses the turn on
polling an unchanged signal. A seed therefore names one interleaving, and can repeat it.

A rank polling in vain stalls until memory changes. If every unfinished rank is stalled or waits
at a meeting, none can continue: that is a hang, found without a clock. The report shows each rank's
wait, the rank that last set that signal, and the cycle of waits.

    results = run(lambda home: all_gather(..., home), world_size=4, seed=7)

Kernels must have been imported with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import random
import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import TypeVar

import numpy as np
import triton
from torch import Tensor

from weft.errors import WeftError
from weft.kernels.check.network import Network
from weft.kernels.check.races import GUARD, RaceDetector
from weft.kernels.interpreter import extern
from weft.kernels.interpreter import gpu as interpreter
from weft.kernels.interpreter.gpu import Array, Atomic, Kind, Program
from weft.kernels.interpreter.recording import note
from weft.kernels.symmetric.memory import SymmetricTensor
from weft.kernels.symmetric.virtual import VirtualHome, VirtualWorld

Result = TypeVar("Result")

SWITCH_PROBABILITY = 0.05
"""Probability of losing the turn before a memory operation."""


class HangError(WeftError):
    """Every rank waits; the message lists the waits."""


LOWEST_ADDRESS = 1 << 16
"""A process has no memory below this address; catches accesses at and after address 0."""


class AddressError(WeftError):
    """A load or a store at an invalid address."""


class RankError(WeftError):
    """A rank's own code failed; its error is the cause."""


class _Abandoned(BaseException):
    """Ends a rank's thread after another rank has failed."""


@dataclass(slots=True)
class _Rank:
    """One rank's thread: its current wait, and whether it has finished.

    Attributes:
        turn: a word in it gives it the turn.
        stalled: its wait, in words; None if it can run.
        signal: the address that it polls; None if it waits at a meeting.
        finished: whether it has finished.
        last_poll: address and place of its last poll.
        program: its running program.
    """

    turn: SimpleQueue[None] = field(default_factory=SimpleQueue)
    stalled: str | None = None
    signal: int | None = None
    finished: bool = False
    last_poll: tuple[int, str] | None = None
    program: Program | None = None

    @property
    def runnable(self) -> bool:
        return not self.finished and self.stalled is None


class Ranks:
    """The turn, and the ranks that may take it; also their meetings (virtual.Meeting).

    Args:
        world_size: number of ranks.
        seed: decides all choices.
        slowness: for each rank, how many times more rarely it gets the turn.
        races: receives every access; None skips race detection.

    Attributes:
        compared: what ranks compared, by the number of the comparison, then by rank.
    """

    def __init__(
        self,
        world_size: int,
        seed: int,
        slowness: Sequence[float] | None = None,
        races: RaceDetector | None = None,
    ) -> None:
        self._ranks = [_Rank() for _ in range(world_size)]
        self._random = random.Random(seed)
        self._weight = [1 / s for s in slowness or [1.0] * world_size]
        self._met = [0] * world_size
        self._setters: dict[int, int] = {}
        self.compared: dict[int, dict[int, str]] = {}
        self.races = races
        self.failure: BaseException | None = None
        self.memory = Memory()
        self.network = Network(self._random, self.memory, races, self.changed, self.has_set)

    def start(self) -> None:
        """Give the first turn to a rank."""
        self._ranks[self._choose()].turn.put(None)

    def enter(self, rank: int) -> None:
        """Wait for this rank's first turn."""
        self._wait(rank)

    def leave(self, rank: int) -> None:
        """End a rank; the turn passes on."""
        self._ranks[rank].finished = True
        ended = all(r.finished for r in self._ranks)
        while ended and self.failure is None and self.network.puts:
            self.network.deliver()  # although nobody waits for it
        if ended or self.failure is not None:
            self._release_all()
        else:
            self._pass_on(rank)

    def fail(self, rank: int, error: BaseException) -> None:
        """End all ranks, because this rank's code has failed."""
        if self.failure is None:
            self.failure = error
        self.leave(rank)

    def step(self, rank: int) -> None:
        """Perhaps pass the turn to another rank, before a memory operation."""
        state = self._ranks[rank]
        state.stalled = None
        self.network.step()
        if self._random.random() < SWITCH_PROBABILITY:
            self._pass_on(rank)
            self._wait(rank)

    def toss(self, count: int) -> Array:
        """Toss `count` coins: bool."""
        return np.array([self._random.random() < 0.5 for _ in range(count)], bool)

    def changed(self) -> None:
        """Wake all polling ranks, because memory has changed."""
        for state in self._ranks:
            if state.last_poll is not None:
                state.stalled = state.last_poll = None

    def polled(self, rank: int, address: int) -> None:
        """An atomic changed nothing; if the last one was the same, the rank waits."""
        state = self._ranks[rank]
        poll = (address, interpreter.where())
        if state.last_poll == poll:
            state.stalled = f"{self.memory.name(address)} at {poll[1]}, program {state.program}"
            state.signal = address
            self._pass_on(rank)
            self._wait(rank)  # until something has changed, which the next poll may see
        else:
            state.last_poll = poll

    def has_set(self, rank: int, addresses: Sequence[int]) -> None:
        """Remember the rank as these signals' last setter."""
        self._setters.update(dict.fromkeys(addresses, rank))

    def progressed(self, rank: int, program: Program | None = None) -> None:
        """The rank did something other than poll."""
        state = self._ranks[rank]
        state.last_poll = None
        if program is not None:
            state.program = program

    def meet(self, rank: int) -> None:
        """Wait until all ranks have met equally often."""
        self._met[rank] += 1
        while min(self._met) < self._met[rank]:
            self._ranks[rank].stalled = "the others, where ranks meet"
            self._ranks[rank].signal = None
            self._ranks[rank].last_poll = None
            self._pass_on(rank)
            self._wait(rank)
        for state in self._ranks:
            state.stalled = None  # they check again

    def _choose(self) -> int:
        while not (runnable := [i for i, r in enumerate(self._ranks) if r.runnable]):
            if not self.network.puts:
                raise HangError(self._describe_hang())
            self.network.deliver()
        return self._random.choices(runnable, [self._weight[i] for i in runnable])[0]

    def _pass_on(self, rank: int) -> None:
        try:
            chosen = self._choose()
        except HangError as hang:
            if self.failure is None:
                self.failure = hang
            self._release_all()
            return
        self._ranks[chosen].turn.put(None)

    def _wait(self, rank: int) -> None:
        self._ranks[rank].turn.get()
        if self.failure is not None:
            raise _Abandoned

    def _release_all(self) -> None:
        for state in self._ranks:
            state.turn.put(None)

    def _waits_for(self, rank: int) -> tuple[list[int], str]:
        """Return the ranks awaited by a waiting rank, if known, and a description."""
        state = self._ranks[rank]
        if state.finished:
            return [], ""
        if state.signal is None:
            late = [other for other, met in enumerate(self._met) if met < self._met[rank]]
            return late, f"not there: {', '.join(f'rank {other}' for other in late)}"
        setter = self._setters.get(state.signal)
        if setter is None:
            return [], "nobody has ever set it"
        return [setter], f"rank {setter} set it last"

    def _describe_hang(self) -> str:
        """Describe each rank's wait, the last setters, and the cycle."""
        lines = ["no rank can go on:"]
        waits: dict[int, list[int]] = {}
        for rank, state in enumerate(self._ranks):
            waits[rank], who = self._waits_for(rank)
            what = "has ended" if state.finished else f"waits for {state.stalled}; {who}"
            lines.append(f"  rank {rank} {what}")
        cycle = " waits for ".join(f"rank {rank}" for rank in _cycle(waits))
        lines.append(f"  the cycle: {cycle}" if cycle else "  no cycle is known")
        return "\n".join(lines)


def _cycle(waits: dict[int, list[int]]) -> list[int]:
    """Find a cycle of waits, as a list of ranks; empty if there is none."""
    visited: set[int] = set()

    def follow(path: list[int]) -> list[int]:
        if path[-1] in path[:-1]:
            return path[path.index(path[-1]) :]
        if path[-1] not in visited:
            for other in waits[path[-1]]:
                if found := follow([*path, other]):
                    return found
            visited.add(path[-1])
        return []

    return next((found for rank in waits if (found := follow([rank]))), [])


class Memory:
    """The ranks' symmetric tensors, by address."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._tensors: list[tuple[int, int, str, int, int]] = []
        self._multicast: dict[int, tuple[int, list[int]]] = {}
        self.storages: set[int] = set()
        self._of_rank: dict[int, list[Tensor]] = defaultdict(list)  # in the order of allocation

    def add(self, rank: int, tensor: SymmetricTensor) -> None:
        """Remember a rank's tensor."""
        local = tensor.local
        self.storages.add(local.untyped_storage().data_ptr())
        entry = (local.data_ptr(), local.nbytes, tensor.name, rank, local.element_size())
        at = bisect_right(self._starts, entry[0])
        self._starts.insert(at, entry[0])
        self._tensors.insert(at, entry)
        self._of_rank[rank].append(local)  # puts may arrive after the rank has ended

    def of_peer(self, rank: int, address: int, nbytes: int, peer: int) -> int:
        """Return a peer's address for a rank's address; 0 if it is not symmetric."""
        for mine, theirs in zip(self._of_rank[rank], self._of_rank[peer], strict=False):
            offset = address - mine.data_ptr()
            if offset >= 0 and offset + nbytes <= mine.nbytes:
                return theirs.data_ptr() + offset
        return 0

    def add_multicast(self, tensor: SymmetricTensor) -> None:
        """Remember a tensor's addresses on all ranks."""
        self._multicast[tensor.multicast] = (tensor.local.nbytes, tensor.addresses.tolist())

    def on_all_ranks(self, addresses: Array) -> list[Array]:
        """Resolve multicast addresses in one tensor to each rank's addresses."""
        if not len(addresses):
            return []
        for start, (nbytes, tensors) in self._multicast.items():
            if start <= int(addresses.min()) and int(addresses.max()) < start + nbytes:
                offset = addresses - np.uint64(start)
                return [offset + np.uint64(tensor) for tensor in tensors]
        raise RankError(f"{int(addresses.min()):#x} is no multicast address of a symmetric tensor")

    def name(self, address: int) -> str:
        """Return `name[element] of rank r`, or the address outside all tensors."""
        at = bisect_right(self._starts, address) - 1
        if at >= 0:
            start, nbytes, name, rank, itemsize = self._tensors[at]
            if address < start + nbytes:
                return f"{name}[{(address - start) // itemsize}] of rank {rank}"
        return hex(address)


class CheckedHome(VirtualHome):
    """A VirtualHome that names its allocations, with GUARD bytes between them. It tells the race
    detector what a GPU's streams and events would order.
    """

    def __init__(self, world: VirtualWorld, rank: int, ranks: Ranks) -> None:
        super().__init__(world, rank)
        self._ranks = ranks
        self._compared = 0

    @property
    def has_multicast(self) -> bool:
        return True

    def empty(self, name, shape, dtype):  # type: ignore[no-untyped-def]
        tensor = super().empty(name, shape, dtype)
        self._ranks.memory.add(self.rank, tensor)
        if tensor.addresses.all():
            multicast = extern.MULTICAST + int(tensor.addresses[0])
            tensor = replace(tensor, multicast=multicast)
            self._ranks.memory.add_multicast(tensor)
        if self._ranks.races is not None:
            self._ranks.races.watch(self.rank, tensor)
        self.barrier()  # nobody stores to a tensor before it is registered
        return tensor

    def barrier(self) -> None:
        races = self._ranks.races
        if races is not None:
            races.arrived(self.rank)
        super().barrier()
        if races is not None:
            races.met(self.rank)

    def compare(self, value: str) -> list[str]:
        """Return without waiting: one rank may be a call ahead of others, and tests must cover
        that. A rank that has not come here yet is taken to agree; it will see this value.
        """
        self._compared += 1
        values = self._ranks.compared.setdefault(self._compared, {})
        values[self.rank] = value
        return [values.get(rank, value) for rank in range(self.world_size)]

    @contextmanager
    def beside(self) -> Iterator[None]:
        self._tell(lambda races: races.fork(self.rank))
        yield
        self._tell(lambda races: races.unfork(self.rank))

    def rejoin(self) -> None:
        self._tell(lambda races: races.join(self.rank))

    def record_event(self) -> object:
        event: dict[str, object] = {}
        self._tell(lambda races: event.update(now=races.recorded(self.rank)))
        return event

    def wait_event(self, event: object) -> None:
        assert isinstance(event, dict)
        self._tell(lambda races: races.waited(self.rank, event["now"]))

    def _tell(self, step: Callable[[RaceDetector], object]) -> None:
        """Tell the race detector what the streams do, now and in each replay."""
        if (races := self._ranks.races) is not None:
            step(races)
            note(lambda: step(races))


class _RankObserver:
    """Observes one rank's kernels: takes turns, and reports to the race detector."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks = ranks
        self._rank = rank

    def launched(self, tensors: Mapping[str, Tensor]) -> None:
        if self._ranks.races is not None:
            self._ranks.races.launched(self._rank, tensors)

    def finished(self) -> None:
        if self._ranks.races is not None:
            self._ranks.races.finished(self._rank)

    def program(self, index: Program) -> None:
        self._ranks.progressed(self._rank, index)
        if self._ranks.races is not None:
            self._ranks.races.program(self._rank, index)

    def access(self, kind: Kind, addresses: Array, itemsize: int) -> None:
        if len(addresses) and addresses.min() < LOWEST_ADDRESS:
            raise AddressError(
                f"{kind} of {int(addresses.min()):#x} at {interpreter.where()}; that is in no "
                "memory of any rank: ranks on other nodes may have no address "
                "(gpu/runtime/nvshmem.py)"
            )
        self._ranks.step(self._rank)
        if kind == "atomic":
            return
        self._ranks.progressed(self._rank)
        if self._ranks.races is not None:
            self._ranks.races.access(self._rank, kind, addresses, itemsize)
        if kind == "store":
            self._ranks.changed()

    def atomics(self, atomics: Sequence[Atomic]) -> None:
        if self._ranks.races is not None:
            for atomic in atomics:
                self._ranks.races.atomic(self._rank, atomic)
        if changed := [atomic.address for atomic in atomics if atomic.changed]:
            self._ranks.has_set(self._rank, changed)
            self._ranks.progressed(self._rank)
            self._ranks.changed()
        elif atomics:  # the signal with the smallest value is late
            late = min(atomics, key=lambda atomic: atomic.was)
            self._ranks.polled(self._rank, late.address)

    def words(self, kind: Kind, addresses: Array, itemsize: int) -> None:
        if self._ranks.races is not None:
            self._ranks.races.words(self._rank, kind, addresses, itemsize)
        if kind == "store":
            self._ranks.has_set(self._rank, addresses.tolist())
            self._ranks.progressed(self._rank)
            self._ranks.changed()
        elif len(addresses):
            self._ranks.polled(self._rank, int(addresses[0]))

    def arrive_first(self, count: int) -> Array:
        return self._ranks.toss(count)

    def on_all_ranks(self, addresses: Array) -> Sequence[Array]:
        return self._ranks.memory.on_all_ranks(addresses)

    def watches(self, storage: int) -> bool:
        races = self._ranks.races
        return storage in self._ranks.memory.storages or (
            races is not None and storage in races.plain
        )

    def put(self, to: int, source: int, nbytes: int, signal: int, value: int, peer: int) -> None:
        if signal:
            self._ranks.step(self._rank)
            self._ranks.progressed(self._rank)
        else:  # the source is read before it returns
            self.access("load", np.arange(source, source + nbytes, dtype=np.uint64), 1)
        self._ranks.network.put(self._rank, to, source, nbytes, signal, value, peer)

    def fetched(self, signal: int, value: int) -> None:
        self.atomics([Atomic(signal, 8, "relaxed", "system", value, value, sets=False)])

    def waited(self, signal: int, value: int) -> None:
        self._ranks.progressed(self._rank)
        if self._ranks.races is not None:
            acquire = Atomic(signal, 8, "acquire", "system", value, value, sets=False)
            self._ranks.races.atomic(self._rank, acquire)

    def quiet(self) -> None:
        self._ranks.step(self._rank)
        self._ranks.progressed(self._rank)
        self._ranks.network.quiet(self._rank)


def run(
    work: Callable[[VirtualHome], Result],
    world_size: int,
    *,
    seed: int = 0,
    slowness: Sequence[float] | None = None,
    races: RaceDetector | None = None,
    ranks_per_node: int | None = None,
    by_number: bool = False,
) -> list[Result]:
    """Call `work` with each rank's home; return the results by rank.

    Args:
        work: one rank's work.
        world_size: number of ranks.
        seed: names the interleaving.
        slowness: for each rank, how many times more rarely it gets the turn; 1.0 for no slowness.
        races: collects findings; None skips race detection.
        ranks_per_node: ranks reach other nodes' ranks only by puts; None puts all ranks on one
            node.
        by_number: a launch's programs run by number. Otherwise the seed draws their order, unless
            they may wait for each other.

    Raises:
        HangError: all ranks wait.
        RankError: `work` raised on a rank; that error is the cause.
        ValueError: there are no ranks, or Triton was imported without its interpreter.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; it must be at least 1")
    if not triton.knobs.runtime.interpret:
        raise ValueError("set TRITON_INTERPRET=1 before weft.kernels.gpu is imported")
    ranks = Ranks(world_size, seed, slowness, races)
    world = VirtualWorld(world_size, ranks, guard=GUARD, ranks_per_node=ranks_per_node)
    results: dict[int, Result] = {}

    def body(rank: int) -> None:
        try:
            ranks.enter(rank)
            observer = _RankObserver(ranks, rank)
            numbers = random.Random(f"{seed} {rank}")

            def drawn(count: int) -> list[int]:
                return numbers.sample(range(count), count)

            interpreter.observe(observer, None if by_number else drawn)
            with CheckedHome(world, rank, ranks) as home, extern.HostOperators(observer):
                results[rank] = work(home)
            ranks.leave(rank)
        except _Abandoned:
            ranks.leave(rank)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is raised again below
            error.add_note(f"on rank {rank}")
            ranks.fail(rank, error)

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(world_size)]
    with interpreter.installed():
        for thread in threads:
            thread.start()
        ranks.start()
        for thread in threads:
            thread.join()
    if isinstance(ranks.failure, HangError):
        raise ranks.failure
    if ranks.failure is not None:
        raise RankError(f"{'; '.join(ranks.failure.__notes__)}: {ranks.failure}") from ranks.failure
    return [results[rank] for rank in range(world_size)]
