"""Kernels compiled in threads before they are needed.

Launches that do not run only tell Triton what to compile. Its AsyncCompileMode collects that, each
kernel once. Triton makes the keys of its caches from these launches, as it does from real ones.
Most of the work is LLVM's and ptxas's, which Python's threads run side by side.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from triton import AsyncCompileMode

from weft.errors import WeftError
from weft.kernels.gpu.runtime.compilations import Compilations
from weft.kernels.gpu.runtime.launches import Action, decided

Progress = Callable[[int, int], None]
"""Called with the number of finished kernels, and of all."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """Result of `compile_ahead`.

    Attributes:
        kernels: number of kernels.
        compiled: how many of them were compiled; the others were in Triton's cache on disk.
        seconds: in all.
        failed: kernels that do not compile, and why.
    """

    kernels: int
    compiled: int
    seconds: float
    failed: dict[str, BaseException]


@dataclass(frozen=True, slots=True)
class _Job:
    """A kernel to compile.

    Attributes:
        kernel: its name.
        compile: compiles it.
        future: gets the result; Triton waits for it.
    """

    kernel: str
    compile: Callable[[], Any]
    future: Future[Any]

    def run(self) -> None:
        try:
            self.future.set_result(self.compile())
        except Exception as error:  # noqa: BLE001 - a compiler raises anything; `failed` tells it
            self.future.set_exception(error)


class _Collector(Executor):
    """Keeps compilations for later."""

    def __init__(self) -> None:
        self.jobs: list[_Job] = []
        self._kernel = ""

    def decide(self, kernel: str) -> Action:
        """See `launches.decided`."""
        self._kernel = kernel
        return "compile"

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See Executor."""
        job = _Job(self._kernel, lambda: fn(*args, **kwargs), Future())
        self.jobs.append(job)
        return job.future


def compile_ahead(
    launch: Callable[[], None],
    *,
    threads: int,
    progress: Progress = lambda done, total: None,
    share: tuple[int, int] = (0, 1),
) -> Ahead:
    """Compile the kernels that `launch` launches on this thread, for the active driver's device.

    The kernels do not run. A kernel that does not compile is left to its first real launch.

    Args:
        launch: calls ops; its tensors may be on the meta device.
        threads: number of threads.
        progress: called after each kernel.
        share: this process, and the number of processes with the same kernels and cache. Each one
            begins with another kernel, and later finds most of the others' in the cache.
    """
    started = time.monotonic()
    collector = _Collector()
    counter = Compilations(quiet=True)
    try:
        with AsyncCompileMode(collector, ignore_errors=True):
            try:
                with decided(collector.decide):
                    launch()
                first = len(collector.jobs) * share[0] // share[1]
                _run(collector.jobs[first:] + collector.jobs[:first], threads, progress)
            finally:
                for job in collector.jobs:  # at the end Triton waits for all of them
                    if not job.future.done():
                        job.future.set_exception(WeftError("compiling was stopped"))
    finally:
        counter.close()
    failed = {
        job.kernel: error for job in collector.jobs if (error := job.future.exception()) is not None
    }
    return Ahead(len(collector.jobs), counter.count, time.monotonic() - started, failed)


def _run(jobs: list[_Job], threads: int, progress: Progress) -> None:
    pool = ThreadPoolExecutor(threads, thread_name_prefix="compile")
    try:
        running = [pool.submit(job.run) for job in jobs]
        for done, _ in enumerate(as_completed(running), 1):
            progress(done, len(jobs))
    finally:
        pool.shutdown(cancel_futures=True)
