"""Progress on stderr: a bar on a terminal, else log lines.

On a terminal, rich draws a bar with the count, the rate and the remaining time. Otherwise a plain
line appears every ten seconds. Nothing is written to stdout.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from weft.models.memory.ledger import human_bytes

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

LINE_EVERY = 10.0  # seconds between two log lines

CompileProgress = Callable[[str, int, int], None]

logger = logging.getLogger(__name__)


class Progress:
    """Counter for items and output tokens. Use it in a `with` statement to show it.

    Args:
        title: name of the work.
        total: number of items.
        unit: name for items.
        quiet: count without showing anything.
    """

    def __init__(
        self, title: str, total: int, *, unit: str = "requests", quiet: bool = False
    ) -> None:
        self.title, self.total, self.unit, self.quiet = title, total, unit, quiet
        self.done = self.tokens = 0
        self.started = self._last_line = time.monotonic()
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self.started = self._last_line = time.monotonic()
        if not self.quiet and sys.stderr.isatty():
            self._bar = _bar()
            self._task = self._bar.add_task(self.title, total=self.total, rate="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    @property
    def rate(self) -> float:
        """Output tokens per second since the start."""
        return self.tokens / max(self.seconds, 1e-9)

    def advance(self, tokens: int) -> None:
        """Count a finished item and its output tokens."""
        self.done += 1
        self.tokens += tokens
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self.done, rate=f"{self.rate:,.0f} tokens/s")
        elif not self.quiet and time.monotonic() - self._last_line >= LINE_EVERY:
            self._last_line = time.monotonic()
            left = self.seconds / self.done * (self.total - self.done)
            print(
                f"{self.title}: {self.done}/{self.total} {self.unit}, "
                f"{self.rate:.0f} tokens/s, {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )


class ByteProgress:
    """Progress display for a transfer in bytes, for a `with` statement.

    It appears at the first call to `set`.

    Args:
        title: name of the work.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._started = self._last_line = time.monotonic()
        self._first: int | None = None
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def set(self, done: int, total: int) -> None:
        """Show that `done` of `total` bytes have arrived."""
        if self._first is None:
            self._first = done
            self._started = self._last_line = time.monotonic()
            if sys.stderr.isatty():
                self._bar = _byte_bar()
                self._task = self._bar.add_task(self.title, total=total)
                self._bar.start()
            else:
                self._write(human_bytes(total))
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total)
        elif time.monotonic() - self._last_line >= LINE_EVERY:
            self._last_line = time.monotonic()
            rate = (done - self._first) / max(time.monotonic() - self._started, 1e-9)
            left = (total - done) / rate if rate else math.inf
            amount = f"{human_bytes(done)} of {human_bytes(total)}"
            self._write(f"{amount}, {human_bytes(int(rate))}/s, {left:.0f} s left")

    def _write(self, text: str) -> None:
        print(f"{self.title}: {text}", file=sys.stderr, flush=True)


@contextmanager
def show_compiling(unit: str) -> Iterator[CompileProgress]:
    """Show on stderr how many are compiled: a bar on a terminal, else log lines.

    Args:
        unit: "programs" or "kernels".

    Yields:
        a function to call with a program's name, the number of compiled ones, and of all.
    """
    if not sys.stderr.isatty():
        yield compile_lines(unit)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("compiling"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True) as bar:
        task: Any = None

        def progress(name: str, done: int, total: int) -> None:
            nonlocal task
            if task is None:
                task = bar.add_task(name, total=total)
            bar.update(task, description=name, completed=done, total=total)

        yield progress


def compile_lines(unit: str) -> CompileProgress:
    """Return a function that logs how many are compiled; see `show_compiling`."""
    last = begin = time.monotonic()

    def progress(name: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done == total:
            logger.info("compiled %d %s in %.1f s", total, unit, now - begin)
        elif now - last >= LINE_EVERY:
            last = now
            logger.info("compiling: %d of %d %s%s", done, total, unit, name and f": {name}")

    return progress


def _bar() -> Bar:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def _byte_bar() -> Bar:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
