"""Virtual ranks: threads of this process on one GPU, or in Triton's interpreter.

On a GPU, a kernel that waits holds its processors until another rank's kernel
has run. So nothing may come between them that needs the device to be idle, and
all that wait must leave room for those that send:

- every thread has a stream of its own, for a stream runs one kernel after the
  other, and torch's default stream is one for all threads;
- kernels are compiled and loaded, and results allocated, before any rank runs
  (`prepare`): loading a module or allocating may block behind a waiting kernel;
- a rank's share of the device is its home's `processors`;
- nobody synchronises the device, reads a result or allocates while kernels of
  another rank may wait: results are read after all ranks have launched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from weft.kernels.gpu.runtime.launches import loaded
from weft.kernels.gpu.runtime.workspace import Workspace
from weft.kernels.symmetric.memory import Home, SymmetricMemoryError
from weft.kernels.symmetric.virtual import VirtualHome, VirtualWorld

Result = TypeVar("Result")

TIMEOUT = 240.0
"""Seconds that a rank waits for the others on the host: they compile in turns."""


class Meeting:
    """Where the threads wait for each other; one that fails ends the others' waiting."""

    def __init__(self, world_size: int) -> None:
        self._barrier = threading.Barrier(world_size, timeout=TIMEOUT)

    def meet(self, rank: int) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise SymmetricMemoryError(f"rank {rank} waited for one that has failed") from error

    def abort(self) -> None:
        self._barrier.abort()


def run(work: Callable[[Home], Result], world_size: int, *, tiny: bool) -> list[Result]:
    """Call `work` with the home of each rank, in a thread each; their results, by rank.

    Raises:
        Exception: what a rank raised first.
    """
    if tiny:
        from weft.kernels.check import ranks

        return ranks.run(work, world_size)
    return _on_gpu(work, world_size)


def _on_gpu(work: Callable[[Home], Result], world_size: int) -> list[Result]:
    device = torch.device("cuda", torch.cuda.current_device())
    meeting = Meeting(world_size)
    world = VirtualWorld(world_size, meeting, str(device))
    results: dict[int, Result] = {}
    errors: list[BaseException] = []
    streams = [torch.cuda.Stream(device) for _ in range(world_size)]  # type: ignore[no-untyped-call]

    def body(rank: int) -> None:
        try:
            with (
                torch.cuda.device(device),
                torch.cuda.stream(streams[rank]),
                VirtualHome(world, rank) as home,
            ):
                results[rank] = work(home)
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
            errors.append(error)
            meeting.abort()

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    torch.cuda.empty_cache()  # of streams that the next ranks will not have
    return [results[rank] for rank in range(world_size)]


def prepare(home: Home, calls: Sequence[Callable[[], object]]) -> None:
    """Load the kernels of calls, and allocate what they return. Collective.

    The first rank compiles, and the others find it done: no kernel is specialised for a rank.
    """
    for turn in (range(1), range(1, home.world_size)):
        if home.rank in turn:
            with loaded():
                kept = [call() for call in calls]  # all at once, as they will be
            del kept
        home.exchange("loaded")
    home.barrier()


SET = 1 << 62
"""A signal that no call waits beyond."""


def alone(
    work: Callable[[Home, list[Workspace]], Result],
    make: Sequence[Callable[[Home], Workspace]],
    world_size: int,
    processors: int,
    *,
    tiny: bool,
) -> Result:
    """What `work` says on the first of so many ranks, while the others wait.

    Args:
        work: of the home and the workspaces, in which all that the others send has come.
        make: the workspaces, on every rank.
        processors: that the rank may fill.
    """

    def on_rank(home: Home) -> list[Result]:
        workspaces = [each(home) for each in make]
        home.barrier()
        result = []
        if home.rank == 0:
            for workspace in workspaces:
                receive_all(workspace, processors)
            result.append(work(home, workspaces))
            for workspace in workspaces:
                workspace.check()
        home.exchange("measured")
        return result

    return run(on_rank, world_size, tiny=tiny)[0][0]


def receive_all(workspace: Workspace, processors: int) -> None:
    """As if all ranks had sent something, for all calls to come: this one may go on alone."""
    workspace.compare = lambda value: [value] * workspace.world_size
    workspace.processors = processors
    workspace.concurrent = False  # nothing is waited for
    workspace.buffer.local.normal_()
    workspace.signals.local.fill_(SET)
